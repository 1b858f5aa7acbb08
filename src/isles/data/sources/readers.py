"""Rows out of one file; its ending tells what it holds."""

from __future__ import annotations

from pathlib import Path

from isles.data.sources.opening import decode, opened
from isles.data.sources.rows import PLAIN, Columns, Row, Rows
from isles.data.sources.tables import read_csv, read_json, read_json_lines, read_parquet

WHOLE_BYTES = 64 * 2**20
"""A text file up to this size is one document."""

PIECE_BYTES = 16 * 2**20
"""A larger one is cut into documents of about this size, at a blank line where there is one."""

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = (".parquet", ".pq")
CSV = {".csv": ",", ".tsv": "\t"}


def read_rows(path: Path, columns: Columns) -> Rows:
    """The rows of one file, in its order.

    .jsonl and .ndjson: one JSON object a line. .json: the same, or one JSON array of objects.
    .csv and .tsv: the first line names the columns. .parquet: a row each. Anything else: UTF-8
    text, one row with the column PLAIN; above WHOLE_BYTES cut into several. A further .gz is
    unpacked.

    Args:
        path: the file.
        columns: of whoever reads the rows.

    Raises:
        DataError: it cannot be read, is damaged or not UTF-8, or lacks a column. A row that is bad
            by itself is handed on as an error instead.
    """
    ending = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if ending in PARQUET:
        return read_parquet(path, columns)
    if ending in JSON_LINES:
        return read_json_lines(path)
    if ending == ".json":
        return read_json(path)
    if ending in CSV:
        return read_csv(path, columns, delimiter=CSV[ending])
    columns.check((PLAIN,), str(path))
    return _read_text(path)


def _read_text(path: Path) -> Rows:
    where = str(path)
    with opened(path) as stream:
        block = stream.read(WHOLE_BYTES + 1)
        if len(block) <= WHOLE_BYTES:
            yield Row(where, {PLAIN: decode(block, path, 0, 1)})
            return
        offset, line = 0, 1
        while block:
            piece = block[: border(block)]
            yield Row(f"{where}:{line}", {PLAIN: decode(piece, path, offset, line)})
            offset += len(piece)
            line += piece.count(b"\n")
            block = block[len(piece) :]
            if len(block) < 2 * PIECE_BYTES:
                block += stream.read(2 * PIECE_BYTES)


def border(block: bytes) -> int:
    """Where to cut a long text, up to PIECE_BYTES: after a blank line, a line or a character."""
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
