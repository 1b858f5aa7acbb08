"""The endless training data of a streaming run, prepared during use and deleted after use.

The first rank of each node prepares the segments in a thread, one ahead of the reader, into a
folder that all ranks of the node read.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isles.config.sections.data import DataConfig, isolates
from isles.data.order import ENDLESS, Int64Array, key_from, permute
from isles.data.samples import Samples, SampleTable
from isles.data.stream.segments import SegmentRecord, Stream, make_segment, segment_table
from isles.data.tokens.prepare import count_message, different_data, size_of_folders
from isles.data.tokens.store import TokenStore, disk_errors
from isles.dist.world import RankLocation, World, place_of
from isles.errors import CommunicationError, DataError, TrainingError, UserError
from isles.run.prepared import remove_stale, temporary_beside
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FAILED, _MAKING = "failed.json", ".making"
_SLOW_S = 5.0
_POLL_S, _LONGEST_END_S = 0.05, 10.0
_LONGEST_WAIT_S = 1800.0
"""Seconds without progress that are allowed. A packed file is unpacked up to the start of a
segment, which may take minutes without a write."""


def open_streams(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    state: list[dict[str, Any] | None] | None,
    seed: int,
    vocab_size: int,
    world: World | None,
    progress: Callable[[str], None],
) -> list[StreamSamples]:
    """The endless samples of each source of a streaming run. All ranks must call this.

    Args:
        cache_dir: the folder of the segments that are in use.
        state: from `Dataset.state`; None for a new run.
        progress: called with a line for the user until training starts.

    Raises:
        DataError: a source is missing on a node, or differs between nodes.
    """
    me = place_of(world) if world is not None else RankLocation(0, 0, "this machine")
    streams: list[Stream] = []

    def identify() -> list[dict[str, Any]]:
        for k in range(len(data.sources)):
            # A copy for each thread, because a tokenizer may fail if two threads share it.
            streams.append(Stream(data, k, copy.deepcopy(tokenizer), seed))
        # As JSON will return it, with lists instead of tuples.
        plain: list[dict[str, Any]] = json.loads(json.dumps([s.identity() for s in streams]))
        return plain

    identities = _agree(world, me, identify)
    folder = _shared_folder(world, me, cache_dir)
    parts = []
    for k, identity in enumerate(identities):
        before = SegmentRecord.from_record(state[k] or {}) if state and state[k] else None
        own = folder / f"source-{k}"
        producer = _Producer(streams[k], own, before) if me.is_leader else None
        content = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        ids = {"seed": seed, "vocab_size": vocab_size}
        parts.append(StreamSamples(data, k, producer, own, before, content, progress, **ids))
    return parts


class PassedError(Exception):
    """The samples are before the stream's position and no longer available."""


@dataclass(frozen=True, slots=True)
class _Segment:
    record: SegmentRecord
    table: SampleTable
    order: Int64Array
    max_token_id: int


