"""metrics.jsonl: one line a recorded step, each step once over all restarts."""

from __future__ import annotations

import json
from pathlib import Path

from isles.run.records import read_rows, write_text_atomic
from isles.track.base import Row


class JsonlTracker:
    """Appends rows to a file. Rank 0 only.

    Args:
        path: the file; rows of steps after `resumed_step` are taken out first, since a run that
            goes on from an older checkpoint does those steps again.
        resumed_step: inner steps done so far.
    """

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        rows = read_rows(path)
        kept = [row for row in rows if int(row["step"]) <= resumed_step]
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        if len(kept) != len(rows) or torn or not path.exists():
            write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._stream = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        """Append one row; a reader sees it at once."""
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
