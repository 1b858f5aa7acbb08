"""The data of a run: samples of several sources in one global order, as token ids.

S: samples. B: rows of a batch. R: rows of a sample, 1, or 2 for pairs. T: places in a row.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from isles.config.files import may_be_huggingface_id
from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.builders import Ranges, make_table, split_store
from isles.data.order import Float32Array, Int64Array, SampleOrder
from isles.data.samples import FAKE_SAMPLES, FakeSamples, Samples, SampleTable
from isles.data.sources.find import open_source
from isles.data.sources.parse import make_parser
from isles.data.sources.rows import Source, Tally, texts_of
from isles.data.stream.samples import open_streams
from isles.data.stream.segments import HeldOut, Stream
from isles.data.tokens.encode import Encoder, read_items
from isles.data.tokens.prepare import no_documents, prepare, prepare_everywhere, reporting
from isles.data.tokens.store import TokenStore
from isles.dist.world import World
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_WINDOW = 1024

_MOST_WIDTHS, _LEAST_STEP, _MOST_STEP = 32, 8, 128
"""Rows are trimmed to 1/32 of the sequence length, so that an epoch has few widths. For each new
width a GPU plans its attention kernel again, which takes up to a second. Multiples of 8 gave 210
widths in an epoch of chats of up to 2,048 tokens. Multiples of 64 compute 2 to 3 % more places."""


def row_width(longest: Int64Array, seq_length: int) -> Int64Array:
    """Places per row of batches whose longest rows need these many."""
    step = -(-seq_length // (8 * _MOST_WIDTHS)) * 8  # a multiple of 8 suits matrix units
    step = max(_LEAST_STEP, min(_MOST_STEP, step))
    return np.minimum(-(-longest // step) * step, seq_length)


class Rows(NamedTuple):
    """Samples as token ids, R rows each; int64."""

    input_ids_BT: Int64Array
    """Padding is the end-of-text id."""

    targets_BT: Int64Array
    """The token after each input, or IGNORE_INDEX for padding and for untrained tokens."""

    position_ids_BT: Int64Array | None
    """0 at the start of each isolated document and of the padding. None if no source isolates
    documents."""


class Dataset:
    """The samples at global indices.

    Args:
        order: over the same number of sources with the same sizes.
        seq_length: places in a row, at most.
        trims: whether the rows of a batch are only as long as the longest row needs. Padding does
            not change the loss or the gradient, so trimming only saves time. It must be off if
            every batch must have one shape.
    """

    def __init__(
        self,
        parts: Sequence[Samples],
        order: SampleOrder,
        seq_length: int,
        *,
        trims: bool = False,
    ) -> None:
        self.parts = tuple(parts)
        self._order = order
        self._trims = trims
        self.seq_length = seq_length
        self.rows_per_sample = self.parts[0].rows_per_sample
        """1, or 2 for pairs (the chosen answer first)."""
        assert {part.rows_per_sample for part in self.parts} == {self.rows_per_sample}
        self.isolates = any(part.isolates for part in self.parts)
        """True if any source isolates the documents that share a row."""
        self.reference: Float32Array | None = None
        """Scores of the two answers of each pair before training, [num_samples, 2]."""
        sizes = np.array([part.num_samples for part in self.parts], dtype=np.int64)
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes
        nothing = np.empty(0, dtype=np.int64)
        self._window: tuple[int, Int64Array, Int64Array] = (0, nothing, nothing)

    @property
    def num_samples(self) -> int:
        """Different samples in all sources."""
        return sum(part.num_samples for part in self.parts)

    @property
    def samples_per_epoch(self) -> int:
        """Global indices that make one pass over the data."""
        return self._order.samples_per_epoch

    @property
    def vocab_size_needed(self) -> int:
        """Smallest vocabulary of a model for these tokens."""
        return 1 + max(part.max_token_id for part in self.parts)

    @property
    def content(self) -> str:
        """A hash of the samples' contents; equal data has equal hashes."""
        return hashlib.sha256(" ".join(part.content for part in self.parts).encode()).hexdigest()

    def state(self) -> list[dict[str, Any] | None] | None:
        """The positions of streams as plain JSON, for a later attempt; None without streams."""
        states = [part.state() for part in self.parts]
        return None if all(state is None for state in states) else states

    def pad_to_length(self) -> None:
        """Give every later batch rows of `seq_length`, as if `trims` were off."""
        self._trims = False

    def close(self) -> None:
        """Stop preparing samples in the background."""
        for part in self.parts:
            part.close()

    def num_targets(self, sample_ids: Int64Array) -> int:
        """Tokens that these samples train on; reads no tokens."""
        sources, samples = self._locate(sample_ids)
        return sum(
            int(self.parts[k].num_targets(samples[sources == k]).sum()) for k in np.unique(sources)
        )

    def loss_divisor(self, sample_ids: Int64Array) -> int:
        """The divisor of these samples' summed loss: their targets, or their pairs."""
        return len(sample_ids) if self.rows_per_sample == 2 else self.num_targets(sample_ids)

    def lengths(self, sample_ids: Int64Array) -> Int64Array:
        """Places of each row up to its last target, [S, R]; reads no tokens."""
        return self._lengths(*self._locate(sample_ids))

    def width(self, longest: Int64Array) -> Int64Array:
        """Places per row of a batch whose longest row needs this many."""
        if not self._trims:
            return np.full_like(longest, self.seq_length)
        return row_width(longest, self.seq_length)

    def rows(self, sample_ids: Int64Array) -> Rows:
        """The samples at these global indices, sample after sample."""
        return self._read(*self._locate(sample_ids))

    def numbers(self, sample_ids: Int64Array) -> Int64Array:
        """The samples at these global indices, each by its number among the different ones."""
        sources, samples = self._locate(sample_ids)
        numbers: Int64Array = self._starts[sources] + samples
        return numbers

    def numbered(self, numbers: Int64Array) -> Rows:
        """The samples of these numbers."""
        sources = np.searchsorted(self._ends, numbers, side="right").astype(np.int64)
        return self._read(sources, numbers - self._starts[sources])

    def _read(self, sources: Int64Array, samples: Int64Array) -> Rows:
        each = self.rows_per_sample
        width = self.seq_length
        if self._trims:
            width = int(self.width(self._lengths(sources, samples).max()))
        shape = (len(sources) * each, width)
        input_ids_BT, targets_BT = (np.empty(shape, dtype=np.int64) for _ in range(2))
        position_ids_BT = np.tile(np.arange(shape[1]), (shape[0], 1)) if self.isolates else None
        for index, (k, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            rows = slice(index * each, (index + 1) * each)
            positions_RT = None if position_ids_BT is None else position_ids_BT[rows]
            self.parts[k].read(sample, input_ids_BT[rows], targets_BT[rows], positions_RT)
        return Rows(input_ids_BT, targets_BT, position_ids_BT)

    def _lengths(self, sources: Int64Array, samples: Int64Array) -> Int64Array:
        lengths = np.empty((len(sources), self.rows_per_sample), dtype=np.int64)
        for k in np.unique(sources):
            here = sources == k
            lengths[here] = self.parts[k].lengths(samples[here])
        return lengths

    def _locate(self, sample_ids: Int64Array) -> tuple[Int64Array, Int64Array]:
        # Source and sample of each index. Locating eight indices costs as much as locating a
        # thousand, and steps ask for one small run of indices after another, so a window is located
        # ahead.
        low, high = int(sample_ids.min()), int(sample_ids.max())
        if high - low >= _WINDOW:
            return self._order.locate(sample_ids)
        start, sources, samples = self._window
        if not start <= low <= high < start + len(sources):
            start = low
            sources, samples = self._order.locate(np.arange(start, start + 2 * _WINDOW))
            self._window = (start, sources, samples)
        return sources[sample_ids - start], samples[sample_ids - start]


def build_datasets(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: Path,
    *,
    seed: int,
    progress: Callable[[str], None],
    vocab_size: int | None = None,
    world: World | None = None,
    pairs: bool = False,
    fixed_length: bool = False,
    stream_state: list[dict[str, Any] | None] | None = None,
) -> tuple[Dataset, Dataset | None]:
    """The training set and the validation set (if any) of a run. All ranks must call this.

    DataError: a source cannot be read, or is too short. CommunicationError: a rank that prepares
    gives no heartbeat.

    Args:
        tokenizer: may be None if every source is fake.
        vocab_size: of the model, for fake sources and streams.
        world: the ranks; one rank of each node prepares. None: this process is the only one.
        pairs: whether fake samples are pairs, for training.method: dpo.
        fixed_length: whether every batch must have rows of data.seq_length.
        stream_state: position of a resumed stream, from `Dataset.state`; None for a new run.
    """

    parts = _make_parts(data, tokenizer, cache_dir, seed, progress, vocab_size, world, pairs=pairs)
    trims = not fixed_length
    if data.streaming:
        assert tokenizer is not None and vocab_size is not None
        streams = open_streams(
            data,
            tokenizer,
            cache_dir,
            state=stream_state,
            seed=seed,
            vocab_size=vocab_size,
            world=world,
            progress=progress,
        )
        order = SampleOrder(None, [source.weight or 1.0 for source in data.sources], seed)
        training = Dataset(streams, order, data.seq_length, trims=trims)
    else:
        training = _mixed(data, [part for part, _ in parts], seed, trims=trims)
    return training, _validation(data, parts, seed, trims=trims)


def build_validation(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: Path,
    *,
    seed: int,
    progress: Callable[[str], None],
    vocab_size: int | None = None,
    pairs: bool = False,
) -> Dataset | None:
    """The validation set alone, in one process. If the run streams, no segment is prepared.

    Arguments and errors as for `build_datasets`.
    """
    parts = _make_parts(data, tokenizer, cache_dir, seed, progress, vocab_size, None, pairs=pairs)
    return _validation(data, parts, seed, trims=True)


_Parts = Sequence[tuple[Samples | None, Samples | None]]
"""Each source's samples for training (except for a stream) and for validation."""


def _make_parts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: Path,
    seed: int,
    progress: Callable[[str], None],
    vocab_size: int | None,
    world: World | None,
    *,
    pairs: bool,
) -> _Parts:
    def prepared(source: SourceConfig, open_rows: Callable[[], Source]) -> TokenStore:
        assert tokenizer is not None, "text needs a tokenizer"
        # The rows may have another name for their source, but only one rank of a node opens them.
        name = f"{source.path} ({source.subset})" if source.subset else str(source.path)

        def make(report: Callable[[str], None]) -> Path:
            encoder = Encoder(source, tokenizer)
            limit = data.max_bad_fraction
            # This may be a download of hours, which has its own timeouts.
            is_far = source.path is not None and may_be_huggingface_id(source.path)
            with reporting(report, f"opening {source.path}") if is_far else nullcontext():
                rows = open_rows()
            return prepare(rows, encoder, cache_dir, progress=report, max_bad_fraction=limit)

        if world is None:
            return TokenStore.open(make(progress), name)
        folder = prepare_everywhere(source, make, world, cache_dir, progress)
        return TokenStore.open(folder, name)

    def parts_of(number: int, source: SourceConfig) -> tuple[Samples | None, Samples | None]:
        if source.type == "fake":
            assert vocab_size is not None, "a fake source needs the model's vocabulary"
            own_seed = 2 * (seed + number)
            fake = partial(FakeSamples, vocab_size, data.seq_length, pairs=pairs)
            held_out = round(data.validation_fraction * FAKE_SAMPLES)
            return fake(own_seed, FAKE_SAMPLES), fake(own_seed + 1, held_out) if held_out else None
        if not data.streaming:
            return split_samples(data, source, prepared(source, partial(open_source, source)), seed)
        if data.validation_fraction == 0:
            return None, None
        assert tokenizer is not None, "text needs a tokenizer"
        store = prepared(source, lambda: HeldOut(Stream(data, number, tokenizer, seed)))
        table = make_table(data, source, store, Ranges.of(store))
        if not table.num_samples:
            log.warning("source=%s holds out too little for a sample", store.name)
        return None, table if table.num_samples else None

    return [parts_of(number, source) for number, source in enumerate(data.sources)]


