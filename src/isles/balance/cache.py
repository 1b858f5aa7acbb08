"""Measured curves of GPUs, kept from run to run."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from isles.balance.curve import Curve
from isles.run.records import read_record, write_record


def curve_file(folder: Path, key: dict[str, object]) -> Path:
    """Where the curve for a device and a model is kept.

    Args:
        folder: the cache.
        key: all that the curve depends on.
    """
    text = json.dumps(key, sort_keys=True, default=str)
    return folder / "curves" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def read_curve(file: Path) -> Curve | None:
    """A curve that was kept, or None."""
    record = read_record(file)
    try:
        return None if record is None else Curve.read(record)
    except (KeyError, TypeError, ValueError, AssertionError):
        return None  # of another version: measured anew, and overwritten


def keep_curve(file: Path, curve: Curve) -> None:
    """Keep a curve; a cache that cannot be written costs only time."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_record(file, curve.record(), durable=False)
