"""File with the state of a fragment: a header derived from the run, then numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

_AT_ONCE = 8 * 2**20


def state_head(
    layout: str, fragment: int, version: int, numbers: int, *, has_momentum: bool
) -> bytes:
    """The header of a file with a fragment's state: it differs if any argument differs."""
    size = 4 * numbers
    known = {"layout": layout, "fragment": str(fragment), "version": str(version)}
    fields = ("outer_param", "momentum") if has_momentum else ("outer_param",)
    tensors = {
        field: {
            "dtype": "F32",
            "shape": [numbers],
            "data_offsets": [index * size, (index + 1) * size],
        }
        for index, field in enumerate(fields)
    }
    text = json.dumps({"__metadata__": known, **tensors}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def momentum_of(identity: Mapping[str, str]) -> bool | None:
    """True if the states of a run contain momentum; None: the run has not reported it."""
    text = identity.get("outer.momentum")
    if text is None:
        return None
    try:
        return float(text) != 0
    except ValueError:
        return None


def state_digest(
    path: Path,
    layout: str,
    fragment: int,
    version: int,
    pieces: Sequence[int],
    holds_momentum: bool | None = None,
) -> str:
    """The digest of the outer parameters in a fragment's state.

    It is empty if the file is anything else, or if a number in it is not finite: such a number
    would spoil the cluster that loads it.

    Args:
        pieces: numbers of elements.
        holds_momentum: whether the run needs momentum in the file. None: it does not matter.
    """
    numbers, size = sum(pieces), path.stat().st_size
    with path.open("rb") as stream:
        for has_momentum in (True, False) if holds_momentum is None else (holds_momentum,):
            head = state_head(layout, fragment, version, numbers, has_momentum=has_momentum)
            stream.seek(0)
            is_due = size == len(head) + 4 * numbers * (1 + has_momentum)
            if is_due and stream.read(len(head)) == head:
                whole, is_finite = hashlib.sha256(), True
                for count in pieces:
                    data = stream.read(4 * count)
                    is_finite = is_finite and _is_finite(data)
                    whole.update(hashlib.sha256(data).digest())
                while is_finite and (momentum := stream.read(_AT_ONCE)):
                    is_finite = _is_finite(momentum)
                return whole.hexdigest() if is_finite else ""
    return ""


def _is_finite(numbers: bytes) -> bool:
    return bool(np.isfinite(np.frombuffer(numbers, dtype="<f4")).all())