def _validation(data: DataConfig, parts: _Parts, seed: int, *, trims: bool) -> Dataset | None:
    if all(held_out is None for _, held_out in parts):
        return None
    # The validation set has a separate order, equal at every evaluation.
    return _mixed(data, [held_out for _, held_out in parts], seed + 1, trims=trims)


def _mixed(data: DataConfig, parts: Sequence[Samples | None], seed: int, *, trims: bool) -> Dataset:
    # The sources that have samples. Either all sources have a weight, or none has.
    some = [(s, part) for s, part in zip(data.sources, parts, strict=True) if part is not None]
    weights = [source.weight for source, _ in some if source.weight is not None]
    order = SampleOrder([part.num_samples for _, part in some], weights or None, seed)
    return Dataset([part for _, part in some], order, data.seq_length, trims=trims)


def split_samples(
    data: DataConfig, source: SourceConfig, store: TokenStore, seed: int
) -> tuple[SampleTable, SampleTable | None]:
    """The samples of a source for training (DataError: none), and for validation."""
    train_ranges, held_out_ranges = split_store(store, data.validation_fraction, seed)
    train = make_table(data, source, store, train_ranges)
    num_tokens = train_ranges.num_tokens
    is_short = store.kind == "text" and data.packing and num_tokens < data.seq_length + 1
    if is_short or train.num_samples == 0:
        raise _too_little(data, store, train, num_tokens)
    held_out = None
    if held_out_ranges is not None:
        held_out = make_table(data, source, store, held_out_ranges)
        held_out = held_out if held_out.num_samples else None
    if held_out is None and data.validation_fraction > 0:
        log.warning("source=%s is too short to hold out a validation part", store.name)
    counts = train.counts
    log.info(
        "source=%s type=%s documents=%d tokens=%d train_samples=%d validation_samples=%d "
        "truncated=%d dropped=%d padding=%.2f%%",
        store.name,
        store.kind,
        len(store.document_ends),
        len(store.tokens),
        train.num_samples,
        held_out.num_samples if held_out else 0,
        counts.truncated,
        counts.dropped,
        100 * counts.padding_share,
    )
    if counts.dropped and store.kind != "text":
        log.warning(
            "source=%s: %d of %d %s are skipped: %d longer than seq_length %d, %d without a "
            "trained token in their first %d",
            store.name,
            counts.dropped,
            counts.documents,
            "pairs" if store.kind == "preference" else "documents",
            counts.too_long,
            data.seq_length,
            counts.untrained,
            data.seq_length,
        )
    return train, held_out


