"""Endings of data files, in small or capital letters, and the format that each of them means."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal, NamedTuple

Format = Literal["lines", "json", "csv", "tsv", "parquet", "arrow", "text"]
"""`lines`: JSON lines. `json`: JSON lines, or one JSON array."""

PACKED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}

FORMATS: dict[str, Format] = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonlines", ".jl"), "lines"),
    ".json": "json",
    ".csv": "csv",
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".parquet", ".parq", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
}

_UNPACK = "unpack it and name the files in it, for example with a glob"
_REPACK = "unpack it, or pack it with gzip, bzip2, xz or zstd"
_AS_CSV = "save it as CSV"
_AS_ROWS = "write its rows as JSON lines or Parquet"

REFUSED = {
    **dict.fromkeys((".zip", ".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".7z", ".rar"), _UNPACK),
    **dict.fromkeys((".lz4", ".br", ".lzma", ".lzo", ".snappy", ".sz", ".z"), _REPACK),
    **dict.fromkeys((".xls", ".xlsx", ".ods", ".numbers"), _AS_CSV),
    **dict.fromkeys((".avro", ".orc", ".tfrecord", ".tfrecords", ".msgpack", ".mds"), _AS_ROWS),
    **dict.fromkeys((".h5", ".hdf5", ".npy", ".npz", ".pkl", ".pickle", ".pt", ".pth"), _AS_ROWS),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb", ".mdb", ".lmdb"), _AS_ROWS),
    **dict.fromkeys((".pdf", ".doc", ".docx", ".odt", ".epub", ".rtf"), "write its text as .txt"),
}
"""Endings of formats that isles does not read, each with the way to a format that it reads."""

_NUMBER = re.compile(r"([-_.]|[-_.]?part[-_.]?)\d+(-of-\d+)?$")
"""The number of a piece of a file. A digit of an ending, as in .json5 or .z80, is not one."""


class Ending(NamedTuple):
    """The format of a file by its name.

    Args:
        suffix: the ending that means a format, such as .jsonl; "" if the name has none.
        format: None if the name has no such ending, or if isles does not read the format.
        fix: how to get the rows into a format that isles reads; "" if it may read this one.
        packing: the ending of a packed file, such as .gz; "" if the name has none.
    """

    suffix: str
    format: Format | None
    fix: str
    packing: str


def ending_of(name: str) -> Ending:
    """The ending of a name. a.JSONL.gz, a.jsonl.1 and a.jsonl-00001-of-00007 are all .jsonl."""
    packing, rest = "", PurePath(name).name.lower()
    while True:
        stem, dot, last = rest.rpartition(".")
        suffix = dot + last if stem else ""
        if suffix in FORMATS:
            return Ending(suffix, FORMATS[suffix], "", packing)
        if suffix in REFUSED:
            return Ending(suffix, None, REFUSED[suffix], packing)
        if suffix in PACKED and not packing:
            packing, rest = suffix, stem
        elif (found := _NUMBER.search(rest)) and found.start() and suffix:
            rest = rest[: found.start()]  # a piece of what was split
        else:
            return Ending("", None, "", packing)


def unread_issue(name: str) -> tuple[str, str] | None:
    """Why isles does not read files with this ending, and a fix; None: it may read them."""
    ending = ending_of(name)
    return (f"isles does not read {ending.suffix} files", ending.fix) if ending.fix else None
