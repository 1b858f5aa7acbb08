"""Odd answers of other programs and machines end in one clear error."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from isles.check.checks import network, ranks
from isles.errors import PreflightError, UserError
from isles.launch.answers import STARTED, Announced, read_started
from isles.launch.base import StartOptions
from isles.launch.kubernetes.kubectl import Kubectl
from isles.launch.kubernetes.start import start_kubernetes
from isles.launch.ray.jobs import RayJobs
from isles.launch.remote.login import start_on_login
from isles.launch.remote.setup import setup
from isles.launch.skypilot.start import start_skypilot
from isles.launch.ssh.channel import READY, Channel
from isles.launch.ssh.shell import Shell
from isles.monitor.children import ChildLine, run_all
from isles.monitor.multi_cluster import MultiClusterStart
from isles.run.paths import Attempt
from tests.each import each
from tests.made_watch import running
from tests.programs import program, write_program
from tests.run_files import load
from tests.unit.test_kubernetes import WHOLE
from tests.unit.test_ray import ANSWERS, Dashboard
from tests.unit.test_skypilot import ONE_NODE, RUN_FILE

DEEP = "[" * 100_000
ANYTHING = ("", "<html>a proxy</html>", "null", "3", "[3]", '"text"', '{"a":' * 100_000, DEEP)
GOOD = {"version": "1", "path": "/runs/x-1", "attempt": 1}


def lines_of(**changes: object) -> str:
    return json.dumps({**GOOD, **changes})


ODD_STARTS = (
    *ANYTHING,
    "{}",
    *(lines_of(path=path) for path in ("runs/x", "", "/a\nb", "/a\x1b[2J", "/a\x00", 3, ["/a"])),
    *(lines_of(attempt=attempt) for attempt in ("1", True, 0, 1.5, None, 10**30)),
    *(lines_of(ssh=ssh) for ssh in ("-oProxyCommand=x", "a b", 3, None)),
    *(lines_of(elsewhere=path) for path in ("a\nb", "-x", {})),
    *(lines_of(home=home) for home in ("here", "/a\n")),
    lines_of(version=3),
    lines_of().replace("}", f', "more": {DEEP}}}'),
)


def options(folder: Path) -> StartOptions:
    return StartOptions(folder / "run.yaml", (), "auto", False, str, str)


def refused(do: Callable[[], object], id: str, *more: str) -> None:
    """It ends in an error that shows little of the answer, and says who answered."""
    with pytest.raises(PreflightError) as caught:
        do()
    error = caught.value
    assert error.id == id and error.where and error.fix, error
    assert error.what.startswith("isles cannot use the answer of ") and len(error.what) < 400
    assert error.what.isprintable() and all(word in str(error) for word in more), error


@each(*ODD_STARTS)
def test_an_odd_announcement(text: str) -> None:
    refused(lambda: read_started(STARTED + text, where="here", fix="do"), "start.failed", "there")


def test_an_announcement_with_more_keys_is_read() -> None:
    announced = Announced("1", "/runs/x-1", 1, "me@a", "~/runs/x-1", "/home/me")
    assert read_started(announced.line(), where="", fix="") == announced
    text = lines_of(color="red")
    assert read_started(STARTED + text, where="", fix="") == Announced("1", "/runs/x-1", 1)


ODD_OBJECTS = (
    *ANYTHING,
    '{"metadata": 3}',
    '{"metadata": {"name": "-x", "uid": "u"}}',
    '{"metadata": {"name": "x", "uid": 3}}',
    '{"metadata": {"name": "x", "uid": "u"}, "status": {"conditions": 3}}',
    '{"metadata": {"name": "x", "uid": "u"}, "status": {"conditions": [3]}}',
)


@each(*ODD_OBJECTS)
def test_odd_objects_of_kubectl(text: str, *, tmp_path, monkeypatch) -> None:
    (tmp_path / "answer").write_text(text)
    write_program(tmp_path / "kubectl", f"cat {tmp_path}/answer")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    kubectl = Kubectl("lab", None)
    refused(lambda: kubectl.create({}), "kubernetes.refused", "kubectl create", "--context=lab")
    refused(lambda: kubectl.failure("job", "x"), "kubernetes.refused", "kubectl get")
    refused(lambda: kubectl.pods("x"), "kubernetes.refused", "kubectl get")
    assert kubectl.warnings("x") == []
    (tmp_path / "answer").write_text(f'{{"items": [{text or 3}]}}')
    refused(lambda: kubectl.pods("x"), "kubernetes.refused", "kubectl get")


def test_an_odd_announcement_in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    item = {
        "metadata": {"name": "x-0", "uid": "u", "labels": index},
        "status": {"phase": "Succeeded"},
    }
    other = {"metadata": {"name": "y", "uid": "u", "annotations": {next(iter(index)): "9" * 5000}}}
    answers = {"create": json.dumps(item), "get pods": json.dumps({"items": [item, other]})}
    answers |= {"get job": json.dumps(item), "logs": f"{STARTED}{lines_of(path='x')}\n"}
    program(tmp_path, "kubectl", {**answers, "patch": "", "delete": ""})
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded = load(tmp_path, WHOLE)
    launcher = loaded.config.clusters[0].launcher
    refused(lambda: start_kubernetes(loaded, launcher, options(tmp_path)), "start.failed", "job ")


@each(
    *ANYTHING,
    '{"ray_version": 3, "status": 3, "data": 3, "logs": 3}',
    '{"ray_version": null, "status": "FAILED 1", "data": {"result": []}, "logs": null}',
    '{"ray_version": [], "status": "FAILED", "message": 3, "data": {"result": {"result": [3]}}}',
    '{"status": "FAILED", "driver_exit_code": "x", "data": {"result": {"result": 3}}}',
)
def test_odd_answers_of_ray(text: str, *, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(Dashboard, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server, running(server):
        jobs, attempt = RayJobs(f"http://127.0.0.1:{server.server_port}"), Attempt(tmp_path, 1)
        for path in ("version", "v0/nodes?limit=10000", "jobs/x", "jobs/x/logs"):
            monkeypatch.setitem(ANSWERS, f"/api/{path}", (200, text))
        for ask in (jobs.nodes, jobs.versions, lambda: jobs.look(attempt, "x")):
            refused(ask, "queue.commands", "Ray's dashboard at http://127.0.0.1")
        assert not jobs.output(attempt, "x").exists()
        monkeypatch.setitem(ANSWERS, "/api/jobs/", (500, text))
        with pytest.raises(PreflightError, match=r"refused the request \(HTTP 500\)"):
            jobs.submit("x", "true")


def far(folder: Path, launcher: str) -> str:
    return (
        RUN_FILE.replace("output_dir: ~/runs", f"output_dir: {folder}/runs").partition("clusters:")[
            0
        ]
        + f"clusters: [{{launcher: {launcher}, gpus_per_node: 1, workdir: /w}}]\n"
    )


@each(*ODD_STARTS)
def test_odd_words_of_a_login_node(text: str, *, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "answer").write_text(f"{STARTED}{text}\n")
    write_program(tmp_path / "ssh", f"cat >/dev/null; cat {tmp_path}/answer")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded = load(tmp_path, far(tmp_path, "{kind: slurm, login: me@campus, time: 1h}"))
    refused(lambda: start_on_login(loaded, options(tmp_path)), "start.failed", "host me@campus")
    assert not (tmp_path / "runs").exists()


FOUND = {"isles": "1", "code": "2"}


@each(
    *ANYTHING,
    json.dumps({"changed": True, "error": "", "fingerprint": 3}),
    json.dumps({"changed": True, "error": "", "fingerprint": {"isles": 3}}),
    json.dumps({"changed": [], "error": "", "fingerprint": FOUND}),
    json.dumps({"changed": True, "error": {}, "fingerprint": FOUND}),
)
def test_odd_results_of_a_setup(text: str, *, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "answer").write_text(f"RESULT {text}\n")
    write_program(tmp_path / "ssh", f"cat >/dev/null; cat {tmp_path}/answer")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded = load(tmp_path, far(tmp_path, "{kind: slurm, login: me@campus, time: 1h}"))
    do = lambda: setup(loaded, check=True, print_line=str)  # noqa: E731
    refused(do, "setup.failed", "host me@campus")


def test_a_setup_that_found_no_isles_differs(tmp_path: Path, monkeypatch) -> None:
    result = json.dumps({"changed": False, "error": "", "fingerprint": None})
    write_program(tmp_path / "ssh", f"cat >/dev/null; echo 'RESULT {result}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded, lines = load(tmp_path, far(tmp_path, "{kind: slurm, login: a, time: 1h}")), []
    assert not setup(loaded, check=True, print_line=lines.append)
    assert any("none on a" in line for line in lines)


@each(*(text for text in ODD_STARTS if text.startswith("{") and "}" in text))
def test_an_odd_log_of_sky(text: str, *, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "logs").write_text(f"(head) {STARTED}{text}\n")
    case = f"echo $1 >>{tmp_path}/asked; case $1 in launch) echo 'Job submitted, ID: 7' ;; "
    write_program(tmp_path / "sky", f"{case} logs) cat {tmp_path}/logs ;; esac")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loaded = load(tmp_path, RUN_FILE, *ONE_NODE)
    launcher = loaded.config.clusters[0].launcher
    refused(lambda: start_skypilot(loaded, launcher, options(tmp_path)), "start.failed", "sky (")
    assert (tmp_path / "asked").read_text().split()[-1] == "down", "the machines are given back"


def test_an_odd_start_of_one_of_several_clusters(tmp_path: Path) -> None:
    outer = "outer: {kind: diloco}\nclusters: [{name: a, device: cpu, gpus_per_node: 1}, "
    text = far(tmp_path, "{kind: local}").partition("clusters:")[0] + outer
    loaded = load(tmp_path, f"{text}{{name: b, device: cpu, gpus_per_node: 1}}]\n")
    start = MultiClusterStart(loaded, options(tmp_path))
    for odd in ODD_STARTS:
        line = ChildLine("b", "out", STARTED + odd)
        refused(lambda line=line: start._take(line), "start.failed", "cluster b")


def test_a_line_that_is_refused_ends_the_other_commands() -> None:
    shown = []

    def show(line: ChildLine) -> None:
        shown.append(line)
        if line.kind == "out":
            raise UserError("odd")

    both = {"a": ["--version"], "b": ["--version"]}
    with pytest.raises(UserError, match="odd"):
        run_all(both, doing="starting", print_line=str, show=show)
    assert {line.child for line in shown if line.kind == "end"} == {"a", "b"}


@each(*ANYTHING, '[{"addr_info": 3}]', '[{"addr_info": [3]}]', '[{"addr_info": [{"local": []}]}]')
def test_odd_answers_of_ip(text: str, *, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "answer").write_text(text)
    write_program(tmp_path / "ip", f"cat {tmp_path}/answer")
    monkeypatch.setattr(network, "_SBIN", str(tmp_path))
    assert network._leased() == set()
    found = [{}, {"addr_info": [{"local": "10.0.0.7", "dynamic": True}, {"local": "10.0.0.8"}]}]
    (tmp_path / "answer").write_text(json.dumps(found))
    assert network._leased() == {"10.0.0.7"}


@each(*(text for text in ANYTHING if text))
def test_odd_answers_of_a_rank(text: str, *, tmp_path: Path) -> None:
    (tmp_path / "answer").write_text(f"{text}\n")
    noise = os.memfd_create("noise")
    words = ["cat", str(tmp_path / "answer")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        found = ranks._answer(process, noise, time.monotonic() + 60)
    os.close(noise)
    assert found["stage"] == "died" and len(found["failure"]) < 200


@each("", " >&2")
def test_an_answer_without_end(where: str) -> None:
    with pytest.raises(PreflightError, match="more than 64 MiB") as caught:
        Shell().run(["bash", "-c", f"yes{where}"])
    assert caught.value.id == "host.answers"


def test_odd_replies_of_a_node() -> None:
    """They answer no question, and do not end the thread that reads."""
    good = {"id": 1, "result": {"a": 1}}
    odd = (
        "[]",
        "3",
        "null",
        "{}",
        DEEP,
        '{"id": 1}',
        '{"id": [1], "result": {}}',
        '{"id": 1, "error": {}}',
        "\xff",
    )
    lines = [READY, *odd, json.dumps(good)]
    reader, writer = os.pipe()
    channel = Channel(
        "far",
        os.fdopen(reader, "rb"),
        io.BytesIO(),
        lost=lambda _: UserError("lost"),
        end=lambda: None,
    )
    future = channel.ask("look")
    with os.fdopen(writer, "wb") as stream:
        stream.write("\n".join([*lines, ""]).encode("latin-1"))
    assert future.result(timeout=60) == {"a": 1}