def _too_little(
    data: DataConfig, store: TokenStore, train: SampleTable, num_tokens: int
) -> DataError:
    # The error for a source without anything to train on.
    length, counts = data.seq_length, train.counts
    where, id = "data.seq_length", "data.untrained"
    if store.kind == "text":
        id, fix = "data.short", "add more text to this source"
        what = (
            f"{store.name}: {num_tokens} training tokens of {len(store.document_ends)} documents "
            f"are too few for one sample of {length} and the token after it"
        )
        if num_tokens > 2:
            fix = f"set data.seq_length to {num_tokens - 1} or less, or {fix}"
    else:
        noun = "pairs" if store.kind == "preference" else "documents"
        what = f"{store.name}: none of the {counts.documents} {noun} can be trained on: "
        if counts.too_long:
            where += ", data.too_long: drop"
            what += f"{counts.too_long} are longer than {length} tokens and a next one, "
            what += f"and {counts.untrained} others have no trained token"
            fix = "raise data.seq_length, or use data.too_long: truncate"
        else:
            what += f"the first {length} tokens have no trained token"
            fix = "raise data.seq_length, or inspect the data with `isles data show`"
    return DataError(what, where=where, fix=fix, id=id)


def documents_for_tokenizer(data: DataConfig) -> Iterator[str]:
    """All text of the sources in turn, so that its beginning represents all sources."""
    sources = [source for source in data.sources if source.type not in ("fake", "tokens")]
    if not sources:
        raise DataError(
            f"cannot train a tokenizer without text: every source is {data.sources[0].type}",
            where="tokenizer.train_vocab_size",
            fix="remove it: fake sources do not need a tokenizer"
            if data.sources[0].type == "fake"
            else "set tokenizer.name_or_path to the tokenizer that made the token ids",
            id="data.untrained",
        )
    for texts in zip_longest(*(_texts(source, data) for source in sources)):
        yield from (text for text in texts if text is not None)


def _texts(source: SourceConfig, data: DataConfig) -> Iterator[str]:
    # A stream downloads only the rows that it reads.
    opened = open_source(source, streams=data.streaming)
    tally = Tally(opened.name, data.max_bad_fraction)
    is_empty = True
    for item in read_items(opened.rows(make_parser(source)), source, tally):
        is_empty = False
        yield from texts_of(item)
    tally.judge(logs=False)  # the same rows are read again as samples, with a report
    if is_empty:
        raise no_documents(opened.name, source.type)
