"""Small disks, for tests that fill them; files that are closed to this user."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def closed(path: Path, mode_within: int = 0) -> Iterator[None]:
    """As another user, if this is root, to whom this file or folder is closed."""
    mode, user = path.stat().st_mode, os.geteuid()
    path.chmod(mode_within)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        path.chmod(mode)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of this size, such as 4m, at a new folder; skips the test where nobody may mount."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield
    finally:
        # At once, also where a process still holds a file of it open.
        subprocess.run(["umount", "-l", str(folder)], check=True)
