"""Rows of Parquet and Arrow files, from any row on, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from isles.data.sources.arrow import (
    arrow_batches,
    check_plain,
    damaged,
    one_of_each,
    small_parts,
    table_rows,
)
from isles.data.sources.files import ROW_BYTES, opened_whole, too_large, unreadable
from isles.data.sources.rows import Parser, Row, Rows
from isles.errors import DataError

_BATCH_ROWS, _BATCH_BYTES = 64, 64 * 2**20


def parquet_rows(path: Path, parser: Parser, first: int) -> Rows:
    """The rows of a Parquet file from this number on. DataError: as `file_chunks`."""
    import pyarrow.parquet as pq

    row = first
    with opened_whole(path) as stream:
        try:
            file = pq.ParquetFile(stream)
            names = file.schema_arrow.names
        # Its classes let whatever a damaged file provokes pass through.
        except Exception as error:
            raise _damaged("the Parquet file is damaged", path, error, row) from error
        with file:
            wanted = _wanted_columns(path, parser, names)
            others = [field for field in file.schema_arrow if field.name not in wanted]
            skipped_names = [f.name for f in others if not _is_null(file.metadata, f)]
            # The row groups before the first row are not read.
            sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
            skipped = group = 0
            while group < len(sizes) and skipped + sizes[group] <= first:
                skipped, group = skipped + sizes[group], group + 1
            groups = list(range(group, len(sizes)))
            size = _batch_rows(path, stream, file.metadata, groups, wanted)
            batches = file.iter_batches(batch_size=size, row_groups=groups, columns=wanted)
            while True:
                try:
                    batch = next(batches, None)
                except Exception as error:
                    raise _damaged("the Parquet file is damaged", path, error, row) from error
                if batch is None:
                    return
                kept = batch.slice(min(first - skipped, batch.num_rows))
                skipped += batch.num_rows - kept.num_rows
                yield from _rows_of(path, kept, row, skipped_names)
                row += kept.num_rows


def arrow_rows(path: Path, parser: Parser, first: int) -> Rows:
    """The rows of an Arrow file or stream from this number on. DataError: as `file_chunks`."""
    row = 0
    with opened_whole(path) as stream:
        batches = arrow_batches(stream, str(path))
        while True:
            try:
                batch = next(batches, None)
            except DataError:
                raise
            except Exception as error:  # of pyarrow or struct
                raise _damaged("the Arrow file is damaged", path, error, row) from error
            if batch is None:
                return
            wanted = _wanted_columns(path, parser, batch.schema.names)
            kept = batch.select(wanted).slice(min(max(first - row, 0), batch.num_rows))
            check_plain(kept, str(path))
            others = [name for name in batch.schema.names if name not in wanted]
            # Two columns may have one name, if nothing reads them.
            places = (batch.schema.names.index(name) for name in others)
            nulls = [batch.column(place).null_count == batch.num_rows for place in places]
            skipped = [name for name, is_null in zip(others, nulls, strict=True) if not is_null]
            yield from _rows_of(path, kept, row + batch.num_rows - kept.num_rows, skipped)
            row += batch.num_rows


def _wanted_columns(path: Path, parser: Parser, names: Sequence[str]) -> list[str]:
    parser.check(names, str(path))
    one_of_each(names, parser.wanted, str(path))
    return [name for name in names if name in parser.wanted]


def _is_null(metadata: Any, field: Any) -> bool:
    # Whether a column has only nulls, by the file's metadata.
    if str(field.type) == "null":
        return True
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = map(group.column, range(group.num_columns))
        found = [column.statistics for column in columns if column.path_in_schema == field.name]
        if not found or found[0] is None or found[0].null_count != group.num_rows:
            return False
    return True


def _rows_of(path: Path, batch: Any, first: int, skipped: Sequence[str]) -> Iterator[Row]:
    for begin, part in small_parts(batch, str(path), first):
        for number, values in enumerate(table_rows(part, f"{path} row {begin}"), start=begin):
            yield Row(f"{path} row {number}", values, skipped)


def _batch_rows(
    path: Path, stream: IO[bytes], metadata: Any, groups: list[int], wanted: list[str]
) -> int:
    # How many rows to unpack at once: by the mean size of a row, as the file says it. Each of them
    # may be a value of the dictionary, which the file holds once: its size is in the header of the
    # first page, and all else may be false.
    largest = 1
    for group in groups:
        columns = metadata.row_group(group)
        largest = max(largest, columns.total_byte_size // max(columns.num_rows, 1))
        for number in range(columns.num_columns):
            column = columns.column(number)
            if not f"{column.path_in_schema}.".startswith(tuple(f"{name}." for name in wanted)):
                continue
            begins = (column.dictionary_page_offset, column.data_page_offset)
            stream.seek(min(place for place in begins if place is not None and place >= 0))
            largest = max(largest, _dictionary_bytes(stream.read(24)))
    if largest > ROW_BYTES:
        raise too_large("row", f"{path}")
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


def _damaged(what: str, path: Path, error: Exception, row: int) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return unreadable(path, error)
    return damaged(error, str(path), f"{what} (near row {row})")
