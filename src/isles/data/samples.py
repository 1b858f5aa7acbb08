"""Samples cut out of text: packed, one document each, or made up.

T: places in a row. R: rows of a sample, 1, or 2 for pairs.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from isles.data.rng import Int64Array, draw, key_from
from isles.data.sources.counts import SampleCounts
from isles.data.tokens.split import Ranges
from isles.data.tokens.store import TokenStore
from isles.dist.batch import IGNORE_INDEX

FAKE_SAMPLES = 2**20
"""Samples in an epoch of a fake source."""


class SampleSource(Protocol):
    """Numbered samples of one part of one source."""

    @property
    def num_samples(self) -> int:
        """How many there are."""
        ...

    @property
    def rows_per_sample(self) -> int:
        """1; 2 for pairs, of which the chosen answer comes first."""
        ...

    @property
    def isolates(self) -> bool:
        """Whether documents that share a row attend to themselves alone."""
        ...

    @property
    def max_token_id(self) -> int:
        """No id is larger."""
        ...

    @property
    def content(self) -> str:
        """Equal where the samples are."""
        ...

    @property
    def counts(self) -> SampleCounts:
        """What became of the documents."""
        ...

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; reads no tokens."""
        ...

    def lengths(self, samples: Int64Array) -> Int64Array:
        """Places of each row up to its last target, [len(samples), R]; the rest is padding.

        Reads no tokens.
        """
        ...

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """Write one sample into rows, padding included.

        Args:
            sample: its number.
            input_ids_RT, targets_RT: rows of at least the sample's lengths, and at most as long as
                a sample may be; all of it is written.
            position_ids_RT: counted from 0 when given; a source that isolates writes where
                documents begin anew.
        """
        ...


class PackedSamples:
    """Documents one after another as one stream, cut into full samples.

    Sample i is the stream's tokens i*T to i*T+T: inputs, and the same shifted by one as targets, so
    each token but the first is a target once. What does not fill a sample at the end is left out;
    a stream too short for one is a single padded sample.

    Where documents are isolated, positions begin at 0 with each document and with each sample, and
    a document's last token does not predict the first of the next, as it would not if each were a
    row of its own.

    Args:
        store: the tokens.
        ranges: the part of them that is used.
        seq_length: places in a sample.
        isolates: whether documents attend to themselves alone.
    """

    rows_per_sample = 1

    def __init__(
        self, store: TokenStore, ranges: Ranges, seq_length: int, *, isolates: bool = False
    ) -> None:
        joined = ranges.joined()
        self.isolates = isolates
        self._store = store
        self._starts = joined.starts
        self._stream_ends = np.cumsum(joined.ends - joined.starts)
        self._document_ends = np.cumsum(ranges.ends - ranges.starts) if isolates else None
        self._seq_length = seq_length
        self._num_tokens = int(self._stream_ends[-1])
        self._num_documents = len(ranges.starts)

    @property
    def num_samples(self) -> int:
        """Full samples; 1 for the padded one; 0 for a single token."""
        full = (self._num_tokens - 1) // self._seq_length
        return full or min(self._num_tokens - 1, 1)

    @property
    def max_token_id(self) -> int:
        """No id is larger."""
        return self._store.max_token_id

    @property
    def content(self) -> str:
        """The hash of the tokens they are cut from, and how."""
        apart = ":isolated" if self.isolates else ""
        return f"{self._store.digest}:{self.num_samples}:packed:{self._seq_length}{apart}"

    @property
    def counts(self) -> SampleCounts:
        """See SampleSource."""
        samples = self.num_samples
        places, used = samples * self._seq_length, samples * self._length
        return SampleCounts(self._num_documents, 0, 0, 0, samples, used, places)

    @property
    def _length(self) -> int:
        return min(self._seq_length, self._num_tokens - 1)

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """T for every sample but a padded one; isolated, without the first token of documents."""
        whole = np.full(samples.shape, self._length, dtype=np.int64)
        if self._document_ends is None:
            return whole
        firsts = samples * self._seq_length + 1
        before = np.searchsorted(self._document_ends, firsts)
        return whole - (np.searchsorted(self._document_ends, firsts + self._length) - before)

    def lengths(self, samples: Int64Array) -> Int64Array:
        """T for every sample but a padded one."""
        return np.full((len(samples), 1), self._length, dtype=np.int64)

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        input_ids_T, targets_T = input_ids_RT[0], targets_RT[0]
        begin = first = sample * self._seq_length
        end = min(first + self._seq_length + 1, self._num_tokens)
        piece = int(np.searchsorted(self._stream_ends, first, side="right"))
        filled = 0
        while first < end:
            stream_end = int(self._stream_ends[piece])
            taken = min(end, stream_end) - first
            length = stream_end - (int(self._stream_ends[piece - 1]) if piece else 0)
            place = int(self._starts[piece]) + length - (stream_end - first)
            _put(self._store.tokens[place : place + taken], filled, input_ids_T, targets_T)
            first, filled, piece = first + taken, filled + taken, piece + 1
        _pad(filled, self._store.end_of_text_id, input_ids_T, targets_T)
        if self._document_ends is None:
            return
        at = np.searchsorted(self._document_ends, [begin + 1, end])
        borders = self._document_ends[at[0] : at[1]] - begin
        targets_T[borders - 1] = IGNORE_INDEX
        if position_ids_RT is not None:
            begin_anew(position_ids_RT[0], [*borders.tolist(), end - begin - 1])


