"""The process that prepares the segments of a node's streams, one ahead of training.

Started by the node's first rank as `python -m isles.data.stream.preparer FOLDER`; it ends, and
removes the folder, when its standard input is closed.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from isles.config.sections.data import DataConfig
from isles.data.stream.feed import (
    ORDERS,
    PROGRESS,
    Demand,
    demand_path,
    segment_folder,
    segment_record,
)
from isles.data.stream.ledger import Ledger
from isles.data.stream.open import open_stream
from isles.data.stream.segment import SegmentRecord, Stream, make_segment
from isles.data.tokens.progress import REPORT_EVERY_S, Reporter
from isles.data.tokens.tokenizer import load_tokenizer
from isles.data.tokens.writer import disk_faults
from isles.errors import DataError
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)

AHEAD = 1
"""Segments that are prepared before a rank asks for them."""

_POLL_S = 0.1

_LONGEST_SEEK_S = 1800.0


class _Reporter(Reporter):
    """Also gives signs of life while a source is read up to the place where a segment begins.

    A packed file is unpacked up to there, in one call that may take minutes.
    """

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name, lambda _: None)
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def tick(self, num_documents: int, num_tokens: int) -> None:
        """The first rows are there: from now on they are the signs of life."""
        self._has_begun.set()
        super().tick(num_documents, num_tokens)

    def end(self) -> None:
        """No thread writes the record any more."""
        self._has_begun.set()
        self._thread.join()

    def _beat(self) -> None:
        end = time.monotonic() + _LONGEST_SEEK_S
        while not self._has_begun.wait(REPORT_EVERY_S) and time.monotonic() < end:
            super().tick(0, 0)


class Preparer:
    """Prepares the segments of some streams as they are asked for, and removes those passed.

    Args:
        folder: the node's.
        streams: the sources.
        before: of each, the segment after which this start begins; None: from the first.
        ledgers: of each, the run's record; None: another node keeps it.
        num_ranks: that read.
    """

    def __init__(
        self,
        folder: Path,
        streams: list[Stream],
        before: list[SegmentRecord | None],
        ledgers: list[Ledger | None],
        num_ranks: int,
    ) -> None:
        self._folder = folder
        self._streams = streams
        self._last = before
        self._ledgers = ledgers
        self._num_ranks = num_ranks
        first = [segment.number + 1 if segment else 0 for segment in before]
        self._oldest = list(first)
        self._demands = [Demand(list(first), list(first)) for _ in range(num_ranks)]
        self._stamps = [stream.rows.stamp() for stream in streams]
        for source in range(len(streams)):
            (folder / f"source-{source}").mkdir()

    def step(self) -> bool:
        """Remove what no rank needs, and prepare the segment that is needed most, if any is.

        Returns:
            Whether there was one to prepare.

        Raises:
            DataError: it cannot be prepared.
        """
        self._listen()
        wanted = []
        for source, last in enumerate(self._last):
            self._remove(source, min(demand.needs[source] for demand in self._demands))
            following = last.number + 1 if last else 0
            lead = following - max(demand.wants[source] for demand in self._demands)
            if lead <= AHEAD:
                wanted.append((lead, source))
        if wanted:
            self._prepare(min(wanted)[1])
        return bool(wanted)

    def _listen(self) -> None:
        for rank in range(self._num_ranks):
            record = read_record(demand_path(self._folder, rank))
            if record is not None:
                self._demands[rank] = Demand(record["needs"], record["wants"])

    def _remove(self, source: int, needed: int) -> None:
        while self._oldest[source] < needed:
            folder = segment_folder(self._folder, source, self._oldest[source])
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".json").unlink(missing_ok=True)
            self._oldest[source] += 1

    def _prepare(self, source: int) -> None:
        stream, last = self._streams[source], self._last[source]
        name, number = stream.rows.describe(), last.number + 1 if last else 0
        reporter = _Reporter(self._folder / PROGRESS, f"{name} (segment {number})")
        temporary = self._folder / f"source-{source}" / ".making"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            segment = make_segment(stream, last, temporary, reporter)
        finally:
            reporter.end()
        if stream.rows.stamp() != self._stamps[source]:
            raise DataError(
                "changed while it was read",
                where=name,
                fix="put it back to go on exactly from the last checkpoint",
                id="data.changed",
            )
        ledger = self._ledgers[source]
        if ledger is not None:
            with disk_faults(ledger.path.parent):
                ledger.add(segment)
        with disk_faults(self._folder):
            temporary.rename(segment_folder(self._folder, source, number))
            path = segment_record(self._folder, source, number)
            write_record(path, segment.record(), durable=False)
        self._last[source] = segment


def make_preparer(folder: Path, orders: dict[str, Any]) -> Preparer:
    """The preparer that a node's first rank has ordered.

    Raises:
        DataError: a source or the tokenizer cannot be opened.
    """
    data = DataConfig.model_validate(orders["data"])
    tokenizer = load_tokenizer(orders["tokenizer"], trust_remote_code=orders["trust_remote_code"])
    streams = [
        open_stream(data, k, tokenizer, orders["seed"], orders["segment_tokens"])
        for k in range(len(data.sources))
    ]
    before = [None if b is None else SegmentRecord.from_record(b) for b in orders["before"]]
    ledgers: list[Ledger | None] = [None] * len(streams)
    if orders["ledger"] is not None:
        ledgers = [
            Ledger(Path(orders["ledger"]), source, identity)
            for source, identity in enumerate(orders["identities"])
        ]
    return Preparer(folder, streams, before, ledgers, orders["num_ranks"])


def main(folder: Path) -> None:
    """Prepare until standard input is closed; what fails is left on record for the ranks."""
    end = threading.Thread(target=_end_with_input, args=(folder,))
    end.start()
    os.nice(10)  # training comes first
    try:
        preparer = make_preparer(folder, read_record(folder / ORDERS) or {})
        while True:
            if not preparer.step():
                time.sleep(_POLL_S)
    except BaseException as error:  # the process' edge: those who wait learn why
        log.exception("preparing the stream failed")
        Reporter(folder / PROGRESS, "stream", lambda _: None).failed(error)
        end.join()


def _end_with_input(folder: Path) -> None:
    sys.stdin.buffer.read()
    # Once more, for what the other thread wrote meanwhile.
    for _ in range(3):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s [data] %(name)s: %(message)s"
    )
    main(Path(sys.argv[1]))
