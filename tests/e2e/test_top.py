"""`isles top` of a run of two clusters with three ranks each: this machine, and hosts over ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from isles.monitor.live.model import Snapshot
from tests.deadline import DEADLINE_S
from tests.lab.home import (
    HOSTS,
    QUOTED_ISLES,
    QUOTED_PYTHON,
    assert_nothing_left,
    isles,
    link_cut,
    sh,
    until,
    write_run,
)
from tests.lab.hosts import Lab

SLOWDOWN = str(Path(__file__).parents[1] / "slowdown.py")
LOOK_AND_STOP = """
from pathlib import Path
from isles.monitor.live.source import Watch
from isles.run.find import find_any

at, rows = 0.0, []
with Watch(find_any("see", Path("runs")), Path("runs"), 1.0) as watch:
    while not rows and (shown := watch.wait(at, 60)):
        at = shown.at
        rows = [row for row in shown.ranks if (row.cluster, row.rank) == ("office", 2)]
    print(watch.stack(rows[0]))
    print("log:", len(watch.log_lines(rows[0], 3)))
    print("stopped with", watch.stop(False))
"""
"""What `isles top` does by a key, of a rank on another machine."""

RANKS = {(cluster, rank) for cluster in ("home", "office") for rank in range(3)}


class Top:
    """`isles top --json --every 1` on the laptop, and the last that it has shown."""

    def __init__(self, lab: Lab, run: str) -> None:
        words = ["bash", "-c", f"cd /shared && exec {QUOTED_ISLES} top {run} --json --every 1"]
        self.process = lab.popen("ctl", words)
        self.last = Snapshot()
        self.noise: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for raw in self.process.stdout:
            if raw.startswith(b"{"):
                self.last = Snapshot.model_validate_json(raw)
            else:
                self.noise.append(raw.decode())

    def until(self, *shows: Callable[[Snapshot], object]) -> None:
        """Wait until it shows all that."""

        def found() -> bool:
            last = self.last
            return all(one(last) for one in shows)

        until(found, lambda: f"{self.noise[-3:]} {self.last.model_dump_json()}")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


@contextmanager
def slowed_on(lab: Lab, host: str, pid: int, cores: float) -> Iterator[None]:
    """A process of a host, at half its speed inside a `with`.

    It runs for half as long as it did: where others want its core too, it has `cores` of one.
    """
    command = [sys.executable, SLOWDOWN, "0.1", f"{pid}:{2 / max(0.05, cores):.2f}"]
    process = lab.popen(host, command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate(timeout=DEADLINE_S)
        lab.run(host, ["kill", "-CONT", str(pid)])


def is_named(snapshot: Snapshot, *words: str) -> bool:
    """Whether one note has all these words."""
    return any(all(word in note for word in words) for note in snapshot.notes)


def is_well(snapshot: Snapshot) -> bool:
    """Whether all ranks train, and nobody is marked."""
    rows = (*snapshot.ranks, *snapshot.hosts, *snapshot.clusters)
    return (
        {(row.cluster, row.rank) for row in snapshot.ranks if row.parts is not None} == RANKS
        and not any(row.mark for row in rows)
        and all(row.outer_step for row in snapshot.clusters)
    )


@pytest.mark.long
def test_two_clusters_and_what_goes_wrong_in_them(lab: Lab) -> None:
    """Every rank, host, link and cluster is named; a rank that is killed, one at half its speed,
    a link that is cut: each is shown with its name."""
    variables = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    shape = {"device": "cpu", "max_restarts": 3, "environment": {"variables": variables}}
    ssh = {"kind": "ssh", "hosts": list(HOSTS)}
    home = {"name": "home", "gpus_per_node": 3, **shape}
    office = {"name": "office", "launcher": ssh, "workdir": "/shared", **shape}
    write_run(
        lab,
        "see",
        output_dir="runs",
        model={"name_or_path": "llama-2m", "init": "scratch"},
        tokenizer=None,
        data={"sources": [{"type": "fake"}], "seq_length": 64},
        training={"max_steps": 100_000, "global_batch_size": 24},
        checkpoint={"every_steps": 20, "every_minutes": None, "keep": 1},
        outer={"kind": "diloco", "sync_every": 10, "deadline": "200s"},
        clusters=[home, office],
    )
    isles(lab, "train", "see.yaml", "--detach")
    try:
        with closing(Top(lab, "see")) as top:
            top.until(is_well)
            _assert_names(top.last)
            _assert_faults(lab, top)
            # Through the hub alone, as from a site without a way to the machines of the others.
            with closing(Top(lab, "/shared/runs/see-1/hub")) as beside:
                beside.until(lambda s: {(row.cluster, row.rank) for row in s.ranks} == RANKS)
                assert {row.name for row in beside.last.clusters} == {"home", "office"}
        text = isles(lab, "top", "see")
        assert re.search(r"^office +2 ", text, re.M) and "`isles top` is live in a terminal" in text
        assert all(len(line) <= 80 for line in text.splitlines()), text
        (line,) = isles(lab, "top", "see-office", "--json").splitlines()
        assert {row["host"] for row in json.loads(line)["ranks"]} == set(HOSTS)
        did = sh(lab, "ctl", f"cd /shared && {QUOTED_PYTHON} - <<'END'\n{LOOK_AND_STOP}\nEND")
        assert "rank 2 on a3: step " in did and "thread MainThread" in did and "log: 3" in did, did
        assert "stopped with 0" in did, did
        assert "stopped" in isles(lab, "status", "see")
    finally:
        isles(lab, "stop", "see", "--now", expected=None)
    assert_nothing_left(lab, ("ctl", *HOSTS))


def _assert_names(last: Snapshot) -> None:
    assert {row.host for row in last.hosts if row.cluster == "office"} == set(HOSTS)
    assert [row.host for row in last.ranks if row.cluster == "office"] == list(HOSTS)
    assert {row.name for row in last.clusters} == {"home", "office"}
    links = {(row.source, row.target) for row in last.links}
    for name in ("home", "office"):
        assert {(name, "hub"), ("hub", name)} <= links, links
    assert {row.source for row in last.links} >= set(HOSTS)
    assert last.hub is not None and last.hub.error == "" and (last.hub.round or 0) > 0
    head = last.run
    assert head.state == "running" and head.goodput is not None and 0 < head.goodput <= 1
    assert head.tokens_per_second and head.loss and last.curve
    assert all(row.heard_s is not None and row.memory_bytes for row in last.ranks)


def _assert_faults(lab: Lab, top: Top) -> None:
    def place_of(rank: int) -> tuple[int, float]:
        row = next(r for r in top.last.ranks if (r.cluster, r.rank) == ("office", rank))
        assert row.pid is not None
        return row.pid, row.use or 0.0

    sh(lab, "a2", f"kill -KILL {place_of(1)[0]}")
    top.until(lambda s: is_named(s, "office: ", "rank 1 on a2"))
    top.until(is_well)
    with slowed_on(lab, "a3", *place_of(2)):
        slow = ("office", 2, "straggler")
        top.until(
            lambda s: slow in [(row.cluster, row.rank, row.mark) for row in s.ranks],
            lambda s: is_named(s, "rank 2 on a3"),
        )
    top.until(is_well)
    with link_cut(lab, "a3"):
        top.until(
            lambda s: is_named(s, "office: no heartbeat from a3"),
            lambda s: any(row.source == "a3" and "cut" in row.state for row in s.links),
        )
    top.until(is_well)
    with link_cut(lab, "a1"):
        cut = ("office", "hub", "cut")
        top.until(
            lambda s: is_named(s, "office: "),
            lambda s: cut in [(row.source, row.target[:3], row.state[:3]) for row in s.links],
        )
    top.until(is_well)
