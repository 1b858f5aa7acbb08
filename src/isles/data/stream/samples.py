"""The training data of a run that streams: endless, prepared in use and forgotten after it.

The first rank of each node prepares the segments, in a thread and one ahead of what is read, into a
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
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isles.config.sections.data import DataConfig, isolates
from isles.data.order import ENDLESS, Int64Array, key_from, permute
from isles.data.samples import Samples, SampleTable
from isles.data.stream.segments import SegmentRecord, Stream, make_segment, segment_table
from isles.data.tokens.prepare import count_message, size_of_folders
from isles.data.tokens.store import (
    TokenStore,
    disk_errors,
    remove_stale,
    temporary_beside,
)
from isles.dist.world import Place, World, place_of
from isles.errors import CommunicationError, DataError, TrainingError, UserError
from isles.run.records import read_record, write_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_FAILED = "failed.json"
_SLOW_S = 5.0
_POLL_S, _REPORT_S, _LONGEST_END_S = 0.05, 0.5, 10.0
_LONGEST_WAIT_S = 1800.0
"""A packed file is unpacked up to the place where a segment begins: that may take minutes, in which
nothing is written."""


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
    """The endless samples of each source of a run that streams. All ranks must call this.

    Args:
        cache_dir: where the segments are, while they are needed.
        state: as `Dataset.state` gave it; None: the run begins.
        progress: called with a line for people until training begins.

    Raises:
        DataError: a source is missing on a node, or differs between nodes.
    """
    me = place_of(world) if world is not None else Place(0, 0, "this machine")
    streams: list[Stream] = []

    def identify() -> list[dict[str, Any]]:
        for k in range(len(data.sources)):
            # A copy for each, as a tokenizer that two threads use at once may fail.
            streams.append(Stream(data, k, copy.deepcopy(tokenizer), seed))
        # As it will be read again: tuples as lists.
        plain: list[dict[str, Any]] = json.loads(json.dumps([s.identity() for s in streams]))
        return plain

    identities = _agree(world, me, identify)
    folder = _shared_folder(world, me, cache_dir)
    parts = []
    for k, identity in enumerate(identities):
        before = SegmentRecord.from_record(state[k] or {}) if state and state[k] else None
        stream = streams[k] if me.is_leader else None
        segments = _Segments(stream, folder / f"source-{k}", before, progress)
        content = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        parts.append(StreamSamples(data, k, segments, content, seed=seed, vocab_size=vocab_size))
    return parts


@dataclass(frozen=True, slots=True)
class _Segment:
    record: SegmentRecord
    table: SampleTable
    order: Int64Array
    max_token_id: int


class StreamSamples(Samples):
    """Numbered samples of one stream; shuffled within each segment, which is read from the cache.

    They must be asked for in ascending order, one global batch after another: `num_targets` of a
    whole global batch says that what lies before its first sample is passed for good.

    Args:
        content: names what the samples are made of.
    """

    def __init__(
        self,
        data: DataConfig,
        source: int,
        segments: _Segments,
        content: str,
        *,
        seed: int,
        vocab_size: int,
    ) -> None:
        self.num_samples = ENDLESS
        self.isolates = isolates(data, data.sources[source])
        self._data, self._source = data, source
        self._segments = segments
        self._content = content
        self._seed = seed
        self._vocab_size = vocab_size
        self._open: list[_Segment] = []
        self._firsts: tuple[int, ...] = ()
        """The first samples of the last global batches. All ranks are less than two steps apart."""

    @property
    def max_token_id(self) -> int:
        """The largest id of the first segment, which is waited for; later ones are checked."""
        if not self._open:
            self._open_next(0)
        return self._open[0].max_token_id

    @property
    def content(self) -> str:
        return self._content

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; what lies before them is passed."""
        found = np.empty(samples.shape, dtype=np.int64)
        for segment, here, inside in self._by_segment(samples):
            found[here] = segment.table.num_targets(inside)
        first = int(samples.min())
        self._open = [segment for segment in self._open if segment.record.end_sample > first]
        if self._firsts[-1:] != (first,):
            self._firsts = (*self._firsts, first)[-3:]
        self._segments.remove_before(self._firsts[0])
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
        """The last segment of which nothing is needed any more; None: the first is needed."""
        before = self._segments.before(self._firsts[0] if self._firsts else 0)
        return None if before is None else before.record()

    def close(self) -> None:
        self._segments.close()

    def _by_segment(self, samples: Int64Array) -> Iterator[tuple[_Segment, Int64Array, Int64Array]]:
        # The segments of some samples, which of these each has, and their numbers within it.
        first, last = int(samples.min()), int(samples.max())
        while not self._open or last >= self._open[-1].record.end_sample:
            self._open_next(first)
            if first >= self._open[-1].record.end_sample:
                # A start without a state only passes through this one.
                self._open.pop()
                self._segments.remove_before(self._firsts[0] if self._firsts else first)
        assert first >= self._open[0].record.first_sample, "a stream is read forwards"
        for segment in self._open:
            start = segment.record.first_sample
            here = np.flatnonzero((samples >= start) & (samples < segment.record.end_sample))
            if here.size:
                yield segment, here, segment.order[samples[here] - start]

    def _open_next(self, first: int) -> None:
        training = bool(self._firsts)
        record, store = self._segments.next(first, training=training)
        if training and store.max_token_id >= self._vocab_size:
            raise TrainingError(
                f"the data holds token {store.max_token_id}, the model knows {self._vocab_size} "
                "tokens",
                where=f"{store.name}, segment {record.number}",
                fix="use the tokenizer that belongs to the model",
            )
        count = record.num_samples
        key = key_from(self._seed, 7, self._source, record.number)
        order = permute(np.arange(count), count, key)
        table = segment_table(self._data, self._data.sources[self._source], store, record.begin)
        self._open.append(_Segment(record, table, order, store.max_token_id))


