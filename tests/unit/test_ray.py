"""Bundles of a Ray cluster, which nodes could give them, and what its dashboard is asked."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from isles.config.sections.cluster import ClusterConfig
from isles.errors import ExitCode, PreflightError
from isles.launch.ray import bundles
from isles.launch.ray.jobs import RayJobs
from isles.run.paths import Attempt
from tests.made_watch import running
from tests.ports import listening


def cluster(*given: dict[str, Any], **more: Any) -> ClusterConfig:
    launcher = {"kind": "ray", "bundles": list(given)}
    return ClusterConfig.model_validate({"launcher": launcher, "gpus_per_node": 4, **more})


def test_one_bundle_is_for_every_node_and_several_are_one_for_each() -> None:
    same = cluster({"resources": {"CPU": 16}}, nodes="2:3")
    assert bundles.bundles(same) == [{"GPU": 4.0, "CPU": 16.0}] * 3
    other = cluster({}, {"gpus": 2, "label_selector": {"card": "old"}})
    assert (other.min_nodes, bundles.ranks_of(other)) == (2, (4, 2))
    assert bundles.bundles(other)[1] == {"GPU": 2.0, "CPU": 2.0}
    assert bundles.label_selectors(other) == [{}, {"card": "old"}]
    assert bundles.bundles(cluster(device="cpu")) == [{"CPU": 4.0}]


def test_each_bundle_gets_a_node_of_its_own_also_where_the_first_choice_is_wrong() -> None:
    large = bundles.RayNode("large", {"GPU": 4, "CPU": 8}, {"card": "new"})
    small = bundles.RayNode("small", {"GPU": 1, "CPU": 8}, {"card": "old"})
    wanted = [{"GPU": 1.0}, {"GPU": 4.0}]
    found = bundles.match_nodes(wanted, [{}, {}], [large, small])
    assert {number: node.name for number, node in found.items()} == {0: "small", 1: "large"}
    labels = [{"card": "!in(old)"}, {"card": "old"}]  # only Ray itself knows what the first means
    found = bundles.match_nodes(wanted, labels, [large, small])
    assert list(found) == [0]
    text = bundles.lacking(wanted, labels, found)
    assert text == "Ray has no node for 1 of 2: node 1 needs GPU 4, card=old"


ANSWERS = {
    "/api/version": (200, '{"ray_version": "2.60.0"}'),
    "/api/jobs/known": (200, '{"status": "FAILED", "message": "85", "driver_exit_code": 85}'),
    "/api/jobs/": (500, '{"msg": "no room\\nTraceback …"}'),
}


class Dashboard(BaseHTTPRequestHandler):
    """A stand-in for the dashboard of a Ray cluster that has one job, `known`."""

    asked: ClassVar = []

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        code, text = ANSWERS.get(self.path, (404, "Job other does not exist"))
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET


def test_what_a_dashboard_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with the token, and its refusals are said."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    (tmp_path / "token").write_text("a secret\n")
    attempt = Attempt(tmp_path, 1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server, running(server):
        jobs = RayJobs.reach(f"http://127.0.0.1:{server.server_port}/")
        assert Dashboard.asked == [("/api/version", "Bearer a secret")]
        assert jobs.versions()[0] == "2.60.0"
        known = jobs.look(attempt, "known")
        assert (known.state, known.word) == ("ended", "FAILED 85")
        assert jobs.exit_code(attempt, known) == (ExitCode.REQUEUE, False)
        assert jobs.look(attempt, "other").word == "UNKNOWN"
        with pytest.raises(
            PreflightError, match=r"refused the request \(HTTP 500\): no room\n"
        ) as refused:
            jobs.submit("new", "true")
        assert refused.value.id == "queue.refused"
        monkeypatch.setitem(ANSWERS, "/api/jobs/known", (200, "<html>a proxy</html>"))
        with pytest.raises(PreflightError, match="it is not JSON"):
            jobs.look(attempt, "known")


def test_a_silent_dashboard_is_not_waited_for(tmp_path: Path) -> None:
    with listening(lambda _: None) as port:
        jobs = RayJobs(f"http://127.0.0.1:{port}", ask_s=0.2)
        with pytest.raises(PreflightError, match="did not answer within 0 s"):
            jobs.look(Attempt(tmp_path, 1), "silent")
        with pytest.raises(TimeoutError):  # the cluster may have it
            jobs.submit("late", "true")
    with pytest.raises(PreflightError, match="is unreachable"):
        RayJobs.reach("http://127.0.0.1:9")
