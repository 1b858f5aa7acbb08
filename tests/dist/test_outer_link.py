"""Clusters with real links and a real hub: kills, freezes, newcomers."""

from __future__ import annotations

import json
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import Samples
from tests.outer_member import serve
from tests.outer_trainer import SAMPLES, train
from tests.outer_world import overlaps, participants
from tests.ranks import Gang, start_ranks

DEADLINE_S = 240.0


def until(
    condition: Callable[[], object], what: str, explain: Callable[[], str] = lambda: ""
) -> None:
    """Look again and again, for as long as a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {DEADLINE_S:.0f} s\n{explain()}")
        time.sleep(0.02)


class Clusters:
    """A hub, and clusters."""

    def __init__(self, folder: Path, codec: str, fragments: int, turns: int, **rules: Any) -> None:
        self.folder, self.state, self.turns = folder, folder / "state", turns
        self.rules = folder / "rules.json"
        self.rules.write_text(json.dumps(rules))
        self.options = {
            "codec": codec,
            "fragments": fragments,
            "turns": turns,
            "join": str(self.state / "join"),
            "link": {"heartbeat_s": 0.5},
        }
        self.running: dict[str, Gang] = {}
        self.unknown = ""
        """Who is not let in, and therefore ends by itself."""
        self.serve()

    def serve(self) -> None:
        self.running["hub"] = start_ranks(serve, 1, self.state, self.rules)
        until((self.state / "join").exists, "the hub")

    def start(self, name: str, **options: Any) -> None:
        arguments = (self.folder, name, {**self.options, **options})
        self.running[name] = start_ranks(train, 1, *arguments)

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()

    def hold(self, outer_step: int) -> None:
        """Let nobody contribute to this turn, nor to any after it."""
        partial = self.folder / "hold.new"
        partial.write_text(str(outer_step))
        partial.replace(self.folder / "hold")

    def reached(self, outer_step: int, *names: str) -> None:
        """Wait until these have applied so many turns."""

        def is_so() -> bool:
            self.check()
            return all(self.record(name)["version"] >= outer_step for name in names)

        until(
            is_so,
            f"{outer_step} turns",
            lambda: "\n\n".join(f"== {n}\n{self.words(n)}" for n in names),
        )

    def record(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {"version": 0, "is_ready": False}

    def committed(self) -> int:
        with suppress(sqlite3.Error):
            journal = sqlite3.connect(f"file:{self.state / 'hub.sqlite'}?mode=ro", uri=True)
            try:
                sql = "SELECT COUNT(*) FROM rounds WHERE state = 'committed'"
                return int(journal.execute(sql).fetchone()[0])
            finally:
                journal.close()
        return 0

    def pause(self, seconds: float) -> None:
        """Let time pass, unless a process ends that should not."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.check()
            time.sleep(0.01)

    def check(self) -> None:
        for name, gang in self.running.items():
            if name == self.unknown:
                continue
            assert not gang.wait_or_timeout(0.0), f"{name} has ended\n{self.words(name)}"

    def words(self, name: str) -> str:
        seen = "\n".join(self.record(name).get("seen", [])[-30:])
        log = self.running[name].log.read_text()[-3000:] if name in self.running else ""
        return f"{seen}\n{log}"

    def end(self, *names: str) -> list[dict[str, Any]]:
        """Wait until these have applied all turns; what they have seen."""
        self.reached(self.turns, *names)
        (self.folder / "end").touch()
        for name in names:
            assert self.running.pop(name).wait() == [0]
        return [self.record(name) for name in names]

    def stop(self) -> None:
        for gang in self.running.values():
            gang.kill()


def check_ledger(clusters: Clusters, everybody: bool, names: int) -> None:
    """No sample was leased twice; every contribution is in its turn."""
    clusters.kill("hub")
    journal = Journal(clusters.state / "hub.sqlite")
    assert overlaps(journal) == []
    if everybody:
        everyone = list(range(1, names + 1))
        assert participants(journal) == [everyone] * clusters.turns
        assert Samples(journal).counts()["averaged"] == clusters.turns * names * SAMPLES
    journal.close()


@pytest.mark.parametrize(("codec", "fragments", "blows"), [("int8", 2, ["hub", "freeze", "hub"])])
def test_kills_and_freezes_lose_no_contribution(
    tmp_path: Path, codec: str, fragments: int, blows: list[str]
) -> None:
    """The hub is killed, and a cluster stopped for a while, at random instants."""
    chance = random.Random(codec)
    names = ("a", "b", "c")
    rules = {"wait": "all", "min_clusters": 3, "dead_after_s": 120.0}
    clusters = Clusters(tmp_path, codec, fragments, len(blows) + 2, **rules)
    clusters.options["scale"] = 16
    # A turn takes long enough to be hit.
    clusters.options["link"] |= {"max_bytes_per_s": 1e6}
    try:
        clusters.hold(1)
        for name in names:
            clusters.start(name)
        clusters.reached(1, *names)
        for outer_step, blow in enumerate(blows, start=1):
            clusters.hold(outer_step + 1)
            clusters.pause(chance.uniform(0.0, 0.5))
            if blow == "freeze":
                gang = clusters.running[chance.choice(names)]
                gang.signal(signal.SIGSTOP)
                clusters.pause(3.0)
                gang.signal(signal.SIGCONT)
            else:
                clusters.kill("hub")
                clusters.serve()
            clusters.reached(outer_step + 1, *names)
        clusters.hold(clusters.turns)
        records = clusters.end(*names)
        check_ledger(clusters, everybody=True, names=3)
    finally:
        clusters.stop()
    first = records[0]
    for record in records:
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
    clusters = Clusters(tmp_path, "int4", 2, 6, **rules)
    try:
        clusters.hold(0)
        clusters.start("a"), clusters.start("b")
        until(lambda: all(clusters.record(name)["is_ready"] for name in "ab"), "a and b")
        clusters.hold(2)
        clusters.reached(2, "a", "b")
        clusters.running["b"].signal(signal.SIGSTOP)
        clusters.hold(4)
        clusters.reached(4, "a")
        clusters.start("c", seed=1)
        clusters.unknown = "d"
        clusters.start("d", identity="another rate")
        clusters.reached(4, "c")
        clusters.running["b"].signal(signal.SIGCONT)
        clusters.reached(4, "b")
        clusters.hold(clusters.turns)
        a, b, c = clusters.end("a", "b", "c")
        assert clusters.running.pop("d").wait() == [1]
        check_ledger(clusters, everybody=False, names=3)
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
