"""Rows of one file, from any place on; the file's ending tells what it holds.

A place is the number of rows or lines before a row, and of a file of lines or text the bytes before
it (unpacked, where the file is packed). A file of lines is opened there, a packed one is unpacked
up to there; of a Parquet file the row groups before it are not read. CSV and JSON arrays are read
from the beginning, and the rows before the place are skipped. No row is larger than ROW_BYTES, so
memory is bounded, however much a file unpacks to.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from isles.data.sources.arrow import damaged, one_of_each, table_rows
from isles.data.sources.files import decode, opened, unreadable
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

ROW_BYTES = 64 * 2**20
"""A line, or a row of CSV or of a JSON array, has this size at most."""

_CHUNK_BYTES = 2**20
_BATCH_ROWS, _BATCH_BYTES = 64, 64 * 2**20
_LINES_BYTES = 2**18
_ROW_LINES = 2**20
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")

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
        for line in _raw_lines(stream):
            number += 1
            if len(line) > ROW_BYTES:
                raise _too_large("line", f"{path}:{number}")
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


def _raw_lines(stream: IO[bytes]) -> Iterator[bytes]:
    # Lines; one that is too large is cut behind ROW_BYTES, by which the caller sees that it is.
    return chain.from_iterable(map(io.BytesIO, _line_blocks(stream)))


def _line_blocks(stream: IO[bytes]) -> Iterator[bytes]:
    # Many lines at a time: a call for each line would make the reading a sixth slower.
    rest = b""
    while len(rest) <= ROW_BYTES and (block := stream.read(_LINES_BYTES)):
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = block[end:]
        else:
            rest += block
    if rest:
        yield rest


def _too_large(what: str, where: str) -> DataError:
    lines = f" or {_ROW_LINES:,} lines" if what == "row" else ""
    return DataError(
        f"a {what} of more than {ROW_BYTES >> 20} MiB{lines}",
        where=where,
        fix="split it into several rows, or write it as text (.txt)",
        id="data.rows",
    )


def _read_json_array(path: Path) -> Rows:
    # One value after another: a small packed file may unpack to more than the memory holds.
    for number, value in enumerate(_array_values(path), start=1):
        where = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(where, value)
        else:
            what = f"not a JSON object but {type(value).__name__}"
            yield DataError(what, where=where, fix="an array of JSON objects is expected")


def _array_values(path: Path) -> Iterator[Any]:
    with opened(path) as stream:
        text = _ArrayText(path, stream)
        text.next()
        text.place += 1
        while text.next() != "]":
            yield text.value()
            if text.next() == ",":
                text.place += 1
            elif text.next() != "]":
                raise text.refused("Expecting ',' delimiter", text.place)
        text.place += 1
        if text.next():
            raise text.refused("Extra data", text.place)


class _ArrayText:
    # The part of a JSON array in memory, and the place in it that has been read.
    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._stream = path, stream
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._line, self._offset = "", 1, 0
        self.place = 0

    def next(self) -> str:
        """The next character that is not blank; "" at the end of the file."""
        while True:
            self.place = _SPACE.match(self._text, self.place).end()  # type: ignore[union-attr]
            if self.place < len(self._text) or not self._more():
                return self._text[self.place : self.place + 1]

    def value(self) -> Any:
        """The value that begins here; read up to its end."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self.place)
            except (ValueError, RecursionError) as error:
                place, what = self.place, str(error)
                if isinstance(error, json.JSONDecodeError):
                    place, what = error.pos, error.msg
                    # Only where the text in memory ends can more of it help.
                    is_cut = what.startswith("Unterminated") or place >= len(self._text) - 16
                    if is_cut and self._more():
                        continue
                raise self.refused(what, place) from error
            if end == len(self._text) and self._more():
                continue  # a number may go on
            if end - self.place > ROW_BYTES:
                raise self._too_large()
            self.place = end
            return value

    def refused(self, what: str, place: int) -> DataError:
        return DataError(
            f"not JSON: {what}",
            where=f"{self._path}:{self._line_of(place)}",
            fix=f"repair it there; python -m json.tool {self._path} tests it",
        )

    def _more(self) -> bool:
        # Drop what has been read, and read more: three times what one value has, so that
        # the time is linear in its size.
        kept = len(self._text) - self.place
        if kept >= ROW_BYTES:
            raise self._too_large()
        block = self._stream.read(max(_CHUNK_BYTES, min(3 * kept, ROW_BYTES - kept)))
        pending = self._decoder.getstate()[0]
        try:
            new = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line = self._line_of(len(self._text))
            decode(pending + block, self._path, self._offset - len(pending), line)
            raise AssertionError("decoded") from error
        if not self._offset:
            new = new.removeprefix("\ufeff")
        self._offset += len(block)
        self._line = self._line_of(self.place)
        self._text, self.place = self._text[self.place :] + new, 0
        return bool(block)

    def _line_of(self, place: int) -> int:
        return self._line + self._text.count("\n", 0, place)

    def _too_large(self) -> DataError:
        return _too_large("row", f"{self._path}:{self._line_of(self.place)}")