class StreamSamples(Samples):
    """Numbered samples of one stream; shuffled within each segment, which is read from the cache.

    Ask for samples in ascending order, one global batch after another. `num_targets` of a whole
    global batch drops all samples before its first sample. Dropped samples raise PassedError.

    Args:
        producer: makes the segments; None if another rank of this node does.
        before: the last segment before this attempt's position; None at the start.
        content: identifies the samples' contents.
    """

    def __init__(
        self,
        data: DataConfig,
        source: int,
        producer: _Producer | None,
        folder: Path,
        before: SegmentRecord | None,
        content: str,
        progress: Callable[[str], None],
        *,
        seed: int,
        vocab_size: int,
    ) -> None:
        self.num_samples = ENDLESS
        self.isolates = isolates(data, data.sources[source])
        self._data, self._source = data, source
        self._producer, self._folder, self._before = producer, folder, before
        self._content, self._progress = content, progress
        self._seed, self._vocab_size = seed, vocab_size
        self._open: list[_Segment] = []  # segments that are still needed
        # The first samples of the last global batches. All ranks are less than two steps apart.
        self._firsts: tuple[int, ...] = ()
        self._is_closed = False

    @property
    def max_token_id(self) -> int:
        """The largest id of the first segment, after waiting for it; later segments are checked."""
        if not self._open:
            self._open_next(0)
        return self._open[0].max_token_id

    @property
    def content(self) -> str:
        return self._content

    @property
    def record(self) -> Mapping[str, Any]:
        """The counts of the first segment, after waiting for it."""
        if not self._open:
            self._open_next(0)
        return self._open[0].table.record

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; drops all samples before them."""
        found = np.empty(samples.shape, dtype=np.int64)
        for segment, here, inside in self._by_segment(samples):
            found[here] = segment.table.num_targets(inside)
        first = int(samples.min())
        if self._firsts[-1:] != (first,):
            self._firsts = (*self._firsts, first)[-3:]
        self._forget(self._firsts[0])
        return found

    def lengths(self, samples: Int64Array) -> Int64Array:
        found = np.empty((len(samples), 1), dtype=np.int64)
        for segment, here, inside in self._by_segment(samples):
            found[here] = segment.table.lengths(inside)
        return found

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        ((segment, _, inside),) = self._by_segment(np.array([sample]))
        segment.table.read(int(inside[0]), input_ids_RT, targets_RT, position_ids_RT)

    def state(self) -> dict[str, Any] | None:
        """The last segment that is no longer needed; None if the first is needed."""
        return None if self._before is None else self._before.record()

    def close(self) -> None:
        """Stop the thread and remove the remaining folders."""
        self._is_closed = True
        if self._producer is not None:
            self._producer.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()  # after the last stream

    def _by_segment(self, samples: Int64Array) -> Iterator[tuple[_Segment, Int64Array, Int64Array]]:
        # The segments of some samples, which of these each has, and their numbers within it.
        first, last = int(samples.min()), int(samples.max())
        while not self._open or last >= self._open[-1].record.end_sample:
            self._open_next(first)
            if not self._firsts:
                self._forget(first)  # an attempt without a state only passes through
        if first < self._open[0].record.first_sample:
            raise PassedError(f"sample {first} of source {self._source}: it is no longer available")
        for segment in self._open:
            start = segment.record.first_sample
            here = np.flatnonzero((samples >= start) & (samples < segment.record.end_sample))
            if here.size:
                yield segment, here, segment.order[samples[here] - start]

    def _forget(self, sample: int) -> None:
        # Remove the segments that end at or before this sample, which no rank needs.
        while self._open and self._open[0].record.end_sample <= sample:
            self._before = self._open.pop(0).record
            if self._producer is not None:
                path = _path(self._folder, self._before.number)
                shutil.rmtree(path, ignore_errors=True)
                path.with_suffix(".json").unlink(missing_ok=True)

    def _open_next(self, first: int) -> None:
        training = bool(self._firsts)
        began = time.monotonic()
        try:
            record = self._await(first, training=training)
        except DataError as error:
            if not training:
                raise
            raise TrainingError(
                error.what, where=error.where, fix=error.fix, id=error.id
            ) from error
        waited_s = time.monotonic() - began
        if training and waited_s > _SLOW_S:
            log.warning(
                "training waited for data seconds=%.0f: preparing tokens is slower than training. "
                "Prepare them first with data.streaming: false, or give the run more CPU cores",
                waited_s,
            )
        store = TokenStore.open(_path(self._folder, record.number))
        if training and store.max_token_id >= self._vocab_size:
            raise TrainingError(
                f"the data holds token {store.max_token_id}, the model knows {self._vocab_size} "
                "tokens",
                where=f"{store.name}, segment {record.number}",
                fix="use the tokenizer that belongs to the model",
            )
        if self._producer is not None:
            self._producer.room.release()
        count = record.num_samples
        key = key_from(self._seed, 7, self._source, record.number)
        order = permute(np.arange(count), count, key)
        table = segment_table(self._data, self._data.sources[self._source], store, record.begin)
        self._open.append(_Segment(record, table, order, store.max_token_id))

    def _await(self, first: int, *, training: bool) -> SegmentRecord:
        # The record of the next segment, once it is there. The rank that prepares removes those
        # that it only passes through on its way to the first sample.
        last = self._open[-1].record if self._open else self._before
        number = last.number + 1 if last else 0
        news, since, line = (-1, ""), time.monotonic(), ""
        while True:
            paths = [_path(self._folder, number).with_suffix(".json")]
            if self._producer is None:
                paths = sorted(self._folder.glob("segment-*.json"))
            for found in (read_record(path, MAX_LIST_BYTES) for path in paths):
                if found is not None:
                    record = SegmentRecord.from_record(found)
                    is_needed = record.number >= number and record.end_sample > first
                    if is_needed or self._producer is not None:
                        return record
            if self._producer is not None:
                line = self._producer.line
                if self._producer.error is not None:
                    raise self._producer.error
            elif (failed := read_record(self._folder / _FAILED, MAX_LIST_BYTES)) is not None:
                raise DataError(**failed)
            if self._is_closed:
                raise _Closed
            now = (size_of_folders([self._folder / _MAKING]), line)
            if now != news:
                news, since = now, time.monotonic()
                if line and not training:
                    self._progress(line)
            elif time.monotonic() - since > _LONGEST_WAIT_S:
                raise CommunicationError(
                    f"the first rank of this node has not prepared any data for "
                    f"{_LONGEST_WAIT_S:.0f} s",
                    where=str(self._folder),
                    fix="check its log",
                    id="data.waiting",
                )
            time.sleep(_POLL_S)


def _path(folder: Path, number: int) -> Path:
    # The same with .json is written when all of the segment is there.
    return folder / f"segment-{number:08d}"


class _Producer:
    """The thread that prepares the segments of one stream, one ahead of the reader.

    `room` is released for each segment that is opened. A failure is in `error`, and for the other
    ranks of the node in a file.
    """

    def __init__(self, stream: Stream, folder: Path, before: SegmentRecord | None) -> None:
        self.line = ""
        self.error: Exception | None = None
        self.room = threading.Semaphore(0)
        self._stream = stream
        self._folder = folder
        self._is_closed = False
        # A daemon, so that a failed process does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(before,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, with a time limit, because it may hang on the network."""
        self._is_closed = True
        self.room.release()
        self._thread.join(timeout=_LONGEST_END_S)

    def _run(self, last: SegmentRecord | None) -> None:
        try:
            identity = self._stream.source.identity()
            while not self._is_closed:
                last = self._make(last, identity)
                self.room.acquire()
        except _Closed:
            return
        except Exception as error:  # the thread's edge: those who wait learn why
            if not isinstance(error, UserError):
                log.exception("preparing the stream failed")
                error = DataError(
                    f"{type(error).__name__}: {error}",
                    where=self._stream.source.name,
                    fix="check the log of the process that prepared it",
                )
            record = {part: getattr(error, part) for part in ("what", "where", "fix", "id")}
            with contextlib.suppress(OSError):
                write_record(self._folder / _FAILED, record, durable=False)
            self.error = error

    def _make(self, last: SegmentRecord | None, identity: dict[str, Any]) -> SegmentRecord:
        name, number = self._stream.source.name, last.number + 1 if last else 0

        def tick(documents: int, tokens: int) -> None:
            if self._is_closed:
                raise _Closed
            self.line = count_message(f"{name} (segment {number})", documents, tokens)

        with disk_errors(self._folder.parent):
            self._folder.mkdir(parents=True, exist_ok=True)
        record = make_segment(self._stream, last, self._folder / _MAKING, tick)
        if self._stream.source.identity() != identity:
            raise DataError(
                "changed while it was read",
                where=name,
                fix="restore the old data to resume exactly from the last checkpoint",
                id="data.changed",
            )
        with disk_errors(self._folder.parent):
            path = _path(self._folder, number)
            # Other ranks open a segment once its record exists, so the record is written last.
            (self._folder / _MAKING).rename(path)
            write_record(path.with_suffix(".json"), record.record(), durable=False)
        return record


