"""What is on record of a stream: the segments made so far, any of which a run may begin with."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from isles.data.stream.segment import SegmentRecord
from isles.errors import DataError
from isles.run.records import read_rows, write_text_atomic

log = logging.getLogger(__name__)


class Ledger:
    """The record of one stream in a run directory: a line for the data, then one for each segment.

    One process writes it, with every line down on the disk before the segment is used, so that it
    reaches as far as any checkpoint does.

    Args:
        folder: of the run's streams.
        source: its number in the run file.
        identity: what the segments depend on; plain JSON.
    """

    def __init__(self, folder: Path, source: int, identity: dict[str, Any]) -> None:
        self.path = folder / f"source-{source}.jsonl"
        self._identity = identity
        self._segments: list[SegmentRecord] = []
        self._is_ours = False
        rows = read_rows(self.path)
        if rows and rows[0].get("identity") == identity:
            self._segments = _connected(rows[1:])

    def check(self, started: bool) -> None:
        """Refuse to go on with other data than the segments on record were made of.

        Raises:
            DataError: the data has changed, and samples of it were used already.
        """
        rows = read_rows(self.path)
        before = rows[0].get("identity") if rows else None
        if started and before is not None and before != self._identity:
            raise DataError(
                "the training data has changed since this run began: "
                f"{difference(before, self._identity)}",
                where="data.sources",
                fix="put it back to go on exactly, or start a new run with `--resume no`",
                id="data.changed",
            )

    def before(self, sample: int) -> SegmentRecord | None:
        """The last segment on record that ends at or before this sample of the stream; or None."""
        found = None
        for segment in self._segments:
            if segment.first_sample + segment.num_samples > sample:
                break
            found = segment
        return found

    def reaches(self, sample: int) -> bool:
        """Whether it says where the segment with this sample of the stream begins."""
        last = self._segments[-1] if self._segments else None
        return last is not None and sample <= last.first_sample + last.num_samples

    def add(self, segment: SegmentRecord) -> None:
        """Put a segment on record; one that is there already must be the same.

        Raises:
            DataError: it was made of other data before.
            OSError: the disk is full or closed to us.
        """
        if segment.number < len(self._segments):
            before = self._segments[segment.number]
            if before != segment:
                raise DataError(
                    f"the training data has changed since this run began: segment {segment.number} "
                    f"(samples {segment.first_sample} to "
                    f"{segment.first_sample + segment.num_samples - 1}) is made of other tokens",
                    where="data.sources",
                    fix="put it back to go on exactly, or start a new run with `--resume no`",
                    id="data.changed",
                )
            return
        assert segment.number == len(self._segments), "a start begins with a segment on record"
        if not self._is_ours:
            # Whole, for the last line may be torn, or all of it of other data.
            self.path.parent.mkdir(exist_ok=True)
            rows = [{"identity": self._identity}, *(known.record() for known in self._segments)]
            write_text_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows))
            self._is_ours = True
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(segment.record()) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._segments.append(segment)


def _connected(rows: list[dict[str, Any]]) -> list[SegmentRecord]:
    """The segments up to the first that is missing."""
    segments: list[SegmentRecord] = []
    for row in rows:
        try:
            segment = SegmentRecord.from_record(row)
        except (KeyError, TypeError):
            continue
        if segment.number == len(segments):
            segments.append(segment)
    return segments


def difference(before: Any, now: Any) -> str:
    """The first thing in which two identities differ, for people."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                return f"{name}: {difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        for one, other in zip(before, now, strict=False):
            if one != other:
                return difference(one, other)
        return f"{len(before)} entries before, {len(now)} now"
    return f"{str(before)[:60]} before, {str(now)[:60]} now"
