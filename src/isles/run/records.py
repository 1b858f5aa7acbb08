"""Small JSON records with atomic writes, and errors of writing."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from isles.config.foreign import check_values
from isles.errors import TrainingError, UserError
from isles.facts.units import format_bytes
from isles.run.owner import OwnRecord, Record, open_shown, read_text, record_of
from isles.run.paths import Attempt, RunDir

log = logging.getLogger(__name__)

T = TypeVar("T")

NOT_A_FOLDER = "a file is in the place of a folder"
NO_SPACE = "no space left on the disk"

MAX_LINE_BYTES = 1 << 20
"""Limit of a row in a JSON-lines file. Anything longer is not a row."""

MAX_ROWS_BYTES = 1 << 30
"""The most that isles reads from a JSON-lines file. A row of metrics.jsonl has 400 bytes, so the
limit is enough for two million rows."""

MAX_RECORD_BYTES = 1 << 20
"""Limit of a JSON record. The parsed values may take thirty times as much memory."""

MAX_LIST_BYTES = 64 << 20
"""Limit of a record that has an entry for each rank, host or file, such as a manifest. isles treats
a longer record as absent, so the limit is far above the needs of any run. `read_text` has a lower
limit for another user's file."""

MAX_SHOWN_BYTES = 16 << 20
"""Limit of such a record if isles only shows it, such as live.json. Enough for 8,000 ranks."""

_VALUES, _VALUE_BYTES = 1 << 17, 32
"""A record has at most `_VALUES` values, or one value for each 32 bytes of its limit if that number
is larger."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TRIES = 3
_UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENXIO, errno.ELOOP, errno.EISDIR, errno.ENODEV)
"""Errors of a path without permission, or of a socket, a device or a circle of links. Such a record
must not hide all other runs of a folder."""

_LIMITS: dict[object, tuple[str, str]] = {
    errno.ENOSPC: (NO_SPACE, "free some space on it"),
    errno.EDQUOT: ("the quota of this user is used up", "delete files, or get a larger quota"),
    errno.EFBIG: ("the file is larger than allowed", "raise the limit (ulimit -f unlimited)"),
    errno.EMFILE: ("this process has too many open files", "raise the limit (ulimit -n 4096)"),
    errno.ENFILE: ("this machine has too many open files", "end programs, or raise fs.file-max"),
}
"""The exceeded limit and its fix, by the error of a write."""


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file with UTF-8 text. See `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"), durable=durable)


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file with `data`: a reader sees the old or the new file, never a part.

    Args:
        durable: wait until the file survives a power cut.

    Raises:
        OSError: the folder is missing, read-only or full. The old file is unchanged.
    """
    write_lines_atomic(path, (data,), durable=durable)


def write_lines_atomic(path: Path, lines: Iterable[bytes], *, durable: bool = True) -> None:
    """Replace a file with these bytes, one after the other. See `write_bytes_atomic`."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.writelines(lines)
            stream.flush()
            # Through the open file, because the folder's owner could replace the path with a link.
            os.fchmod(handle, 0o644)
            if durable:
                os.fsync(stream.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_new(path: Path, text: str, *, force: bool) -> None:
    """Write the file of `--output`.

    Raises:
        UserError: it exists and must not be replaced, or it is not writable.
    """
    if path.exists() and not force:
        raise UserError(
            "the file already exists",
            where=str(path),
            fix="add --force, or give another --output",
            id="file.exists",
        )
    with explain_write_errors(path, "give another --output"):
        write_text_atomic(path, text)


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user may read, durably and atomically."""
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as stream:
        stream.write(text if text.endswith("\n") or not text else f"{text}\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def write_record(path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
    """Write one JSON record, atomically. See `write_bytes_atomic`."""
    text = json.dumps(record, indent=1, allow_nan=False, default=str) + "\n"
    write_text_atomic(path, text, durable=durable)


def read_record(path: Path, most_bytes: int = MAX_RECORD_BYTES) -> dict[str, Any] | None:
    """Read a JSON record, or None if the file is missing, is not a record, or is too long.

    The record is an `OwnRecord` if this user has written it. isles only shows any other record, and
    does not act on it.
    """
    return read_any(path, most_bytes)


def read_any(path: Path, most_bytes: int = MAX_RECORD_BYTES) -> Record | None:
    """Like `read_record`, with the name of the other user who may have written it."""
    for _ in range(_TRIES):
        try:
            text, owner = read_text(path, most_bytes)
            record = parse_record(text, most_bytes)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError):  # not a record of isles
            return None
        except OSError as error:
            if error.errno in _UNREADABLE:
                return None
            if error.errno != errno.ESTALE:
                raise
            # NFS: another host has replaced the file during the read.
        else:
            if not isinstance(record, dict):
                return None
            return record_of(record, owner)
    return None


def refuse_long(run_dir: RunDir, attempt: Attempt | None) -> None:
    """Raise a UserError if a record is too long to read, as isles would treat it as absent.

    For a command that shows or restarts a run: these records have the run's state and outcome.
    Their length does not depend on the size of the run.
    """
    paths = [run_dir.status, run_dir.node_of]
    if attempt is not None:
        paths += [attempt.launch, attempt.outcome, attempt.job]
    for path in paths:
        with suppress(OSError):
            if (size_bytes := path.stat().st_size) > MAX_RECORD_BYTES:
                raise UserError(
                    f"the record has {format_bytes(size_bytes)}, and isles reads at most "
                    f"{format_bytes(MAX_RECORD_BYTES)}",
                    where=str(path),
                    fix="if the run is yours, delete this file, which isles did not write",
                )