class _Segments:
    """The segments of one stream on this node, one after another.

    Args:
        stream: the source; None: another rank of the node prepares it.
        folder: the stream's on this node.
        before: the segment after which this start begins; None: from the first.
        progress: called with a line for people until training begins.
    """

    def __init__(
        self,
        stream: Stream | None,
        folder: Path,
        before: SegmentRecord | None,
        progress: Callable[[str], None],
    ) -> None:
        self._stream = stream
        self._folder = folder
        self._first = before
        self._passed: list[SegmentRecord] = []  # read and not removed yet
        self._making: Future[SegmentRecord] | None = None
        self._line = ""
        self._progress = progress
        self._is_closed = False
        self._identity = None if stream is None else stream.source.identity()

    def next(self, first: int, *, training: bool) -> tuple[SegmentRecord, TokenStore]:
        """The segment after the last one, which is waited for.

        Args:
            first: the first sample that is needed.
            training: whether steps have been made, so that a failure is one of the training.

        Raises:
            DataError, TrainingError: it cannot be prepared.
            CommunicationError: the rank that prepares it gives no sign of life.
        """
        began = time.monotonic()
        last = self._passed[-1] if self._passed else self._first
        try:
            if self._stream is not None:
                record = self._prepared(self._stream, last, training)
            else:
                record = self._awaited(last.number + 1 if last else 0, first)
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
        self._passed.append(record)
        return record, TokenStore.open(self._path(record.number))

    def before(self, sample: int) -> SegmentRecord | None:
        """The last segment that ends at or before this sample."""
        known = [record for record in self._passed if record.end_sample <= sample]
        return known[-1] if known else self._first

    def remove_before(self, sample: int) -> None:
        """Remove the segments that end at or before this sample, which no rank needs."""
        self._first = self.before(sample)
        for record in self._passed:
            if record.end_sample <= sample and self._stream is not None:
                shutil.rmtree(self._path(record.number), ignore_errors=True)
                self._path(record.number).with_suffix(".json").unlink(missing_ok=True)
        self._passed = [record for record in self._passed if record.end_sample > sample]

    def close(self) -> None:
        """End the thread, and remove what is left."""
        self._is_closed = True
        if self._making is not None:  # it may hang on the network
            wait_for([self._making], timeout=_LONGEST_END_S)
        if self._stream is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.parent.rmdir()  # after the last stream

    def _path(self, number: int) -> Path:
        # The same with .json is written when all of the segment is there.
        return self._folder / f"segment-{number:08d}"

    def _prepared(
        self, stream: Stream, last: SegmentRecord | None, training: bool
    ) -> SegmentRecord:
        if self._making is None:
            self._making = self._start(stream, last)
        shown = ""
        while not self._making.done():
            wait_for([self._making], timeout=_REPORT_S)
            if self._line != shown and not training:
                shown = self._line
                self._progress(shown)
        record = self._making.result()
        self._making = self._start(stream, record)  # one ahead
        return record

    def _start(self, stream: Stream, last: SegmentRecord | None) -> Future[SegmentRecord]:
        future: Future[SegmentRecord] = Future()

        def run() -> None:
            try:
                future.set_result(self._make(stream, last))
            except BaseException as error:  # the thread's edge: those who wait learn why
                if not isinstance(error, UserError | _Closed):
                    log.exception("preparing the stream failed")
                    error = DataError(
                        f"{type(error).__name__}: {error}",
                        where=stream.source.name,
                        fix="look at the log of the process that prepared it",
                    )
                if isinstance(error, UserError):  # for the other ranks of the node
                    parts = ("what", "where", "fix", "id")
                    record = {part: getattr(error, part) for part in parts}
                    with contextlib.suppress(OSError):
                        write_record(self._folder / _FAILED, record, durable=False)
                future.set_exception(error)

        # A daemon: where training fails, this process ends without waiting for it.
        threading.Thread(target=run, name="stream", daemon=True).start()
        return future

    def _make(self, stream: Stream, last: SegmentRecord | None) -> SegmentRecord:
        name, number = stream.source.name, last.number + 1 if last else 0

        def tick(documents: int, tokens: int) -> None:
            if self._is_closed:
                raise _Closed
            self._line = count_message(f"{name} (segment {number})", documents, tokens)

        tick(0, 0)
        making = self._folder / ".making"
        with disk_errors(self._folder.parent):
            self._folder.mkdir(parents=True, exist_ok=True)
        record = make_segment(stream, last, making, tick)
        if stream.source.identity() != self._identity:
            raise DataError(
                "changed while it was read",
                where=name,
                fix="put it back to go on exactly from the last checkpoint",
                id="data.changed",
            )
        with disk_errors(self._folder.parent):
            making.rename(self._path(number))
            write_record(self._path(number).with_suffix(".json"), record.record(), durable=False)
        return record

    def _awaited(self, number: int, first: int) -> SegmentRecord:
        # The record of a segment that another rank of this node prepares. That rank removes
        # segments that it only passes through on its way to the first sample.
        size, since = -1, time.monotonic()
        while True:
            for path in sorted(self._folder.glob("segment-*.json")):
                if (found := read_record(path)) is not None:
                    record = SegmentRecord.from_record(found)
                    if record.number >= number and record.end_sample > first:
                        return record
            failed = read_record(self._folder / _FAILED)
            if failed is not None:
                raise DataError(**failed)
            now = size_of_folders([self._folder / ".making"])
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > _LONGEST_WAIT_S:
                raise CommunicationError(
                    f"the first rank of this node has prepared nothing for {_LONGEST_WAIT_S:.0f} s",
                    where=str(self._folder),
                    fix="look at its log",
                    id="data.waiting",
                )
            if self._is_closed:
                raise _Closed
            time.sleep(_POLL_S)


