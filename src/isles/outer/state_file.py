"""A fragment's outer state as a safetensors file that any cluster can read.

Tensors `outer_param.NAME` and `momentum.NAME`, whole, in fp32, in the order of the layout. Written
and read as a stream: no rank has it whole.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from isles.errors import TrainingError
from isles.outer.layout import Layout

_LONGEST_HEAD = 100 * 2**20
_FIX = "let the cluster take it from another one, or from the rendezvous, once more"


def state_head(layout: Layout, fragment: int, *, has_momentum: bool, version: int) -> bytes:
    """What such a file begins with; after it come the tensors in the order of the layout.

    Args:
        layout: of the run.
        fragment: which one.
        has_momentum: whether the outer optimizer has any.
        version: turns that have been applied.
    """
    entries = _tensors(layout, fragment, has_momentum)
    known = {"layout": layout.digest, "fragment": str(fragment), "version": str(version)}
    text = json.dumps({"__metadata__": known, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_state(
    path: Path, layout: Layout, fragment: int, *, has_momentum: bool
) -> tuple[int, int]:
    """Look whether a file holds a fragment of this layout.

    Returns:
        Where its tensors begin, and the turns that have been applied.

    Raises:
        TrainingError: it does not.
    """
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEAD:
                raise ValueError(f"a head of {length} bytes")
            found = json.loads(stream.read(length))
        known: dict[str, Any] = found.pop("__metadata__")
        version = int(known["version"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise TrainingError(
            f"{path.name} is no outer state: {error}", where=str(path), fix=_FIX
        ) from error
    wanted = _tensors(layout, fragment, has_momentum)
    size = 8 + length + sum(4 * math.prod(entry["shape"]) for entry in wanted.values())
    what = None
    if known.get("layout") != layout.digest or known.get("fragment") != str(fragment):
        what = (
            f"is of layout {str(known.get('layout'))[:16]}..., fragment {known.get('fragment')}, "
            f"not of {layout.digest[:16]}..., fragment {fragment}"
        )
    elif found != wanted:
        what = "holds other tensors than this run has"
    elif path.stat().st_size != size:
        what = f"has {path.stat().st_size} bytes, not {size}"
    if what is not None:
        raise TrainingError(f"{path.name} {what}", where=str(path), fix=_FIX)
    return 8 + length, version


def _tensors(layout: Layout, fragment: int, has_momentum: bool) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for field in ("outer_param", "momentum") if has_momentum else ("outer_param",):
        for name in layout.fragments[fragment].names:
            shape = layout.shapes[name]
            start, end = end, end + 4 * math.prod(shape)
            entries[f"{field}.{name}"] = {
                "dtype": "F32",
                "shape": list(shape),
                "data_offsets": [start, end],
            }
    return entries
