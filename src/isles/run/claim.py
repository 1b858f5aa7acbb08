"""The claim on a name in an output folder: of several starts at one instant, one begins at a time.

The claim is the folder `.NAME.claim`. It holds one record, which names the process of a start. A
start writes this record into a new folder, and then renames the folder to the claim. Every file
system, NFS included, refuses to rename a folder over a folder that holds a file, so one start
succeeds. File locks are not used: many Lustre file systems are mounted without them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isles.errors import UserError
from isles.run.process import ProcessId
from isles.run.records import clear_errors, read_record

_PATIENCE_S, _LOOK_S = 10.0, 0.05
"""Longest wait for the claim of another start, and the pause between two looks at it."""

_STALE_S = 120.0
"""Age of a stale claim of another host, whose processes this host cannot see."""

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOKEN = re.compile(r"[0-9a-f]{32}")


@contextmanager
def claimed(output_dir: Path, name: str) -> Iterator[None]:
    """Hold the claim on a name while a block begins a run of this name.

    Where this user may write nothing into the folder, nothing is claimed: no run can be new there,
    and `new_attempt` refuses all but one of the starts that resume a run.

    Raises:
        UserError: another process holds the claim, and for longer than a start should take; or the
            folder cannot be written.
    """
    claim, token = output_dir / f".{name}.claim", secrets.token_hex(16)
    is_ours = _take(claim, token, name)
    try:
        yield
    finally:
        if is_ours:
            _remove(claim, token)


def _take(claim: Path, token: str, name: str) -> bool:
    staged = claim.with_name(f"{claim.name}-{token}")
    with clear_errors(claim.parent):
        try:
            claim.parent.mkdir(parents=True, exist_ok=True)
            staged.mkdir()
            record = staged / token
            record.write_text(json.dumps(ProcessId.of(os.getpid()).record()), encoding="utf-8")
            now = record.stat().st_mtime  # by the clock of the file system, as of other claims
            _move(staged, claim, now, name)
        except BaseException as error:
            _remove(staged, token)
            if not isinstance(error, OSError):
                raise
            if error.errno in _READ_ONLY:
                return False
            raise OSError(error.errno, error.strerror, str(claim.parent)) from error
        for left in claim.parent.glob(".*.claim-*"):  # by starts that were killed before the move
            with suppress(OSError):
                _clear(left, now)
    return True


def _move(staged: Path, claim: Path, now: float, name: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            staged.rename(claim)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return
        if (holder := _clear(claim, now)) and time.monotonic() > deadline:
            raise UserError(
                f"another start of {name} is at work just now{holder}",
                where=str(claim),
                fix="run `isles status` to see the run. If that process has ended, delete this "
                "folder",
                id="run.running",
            )
        time.sleep(_LOOK_S if holder else 0.0)


def _clear(folder: Path, now: float) -> str:
    # Remove what a dead process has left of a claim. Returns who holds it, in words; empty: nobody.
    # A record is removed by its own name, so that of two that find it dead none removes that of a
    # third, which has the claim by then.
    holder = ""
    try:
        entries = list(folder.iterdir())
        if not entries and abs(now - folder.stat().st_mtime) > _STALE_S:
            folder.rmdir()
        for path in entries:
            process = ProcessId.from_record(read_record(path) or {})
            is_here = process is not None and process.is_here()
            is_old = abs(now - path.stat().st_mtime) > _STALE_S
            is_dead = not process.is_alive() if process is not None and is_here else is_old
            if is_dead and _TOKEN.fullmatch(path.name):
                path.unlink(missing_ok=True)
            elif process is not None:
                holder = f" on {process.host} (pid {process.pid})"
            else:
                holder = f" (by {path.name}, which names no process)"
        if entries and not holder:
            folder.rmdir()
    except OSError as error:
        # Given back meanwhile, or taken by another start; ESTALE: that one is on another host.
        gone = errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.ENOTEMPTY
        if error.errno not in gone:
            raise
    return holder


def _remove(folder: Path, token: str) -> None:
    with suppress(OSError):  # nobody may write there, or it was never made
        (folder / token).unlink(missing_ok=True)
        folder.rmdir()
