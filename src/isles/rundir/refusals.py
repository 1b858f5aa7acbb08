"""What the operating system's refusals to write mean."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isles.errors import UserError


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
