"""Rows of one file from any place on.

A place is the number of bytes before a row (unpacked, where the file is packed) and the number of
rows or lines before it. A file of lines is opened there, a packed one is unpacked up to there; of a
Parquet file the row groups before it are not read. CSV and JSON arrays are read from the beginning,
and the rows before it left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from isles.data.sources.opening import decode, opened
from isles.data.sources.readers import CSV, JSON_LINES, PARQUET, PIECE_BYTES, WHOLE_BYTES, border
from isles.data.sources.rows import PLAIN, Columns, Row, Rows
from isles.data.sources.tables import is_json_array, json_row, read_csv, read_json, read_parquet
from isles.errors import DataError

Place = tuple[int, int]
"""Bytes and rows (lines, where the file is text) before a row."""

CHUNK_ROWS = 256
CHUNK_BYTES = 2**20

FilePiece = tuple[Place, Place, list[Row | DataError]]
"""Where some rows begin, where the one after them does, and the rows."""


def file_pieces(path: Path, columns: Columns, place: Place = (0, 0)) -> Iterator[FilePiece]:
    """The rows of one file from this place on, some at a time.

    Args:
        path: what it holds is told by its ending, as everywhere.
        columns: which columns are read.
        place: one that this function gave; (0, 0): from the first row.

    Raises:
        DataError: it cannot be read. A row that is bad is among the rows, as its error.
    """
    ending = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if ending in PARQUET:
        return _counted_pieces(read_parquet(path, columns, first=place[1]), place[1])
    if ending in JSON_LINES or (ending == ".json" and not is_json_array(path)):
        return _line_pieces(path, place)
    if ending == ".json":
        return _counted_pieces(islice(read_json(path), place[1], None), place[1])
    if ending in CSV:
        rows = read_csv(path, columns, delimiter=CSV[ending])
        return _counted_pieces(islice(rows, place[1], None), place[1])
    columns.check((PLAIN,), str(path))
    return _text_pieces(path, place)


def _counted_pieces(rows: Rows, first: int) -> Iterator[FilePiece]:
    while piece := list(islice(rows, CHUNK_ROWS)):
        end = first + len(piece)
        yield (0, first), (0, end), piece
        first = end


def _line_pieces(path: Path, place: Place) -> Iterator[FilePiece]:
    offset, number = begin = place
    rows: list[Row | DataError] = []
    with opened(path) as stream:
        stream.seek(offset)
        for line in stream:
            number += 1
            row = json_row(line, path, offset, number)
            offset += len(line)
            if row is not None:
                rows.append(row)
            if len(rows) >= CHUNK_ROWS or offset - begin[0] >= CHUNK_BYTES:
                yield begin, (offset, number), rows
                begin, rows = (offset, number), []
    if rows:
        yield begin, (offset, number), rows


def _text_pieces(path: Path, place: Place) -> Iterator[FilePiece]:
    offset, line = place
    with opened(path) as stream:
        stream.seek(offset)
        block = stream.read(2 * PIECE_BYTES if offset else WHOLE_BYTES + 1)
        whole = not offset and len(block) <= WHOLE_BYTES
        while block:
            piece = block if whole else block[: border(block)]
            begin, where = (offset, line), str(path) if whole else f"{path}:{line + 1}"
            text = decode(piece, path, offset, line + 1)
            offset, line = offset + len(piece), line + piece.count(b"\n")
            yield begin, (offset, line), [Row(where, {PLAIN: text})]
            block = block[len(piece) :]
            if not whole and len(block) < 2 * PIECE_BYTES:
                block += stream.read(2 * PIECE_BYTES)
