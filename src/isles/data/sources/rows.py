"""Rows of a source: what readers yield, what parsers make of them, and how many may be bad."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from threading import Event
from typing import Any, NamedTuple

from isles.data.sources.names import JSON, Remark, RepeatedKey, ignored_names
from isles.errors import DataError

log = logging.getLogger(__name__)

PLAIN = ""
"""Name of the single column of plain text, because a text file has no column names."""

CHUNK_ROWS = 256
_CHUNK_CHARS = 2**24
EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Cells that count as empty."""

_FLAT = frozenset((int, float, bool, type(None)))
LISTED = 10
"""Number of bad rows to list."""

MOST_UNREAD = 50
"""A report names at most this many fields that nothing reads."""


class Row(NamedTuple):
    """One row of a file or dataset. `skipped` lists the columns that were not read."""

    where: str
    columns: Mapping[str, Any]
    skipped: Sequence[str] = ()


def size_of(row: Row | DataError) -> int:
    """About how many characters a row has; 1 at least."""
    values = [] if isinstance(row, DataError) else row.columns.values()
    return 1 + sum(len(value if isinstance(value, str) else str(value)) for value in values)


Rows = Iterator[Row | DataError]
"""Rows in order. For a row that cannot be read, its error is yielded.

An error that ends the reading, such as a damaged file, is raised instead.
"""