class _Closed(Exception):
    """The stream is not read any more."""


def _agree(
    world: World | None, me: Place, identify: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    # What every node finds its sources to be. All ranks must call this.
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
                f"{reason.what}; other machines have it, and data.streaming reads it on every one",
                where=f"{reason.where} on {place}",
                fix="copy it there or put it on a disk that all share; or use data.streaming: "
                "false, which sends the prepared tokens",
            )
        raise reason
    _, first, _ = found[0]
    for place, other, _ in found[1:]:
        if other != first:
            raise DataError(
                f"{found[0][0]} and {place} hold different data: {_difference(first, other)}",
                where="data.sources",
                fix="copy it from one to the other",
                id="data.changed",
            )
    return first


def _shared_folder(world: World | None, me: Place, cache_dir: Path) -> Path:
    # A new folder of this node, named after its first rank. All ranks must call this.
    name = ""
    if me.is_leader:
        with disk_errors(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            folder = cache_dir / f"stream-{uuid.uuid4().hex[:8]}"
            remove_stale(folder, locked=False)
            temporary = temporary_beside(folder, "stream")
            if world is not None:  # alone, it is made when it is needed
                temporary.mkdir()
            name = temporary.name
    if world is not None:
        name = world.gather(name, group=world.work)[me.leader]
    return cache_dir.absolute() / name


def _difference(before: Any, now: Any) -> str:
    # The first thing in which two identities differ.
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                return f"{name}: {_difference(before.get(name), now.get(name))}"
    if isinstance(before, list) and isinstance(now, list):
        for one, other in zip(before, now, strict=False):
            if one != other:
                return _difference(one, other)
        return f"{len(before)} entries before, {len(now)} now"
    return f"{str(before)[:60]} before, {str(now)[:60]} now"
