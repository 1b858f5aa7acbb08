"""Bundles of a Ray cluster, which nodes could give them, and what its dashboard is asked."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from isles.config.sections.cluster import ClusterConfig
from isles.errors import ExitCode, PreflightError
from isles.launch.ray.bundles import (
    RayNode,
    bundles,
    label_selectors,
    lacking,
    match_nodes,
    ranks_of,
)
from isles.launch.ray.jobs import RayJobs
from isles.run.paths import Attempt


def cluster(*given: dict[str, Any], **more: Any) -> ClusterConfig:
    launcher = {"kind": "ray", "bundles": list(given)}
    return ClusterConfig.model_validate({"launcher": launcher, "gpus_per_node": 4, **more})


def test_one_bundle_is_for_every_node_and_several_are_one_for_each() -> None:
    same = cluster({"resources": {"CPU": 16}}, nodes="2:3")
    assert bundles(same) == [{"GPU": 4.0, "CPU": 16.0}] * 3
    other = cluster({}, {"gpus": 2, "label_selector": {"card": "old"}})
    assert (other.min_nodes, ranks_of(other)) == (2, (4, 2))
    assert bundles(other)[1] == {"GPU": 2.0, "CPU": 2.0}
    assert label_selectors(other) == [{}, {"card": "old"}]
    assert bundles(cluster(device="cpu")) == [{"CPU": 4.0}]


def test_each_bundle_gets_a_node_of_its_own_also_where_the_first_choice_is_wrong() -> None:
    large = RayNode("large", {"GPU": 4, "CPU": 8}, {"card": "new"})
    small = RayNode("small", {"GPU": 1, "CPU": 8}, {"card": "old"})
    wanted = [{"GPU": 1.0}, {"GPU": 4.0}]
    found = match_nodes(wanted, [{}, {}], [large, small])
    assert {number: node.name for number, node in found.items()} == {0: "small", 1: "large"}
    labels = [{"card": "!in(old)"}, {"card": "old"}]  # only Ray itself knows what the first means
    found = match_nodes(wanted, labels, [large, small])
    assert list(found) == [0]
    text = lacking(wanted, labels, found)
    assert text == "Ray has no node for 1 of 2: node 1 needs GPU 4, card=old"


class Dashboard(BaseHTTPRequestHandler):
    """A stand-in for the dashboard of a Ray cluster that has one job, `known`."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        match self.path:
            case "/api/version":
                self._answer(200, '{"ray_version": "2.60.0"}')
            case "/api/jobs/known":
                found = {"status": "FAILED", "message": "it was 85", "driver_exit_code": 85}
                self._answer(200, json.dumps(found))
            case "/api/jobs/silent":
                time.sleep(1.0)
            case _:
                self._answer(404, "Job other does not exist")

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if "late" in text:
            time.sleep(1.0)
        elif self.path == "/api/jobs/":
            self._answer(500, json.dumps({"msg": "no room\nTraceback …"}))
        else:
            self._answer(404, "Job does not exist")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def dashboard() -> Iterator[str]:
    Dashboard.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_a_dashboard_is_asked_with_the_token_and_its_refusals_are_said(
    dashboard: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("a secret\n")
    jobs, attempt = RayJobs.reach(dashboard), Attempt(tmp_path, 1)
    assert Dashboard.asked == [("/api/version", "Bearer a secret")]
    assert jobs.versions()[0] == "2.60.0"
    known = jobs.look(attempt, "known")
    assert (known.state, known.word) == ("ended", "FAILED 85")
    assert jobs.exit_code(attempt, known) == (ExitCode.REQUEUE, False)
    assert jobs.look(attempt, "other").word == "UNKNOWN"
    with pytest.raises(PreflightError, match=r"refuses: HTTP 500: no room\n") as refused:
        jobs.submit("new", "true")
    assert refused.value.id == "queue.refused"


def test_a_silent_dashboard_is_not_waited_for(dashboard: str, tmp_path: Path) -> None:
    jobs = RayJobs(dashboard, ask_s=0.2)
    with pytest.raises(PreflightError, match="has not answered within 0 s"):
        jobs.look(Attempt(tmp_path, 1), "silent")
    with pytest.raises(TimeoutError):  # the cluster may have it
        jobs.submit("late", "true")
    with pytest.raises(PreflightError, match="cannot be reached"):
        RayJobs.reach("http://127.0.0.1:9")
