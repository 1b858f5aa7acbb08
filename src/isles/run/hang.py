"""Find the rank that the others wait for, from all positions, and a position from a stack.

Both the ranks of the built-in trainer and the watchdog of a user's script use it.
"""

from __future__ import annotations

import importlib.util
import linecache
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STAGES = ("asking", "data loading", "forward and backward", "optimizer step", "agreeing")
"""The parts of a step, in their order."""

_LISTED = 3

_STDLIB = sysconfig.get_paths()["stdlib"]
_BACKWARD = "_engine_run_backward"
_WRAPPERS = frozenset(("wrapper", "_wrapped_call_impl", "_call_impl", "inner", "_fn"))
_WAITING_LINES = (".wait(", "dist.")
_GPU_LINES = (".item(", ".tolist(", ".cpu(", "synchronize(")

Frame = tuple[str, int, str]
"""File, line, function."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Position of a rank.

    Args:
        stage: a part of the step, or another phase, such as evaluating or saving.
        at: the place in its code, or empty if unknown.
        waits_in: the collective operation that it waits in, or empty.
    """

    step: int
    stage: str
    at: str = ""
    waits_in: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Order of the position. Smaller is further behind."""
        return self.step, STAGES.index(self.stage) if self.stage in STAGES else len(STAGES)


@dataclass(frozen=True, slots=True)
class Hang:
    """The ranks that the others wait for (empty: unknown), and the same as text with hosts."""

    root_causes: tuple[int, ...]
    text: str


def find_hang(
    ranks: Mapping[int, RankPosition], hosts: Sequence[str], silent_s: float = 0.0
) -> Hang:
    """Find the ranks that the others wait for.

    Args:
        ranks: positions of the ranks that have answered.
        hosts: hosts of all ranks.
        silent_s: seconds without an answer of the other ranks.
    """
    silent = [rank for rank in range(len(hosts)) if rank not in ranks]
    if silent:
        lost = "it is frozen, or its machine or network is down"
        words = [
            f"no heartbeat from {_name(rank, hosts)} for {silent_s:.0f} s: {lost}"
            for rank in silent
        ]
        return _stall(tuple(silent), words)
    first = min(position.order for position in ranks.values())
    last = max(position.order for position in ranks.values())
    behind = [rank for rank, position in ranks.items() if position.order == first]
    busy = [rank for rank in behind if not ranks[rank].waits_in]
    if first == last and not busy:
        waits = sorted({position.waits_in for position in ranks.values()})
        return Hang(
            (),
            f"all ranks wait for each other in {', '.join(waits)}: check the network between "
            "their hosts, and the GPUs",
        )
    root_causes = busy or behind
    if len(ranks) == 1:
        rank = root_causes[0]
        return Hang((rank,), f"it is {_doing(ranks[rank])}")
    if len(root_causes) == len(ranks):
        return Hang((), f"all ranks are busy; {_name(0, hosts)} is {_doing(ranks[0])}")
    words = [f"{_name(r, hosts)} is behind: {_doing(ranks[r])}" for r in root_causes]
    return _stall(tuple(root_causes), words)


def _stall(root_causes: tuple[int, ...], words: list[str]) -> Hang:
    more = f"; and {len(words) - _LISTED} more" if len(words) > _LISTED else ""
    return Hang(root_causes, "; ".join(words[:_LISTED]) + more)


def _name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} on {hosts[rank]}"


def _doing(position: RankPosition) -> str:
    words = f"in {position.stage}" if position.stage in STAGES else position.stage
    if position.waits_in:
        words += f", waiting in {position.waits_in}"
    return f"{words}, {position.at}" if position.at else words


def collective_in(stack: list[Frame], *, is_gpu: bool) -> str:
    """Name of the collective operation that a stack waits in, or empty.

    Args:
        stack: the innermost frame last.
        is_gpu: whether it computes on a GPU, whose results a thread may wait for.
    """
    if not stack:
        return ""
    file, line, function = stack[-1]
    inner: list[Frame] = []
    for frame in reversed(stack):
        if not frame[0].startswith(_TORCH):
            break
        inner.append(frame)
    if function == _BACKWARD:
        return "the backward pass"
    names = [name for path, _, name in inner if path.startswith(f"{_TORCH}/distributed/")]
    names = [name for name in names if name not in _WRAPPERS]
    if names:
        return names[-1]  # as it was called from outside of torch
    text = linecache.getline(file, line)
    if any(sign in text for sign in _WAITING_LINES):
        return text.strip()
    if is_gpu and (any(sign in text for sign in _GPU_LINES) or "/torch/cuda/" in file):
        return "the GPU"
    return ""


def place_in_words(stack: list[Frame]) -> str:
    """The innermost frame, and the innermost frame outside of libraries, as text."""
    if not stack:
        return "outside of Python"
    own = [frame for frame in stack if not _is_library(frame[0])]
    leaf = stack[-1]
    if not own or own[-1] == leaf:
        return f"at {_short(leaf)}"
    return f"at {_short(own[-1])}, in {_short(leaf)}"


def _is_library(file: str) -> bool:
    return file.startswith((_TORCH, _STDLIB, "<")) or "/site-packages/" in file


def _short(frame: Frame) -> str:
    file, line, function = frame
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {function}()"


def _find_torch() -> str:
    with suppress(ImportError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            return str(Path(spec.origin).parent)
    return "/no/torch"


_TORCH = _find_torch()
