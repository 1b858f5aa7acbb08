"""Whose a record is: what another user has written is shown, and never acted on.

Records name programs, shell lines, hosts, processes and secrets. Whoever looks at the run of
another user, and acts on them, lends that user the own account. So `read_record` (records.py)
gives an `OwnRecord` only for a file of this user, and whatever runs, dials, signals or writes takes
one of these, or asks `Attempt.owner`, `RunDir.owner`, or the `owner` of what a record was read to.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from pathlib import Path
from typing import Any

from isles.errors import PreflightError


class Record(dict[str, Any]):
    """A record as it was read; `owner`: another user who has written it, empty: this user."""

    owner = ""


class OwnRecord(Record):
    """A record that this user has written. Only `read_record` makes one."""


def record_of(found: dict[str, Any], owner: str) -> Record:
    """What was read from a file of this owner, as of `read_text`."""
    if not owner:
        return OwnRecord(found)
    record = Record(found)
    record.owner = owner
    return record


def read_text(path: Path) -> tuple[str, str]:
    """The text of a file, and the other user to whom it belongs; empty: it is this user's.

    The owner is that of the file that was read, whatever stands at the path by now. A link counts
    as another's: it may have been put there.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read as text.
    """
    flags, is_link = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, False
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        is_link, handle = True, os.open(path, flags)
    with os.fdopen(handle, encoding="utf-8") as stream:
        uid = os.fstat(handle).st_uid
        text = stream.read()
    return text, user_name(uid) if is_link or uid != os.geteuid() else ""


def owner_of(path: Path) -> str:
    """Another user to whom a file or folder belongs, as of `read_text`; empty also where there is
    nothing. For what is written there: what is read says by itself whose it is."""
    try:
        found = path.lstat()
    except OSError:
        return ""
    is_own = found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode)
    return "" if is_own else user_name(found.st_uid)


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def shown_only(owner: str) -> str:
    """The remark beside what is shown of another user's run."""
    return (
        f"it belongs to {owner}: shown from its files alone, as they are; its queue, its hub and "
        "its other machines were not asked"
    )


def not_own(what: str, owner: str, path: Path | str) -> PreflightError:
    """What to raise where something of another user would have to be acted on.

    Args:
        what: what would be done, after "cannot".
    """
    return PreflightError(
        f"isles does not {what}: the record belongs to {owner}",
        where=str(path),
        fix=f"ask {owner} to do it; or make a copy of your own, if you trust what it names: cp -r",
        id="run.foreign",
    )
