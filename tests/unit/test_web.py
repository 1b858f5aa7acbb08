"""Whoever is asked over HTTP sends nobody elsewhere, and fills no memory."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from isles.errors import UserError
from isles.launch.ray.jobs import RayJobs
from isles.outer.client.api import HubApi
from isles.outer.hub.server import fingerprint, make_identity
from isles.outer.messages import Heartbeat
from isles.plan.model import shape_of
from isles.run.join_line import JoinLine, ask_hub
from isles.run.web import MOST_BYTES
from tests.made_watch import running
from tests.model_hub import model_hub
from tests.outer_world import member_id
from tests.run_files import load

RUN = """\
name: t
model: {{name_or_path: o/{}}}
data: {{sources: [{{path: python-docs}}]}}
training: {{max_steps: 1}}
"""
ENDLESS, PART_BYTES = 3 * MOST_BYTES, 2**20


class Near(BaseHTTPRequestHandler):
    """A service of this machine, which only its users should reach."""

    heard: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.heard.append(f"{self.command} {self.path} {self.headers['Authorization']}")
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Not on the tests' stderr."""


class Odd(Near):
    """It redirects to `Near`, or says much more than anybody asked for."""

    status: ClassVar = 307
    near: ClassVar = ""
    protocol_version = "HTTP/1.1"
    timeout = 3.0  # of a write, if a client reads no more and has not hung up
    sent: ClassVar = 0
    """The most bytes of one answer; a cluster asks again."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.close_connection = True
        self.send_response(self.status)
        if 300 < self.status < 400:
            self.send_header("Location", f"{self.near}/admin?delete=1")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        part = f"{PART_BYTES:x}\r\n".encode() + b"x" * PART_BYTES + b"\r\n"
        for number in range(1, ENDLESS // PART_BYTES + 1):
            self.wfile.write(part)
            Odd.sent = max(Odd.sent, number * PART_BYTES)

    do_POST = do_GET


class QuietServer(ThreadingHTTPServer):
    """It says nothing where a client hangs up."""

    def handle_error(self, *_: object) -> None:
        """Clients that have heard enough hang up."""


def askers(tmp_path: Path, plain: str, line: JoinLine) -> dict[str, Callable[[], object]]:
    """Everything of isles that asks somebody over HTTP."""

    async def beat() -> None:
        async with HubApi(line, member_id("a")) as api:
            await api.heartbeat(Heartbeat(id=member_id("a"), step=1, version=0), 1.0)

    jobs = RayJobs(plain, ask_s=5.0)
    config = load(tmp_path, RUN.format("open")).config
    return {
        "a cluster asks its hub": lambda: asyncio.run(beat()),
        "a look asks a hub": lambda: ask_hub(line, "/v1/status", 5.0),
        "a launcher asks Ray": jobs.versions,
        "a launcher tells Ray": lambda: jobs.submit("new", "true"),
        "a plan asks Hugging Face": lambda: shape_of(config),
    }


@pytest.mark.parametrize("status", [302, 307, 308, 200, 409, 503])
def test_whoever_is_asked_sends_nobody_elsewhere_and_fills_no_memory(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_identity(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    wrong = []
    with (
        QuietServer(("127.0.0.1", 0), Near) as near,
        QuietServer(("127.0.0.1", 0), Odd) as plain,
        QuietServer(("127.0.0.1", 0), Odd) as packed,
        running(near),
        running(plain),
    ):
        packed.socket = context.wrap_socket(packed.socket, server_side=True)
        url = f"http://127.0.0.1:{plain.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf-token")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "ray-token")
        monkeypatch.setattr(Odd, "near", f"http://127.0.0.1:{near.server_port}")
        monkeypatch.setattr(Odd, "status", status)
        token = (tmp_path / "token").read_text().strip()
        line = JoinLine("127.0.0.1", packed.server_port, "t", token, fingerprint(tmp_path))
        with running(packed):
            for who, ask in askers(tmp_path, url, line).items():
                Odd.sent = 0
                Near.heard.clear()
                try:
                    ask()
                    wrong.append(f"{who}: takes it")
                except UserError as error:
                    if "xxxx" in str(error):
                        wrong.append(f"{who}: {error}")
                if Near.heard or Odd.sent >= ENDLESS:
                    wrong.append(f"{who}: {Near.heard} {Odd.sent} bytes")
    assert not wrong


def test_a_redirect_in_the_same_place_is_followed(tmp_path, monkeypatch):
    """Hugging Face sends readers of an old name to the new one."""
    with model_hub() as (url, asked):
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "hf-token")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        config = load(tmp_path, RUN.format("old")).config
        assert shape_of(config)
    assert [path for path, _ in asked] == [
        "/o/old/resolve/main/config.json",
        "/o/open/resolve/main/config.json",
    ]
    assert {token for _, token in asked} == {"Bearer hf-token"}
