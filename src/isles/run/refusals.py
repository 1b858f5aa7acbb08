"""What the operating system's refusals to write mean, and that a run directory is gone."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import TrainingError, UserError
from isles.run.paths import Attempt

NOT_A_FOLDER = "a file stands where a folder is needed"
NO_SPACE = "there is no space left"


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Say what the operating system's refusal to write under `path` means.

    Raises:
        UserError: in place of every OSError.
    """
    try:
        yield
    except OSError as error:
        where = str(error.filename or path)
        what = refusal(error)
        fix = f"{how_to_write(what, _existing(where))}set another output_dir"
        if what not in (NOT_A_FOLDER, NO_SPACE):
            what = f"cannot be written: {what}"
        raise UserError(what, where=where, fix=fix, id="files.output") from error


def deleted(attempt: Attempt) -> TrainingError | None:
    """The end of a start whose folder is not there any more; None while it is.

    Whoever leads ranks asks this at each look: what they go on to write would be a part of nothing.
    """
    try:
        attempt.path.stat()
    except (FileNotFoundError, NotADirectoryError):
        run = attempt.path.parent.parent
        return TrainingError(
            f"the run directory {run} is not there any more: it was deleted or moved away while "
            "the run was training",
            where=f"host {socket.gethostname()}",
            fix="`isles train` starts a new run; where it was moved, move it back first, to go on "
            "with what it has saved",
            id="run.gone",
        )
    except OSError:  # a disk that fails or is slow: it may come back
        return None
    return None


def refusal(error: OSError) -> str:
    """Why something could not be written, in few words."""
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return NO_SPACE
        case errno.ENOTDIR | errno.EEXIST:
            return NOT_A_FOLDER
        case _:
            return error.strerror or str(error)


def how_to_write(why: str, folder: str) -> str:
    """What could be done so that a folder can be written, up to the word before an alternative.

    Args:
        why: of `refusal`.
        folder: the folder, or the nearest above it that is there.
    """
    if why == NO_SPACE:
        return "free some, or "
    if why == NOT_A_FOLDER:
        return "move it away, or "
    if why == os.strerror(errno.EROFS):
        return f"have it mounted for writing (findmnt -T {folder} shows what is mounted), or "
    if why in (os.strerror(errno.EACCES), os.strerror(errno.EPERM)):
        return f"sudo chown $USER {folder}, or "
    return ""


def _existing(path: str) -> str:
    folder = Path(path).absolute()
    while folder != folder.parent and not os.path.lexists(folder):
        folder = folder.parent
    return str(folder)
