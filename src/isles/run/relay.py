"""Records of a cluster for the hub, for users without access to its machines: its status.json,
live.json and last restart, packed into one text."""

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
"""Longest text in characters."""

_MOST_BYTES = 2**20
"""Limit of an unpacked text. 96 nodes with 8 GPUs need less."""
_KEPT_BYTES = 4 * 2**20
"""Limit of unpacked texts in the cache of records. Successive queries of all clusters see the same
texts. Small objects take thirty times the memory of their text."""
_PARTS = ("status", "live", "restart")


def pack(run_dir: RunDir) -> str:
    """The records of a run's newest attempt, or empty if they are missing or too large.

    It joins the files without parsing, to save time of the interpreter.
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
    # Without GPU details, a cluster with hundreds of GPUs still reports its progress.
    for names in (_PARTS, ("status",)):
        parts = [b'"%s":%s' % (name.encode(), found[name]) for name in names if name in found]
        data = b"{%s}" % b",".join(parts)
        text = base64.b64encode(zlib.compress(data)).decode()
        if parts and len(data) <= _MOST_BYTES and len(text) <= LONGEST:
            return text
    return ""


def unpack(text: str) -> dict[str, dict[str, Any]]:
    """The readable records in such a text, by `status`, `live` and `restart`. The text comes from
    another site, so any value in it may be wrong."""
    with _keeping:
        if (kept := _kept.pop(text, None)) is None:
            kept = _unpack(text)
        _kept[text] = kept  # the last used text is at the end
        while sum(size for _, size in _kept.values()) > _KEPT_BYTES:
            del _kept[next(iter(_kept))]
    return kept[0]


_Unpacked = tuple[dict[str, dict[str, Any]], int]
_kept: dict[str, _Unpacked] = {}
_keeping = threading.Lock()


def _unpack(text: str) -> _Unpacked:
    # The records, and the size of their text for the cache.
    size_bytes = len(text)
    try:
        # A small text can unpack to fill the memory. Its limited part is not valid JSON.
        packed = base64.b64decode(text, validate=True)
        data = zlib.decompressobj().decompress(packed, _MOST_BYTES)
        size_bytes += len(data)
        found = parse_record(data)
    except (ValueError, zlib.error, RecursionError):
        return {}, size_bytes
    parts = found.items() if isinstance(found, dict) else ()
    known = {name: part for name, part in parts if name in _PARTS and isinstance(part, dict)}
    return known, size_bytes
