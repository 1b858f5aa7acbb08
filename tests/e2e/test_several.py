"""`isles train` with two clusters in one run file: real ranks, stopped, killed, gone on with."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from isles.errors import ExitCode
from isles.launch.hub import end_hub, hub_process
from isles.monitor.stop import wait_for_end
from isles.run.find import find_any, find_cluster
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.run.remote import MultiClusterRun
from isles.run.stop import kill_now
from tests.deadline import DEADLINE_S
from tests.runs import end_here
from tests.slowdown import slowed

CLUSTERS = [{"name": "a"}, {"name": "b", "gpus_per_node": 2, "strategy": {"kind": "fsdp"}}]
OUTER = {"kind": "diloco", "sync_every": 4, "fragments": 2, "codec": "int8", "deadline": "120s"}
MODULE = (sys.executable, "-m", "isles")


class Command:
    """`isles train` in the foreground, with its output in a file."""

    def __init__(self, run_file: Path, log: str, *overrides: str) -> None:
        self.log = run_file.with_name(log)
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                [*MODULE, "train", str(run_file), *overrides],
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, (what, self.text)
            try:
                self.process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue

    def ended(self) -> int:
        try:
            return self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text) from None


@pytest.fixture
def two(run_file: Path) -> Path:
    """The run file with two clusters, and samples that are made up."""
    content = yaml.safe_load(run_file.read_text())
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32, "validation_fraction": 0}
    del content["tokenizer"]
    content |= {"name": "t", "outer": OUTER, "clusters": CLUSTERS}
    content["training"]["max_steps"] = 32
    content["checkpoint"] = {"every_steps": 4, "every_minutes": None, "keep": 2}
    run_file.write_text(yaml.safe_dump(content))
    return run_file


def isles(*words: str) -> str:
    done = subprocess.run(
        [*MODULE, *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def turns_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    return {row["outer_step"]: row for row in read_rows(run_dir.metrics) if row["kind"] == "outer"}


def averaged(command: Command) -> set[str]:
    """Clusters that have taken in a turn, by what is shown of them."""
    lines = [line for line in command.text.splitlines() if "averaged outer step" in line]
    return {line.partition(" ")[0] for line in lines}


@contextmanager
def unhurried(run: object) -> Iterator[None]:
    """The first cluster takes its time inside a `with`: the run will not be over before its end."""
    assert isinstance(run, MultiClusterRun)
    attempt = RunDir(Path(run.clusters[0].path)).last_attempt()
    assert attempt is not None
    pid = int((read_record(attempt.rank_record(0)) or {})["pid"])
    with slowed({pid: 50.0}, period_s=0.5):
        yield


def kill_all(run: MultiClusterRun, command: Command) -> None:
    """As a power cut."""
    command.process.kill()
    command.process.wait()
    process = hub_process(run.state)
    assert process is not None
    kill_now(process)
    assert wait_for_end(process, DEADLINE_S)
    for cluster in run.clusters:
        end_here(RunDir(Path(cluster.path)))


@pytest.mark.brief("killed")
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_a_run_of_two_clusters_ends_early_and_is_gone_on_with(two: Path, end: str) -> None:
    output_dir = two.parent / "runs"
    here = f"--output-dir={output_dir}"
    command = Command(two, "first.log")
    try:
        command.until(lambda: {"a", "b"} <= averaged(command), "a turn of both")
        run = find_any("t", output_dir)
        with unhurried(run):
            assert isinstance(run, MultiClusterRun) and run.name == "t-1"
            secret = run.join_file.read_text().strip().rpartition("#")[2].partition(".")[0]
            shown: dict[str, Any] = {}

            def shows_both() -> bool:
                shown.update(json.loads(isles("status", "t", "--json", here)))
                return all(entry["report"]["outer"] for entry in shown["clusters"])

            command.until(shows_both, "a status of both, which is written now and then")
            assert shown["state"] == "running" and not shown["hub_error"]
            assert {member["name"] for member in shown["hub"]["members"]} == {"a", "b"}
            process = hub_process(run.state)
            assert process is not None
            kill_now(process)
            command.until(lambda: "and is started again" in command.text, "a new hub")
            if end == "killed":
                kill_all(run, command)
            else:
                command.process.send_signal(signal.SIGINT)
        if end == "stopped":
            assert command.ended() == 130, command.text
            assert "a  stopped at step" in command.text and "b  stopped at step" in command.text
            assert hub_process(run.state) is None

        command = Command(two, "second.log")
        assert command.ended() == 0, command.text
        assert "going on with t-1" in command.text
    finally:
        command.process.kill()
        for cluster in (found := find_any("t", output_dir)).clusters:
            end_here(RunDir(Path(cluster.path)))
        end_hub(found.state)
    _assert_finished(run, command, secret)


def _assert_finished(run: MultiClusterRun, command: Command, secret: str) -> None:
    """Both clusters hold the same, and what is shown is so."""
    assert "t-1 is finished" in command.text and hub_process(run.state) is None
    assert "a   | " in command.text and "b   | " in command.text
    output_dir = run.path.parent
    runs = [find_cluster("t", output_dir, name) for name in "ab"]
    one, other = (load_file(found.path / "model" / "model.safetensors") for found in runs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    rows = [turns_of(found) for found in runs]
    common = rows[0].keys() & rows[1].keys()
    assert len(common) >= 8
    assert all(rows[0][turn]["digest"] == rows[1][turn]["digest"] for turn in common)
    assert str(runs[0].path / "model") in command.text and "the same weights" in command.text
    table = isles("status", f"--output-dir={output_dir}")
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["t-1", "finished"],
        ["t-a-1", "finished"],
        ["t-b-1", "finished"],
    ]
    saved = isles("checkpoint", "list", "t", f"--output-dir={output_dir}")
    assert "step-00000032" in saved
    logs = isles("logs", "t", "-n", "1", f"--output-dir={output_dir}")
    assert {line.partition(" | ")[0] for line in logs.splitlines()} == {"a", "b"}
    for file in (path for path in output_dir.rglob("*") if path.is_file()):
        if file.name not in ("join", "token"):
            assert secret.encode() not in file.read_bytes(), file


def test_a_cluster_that_cannot_be_started_stops_the_start(two: Path) -> None:
    """All faults at once, and nothing is left; unless the user says that fewer will do."""
    far = "launcher: {kind: ssh, hosts: [192.0.2.1]}, gpus_per_node: 1, sync: {paths: [nowhere]}"
    words = "clusters=[{name: a}, {name: b, gpus_per_node: 99}, {name: c, device: cuda}, "
    words += f"{{name: d, workdir: /there, {far}}}]"
    command = Command(two, "refused.log", words)
    assert command.ended() == ExitCode.PREFLIGHT  # the highest of theirs
    assert "3 of 4 clusters cannot be started" in command.text
    assert "clusters[3].sync.paths: there is no nowhere" in command.text
    assert "b: " in command.text and "99 ranks" in command.text and "no GPU is vis" in command.text
    assert not (two.parent / "runs").exists()
    command = Command(two, "dry.log", words, "outer.min_clusters=1", "--dry-run")
    assert command.ended() == 0
    assert "the others go on" in command.text and "=== cluster a" in command.text
    assert not (two.parent / "runs").exists()


@pytest.fixture
def first_peer(tmp_path: Path) -> Iterator[str]:
    """The address of a `hivemind-dht` on the loopback."""
    log = tmp_path / "dht.log"
    words = ["--identity_path", str(tmp_path / "dht.pem"), "--host_maddrs", "/ip4/127.0.0.1/tcp/0"]
    program = Path(sys.executable).with_name("hivemind-dht")
    with log.open("wb") as stream:
        process = subprocess.Popen([program, *words], stdout=stream, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + DEADLINE_S
        while not (found := re.search(r"--initial_peers (/ip4/\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield found[1]
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@pytest.mark.long
def test_clusters_of_engine_hivemind_are_started_from_one_file(two: Path, first_peer: str) -> None:
    """They find one another by an address in the run file; no hub is started."""
    content = yaml.safe_load(two.read_text())
    content["outer"] |= {"engine": "hivemind", "min_clusters": 2}
    content["outer"]["hivemind"] = {"initial_peers": [first_peer]}
    content["training"]["max_steps"] = 16
    two.write_text(yaml.safe_dump(content))
    output_dir = two.parent / "runs"
    here = f"--output-dir={output_dir}"
    command = Command(two, "peers.log")
    try:
        command.until(lambda: {"a", "b"} <= averaged(command), "a turn of both")
        run = find_any("t", output_dir)
        assert isinstance(run, MultiClusterRun) and not run.meets and not run.state.exists()
        with unhurried(run):
            shown = isles("status", "t", here)
            assert "found by hivemind" in shown and "does not reach" not in shown
            command.process.send_signal(signal.SIGINT)
        assert command.ended() == 130, command.text
        assert "a  stopped at step" in command.text and "b  stopped at step" in command.text
        command = Command(two, "peers-again.log")
        assert command.ended() == 0, command.text
    finally:
        command.process.kill()
        for cluster in find_any("t", output_dir).clusters:
            end_here(RunDir(Path(cluster.path)))
    assert "going on with t-1" in command.text and "the same weights" in command.text
    assert not run.state.exists()
    runs = [find_cluster("t", output_dir, name) for name in "ab"]
    one, other = (load_file(found.path / "model" / "model.safetensors") for found in runs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert all(
        row["weights"].keys() == {"a", "b"} for found in runs for row in turns_of(found).values()
    )
