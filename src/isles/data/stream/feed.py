"""A node's segments: the process that prepares them, and the ranks that read them.

They meet in one folder of the cache: what the process is to do, the segments, how far it is, and of
each rank from which segment on it reads and how far it wants to.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.data.stream.segment import SegmentRecord
from isles.data.tokens.progress import Watch, wait_until
from isles.data.tokens.store import TokenStore
from isles.data.tokens.writer import disk_faults
from isles.errors import DataError, TrainingError
from isles.run.process import ProcessId
from isles.run.records import read_record, write_record

log = logging.getLogger(__name__)

ORDERS = "orders.json"
PROGRESS = "progress.json"

_SLOW_S = 5.0


def segment_folder(folder: Path, source: int, number: int) -> Path:
    """Where the tokens of a segment are, once its record is there."""
    return folder / f"source-{source}" / f"segment-{number:08d}"


def segment_record(folder: Path, source: int, number: int) -> Path:
    """The record of a segment, written when all of it is there."""
    return segment_folder(folder, source, number).with_suffix(".json")


def demand_path(folder: Path, local_rank: int) -> Path:
    """What a rank needs."""
    return folder / f"rank-{local_rank}.json"


@dataclass(slots=True)
class Demand:
    """Of each source: from which segment on a rank reads, and up to which it has asked."""

    needs: list[int]
    wants: list[int]


class Feed:
    """The segments of a node, as one of its ranks sees them.

    Args:
        folder: the node's.
        local_rank: this rank's number on the node; 0 starts the process.
        orders: what the process is told; plain JSON.
        first: of each source, the segment with which this start begins.
        progress: called with a line for people until training begins.
        no_progress_s: how long to wait for a sign of life.
    """

    def __init__(
        self,
        folder: Path,
        local_rank: int,
        orders: dict[str, Any],
        first: Sequence[int],
        *,
        progress: Callable[[str], None],
        no_progress_s: float,
    ) -> None:
        self._folder = folder
        self._local_rank = local_rank
        self._orders = orders
        self._demand = Demand(list(first), list(first))
        self._progress = progress
        self._no_progress_s = no_progress_s
        self._process: subprocess.Popen[bytes] | None = None
        self._told = ""

    def need(self, source: int, needs: int, wants: int) -> None:
        """Say from which segment of a source on this rank reads, and up to which it will."""
        demand = self._demand
        if (demand.needs[source], demand.wants[source]) == (needs, wants):
            return
        demand.needs[source], demand.wants[source] = needs, wants
        record = {"needs": demand.needs, "wants": demand.wants}
        self._start()
        with disk_faults(self._folder.parent):
            write_record(demand_path(self._folder, self._local_rank), record, durable=False)

    def open(self, source: int, number: int, *, training: bool) -> tuple[SegmentRecord, TokenStore]:
        """A segment of a source, which is waited for.

        Args:
            source: its number.
            number: the segment's.
            training: whether steps have been made, so that a fault is one of the training.

        Raises:
            DataError, TrainingError: what the process that prepares failed of.
            CommunicationError: it died, or gives no sign of life.
        """
        self._start()
        path = segment_record(self._folder, source, number)
        watch = Watch(self._folder / PROGRESS, self._no_progress_s, is_fresh=True)
        began = time.monotonic()

        def is_there() -> bool:
            if not training:
                self._tell()
            return path.exists()

        try:
            wait_until(is_there, watch, failure_counts=True)
        except DataError as error:
            if training:
                raise TrainingError(
                    error.what, where=error.where, fix=error.fix, id=error.id
                ) from error
            raise
        waited_s = time.monotonic() - began
        if training and waited_s > _SLOW_S:
            log.warning(
                "training waited for data seconds=%.0f: preparing tokens is slower than training; "
                "prepare them before with data.streaming: false, or give the run more CPU cores",
                waited_s,
            )
        record = SegmentRecord.from_record(json.loads(path.read_text(encoding="utf-8")))
        return record, TokenStore.open(segment_folder(self._folder, source, number))

    def _tell(self) -> None:
        record = read_record(self._folder / PROGRESS) or {}
        if record.get("state") == "running" and record["message"] != self._told:
            self._told = record["message"]
            self._progress(self._told)

    def _start(self) -> None:
        """Start the process, once, on the node's first rank."""
        if self._local_rank or self._process is not None:
            return
        with disk_faults(self._folder.parent):
            self._folder.mkdir(exist_ok=True)
            write_record(self._folder / ORDERS, self._orders, durable=False)
        # A process of its own: in a thread, it would hold up the steps of this rank. It ends when
        # its standard input does, whatever this process dies of; a session of its own, so that
        # Ctrl+C in a terminal does not reach it before the last step has its data.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "isles.data.stream.preparer", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        # So that its death is seen even if it dies before it can say a word.
        process = ProcessId.of(self._process.pid).record()
        state = {"state": "running", "message": "starting to prepare the stream"}
        write_record(self._folder / PROGRESS, process | state | {"at": time.time()}, durable=False)
