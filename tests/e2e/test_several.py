"""`isles train` with two clusters in one run file: real ranks, stopped, killed, gone on with."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from isles.errors import ExitCode
from isles.launch.hub import hub_process
from isles.run.find import find_any, find_cluster
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.remote import MultiClusterRun
from isles.run.stop import kill_now
from tests.e2e.typed import Command, at_one_instant, isles, typed
from tests.runs import assert_ended, files_with, kill_all, nothing_left, outer_steps_of
from tests.slowdown import slowed

CLUSTERS = [{"name": "a"}, {"name": "b", "gpus_per_node": 2, "strategy": {"kind": "fsdp"}}]
OUTER = {"kind": "diloco", "sync_every": 4, "fragments": 2, "codec": "int8", "deadline": "120s"}


@pytest.fixture
def two(run_file: Path) -> Iterator[Path]:
    """The run file with two clusters, and samples that are made up."""
    content = yaml.safe_load(run_file.read_text())
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32, "validation_fraction": 0}
    del content["tokenizer"]
    content |= {"name": "t", "outer": OUTER, "clusters": CLUSTERS}
    content["training"]["max_steps"] = 32
    content["checkpoint"] = {"every_steps": 4, "every_minutes": None, "keep": 2}
    run_file.write_text(yaml.safe_dump(content))
    with nothing_left(run_file.parent):
        yield run_file


def averaged(command: Command) -> set[str]:
    """Clusters that have taken in an outer step, by what is shown of them."""
    lines = [line for line in command.text.splitlines() if "averaged outer step" in line]
    return {line.partition(" ")[0] for line in lines}


@contextmanager
def unhurried(folder: Path) -> Iterator[MultiClusterRun]:
    """The first cluster takes its time inside a `with`: the run will not be over before its end."""
    run = find_any("t", folder / "runs")
    assert isinstance(run, MultiClusterRun)
    attempt = RunDir(Path(run.clusters[0].path)).last_attempt()
    assert attempt is not None
    pid = int((read_record(attempt.rank_record(0)) or {})["pid"])
    with slowed({pid: 50.0}, period_s=0.5):
        yield run


@pytest.mark.long
def test_of_three_starts_at_one_instant_one_trains(two: Path) -> None:
    cwd = two.parent
    words = ("train", str(two), "training.max_steps=100000", "--detach")
    ended = [(each.process.returncode, each.text) for each in at_one_instant(words, cwd)]
    assert sorted(code for code, _ in ended) == [0, 1, 1], "\n\n".join(text for _, text in ended)
    assert {path.name for path in (cwd / "runs").iterdir()} == {"t-1", "t-a-1", "t-b-1"}
    refused = [text for code, text in ended if code]
    assert all("another start of t" in text for text in refused), refused
    isles("stop", "--now", "t-1", cwd=cwd)


def assert_same_weights(folder: Path) -> list[RunDir]:
    """Both clusters have exported the same, bit for bit."""
    runs = [find_cluster("t", folder / "runs", name) for name in "ab"]
    one, other = (load_file(found.path / "model" / "model.safetensors") for found in runs)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return runs


@pytest.mark.long
def test_a_run_of_two_clusters_is_killed_and_gone_on_with(two: Path) -> None:
    folder = two.parent
    command = Command("train", two, cwd=folder)
    command.until(lambda: {"a", "b"} <= averaged(command))
    with unhurried(folder) as run:
        assert run.name == "t-1"
        secret = run.join_file.read_text().strip().rpartition("#")[2].partition(".")[0]

        def status() -> Any:
            """A status is written now and then."""
            found = json.loads(isles("status", "t", "--json", cwd=folder).out)
            return all(entry["report"]["outer"] for entry in found["clusters"]) and found

        shown = command.until(status)
        assert shown["state"] == "running" and not shown["hub_error"]
        assert {member["name"] for member in shown["hub"]["members"]} == {"a", "b"}
        kill_now(hub_process(run.state))
        command.until(lambda: "and is started again" in command.text)
        kill_all(folder)

    command = isles("train", two, cwd=folder)
    assert "resuming t-1" in command.text and "t-1 is finished" in command.text
    assert hub_process(run.state) is None
    assert_ended(folder)
    assert "a   | " in command.text and "b   | " in command.text
    runs = assert_same_weights(folder)
    assert str(runs[0].path / "model") in command.text and "the same weights" in command.text
    rows = [outer_steps_of(found) for found in runs]
    common = rows[0].keys() & rows[1].keys()
    assert len(common) >= 8
    assert all(rows[0][number]["digest"] == rows[1][number]["digest"] for number in common)
    table = isles("status", cwd=folder).out
    ends = dict(line.split()[:2] for line in table.splitlines()[1:])
    assert ends == dict.fromkeys(("t-1", "t-a-1", "t-b-1"), "finished")
    assert "step-00000032" in isles("checkpoint", "list", "t", cwd=folder).out
    logs = isles("logs", "t", "-n", "1", cwd=folder).out
    assert {line.partition(" | ")[0] for line in logs.splitlines()} == {"a", "b"}
    assert {file.name for file in files_with(secret, folder / "runs")} <= {"join", "token"}


def test_a_cluster_that_cannot_be_started_stops_the_start(two: Path) -> None:
    """All faults at once, and nothing is left; unless the user says that fewer will do."""
    far = "launcher: {kind: ssh, hosts: [192.0.2.1]}, gpus_per_node: 1, sync: {paths: [nowhere]}"
    words = "clusters=[{name: a}, {name: b, gpus_per_node: 99}, {name: c, device: cuda}, "
    words += f"{{name: d, workdir: /there, {far}}}]"
    refused = isles("train", two, words, cwd=two.parent, expected=ExitCode.PREFLIGHT).text
    assert "3 of 4 clusters cannot be started" in refused
    assert "clusters.3.sync.paths" in refused and "cannot copy nowhere to" in refused
    assert "b: " in refused and "99 ranks" in refused and "no GPU is vis" in refused
    assert not (two.parent / "runs").exists()
    fewer = isles("train", two, words, "outer.min_clusters=1", "--dry-run", cwd=two.parent).text
    assert "the others continue" in fewer and "=== cluster a" in fewer
    assert not (two.parent / "runs").exists()


@pytest.fixture
def first_peer(tmp_path: Path) -> Iterator[str]:
    """The address of a `hivemind-dht` on the loopback."""
    line = "exec hivemind-dht --identity_path dht.pem --host_maddrs /ip4/127.0.0.1/tcp/0"
    with typed(tmp_path, line) as (peer,):
        yield peer.until(lambda: re.search(r"--initial_peers (/ip4/\S+)", peer.text))[1]
        peer.process.terminate()
        peer.end()


@pytest.mark.long
def test_clusters_of_engine_hivemind_are_started_from_one_file(two: Path, first_peer: str) -> None:
    """They find one another by an address in the run file; no hub is started. Ctrl+C stops all."""
    folder = two.parent
    content = yaml.safe_load(two.read_text())
    content["outer"] |= {"engine": "hivemind", "min_clusters": 2}
    content["outer"]["hivemind"] = {"initial_peers": [first_peer]}
    content["training"]["max_steps"] = 16
    two.write_text(yaml.safe_dump(content))
    command = Command("train", two, cwd=folder)
    command.until(lambda: {"a", "b"} <= averaged(command))
    with unhurried(folder) as run:
        assert not run.meets and not run.state.exists()
        shown = isles("status", "t", cwd=folder).out
        assert "found by hivemind" in shown and "does not reach" not in shown
        command.process.send_signal(signal.SIGINT)
    assert command.end() == 130, command.text
    assert "a  stopped at step" in command.text and "b  stopped at step" in command.text
    command = isles("train", two, cwd=folder)
    assert "resuming t-1" in command.text and "the same weights" in command.text
    assert not run.state.exists()
    for found in assert_same_weights(folder):
        assert all(row["weights"].keys() == {"a", "b"} for row in outer_steps_of(found).values())
