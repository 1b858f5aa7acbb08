"""Samples: rows of token ids with their targets, by number.

T: places in a row. R: rows of a sample, 1, or 2 for pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from isles.data.order import Int64Array, draw, key_from
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX

FAKE_SAMPLES = 2**20
"""Samples in an epoch of a fake source."""

Tail = Literal["own", "next", "none"]
"""Kind of target at a span's last place: the span's own next token, the first token of the next
span, or none."""


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Documents (of preferences, pairs) of one part of a source, and the samples that they make.

    Args:
        truncated: documents longer than a sample, cut at its end.
        too_long: documents longer than a sample, dropped.
        untrained: documents without a trained token, dropped.
        used: places of all samples at which a token is read.
        places: places of all samples at their full length.
    """

    documents: int
    truncated: int = 0
    too_long: int = 0
    untrained: int = 0
    samples: int = 0
    used: int = 0
    places: int = 0

    @property
    def dropped(self) -> int:
        """Documents that are in no sample."""
        return self.too_long + self.untrained

    @property
    def padding_share(self) -> float:
        """Share of padding among all places, for samples of full length."""
        return 1 - self.used / self.places if self.places else 0.0


class Samples(ABC):
    """Numbered samples of one part of one source."""

    num_samples: int
    rows_per_sample = 1
    """1, or 2 for pairs (the chosen answer first)."""
    isolates = False
    """True if documents that share a row are isolated."""

    @property
    @abstractmethod
    def max_token_id(self) -> int:
        """Largest token id."""

    @property
    @abstractmethod
    def content(self) -> str:
        """A hash of the samples; equal samples have equal hashes."""

    @abstractmethod
    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; reads no tokens."""

    @abstractmethod
    def lengths(self, samples: Int64Array) -> Int64Array:
        """Places of each row up to its padding, [len(samples), R]; reads no tokens."""

    @abstractmethod
    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """Write one sample into rows, padding included.

        Args:
            input_ids_RT, targets_RT: at least as long as the sample, at most as long as the longest
                possible sample; completely overwritten.
            position_ids_RT: if given, filled with positions from 0. With isolated documents, each
                document and the padding start again at 0.
        """

    @property
    def record(self) -> Mapping[str, Any]:
        """Counts of the samples' rows, as in `Tally.record`, if any."""
        return {}

    def state(self) -> dict[str, Any] | None:
        """The position of a stream as plain JSON, from which a later attempt continues."""
        return None

    def close(self) -> None:  # noqa: B027
        """Stop preparing samples in the background."""


