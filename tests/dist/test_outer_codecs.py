"""Every codec, with and without fragments, on its whole way between two clusters."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from isles.outer.messages import Apply
from isles.run.env import RankEnv
from isles.run.records import write_record
from tests.outer_member import serve
from tests.outer_trainer import Trainer
from tests.ranks import DEADLINE_S, start_ranks

TURNS = 4
CASES = {
    f"{codec}-{fragments}": (codec, fragments)
    for codec, fragments in (("none", 1), ("bf16", 2), ("int8", 1), ("int4", 2), ("topk:0.1", 1))
}


class Watched(Trainer):
    """Keeps what the weights of a turn's fragment are after it."""

    def __init__(self, env: RankEnv, folder: Path, name: str, options: dict[str, Any]) -> None:
        self.after: list[tuple[str, str]] = []
        super().__init__(env, folder, name, options)

    def apply(self, event: Apply) -> None:
        super().apply(event)
        digest = hashlib.sha256()
        for name in self.layout.fragments[event.outer_step % self.fragments].names:
            digest.update(self.weights.values[name].numpy().tobytes())
        self.after.append((self.history[event.outer_step][0], digest.hexdigest()))


def all_codecs(env: RankEnv, folder: Path, name: str) -> dict[str, list[tuple[str, str]]]:
    """One cluster: digests of outer parameters and of weights after every turn of every case."""
    found = {}
    for case, (codec, fragments) in CASES.items():
        own = folder / case
        options = {
            "codec": codec,
            "fragments": fragments,
            "turns": TURNS,
            "join": str(own / "state" / "join"),
        }
        trainer = Watched(replace(env, store=own / f"{name}.store"), own, name, options)
        assert trainer.run() == 0
        found[case] = trainer.after
    return found


def test_weights_are_the_same_bits_after_every_turn_with_every_codec(tmp_path: Path) -> None:
    """Two processes that learn unlike things, with links and hub."""
    gangs = []
    for case in CASES:
        own = tmp_path / case
        own.mkdir()
        (own / "end").touch()
        write_record(own / "rules.json", {"min_clusters": 2})
        gangs.append(start_ranks(serve, 1, own / "state", own / "rules.json"))
    end = time.monotonic() + DEADLINE_S
    for case, gang in zip(CASES, gangs, strict=True):
        while not (tmp_path / case / "state" / "join").exists():
            assert not gang.wait_or_timeout(0.02) and time.monotonic() < end, gang.log.read_text()
    clusters = [start_ranks(all_codecs, 1, tmp_path, name) for name in "ab"]
    try:
        (one,), (other,) = (gang.wait() for gang in clusters)
    finally:
        for gang in (*gangs, *clusters):
            gang.kill()
    for case in CASES:
        assert one[case] == other[case], case
        assert len(set(one[case])) == TURNS, (case, "nothing was learnt")
