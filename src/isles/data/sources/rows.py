"""Rows of a source: what readers yield, what is wrong with them, and how many may be bad."""

from __future__ import annotations

import json
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol

from isles.errors import DataError

log = logging.getLogger(__name__)

PLAIN = ""
"""The one column of a row that is plain text: a text file has no columns with names."""

LISTED = 10
"""So many bad rows are named."""

_LOOK_FURTHER = 10_000
"""Where no row may be bad, so many rows after the first bad one are looked at to name others."""


class Row(NamedTuple):
    """One row of a file or dataset."""

    where: str
    columns: Mapping[str, Any]


Rows = Iterator[Row | DataError]
"""Rows in order; a row that cannot be read is yielded as the error that says why.

What ends the reading altogether, such as a damaged file, is raised instead.
"""


class Columns(Protocol):
    """What readers of files with columns need to know of the parser of the rows."""

    @property
    def wanted(self) -> frozenset[str]:
        """Names of all columns that may be read; others need not be fetched."""
        ...

    def check(self, names: Sequence[str], where: str) -> None:
        """Look at the names of the columns of a whole file.

        Raises:
            DataError: one that is needed is not among them.
        """
        ...


ChunkStart = dict[str, Any]
"""Where a chunk of rows begins: plain JSON that only the kind of source that made it understands.
"""


class Chunk(NamedTuple):
    """Some rows, one after another.

    Args:
        end: where the one after the last of them is; there may be none.
    """

    begin: ChunkStart
    end: ChunkStart
    rows: list[Row | DataError]


