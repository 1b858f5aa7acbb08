"""Small JSON records, written so that a reader never sees half of one."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any

_TRIES = 3


def write_text_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a file with UTF-8 text. See `write_bytes_atomic`."""
    write_bytes_atomic(path, text.encode("utf-8"), durable=durable)


def write_bytes_atomic(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace a file with `data`: a reader sees the old one or the new one, never a part.

    Args:
        path: the file.
        data: its new content.
        durable: wait until it would survive a power cut.

    Raises:
        OSError: the folder is missing, read-only or full; the old file is as it was.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user may read, durably, whole or not at all."""
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as stream:
        stream.write(text if text.endswith("\n") or not text else f"{text}\n")
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def write_record(path: Path, record: dict[str, Any], *, durable: bool = True) -> None:
    """Write one JSON record, atomically. See `write_text_atomic`."""
    text = json.dumps(record, indent=1, allow_nan=False, default=str) + "\n"
    write_text_atomic(path, text, durable=durable)


def read_record(path: Path) -> dict[str, Any] | None:
    """A JSON record, or None where there is none (or it is not one)."""
    try:
        record = json.loads(_read_fresh(path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _read_fresh(path: Path) -> str:
    """NFS says ESTALE where another host has replaced a file that is being read."""
    for _ in range(_TRIES):
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    raise FileNotFoundError(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; a last line that is still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    rows = []
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # a line torn by a full disk or a kill
    return rows