class _Closed(Exception):
    """The stream is not read any more."""


def _agree(
    world: World | None, me: RankLocation, identify: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    # The sources as every node sees them. All ranks must call this.
    if world is None:
        return identify()
    mine: list[dict[str, Any]] = []
    failure: UserError | None = None
    if me.is_leader:
        try:
            mine = identify()
        except UserError as error:
            failure = error
    found = [e for e in world.gather((me, mine, failure), group=world.work) if e[0].is_leader]
    failed = [(place, reason) for place, _, reason in found if reason is not None]
    if failed:
        place, reason = failed[0]
        if len(failed) < len(found):
            raise DataError(
                f"{reason.what}; other machines have it, and with data.streaming every machine "
                f"reads it",
                where=f"{reason.where} on {place}",
                fix="copy it there or put it on a disk that all machines share; or set "
                "data.streaming: "
                "false, which sends the prepared tokens",
            )
        raise reason
    first, identity, _ = found[0]
    for place, other, _ in found[1:]:
        if other != identity:
            raise different_data(first, place, identity, other, "it from one to the other")
    return identity


def _shared_folder(world: World | None, me: RankLocation, cache_dir: Path) -> Path:
    # A new folder of this node, named after its first rank. All ranks must call this.
    name = ""
    if me.is_leader:
        with disk_errors(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            folder = cache_dir / f"stream-{uuid.uuid4().hex[:8]}"
            remove_stale(folder, locked=False)
            temporary = temporary_beside(folder, "stream")
            temporary.mkdir(0o700)  # only the ranks of this run write and read there
            name = temporary.name
    if world is not None:
        name = world.gather(name, group=world.work)[me.leader]
    return cache_dir.absolute() / name
