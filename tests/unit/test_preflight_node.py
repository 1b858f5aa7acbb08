"""What nodes measure: against real sockets, real programs on PATH and a real HTTP server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from isles.check.node.files import files, probe_read, probe_remove, probe_write
from isles.check.node.gpus import gpus
from isles.check.node.machine import machine
from isles.check.node.network import Listener, bandwidth, reach, resolve
from isles.cli import main
from isles.config.load import load_run_file
from isles.errors import UserError
from isles.launch.hub import hub_faults
from tests.deadline import DEADLINE_S

_SMI = """\
#!{python}
import sys
query = sys.argv[1]
if query.startswith("--query-gpu=index"):
    print("0, NVIDIA RTX 5070 Ti, GPU-aa, 16303 MiB")
elif query.startswith("--query-gpu=uuid,name"):
    print("GPU-aa, NVIDIA RTX 5070 Ti, 570.86.10, 16303, 900, 71")
elif query.startswith("--query-gpu=uuid,ecc"):
    print("GPU-aa, [N/A], 0x0000000000000020")
elif query.startswith("--query-compute-apps"):
    print("GPU-aa, 4242, 880, /usr/bin/python, with a comma")
else:
    sys.exit(2)
"""


def test_gpus_as_the_driver_tells_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(_SMI.format(python=sys.executable))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (gpu,) = gpus({})["gpus"]
    assert gpu["driver"] == "570.86.10" and gpu["temperature"] == 71
    assert gpu["used_bytes"] == 900 << 20
    assert gpu["uncorrected"] == 0, "a card without ECC has no errors"
    assert gpu["throttle"] == "heat"
    assert gpu["users"] == [
        {"pid": 4242, "name": "/usr/bin/python, with a comma", "bytes": 880 << 20}
    ]
    assert gpu["failed_rows"] == 0, "a driver that does not know the question"


def test_ports_over_the_loopback() -> None:
    listener = Listener()
    ports = listener.listen({"port": 29850})
    second = Listener()
    others = second.listen({"port": 29850})
    assert others["run"] != ports["run"], "a port that is taken is not taken twice"
    second.unlisten({})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peer = {"name": "b", "address": "127.0.0.1", "ports": ports}
        shut = {**ports, "any": closed.getsockname()[1]}
        peers = [peer, {**peer, "name": "c", "ports": shut}]
        found = reach({"peers": peers, "timeout_s": 3, "mtu": 1500})
    assert found["b"]["run"] == found["b"]["any"] == "ok"
    assert 0 < found["b"]["rtt_s"] < 1 and found["b"]["source"] == "127.0.0.1"
    assert found["b"]["full_size"] is True and found["b"]["lost"] == 0
    assert found["c"]["run"] == "ok" and found["c"]["any"] == "refused"
    rate = bandwidth({"address": "127.0.0.1", "port": ports["any"], "seconds": 0.1})
    assert rate["bytes_per_s"] > 1e6
    listener.unlisten({})
    rate = bandwidth({"address": "127.0.0.1", "port": ports["any"], "seconds": 0.1})
    assert rate["bytes_per_s"] == 0 and "refused" in rate["fault"]


def test_a_hundred_taken_ports_are_an_error() -> None:
    taken = []
    try:
        for port in range(29_700, 29_800):
            with_port = socket.socket()
            taken.append(with_port)
            with_port.bind(("", port))
            with_port.listen()
        with pytest.raises(UserError, match="29700 to 29799"):
            Listener().listen({"port": 29_700})
    finally:
        for one in taken:
            one.close()


def test_names_and_this_machine() -> None:
    found = resolve({"names": ["localhost", "no-such-name.invalid"]})
    assert found["addresses"]["localhost"] == ["127.0.0.1"]
    assert not found["addresses"].get("no-such-name.invalid")
    own = machine({})
    assert 0 < own["available_bytes"] <= own["memory_bytes"]
    assert own["limits"]["nofile"] is None or own["limits"]["nofile"] > 0
    assert {"lo"} <= {entry["interface"] for entry in own["interfaces"]}


def test_folders_and_the_probe(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    args = {"workdir": str(tmp_path / "none"), "output_dir": str(blocked / "runs")}
    found = files(args)
    assert not found["workdir_is_there"]
    assert "a file stands" in found["output"]["fault"]
    found = files({"workdir": str(tmp_path), "output_dir": str(tmp_path / "a" / "b")})
    assert found["output"]["existing"] == str(tmp_path) and not found["output"]["fault"]
    assert not (tmp_path / "a").exists(), "a check makes no folders"
    probe = probe_write({"output_dir": str(tmp_path / "a")})
    assert probe_read(probe)["is_shared"]
    assert not probe_read({**probe, "word": "other"})["is_shared"]
    probe_remove(probe)
    assert not probe_read(probe)["is_shared"]
    probe_remove({"path": str(blocked)})
    assert blocked.exists(), "only its own file is removed"


class _Gate(BaseHTTPRequestHandler):
    """A hub whose repositories are open, gated or absent, by their names."""

    def do_HEAD(self) -> None:
        repo = "/".join(self.path.split("/")[1:3])
        codes = {"o/open": (200, ""), "o/gated": (403, "GatedRepo")}
        code, error = codes.get(repo, (404, "RepoNotFound"))
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", '"b"')
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def _hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gate)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_hub_and_its_licences(tmp_path: Path) -> None:
    code = "import json; from isles.check.node.files import hub; "
    code += "repos = [('model', n) for n in ('o/open', 'o/gated', 'o/none')]; "
    code += "print(json.dumps([a['state'] for a in hub({'repos': repos})['answers']]))"

    def ask(**variables: str) -> list[str]:
        environ = {**os.environ, "HF_HOME": str(tmp_path), **variables}
        # The library reads these once, when it is imported.
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        answer: list[str] = json.loads(done.stdout)
        return answer

    with _hub() as url:
        assert ask(HF_ENDPOINT=url, HF_HUB_OFFLINE="0") == ["ok", "licence", "missing"]
    gone = "http://127.0.0.1:9"
    assert ask(HF_ENDPOINT=gone, HF_HUB_OFFLINE="0") == ["unreachable"] * 3
    assert ask(HF_ENDPOINT=gone, HF_HUB_OFFLINE="1") == ["offline"] * 3


def test_a_start_asks_the_hub_once_for_what_is_not_here(run_file: Path, tmp_path: Path) -> None:
    def faults(name: str, endpoint: str) -> list[str]:
        variables = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        loaded = load_run_file(
            run_file,
            (
                f"model.name_or_path={name}",
                f"data.sources=[{{path: {name}-data}}]",
                "tokenizer={}",
                f"clusters=[{{environment: {{variables: {json.dumps(variables)}}}}}]",
            ),
        )
        return [f"{f.where} {f.what} {f.id}" for f in hub_faults(loaded)]

    with _hub() as url:
        (found,) = faults("o/open", url)
    assert "the hub knows no dataset o/open-data, or" in found
    gone = "http://127.0.0.1:9"
    (found, _) = faults("o/open", gone)
    assert "command line model.name_or_path the hub cannot be reached for model o/open" in found
    (tmp_path / "hub" / "models--o--open" / "snapshots" / "a").mkdir(parents=True)
    (tmp_path / "datasets" / "o___open-data").mkdir(parents=True)
    assert faults("o/open", gone) == []


def test_a_node_that_nobody_asks_any_more_ends() -> None:
    """As when the laptop's network is gone: stdin stays open, and no question comes."""
    code = "from isles.check.node.operations import main; main(idle_s=0.5)"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as child:
        assert child.wait(timeout=DEADLINE_S) == 1


def test_faults_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "no-such.yaml"]) == 1
    assert "no such file" in capsys.readouterr().err
    assert main(["check", "--hosts", "a", "a"]) == 1
    assert "a is there twice" in capsys.readouterr().err
    assert main(["check", "--timeout", "1s"]) == 1
    assert "--timeout 30s" in capsys.readouterr().err
