"""Rows of one file, from any place on; the file's ending tells what it holds.

A place is the number of rows or lines before a row, and of a file of lines or text the bytes before
it (unpacked, where the file is packed). A file of lines is opened there, a packed one is unpacked
up to there; of a Parquet file the row groups before it are not read. CSV and JSON arrays are read
from the beginning, and the rows before it left out.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

from isles.data.sources.rows import (
    CHUNK_ROWS,
    PLAIN,
    Chunk,
    ChunkStart,
    Parser,
    Row,
    Rows,
    counted_chunks,
)
from isles.errors import DataError

WHOLE_BYTES = 64 * 2**20
"""A text file up to this size is one document."""

PIECE_BYTES = 16 * 2**20
"""A larger one is cut into documents of about this size, at a blank line where there is one."""

ARRAY_BYTES = 2**30
"""A JSON array is read as a whole, up to this size."""

_CHUNK_BYTES = 2**20
_CELL_CHARS = 2**27  # csv's own limit of 128 KiB is shorter than a long answer

_OBJECTS = "one JSON object a line is expected"
_FROM_ARRAY = "; for a JSON array: jq -c '.[]' FILE > NEW.jsonl"


def file_chunks(path: Path, parser: Parser, begin: ChunkStart) -> Iterator[Chunk]:
    """The rows of one file from this place on, some at a time; {}: from the first.

    .jsonl and .ndjson: one JSON object a line. .json: the same, or one JSON array of objects.
    .csv and .tsv: the first line names the columns. .parquet: a row each. Anything else: UTF-8
    text, one row with the column PLAIN; above WHOLE_BYTES cut into several. A further .gz is
    unpacked. DataError: it cannot be read, is damaged or not UTF-8, or lacks a column. A row that
    is bad by itself is among the rows, as its error.
    """
    first = begin.get("row", 0)
    match (path.with_suffix("") if path.suffix == ".gz" else path).suffix:
        case ".parquet" | ".pq":
            return counted_chunks(_read_parquet(path, parser, first), first)
        case ".csv":
            rows = _read_csv(path, parser, ",")
        case ".tsv":
            rows = _read_csv(path, parser, "\t")
        case ".json" if _is_json_array(path):
            rows = _read_json_array(path)
        case ".jsonl" | ".ndjson" | ".json":
            return _line_chunks(path, begin)
        case _:
            parser.check((PLAIN,), str(path))
            return _text_chunks(path, begin)
    return counted_chunks(islice(rows, first, None), first)


def _line_chunks(path: Path, begin: ChunkStart) -> Iterator[Chunk]:
    offset, number = begin.get("bytes", 0), begin.get("row", 0)
    begin, rows = {"bytes": offset, "row": number}, list[Row | DataError]()
    with opened(path) as stream:
        stream.seek(offset)
        for line in stream:
            number += 1
            row = _json_row(line, path, offset, number)
            offset += len(line)
            if row is not None:
                rows.append(row)
            if len(rows) >= CHUNK_ROWS or offset - begin["bytes"] >= _CHUNK_BYTES:
                end = {"bytes": offset, "row": number}
                yield Chunk(begin, end, rows)
                begin, rows = end, []
    if rows:
        yield Chunk(begin, {"bytes": offset, "row": number}, rows)


def _text_chunks(path: Path, begin: ChunkStart) -> Iterator[Chunk]:
    offset, line = begin.get("bytes", 0), begin.get("row", 0)
    with opened(path) as stream:
        stream.seek(offset)
        block = stream.read(2 * PIECE_BYTES if offset else WHOLE_BYTES + 1)
        whole = not offset and len(block) <= WHOLE_BYTES
        while block:
            piece = block if whole else block[: _border(block)]
            begin, where = {"bytes": offset, "row": line}, path if whole else f"{path}:{line + 1}"
            text = decode(piece, path, offset, line + 1)
            offset, line = offset + len(piece), line + piece.count(b"\n")
            end = {"bytes": offset, "row": line}
            yield Chunk(begin, end, [Row(str(where), {PLAIN: text})])
            block = block[len(piece) :]
            if not whole and len(block) < 2 * PIECE_BYTES:
                block += stream.read(2 * PIECE_BYTES)


def _border(block: bytes) -> int:
    # Where to cut a long text, up to PIECE_BYTES: after a blank line, a line or a character.
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


def _json_row(line: bytes, path: Path, offset: int, number: int) -> Row | DataError | None:
    # The row that one line of JSON lines holds, or what is wrong with it; None: it is blank.
    where = f"{path}:{number}"
    is_cut = not line.endswith(b"\n")
    try:
        text = decode(line, path, offset, number)
        if text.isspace():
            return None
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        fix = _OBJECTS
        if number == 1 and line.lstrip().startswith(b"["):
            fix += "; name a file that is one JSON array NAME.json"
        if is_cut:
            fix += "; the file ends here: if it is cut off, fetch or write it again"
        return DataError(f"not JSON: {error}", where=where, fix=fix)
    if not isinstance(row, dict):
        what = f"not a JSON object but {type(row).__name__}"
        return DataError(what, where=where, fix=_OBJECTS + _FROM_ARRAY)
    return Row(where, row)


def _is_json_array(path: Path) -> bool:
    with opened(path) as stream:
        return stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _read_json_array(path: Path) -> Rows:
    with opened(path) as stream:
        data = stream.read(ARRAY_BYTES + 1)
    if len(data) > ARRAY_BYTES:
        raise DataError(
            f"a JSON array of more than {ARRAY_BYTES // 2**20} MiB, which is read as a whole",
            where=str(path),
            fix=f"make JSON lines of it: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}",
        )
    try:
        values = json.loads(decode(data, path, 0, 1))
    except (ValueError, RecursionError) as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise DataError(
            f"not JSON: {error}",
            where=f"{path}:{line}",
            fix=f"repair it there; python -m json.tool {path} tests it",
        ) from error
    for number, value in enumerate(values, start=1):
        where = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            what = f"not a JSON object but {type(value).__name__}"
            yield DataError(what, where=where, fix="an array of JSON objects is expected")


def _read_csv(path: Path, parser: Parser, delimiter: str) -> Rows:
    # Rows below a line with the columns' names, as RFC 4180 has them.
    csv.field_size_limit(max(_CELL_CHARS, csv.field_size_limit()))
    with opened(path) as stream:
        reader = csv.reader(_lines(path, stream), delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            parser.check(names, f"{path}:1")
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(names):
                    yield Row(f"{path}:{line}", dict(zip(names, cells, strict=True)))
                elif cells:
                    yield DataError(
                        f"{len(cells)} cells, and the first line names {len(names)} columns",
                        where=f"{path}:{line}",
                        fix='put cells with commas or line breaks in "quotes"',
                    )
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


def _read_parquet(path: Path, parser: Parser, first: int) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = first
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            parser.check(names, str(path))
            wanted = [name for name in names if name in parser.wanted]
            # The row groups before the first row are not read.
            sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
            skipped = group = 0
            while group < len(sizes) and skipped + sizes[group] <= first:
                skipped, group = skipped + sizes[group], group + 1
            groups = list(range(group, len(sizes)))
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=wanted):
                kept = batch.slice(min(first - skipped, batch.num_rows))
                skipped += batch.num_rows - kept.num_rows
                for values in kept.to_pylist():
                    yield Row(f"{path} row {row}", values)
                    row += 1
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            f"the Parquet file is damaged (near row {row}): {str(error).splitlines()[0]}",
            where=str(path),
            fix="fetch it again, or leave it out",
            id="data.damaged",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read, unpacked if its name ends with .gz; DataError where it cannot be."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield cast("IO[bytes]", stream)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip file is damaged: {error}",
            where=str(path),
            fix=f"fetch it again; gzip -t {path} tests it",
            id="data.damaged",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def decode(block: bytes, path: Path, offset: int, line: int) -> str:
    """A block of a file, from this byte and line (from 1) on, as text; DataError if not UTF-8."""
    if offset == 0:
        block = block.removeprefix(b"\xef\xbb\xbf")
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = offset == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff")
        known = "UTF-16" if utf16 else "WINDOWS-1252"
        fix = f"convert it: iconv -f {known} -t UTF-8 FILE > NEW (if it is {known})"
        if error.reason == "unexpected end of data":
            fix = "the file is cut off in the middle of a character: fetch or write it again"
        line += block.count(b"\n", 0, error.start)
        raise DataError(
            f"not UTF-8: byte 0x{block[error.start]:02x} at offset {offset + error.start}",
            where=f"{path}:{line}",
            fix=fix,
        ) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    what = f"cannot be read: {error.strerror or error}"
    fix = "look at the disk or the network that it lies on"
    if isinstance(error, PermissionError):
        what = f"no read permission (this process runs as uid {os.geteuid()})"
        fix = f"chmod a+r {path}, or its folders, or run as its owner"
    return DataError(what, where=str(path), fix=fix, id="data.damaged")
