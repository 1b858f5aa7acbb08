"""Data files that a run file names, opened: each must be a regular file, and hold no secret."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from isles.config.foreign import open_foreign
from isles.config.links import LinkRefused
from isles.errors import DataError

_OWN_SECRETS = ("join", "token", "key.pem", "certificate.pem", "settings.json", "port")
"""Files that isles writes with mode 0600."""
_SECRET = re.compile(rb"\s*(?:isles://[^\s#]{1,300}#|-----BEGIN [A-Z ]*PRIVATE KEY)")


@contextmanager
def opened(path: Path, *, is_packed: bool | None = None) -> Iterator[IO[bytes]]:
    """A file to read, unpacked if its name ends with .gz; DataError where it cannot be."""
    try:
        with open_foreign(path)[0] as raw:
            _check_is_no_secret(path, raw)
            if (path.suffix == ".gz") if is_packed is None else is_packed:
                with gzip.open(raw) as stream:
                    yield cast("IO[bytes]", stream)
            else:
                yield raw
    except io.UnsupportedOperation as error:
        raise DataError(
            str(error),
            where=str(path),
            fix="name a file: isles does not read a pipe, a socket or a device",
            id="files.data",
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"the gzip file is damaged: {error}",
            where=str(path),
            fix=f"fetch it again; gzip -t {path} tests it",
            id="data.damaged",
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


def _check_is_no_secret(path: Path, raw: io.BufferedReader) -> None:
    # The run file of a stranger may name any file here, such as the join line of another run.
    own = path.name in _OWN_SECRETS and not os.fstat(raw.fileno()).st_mode & 0o077
    if own or _SECRET.match(raw.peek(512)[:512]):
        raise DataError(
            "it holds a key, a token or a join line, which is not data",
            where=str(path),
            fix="name only files of data: data.sources.N.path",
            id="files.data",
        )


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
    fix = "check the disk or the network of this file"
    if isinstance(error, LinkRefused):
        fix = "name the file itself in the run file, if it is yours to use"
        return DataError(str(error), where=str(path), fix=fix, id="files.data")
    if isinstance(error, PermissionError):
        what = f"no read permission (this process runs as uid {os.geteuid()})"
        fix = f"chmod a+r {path}, or its folders, or run as its owner"
    return DataError(what, where=str(path), fix=fix, id="data.damaged")
