"""The folder between rank 0 and its side process: which file lies where, and for how long."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from isles.outer.client.blobs import digest_of, hash_chunks
from isles.outer.link.messages import Begin

_KEPT_BYTES = 16
"""For averages that a checkpoint lacks, by number: what a checkpoint with AdamW takes, too."""


class Spool:
    """Contributions, averages and states on their way.

    Args:
        folder: of this cluster's own.
        kept: so many averages stay for others after they have been applied.
        since: turns that this cluster had applied at a checkpoint with which it may go on. The
            averages of all turns since stay, too, so that it needs nobody then.
        most_bytes: for those. What is older is given up.
    """

    def __init__(self, folder: Path, kept: int, since: int, most_bytes: int) -> None:
        self.folder = folder
        self.since = since
        self._kept, self._most_bytes = kept, most_bytes

    @classmethod
    def of(cls, begin: Begin) -> Spool:
        """As rank 0 says."""
        kept = 0 if begin.settings.engine == "hub" else begin.settings.keep_averages
        numbers = sum(sum(pieces) for pieces in begin.member.pieces)
        return cls(begin.spool, kept, begin.kept_since, _KEPT_BYTES * numbers)

    def average(self, turn: int) -> Path:
        """Of a turn that is committed: there only when it is whole."""
        return self.folder / f"average-{turn:08d}"

    def attempt(self, turn: int, epoch: int) -> Path:
        """Of a turn that is being averaged by the members of an epoch."""
        return self.folder / f"attempt-{turn:08d}-{epoch}"

    def attempts(self, turn: int) -> list[Path]:
        """Of all epochs for a turn, those that are left."""
        return sorted(self.folder.glob(f"attempt-{turn:08d}-*"))

    def take_over(self, turn: int, digest: str) -> None:
        """A turn was committed while nobody could say so: its average may be an attempt here."""
        for path in self.attempts(turn):
            if digest_of(hash_chunks(path)) == digest:
                path.replace(self.average(turn))
                return

    @property
    def pulled(self) -> Path:
        """Where a state comes in."""
        return self.folder / "pulled"

    def has(self, version: int) -> int:
        """Turns that this cluster has applied, or can apply with the averages that lie here."""
        while self.average(version).exists():
            version += 1
        return version

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
            elif kind in ("attempt", "contribution") and turn < version:
                path.unlink(missing_ok=True)
        if not spare:
            return
        with suppress(FileNotFoundError):  # two processes tidy, for a moment
            spare_bytes = sum(path.stat().st_size for _, path in spare)
            free_bytes = shutil.disk_usage(self.folder).free
            # They help in rare cases: checkpoints come first.
            left = min(self._most_bytes, (free_bytes + spare_bytes) // 2)
            for turn, path in sorted(spare, reverse=True):
                left -= path.stat().st_size
                if turn < self.since or left < 0:
                    path.unlink(missing_ok=True)
