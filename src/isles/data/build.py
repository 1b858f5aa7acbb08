"""The data of a run, put together: training and validation set, and text for a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.builders import make_table
from isles.data.chat.messages import texts_of
from isles.data.dataset import Dataset
from isles.data.order import SampleOrder
from isles.data.samples import FAKE_SAMPLES, FakeSamples, SampleCounts, Samples, SampleTable
from isles.data.sources.find import open_source
from isles.data.sources.parse import columns_of
from isles.data.sources.rows import Source, Tally
from isles.data.stream.samples import open_streams
from isles.data.stream.segment import HeldOut, Stream
from isles.data.tokens.encode import Encoder, read_items
from isles.data.tokens.prepare import no_documents, prepare, prepare_everywhere
from isles.data.tokens.store import Ranges, TokenStore, split_store
from isles.dist.world import World
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


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
    """The training set and the validation set of a run. All ranks must call this.

    Args:
        data: the run file's section.
        tokenizer: may be None where every source is fake.
        cache_dir: where prepared tokens are kept.
        seed: of the split and of the order.
        progress: called with a line for people.
        vocab_size: the model's, for fake sources and streams.
        world: the ranks, of which one on each node prepares; None: this process is the only one.
        pairs: whether fake samples are pairs, for training.method: dpo.
        fixed_length: whether every batch must have rows of data.seq_length; else they are as long
            as the longest of them needs.
        stream_state: where a run that streams goes on, as `Dataset.state` gave it; None: it begins.

    Returns:
        Training set, and validation set or None where nothing is held out.

    Raises:
        DataError: a source cannot be read, or is too short.
        CommunicationError: whoever prepares gives no sign of life.
    """
    prepared = partial(_prepared, data, tokenizer, cache_dir, world, progress)

    def parts_of(number: int, source: SourceConfig) -> tuple[Samples | None, Samples | None]:
        """Samples for training, and for validation. All ranks must call this."""
        if source.type == "fake":
            assert vocab_size is not None, "a fake source needs the model's vocabulary"
            return _fake_samples(data, vocab_size, seed + number, pairs=pairs)
        if not data.streaming:
            return split_samples(data, source, prepared(source, partial(open_source, source)), seed)
        if data.validation_fraction == 0:
            return None, None
        assert tokenizer is not None, "text needs a tokenizer"
        store = prepared(source, lambda: HeldOut(Stream(data, number, tokenizer, seed)))
        ends = np.asarray(store.document_ends)
        table = make_table(data, source, store, Ranges(np.concatenate([[0], ends[:-1]]), ends))
        if not table.num_samples:
            log.warning("source=%s holds out too little for a sample", store.name)
        return None, table if table.num_samples else None

    parts = [parts_of(number, source) for number, source in enumerate(data.sources)]
    trims = not fixed_length
    if data.streaming:
        assert tokenizer is not None and vocab_size is not None
        training = open_streams(
            data,
            tokenizer,
            cache_dir,
            state=stream_state,
            seed=seed,
            vocab_size=vocab_size,
            world=world,
            trims=trims,
            progress=progress,
        )
    else:
        training = _mixed(data, [part for part, _ in parts], seed, trims=trims)
    if all(held_out is None for _, held_out in parts):
        return training, None
    # The validation set has an order of its own, the same at every evaluation.
    return training, _mixed(data, [held_out for _, held_out in parts], seed + 1, trims=trims)


def _prepared(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    cache_dir: Path,
    world: World | None,
    progress: Callable[[str], None],
    source: SourceConfig,
    open_rows: Callable[[], Source],
) -> TokenStore:
    """The prepared tokens of some rows. All ranks must call this."""
    assert tokenizer is not None, "text needs a tokenizer"

    def make(report: Callable[[str], None]) -> Path:
        encoder = Encoder(source, tokenizer)
        limit = data.max_bad_fraction
        return prepare(open_rows(), encoder, cache_dir, progress=report, max_bad_fraction=limit)

    if world is None:
        return TokenStore.open(make(progress))
    return TokenStore.open(prepare_everywhere(source, make, world, cache_dir, progress))


def _fake_samples(
    data: DataConfig, vocab_size: int, seed: int, *, pairs: bool
) -> tuple[Samples, Samples | None]:
    make = partial(FakeSamples, vocab_size, data.seq_length, pairs=pairs)
    training = make(2 * seed, FAKE_SAMPLES)
    if data.validation_fraction == 0:
        return training, None
    return training, make(2 * seed + 1, max(1, round(data.validation_fraction * FAKE_SAMPLES)))


def _mixed(
    data: DataConfig, samples: Sequence[Samples | None], seed: int, *, trims: bool
) -> Dataset:
    """The samples of those sources that have some."""
    kept = [(s, part) for s, part in zip(data.sources, samples, strict=True) if part is not None]
    weights = [1.0 if source.weight is None else source.weight for source, _ in kept]
    weighted = any(source.weight is not None for source, _ in kept)
    parts = [part for _, part in kept]
    order = SampleOrder([part.num_samples for part in parts], weights if weighted else None, seed)
    return Dataset(parts, order, data.seq_length, trims=trims)


def split_samples(
    data: DataConfig, source: SourceConfig, store: TokenStore, seed: int
) -> tuple[SampleTable, SampleTable | None]:
    """The samples of a source for training, and for validation.

    Raises:
        DataError: there is nothing to train on.
    """
    train_ranges, held_out_ranges = split_store(store, data.validation_fraction, seed)
    train = make_table(data, source, store, train_ranges)
    if store.kind == "text":
        _check_text(data, store, train_ranges, train)
    elif train.num_samples == 0:
        raise _nothing_left(data, store, train.counts)
    held_out = None
    if held_out_ranges is not None:
        held_out = make_table(data, source, store, held_out_ranges)
        held_out = held_out if held_out.num_samples else None
    if held_out is None and data.validation_fraction > 0:
        log.warning("source=%s is too short to hold out a validation part", store.name)
    _report(data, store, train, held_out)
    return train, held_out


def _check_text(data: DataConfig, store: TokenStore, ranges: Ranges, train: SampleTable) -> None:
    num_tokens = ranges.num_tokens
    too_short = data.packing and num_tokens < data.seq_length + 1
    if too_short or train.num_samples == 0:
        raise DataError(
            f"{store.name}: {num_tokens} training tokens of {len(store.document_ends)} documents "
            f"do not make one sample of {data.seq_length} and the token after it",
            where="data.seq_length",
            fix=f"set data.seq_length to {num_tokens - 1} or less, or give it more text"
            if num_tokens > 2
            else "give it more text",
            id="data.short",
        )


def _nothing_left(data: DataConfig, store: TokenStore, counts: SampleCounts) -> DataError:
    """Why no document of a source can be trained on."""
    noun = "pairs" if store.kind == "preference" else "documents"
    what = f"{store.name}: none of {counts.documents} {noun} can be trained on"
    if counts.too_long:
        return DataError(
            f"{what}: {counts.too_long} are longer than {data.seq_length} tokens and a next one, "
            f"and {counts.untrained} others hold nothing to train",
            where="data.seq_length, data.too_long: drop",
            fix="raise data.seq_length, or use data.too_long: truncate",
            id="data.untrained",
        )
    return DataError(
        f"{what}: no token that is trained lies in the first {data.seq_length} tokens",
        where="data.seq_length",
        fix="raise data.seq_length, or look at the data with `isles data show`",
        id="data.untrained",
    )


def _report(
    data: DataConfig, store: TokenStore, train: SampleTable, held_out: SampleTable | None
) -> None:
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
        noun = "pairs" if store.kind == "preference" else "documents"
        log.warning(
            "source=%s: %d of %d %s are left out: %d longer than seq_length %d, %d without a "
            "trained token in their first %d",
            store.name,
            counts.dropped,
            counts.documents,
            noun,
            counts.too_long,
            data.seq_length,
            counts.untrained,
            data.seq_length,
        )


def documents_for_tokenizer(data: DataConfig) -> Iterator[str]:
    """All that the sources say, in turn, so that the first of it stands for all.

    Raises:
        DataError: a source cannot be read, or there is no text.
    """
    sources = [source for source in data.sources if source.type not in ("fake", "tokens")]
    if not sources:
        raise DataError(
            f"there is no text to train a tokenizer on: every source is {data.sources[0].type}",
            where="tokenizer.train_vocab_size",
            fix="take it out: fake sources need no tokenizer"
            if data.sources[0].type == "fake"
            else "name the tokenizer that the token ids belong to in tokenizer.name_or_path",
            id="data.untrained",
        )
    for texts in zip_longest(*(_texts(source, data) for source in sources)):
        yield from (text for text in texts if text is not None)


def _texts(source: SourceConfig, data: DataConfig) -> Iterator[str]:
    # Of a stream, nothing is downloaded that is not read.
    opened = open_source(source, streams=data.streaming)
    name = opened.describe()
    tally = Tally(name, data.max_bad_fraction)
    is_empty = True
    for item in read_items(opened.rows(columns_of(source)), source, tally):
        is_empty = False
        yield from texts_of(item)
    tally.judge()
    if is_empty:
        raise no_documents(name, source.type)
