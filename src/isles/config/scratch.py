"""Temporary files. If there is no room for them, the error names their folder."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import UserError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "Disk quota exceeded")
"""How libraries that are not written in Python say so, in the text of errors of their own."""


class ScratchError(UserError):
    """There is no room for temporary files."""

    id = "files.output"


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """A new folder for temporary files, which is deleted at the end.

    Raises:
        ScratchError: it cannot be made, or its disk is full.
    """
    with naming_scratch(), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


@contextmanager
def naming_scratch() -> Iterator[None]:
    """Raise a ScratchError that names the folder for temporary files if its disk is full.

    To be put around code that writes to no other disk.
    """
    try:
        yield
    except Exception as error:
        folder, named = _folder(), getattr(error, "filename", None)
        if not folder:
            raise _refused(f"no folder for temporary files can be written to: {error}") from error
        is_full = getattr(error, "errno", None) in _FULL or any(w in str(error) for w in _WORDS)
        if not is_full or (named and not Path(str(named)).is_relative_to(folder)):
            raise
        raise _refused(f"no space is left for temporary files in {folder}") from error


def _folder() -> str:
    try:
        return tempfile.gettempdir()
    except OSError:  # neither TMPDIR nor /tmp can be written to
        return ""


def _refused(what: str) -> ScratchError:
    fix = "free some space there, or set TMPDIR to a folder on a larger disk"
    return ScratchError(what, where="TMPDIR", fix=fix)
