"""The claim on a name in an output folder, so that simultaneous starts begin one at a time.

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
from isles.run.records import explain_write_errors

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

    Without write permission for the folder, isles claims nothing: no run can be new in the folder,
    and `new_attempt` refuses all but one of the starts that resume a run.

    Raises:
        UserError: another process holds the claim for longer than a start should take, the folder
            is not writable, or an entry of another user has the name of the claim.
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
    with explain_write_errors(claim.parent):
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
            now = record.stat().st_mtime  # the clock of the file system, as for other claims
            _move(staged, claim, now, name)
        except BaseException as error:
            _remove(staged, token)
            if not isinstance(error, OSError):
                raise
            # The user knows both paths, and the staged folder is gone.
            where = claim if error.filename2 == str(claim) else claim.parent
            raise OSError(error.errno, error.strerror, str(where)) from error
        for left in claim.parent.glob(".*.claim-*"):  # from starts that were killed before the move
            with suppress(OSError):
                _clear(left, now)
    return True


def _move(staged: Path, claim: Path, now: float, name: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            staged.rename(claim)
        except OSError as error:
            require_own(claim)  # another user may use its name to block starts
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return
        holder, late_s = _clear(claim, now), time.monotonic() - deadline
        if (holder and late_s > 0) or late_s > _PATIENCE_S + 1:
            raise UserError(
                f"another process is starting {name} now{holder or ''}",
                where=str(claim),
                fix="run `isles status` to see the run. If that process has ended, delete this "
                "folder",
                id="run.running",
            )
        time.sleep(_LOOK_S if holder else 0.001)


def _clear(folder: Path, now: float) -> str | None:
    # Remove the claim of a dead process. Returns the holder as text, or None.
    # Every call is relative to the folder's descriptor and follows no link: otherwise another user
    # with write permission could lead a start to other folders of this user.
    try:
        with folder_below(folder.parent, [folder.name]) as handle:
            names = os.listdir(handle)  # noqa: PTH208  # of a descriptor
            is_old = abs(now - os.fstat(handle).st_mtime) > _STALE_S
            holders = [_holder(handle, name, now) for name in names]
        if not any(holders) and (names or is_old):
            folder.rmdir()
    except OSError as error:
        # Released in the meantime, or claimed by another start (ESTALE: on another host).
        gone = errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.ENOTEMPTY
        if error.errno not in gone:
            raise
        return None
    return next(filter(None, holders), None)


def _holder(folder: int, name: str, now: float) -> str:
    # The holder of a claim as text, or empty for a dead process, whose entry it removes. It removes
    # the entry by its own name: if two processes find it dead, neither can remove the claim of a
    # third process.
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
    return f" (by {printable(name)}, without a process)"


def _remove(folder: Path, token: str) -> None:
    with suppress(OSError):  # not writable, or never created
        (folder / token).unlink(missing_ok=True)
        folder.rmdir()