class SampleTable(Samples):
    """Samples cut out of a store of tokens.

    Spans are runs of tokens of the store. Their places are numbered consecutively over all spans,
    and a row is a run of places. At each place one token is read, and the next token is the
    target.

    Args:
        starts: first token of each span in the store.
        lengths: number of places of each span.
        tail: the target of a span's last place.
        rows: the first place of each row and the place after its last; or an int, the number of
            places of every row, one row after the other.
        how: name of the method that made the samples, for `content`.
        targets: number of trained tokens of each sample; None: every token with a target.
        rows_per_sample, isolates: see `Samples`.
    """

    def __init__(
        self,
        store: TokenStore,
        starts: Int64Array,
        lengths: Int64Array,
        tail: Tail,
        rows: tuple[Int64Array, Int64Array] | int,
        *,
        num_samples: int,
        how: str,
        counts: SampleCounts,
        targets: Int64Array | None = None,
        rows_per_sample: int = 1,
        isolates: bool = False,
    ) -> None:
        self.num_samples = num_samples
        self.rows_per_sample = rows_per_sample
        self.isolates = isolates
        self._store = store
        self._ends = np.cumsum(lengths)
        self._shift = starts - (self._ends - lengths)  # from places to tokens
        self._tail = tail
        self._rows = rows
        self._how = how
        self.counts = counts
        self._targets = targets

    @property
    def max_token_id(self) -> int:
        return self._store.max_token_id

    @property
    def content(self) -> str:
        return f"{self._store.digest}:{self.num_samples}:{self._how}"

    @property
    def record(self) -> Mapping[str, Any]:
        return self._store.manifest

    def num_targets(self, samples: Int64Array) -> Int64Array:
        if self._targets is not None:
            return self._targets[samples]
        starts, ends = self._borders(samples)
        if self._tail != "none":
            return ends - starts
        lasts = np.searchsorted(self._ends, ends + 1) - np.searchsorted(self._ends, starts + 1)
        return ends - starts - lasts

    def lengths(self, samples: Int64Array) -> Int64Array:
        starts, ends = self._borders(samples)
        return (ends - starts).reshape(len(samples), self.rows_per_sample)

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        starts, ends = self._borders(np.array([sample]))
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            borders = self._read_row(start, end, input_ids_RT[row], targets_RT[row])
            if self.isolates and position_ids_RT is not None:
                positions_T = position_ids_RT[row]
                for first, last in pairwise([*borders, len(positions_T)]):
                    positions_T[first:last] = np.arange(last - first)

    def _borders(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        # First place of each row of these samples, and the place after its last.
        if isinstance(self._rows, int):
            return samples * self._rows, (samples + 1) * self._rows
        each = self.rows_per_sample
        rows = samples if each == 1 else (samples[:, None] * each + np.arange(each)).ravel()
        return self._rows[0][rows], self._rows[1][rows]

    def _read_row(
        self, place: int, end: int, input_ids_T: Int64Array, targets_T: Int64Array
    ) -> list[int]:
        # Write the places up to `end`; returns the start of each span and of the padding in the
        # row.
        tokens, trained = self._store.tokens, self._store.trained
        span = int(np.searchsorted(self._ends, place, side="right"))
        borders, at = [], 0
        while place < end:
            borders.append(at)
            span_end = int(self._ends[span])
            count = min(end, span_end) - place
            token = place + int(self._shift[span])
            input_ids_T[at : at + count] = tokens[token : token + count]
            following = tokens[token + 1 : token + count + 1]  # one less at the end of the store
            targets_T[at : at + len(following)] = following
            if trained is not None:
                is_trained = trained[token + 1 : token + count + 1].astype(np.bool_)
                targets_T[at : at + len(following)][~is_trained] = IGNORE_INDEX
            at, place = at + count, place + count
            if place == span_end and self._tail == "none":
                targets_T[at - 1] = IGNORE_INDEX
            elif place == span_end and self._tail == "next":
                targets_T[at - 1] = tokens[span_end + int(self._shift[span + 1])]
            span += 1
        self._store.check_ids(input_ids_T[:at])
        self._store.check_ids(targets_T[:at])
        input_ids_T[at:] = self._store.end_of_text_id
        targets_T[at:] = IGNORE_INDEX
        return [*borders, at]


class FakeSamples(Samples):
    """Random token ids that depend on the seed and the sample alone.

    Args:
        pairs: whether a sample is two rows that begin alike, and train on the other half.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, seed: int, num_samples: int, *, pairs: bool = False
    ) -> None:
        self.num_samples = num_samples
        self.rows_per_sample = 2 if pairs else 1
        self._vocab_size = vocab_size
        self._seq_length = seq_length
        self._seed = seed
        self._prompt = seq_length // 2 if pairs else 0

    @property
    def max_token_id(self) -> int:
        return self._vocab_size - 1

    @property
    def content(self) -> str:
        pairs = ":pairs" if self._prompt else ""
        return f"fake:{self._vocab_size}:{self._seed}:{self._seq_length}{pairs}"

    def num_targets(self, samples: Int64Array) -> Int64Array:
        each = self.rows_per_sample * (self._seq_length - self._prompt)
        return np.full(samples.shape, each, dtype=np.int64)

    def lengths(self, samples: Int64Array) -> Int64Array:
        return np.full((len(samples), self.rows_per_sample), self._seq_length, dtype=np.int64)

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        tokens = self._tokens(sample, 4)
        for row in range(self.rows_per_sample):
            if row:
                tokens[self._prompt + 1 :] = self._tokens(sample, 5)[self._prompt + 1 :]
            input_ids_RT[row] = tokens[:-1]
            targets_RT[row] = tokens[1:]
        targets_RT[:, : self._prompt] = IGNORE_INDEX

    def _tokens(self, sample: int, stream: int) -> Int64Array:
        numbers = draw(key_from(self._seed, stream, sample), np.arange(self._seq_length + 1))
        tokens: Int64Array = (numbers % np.uint64(self._vocab_size)).astype(np.int64)
        return tokens
