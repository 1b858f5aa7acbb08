"""Temporary files. If the disk is full, the error shows their folder."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "Disk quota exceeded")
"""Texts for a full disk in errors of libraries that are not written in Python."""


class ScratchError(UserError):
    """The disk has no space for temporary files."""

    id = "files.output"


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, deleted at the end.

    Raises:
        ScratchError: isles cannot create it, or its disk is full.
    """
    with naming_scratch(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


@contextmanager
def naming_scratch() -> Iterator[None]:
    """Raise a ScratchError that names the folder for temporary files if its disk is full.

    Use it around code that writes to no other disk.
    """
    try:
        yield
    except Exception as error:
        folder, named = _folder(), getattr(error, "filename", None)
        if not folder:
            raise _refused(f"cannot write to any folder for temporary files: {error}") from error
        is_full = getattr(error, "errno", None) in _FULL or any(w in str(error) for w in _WORDS)
        if not is_full or (named and not Path(str(named)).is_relative_to(folder)):
            raise
        raise _refused(f"no space left for temporary files in {folder}") from error


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # neither TMPDIR nor /tmp is writable
        return ""


def _refused(what: str) -> ScratchError:
    fix = "free some space in it, or set TMPDIR to a folder on a larger disk"
    return ScratchError(what, where="TMPDIR", fix=fix)
