"""Prepared tokens in a cache folder: their names, their users, and the removal of old tokens.

Prepared tokens are in a folder `tokens-NEAR-CONTENT`. NEAR is a hash of the tokenizer settings and
of the kinds and sizes of the files, which are cheap to compute. CONTENT is a hash of all bytes of
the files. `.known-KEY.UID` stores the CONTENT of files that a user has prepared or compared before.
KEY is a hash of the paths, sizes and times of change, so isles does not read these files again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isles.config.foreign import open_regular
from isles.errors import PreflightError
from isles.run.entry import is_own, open_own_file
from isles.run.process import ProcessId
from isles.run.records import MAX_LIST_BYTES, read_record, write_text_atomic

log = logging.getLogger(__name__)

TOKENS, MANIFEST = "tokens.bin", "manifest.json"

_FOLDER = re.compile(r"tokens-[0-9a-f]{32}(-[0-9a-f]{32})?")
"""A folder of an earlier version has no CONTENT."""
_CONTENT = re.compile(r"[0-9a-f]{32}")

_LOCKED_S = 1.0
"""A listing or a removal locks the tokens of a folder for less time."""


def temporary_beside(folder: Path, kind: str = "new") -> Path:
    """A name next to a folder that has its owner's process in it, for `remove_stale`."""
    process = ProcessId.of(os.getpid())
    owner = f"{process.host}@{process.pid}@{process.started}"
    return folder.with_name(f".tmp-{kind}-{folder.name}@{owner}")


def remove_stale(folder: Path, *, locked: bool) -> None:
    """Remove the temporary folders that dead processes of this user left next to a folder.

    Args:
        locked: whether no other process of this user makes the folder now. If so, also remove
            temporary folders from other machines.
    """
    for entry in _stale(folder, locked=locked):
        log.info("removing leftovers=%s", entry)
        shutil.rmtree(entry, ignore_errors=True)


def _stale(folder: Path, *, locked: bool) -> Iterator[Path]:
    for entry in folder.parent.glob(".tmp-*"):
        parts = re.fullmatch(
            r"\.tmp-[a-z]+-(.+?)@(.+)@(\d{1,10})@(\d{1,20}(?:\.\d{1,20})?)", entry.name
        )
        if parts is None:
            continue
        owner = ProcessId(parts[2], int(parts[3]), float(parts[4]))
        stale = not owner.is_alive() if owner.is_here() else locked and parts[1] == folder.name
        if stale and is_own(entry):
            yield entry


def known_content(cache_dir: Path, key: str) -> str | None:
    """The CONTENT that this user has noted for a key, or None without a valid note."""
    return _noted(_known(cache_dir, key))


def _noted(known: Path) -> str | None:
    # Other users may have made the file, even as a pipe.
    try:
        with open_regular(known, os.O_NOFOLLOW) as stream:
            text = stream.read(64).decode("ascii", "replace")
    except (OSError, ValueError):
        return None
    return text if _CONTENT.fullmatch(text) else None


def note_use(folder: Path, key: str) -> None:
    """Note the use of a folder, for files with this key.

    If the cache is not writable, isles notes nothing.
    """
    content = folder.name.rpartition("-")[2]
    with suppress(OSError):
        if known_content(folder.parent, key) == content:
            os.utime(_known(folder.parent, key))
        else:
            write_text_atomic(_known(folder.parent, key), content, durable=False)
    with suppress(OSError):  # another user's
        os.utime(folder)


def _known(cache_dir: Path, key: str) -> Path:
    return cache_dir / f".known-{key}.{os.geteuid()}"


