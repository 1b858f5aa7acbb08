"""The owner of a record: isles shows the records of other users, but never acts on them.

Records name programs, shell lines, hosts, processes and secrets. A user who acts on the records of
another user runs that user's commands. So `read_record` (records.py) returns an `OwnRecord` only
for a file of this user. Code that runs a program, connects, sends a signal or writes into a run
takes an `OwnRecord`, or checks `owner` of the `Attempt`, the `RunDir` or the object of the record.
"""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path
from typing import Any, BinaryIO

from isles.config.foreign import open_foreign
from isles.errors import PreflightError

_LONGEST_BYTES = 64 << 20
_LONGEST_OF_OTHERS_BYTES = 16 << 20

_FOLDERS = (
    "attempts",
    "base",
    "checkpoints",
    "logs",
    "model",
    "outer",
    "telemetry",
    "tokenizer",
    "track",
)
"""The folders of a run directory. The owner of the run may replace each folder with a link to a
private folder of the viewer. So isles checks the maker of each link below the run directory. It
does not check links above: administrators make them, and users type them."""


class Record(dict[str, Any]):
    """A record. `owner` is the name of the user who wrote it, or empty for this user."""

    owner = ""


class OwnRecord(Record):
    """A record that this user has written. Only `read_record` makes one."""


def record_of(found: dict[str, Any], owner: str) -> Record:
    """The record in a file of this owner (see `read_text`)."""
    if not owner:
        return OwnRecord(found)
    record = Record(found)
    record.owner = owner
    return record


def read_text(path: Path, most_bytes: int = _LONGEST_BYTES) -> tuple[str, str]:
    """Read a file. Returns its text, and the name of its owner if that is another user.

    The owner is read from the open file, so no other user can replace the path during the read. A
    link counts as another user's file, because that user may have created the link.

    Raises:
        OSError: it is not readable. See `open_shown`.
        ValueError: it is not text, not a regular file, or longer than `most_bytes` or, if it is
            another user's, than 16 MiB.
    """
    stream, is_link = _open(path)
    with stream:
        facts = os.fstat(stream.fileno())
        is_own = facts.st_uid == os.geteuid() and not is_link
        most_bytes = most_bytes if is_own else min(most_bytes, _LONGEST_OF_OTHERS_BYTES)
        if facts.st_size > most_bytes:
            raise ValueError("it is longer than any record")
        text = stream.read(most_bytes).decode("utf-8")
    return text, "" if is_own else user_name(facts.st_uid)


def open_shown(path: Path) -> BinaryIO:
    """Open a file of a run that isles only shows, such as a log or metrics.

    OSError: isles cannot open it, it is not a regular file, or another user's link leads to a file
    that is not theirs. The link may be the file, or any folder below the run directory.
    """
    return _open(path)[0]


def _open(path: Path) -> tuple[BinaryIO, bool]:
    # The file, and whether its path ends in a link.
    depth = next((n for n, up in enumerate(path.parents[:3]) if up.name in _FOLDERS), -1) + 1
    return open_foreign(path, path.parents[depth])


def owner_of(path: Path) -> str:
    """The owner of a file or folder if that is another user, else an empty text.

    For paths to write to. For a record, use the owner from `read_text`.
    """
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
    """The remark that isles prints about another user's run."""
    return (
        f"it belongs to {owner}, so isles read only its files, and did not query its queue, hub "
        "or other machines"
    )


def not_own(what: str, owner: str, path: Path | str) -> PreflightError:
    """The error of a command that would act on another user's record.

    Args:
        what: the act, as a verb after "isles does not".
    """
    return PreflightError(
        f"isles does not {what}: the record belongs to {owner}",
        where=str(path),
        fix=f"ask {owner} to do it, or copy the run with `cp -r` if you trust all of its records",
        id="run.foreign",
    )
