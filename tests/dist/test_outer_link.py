"""Clusters with real links and a real hub: every codec, kills, freezes, newcomers."""

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
from tests.outer_trainer import SAMPLES, Clusters, serve
from tests.outer_world import overlaps, participants
from tests.ranks import start_ranks


class WithHub(Clusters):
    """A hub, and clusters."""

    def __init__(self, folder: Path, codec: str, fragments: int, turns: int, **rules: Any) -> None:
        folder.mkdir(exist_ok=True)
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
        self.begin(name, {**self.options, **options})

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


CODECS = {"none": 1, "bf16": 2, "int8": 1, "int4": 2, "topk:0.1": 1}
"""Each with so many fragments."""


def test_weights_are_the_same_bits_after_every_turn_with_every_codec(tmp_path: Path) -> None:
    runs = [
        WithHub(tmp_path / codec, codec, fragments, 4, min_clusters=2)
        for codec, fragments in CODECS.items()
    ]
    try:
        for clusters in runs:
            clusters.start("a"), clusters.start("b")
        for clusters in runs:
            a, b = clusters.end(clusters.turns, "ab").values()
            found = [turn["weights"] for turn in a["history"].values()]
            assert a["history"] == b["history"], clusters.folder.name
            assert a["outer_params"] == b["outer_params"]
            assert len(set(found)) == clusters.turns, "nothing was learnt"
    finally:
        for clusters in runs:
            clusters.stop()


def test_kills_and_freezes_lose_no_contribution(tmp_path: Path) -> None:
    """The hub is killed, and a cluster stopped for a while, at random instants."""
    chance, blows = random.Random("int8"), ["hub", "freeze", "hub"]
    rules = {"wait": "all", "min_clusters": 3, "dead_after_s": 120.0}
    clusters = WithHub(tmp_path, "int8", 2, len(blows) + 2, **rules)
    # A turn takes long enough to be hit.
    clusters.options |= {"scale": 16, "link": {"heartbeat_s": 0.5, "max_bytes_per_s": 1e6}}
    logs = [clusters.running["hub"].log]
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
        logs += [gang.log for gang in clusters.running.values()]
        records = clusters.end(clusters.turns, "abc")
        journal = clusters.journal()
        assert participants(journal) == [[1, 2, 3]] * clusters.turns
        assert Samples(journal).counts()["averaged"] == clusters.turns * 3 * SAMPLES
        journal.close()
    finally:
        clusters.stop()
    first = records["a"]
    assert all(turn["is_in"] for turn in first["history"].values())
    for record in records.values():
        assert record["history"] == first["history"]
        assert record["outer_params"] == first["outer_params"]
    token = (clusters.state / "token").read_text().strip()
    for log in logs:
        text = log.read_text(errors="replace")
        assert token not in text and "Traceback" not in text, text


@pytest.mark.long
def test_a_straggler_applies_what_it_missed_and_a_newcomer_takes_the_state(
    tmp_path: Path,
) -> None:
    """b is frozen over two turns, c comes when four are over, d trains something else."""
    rules = {"wait": "all", "dead_after_s": 4.0, "keep_averages": 12}
    clusters = WithHub(tmp_path, "int4", 2, 6, **rules)
    clusters.refused = "d"
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
        clusters.start("d", identity="another rate")
        clusters.reached(4, "c")
        clusters.running["b"].signal(signal.SIGCONT)
        clusters.reached(4, "b")
        a, b, c = clusters.end(clusters.turns, "abc").values()
        assert clusters.running.pop("d").wait() == [1]
        clusters.journal().close()
    finally:
        clusters.stop()
    turns = list(a["history"].values())
    assert [turn["is_in"] for turn in b["history"].values()] == [True] * 2 + [False] * 2 + [
        True
    ] * 2
    for record in (b, c):
        own = {number: turn["outer_params"] for number, turn in record["history"].items()}
        assert own == {number: a["history"][number]["outer_params"] for number in own}
        assert record["outer_params"] == a["outer_params"]
    assert [turn["names"] for turn in turns[4:]] == [["a", "b", "c"]] * 2
    assert list(c["history"]) == ["4", "5"] and len(b["history"]) == 6
    assert any("Adopt(version=4" in event for event in c["seen"])
    assert not any("Adopt" in event for event in b["seen"])
    seen = clusters.record("d")["seen"]
    assert any("lr is another rate in d and 0.7 in the run" in event for event in seen), seen
