"""What a cluster shows of itself through the hub, to whoever has no way to its machines: its
status.json, live.json and last restart, packed into one text."""

from __future__ import annotations

import base64
import threading
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.config.foreign import read_bytes
from isles.run.paths import RunDir
from isles.run.records import parse_record

LONGEST = 256 * 2**10
"""Characters of such a text."""

_MOST_BYTES = 2**20
"""Limit of an unpacked text; 96 nodes of 8 GPUs need less."""
_KEPT_BYTES = 4 * 2**20
"""Limit of the unpacked texts whose records are kept, because each look at all clusters sees the
same texts for a while. Small objects take thirty times as much memory as their text."""
_PARTS = ("status", "live", "restart")


def pack(run_dir: RunDir) -> str:
    """The records of a run's newest attempt; empty: there are none, or they are too large.

    The files are put together as they are: the interpreter, which others need, parses nothing.
    """
    attempt = run_dir.last_attempt()
    paths: list[Path] = [run_dir.status]
    if attempt is not None:
        restarts = sorted(attempt.path.glob("restart-*.json"))
        paths = [run_dir.status, attempt.live, *restarts[-1:]]
    found: dict[str, bytes] = {}
    for name, path in zip(_PARTS, paths, strict=False):
        with suppress(OSError, ValueError):
            found[name] = read_bytes(path, _MOST_BYTES)
    # Without the details of its GPUs a cluster of hundreds still says how far it is.
    for names in (_PARTS, ("status",)):
        parts = [b'"%s":%s' % (name.encode(), found[name]) for name in names if name in found]
        data = b"{%s}" % b",".join(parts)
        text = base64.b64encode(zlib.compress(data)).decode()
        if parts and len(data) <= _MOST_BYTES and len(text) <= LONGEST:
            return text
    return ""


def unpack(text: str) -> dict[str, dict[str, Any]]:
    """The records in such a text, by `status`, `live` and `restart`, without those that cannot be
    read. The text comes from another site, so any value in it may be wrong."""
    with _keeping:
        if (kept := _kept.pop(text, None)) is None:
            kept = _unpack(text)
        _kept[text] = kept  # the text of the last use is at the end
        while sum(size for _, size in _kept.values()) > _KEPT_BYTES:
            del _kept[next(iter(_kept))]
    return kept[0]


_Unpacked = tuple[dict[str, dict[str, Any]], int]
_kept: dict[str, _Unpacked] = {}
_keeping = threading.Lock()


def _unpack(text: str) -> _Unpacked:
    # The records, and the size of the text that is kept for them.
    size_bytes = len(text)
    try:
        # Of a small text that would fill the memory only the beginning is unpacked, which is none.
        packed = base64.b64decode(text, validate=True)
        data = zlib.decompressobj().decompress(packed, _MOST_BYTES)
        size_bytes += len(data)
        found = parse_record(data)
    except (ValueError, zlib.error, RecursionError):
        return {}, size_bytes
    parts = found.items() if isinstance(found, dict) else ()
    known = {name: part for name, part in parts if name in _PARTS and isinstance(part, dict)}
    return known, size_bytes
