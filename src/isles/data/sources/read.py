"""Rows of one file, from any place on; the file's ending sets its format.

A place is the number of rows or lines before a row. For a file of lines or text it also has the
(unpacked) bytes before the row. A file of lines is opened there, and a packed file is unpacked up
to there. For a Parquet file, earlier row groups are not read. CSV and JSON arrays are read from the
beginning, and earlier rows are skipped. No row is larger than ROW_BYTES, so memory is limited
whatever size a file unpacks to.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

from isles.config.endings import Format, ending_of, unread_issue
from isles.data.sources.arrow import ARROW_MAGIC, one_of_each
from isles.data.sources.files import ROW_BYTES, ROW_LINES, decode, opened, skip, too_large
from isles.data.sources.names import JSON, RepeatedKey
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
from isles.data.sources.tables import arrow_rows, parquet_rows
from isles.errors import DataError

WHOLE_BYTES = 64 * 2**20
"""A text file up to this size is one document."""

PIECE_BYTES = 16 * 2**20
"""A larger file is cut into documents of about this size, at a blank line if possible."""

_HEAD_BYTES = 2**16
_ARRAY = re.compile(rb'\[\s*\{\s*"')
_OBJECT = re.compile(rb'\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
_CHUNK_BYTES = 2**20
_LINES_BYTES = 2**18
_SPACE = re.compile(r"[ \t\n\r]*")

_CR_ALONE = "its lines end with CR alone, not with LF or CR LF"
_OBJECTS = "repair or remove that line: isles expects one JSON object per line"
_FROM_ARRAY = "; for a JSON array: jq -c '.[]' FILE > NEW.jsonl"
_FROM_CHATS = "; for lists of messages: jq -c '{messages: .}' FILE > NEW.jsonl"
_FROM_TEXTS = "; for lines of text: jq -c '{text: .}' FILE > NEW.jsonl"


def file_chunks(path: Path, parser: Parser, begin: ChunkStart) -> Iterator[Chunk]:
    """The rows of one file from this place on, some at a time; {}: from the first.

    JSON lines: one JSON object a line. JSON: the same, or one JSON array of objects. CSV and TSV:
    the first line names the columns. Parquet and Arrow: a row each. Text: UTF-8, one row with the
    column PLAIN; above WHOLE_BYTES cut into several. Packed files are unpacked. DataError: it
    cannot be read, is damaged or not UTF-8, lacks a column, or is text that holds rows. A row that
    is bad by itself is among the rows, as its error.
    """
    first = begin.get("row", 0)
    match format_of(path):
        case "parquet":
            return counted_chunks(parquet_rows(path, parser, first), first)
        case "arrow":
            return counted_chunks(arrow_rows(path, parser, first), first)
        case "csv":
            rows = _read_csv(path, parser, ",")
        case "tsv":
            rows = _read_csv(path, parser, "\t")
        case "json" if _is_json_array(path):
            rows = _read_json_array(path)
        case "json" | "lines":
            return _line_chunks(path, begin)
        case "text":
            return _text_chunks(path, parser, begin)
    return counted_chunks(islice(rows, first, None), first)


def check_endings(files: Sequence[Path]) -> None:
    """Refuse files whose names say that isles does not read them. DataError, before any is read."""
    for path in files:
        if found := unread_issue(path.name):
            raise DataError(found[0], where=str(path), fix=found[1], id="files.data")


def format_of(path: Path) -> Format:
    """The format of a file, by its ending, or by its content without a known ending."""
    if (format := ending_of(path.name).format) is not None:
        return format
    with opened(path) as stream:
        head = stream.read(_HEAD_BYTES)
    if head.startswith(b"PAR1") and b"\0" in head:
        return "parquet"
    return "arrow" if head.startswith(ARROW_MAGIC) else _rows_in(head) or "text"


def _rows_in(head: bytes) -> Literal["json", "lines"] | None:
    # How a file that begins so holds rows, if it does: two thirds of its first lines are JSON
    # objects, or it is an array of objects. A damaged line is then a bad row. A log, in which each
    # second line is an object, is text.
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if _ARRAY.match(text):
        return "json"
    lines = [line.lstrip() for line in text.splitlines() if line.strip()]
    are_rows = [_is_object(line) for line in lines]
    if lines and len(head) == _HEAD_BYTES:  # the last line goes on behind it
        # Only a few bytes of it may be here.
        is_row = lines[-1].startswith(b"{") if len(lines) > 1 else _OBJECT.match(lines[-1])
        are_rows[-1] = bool(is_row)
    return "lines" if lines and 3 * sum(are_rows) >= 2 * len(lines) else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _line_chunks(path: Path, begin: ChunkStart) -> Iterator[Chunk]:
    offset, number = begin.get("bytes", 0), begin.get("row", 0)
    begin, rows = {"bytes": offset, "row": number}, list[Row | DataError]()
    with opened(path) as stream:
        skip(stream, offset)
        for line in _raw_lines(stream):
            number += 1
            if len(line) > ROW_BYTES:
                raise too_large("line", f"{path}:{number}")
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


def _text_chunks(path: Path, parser: Parser, begin: ChunkStart) -> Iterator[Chunk]:
    offset, line = begin.get("bytes", 0), begin.get("row", 0)
    with opened(path) as stream:
        skip(stream, offset)
        block = stream.read(2 * PIECE_BYTES if offset else WHOLE_BYTES + 1)
        head = block[:_HEAD_BYTES]
        rows = None if offset else _rows_in(head)
        # A short text, such as an example of a program, may be one JSON object.
        is_one_line = len(head) < _HEAD_BYTES and b"\n" not in head.strip()
        if rows == "json" or (rows == "lines" and not is_one_line):
            lines = "most lines are JSON objects" if rows == "lines" else "it is a JSON array"
            raise DataError(
                f"{lines}, but its name is that of a text file",
                where=str(path),
                fix=f"rename it to {path.name}.{'jsonl' if rows == 'lines' else 'json'} so that "
                "isles reads the rows, or remove it from data.sources",
            )
        if block:
            parser.check((PLAIN,), str(path))
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
    # The row that one line of JSON lines holds, or its error; None if it is blank.
    where = f"{path}:{number}"
    is_cut = not line.endswith(b"\n")
    try:
        text = decode(line, path, offset, number)
        if text.isspace():
            return None
        row = JSON.decode(text)
    except RepeatedKey as error:
        return error.of_row(where)
    except (ValueError, RecursionError) as error:
        if number == 1 and is_cut and "\r" in text.strip():  # the whole file is one line
            raise DataError(_CR_ALONE, where=where, fix=_with_lf(path)) from error
        fix = _OBJECTS
        if number == 1 and line.lstrip().startswith(b"["):
            fix += "; name a file that is one JSON array NAME.json"
        if number == 1 and line.strip() == b"{":
            fix += "; `jq -c . FILE > NEW.jsonl` writes each object on a line, `jq -c '.KEY[]'` "
            fix += "each object of its list KEY"
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            if text[error.pos :].strip() == ",":
                fix += "; `sed 's/,[[:space:]]*$//' FILE > NEW.jsonl` removes the comma"
            else:
                fix += "; `jq -c . FILE > NEW.jsonl` writes each object on a line"
        elif is_cut:
            fix += "; the file ends here. If it is incomplete, download or write it again"
        return DataError(f"not JSON: {error}", where=where, fix=fix)
    if not isinstance(row, dict):
        what = f"not a JSON object but {type(row).__name__}"
        is_chat = isinstance(row, list) and any(
            isinstance(m, dict) and {"content", "value"} & {*m} for m in row[:1]
        )
        how = _FROM_CHATS if is_chat else _FROM_TEXTS if isinstance(row, str) else _FROM_ARRAY
        return DataError(what, where=where, fix=_OBJECTS + how)
    return Row(where, row)


def _is_json_array(path: Path) -> bool:
    with opened(path) as stream:
        return stream.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _raw_lines(stream: IO[bytes]) -> Iterator[bytes]:
    # Lines; one that is too large is cut behind ROW_BYTES, by which the caller sees that it is.
    return chain.from_iterable(map(io.BytesIO, _line_blocks(stream)))


def _line_blocks(stream: IO[bytes]) -> Iterator[bytes]:
    # Many lines at a time: a call for each line would make the reading a sixth slower.
    rest, size = list[bytes](), 0  # joined once: adding to a long line would copy it each time
    while size <= ROW_BYTES and (block := stream.read(_LINES_BYTES)):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, block[:end]])
            rest, size = [block[end:]], len(block) - end
        else:
            rest, size = [*rest, block], size + len(block)
    if size:
        yield b"".join(rest)


def _read_json_array(path: Path) -> Rows:
    # One value after another: a small packed file may unpack to more than the memory holds.
    for number, value in enumerate(_array_values(path), start=1):
        where = f"{path} row {number}"
        if isinstance(value, dict):
            yield Row(where, value)
        elif isinstance(value, RepeatedKey):
            yield value.of_row(where)
        else:
            what = f"not a JSON object but {type(value).__name__}"
            yield DataError(what, where=where, fix="isles expects an array of JSON objects")


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
                try:
                    value, end = JSON.raw_decode(self._text, self.place)
                except RepeatedKey as error:
                    value, end = error, json.JSONDecoder().raw_decode(self._text, self.place)[1]
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
            fix=f"repair it at that place; python -m json.tool {shlex.quote(str(self._path))} "
            f"tests it",
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
        return too_large("row", f"{self._path}:{self._line_of(self.place)}")


def _read_csv(path: Path, parser: Parser, delimiter: str) -> Rows:
    # Rows below a line with the columns' names, as RFC 4180 has them.
    csv.field_size_limit(max(ROW_BYTES, csv.field_size_limit()))  # 128 KiB by itself
    with opened(path) as stream:
        lines = _Lines(path, stream)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            names = next(reader, None)
            if names is None:
                return  # as some programs write a part without rows
            _check_delimiter(names, delimiter, parser, f"{path}:1")
            try:
                parser.check(names, f"{path}:1")
            except DataError as error:
                error.fix += (
                    "; if the first line is a row, add a line with the column names above it"
                )
                raise
            one_of_each(names, parser.wanted, f"{path}:1")
            line = reader.line_num + 1
            for cells in reader:
                lines.row_bytes = lines.row_lines = 0
                if len(cells) == len(names):
                    yield Row(f"{path}:{line}", dict(zip(names, cells, strict=True)))
                elif cells:
                    yield DataError(
                        f"{len(cells)} cells, but the first line has {len(names)} columns",
                        where=f"{path}:{line}",
                        fix='put cells with commas or line breaks in "quotes"',
                    )
                line = reader.line_num + 1
        except csv.Error as error:
            where, what = f"{path}:{reader.line_num}", f"not CSV: {error}"
            fix = 'put cells with quotes, commas or line breaks in "quotes", and double the quotes '
            fix += "inside"
            if str(error).startswith("new-line character") and reader.line_num == 1:
                what, fix = _CR_ALONE, _with_lf(path)
            raise DataError(what, where=where, fix=fix) from error


def _with_lf(path: Path) -> str:
    unpack = "unpack it, then " if ending_of(path.name).packing else ""
    path = path.with_suffix("") if unpack else path
    file = shlex.quote(str(path))
    return f"{unpack}tr '\\r' '\\n' < {file} > NEW{path.suffix} writes its lines with LF"


def _check_delimiter(names: Sequence[str], delimiter: str, parser: Parser, where: str) -> None:
    # Else the error would say that this one column is not the one that is wanted.
    for other, name in ((";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "commas")):
        cells = names[0].split(other) if len(names) == 1 and other != delimiter else []
        if len(cells) > 1 and parser.wanted & {cell.strip().strip('"') for cell in cells}:
            raise DataError(
                f"its columns are separated by {name}, not by "
                f"{'tabs, as in .tsv files' if delimiter != ',' else 'commas'}",
                where=where,
                fix="write it with commas, or with tabs as a .tsv file",
            )


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
        if self.row_bytes > ROW_BYTES or self.row_lines > ROW_LINES:
            raise too_large("row", f"{self._path}:{number}")
        text = decode(line, self._path, self._offset, number)
        self._offset += len(line)
        return text
