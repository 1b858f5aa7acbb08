"""Rows by the type of the data: text, conversations, instructions, token ids, preferences.

Each parser reads the columns of its type, by the run file's names, and makes an `Item` of a row or
raises an error with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import numpy as np

from isles.config.sections.data import SourceConfig
from isles.data.chat.talks import ChatParser, InstructParser, PreferenceParser
from isles.data.sources.rows import (
    PLAIN,
    Ids,
    Parser,
    Row,
    checked_text,
    from_json_text,
    wrong_type,
)
from isles.errors import DataError

_UNTRAINED = -100  # label of untrained tokens, as in torch and transformers


def make_parser(
    source: SourceConfig, *, has_template: bool = True, vocab_size: int | None = None
) -> Parser:
    """The parser for the rows of a source.

    Args:
        has_template: whether a chat template will render questions and answers.
        vocab_size: one more than the largest allowed token id; None: no limit.
    """
    columns, ignored = source.columns, source.ignore_fields
    trains_all = source.train_on == "all"
    match source.type:
        case "text":
            return TextParser(source.text_column, ignored)
        case "chat":
            return ChatParser(columns, ignored, trains_all=trains_all)
        case "instruct":
            how = {"has_template": has_template, "trains_all": trains_all}
            return InstructParser(columns, ignored, **how)
        case "tokens":
            return TokensParser(columns, ignored, vocab_size)
        case "preference":
            return PreferenceParser(columns, ignored, has_template=has_template)
        case "fake":
            raise AssertionError("a fake source has no rows")
        case _:
            assert_never(source.type)


class TextParser(Parser):
    """Plain text, or one column of text."""

    def __init__(self, column: str, ignored: Sequence[str] = ()) -> None:
        super().__init__({"text_column": column}, ["text_column"], ignored)

    def check(self, names: Sequence[str], where: str) -> None:
        if PLAIN not in names:
            self._need("text_column", names, where)

    def parse(self, row: Row) -> str | None:
        text = row.columns.get(PLAIN)
        if text is None:
            name = self._need("text_column", list(row.columns), row.where)
            text = checked_text(
                row.columns[name],
                f"column {name!r}",
                row.where,
                "repair or remove that row, or set data.sources.text_column to a column of strings",
            )
        return text if text and not text.isspace() else None


class TokensParser(Parser):
    """Token ids, with labels (-100: not trained) or an attention mask (0: padding), if any."""

    def __init__(
        self, columns: Mapping[str, str], ignored: Sequence[str], vocab_size: int | None
    ) -> None:
        super().__init__(columns, ("input_ids", "labels", "attention_mask"), ignored)
        self._vocab_size = vocab_size

    def check(self, names: Sequence[str], where: str) -> None:
        for key in ("input_ids", *sorted(self._named)):
            self._need(key, names, where)

    def parse(self, row: Row) -> Ids:
        where, columns = row.where, row.columns
        self.check(list(columns), where)
        ids_name, labels_name, mask_name = self._names.values()
        ids = _integers(columns[ids_name], ids_name, where)
        trained = np.ones(len(ids), dtype=np.bool_)
        if columns.get(labels_name) is not None:
            labels = _integers(columns[labels_name], labels_name, where, len(ids))
            trained = self._trained(ids, labels, where)
        if columns.get(mask_name) is not None:
            mask = _integers(columns[mask_name], mask_name, where, len(ids))
            kept = _kept(mask, mask_name, where)
            ids, trained = ids[kept], trained[kept]
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if wrong.size:
            raise DataError(
                f"{ids_name} holds {ids[wrong[0]]}, but the tokenizer has only 0 to {limit - 1}",
                where=where,
                fix="set tokenizer.name_or_path to the tokenizer that made the data",
            )
        if not trained[1:].any():
            what = "no token of this row is trained: the first token is never predicted"
            raise DataError(f"{len(ids)} {what}", where=where, fix="remove that row")
        return Ids(ids.tolist(), trained.tolist())

    def _trained(self, ids: Any, labels: Any, where: str) -> Any:
        ids_name, labels_name, _ = self._names.values()
        wrong = np.flatnonzero((labels != _UNTRAINED) & (labels != ids))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"{labels_name}[{at}] is {labels[at]}, but {ids_name}[{at}] is {ids[at]}",
                where=where,
                fix=f"set each label to the id at the same place, or to {_UNTRAINED} for an "
                f"untrained "
                "token; isles shifts labels by one",
            )
        return labels != _UNTRAINED


def _kept(mask: Any, name: str, where: str) -> slice:
    kept = np.flatnonzero(mask)
    if not (kept.size and len(kept) == np.ptp(kept) + 1 and set(mask.tolist()) <= {0, 1}):
        raise DataError(
            f"{name} must be one contiguous block of 1s between 0s",
            where=where,
            fix=f"use the mask only for padding, and the label {_UNTRAINED} for untrained tokens",
        )
    return slice(int(kept[0]), int(kept[-1]) + 1)


def _integers(value: object, name: str, where: str, length: int | None = None) -> Any:
    # A list of whole numbers, perhaps as JSON text, as int64; `length`: of the token ids.
    value = from_json_text(value, f"column {name!r}", where)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise wrong_type(value, f"column {name!r}", "a list of token ids", where)
    if not value:
        raise DataError(f"column {name!r} is empty", where=where, fix="remove that row")
    for index, number in enumerate(value):
        if type(number) is not int:
            raise wrong_type(number, f"{name}[{index}]", "a token id", where)
        if not -(2**31) <= number < 2**31:
            what = f"{name}[{index}] is {number}, not a token id"
            raise DataError(what, where=where, fix="repair or remove that row")
    if length not in (None, len(value)):
        what = f"{name} has {len(value)} numbers, but the row has {length} token ids"
        raise DataError(what, where=where, fix="repair or remove that row")
    return np.array(value, dtype=np.int64)
