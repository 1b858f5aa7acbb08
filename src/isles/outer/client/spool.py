"""The folder in which a cluster's contributions, averages and states lie on their way."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from isles.outer.messages import TurnAnswer
from isles.run.records import read_record, write_record

_KEPT_BYTES = 16
"""For averages that a checkpoint lacks, by number: what a checkpoint with AdamW takes, too."""


class Spool:
    """The folder in which contributions, averages and states lie on their way.

    Args:
        folder: of this cluster's own.
        kept: so many averages stay for others after they have been applied.
        since: turns that this cluster had applied at a checkpoint with which it may go on. The
            averages of all turns since stay, too, so that it needs nobody then.
        most_bytes: for those. What is older is given up.
    """

    def __init__(self, folder: Path, kept: int, since: int, most_bytes: int) -> None:
        self.folder, self.since = folder, since
        self._kept, self._most_bytes = kept, most_bytes

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Sequence[int]], since: int, kept: int) -> Spool:
        """With room for as much as a checkpoint takes."""
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, kept, since, _KEPT_BYTES * sum(map(sum, pieces)))

    def contribution(self, turn: int) -> Path:
        """Of this cluster, to a turn."""
        return self.folder / f"contribution-{turn:08d}"

    def average(self, turn: int) -> Path:
        """Of a turn that is committed: there only when it is whole."""
        return self.folder / f"average-{turn:08d}"

    def _answer(self, turn: int) -> Path:
        return self.folder / f"average-{turn:08d}.json"

    @property
    def pulled(self) -> Path:
        """Where a state comes in."""
        return self.folder / "pulled"

    @property
    def given(self) -> Path:
        """Where rank 0 writes a state for another cluster."""
        return self.folder / "given"

    def has(self, version: int) -> int:
        """Turns that this cluster has applied, or can apply with the averages that lie here."""
        while self.average(version).exists():
            version += 1
        return version

    def note_answer(self, answer: TurnAnswer) -> None:
        """Keep what the hub said of a turn, beside its average: another hub may need it."""
        write_record(self._answer(answer.turn), {"answer": answer.model_dump(), "outer_params": ""})

    def note_outer_params(self, turn: int, digest: str) -> None:
        """Keep which outer parameters the average of a turn has led to."""
        if (record := read_record(self._answer(turn))) is not None:
            write_record(self._answer(turn), {**record, "outer_params": digest}, durable=False)

    def kept_turns(self, version: int) -> list[tuple[TurnAnswer, str, Path]]:
        """The last turns, without a gap: what the hub said, which outer parameters, the average."""
        found: list[tuple[TurnAnswer, str, Path]] = []
        for turn in range(self.has(version) - 1, -1, -1):
            record = read_record(self._answer(turn))
            if record is None or not self.average(turn).exists():
                break
            answer = TurnAnswer.model_validate(record["answer"])
            found.append((answer, str(record["outer_params"]), self.average(turn)))
        return found[::-1]

    def tidy(self, version: int) -> None:
        """Remove what nobody needs once so many turns have been applied."""
        spare: list[tuple[int, Path]] = []
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            number = rest[:8]
            if not number.isdecimal():
                continue
            turn = int(number)
            if kind == "average" and turn < version - self._kept:
                spare.append((turn, path))
            elif kind == "contribution" and turn < version:
                path.unlink(missing_ok=True)
        if not spare:
            return
        with suppress(FileNotFoundError):
            spare_bytes = sum(path.stat().st_size for _, path in spare)
            free_bytes = shutil.disk_usage(self.folder).free
            # They help in rare cases: checkpoints come first.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for turn, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if turn < self.since or left < 0:
                    path.unlink(missing_ok=True)
