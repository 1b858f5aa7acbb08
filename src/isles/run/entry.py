"""Entries of a folder that other users may write to, such as `output_dir`.

Another user may have put a link, a folder or a file where isles is about to write. So isles makes
an entry of such a folder, or takes an entry whose owner is this user or root. It takes a link only
in place of a folder, and only if this user or root has made the link: people move a run to another
disk, and leave a link. In a folder without the sticky bit other users can replace an entry later.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO

from isles.errors import PreflightError
from isles.run.owner import user_name

_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_own_folder(path: Path, mode: int = 0o777) -> bool:
    """Make a folder, or use the present folder of this user. Returns whether it is new.

    The folder above must exist. `mode` is for a new folder, less the umask.

    Raises:
        UserError: the entry, or the link in its place, belongs to another user.
        OSError: isles cannot create it, or it is not a folder.
    """
    try:
        path.mkdir(mode)
    except OSError:
        require_own(path)
        if not path.is_dir():
            raise
        return False
    return True


def require_own(path: Path) -> None:
    """Raise a UserError if the entry exists and belongs to another user.

    OSError: the entry is not accessible.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    is_link = stat.S_ISLNK(found.st_mode)
    owners = [found.st_uid]
    if is_link:
        with suppress(FileNotFoundError):
            owners.append(path.stat().st_uid)
    for uid in owners:
        if not _is_own(uid, path.parent):
            raise _foreign(path, "link" if is_link else "folder", uid)


def is_own(path: Path) -> bool:
    """True if an entry is missing or belongs to this user. See `require_own`."""
    try:
        require_own(path)
    except (OSError, PreflightError):
        return False
    return True


def open_own_file(path: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> BinaryIO:
    """Open a file of this user, or make it with O_CREAT; unbuffered, for reading, writing or both.

    It truncates nothing. Another user may have put a link in its place, or a hard link to a file of
    this user.

    Raises:
        UserError: a link, or a file of another user, is in its place.
        OSError: isles cannot open it.
    """
    try:
        handle = os.open(path, flags | _OPEN, mode)
    except OSError:
        with suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode) or not _is_own(found.st_uid, path.parent):
                raise _foreign(path, _kind(found), found.st_uid) from None
        raise
    found = os.fstat(handle)
    is_sound = stat.S_ISREG(found.st_mode) and found.st_nlink <= 1
    if not is_sound or not _is_own(found.st_uid, path.parent):
        os.close(handle)
        raise _foreign(path, _kind(found), found.st_uid)
    is_read, is_written = flags & os.O_ACCMODE == os.O_RDONLY, flags & os.O_ACCMODE == os.O_WRONLY
    return os.fdopen(handle, "rb" if is_read else "wb" if is_written else "r+b", buffering=0)


def shows_owner(folder: Path, owner: str) -> bool:
    """True if a new file in this folder shows the same owner.

    Some network disks show one owner for every file.
    """
    with suppress(OSError), NamedTemporaryFile(dir=folder) as probe:
        return user_name(os.fstat(probe.fileno()).st_uid) == owner
    return False


def _is_own(uid: int, folder: Path) -> bool:
    return uid in (0, os.geteuid()) or shows_owner(folder, user_name(uid))


def _kind(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "link"
    return "file with several names" if found.st_nlink > 1 else "file"


def _foreign(path: Path, kind: str, uid: int) -> PreflightError:
    return PreflightError(
        f"isles does not write into {path.name}, a {kind} of {user_name(uid)}",
        where=str(path),
        fix="give the run another name, or set another output_dir. To resume a run that you "
        "trust, copy it with `cp -r`",
        id="run.foreign",
    )