def parse_record(text: str | bytes, most_bytes: int = MAX_RECORD_BYTES) -> Any:
    """Parse JSON that another user or another machine may have written.

    Each lone surrogate in it becomes a question mark, because no stream can encode it.

    Args:
        most_bytes: limit for the length of the text, which also limits the number of values.

    Raises:
        ValueError: it is not JSON, or has too many values.
        RecursionError: it is nested too deeply.
    """
    text = text if isinstance(text, str) else text.decode("utf-8")
    check_values(text, max(_VALUES, most_bytes // _VALUE_BYTES))
    found = json.loads(text)
    has_surrogates = "\\u" in text and _ESCAPED_SURROGATE.search(text)  # the search alone is slow
    return _encodable(found) if has_surrogates else found


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(part) for key, part in value.items()}
    return [_encodable(part) for part in value] if isinstance(value, list) else value


# Making an adapter takes 4 ms, and isles top reads records every two seconds.
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def as_kind(kind: type[T], record: object) -> T:
    """A record as the dataclass `kind`. ValidationError: the record is not valid."""
    found: T = _adapter(kind).validate_python(record)
    return found


def read_own(path: Path, most_bytes: int = MAX_RECORD_BYTES) -> OwnRecord | None:
    """A JSON record of this user, or None if it is missing or another user's."""
    record = read_any(path, most_bytes)
    return record if isinstance(record, OwnRecord) else None


def read_rows(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file, one at a time, since all of them may not fit into memory.

    It skips an incomplete last line, and rows that arrive during the read.

    Args:
        last_bytes: number of bytes to read at its end. Default: all of the file, or the last
            `MAX_ROWS_BYTES` with a warning.
    """
    try:
        stream = open_shown(path)
    except (FileNotFoundError, UnsupportedOperation):
        return
    with stream:
        most_bytes = MAX_ROWS_BYTES if last_bytes is None else last_bytes
        left = os.fstat(stream.fileno()).st_size
        if left > most_bytes:
            if last_bytes is None:
                shown = format_bytes(most_bytes)
                log.warning("%s is too long, so isles reads only its last %s", path, shown)
            stream.seek(left - most_bytes)
            left = most_bytes - len(stream.readline(MAX_LINE_BYTES))
        while left > 0 and (line := stream.readline(min(left, MAX_LINE_BYTES))):
            left -= len(line)
            try:
                row = parse_record(line) if line.endswith(b"\n") else None
            except (ValueError, RecursionError):
                continue  # a line torn by a full disk or a kill
            if isinstance(row, dict):
                yield row


def read_metrics(path: Path, last_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of metrics.jsonl, each with a kind and a step. See `read_rows`.

    It skips other rows, as the file may come from a bucket.
    """
    for row in read_rows(path, last_bytes):
        if isinstance(row.get("kind"), str) and type(row.get("step")) is int:
            yield row


@contextmanager
def explain_write_errors(path: Path, instead: str = "set another output_dir") -> Iterator[None]:
    """Raise a UserError with a fix in place of an OSError of a write below `path`."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or path)
        if Path(where).name.startswith(f".{path.name}."):
            where = str(path)  # first written next to it
        what = refusal(error, path)
        folder = Path(where).absolute()
        while folder != folder.parent and not os.path.lexists(folder):
            folder = folder.parent
        fix = f"{how_to_write(what, str(folder))}{instead}"
        if what not in (NOT_A_FOLDER, NO_SPACE):
            what = f"cannot write: {what}"
        raise UserError(what, where=where, fix=fix, id="files.output") from error


def used_up(error: object, path: Path) -> tuple[str, str] | None:
    """The limit of a disk, a user or the system that a write has exceeded, and its fix.

    Args:
        path: the written file or folder.

    Returns:
        None if the error is of another kind.
    """
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC and _lacks_inodes(path):
        return "no inodes left on the disk", "delete small files on it (see df -i)"
    return _LIMITS.get(number)


def _lacks_inodes(path: Path) -> bool:
    for folder in (path, *path.parents):
        try:
            disk = os.statvfs(folder)
        except OSError:
            continue
        return disk.f_files > 0 and disk.f_favail == 0  # some disks do not count them
    return False


def refusal(error: OSError, path: Path | None = None) -> str:
    """The reason for a failed write, as a short text.

    Args:
        path: the file, if the error does not name it.
    """
    if limit := used_up(error, Path(error.filename or path or ".")):
        return limit[0]
    match error.errno:
        case errno.ENOTDIR | errno.EEXIST:
            return NOT_A_FOLDER
        case _:
            return error.strerror or str(error)


def how_to_write(why: str, folder: str) -> str:
    """The fix for a folder that is not writable, up to the word before an alternative.

    Args:
        folder: the folder, or the nearest existing folder above it.
    """
    if why == NO_SPACE:
        return "free some, or "
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE):
        limit = used_up(OSError(number, ""), Path(folder))
        if limit and why == limit[0]:
            return f"{limit[1]}, or "
    if why == NOT_A_FOLDER:
        return "move it away, or "
    if why == os.strerror(errno.EROFS):
        look = f"see findmnt -T {shlex.quote(folder)}"
        return f"mount it with write permission ({look}), or "
    if why in (os.strerror(errno.EACCES), os.strerror(errno.EPERM)):
        return f"sudo chown {os.geteuid()} {shlex.quote(folder)}, or "
    return ""


def error_if_deleted(attempt: Attempt) -> TrainingError | None:
    """The error of an attempt whose folder was deleted or moved, or None while it exists."""
    try:
        attempt.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        run = attempt.path.parent.parent
        return TrainingError(
            f"the run directory {run} was deleted or moved during training",
            where=f"host {socket.gethostname()}",
            fix="start a new run with `isles train`. If you moved the directory, move it back "
            "first to resume the run",
            id="run.gone",
        )
    except OSError:  # a failing or slow disk may recover
        return None
    return None
