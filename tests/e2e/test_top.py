"""`isles top` of a run of two clusters with three ranks each: this machine, and hosts over ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from isles.monitor.live.model import Snapshot
from tests.deadline import DEADLINE_S
from tests.lab.home import HOSTS, ISLES, assert_nothing_left, isles, link_cut, sh, until, write_run
from tests.lab.hosts import Lab

PERIOD_S = 0.1
SLOWDOWN = str(Path(__file__).parents[1] / "slowdown.py")
SHAPE = {
    "device": "cpu",
    "max_restarts": 3,
    "environment": {"variables": {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}},
}
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
        words = ["bash", "-c", f"cd /shared && exec {ISLES} top {run} --json --every 1"]
        self.process = lab.popen("ctl", words)
        self.last: Snapshot | None = None
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

    def until(self, shows: Callable[[Snapshot], object], what: str) -> float:
        """Wait until it shows something; for how many seconds."""
        begun = time.monotonic()
        until(
            lambda: self.last is not None and shows(self.last),
            lambda: f"{what}; {self.noise[-3:]} {self.last and self.last.model_dump_json()}",
        )
        took_s = time.monotonic() - begun
        sys.stderr.write(f"{what}: shown after {took_s:.1f} s\n")
        return took_s

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)


@contextmanager
def shown(lab: Lab, run: str) -> Iterator[Top]:
    top = Top(lab, run)
    try:
        yield top
    finally:
        top.close()


@contextmanager
def slowed_on(lab: Lab, host: str, pid: int, cores: float) -> Iterator[None]:
    """A process of a host, at half its speed inside a `with`.

    It runs for half as long as it did: where others want its core too, it has `cores` of one.
    """
    command = [sys.executable, SLOWDOWN, str(PERIOD_S), f"{pid}:{2 / max(0.05, cores):.2f}"]
    process = lab.popen(host, command, stdin=subprocess.PIPE)
    try:
        yield
    finally:
        process.communicate(timeout=DEADLINE_S)
        lab.run(host, ["kill", "-CONT", str(pid)])


def mark_of(snapshot: Snapshot, cluster: str, rank: int) -> str:
    return next(
        (row.mark for row in snapshot.ranks if (row.cluster, row.rank) == (cluster, rank)), ""
    )


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
    clusters: list[dict[str, Any]] = [
        {"name": "home", "gpus_per_node": 3},
        {"name": "office", "launcher": {"kind": "ssh", "hosts": list(HOSTS)}, "workdir": "/shared"},
    ]
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
        clusters=[{**cluster, **SHAPE} for cluster in clusters],
    )
    isles(lab, "train", "see.yaml", "--detach")
    try:
        with shown(lab, "see") as top:
            top.until(is_well, "all is well")
            _assert_names(lab, top)
            _assert_faults(lab, top)
            # Through the hub alone, as from a site without a way to the machines of the others.
            with shown(lab, "/shared/runs/see-1/hub") as beside:
                beside.until(
                    lambda s: {(row.cluster, row.rank) for row in s.ranks} == RANKS,
                    "all ranks through the hub",
                )
                last = beside.last
                assert last is not None and {row.name for row in last.clusters} == {
                    "home",
                    "office",
                }
        text = isles(lab, "top", "see")
        assert "office/2" in text and "`isles top` is live in a terminal" in text
        assert all(len(line) <= 80 for line in text.splitlines()), text
        (line,) = isles(lab, "top", "see-office", "--json").splitlines()
        assert {row["host"] for row in json.loads(line)["ranks"]} == set(HOSTS)
        did = sh(lab, "ctl", f"cd /shared && {sys.executable} - <<'END'\n{LOOK_AND_STOP}\nEND")
        assert "rank 2 on a3: step " in did and "thread MainThread" in did and "log: 3" in did, did
        assert "stopped with 0" in did, did
        assert "stopped" in isles(lab, "status", "see")
    finally:
        isles(lab, "stop", "see", "--now", expected=None)
    assert_nothing_left(lab, ("ctl", *HOSTS))


def _assert_names(lab: Lab, top: Top) -> None:
    last = top.last
    assert last is not None
    assert {(row.cluster, row.host) for row in last.hosts if row.cluster == "office"} == {
        ("office", host) for host in HOSTS
    }
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
        assert top.last is not None
        row = next(r for r in top.last.ranks if (r.cluster, r.rank) == ("office", rank))
        assert row.pid is not None
        return row.pid, row.use or 0.0

    sh(lab, "a2", f"kill -KILL {place_of(1)[0]}")
    top.until(lambda s: is_named(s, "office: ", "rank 1 on a2"), "a rank that is killed")
    top.until(is_well, "it trains again")
    with slowed_on(lab, "a3", *place_of(2)):
        top.until(
            lambda s: mark_of(s, "office", 2) == "straggler" and is_named(s, "rank 2 on a3"),
            "a rank at half its speed",
        )
    top.until(is_well, "it is as fast as the others")
    with link_cut(lab, "a3"):
        top.until(
            lambda s: (
                is_named(s, "office: a3 has not been heard of")
                and any(row.source == "a3" and "cut" in row.state for row in s.links)
            ),
            "a link between hosts that is cut",
        )
    top.until(is_well, "all hosts are back")
    with link_cut(lab, "a1"):
        top.until(
            lambda s: (
                is_named(s, "office: ")
                and any(
                    (r.source, r.target[:3], r.state[:3]) == ("office", "hub", "cut")
                    for r in s.links
                )
            ),
            "a link to the hub that is cut",
        )
    top.until(is_well, "the cluster is back")