class DocumentSamples:
    """One document a sample; long ones cut, short ones padded at the end.

    Pieces overlap by one token, so each token of a document but its first is a target once.
    """

    rows_per_sample = 1
    isolates = False

    def __init__(self, store: TokenStore, ranges: Ranges, seq_length: int) -> None:
        self._store = store
        self._ranges = ranges
        self._seq_length = seq_length
        self._targets = ranges.ends - ranges.starts - 1
        self._sample_ends = np.cumsum(-(-self._targets // seq_length))

    @property
    def num_samples(self) -> int:
        """Pieces of all documents."""
        return int(self._sample_ends[-1])

    @property
    def max_token_id(self) -> int:
        """No id is larger."""
        return self._store.max_token_id

    @property
    def content(self) -> str:
        """The hash of the tokens they are cut from, and how."""
        return f"{self._store.digest}:{self.num_samples}:documents:{self._seq_length}"

    @property
    def counts(self) -> SampleCounts:
        """See SampleSource. A long document is cut, and nothing of it is lost."""
        documents, samples = len(self._targets), self.num_samples
        untrained = int((self._targets == 0).sum())
        used, places = int(self._targets.sum()), samples * self._seq_length
        return SampleCounts(documents, 0, 0, untrained, samples, used, places)

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """T, or what is left in the document's last piece."""
        starts, ends = self._pieces(samples)
        return ends - starts - 1

    def lengths(self, samples: Int64Array) -> Int64Array:
        """As many as targets."""
        return self.num_targets(samples)[:, None]

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        del position_ids_RT  # one document, from 0 on
        starts, ends = self._pieces(np.array([sample]))
        tokens = self._store.tokens[int(starts[0]) : int(ends[0])]
        _put(tokens, 0, input_ids_RT[0], targets_RT[0])
        _pad(len(tokens), self._store.end_of_text_id, input_ids_RT[0], targets_RT[0])

    def _pieces(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        document = np.searchsorted(self._sample_ends, samples, side="right")
        num_before = np.where(document > 0, self._sample_ends[document - 1], 0)
        starts = self._ranges.starts[document] + (samples - num_before) * self._seq_length
        return starts, np.minimum(starts + self._seq_length + 1, self._ranges.ends[document])


class FakeSamples:
    """Random token ids that depend on the seed and the sample alone.

    Args:
        vocab_size: of the model.
        seq_length: places in a row.
        seed: another seed gives other ids.
        num_samples: how many.
        pairs: whether a sample is two rows that begin alike, and train on the other half.
    """

    isolates = False

    def __init__(
        self, vocab_size: int, seq_length: int, seed: int, num_samples: int, *, pairs: bool = False
    ) -> None:
        self.rows_per_sample = 2 if pairs else 1
        self._vocab_size = vocab_size
        self._seq_length = seq_length
        self._seed = seed
        self._num_samples = num_samples
        self._prompt = seq_length // 2 if pairs else 0

    @property
    def num_samples(self) -> int:
        """As many as was said."""
        return self._num_samples

    @property
    def max_token_id(self) -> int:
        """The last of the vocabulary."""
        return self._vocab_size - 1

    @property
    def content(self) -> str:
        """Made up from these numbers alone."""
        pairs = ":pairs" if self._prompt else ""
        return f"fake:{self._vocab_size}:{self._seed}:{self._seq_length}{pairs}"

    @property
    def counts(self) -> SampleCounts:
        """See SampleSource: every place is used."""
        places = self._num_samples * self._seq_length * self.rows_per_sample
        return SampleCounts(self._num_samples, 0, 0, 0, self._num_samples, places, places)

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """The same for every sample."""
        each = self.rows_per_sample * (self._seq_length - self._prompt)
        return np.full(samples.shape, each, dtype=np.int64)

    def lengths(self, samples: Int64Array) -> Int64Array:
        """T for every row."""
        shape = (len(samples), self.rows_per_sample)
        return np.full(shape, self._seq_length, dtype=np.int64)

    def read(
        self,
        sample: int,
        input_ids_RT: Int64Array,
        targets_RT: Int64Array,
        position_ids_RT: Int64Array | None = None,
    ) -> None:
        """See SampleSource."""
        del position_ids_RT  # one document, from 0 on
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


def begin_anew(position_ids_T: Int64Array, borders: list[int]) -> None:
    """Count positions from 0 at each of these places, which ascend; one behind the row is none."""
    length = len(position_ids_T)
    for start, end in zip(borders, [*borders[1:], length], strict=True):
        if start < end:
            position_ids_T[start:end] = np.arange(end - start)


def _put(
    tokens: np.ndarray[tuple[int], np.dtype[np.integer]],
    place: int,
    input_ids_T: Int64Array,
    targets_T: Int64Array,
) -> None:
    """Write tokens from this place of T+1 on: as inputs, and one place earlier as targets."""
    end = place + len(tokens)
    input_ids_T[place:end] = tokens[: len(input_ids_T) - place]
    if place == 0:
        targets_T[: end - 1] = tokens[1:]
    else:
        targets_T[place - 1 : end - 1] = tokens


def _pad(filled: int, padding_id: int, input_ids_T: Int64Array, targets_T: Int64Array) -> None:
    """Fill the rows behind the first `filled` of T+1 tokens.

    The last token is an input as well, for which there is no target.
    """
    input_ids_T[filled:] = padding_id
    targets_T[max(filled - 1, 0) :] = IGNORE_INDEX
