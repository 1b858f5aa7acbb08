"""Samples cut out of one source's tokens: packed, one document each, or made up.

T: tokens in a sample.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from isles.data.rng import Int64Array, draw, key_from
from isles.data.split import Ranges
from isles.data.store import TokenStore
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
    def max_token_id(self) -> int:
        """No id is larger."""
        ...

    @property
    def content(self) -> str:
        """Equal where the samples are."""
        ...

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """Tokens that each of these samples trains on; reads no tokens."""
        ...

    def read(self, sample: int, input_ids_T: Int64Array, targets_T: Int64Array) -> None:
        """Write one sample into two rows, padding included."""
        ...


class PackedSamples:
    """Documents one after another as one stream, cut into full samples.

    Sample i is the stream's tokens i*T to i*T+T: inputs, and the same shifted by one as targets, so
    each token but the first is a target once. What does not fill a sample at the end is left out;
    a stream too short for one is a single padded sample.
    """

    def __init__(self, store: TokenStore, ranges: Ranges, seq_length: int) -> None:
        joined = ranges.joined()
        self._store = store
        self._starts = joined.starts
        self._stream_ends = np.cumsum(joined.ends - joined.starts)
        self._seq_length = seq_length
        self._num_tokens = int(self._stream_ends[-1])

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
        """The hash of the tokens they are cut from, and how many there are."""
        return f"{self._store.digest}:{self.num_samples}"

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """T for every sample but a padded one."""
        return np.full(samples.shape, min(self._seq_length, self._num_tokens - 1), dtype=np.int64)

    def read(self, sample: int, input_ids_T: Int64Array, targets_T: Int64Array) -> None:
        """Write one sample into two rows."""
        first = sample * self._seq_length
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


class DocumentSamples:
    """One document a sample; long ones cut, short ones padded at the end.

    Pieces overlap by one token, so each token of a document but its first is a target once.
    """

    def __init__(self, store: TokenStore, ranges: Ranges, seq_length: int) -> None:
        self._store = store
        self._ranges = ranges
        self._seq_length = seq_length
        targets = ranges.ends - ranges.starts - 1
        self._sample_ends = np.cumsum(-(-targets // seq_length))

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
        """The hash of the tokens they are cut from, and how many there are."""
        return f"{self._store.digest}:{self.num_samples}"

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """T, or what is left in the document's last piece."""
        starts, ends = self._pieces(samples)
        return ends - starts - 1

    def read(self, sample: int, input_ids_T: Int64Array, targets_T: Int64Array) -> None:
        """Write one sample into two rows."""
        starts, ends = self._pieces(np.array([sample]))
        tokens = self._store.tokens[int(starts[0]) : int(ends[0])]
        _put(tokens, 0, input_ids_T, targets_T)
        _pad(len(tokens), self._store.end_of_text_id, input_ids_T, targets_T)

    def _pieces(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        document = np.searchsorted(self._sample_ends, samples, side="right")
        num_before = np.where(document > 0, self._sample_ends[document - 1], 0)
        starts = self._ranges.starts[document] + (samples - num_before) * self._seq_length
        return starts, np.minimum(starts + self._seq_length + 1, self._ranges.ends[document])


class FakeSamples:
    """Random token ids that depend on the seed and the sample alone."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, num_samples: int) -> None:
        self._vocab_size = vocab_size
        self._seq_length = seq_length
        self._seed = seed
        self._num_samples = num_samples

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
        return f"fake:{self._vocab_size}:{self._seed}"

    def num_targets(self, samples: Int64Array) -> Int64Array:
        """T for every sample."""
        return np.full(samples.shape, self._seq_length, dtype=np.int64)

    def read(self, sample: int, input_ids_T: Int64Array, targets_T: Int64Array) -> None:
        """Write one sample into two rows."""
        numbers = draw(key_from(self._seed, 4, sample), np.arange(self._seq_length + 1))
        tokens = (numbers % np.uint64(self._vocab_size)).astype(np.int64)
        input_ids_T[:] = tokens[:-1]
        targets_T[:] = tokens[1:]


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
