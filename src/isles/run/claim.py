"""The claim on a name in an output folder: of several starts at one instant, one begins at a time.

The claim is the folder `.NAME.UID.claim`. Users do not share a claim, since no user begins a run in
the directory of another. The claim holds one record, which names the process of a start. A start
writes this record into a new folder, and then renames the folder to the claim. Every file system,
NFS included, refuses to rename a folder over a folder that holds a file, so one start succeeds.
File locks are not used: many Lustre file systems are mounted without them.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isles.config.foreign import folder_below, open_regular
from isles.errors import UserError
from isles.facts.units import printable
from isles.run.entry import require_own
from isles.run.process import ProcessId
from isles.run.records import clear_errors

_PATIENCE_S, _LOOK_S = 10.0, 0.05
"""Longest wait for the claim of another start, and the pause between two looks at it."""

_STALE_S = 120.0
"""Age of a stale claim of another host, whose processes this host cannot see."""

_LONGEST_RECORD_BYTES = 4096
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOKEN = re.compile(r"[0-9a-f]{32}")


@contextmanager
def claimed(output_dir: Path, name: str) -> Iterator[None]:
    """Hold the claim on a name while a block begins a run of this name.

    Where this user may write nothing into the folder, nothing is claimed: no run can be new there,
    and `new_attempt` refuses all but one of the starts that resume a run.

    Raises:
        UserError: another process holds the claim, and for longer than a start should take; or the
            folder cannot be written, or an entry of another user has the name of the claim.
    """
    claim, token = output_dir / f".{name}.{os.geteuid()}.claim", secrets.token_hex(16)
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
        except OSError as error:
            if error.errno in _READ_ONLY:
                return False
            raise OSError(error.errno, error.strerror, str(claim.parent)) from error
        try:
            record = staged / token
            record.write_text(json.dumps(ProcessId.of(os.getpid()).record()), encoding="utf-8")
            now = record.stat().st_mtime  # by the clock of the file system, as of other claims
            _move(staged, claim, now, name)
        except BaseException as error:
            _remove(staged, token)
            if not isinstance(error, OSError):
                raise
            # Both are paths that the user knows; the staged folder is gone.
            where = claim if error.filename2 == str(claim) else claim.parent
            raise OSError(error.errno, error.strerror, str(where)) from error
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
            require_own(claim)  # another user may have taken its name, to hold up starts
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return
        holder, late_s = _clear(claim, now), time.monotonic() - deadline
        if (holder and late_s > 0) or late_s > _PATIENCE_S + 1:
            raise UserError(
                f"another start of {name} is at work just now{holder or ''}",
                where=str(claim),
                fix="run `isles status` to see the run. If that process has ended, delete this "
                "folder",
                id="run.running",
            )
        time.sleep(_LOOK_S if holder else 0.001)


def _clear(folder: Path, now: float) -> str | None:
    # Remove what a dead process has left of a claim. Returns who holds it, in words; None: nobody.
    # All is done relative to the folder's descriptor, and no link is followed: whoever may write
    # here could else lead a start to other folders of this user.
    try:
        with folder_below(folder.parent, [folder.name]) as handle:
            names = os.listdir(handle)  # noqa: PTH208  # of a descriptor
            is_old = abs(now - os.fstat(handle).st_mtime) > _STALE_S
            holders = [_holder(handle, name, now) for name in names]
        if not any(holders) and (names or is_old):
            folder.rmdir()
    except OSError as error:
        # Given back meanwhile, or taken by another start; ESTALE: that one is on another host.
        gone = errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.ENOTEMPTY
        if error.errno not in gone:
            raise
        return None
    return next(filter(None, holders), None)


def _holder(folder: int, name: str, now: float) -> str:
    # Who holds a claim by this entry, in words; empty: a dead process, and the entry is removed. It
    # is removed by its own name, so that of two that find it dead none removes that of a third,
    # which has the claim by then.
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    text = b"-"
    if stat.S_ISREG(found.st_mode) and _TOKEN.fullmatch(name):
        with open_regular(name, os.O_NOFOLLOW, folder) as stream:
            text = stream.read(_LONGEST_RECORD_BYTES)
    process = None
    with suppress(ValueError, RecursionError):
        record = json.loads(text)
        process = ProcessId.from_record(record if isinstance(record, dict) else {})
    is_old = abs(now - found.st_mtime) > _STALE_S
    is_dead = not process.is_alive() if process is not None and process.is_here() else is_old
    # A start that was killed, or a power failure, may leave an empty record.
    if is_dead and (process is not None or text in (b"", b"{}")):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        return ""
    if process is not None:
        return f" on {process.host} (pid {process.pid})"
    return f" (by {printable(name)}, which names no process)"


def _remove(folder: Path, token: str) -> None:
    with suppress(OSError):  # nobody may write there, or it was never made
        (folder / token).unlink(missing_ok=True)
        folder.rmdir()
