"""The data of a run, put together: training and validation set, and text for a tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from isles.config.data import DataConfig
from isles.data.dataset import Dataset
from isles.data.order import SampleOrder
from isles.data.prepare import NO_PROGRESS_S, prepare, wait_for_prepared
from isles.data.samples import (
    FAKE_SAMPLES,
    DocumentSamples,
    FakeSamples,
    PackedSamples,
    SampleSource,
)
from isles.data.sources import open_source, read_source
from isles.data.split import Ranges, split_store
from isles.data.store import TokenStore
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
    is_preparer: bool,
    progress: Callable[[str], None],
    vocab_size: int | None = None,
    no_progress_s: float = NO_PROGRESS_S,
) -> tuple[Dataset, Dataset | None]:
    """The training set and the validation set of a run.

    All ranks call this; one of those that share the cache folder prepares the tokens, and the
    others wait for it.

    Args:
        data: the run file's section.
        tokenizer: may be None where every source is fake.
        cache_dir: where prepared tokens are kept.
        seed: of the split and of the order.
        is_preparer: whether this rank prepares.
        progress: called with a line for people.
        vocab_size: the model's, for fake sources.
        no_progress_s: how long to wait for a sign of life of the rank that prepares.

    Returns:
        Training set, and validation set or None where nothing is held out.

    Raises:
        DataError: a source cannot be read, or is too short.
        CommunicationError: the rank that prepares gives no sign of life.
    """
    make = partial(prepare, progress=progress) if is_preparer else wait_for_prepared
    training: list[tuple[SampleSource, float | None]] = []
    validation: list[tuple[SampleSource, float | None]] = []
    for number, source in enumerate(data.sources):
        if source.type == "fake":
            assert vocab_size is not None, "a fake source needs the model's vocabulary"
            train, held_out = _fake_samples(data, vocab_size, seed + number)
        else:
            assert tokenizer is not None, "text needs a tokenizer"
            folder = make(open_source(source), tokenizer, cache_dir, no_progress_s=no_progress_s)
            train, held_out = _text_samples(data, TokenStore.open(folder), seed)
        training.append((train, source.weight))
        if held_out is not None:
            validation.append((held_out, source.weight))
    # The validation set has an order of its own, the same at every evaluation.
    held_out_set = _dataset(validation, seed + 1, data.seq_length) if validation else None
    return _dataset(training, seed, data.seq_length), held_out_set


def documents_for_tokenizer(data: DataConfig) -> Iterator[str]:
    """The documents of all text sources in turn, so that the first of them stand for all.

    Raises:
        DataError: a source cannot be read, or there is no text.
    """
    texts = [open_source(source) for source in data.sources if source.type == "text"]
    if not texts:
        raise DataError(
            "there is no text to train a tokenizer on: every source is fake",
            where="tokenizer.train_vocab_size",
            fix="take it out: fake sources need no tokenizer",
        )
    for documents in zip_longest(*(read_source(text) for text in texts)):
        yield from (document for document in documents if document is not None)


def _dataset(
    parts: Sequence[tuple[SampleSource, float | None]], seed: int, seq_length: int
) -> Dataset:
    samples = [part for part, _ in parts]
    weights = [1.0 if weight is None else weight for _, weight in parts]
    weighted = any(weight is not None for _, weight in parts)
    sizes = [part.num_samples for part in samples]
    return Dataset(samples, SampleOrder(sizes, weights if weighted else None, seed), seq_length)


def _fake_samples(
    data: DataConfig, vocab_size: int, seed: int
) -> tuple[SampleSource, SampleSource | None]:
    train = FakeSamples(vocab_size, data.seq_length, 2 * seed, FAKE_SAMPLES)
    if data.validation_fraction == 0:
        return train, None
    number = max(1, round(data.validation_fraction * FAKE_SAMPLES))
    return train, FakeSamples(vocab_size, data.seq_length, 2 * seed + 1, number)


def _text_samples(
    data: DataConfig, store: TokenStore, seed: int
) -> tuple[SampleSource, SampleSource | None]:
    train_ranges, held_out_ranges = split_store(store, data.validation_fraction, seed)
    train = _cut(data, store, train_ranges)
    num_tokens = train_ranges.num_tokens
    too_short = data.packing and num_tokens < data.seq_length + 1
    if too_short or train.num_samples == 0:
        raise DataError(
            f"{store.name}: {num_tokens} training tokens of {len(store.document_ends)} documents "
            f"do not make one sample of {data.seq_length} and the token after it",
            where="data.seq_length",
            fix=f"set data.seq_length to {num_tokens - 1} or less, or give it more text"
            if num_tokens > 2
            else "give it more text",
        )
    held_out = None if held_out_ranges is None else _cut(data, store, held_out_ranges)
    if held_out is not None and held_out.num_samples == 0:
        held_out = None
    if held_out is None and data.validation_fraction > 0:
        log.warning("source=%s is too short to hold out a validation part", store.name)
    log.info(
        "source=%s documents=%d tokens=%d train_samples=%d validation_samples=%d",
        store.name,
        len(store.document_ends),
        len(store.tokens),
        train.num_samples,
        held_out.num_samples if held_out else 0,
    )
    return train, held_out


def _cut(data: DataConfig, store: TokenStore, ranges: Ranges) -> SampleSource:
    if data.packing:
        return PackedSamples(store, ranges, data.seq_length)
    return DocumentSamples(store, ranges, data.seq_length)
