"""Rows of text, chat and tokens, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, assert_never

import numpy as np

from isles.config.sections.data import SourceConfig
from isles.data.chat.answers import InstructParser, PreferenceParser
from isles.data.chat.messages import Chat, Ids, Item, check_answers, read_messages, read_tools
from isles.data.sources.rows import (
    PLAIN,
    Columns,
    Row,
    checked_text,
    from_json_text,
    missing_column,
    wrong_type,
)
from isles.errors import DataError

_UNTRAINED = -100  # what labels hold where nothing is trained, by torch's and transformers' custom


class Parser(Columns, Protocol):
    """Reads the rows of one type of data."""

    def parse(self, row: Row) -> Item | None:
        """What one row holds; None where it is empty text, which is left out.

        Raises:
            DataError: the row is bad.
        """
        ...


def make_parser(source: SourceConfig, *, has_template: bool, vocab_size: int | None) -> Parser:
    """Who reads the rows of a source.

    Args:
        source: of any type but `fake`.
        has_template: whether a chat template will render questions and answers.
        vocab_size: one more than the largest token id that may stand in the data; None: any.
    """
    columns = source.columns
    match source.type:
        case "text":
            return TextParser(source.text_column)
        case "chat":
            return ChatParser(columns, needs_answer=source.train_on != "all")
        case "instruct":
            return InstructParser(columns, has_template=has_template)
        case "tokens":
            return TokensParser(columns, vocab_size)
        case "preference":
            return PreferenceParser(columns, has_template=has_template)
        case "fake":
            raise AssertionError("a fake source has no rows")
        case _:
            assert_never(source.type)


def columns_of(source: SourceConfig) -> Columns:
    """Which columns of a source are read, whatever the tokenizer."""
    return make_parser(source, has_template=True, vocab_size=None)


class TextParser:
    """Plain text, or one column of text."""

    def __init__(self, column: str) -> None:
        self._column = column
        self.wanted = frozenset([column])

    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file without the column."""
        if PLAIN not in names and self._column not in names:
            raise missing_column(self._column, names, where, key="text_column")

    def parse(self, row: Row) -> str | None:
        """The text; None where it is empty or white space."""
        where, columns = row
        text = columns.get(PLAIN)
        if text is None:
            if self._column not in columns:
                raise missing_column(self._column, list(columns), where, key="text_column")
            text = checked_text(
                columns[self._column],
                f"column {self._column!r}",
                where,
                "repair or remove that row, or set data.sources.text_column to a column of strings",
            )
        return text if text and not text.isspace() else None