def hold(handle: int, path: Path) -> None:
    """Mark the file TOKENS as used while it is open or mapped.

    Args:
        handle: the open file.
        path: the path of the open file.

    Raises:
        ValueError: another process is removing the file.
        FileNotFoundError: the file has been removed.
    """
    give_up_at = time.monotonic() + _LOCKED_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # A listing also locks each folder, but only for a moment.
            if time.monotonic() > give_up_at:
                raise ValueError(f"{TOKENS} is being removed") from None
            time.sleep(0.01)
        except OSError:
            return  # no locks on this disk, so `prune` does not remove its folders
    # `remove` may have renamed the folder after the file was opened.
    if not os.path.samestat(os.fstat(handle), path.stat()):
        raise ValueError(f"{TOKENS} is being removed")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A folder of prepared tokens.

    Args:
        name: name of its source at the preparation.
        used_at: start of the last use by a run or a command, seconds since the epoch.
        kept: why isles cannot remove it, or "".
    """

    folder: Path
    name: str
    size_bytes: int
    used_at: float
    kept: str


def prepared_in(cache_dir: Path) -> list[Prepared]:
    """The folders of prepared tokens in a cache, sorted by last use, newest first."""
    used: dict[str, float] = {}
    for known in cache_dir.glob(".known-*"):
        if (content := _noted(known)) is None:
            continue
        with suppress(OSError):
            used[content] = max(used.get(content, 0.0), known.stat().st_mtime)
    found = []
    for folder in cache_dir.glob("tokens-*"):
        if not _FOLDER.fullmatch(folder.name) or folder.is_symlink():
            continue
        with suppress(OSError):
            size = sum(file.stat().st_size for file in folder.iterdir())
            used_at = max(folder.stat().st_mtime, used.get(folder.name.rpartition("-")[2], 0.0))
            facts = read_record(folder / MANIFEST, MAX_LIST_BYTES) or {}
            found.append(
                Prepared(folder, f"{facts.get('name', '?')}", size, used_at, _kept(folder))
            )
    return sorted(found, key=lambda each: (-each.used_at, each.folder.name))


def _kept(folder: Path) -> str:
    try:
        with _alone(folder):
            return ""
    except PreflightError:
        return "another user's"
    except BlockingIOError:
        return "in use"
    except FileNotFoundError:
        return "" if is_own(folder) else "another user's"  # damaged
    except OSError as error:
        return f"unknown whether it is in use: {error.strerror}"


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    # No process uses the folder, and none can start to use it within the block. UserError: it
    # belongs to another user. BlockingIOError: it is in use. Other OSError: unknown.
    with open_own_file(folder / TOKENS, os.O_RDWR) as stream:
        # The files of root are safe to read, but this user must not delete them.
        if os.fstat(stream.fileno()).st_uid != os.geteuid():
            raise PreflightError("it belongs to another user", where=str(folder))
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def remove(folder: Path) -> str:
    """Remove an unused folder of prepared tokens. Returns the reason for a failure, or ""."""
    old = temporary_beside(folder, "old")
    try:
        if (folder / TOKENS).exists():
            with _alone(folder):
                folder.rename(old)
        else:
            folder.rename(old)
        shutil.rmtree(old)
    except (OSError, PreflightError) as error:
        return _kept(folder) or f"{error}"
    return ""


def sweep(cache_dir: Path) -> None:
    """Remove notes, locks and files of dead processes without a folder."""
    names = [folder.name for folder in cache_dir.glob("tokens-*")]
    contents = {name.rpartition("-")[2] for name in names}
    for known in cache_dir.glob(f".known-*.{os.geteuid()}"):
        if _noted(known) not in contents:
            with suppress(OSError):
                known.unlink()
    for lock in cache_dir.glob(f".tokens-*.{os.geteuid()}.lock"):
        stem = lock.name[1:].partition(".")[0]
        if any(name.startswith(stem) for name in names):
            continue
        with suppress(OSError, PreflightError), open_own_file(lock, os.O_RDWR) as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.unlink()
    remove_stale(cache_dir / "tokens", locked=False)


def doomed(
    found: list[Prepared], unused_s: float, max_bytes: float | None, now: float | None = None
) -> list[Prepared]:
    """The folders to remove, sorted by last use, newest first.

    Args:
        unused_s: remove folders that were last used longer ago.
        max_bytes: remove more of the oldest folders, until the rest has at most this size.
    """
    now = time.time() if now is None else now
    size, gone = sum(each.size_bytes for each in found), list[Prepared]()
    for each in reversed(found):
        is_old = now - each.used_at > unused_s
        is_large = max_bytes is not None and size > max_bytes
        if not each.kept and (is_old or is_large):
            gone.append(each)
            size -= each.size_bytes
    return gone[::-1]
