"""Arrow data from third parties: validated before its first value is read, and data only.

The datasets library opens files and addresses that rows name, if the features of a dataset say
that the rows are images or sound. `undecoded` are features that open nothing.
"""

from __future__ import annotations

import copy
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from isles.config.foreign import MAX_CONFIG_BYTES, folder_below, is_plain, open_regular, read_json
from isles.data.sources.files import ROW_BYTES, too_large
from isles.errors import DataError

ARROW_MAGIC = b"ARROW1\0\0"
"""First bytes of an Arrow file, but not of an Arrow stream."""

MOST_BATCH_BYTES = 2**30
"""Largest unpacked size in bytes of a packed batch, which is unpacked as a whole."""

_SAVE_AGAIN = "save it again with save_to_disk of the datasets library"


def table_rows(table: Any, where: str, *, keeps_nulls: bool = False) -> list[dict[str, Any]]:
    """The rows of a table or record batch of pyarrow, as JSON lines would have them.

    A struct has all fields that any row has, and null in place of a missing field. So nulls in
    structs are removed. With `keeps_nulls` the values stay as they are, for `without_nulls`.

    DataError: the table is damaged, or holds a value that Python has no type for.
    """
    try:
        # Offsets and lengths come from the file. Those that are wrong end the process, or read
        # its memory.
        table.validate(full=True)
    # pyarrow has no class for all that a damaged buffer provokes.
    except Exception as error:
        raise damaged(error, where) from error
    # pyarrow takes eight times as long with this option, also for types without maps.
    has_maps = any("map<" in str(kind) for kind in table.schema.types)
    try:
        rows: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict" if has_maps else None)
    # Such as a date behind the year 9999, or two fields of one name in a struct.
    except Exception as error:
        types = ", ".join(f"{field.name}: {str(field.type)[:100]}" for field in table.schema)
        raise DataError(
            f"a value has no equivalent in Python ({types[:300]}): {_first_line(error)}",
            where=where,
            fix="write the column as text, or as numbers",
            id="data.damaged",
        ) from error
    for field, column in zip(table.schema, table.columns, strict=True):
        # Most files have no nulls. To look for them in columns is ten times faster than in rows.
        if keeps_nulls or _is_plain(column) or (strip := _stripper(field.type)) is None:
            continue
        for row in rows:
            row[field.name] = strip(row[field.name])
    return rows


