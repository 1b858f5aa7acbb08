"""Folders of the cache that are whole or absent: named after their owner until they are whole."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from isles.data.tokens.store import find_fault
from isles.run.manifest import sync_folder
from isles.run.process import ProcessId

log = logging.getLogger(__name__)


def temporary_beside(folder: Path, kind: str = "new") -> Path:
    """A name that says whose it is, so that a dead process' leftovers can be told."""
    process = ProcessId.of(os.getpid())
    owner = f"{process.host}@{process.pid}@{process.started}"
    return folder.with_name(f".tmp-{kind}-{folder.name}@{owner}")


def remove_stale(folder: Path, *, locked: bool) -> None:
    """Remove what dead processes of this machine left beside a folder.

    Args:
        folder: the one that is about to be made.
        locked: whether nobody else makes it now, so that what others left of it goes as well.
    """
    for entry in folder.parent.glob(".tmp-*"):
        parts = re.fullmatch(r"\.tmp-[a-z]+-(.+?)@(.+)@(\d+)@([\d.]+)", entry.name)
        if parts is None:
            continue
        owner = ProcessId(parts[2], int(parts[3]), float(parts[4]))
        stale = not owner.is_alive() if owner.is_here() else locked and parts[1] == folder.name
        if stale:
            log.info("removing leftovers=%s", entry)
            shutil.rmtree(entry, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Give a whole folder its name, in the place of a damaged one."""
    if folder.exists():
        if find_fault(folder) is None:  # without file locks, or from elsewhere: another was first
            shutil.rmtree(temporary)
            return
        old = temporary_beside(folder, "old")
        folder.rename(old)
        shutil.rmtree(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
