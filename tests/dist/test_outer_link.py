"""Clusters with real links and a real hub: kills, freezes, newcomers."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import Samples
from tests.outer_member import serve
from tests.outer_trainer import SAMPLES, Clusters, train
from tests.outer_world import overlaps, participants
from tests.ranks import start_ranks


class WithHub(Clusters):
    """A hub, and clusters."""

    def __init__(self, folder: Path, codec: str, fragments: int, turns: int, **rules: Any) -> None:
        super().__init__(folder)
        self.state, self.turns, self.rules = folder / "state", turns, folder / "rules.json"
        self.rules.write_text(json.dumps(rules))
        self.options = {
            "codec": codec,
            "fragments": fragments,
            "turns": turns,
            "join": str(self.state / "join"),
            "link": {"heartbeat_s": 0.5},
        }
        self.serve()

    def serve(self) -> None:
        self.running["hub"] = start_ranks(serve, 1, self.state, self.rules)
        self.until((self.state / "join").exists, "the hub")

    def start(self, name: str, **options: Any) -> None:
        arguments = (self.folder, name, {**self.options, **options})
        self.running[name] = start_ranks(train, 1, *arguments)

    def pause(self, seconds: float) -> None:
        """Let time pass, unless a process ends that should not."""
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, "the end of a pause")

    def journal(self) -> Journal:
        """The hub's, once it is killed; no sample was leased twice."""
        self.kill("hub")
        journal = Journal(self.state / "hub.sqlite")
        assert overlaps(journal) == []
        return journal


def test_kills_and_freezes_lose_no_contribution(tmp_path: Path) -> None:
    """The hub is killed, and a cluster stopped for a while, at random instants."""
    chance, blows = random.Random("int8"), ["hub", "freeze", "hub"]
    rules = {"wait": "all", "min_clusters": 3, "dead_after_s": 120.0}
    clusters = WithHub(tmp_path, "int8", 2, len(blows) + 2, **rules)
    # A turn takes long enough to be hit.
    clusters.options |= {"scale": 16, "link": {"heartbeat_s": 0.5, "max_bytes_per_s": 1e6}}
    try:
        clusters.hold(1)
        for name in "abc":
            clusters.start(name)
        clusters.reached(1, "abc")
        for outer_step, blow in enumerate(blows, start=1):
            clusters.hold(outer_step + 1)
            clusters.pause(chance.uniform(0.0, 0.5))
            if blow == "freeze":
                gang = clusters.running[chance.choice("abc")]
                gang.signal(signal.SIGSTOP)
                clusters.pause(3.0)
                gang.signal(signal.SIGCONT)
            else:
                clusters.kill("hub")
                clusters.serve()
            clusters.reached(outer_step + 1, "abc")
        records = clusters.end(clusters.turns, "abc")
        journal = clusters.journal()
        assert participants(journal) == [[1, 2, 3]] * clusters.turns
        assert Samples(journal).counts()["averaged"] == clusters.turns * 3 * SAMPLES
        journal.close()
    finally:
        clusters.stop()
    first = records["a"]
    for record in records.values():
        assert [outer_step[:1] for outer_step in record["history"].values()] == [
            outer_step[:1] for outer_step in first["history"].values()
        ]
        assert record["outer_params"] == first["outer_params"]
        assert all(is_in for _, is_in, _, _ in record["history"].values())


@pytest.mark.long
def test_a_straggler_applies_what_it_missed_and_a_newcomer_takes_the_state(
    tmp_path: Path,
) -> None:
    """b is frozen over two turns, c comes when four are over, d trains something else."""
    rules = {"wait": "all", "dead_after_s": 4.0, "keep_averages": 12}
    clusters = WithHub(tmp_path, "int4", 2, 6, **rules)
    try:
        clusters.hold(0)
        clusters.start("a"), clusters.start("b")
        clusters.until(lambda: all(clusters.record(n)["is_ready"] for n in "ab"), "a and b")
        clusters.hold(2)
        clusters.reached(2, "ab")
        clusters.running["b"].signal(signal.SIGSTOP)
        clusters.hold(4)
        clusters.reached(4, "a")
        clusters.start("c", seed=1)
        clusters.unknown = "d"
        clusters.start("d", identity="another rate")
        clusters.reached(4, "c")
        clusters.running["b"].signal(signal.SIGCONT)
        clusters.reached(4, "b")
        a, b, c = clusters.end(clusters.turns, "abc").values()
        assert clusters.running.pop("d").wait() == [1]
        clusters.journal().close()
    finally:
        clusters.stop()
    turns = [str(outer_step) for outer_step in range(clusters.turns)]
    digests = [a["history"][outer_step][0] for outer_step in turns]
    assert [b["history"][outer_step][0] for outer_step in turns] == digests
    assert [b["history"][outer_step][1] for outer_step in turns] == [True] * 2 + [False] * 2 + [
        True
    ] * 2
    assert [c["history"][outer_step][0] for outer_step in turns[4:]] == digests[4:]
    assert [a["history"][outer_step][2] for outer_step in turns[4:]] == [["a", "b", "c"]] * 2
    assert a["outer_params"] == b["outer_params"] == c["outer_params"]
    assert any("Adopt(version=4" in event for event in c["seen"])
    assert not any("Adopt" in event for event in b["seen"])
    (refused,) = (tmp_path / "d.refused").read_text().splitlines()
    assert "other_run" in refused and "lr is another rate in d and 0.7 in the run" in refused
