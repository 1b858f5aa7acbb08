"""A view of the trained tokens for the user: a few documents, and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.builders import Ranges, make_table
from isles.data.samples import SampleCounts
from isles.data.sources.names import bare_name, ignored_names, remarks_of, unread_message
from isles.data.tokens.store import TokenStore
from isles.facts.units import printable

SHOWN_TOKENS = 600
"""Number of tokens to show of a longer document."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighboring tokens of a document as text; either all of them are trained or none."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class ShownDocument:
    """One document for display, and the number of tokens omitted at its end."""

    title: str
    stretches: Sequence[Stretch]
    num_hidden: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Counts of a source's rows, documents and tokens.

    Args:
        empty: rows of empty text.
        bad: bad rows, which are skipped.
        documents: of these rows; for preferences two per row.
        median: length of documents, tokens.
        over_length: documents of more than seq_length tokens and a next one as target.
    """

    rows: int
    empty: int
    bad: int
    documents: int
    tokens: int
    trained: int
    median: int
    longest: int
    over_length: int
    counts: SampleCounts


def field_notes(number: int, source: SourceConfig, record: Mapping[str, Any]) -> Iterator[str]:
    """Lines for the user: unread fields, remarks, and ignored fields that no row has.

    Args:
        number: number of the source in the run file, from 0.
        record: of the rows, as `Tally.record` has it; {}: unknown.
    """
    key = f"data.sources.{number}"
    if unread := unread_message(record):
        yield f"{key} ({source.path}): nothing reads these fields (share of rows): {unread}"
    for text in remarks_of(record):
        yield f"{key} ({source.path}): {text}"
    found = record.get("ignored")
    if found is None or not record.get("rows"):
        return
    others = sorted({bare_name(name) for name in record.get("unread", {})} - {*found})
    for name in source.ignore_fields:
        if not ignored_names(name, source.columns) & {*found}:
            near = get_close_matches(bare_name(name), others, n=1)
            hint = f"; did you mean {printable(near[0])}?" if near else ""
            yield f"{key}.ignore_fields ({source.path}): no row has the field {name}{hint}"


def figures_of(data: DataConfig, source: SourceConfig, store: TokenStore) -> Figures:
    """The counts of a prepared source, training and validation part together."""
    ranges = Ranges.of(store)
    lengths = ranges.ends - ranges.starts
    manifest = store.manifest
    trained = len(store.tokens) if store.trained is None else int(np.count_nonzero(store.trained))
    return Figures(
        rows=manifest.get("rows", 0),
        empty=manifest.get("empty", 0),
        bad=manifest.get("bad", 0),
        documents=len(lengths),
        tokens=len(store.tokens),
        trained=trained,
        median=int(np.median(lengths)),
        longest=int(lengths.max()),
        over_length=int((lengths > data.seq_length + 1).sum()),
        counts=make_table(data, source, store, ranges).counts,
    )


def shown_documents(
    store: TokenStore, decode: Callable[[list[int]], str], seq_length: int, num_samples: int
) -> Iterator[ShownDocument]:
    """Documents from the whole store, with special tokens written out. A pair gives both
    documents."""
    each = 2 if store.kind == "preference" else 1
    num_items = len(store.document_ends) // each
    places = np.unique(np.linspace(0, num_items - 1, min(num_samples, num_items)).astype(int))
    for item in places.tolist():
        for number in range(each):
            document = item * each + number
            end = int(store.document_ends[document])
            start = int(store.document_ends[document - 1]) if document else 0
            trained = None if store.trained is None else np.asarray(store.trained[start:end])
            name = f"{store.kind} {item + 1} of {num_items}"
            if each == 2:
                name += ", rejected" if number else ", chosen"
            store.check_ids(store.tokens[start:end])
            ids = store.tokens[start:end].tolist()
            yield shown_document(name, ids, trained, decode, seq_length)


def shown_document(
    name: str,
    ids: list[int],
    trained: npt.NDArray[np.bool_ | np.uint8] | None,
    decode: Callable[[list[int]], str],
    seq_length: int,
) -> ShownDocument:
    """One document with its trained tokens."""
    mask = np.ones(len(ids), dtype=np.bool_) if trained is None else trained.astype(np.bool_)
    title = f"{name}: {len(ids)} tokens, {int(mask.sum())} trained"
    if trained is not None and len(ids) > seq_length + 1:  # text is cut into several samples
        title += f", longer than seq_length {seq_length}"
    return ShownDocument(
        title,
        _stretches(ids[:SHOWN_TOKENS], mask[:SHOWN_TOKENS], decode),
        max(len(ids) - SHOWN_TOKENS, 0),
    )


def _stretches(
    ids: list[int], mask: npt.NDArray[np.bool_], decode: Callable[[list[int]], str]
) -> list[Stretch]:
    borders = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    stretches, before = [], ""
    for start, end in pairwise(borders):
        # The difference of two decodings, because a part decoded alone may lose its first space.
        so_far = decode(ids[:end])
        is_prefix = so_far.startswith(before)
        text = so_far[len(before) :] if is_prefix else decode(ids[start:end])
        stretches.append(Stretch(text, bool(mask[start])))
        before = so_far
    return stretches