Message = dict[str, Any]
"""`role` and `content`, and other fields for the chat template: tool_calls, name and others."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the chat template renders.

    Args:
        tools: JSON schemas of the tools that may be called; None: none.
        first: number of the first message whose answers may be trained on.
        masked: numbers of messages that the data excludes from training.
        variables: variables of the chat template for this conversation alone.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    first: int = 0
    masked: frozenset[int] = frozenset()
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text and its continuation, for tokenizers without a chat template."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids as the data has them."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """A preferred and a rejected answer to the same prompt."""

    chosen: Chat | Continuation
    rejected: Chat | Continuation


Item = str | Chat | Continuation | Ids | Pair


def texts_of(item: Item) -> list[str]:
    """All text of an item, for training a tokenizer."""
    match item:
        case str():
            return [item]
        case Chat():
            contents = (message["content"] for message in item.messages)
            return [
                text if isinstance(text, str) else json.dumps(text, default=str)
                for text in contents
                if text
            ]
        case Continuation():
            return [item.prompt, item.answer]
        case Pair():
            return texts_of(item.chosen) + texts_of(item.rejected)
        case Ids():
            return []


class FieldError(DataError):
    """An error that another value of a source's key avoids; `Parser.with_fix` adds that value.

    Args:
        fix: ends with the words before the value.
        ignore: fields to add to `ignore_fields`.
        columns: names to add to `columns`, if `ignore` is empty.
        rest: words after the value.
    """

    def __init__(
        self,
        what: str,
        *,
        where: str,
        fix: str,
        ignore: Sequence[str] = (),
        columns: Mapping[str, str] | None = None,
        rest: str = "",
        id: str | None = None,
    ) -> None:
        super().__init__(what, where=where, fix=fix, id=id)
        self.ignore, self.columns, self.rest = ignore, columns or {}, rest


class Parser(ABC):
    """Reads the rows of one type of data.

    Args:
        columns: how the data names them; by their keys in the run file.
        keys: of all columns that may be read.
        ignored: names of fields that the parser omits at every depth, and does not report.
    """

    def __init__(
        self, columns: Mapping[str, str], keys: Sequence[str], ignored: Sequence[str] = ()
    ) -> None:
        self._given_columns, self._named = dict(columns), set(columns)
        self._names = {key: columns.get(key, key) for key in keys}
        self._given_ignored = tuple(ignored)
        every = (ignored_names(name, self._names) for name in ignored)
        self.ignored = frozenset[str]().union(*every)
        self.wanted = frozenset(self._names.values()) - self.ignored
        """Names of all columns that may be read; others need not be fetched."""
        self.unread: set[str] = set()
        """Fields that the last call of `read` did not use, the ignored ones among them."""

    def read(self, row: Row) -> Item | None:
        """Parse a row without the ignored fields, and write the unused fields to `unread`."""
        self.unread = set(row.skipped)
        if self.ignored:
            kept = {name: cell for name, cell in row.columns.items() if name not in self.ignored}
            self.unread |= row.columns.keys() - kept.keys()
            row = row._replace(columns=kept)
        item = self.parse(row)
        for name, cell in row.columns.items():
            if name not in self.wanted and name != PLAIN and cell not in EMPTY:
                self.unread.add(name)
        return item

    def with_fix(self, error: DataError) -> DataError:
        """A `FieldError` with the key's whole new value in its fix; other errors unchanged.

        The value repeats what the run file has, and uses the column names of the data.
        """
        if not isinstance(error, FieldError):
            return error
        if error.ignore:
            fields = (self._names.get(field, field) for field in error.ignore)
            listed = ", ".join(dict.fromkeys([*self._given_ignored, *fields]))
            value = f"ignore_fields: [{listed}]"
        else:
            columns = {**self._given_columns, **error.columns}
            listed = ", ".join(f"{key}: {name}" for key, name in columns.items())
            value = f"columns: {{{listed}}}"
        fix = f"{error.fix} data.sources.{value}{error.rest}"
        return DataError(error.what, where=error.where, fix=fix, id=error.id)

    @abstractmethod
    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file that lacks a column, by the names of all its columns, with a DataError."""

    @abstractmethod
    def parse(self, row: Row) -> Item | None:
        """The content of one row; None for empty text. DataError: the row is bad."""

    def _need(self, key: str, names: Sequence[str], where: str) -> str:
        # What the data calls a column, which must be among these names.
        name = self._names[key]
        self._check_read(name)
        if name not in names:
            raise self.with_fix(missing_column(name, names, where, key=key))
        return name

    def _check_read(self, *names: str) -> None:
        if found := sorted(self.ignored & {*names}):
            what, where = (
                f"{found[0]} is listed, but each row needs it",
                "data.sources.ignore_fields",
            )
            raise DataError(what, where=where, fix=f"delete {found[0]} from ignore_fields")

    def _text(self, key: str, row: Row, *, may_miss: bool = False) -> str:
        # The text of a column; "" where it is missing or null and may be.
        if may_miss and row.columns.get(self._names[key]) is None:
            return ""
        name = self._need(key, list(row.columns), row.where)
        fix = f"repair or remove that row, or set data.sources.columns: {{{key}: A_COLUMN_OF_TEXT}}"
        text = checked_text(row.columns[name], f"column {name!r}", row.where, fix)
        if not may_miss and not text.strip():
            raise DataError(f"column {name!r} is empty", where=row.where, fix="remove that row")
        return text


ChunkStart = dict[str, Any]
"""Where a chunk of rows begins: plain JSON that only the source that made it understands."""


class Chunk(NamedTuple):
    """Some rows, one after another; `end` is where the one after the last would be."""

    begin: ChunkStart
    end: ChunkStart
    rows: list[Row | DataError]


def counted_chunks(rows: Rows, first: int) -> Iterator[Chunk]:
    """Rows from this number on in chunks that are found again by counting."""
    piece, size = list[Row | DataError](), 0
    for row in rows:
        piece.append(row)
        size += 0 if isinstance(row, DataError) else _chars(list(row.columns.values()))
        if len(piece) >= CHUNK_ROWS or size >= _CHUNK_CHARS:
            yield Chunk({"row": first}, {"row": first + len(piece)}, piece)
            first, piece, size = first + len(piece), [], 0
    if piece:
        yield Chunk({"row": first}, {"row": first + len(piece)}, piece)


