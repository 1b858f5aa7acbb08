"""One process of this machine after another, where two would spoil each other's work."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from isles.errors import UserError

_LONGEST_S = 20.0
_LOOK_S = 0.05


@contextmanager
def one_after_another(stream: IO[Any]) -> Iterator[None]:
    """Meanwhile no other process that asks so for this file goes on. It may be of any content.

    The lock is given back by word: a child that has inherited the file does not keep it.

    Raises:
        UserError: another process has it, and keeps it.
    """
    has_lock = _take(stream)
    try:
        yield
    finally:
        if has_lock:
            fcntl.flock(stream, fcntl.LOCK_UN)


def _take(stream: IO[Any]) -> bool:
    """False where the file system has no locks."""
    end = time.monotonic() + _LONGEST_S
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass  # somebody has it
        except OSError:
            return False
        if time.monotonic() > end:
            raise UserError(
                f"another process has been at the same for {_LONGEST_S:.0f} s",
                where=str(stream.name),
                fix=f"`fuser {stream.name}` says which; end it, or wait for it",
            )
        time.sleep(_LOOK_S)
