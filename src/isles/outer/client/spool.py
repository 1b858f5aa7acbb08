"""Folder for contributions, averages and states in transfer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from isles.outer.messages import RoundAnswer
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

_KEPT_BYTES = 16
"""Limit for averages that a checkpoint lacks, in bytes per number: as for a checkpoint
with AdamW."""


class Spool:
    """The files of one cluster, kept over attempts.

    Args:
        version: number of applied outer steps.
        kept: number of averages that stay for others after they have been applied.
        since: number of outer steps applied at a checkpoint that this cluster may resume from. The
            averages of all later steps stay too, so that it then needs no other cluster.
        most_bytes: limit for those; older averages are deleted.
    """

    def __init__(self, folder: Path, version: int, kept: int, since: int, most_bytes: int) -> None:
        self.folder, self.version, self.since = folder, version, since
        self._kept, self._most_bytes = kept, most_bytes
        self.pulled, self.given = folder / "pulled", folder / "given"

    @classmethod
    def of(cls, folder: Path, pieces: Sequence[Sequence[int]], version: int, kept: int) -> Spool:
        """A folder with room for the size of a checkpoint."""
        folder.mkdir(mode=0o700, exist_ok=True)
        return cls(folder, version, kept, version, _KEPT_BYTES * sum(map(sum, pieces)))

    def contribution(self, outer_step: int) -> Path:
        return self.folder / f"contribution-{outer_step:08d}"

    def average(self, outer_step: int) -> Path:
        """Path of an average; the file exists only when it is complete."""
        return self.folder / f"average-{outer_step:08d}"

    def _answer(self, outer_step: int) -> Path:
        return self.folder / f"average-{outer_step:08d}.json"

    @property
    def has(self) -> int:
        """Number of outer steps that are applied, or can be with the stored averages."""
        version = self.version
        while self.average(version).exists():
            version += 1
        return version

    def note_answer(self, answer: RoundAnswer) -> None:
        """Store the hub's answer next to the average: another hub may need it."""
        record = {"answer": answer.model_dump(), "outer_params": ""}
        write_record(self._answer(answer.outer_step), record)

    def note_outer_params(self, outer_step: int, digest: str) -> None:
        """Store the digest of the outer parameters after an average."""
        path = self._answer(outer_step)
        if (record := read_record(path, MAX_LIST_BYTES)) is not None:
            write_record(path, {**record, "outer_params": digest}, durable=False)

    def kept_rounds(self) -> list[tuple[RoundAnswer, str, Path]]:
        """The last averages, without a gap: the hub's answer, the outer parameters, the file."""
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
        """Remove files that are no longer needed."""
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
            # They help only in rare cases, so checkpoints take priority.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for outer_step, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if outer_step < self.since or left < 0:
                    path.unlink(missing_ok=True)