def _chars(value: object) -> int:
    # About how much memory a value takes: `size_of` would write out each number.
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list) or set(map(type, value)) <= _FLAT:
        return 8 * len(value) if isinstance(value, list) else 8
    return sum(map(_chars, value))


class Source(ABC):
    """Rows in an order that does not change."""

    name: str
    """For messages."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that the rows depend on, on this machine: plain JSON, cheap."""

    def stamp(self) -> list[int]:
        """Numbers that also change if somebody exchanges a file and keeps its time of change."""
        return []

    def content(self) -> dict[str, Any]:
        """Everything that the rows depend on, equal on all machines with these rows; plain JSON."""
        return self.identity()

    def near(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Cheap facts that sources with equal rows share, from their `identity`."""
        return self.content()

    def digest(self, is_over: Event) -> str:
        """A hash that equal rows have in common, and no others; it may take as long as reading.

        Once `is_over` is set, the answer does not matter. DataError: something cannot be read.
        """
        return hashlib.sha256(json.dumps(self.content(), sort_keys=True).encode()).hexdigest()

    @abstractmethod
    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        """The chunks from this one, which this method has given, to the last; None: from the first.

        DataError: something cannot be read, or lacks a column.
        """

    def rows(self, parser: Parser) -> Rows:
        """All rows, each time from the first."""
        for chunk in self.chunks(parser):
            yield from chunk.rows


class Tally:
    """Counts the rows of a source, and stops where a larger share than the limit is bad."""

    def __init__(self, name: str, max_bad_fraction: float) -> None:
        self._name = name
        self._limit = max_bad_fraction
        self._first: list[tuple[int, DataError]] = []
        self.num_rows = 0
        self.num_empty = 0
        self.num_bad = 0
        self._unread = Counter[str]()
        self._remarks = Counter[str]()
        self._ignored = set[str]()

    def bad(self, number: int, error: DataError) -> None:
        """Note a bad row, by its number from 1."""
        self.num_bad += 1
        self._first = sorted([*self._first, (number, error)], key=lambda entry: entry[0])[:LISTED]

    def unread(self, names: Iterable[str], ignored: frozenset[str] = frozenset()) -> None:
        """Note the fields of one row that nothing reads; ignored names and remarks separately."""
        for name in names:
            if isinstance(name, Remark):
                self._remarks[str(name)] += 1
                continue
            bare = name.rpartition(".")[2]
            if bare in ignored:
                self._ignored.add(bare)
            else:
                self._unread[name] += 1

    def judge(self, *, is_all: bool = True, logs: bool = True) -> None:
        """Refuse too many bad rows with a DataError, or log them if `logs`.

        Before all rows have been read, only a limit of 0 is known to be passed.
        """
        if self.num_bad and (is_all or not self._limit):
            judge_bad_rows(self._name, self.record(), self._limit, is_all=is_all, logs=logs)

    def record(self) -> dict[str, Any]:
        """The counts and the first bad rows, as plain JSON."""
        unread = sorted(self._unread.items(), key=lambda entry: (-entry[1], entry[0]))
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "bad": self.num_bad,
            "first_bad": [[error.where, error.what, error.fix] for _, error in self._first],
            "unread": {name[:100]: count for name, count in unread[:MOST_UNREAD]},
            "ignored": sorted(self._ignored),
            "remarks": dict(self._remarks.most_common(MOST_UNREAD)),
        }


def judge_bad_rows(
    name: str,
    record: Mapping[str, Any],
    limit: float,
    *,
    is_all: bool = True,
    logs: bool = True,
) -> None:
    """Log the bad rows of a `Tally.record` if `logs`, or refuse too many of them.

    DataError: their share of all rows is above the limit.
    """
    num_bad, num_rows = record.get("bad", 0), record.get("rows", 0)
    first: Sequence[Sequence[str]] = record.get("first_bad", [])
    if not num_bad:
        return
    if num_bad <= limit * num_rows:
        if not logs:
            return
        what = "source=%s bad_rows=%d rows=%d: skipped, as data.max_bad_fraction allows"
        log.warning(what, name, num_bad, num_rows)
        for where, what, _ in first:
            log.warning("bad row %s: %s", where, what)
        return
    if num_bad == 1:
        where, what, fix = first[0]
        raise DataError(what, where=where, fix=fix, id="data.rows")
    lines = "".join(f"\n    {where}: {what}" for where, what, _ in first)
    more = num_bad - len(first)
    takes = f"; it takes {math.ceil(100 * num_bad / num_rows) / 100} here" if is_all else ""
    fixes = list(dict.fromkeys(fix for _, _, fix in first))
    fix = fixes[0] if len(fixes) == 1 else f"for the first: {fixes[0]}"
    raise DataError(
        f"{num_bad} of {'' if is_all else 'the first '}{num_rows} rows cannot be trained on:{lines}"
        + (f"\n    and {more} more" if more > 0 else ""),
        where=name,
        fix=f"{fix}; or skip bad rows with data.max_bad_fraction (now {limit:g}{takes})",
        id="data.rows",
    )


_PAIR = "; a row needs a better and a worse answer"
_NEEDS = {
    "messages": ", if it holds lists of messages; if a row is one message or a tree of messages, "
    "join the messages of each conversation into one row",
    **dict.fromkeys(("chosen", "rejected"), _PAIR),
}
"""Requirements of a column, for which another name may not be enough."""


def missing_column(column: str, names: Sequence[str], where: str, *, key: str) -> DataError:
    """The error for a missing column, with the existing columns.

    `key` is how the run file names it: `text_column`, or its key within `columns`.
    """
    if tuple(names) == (PLAIN,):
        return DataError(
            f"this is plain text, without a column {column!r}",
            where=where,
            fix="provide it as JSON lines, JSON, Parquet or CSV"
            + ("" if key in ("chosen", "rejected") else ", or set type: text"),  # dpo needs pairs
            id="data.column",
        )
    near = get_close_matches(column, names, n=1) or (names if len(names) == 1 else ["ITS_NAME"])
    choice = near[0]
    fix = ""
    if key == "text_column":
        fix = f"set data.sources.text_column to {choice}"
    elif choice == key:
        fix = f"delete {key} from data.sources.columns, because the data has that name"
    listed = ", ".join(map(str, names)) or "none"
    what = f"column {column!r} not found; the columns are {listed}"
    if not fix:
        more: dict[str, Any] = {"columns": {key: choice}, "rest": _NEEDS.get(key, "")}
        return FieldError(what, where=where, fix="set", id="data.column", **more)
    return DataError(what, where=where, fix=fix, id="data.column")


def wrong_type(value: object, name: str, expected: str, where: str, fix: str = "") -> DataError:
    """The error for a value of another type than was expected."""
    return DataError(
        f"{name} holds {show(value)}, not {expected}",
        where=where,
        fix=fix or "repair or remove that row",
    )


def show(value: object) -> str:
    """A value for a message: its type, and the beginning of it."""
    return "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def checked_text(value: object, name: str, where: str, fix: str = "") -> str:
    """The value itself, if it is text that can be encoded, and no half of a surrogate pair."""
    if not isinstance(value, str):
        raise wrong_type(value, name, "text", where, fix)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name} holds half of a surrogate pair, {value[error.start]!r}, which is not a "
                "character",
                where=where,
                fix="repair or remove that row",
            ) from error
    return value


def from_json_text(value: object, name: str, where: str, fix: str = "") -> object:
    """Value of a cell that has JSON as text, as in CSV files and in some datasets."""
    if not isinstance(value, str):
        return value
    try:
        return JSON.decode(value)
    except RepeatedKey as error:
        raise error.of_row(where) from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} holds {show(value)}, which is text but not JSON",
            where=where,
            fix=fix or "repair or remove that row",
        ) from error
