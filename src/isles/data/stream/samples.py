"""The samples of an endless stream, as a loader reads them: in order, a few segments at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isles.data.order import permute
from isles.data.rng import Int64Array, key_from
from isles.data.samples import SampleSource
from isles.data.sources.counts import SampleCounts
from isles.data.stream.feed import Feed
from isles.data.stream.order import ENDLESS
from isles.data.stream.segment import MakeSamples, SegmentRecord, samples_of
from isles.errors import TrainingError


@dataclass(frozen=True, slots=True)
class _Segment:
    record: SegmentRecord
    samples: SampleSource
    order: Int64Array
    max_token_id: int


class StreamSamples:
    """Numbered samples of one stream; shuffled within each segment, which is read from the cache.

    They must be asked for in ascending order, one global batch after another: `num_targets` of a
    whole global batch says that what lies before its first sample is passed for good.

    Args:
        source: its number in the run file.
        first: the segment with which this start begins.
        content: names what the samples are made of.
        make_samples: makes samples of a segment's tokens.
        feed: where the segments come from.
        isolates: whether documents that share a row attend to themselves alone.
        seed: of the shuffling.
        vocab_size: of the model.
    """

    rows_per_sample = 1

    def __init__(
        self,
        source: int,
        first: int,
        content: str,
        make_samples: MakeSamples,
        *,
        feed: Feed,
        isolates: bool,
        seed: int,
        vocab_size: int,
    ) -> None:
        self.isolates = isolates
        self.content = content
        self._make_samples = make_samples
        self._source = source
        self._feed = feed
        self._next = first
        self._seed = seed
        self._vocab_size = vocab_size
        self._segments: list[_Segment] = []
        self._training = False

    @property
    def num_samples(self) -> int:
        """More than can be read."""
        return ENDLESS

    @property
    def max_token_id(self) -> int:
        """The largest id of the first segment, which is waited for; later ones are checked."""
        if not self._segments:
            self._open_next()
        return self._segments[0].max_token_id

    @property
    def counts(self) -> SampleCounts:
        """What became of the documents of the segments that are open."""
        counts = [segment.samples.counts for segment in self._segments]
        return SampleCounts(
            documents=sum(c.documents for c in counts),
            truncated=sum(c.truncated for c in counts),
            too_long=sum(c.too_long for c in counts),
            untrained=sum(c.untrained for c in counts),
            samples=sum(c.samples for c in counts),
            used=sum(c.used for c in counts),
            places=sum(c.places for c in counts),
        )

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; what lies before them is passed."""
        found = np.empty(samples.shape, dtype=np.int64)
        parts = list(self._by_segment(samples))
        for segment, here, inside in parts:
            found[here] = segment.samples.num_targets(inside)
        self._pass(parts[0][0].record.number)
        self._training = True
        return found

    def lengths(self, samples: Int64Array) -> Int64Array:
        """See SampleSource."""
        found = np.empty((len(samples), 1), dtype=np.int64)
        for segment, here, inside in self._by_segment(samples):
            found[here] = segment.samples.lengths(inside)
        return found

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        ((segment, _, inside),) = self._by_segment(np.array([sample]))
        segment.samples.read(int(inside[0]), input_ids_RT, targets_RT, position_ids_RT)

    def _by_segment(self, samples: Int64Array) -> Iterator[tuple[_Segment, Int64Array, Int64Array]]:
        """The segments of some samples, which of these each has, and their numbers within it."""
        first, last = int(samples.min()), int(samples.max())
        while not self._segments or last >= _end(self._segments[-1]):
            self._open_next(keeps_from=first)
        assert first >= self._segments[0].record.first_sample, "a stream is read forwards"
        for segment in self._segments:
            start = segment.record.first_sample
            here = np.flatnonzero((samples >= start) & (samples < _end(segment)))
            if here.size:
                yield segment, here, segment.order[samples[here] - start]

    def _open_next(self, keeps_from: int | None = None) -> None:
        """Wait for the segment after the last one that is open."""
        number = self._next
        oldest = self._segments[0].record.number if self._segments else number
        self._feed.need(self._source, oldest, number)
        record, store = self._feed.open(self._source, number, training=self._training)
        if self._training and store.max_token_id >= self._vocab_size:
            raise TrainingError(
                f"the data holds token {store.max_token_id}, the model knows {self._vocab_size} "
                "tokens",
                where=f"{store.name}, segment {number}",
                fix="use the tokenizer that belongs to the model",
            )
        count = record.num_samples
        key = key_from(self._seed, 7, self._source, number)
        order = permute(np.arange(count), count, key)
        samples = samples_of(self._make_samples, store, record.begin)
        self._segments.append(_Segment(record, samples, order, store.max_token_id))
        self._next = number + 1
        if keeps_from is not None and keeps_from >= _end(self._segments[-1]):
            self._pass(self._next)  # a start without a record: this one is only passed through

    def _pass(self, number: int) -> None:
        """Let go of the segments before this one."""
        self._segments = [s for s in self._segments if s.record.number >= number]
        self._feed.need(self._source, number, max(number, self._next - 1))


def _end(segment: _Segment) -> int:
    return segment.record.first_sample + segment.record.num_samples
