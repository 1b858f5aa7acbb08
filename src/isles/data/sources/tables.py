"""Rows out of one file with columns: JSON lines, a JSON array, CSV or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.data.sources.opening import decode, opened, unreadable
from isles.data.sources.rows import Columns, Row, Rows, show
from isles.errors import DataError

ARRAY_BYTES = 2**30
"""A JSON array is read as a whole, up to this size."""

_CELL_CHARS = 2**27  # csv's own limit of 128 KiB is shorter than a long answer

_OBJECTS = "one JSON object a line is expected"
_FROM_ARRAY = "; for a JSON array: jq -c '.[]' FILE > NEW.jsonl"


def read_json(path: Path) -> Rows:
    """One JSON object a line, or one JSON array of objects: the first character tells."""
    return _read_json_array(path) if is_json_array(path) else read_json_lines(path)


def is_json_array(path: Path) -> bool:
    """Whether a file's first character begins an array."""
    with opened(path) as stream:
        return stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def read_json_lines(path: Path) -> Rows:
    """One JSON object a line; blank lines are none."""
    offset = 0
    with opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            row = json_row(line, path, offset, number)
            offset += len(line)
            if row is not None:
                yield row


def json_row(line: bytes, path: Path, offset: int, number: int) -> Row | DataError | None:
    """The row that one line of JSON lines holds, or what is wrong with it; None: it is blank.

    Args:
        line: with its end of line, which the last one of a file may lack.
        path: the file.
        offset: where the line begins in the file, bytes.
        number: of the line, from 1.

    Raises:
        DataError: the file is not UTF-8.
    """
    where = f"{path}:{number}"
    try:
        text = decode(line, path, offset, number)
        if text.isspace():
            return None
        row = json.loads(text)
    except (DataError, ValueError, RecursionError) as error:
        if _is_cut_off(line):
            return DataError(
                "the file ends in the middle of this row: it is cut off",
                where=where,
                fix="fetch or write the file again, or delete this line",
            )
        if isinstance(error, DataError):
            raise
        array = number == 1 and line.lstrip().startswith(b"[")
        return DataError(
            f"not JSON: {error}",
            where=where,
            fix=_OBJECTS + ("; name a file that is one JSON array NAME.json" if array else ""),
        )
    if not isinstance(row, dict):
        return DataError(
            f"not a JSON object but {type(row).__name__}", where=where, fix=_OBJECTS + _FROM_ARRAY
        )
    return Row(where, row)


def _is_cut_off(line: bytes) -> bool:
    """Whether a line ends before its JSON object does, and the file with it."""
    text = line.decode("utf-8", errors="ignore").rstrip()  # perhaps in the middle of a character
    if line.endswith(b"\n") or not text.lstrip().startswith("{"):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text) or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def _read_json_array(path: Path) -> Rows:
    with opened(path) as stream:
        data = stream.read(ARRAY_BYTES + 1)
    if len(data) > ARRAY_BYTES:
        raise DataError(
            f"a JSON array of more than {ARRAY_BYTES // 2**20} MiB, which is read as a whole",
            where=str(path),
            fix=f"make JSON lines of it: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    text = decode(data, path, 0, 1)
    del data
    at = _Place(path, text)
    decoder = json.JSONDecoder()
    at.skip("[")
    number = 0
    while not at.skip("]"):
        number += 1
        at.row = number
        if number > 1 and not at.skip(","):
            raise at.fault("a comma or ] is missing")
        at.skip("")
        try:
            value, end = decoder.raw_decode(text, at.position)
        except (ValueError, RecursionError) as error:
            # What follows cannot be told from what is broken.
            what = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise at.fault(what, getattr(error, "pos", at.position)) from error
        where = f"{path}:{at.line()} row {number}"
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            what = f"not a JSON object but {type(value).__name__}"
            yield DataError(what, where=where, fix="an array of JSON objects is expected")
        at.position = end
    at.skip("")
    if at.position != len(text):
        raise at.fault("there is more after the array's end")


class _Place:
    """A place in a text of JSON, and its line."""

    def __init__(self, path: Path, text: str) -> None:
        self._path, self._text = path, text
        self._counted, self._line = 0, 1
        self.position = 0
        self.row = 0

    def skip(self, character: str) -> bool:
        """Go past white space, and then past the character if it stands there."""
        while self._text[self.position : self.position + 1] in (" ", "\t", "\r", "\n"):
            self.position += 1
        found = bool(character) and self._text.startswith(character, self.position)
        self.position += found
        return found

    def line(self) -> int:
        """Number of the line, from 1."""
        self._line += self._text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def fault(self, what: str, position: int | None = None) -> DataError:
        """The error for an array that is broken here."""
        self.position = self.position if position is None else position
        column = self.position - self._text.rfind("\n", 0, self.position)
        return DataError(
            f"not JSON: {what} (row {self.row}, column {column})",
            where=f"{self._path}:{self.line()}",
            fix=f"repair it there; python -m json.tool {self._path} tests it",
        )


def read_csv(path: Path, columns: Columns, *, delimiter: str) -> Rows:
    """Rows below a line with the columns' names, as RFC 4180 has them."""
    csv.field_size_limit(max(_CELL_CHARS, csv.field_size_limit()))
    with opened(path) as stream:
        reader = csv.reader(_lines(path, stream), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(
                    f"the column {twice!r} stands twice",
                    where=f"{path}:1",
                    fix="give every column a name of its own",
                )
            columns.check(names, f"{path}:1")
            line = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield _csv_row(names, cells, f"{path}:{line}")
                line = reader.line_num + 1
        except csv.Error as error:
            raise DataError(
                f"not CSV: {error}",
                where=f"{path}:{reader.line_num}",
                fix='put cells with quotes, commas or line breaks in "quotes", and double the '
                "quotes inside",
            ) from error


def _lines(path: Path, stream: Any) -> Iterator[str]:
    offset = 0
    for number, line in enumerate(stream, start=1):
        yield decode(line, path, offset, number)
        offset += len(line)


def _csv_row(names: list[str], cells: list[str], where: str) -> Row | DataError:
    if len(cells) == len(names):
        return Row(where, dict(zip(names, cells, strict=True)))
    return DataError(
        f"{len(cells)} cells, and the first line names {len(names)} columns",
        where=where,
        fix='put cells with commas or line breaks in "quotes"',
    )


def read_parquet(path: Path, columns: Columns, *, first: int = 0) -> Rows:
    """A row each, from row `first` on; only the columns that are wanted are read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = first
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns.check(names, str(path))
            wanted = [name for name in names if name in columns.wanted]
            groups, skipped = _groups_from(file, first)
            # The row groups before the first row are not read.
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=wanted):
                kept = batch.slice(min(first - skipped, batch.num_rows))
                skipped += batch.num_rows - kept.num_rows
                for values in kept.to_pylist():
                    yield Row(f"{path} row {row}", values)
                    row += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"a column holds text that is not UTF-8: {error}",
            where=f"{path} from row {row} on",
            fix="write the file again",
        ) from error
    except pa.ArrowException as error:
        raise DataError(
            f"the Parquet file is damaged (near row {row}): {str(error).splitlines()[0]}",
            where=str(path),
            fix="fetch it again, or leave it out",
            id="data.damaged",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _groups_from(file: Any, row: int) -> tuple[list[int], int]:
    """The row groups of a Parquet file from the one with this row on, and the rows before them."""
    before = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if before + num_rows > row:
            return list(range(group, file.num_row_groups)), before
        before += num_rows
    return [], before


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
