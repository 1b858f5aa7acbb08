"""Lines that are added to a file while it is read."""

from __future__ import annotations

import os
from pathlib import Path

_BLOCK_BYTES = 64 * 1024


class LineTail:
    """Whole lines of a file as they appear; the file may come late, shrink or be replaced."""

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        """`last`: how many of the lines that are there already come first; None: all."""
        self.path = path
        self._last = last
        self._rest = b""
        self._offset = 0
        self._inode: int | None = None

    def read(self, *, final: bool = False) -> list[str]:
        """The lines added since the last call, without their ends.

        Args:
            final: also what stands after the last line end, since nothing will follow.
        """
        try:
            with self.path.open("rb") as stream:
                data = self._rest + self._added(stream.fileno())
        except (FileNotFoundError, NotADirectoryError):
            return []
        *lines, self._rest = data.split(b"\n")
        if final and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode("utf-8", errors="replace").rstrip("\r") for line in lines]

    def _added(self, handle: int) -> bytes:
        info = os.fstat(handle)
        if self._inode is None and self._last is not None:
            self._offset = _start_of_last_lines(handle, info.st_size, self._last)
        elif info.st_ino != self._inode or info.st_size < self._offset:
            self._offset, self._rest = 0, b""
        self._inode = info.st_ino
        blocks = []
        while block := os.pread(handle, _BLOCK_BYTES, self._offset):
            blocks.append(block)
            self._offset += len(block)
        return b"".join(blocks)


def _start_of_last_lines(handle: int, size_bytes: int, count: int) -> int:
    """Offset at which the last `count` lines begin, read from the end."""
    data = b""
    start = size_bytes
    while start > 0 and data.count(b"\n") <= count:
        step = min(_BLOCK_BYTES, start)
        start -= step
        data = os.pread(handle, step, start) + data
    # A line that is still being written counts as one of them.
    lines = _keepends(data)
    return size_bytes - sum(len(line) for line in (lines[-count:] if count else []))


def _keepends(data: bytes) -> list[bytes]:
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
