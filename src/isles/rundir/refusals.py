"""What the operating system's refusals to write mean, and that a run directory is gone."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import TrainingError, UserError
from isles.rundir.paths import Attempt


@contextmanager
def clear_errors(path: Path) -> Iterator[None]:
    """Say what the operating system's refusal to write under `path` means."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or path)
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                what, fix = "there is no space left", "free some, or set another output_dir"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                what, fix = "this folder cannot be written", "set output_dir to one that can"
            case errno.ENOTDIR | errno.EEXIST:
                what = "a file stands where a folder is needed"
                fix = "move it away, or set another output_dir"
            case _:
                what = f"the run directory cannot be written: {error.strerror or error}"
                fix = "set another output_dir"
        raise UserError(what, where=where, fix=fix) from error


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
