"""Opening files of data, and saying what is wrong with those that cannot be read."""

from __future__ import annotations

import gzip
import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import IO, cast

from isles.errors import DataError


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read, unpacked if its name ends with .gz.

    Raises:
        DataError: it cannot be read, or the gzip file is damaged.
    """
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
    """UTF-8 to text.

    Args:
        block: bytes of the file.
        path: the file.
        offset: where the block begins in the file, bytes.
        line: number of its first line, from 1.

    Raises:
        DataError: it is not UTF-8.
    """
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


def near_names(path: Path) -> list[str]:
    """Names beside this path that look like its own."""
    try:
        return get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=3)
    except OSError:
        return []


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the system does not let us read."""
    if not isinstance(error, PermissionError):
        fix = "look at the disk or the network that it lies on"
        return DataError(
            f"cannot be read: {error.strerror or error}",
            where=str(path),
            fix=fix,
            id="data.damaged",
        )
    try:
        status = path.stat()
        rights = f"{stat.filemode(status.st_mode)}, owner uid {status.st_uid}"
    except OSError:
        rights = "its folder is closed to us"
    return DataError(
        f"no read permission ({rights}; this process runs as uid {os.geteuid()})",
        where=str(path),
        fix=f"chmod a+r {path}, or run as its owner",
        id="data.damaged",
    )
