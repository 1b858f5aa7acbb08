"""Documents out of one file: plain text, JSON lines or Parquet."""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, cast

from isles.errors import DataError

WHOLE_BYTES = 64 * 2**20
"""A text file up to this size is one document."""

PIECE_BYTES = 16 * 2**20
"""A larger one is cut into documents of about this size, at a blank line where there is one."""

_OBJECTS = "one JSON object a line is expected"
_FROM_ARRAY = "; for a JSON array: jq -c '.[]' FILE > NEW.jsonl"

JSON_LINES = (".jsonl", ".json", ".ndjson")
PARQUET = (".parquet", ".pq")


def read_documents(path: Path, text_column: str) -> Iterator[str]:
    """The documents of one file, in its order; what it holds is told by its ending.

    .jsonl and .json: one JSON object a line. .parquet: a row each. Anything else: UTF-8 text, one
    document; above WHOLE_BYTES cut into pieces. A further .gz is unpacked.

    Raises:
        DataError: it cannot be read, or a document is not text.
    """
    kind = path.with_suffix("") if path.suffix == ".gz" else path
    if kind.suffix in PARQUET:
        return _read_parquet(path, text_column)
    if kind.suffix in JSON_LINES:
        return _read_json_lines(path, text_column)
    return _read_text(path)


def missing_column(column: str, columns: Sequence[str], where: str) -> DataError:
    """The error for a column that is not there: names those that are."""
    near = get_close_matches(column, columns, n=1)
    choice = near[0] if near else (columns[0] if len(columns) == 1 else "one of them")
    return DataError(
        f"there is no column {column!r}; there are: {', '.join(columns) or 'none'}",
        where=where,
        fix=f"set data.sources.text_column to {choice}",
    )


def not_text(value: object, column: str, where: str) -> DataError:
    """The error for a column whose value is no string."""
    kind = "null" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
    return DataError(
        f"column {column!r} holds {kind}, not text",
        where=where,
        fix="remove or repair that row, or set data.sources.text_column to a column of strings",
    )


def near_names(path: Path) -> list[str]:
    """Names beside this path that look like its own."""
    try:
        return get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3)
    except OSError:
        return []


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    if not isinstance(error, PermissionError):
        return DataError(f"cannot be read: {error.strerror or error}", where=str(path), fix="")
    try:
        status = path.stat()
        rights = f"{stat.filemode(status.st_mode)}, owner uid {status.st_uid}"
    except OSError:
        rights = "its folder is closed to us"
    return DataError(
        f"no read permission ({rights}; this process runs as uid {os.geteuid()})",
        where=str(path),
        fix=f"chmod a+r {path}, or run as its owner",
    )


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast("IO[bytes]", stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip file is damaged: {error}",
            where=str(path),
            fix=f"fetch it again; gzip -t {path} tests it",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _decode(block: bytes, path: Path, offset: int, line: int) -> str:
    """UTF-8 to text; offset and line (from 1) are where the block begins in the file."""
    if offset == 0:
        block = block.removeprefix(b"\xef\xbb\xbf")
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = offset == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff")
        known = "UTF-16" if utf16 else "WINDOWS-1252"
        line += block.count(b"\n", 0, error.start)
        raise DataError(
            f"not UTF-8: byte 0x{block[error.start]:02x} at offset {offset + error.start}",
            where=f"{path}:{line}",
            fix=f"convert it: iconv -f {known} -t UTF-8 FILE > NEW (if it is {known})",
        ) from error


def _read_text(path: Path) -> Iterator[str]:
    with _opened(path) as stream:
        block = stream.read(WHOLE_BYTES + 1)
        if len(block) <= WHOLE_BYTES:
            yield _decode(block, path, 0, 1)
            return
        offset, line = 0, 1
        while block:
            piece = block[: _border(block)]
            yield _decode(piece, path, offset, line)
            offset += len(piece)
            line += piece.count(b"\n")
            block = block[len(piece) :]
            if len(block) < 2 * PIECE_BYTES:
                block += stream.read(2 * PIECE_BYTES)


def _border(block: bytes) -> int:
    """Where to cut: after a blank line, else a line, else a character, up to PIECE_BYTES."""
    if len(block) <= PIECE_BYTES:
        return len(block)
    for mark in (b"\n\n", b"\n"):
        found = block.rfind(mark, PIECE_BYTES // 2, PIECE_BYTES)
        if found >= 0:
            return found + len(mark)
    cut = PIECE_BYTES
    while cut > PIECE_BYTES - 4 and block[cut] & 0xC0 == 0x80:  # inside a UTF-8 character
        cut -= 1
    return cut


def _read_json_lines(path: Path, column: str) -> Iterator[str]:
    offset = 0
    with _opened(path) as stream:
        for number, line in enumerate(stream, start=1):
            text = _decode(line, path, offset, number)
            offset += len(line)
            if not text.isspace():
                yield _json_text(text, column, f"{path}:{number}")


def _json_text(line: str, column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        array = where.endswith(":1") and line.lstrip().startswith("[")
        raise DataError(
            f"not JSON: {error}",
            where=where,
            fix=_OBJECTS + (_FROM_ARRAY if array else ""),
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"not a JSON object but {type(row).__name__}",
            where=where,
            fix=_OBJECTS + _FROM_ARRAY,
        )
    if column not in row:
        raise missing_column(column, list(row), where)
    text = row[column]
    if not isinstance(text, str):
        raise not_text(text, column, where)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"half of a surrogate pair, {text[error.start]!r}, which is no character",
            where=where,
            fix="remove or repair that line",
        ) from error
    return text


def _read_parquet(path: Path, column: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise missing_column(column, names, str(path))
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                for text in batch.column(0):
                    value = text.as_py()
                    if not isinstance(value, str):
                        raise not_text(value, column, f"{path} row {row}")
                    yield value
                    row += 1
    except UnicodeDecodeError as error:
        raise DataError(
            f"column {column!r} is not UTF-8: {error}", where=f"{path} row {row}", fix="repair it"
        ) from error
    except pa.ArrowException as error:
        raise DataError(
            f"the Parquet file is damaged (near row {row}): {str(error).splitlines()[0]}",
            where=str(path),
            fix="fetch it again, or leave it out",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
