"""Trackers on the local disk: metrics.jsonl, and TensorBoard's event files in logs/runs."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from isles.config.foreign import open_regular
from isles.run.records import read_metrics, write_lines_atomic
from isles.track.base import Row, numbers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class JsonlTracker:
    """Appends rows to metrics.jsonl; each step appears once, over all restarts. Rank 0 only.

    Args:
        path: the file. Rows after `resumed_step` are deleted first, because a run that resumes from
            an older checkpoint repeats these steps.
        resumed_step: inner steps done so far.
    """

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        # Reads the file twice: the rows of a long run would take gigabytes of memory.
        if not _ends_whole(path) or any(row["step"] > resumed_step for row in read_metrics(path)):
            kept = (row for row in read_metrics(path) if row["step"] <= resumed_step)
            write_lines_atomic(path, (json.dumps(row).encode() + b"\n" for row in kept))
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._stream = os.fdopen(handle, "a", encoding="utf-8")

    def log(self, row: Row) -> None:
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()  # so that readers see the row immediately

    def close(self) -> None:
        self._stream.close()


def _ends_whole(path: Path) -> bool:
    # Whether rows can be appended. The last line may be torn. If somebody has replaced the file by
    # a link or a pipe, it is written as a new file.
    with suppress(OSError), open_regular(path, os.O_NOFOLLOW) as stream:
        size_bytes = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size_bytes - 1))
        return stream.read(1) == b"\n"
    return False


class TensorBoardTracker:
    """Writes scalars as `train/NAME` and `eval/NAME`. Rank 0 only.

    Args:
        folder: directory of the event files.
        resumed_step: TensorBoard hides the points that earlier attempts wrote after this step.
    """

    def __init__(self, folder: Path, *, resumed_step: int) -> None:
        self._folder = folder
        # Also at step 0, for a run that was killed before its first checkpoint.
        has_begun = any(folder.glob("events.out.tfevents.*"))
        self._purge_step = resumed_step + 1 if has_begun else None
        self._writer: SummaryWriter | None = None

    def log(self, row: Row) -> None:
        if self._writer is None:
            # Imported with the first row: the first step should not wait a second for it.
            from torch.utils.tensorboard import SummaryWriter

            for folder in (self._folder.parent, self._folder):
                folder.mkdir(exist_ok=True)  # the writer would make the run directory again, too
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in numbers(row):
            self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"], row["at"])
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
