"""What a tracker has been sent: its own id of the run, and the last steps, kept over restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isles.run.records import read_record, write_record


class Sent:
    """The record of one tracker in the run directory. One thread of rank 0 only.

    A run that goes on from an older checkpoint does some steps again, and gets the same numbers;
    those that the tracker has already are not sent again, so that its curve neither doubles nor
    runs backward.

    Args:
        path: where the record lies; made with the first change.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._record: dict[str, Any] = read_record(path) or {}

    def get(self, key: str) -> str | None:
        """A value that was kept."""
        value = self._record.get(key)
        return value if isinstance(value, str) else None

    def keep(self, **values: str) -> None:
        """Keep values; they are on the disk when this returns."""
        self._record |= values
        self._write(durable=True)

    @property
    def last_step(self) -> int:
        """The last step of which a row was sent; -1: none."""
        return max(self._record.get("steps", {}).values(), default=-1)

    @property
    def known(self) -> int:
        """The last step that the tracker was known to have when it was opened last; -1: none."""
        return int(self._record.get("known", -1))

    def known_to(self, *, train: int, eval: int) -> None:
        """The tracker itself says up to which step it has the rows of each kind; -1: none."""
        self._record["known"] = max(train, eval)
        self._record["steps"] = {"train": train, "eval": eval}
        self._write(durable=True)

    def has(self, row: dict[str, Any]) -> bool:
        """Whether this row, or a later one of its kind, was sent."""
        steps = self._record.get("steps", {})
        return bool(row["step"] <= steps.get(row["kind"], -1))

    def add(self, *rows: dict[str, Any]) -> None:
        """These rows were sent."""
        steps = dict(self._record.get("steps", {}))
        for row in rows:
            steps[row["kind"]] = max(row["step"], steps.get(row["kind"], -1))
        self._record["steps"] = steps
        self._write(durable=False)

    def _write(self, *, durable: bool) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_record(self._path, self._record, durable=durable)
