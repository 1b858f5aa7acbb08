"""TensorBoard event files in logs/runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from isles.track.base import Row, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardTracker:
    """Writes scalars as `train/NAME` and `eval/NAME`. Rank 0 only.

    Args:
        folder: where the event files lie.
        resumed_step: TensorBoard hides what earlier attempts wrote after this step.
    """

    def __init__(self, folder: Path, *, resumed_step: int) -> None:
        self._folder = folder
        # Also where a run begins anew, because it was killed before its first checkpoint.
        has_begun = any(folder.glob("events.out.tfevents.*"))
        self._purge_step = resumed_step + 1 if has_begun else None
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        """Write the numbers of one row."""
        if self._writer is None:
            # Imported with the first row: it costs a second that the first step need not wait for.
            from torch.utils.tensorboard import SummaryWriter

            for folder in (self._folder.parent, self._folder):
                folder.mkdir(exist_ok=True)  # the writer would make the run directory again, too
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in numbers(row):
            self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"], row["at"])
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