class Source(ABC):
    """Rows in an order that does not change."""

    name: str
    """For messages."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that the rows depend on, on this machine: plain JSON, cheap."""

    def content(self) -> dict[str, Any]:
        """What the rows depend on, alike on every machine that has the same; plain JSON."""
        return self.identity()

    @abstractmethod
    def chunks(self, columns: Columns, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        """The chunks from this one to the last; None: from the first.

        Args:
            columns: of the parser; those that it does not want need not be read.
            begin: of a chunk that this method gave.

        Raises:
            DataError: something cannot be read, or lacks a column.
        """

    def rows(self, columns: Columns) -> Rows:
        """All rows, each time from the first."""
        for chunk in self.chunks(columns):
            yield from chunk.rows


class Tally:
    """Counts the rows of a source, and stops where too many of them are bad.

    Args:
        max_bad_fraction: share of the rows that may be bad.
    """

    def __init__(self, name: str, max_bad_fraction: float) -> None:
        self._name = name
        self._limit = max_bad_fraction
        self._first: list[tuple[int, DataError]] = []
        self.num_rows = 0
        self.num_empty = 0
        self.num_bad = 0

    def count(self) -> int:
        """Called for every row; gives its number, from 1.

        Raises:
            DataError: no row may be bad, and enough have been looked at to name those that are.
        """
        self.num_rows += 1
        if self._first and not self._limit and self.num_rows > self._first[0][0] + _LOOK_FURTHER:
            self.judge(is_all=False)
        return self.num_rows

    def bad(self, number: int, error: DataError) -> None:
        """Note a bad row.

        Raises:
            DataError: as for `count`.
        """
        self.num_bad += 1
        if len(self._first) < LISTED:
            self._first.append((number, error))
            self._first.sort(key=lambda entry: entry[0])
        elif not self._limit:
            self.judge(is_all=False)

    def judge(self, *, is_all: bool = True) -> None:
        """Compare the bad rows with the limit.

        Args:
            is_all: whether all rows have been read.

        Raises:
            DataError: there are more than may be.
        """
        judge_bad_rows(self._name, self.record(), self._limit, is_all=is_all)

    def record(self) -> dict[str, Any]:
        """The counts and the first bad rows, as plain JSON."""
        return {
            "rows": self.num_rows,
            "empty": self.num_empty,
            "bad": self.num_bad,
            "first_bad": [[error.where, error.what, error.fix] for _, error in self._first],
        }


def judge_bad_rows(
    name: str, record: Mapping[str, Any], limit: float, *, is_all: bool = True
) -> None:
    """Log bad rows that are left out, or refuse the source where there are too many.

    Args:
        record: as `Tally.record` gives it.
        limit: share of the rows that may be bad.

    Raises:
        DataError: the share is above the limit.
    """
    num_bad, num_rows = record.get("bad", 0), record.get("rows", 0)
    first: Sequence[Sequence[str]] = record.get("first_bad", [])
    if not num_bad:
        return
    if num_bad <= limit * num_rows:
        log.warning(
            "source=%s bad_rows=%d rows=%d: left out, as data.max_bad_fraction allows",
            name,
            num_bad,
            num_rows,
        )
        for where, what, _ in first:
            log.warning("bad row %s: %s", where, what)
        return
    if num_bad == 1 and is_all:
        where, what, fix = first[0]
        raise DataError(what, where=where, fix=fix, id="data.rows")
    lines = "".join(f"\n    {where}: {what}" for where, what, _ in first)
    more = num_bad - len(first)
    takes = f"; it takes {_smallest_limit(num_bad, num_rows)} here" if is_all else ""
    fixes = list(dict.fromkeys(fix for _, _, fix in first))
    fix = fixes[0] if len(fixes) == 1 else f"for the first: {fixes[0]}"
    raise DataError(
        f"{num_bad} of {'' if is_all else 'the first '}{num_rows} rows cannot be trained on:{lines}"
        + (f"\n    and {more} more" if more > 0 else ""),
        where=name,
        fix=f"{fix}; or leave bad rows out with data.max_bad_fraction (now {limit:g}{takes})",
        id="data.rows",
    )


def _smallest_limit(num_bad: int, num_rows: int) -> str:
    # Of two digits, with which these rows pass.
    share = num_bad / num_rows
    step = 10.0 ** (math.floor(math.log10(share)) - 1)
    limit = math.ceil(round(share / step, 6)) * step
    return f"{limit:.2g}" if limit < 1 else "more than can be set"


def missing_column(column: str, names: Sequence[str], where: str, *, key: str) -> DataError:
    """The error for a column that is not there: names those that are.

    Args:
        column: the one that is missing.
        key: how the run file names the column: `text_column`, or the key within `columns`.
    """
    if tuple(names) == (PLAIN,):
        return DataError(
            f"this is plain text, without a column {column!r}",
            where=where,
            fix="give it as JSON lines, JSON, Parquet or CSV, or set type: text",
            id="data.column",
        )
    near = get_close_matches(column, names, n=1) or (names if len(names) == 1 else ["one of them"])
    choice = near[0]
    if key == "text_column":
        fix = f"set data.sources.text_column to {choice}"
    elif choice == key:
        fix = f"delete {key} from data.sources.columns: the data calls it so"
    else:
        fix = f"set data.sources.columns: {{{key}: {choice}}}"
    listed = ", ".join(map(str, names)) or "none"
    return DataError(
        f"there is no column {column!r}; there are: {listed}",
        where=where,
        fix=fix,
        id="data.column",
    )


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
    """The value itself, if it is text that can be encoded.

    Raises:
        DataError: it is of another type, or holds half of a surrogate pair.
    """
    if not isinstance(value, str):
        raise wrong_type(value, name, "text", where, fix)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{name} holds half of a surrogate pair, {value[error.start]!r}, which is no "
                "character",
                where=where,
                fix="repair or remove that row",
            ) from error
    return value


def from_json_text(value: object, name: str, where: str) -> object:
    """What a cell holds that is JSON written as text, as CSV files and some datasets have it.

    Raises:
        DataError: it is text, but no JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name} holds {show(value)}, which is text and not JSON",
            where=where,
            fix="repair or remove that row",
        ) from error
