"""Arrow data that somebody else has written: whole before its first value is read, and data only.

The datasets library opens files and addresses that rows name, if the features of a dataset say
that the rows are images or sound. `undecoded` are features that open nothing.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isles.config.foreign import MAX_CONFIG_BYTES, folder_below, is_plain, open_regular, read_json
from isles.errors import DataError

_SAVE_AGAIN = "save it again with save_to_disk of the datasets library"


def table_rows(table: Any, where: str) -> list[dict[str, Any]]:
    """The rows of a table or record batch of pyarrow, as Python's values.

    DataError: the table is damaged, or holds a value that Python has no type for.
    """
    try:
        # Offsets and lengths come from the file. Those that are wrong end the process, or read
        # its memory.
        table.validate(full=True)
    # pyarrow has no class for all that a damaged buffer provokes.
    except Exception as error:
        raise damaged(error, where) from error
    try:
        rows: list[dict[str, Any]] = table.to_pylist()
    # Such as a date behind the year 9999, or two fields of one name in a struct.
    except Exception as error:
        types = ", ".join(f"{field.name}: {str(field.type)[:100]}" for field in table.schema)
        raise DataError(
            f"a value has no counterpart in Python ({types[:300]}): {_first_line(error)}",
            where=where,
            fix="write the column as text, or as numbers",
            id="data.damaged",
        ) from error
    return rows


def damaged(error: BaseException, where: str, what: str = "the data is damaged") -> DataError:
    """Make the error for data that the library could not read."""
    return DataError(
        f"{what}: {_first_line(error)}",
        where=where,
        fix="fetch it again or save it again",
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
            f"the column {name!r} is of the type {type(feature).__name__}, which cannot be read "
            "without opening files that it names",
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
            open_regular(folder / name, os.O_NOFOLLOW).close()
        for key in ("_fingerprint", "_split"):
            value = state.get(key)
            if not isinstance(value, str) and (key == "_fingerprint" or value is not None):
                raise ValueError(f"{key} is {value!r:.100}, not text")
        where = folder / "dataset_info.json"
        _object(where)
    except (OSError, ValueError) as error:
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
