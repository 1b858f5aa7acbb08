"""isles follows links of this user and of root, and links of other users to their own files.

`follow` opens every file that a run file names, and the files of models and of runs. `check_found`
looks at files that a glob or a folder has given.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_SEARCH = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
_LINK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


class LinkRefused(PermissionError, ValueError):
    """isles does not read the file that a path leads to. `strerror` has the reason."""

    def __init__(self, why: str, path: Path | str) -> None:
        super().__init__(errno.EPERM, why, str(path))

    def __str__(self) -> str:
        return str(self.strerror)


def follow(
    path: Path,
    open_file: Callable[[str, int, int], io.BufferedReader],
    root: Path | None = None,
) -> tuple[io.BufferedReader, bool]:
    """Open a file, but follow no link of another user to a file that is not that user's.

    Whoever may write to a folder could otherwise make isles read a private file of this user. The
    rule holds for each link on the way, also for a link that another link leads to.

    Args:
        open_file: opens a name in a folder, given flags of `os.open` and the folder's descriptor.
        root: folder above the file; links in its own path count as this user's.

    Returns:
        The file, and whether `path` itself is a link.

    Raises:
        LinkRefused: a link of another user leads to it, or it is below /proc or /sys.
        OSError: it cannot be opened.
    """
    root = root or Path(path.anchor or ".")
    makers, num_links, is_link = set[int](), 0, False
    ahead, folder = [*reversed(path.relative_to(root).parts)] or ["."], os.open(root, _SEARCH)
    try:
        while True:
            name = ahead.pop()
            try:
                if not ahead:
                    stream = open_file(name, os.O_NOFOLLOW, folder)
                    break
                below = os.open(name, _SEARCH | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                maker, target = _read_link(name, folder, error)
                makers.add(maker)
                is_link, num_links = is_link or not ahead, num_links + 1
                if num_links > _MOST_LINKS:
                    raise
                # Links such as /proc/self/fd/0 lead to files that may have no name.
                if f"{_place(folder)}/".startswith("/proc/"):
                    if not ahead:
                        stream = open_file(name, 0, folder)
                        break
                    below = os.open(name, _SEARCH, dir_fd=folder)
                else:
                    ahead += reversed(target.relative_to(target.anchor).parts or (".",))
                    below = os.open(target.anchor or ".", _SEARCH, dir_fd=folder)
            os.close(folder)
            folder = below
    finally:
        os.close(folder)
    why = ""
    if makers - {0, os.geteuid(), os.fstat(stream.fileno()).st_uid}:
        why = "another user has made a link to this file, which is not theirs"
    elif _place(stream.fileno()).startswith(("/proc/", "/sys/")):
        why = "it is a file of the kernel (/proc, /sys)"
    if why:
        stream.close()
        raise LinkRefused(why, path)
    return stream, is_link


def _read_link(name: str, folder: int, error: OSError) -> tuple[int, Path]:
    # Maker and target, both from the same link, whoever replaces it meanwhile.
    link = os.open(name, _LINK, dir_fd=folder)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise error
        return found.st_uid, Path(os.readlink("", dir_fd=link))
    finally:
        os.close(link)


def _place(handle: int) -> str:
    # Where the kernel says that an open file is.
    with suppress(OSError):
        return str(Path(f"/proc/self/fd/{handle}").readlink())
    return ""


def broken_link(path: Path) -> str | None:
    """The target of a link that leads to no file or in a circle; None for any other path."""
    try:
        if path.is_symlink():
            path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return str(path.readlink())
    return None


def check_found(files: Iterable[Path], folder: Path) -> None:
    """Refuse private files outside a folder that only a link in this folder leads to.

    For files that isles has found below `folder`. A folder from somebody else may have links to
    the secrets of the user who unpacks it.

    LinkRefused: only the owner of such a file may read it; `filename` has its real path.
    """
    home = os.path.realpath(folder)
    # The hub's cache has each file in a folder beside its snapshots.
    home = re.sub(r"(/(model|dataset|space)s--[^/]+)/snapshots(/.*)?$", r"\1", home)
    real_folders: dict[Path, str] = {}
    for path in files:
        above = path.parent
        if above not in real_folders:
            real_folders[above] = os.path.realpath(above)
        real = os.path.realpath(path) if path.is_symlink() else f"{real_folders[above]}/{path.name}"
        if os.path.commonpath([home, real]) != home and not path.stat().st_mode & 0o044:
            raise LinkRefused(f"a link leads out of {folder} to a private file: {path}", real)
