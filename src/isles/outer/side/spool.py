"""The folder between rank 0 and its side process: which file lies where, and for how long."""

from __future__ import annotations

from pathlib import Path


class Spool:
    """Contributions, averages and states on their way.

    Args:
        folder: of this cluster's own.
        kept: so many averages stay after they have been applied.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self.folder = folder
        self._kept = kept

    def average(self, turn: int) -> Path:
        """Of a turn that is committed: there only when it is whole."""
        return self.folder / f"average-{turn:08d}"

    def attempt(self, turn: int, epoch: int) -> Path:
        """Of a turn that is being averaged by the members of an epoch."""
        return self.folder / f"attempt-{turn:08d}-{epoch}"

    def attempts(self, turn: int) -> list[Path]:
        """Of all epochs for a turn, those that are left."""
        return sorted(self.folder.glob(f"attempt-{turn:08d}-*"))

    @property
    def pulled(self) -> Path:
        """Where a state comes in."""
        return self.folder / "pulled"

    def tidy(self, version: int) -> None:
        """Remove what nobody needs once so many turns have been applied."""
        for path in self.folder.iterdir():
            kind, _, rest = path.name.partition("-")
            number = rest[:8]
            if not number.isdecimal():
                continue
            turn = int(number)
            oldest = version - self._kept if kind == "average" else version
            if kind in ("average", "attempt", "contribution") and turn < oldest:
                path.unlink(missing_ok=True)