def small_parts(batch: Any, name: str, first: int) -> Iterator[tuple[int, Any]]:
    """Slices of a batch that are small enough to become Python's values, with their first rows.

    In a slice each row has its own values: a value of a dictionary is repeated.

    Args:
        name: the file or dataset, for messages.
        first: the number of the first row of the batch.

    Raises:
        DataError: the batch is damaged, or a row is too large.
    """
    dense = _dense(batch.schema)
    try:
        # Indices into a dictionary must be right before it is known how large the rows are.
        batch.validate(full=dense != batch.schema)
    except Exception as error:  # whatever damaged buffers provoke
        raise damaged(error, f"{name} row {first}") from error
    parts = [(0, batch.num_rows)]
    while parts:
        begin, count = parts.pop()
        part = batch.slice(begin, count)
        size = sum(map(_size_of, part.columns))
        if count > 1 and size >= ROW_BYTES // 4:
            parts += [(begin + count // 2, count - count // 2), (begin, count // 2)]
            continue
        if size > ROW_BYTES:
            raise too_large("row", f"{name} row {first + begin}")
        if dense != batch.schema:
            columns = zip(part.columns, dense.types, strict=True)
            cast = [column.cast(kind) for column, kind in columns]
            part = type(part).from_arrays(cast, schema=dense)
        yield first + begin, part


def _size_of(array: Any) -> int:
    # Bytes of the values of an array, and of all arrays in it, with at least four for each value:
    # Arrow needs no memory for a null and one bit for a boolean. Python needs eight bytes or more.
    # By offsets only: others may still be wrong.
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, inner = array.type, []
    if isinstance(array, pa.ChunkedArray):
        return sum(map(_size_of, array.chunks))
    if isinstance(array, pa.ExtensionArray):
        return _size_of(array.storage)
    if pa.types.is_dictionary(kind):
        if _has_lengths(kind.value_type):
            lengths = pc.binary_length(array.dictionary).take(array.indices)
            return 4 * len(array) + int(pc.sum(lengths).as_py() or 0)
        if _is_flat(kind.value_type):
            return len(array) * max(4, int(kind.value_type.bit_width) // 8)
        inner = [array.dictionary]
    elif pa.types.is_struct(kind):
        inner = [array.field(number) for number in range(kind.num_fields)]
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = [array.values.slice(array.offset * size, len(array) * size)]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        begin, end = (array.offsets[place].as_py() for place in (0, len(array)))
        inner = [array.values.slice(begin, end - begin)]
    else:
        return max(int(array.nbytes), 4 * len(array))
    return 4 * len(array) + sum(map(_size_of, inner))


def _dense(schema: Any) -> Any:
    # The schema of the same values without dictionaries, where isles can tell how large they are.
    import pyarrow as pa

    def dense(field: Any) -> Any:
        kind = field.type
        if pa.types.is_dictionary(kind) and _is_flat(kind.value_type):
            return field.with_type(kind.value_type)
        if pa.types.is_struct(kind):
            return field.with_type(
                pa.struct([dense(kind.field(n)) for n in range(kind.num_fields)])
            )
        if pa.types.is_list(kind):
            return field.with_type(pa.list_(dense(kind.value_field)))
        if pa.types.is_large_list(kind):
            return field.with_type(pa.large_list(dense(kind.value_field)))
        if pa.types.is_fixed_size_list(kind):
            return field.with_type(pa.list_(dense(kind.value_field), kind.list_size))
        return field

    return pa.schema([dense(field) for field in schema], metadata=schema.metadata)


def _has_lengths(kind: Any) -> bool:
    import pyarrow as pa

    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(is_text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_flat(kind: Any) -> bool:
    import pyarrow as pa

    return _has_lengths(kind) or bool(pa.types.is_primitive(kind))


def _is_plain(array: Any) -> bool:
    # Whether no struct within has a null, and no value is a date or a decimal: Python's values are
    # those of JSON then. False also for types that are not looked into.
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        return all(map(_is_plain, array.chunks))
    kind = array.type
    if pa.types.is_struct(kind):
        fields = array.flatten()  # without the values below nulls
        return all(field.null_count == 0 and _is_plain(field) for field in fields)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(array.flatten())
    return _has_lengths(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _stripper(type: Any) -> Callable[[Any], Any] | None:
    # What takes the nulls out of the structs of a value, and makes JSON of dates and decimals.
    # None: the value has none of them.
    import pyarrow as pa

    if pa.types.is_temporal(type) or pa.types.is_decimal(type):
        return _plain_value
    if pa.types.is_struct(type):
        fields = [type.field(number) for number in range(type.num_fields)]
        inner = {field.name: _stripper(field.type) for field in fields}

        def strip(value: Any) -> Any:
            return value and {
                name: strip_one(each) if (strip_one := inner[name]) else each
                for name, each in value.items()
                if each is not None
            }

        return strip
    if pa.types.is_map(type):
        name_of, item_of = (_stripper(one) or _same for one in (type.key_type, type.item_type))
        return lambda value: value and {name_of(k): item_of(item) for k, item in value.items()}
    each = _stripper(type.value_type) if hasattr(type, "value_type") else None
    if each is None or pa.types.is_dictionary(type) or pa.types.is_run_end_encoded(type):
        return each
    return lambda value: value and [each(item) for item in value]


def _same(value: Any) -> Any:
    return value


def _plain_value(value: Any) -> Any:
    # A date or time as text, a decimal as a number. A decimal with more digits than a float stays.
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        number = float(value) if int(value.as_tuple().exponent) < 0 else int(value)
        return number if Decimal(repr(number)) == value else value
    return value


def without_nulls(value: Any, feature: Any) -> Any:
    """A value of the datasets library as JSON lines would have it, so without nulls in its structs.

    Nulls in JSON stay.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        features = feature if isinstance(feature, dict) else {}
        found = {name: without_nulls(item, features.get(name)) for name, item in value.items()}
        return {name: item for name, item in found.items() if item is not None}
    if isinstance(value, list):
        inner = feature[0] if isinstance(feature, list) and feature else feature
        return [without_nulls(item, getattr(inner, "feature", inner)) for item in value]
    return _plain_value(value)


def arrow_batches(stream: IO[bytes], where: str) -> Iterator[Any]:
    """The record batches of an Arrow file, or of a stream of Arrow, which is such a file's inside.

    Nothing of them is in memory unless they are packed. DataError: a packed one is too large, or
    the file is cut off. Errors of pyarrow pass through.
    """
    import pyarrow as pa

    inside = _inside(stream, where)
    # One that looks ahead, and one that unpacks.
    batches = pa.ipc.open_stream(pa.BufferReader(inside))
    for is_batch, size in _unpacked_sizes(inside):
        if size > MOST_BATCH_BYTES:
            raise DataError(
                f"a batch of rows unpacks to more than {MOST_BATCH_BYTES >> 20} MiB",
                where=where,
                fix="write the file again with fewer rows per batch, or as Parquet",
                id="data.rows",
            )
        if is_batch:
            yield batches.read_next_batch()


def _inside(stream: IO[bytes], where: str) -> Any:
    # The stream of Arrow in a file, as a buffer.
    import pyarrow as pa

    try:
        data = pa.py_buffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    except ValueError as error:  # it is empty
        raise damaged(error, where) from error
    is_file = bytes(data[: len(ARROW_MAGIC)]) == ARROW_MAGIC
    if is_file and bytes(data[-6:]) != ARROW_MAGIC[:6]:
        raise damaged(EOFError("it ends before its end was marked"), where)
    return data.slice(len(ARROW_MAGIC) if is_file else 0)


def _unpacked_sizes(inside: Any) -> Iterator[tuple[bool, int]]:
    # Of each batch of rows, and of each dictionary: whether it is rows, and the bytes to which it
    # unpacks; 0: it is not packed.
    import pyarrow as pa

    messages = pa.ipc.MessageReader.open_stream(pa.BufferReader(inside))
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        is_batch = message.type == "record batch"
        if is_batch or message.type == "dictionary":
            yield is_batch, _unpacked_size(message, is_batch=is_batch)


def _unpacked_size(message: Any, *, is_batch: bool) -> int:
    # Each packed buffer begins with its unpacked size; where the buffers are is said in a
    # flatbuffer (Arrow's format/Message.fbs).
    head, body = bytes(message.metadata), message.body
    table = _field(head, struct.unpack_from("<I", head)[0], 2)  # the header, by its offset
    if not is_batch:
        table = _field(head, table, 1)  # DictionaryBatch.data
    buffers = _field(head, table, 2)
    if not _field(head, table, 3) or not buffers:
        return 0  # not packed
    size, (count,) = 0, struct.unpack_from("<I", head, buffers)
    for number in range(count):
        offset, length = struct.unpack_from("<qq", head, buffers + 4 + 16 * number)
        size += max(*struct.unpack_from("<q", body, offset), 0) if length >= 8 else 0
    return size


def _field(data: bytes, table: int, number: int) -> int:
    # The place that an offset in a table of a flatbuffer leads to; 0: the table has no such field.
    start = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, start)
    if 4 + 2 * number >= size or not (
        entry := struct.unpack_from("<H", data, start + 4 + 2 * number)[0]
    ):
        return 0
    return int(table + entry + struct.unpack_from("<I", data, table + entry)[0])


def check_plain(batch: Any, where: str) -> None:
    """Refuse columns whose rows share their values: a few bytes could be a thousand large rows."""
    import pyarrow as pa

    def shares(type: Any) -> bool:
        if pa.types.is_dictionary(type) and _is_flat(type.value_type):
            return False
        is_view = str(type) in ("string_view", "binary_view") or pa.types.is_list_view(type)
        is_view = is_view or pa.types.is_large_list_view(type)
        is_shared = is_view or pa.types.is_dictionary(type) or pa.types.is_run_end_encoded(type)
        return is_shared or any(shares(type.field(n).type) for n in range(type.num_fields))

    for field in batch.schema:
        if shares(field.type):
            raise DataError(
                f"the column {field.name!r} has the type {str(field.type)[:100]}, which isles does "
                f"not "
                "read from Arrow files",
                where=where,
                fix="write the file as Parquet",
                id="data.column",
            )


def damaged(error: BaseException, where: str, what: str = "the data is damaged") -> DataError:
    """Make the error for data that the library could not read."""
    return DataError(
        f"{what}: {_first_line(error)}",
        where=where,
        fix="download it again or save it again",
        id="data.damaged",
    )


def one_of_each(names: Sequence[str], wanted: Sequence[str] | frozenset[str], where: str) -> None:
    """Refuse two columns of one name that is read. DataError, with the name."""
    for name in names:
        if name in wanted and list(names).count(name) > 1:
            raise DataError(
                f"there are several columns {name!r}",
                where=where,
                fix="delete or rename all but one of them",
                id="data.column",
            )


def undecoded(features: Any) -> Any:
    """Features of the datasets library, changed so that reading a row opens nothing.

    Images, sound and the like stay as the data has them: a path or bytes. JSON is still read.
    DataError: a feature cannot be read in that way.
    """
    import datasets

    return datasets.Features({name: _plain(feature, name) for name, feature in features.items()})


def _plain(feature: Any, name: str) -> Any:
    if isinstance(feature, dict):
        return {key: _plain(value, name) for key, value in feature.items()}
    if isinstance(feature, list | tuple):
        return [_plain(value, name) for value in feature]
    if hasattr(feature, "feature"):  # a list, of any kind
        changed = copy.copy(feature)
        changed.feature = _plain(feature.feature, name)
        return changed
    if not hasattr(feature, "decode_example") or type(feature).__name__ == "Json":
        return feature
    if not hasattr(feature, "decode"):
        raise DataError(
            f"the column {name!r} has the type {type(feature).__name__}, which cannot be read "
            "without opening the files that it names",
            where=f"column {name!r}",
            fix="save the dataset without this column",
            id="data.column",
        )
    changed = copy.copy(feature)
    changed.decode = False
    return changed


def check_saved(folder: Path) -> None:
    """Refuse a folder of `save_to_disk` if it names files outside of it, or has odd values.

    DataError: a JSON file in it is odd, or a file that it names is not a regular file below it.
    """
    where = folder / "state.json"
    try:
        if (folder / "dataset_dict.json").exists() and not where.exists():
            where = folder / "dataset_dict.json"
            splits = _object(where).get("splits")
            if not isinstance(splits, list) or not all(map(is_plain, splits)):
                raise ValueError(f"splits is {splits!r:.100}, not a list of plain names")
            for split in splits:
                with folder_below(folder, [split]):  # no link
                    check_saved(folder / split)
            return
        state = _object(where)
        files = state.get("_data_files")
        if not isinstance(files, list) or not files:
            raise ValueError(f"_data_files is {files!r:.100}, not a list of files")
        for entry in files:
            name = entry.get("filename") if isinstance(entry, dict) else None
            if not is_plain(name):
                raise ValueError(f"_data_files names {name!r:.200}, which is not a plain name")
            with open_regular(folder / name, os.O_NOFOLLOW) as stream:
                sizes = _unpacked_sizes(_inside(stream, str(folder / name)))
                # The library unpacks all of them as it opens the file. It never writes such files.
                if any(size for _, size in sizes):
                    raise ValueError(f"{name} holds packed rows")
        for key in ("_fingerprint", "_split"):
            value = state.get(key)
            if not isinstance(value, str) and (key == "_fingerprint" or value is not None):
                raise ValueError(f"{key} is {value!r:.100}, not text")
        where = folder / "dataset_info.json"
        _object(where)
    except (OSError, ValueError, struct.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        named = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
        raise DataError(
            f"the saved dataset cannot be used: {reason}{named}",
            where=str(where),
            fix=_SAVE_AGAIN,
            id="data.damaged",
        ) from error


def _object(path: Path) -> dict[str, Any]:
    found = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
