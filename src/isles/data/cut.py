"""From prepared tokens to the samples of training and validation."""

from __future__ import annotations

import logging

from isles.config.sections.data import DataConfig, SourceConfig, isolates
from isles.data.samples import (
    FAKE_SAMPLES,
    DocumentSamples,
    FakeSamples,
    PackedSamples,
    SampleSource,
)
from isles.data.sources.counts import SampleCounts
from isles.data.tokens.split import Ranges, split_store
from isles.data.tokens.store import TokenStore
from isles.data.whole import PairSamples, WholeSamples
from isles.errors import DataError

log = logging.getLogger(__name__)


def fake_samples(
    data: DataConfig, vocab_size: int, seed: int, *, pairs: bool
) -> tuple[SampleSource, SampleSource | None]:
    """Made up samples for training, and for validation where the run file asks for it.

    Args:
        data: the run file's section.
        vocab_size: of the model.
        seed: another seed gives other ids.
        pairs: whether samples are pairs, as training.method: dpo wants them.
    """
    length = data.seq_length
    train = FakeSamples(vocab_size, length, 2 * seed, FAKE_SAMPLES, pairs=pairs)
    if data.validation_fraction == 0:
        return train, None
    number = max(1, round(data.validation_fraction * FAKE_SAMPLES))
    return train, FakeSamples(vocab_size, length, 2 * seed + 1, number, pairs=pairs)


def store_samples(
    data: DataConfig, source: SourceConfig, store: TokenStore, seed: int
) -> tuple[SampleSource, SampleSource | None]:
    """The samples of a source for training, and for validation.

    Args:
        data: the run file's section.
        source: the source's own.
        store: its tokens.
        seed: of the split.

    Raises:
        DataError: there is nothing to train on.
    """
    train_ranges, held_out_ranges = split_store(store, data.validation_fraction, seed)
    train = cut_samples(data, source, store, train_ranges)
    if store.kind == "text":
        _check_text(data, store, train_ranges, train)
    elif train.num_samples == 0:
        raise _nothing_left(data, store, train.counts)
    held_out = None
    if held_out_ranges is not None:
        held_out = cut_samples(data, source, store, held_out_ranges)
        held_out = held_out if held_out.num_samples else None
    if held_out is None and data.validation_fraction > 0:
        log.warning("source=%s is too short to hold out a validation part", store.name)
    _report(data, store, train, held_out)
    return train, held_out


def cut_samples(
    data: DataConfig, source: SourceConfig, store: TokenStore, ranges: Ranges
) -> SampleSource:
    """The samples of a part of a source's tokens, by the kind of its documents.

    Text is a stream, or one document a sample. Documents of other kinds stay whole. Pairs are
    never packed.
    """
    length = data.seq_length
    match store.kind:
        case "text" if data.packing:
            return PackedSamples(store, ranges, length, isolates=isolates(data, source))
        case "text":
            return DocumentSamples(store, ranges, length)
        case "preference":
            return PairSamples(store, ranges, length, too_long=data.too_long)
        case _:
            return WholeSamples(
                store,
                ranges,
                length,
                packs=data.packing,
                isolates=isolates(data, source),
                too_long=data.too_long,
            )


def _check_text(data: DataConfig, store: TokenStore, ranges: Ranges, train: SampleSource) -> None:
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
    data: DataConfig, store: TokenStore, train: SampleSource, held_out: SampleSource | None
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