class ChatParser:
    """Conversations: a column of messages, and perhaps columns of tools and a system message.

    Without a column that was named, `messages` is read, else `conversations` (or `conversation`).

    Args:
        columns: how the data names them.
        needs_answer: whether a conversation in which the assistant says nothing is bad.
    """

    def __init__(self, columns: Mapping[str, str], *, needs_answer: bool) -> None:
        named = columns.get("messages")
        self._choice = (named,) if named else ("messages", "conversations", "conversation")
        self._keys = {key: columns[key] for key in ("role", "content") if key in columns}
        self._tools = columns.get("tools", "tools")
        self._system = columns.get("system", "system")
        self._needed = tuple(columns[key] for key in ("tools", "system") if key in columns)
        self._needs_answer = needs_answer
        self.wanted = frozenset([*self._choice, self._tools, self._system])

    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file without messages, or without a column that was named."""
        self._column(names, where)
        for name in self._needed:
            if name not in names:
                key = "tools" if name == self._tools else "system"
                raise missing_column(name, names, where, key=key)

    def parse(self, row: Row) -> Chat:
        """One conversation."""
        where, columns = row
        name = self._column(list(columns), where)
        messages = read_messages(columns[name], name, where, self._keys)
        system = columns.get(self._system)
        if system not in (None, "") and messages[0]["role"] != "system":
            said = checked_text(system, f"column {self._system!r}", where)
            messages.insert(0, {"role": "system", "content": said})
        if self._needs_answer:
            check_answers(messages, name, where)
        return Chat(messages, read_tools(columns.get(self._tools), self._tools, where))

    def _column(self, names: Sequence[str], where: str) -> str:
        for name in self._choice:
            if name in names:
                return name
        raise missing_column(self._choice[0], names, where, key="messages")


class TokensParser:
    """Token ids, with labels (-100: not trained) or an attention mask (0: padding) where there are.

    Args:
        columns: how the data names them.
        vocab_size: one more than the largest id; None: not known.
    """

    def __init__(self, columns: Mapping[str, str], vocab_size: int | None) -> None:
        self._ids = columns.get("input_ids", "input_ids")
        self._labels = columns.get("labels", "labels")
        self._mask = columns.get("attention_mask", "attention_mask")
        self._named = columns
        self._vocab_size = vocab_size
        self.wanted = frozenset([self._ids, self._labels, self._mask])

    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file without ids, or without a column that was named."""
        for key, name in {"input_ids": self._ids, **self._named}.items():
            if name not in names:
                raise missing_column(name, names, where, key=key)

    def parse(self, row: Row) -> Ids:
        """The ids of one document, without padding."""
        where, columns = row
        self.check(list(columns), where)
        ids = self._numbers(columns[self._ids], self._ids, where)
        trained = np.ones(len(ids), dtype=np.bool_)
        if columns.get(self._labels) is not None:
            labels = self._numbers(columns[self._labels], self._labels, where)
            trained = self._trained(ids, labels, where)
        if columns.get(self._mask) is not None:
            kept = self._kept(ids, self._numbers(columns[self._mask], self._mask, where), where)
            ids, trained = ids[kept], trained[kept]
        self._check_range(ids, where)
        if not trained[1:].any():
            raise DataError(
                f"{len(ids)} tokens of which none is trained: the first has nothing before it"
                + (
                    f", and {self._labels} holds {_UNTRAINED} for the others"
                    if len(ids) > 1
                    else ""
                ),
                where=where,
                fix="remove that row",
            )
        return Ids(ids.tolist(), trained.tolist())

    def _numbers(self, value: object, name: str, where: str) -> Any:
        """A list of whole numbers as int64."""
        value = from_json_text(value, f"column {name!r}", where)
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise wrong_type(value, f"column {name!r}", "a list of token ids", where)
        if not value:
            raise DataError(f"column {name!r} is empty", where=where, fix="remove that row")
        for index, number in enumerate(value):
            if type(number) is not int:
                raise wrong_type(number, f"{name}[{index}]", "a token id", where)
            if not -(2**31) <= number < 2**31:
                raise DataError(
                    f"{name}[{index}] is {number}, no token id",
                    where=where,
                    fix="repair or remove that row",
                )
        return np.array(value, dtype=np.int64)

    def _trained(self, ids: Any, labels: Any, where: str) -> Any:
        self._check_length(ids, labels, self._labels, where)
        wrong = np.flatnonzero((labels != _UNTRAINED) & (labels != ids))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"{self._labels}[{at}] is {labels[at]}, and {self._ids}[{at}] is {ids[at]}",
                where=where,
                fix=f"each label is the id at its own place, or {_UNTRAINED} where nothing is "
                "trained; they are shifted by one in training",
            )
        return labels != _UNTRAINED

    def _kept(self, ids: Any, mask: Any, where: str) -> Any:
        self._check_length(ids, mask, self._mask, where)
        kept = np.flatnonzero(mask)
        if not kept.size:
            raise DataError(f"{self._mask} holds only 0", where=where, fix="remove that row")
        if len(kept) != kept[-1] - kept[0] + 1 or not set(mask.tolist()) <= {0, 1}:
            raise DataError(
                f"{self._mask} is not a run of 1 with 0 before and behind it",
                where=where,
                fix="it can mark padding and nothing else; what is not trained has the label "
                f"{_UNTRAINED}",
            )
        return slice(int(kept[0]), int(kept[-1]) + 1)

    def _check_length(self, ids: Any, other: Any, name: str, where: str) -> None:
        if len(other) != len(ids):
            raise DataError(
                f"{name} has {len(other)} numbers, and {self._ids} has {len(ids)}",
                where=where,
                fix="repair or remove that row",
            )

    def _check_range(self, ids: Any, where: str) -> None:
        limit = self._vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= (2**31 if limit is None else limit)))
        if wrong.size:
            raise DataError(
                f"{self._ids} holds {ids[wrong[0]]}, and the tokenizer knows 0 to {limit - 1}"
                if limit is not None
                else f"{self._ids} holds {ids[wrong[0]]}, which is no token id",
                where=where,
                fix="name the tokenizer that the data was made with in tokenizer.name_or_path",
            )