def _read_csv(path: Path, parser: Parser, delimiter: str) -> Rows:
    # Rows below a line with the columns' names, as RFC 4180 has them.
    csv.field_size_limit(max(ROW_BYTES, csv.field_size_limit()))  # 128 KiB by itself
    with opened(path) as stream:
        lines = _Lines(path, stream)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            parser.check(names, f"{path}:1")
            one_of_each(names, parser.wanted, f"{path}:1")
            line = reader.line_num + 1
            for cells in reader:
                lines.row_bytes = lines.row_lines = 0
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


class _Lines:
    # Lines of text; those of one row, which may have many, are ROW_BYTES at most.
    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self._path, self._lines = path, enumerate(_raw_lines(stream), start=1)
        self._offset = self.row_bytes = self.row_lines = 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        number, line = next(self._lines)
        self.row_bytes += len(line)
        self.row_lines += 1
        if self.row_bytes > ROW_BYTES or self.row_lines > _ROW_LINES:
            raise _too_large("row", f"{self._path}:{number}")
        text = decode(line, self._path, self._offset, number)
        self._offset += len(line)
        return text


def _read_parquet(path: Path, parser: Parser, first: int) -> Rows:
    import pyarrow.parquet as pq

    row = first
    with opened(path, is_packed=False):  # the library opens it again, by its path
        pass
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    # Its classes let whatever a damaged file provokes pass through.
    except Exception as error:
        raise _not_parquet(path, error, row) from error
    with file:
        parser.check(names, str(path))
        one_of_each(names, parser.wanted, str(path))
        wanted = [name for name in names if name in parser.wanted]
        # The row groups before the first row are not read.
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        skipped = group = 0
        while group < len(sizes) and skipped + sizes[group] <= first:
            skipped, group = skipped + sizes[group], group + 1
        groups = list(range(group, len(sizes)))
        size = _batch_rows(path, file.metadata, groups, wanted)
        batches = file.iter_batches(batch_size=size, row_groups=groups, columns=wanted)
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                raise _not_parquet(path, error, row) from error
            if batch is None:
                return
            kept = batch.slice(min(first - skipped, batch.num_rows))
            skipped += batch.num_rows - kept.num_rows
            # A large batch becomes Python's values row by row: they take as much memory again.
            step = max(kept.num_rows, 1) if kept.nbytes < _BATCH_BYTES // 4 else 1
            for begin in range(0, kept.num_rows, step):
                part = kept.slice(begin, step)
                if step == 1 and part.nbytes > ROW_BYTES:
                    raise _too_large("row", f"{path} row {row}")
                for values in table_rows(part, f"{path} row {row}"):
                    yield Row(f"{path} row {row}", values)
                    row += 1


def _batch_rows(path: Path, metadata: Any, groups: list[int], wanted: list[str]) -> int:
    # How many rows to unpack at once. Each of them may be a value of the dictionary, which the file
    # holds once: its size is in the header of the first page, and all else may be false.
    largest = 1
    with opened(path, is_packed=False) as stream:
        for group in groups:
            columns = metadata.row_group(group)
            for number in range(columns.num_columns):
                column = columns.column(number)
                if not f"{column.path_in_schema}.".startswith(tuple(f"{name}." for name in wanted)):
                    continue
                begins = (column.dictionary_page_offset, column.data_page_offset)
                stream.seek(min(place for place in begins if place is not None and place >= 0))
                largest = max(largest, _dictionary_bytes(stream.read(24)))
    if largest > ROW_BYTES:
        raise _too_large("row", f"{path}")
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))


def _dictionary_bytes(header: bytes) -> int:
    # Its fields are the page's type, 2 for a dictionary, and its unpacked size: a byte 0x15, and
    # twice the number in seven bits a byte (Thrift). 0: the page is not a dictionary.
    if header[:2] != b"\x15\x04" or header[2:3] != b"\x15":
        return 0
    number = 0
    for shift, byte in enumerate(header[3:8]):
        number |= (byte & 127) << 7 * shift
        if byte < 128:
            break
    return number >> 1


def _not_parquet(path: Path, error: Exception, row: int) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable(path, error)
    return damaged(error, str(path), f"the Parquet file is damaged (near row {row})")
