"""The folder in which contributions, averages and states lie on their way."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from isles.outer.messages import RoundAnswer
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

_KEPT_BYTES = 16
"""For averages that a checkpoint lacks, by number: what a checkpoint with AdamW takes, too."""


class Spool:
    """The files of one cluster, kept over attempts.

    Args:
        version: outer steps that have been applied.
        kept: so many averages stay for others after they have been applied.
        since: outer steps that this cluster had applied at a checkpoint with which it may go on.
            The averages of all later ones stay, too, so that it needs nobody then.
        most_bytes: for those. What is older is given up.
    """

    def __init__(self, folder: Path, version: int, kept: int, since: int, most_bytes: int) -> None:
        self.folder, self.version, self.since = folder, version, since
        self._kept, self._most_bytes = kept, most_bytes
        self.pulled, self.given = folder / "pulled", folder / "given"

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Sequence[int]], version: int, kept: int) -> Spool:
        """A folder with room for as much as a checkpoint takes."""
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, version, kept, version, _KEPT_BYTES * sum(map(sum, pieces)))

    def contribution(self, outer_step: int) -> Path:
        return self.folder / f"contribution-{outer_step:08d}"

    def average(self, outer_step: int) -> Path:
        """The file is there only when it is whole."""
        return self.folder / f"average-{outer_step:08d}"

    def _answer(self, outer_step: int) -> Path:
        return self.folder / f"average-{outer_step:08d}.json"

    @property
    def has(self) -> int:
        """Outer steps that are applied, or can be with the averages that lie here."""
        version = self.version
        while self.average(version).exists():
            version += 1
        return version

    def note_answer(self, answer: RoundAnswer) -> None:
        """Keep the hub's answer beside the average: another hub may need it."""
        record = {"answer": answer.model_dump(), "outer_params": ""}
        write_record(self._answer(answer.outer_step), record)

    def note_outer_params(self, outer_step: int, digest: str) -> None:
        """Keep which outer parameters an average has led to."""
        path = self._answer(outer_step)
        if (record := read_record(path, MAX_LIST_BYTES)) is not None:
            write_record(path, {**record, "outer_params": digest}, durable=False)

    def kept_rounds(self) -> list[tuple[RoundAnswer, str, Path]]:
        """The last ones, without a gap: the hub's answer, the outer parameters, the average."""
        found: list[tuple[RoundAnswer, str, Path]] = []
        for outer_step in range(self.has - 1, -1, -1):
            record = read_record(self._answer(outer_step), MAX_LIST_BYTES)
            average = self.average(outer_step)
            if record is None or not average.exists():
                break
            answer = RoundAnswer.model_validate(record["answer"])
            found.append((answer, str(record["outer_params"]), average))
        return found[::-1]

    def tidy(self) -> None:
        """Remove what nobody needs any more."""
        spare: list[tuple[int, Path]] = []
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            number = rest[:8]
            if not number.isdecimal():
                continue
            if kind == "average" and int(number) < self.version - self._kept:
                spare.append((int(number), path))
            elif kind == "contribution" and int(number) < self.version:
                path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            spare_bytes = sum(path.stat().st_size for _, path in spare)
            free_bytes = shutil.disk_usage(self.folder).free
            # They help in rare cases: checkpoints come first.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for outer_step, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if outer_step < self.since or left < 0:
                    path.unlink(missing_ok=True)
