"""What a stack tells: the place in words, and the collective operation that it waits in."""

from __future__ import annotations

import importlib.util
import linecache
import sysconfig
from contextlib import suppress
from pathlib import Path

_STDLIB = sysconfig.get_paths()["stdlib"]
_BACKWARD = "_engine_run_backward"
_WRAPPERS = frozenset(("wrapper", "_wrapped_call_impl", "_call_impl", "inner", "_fn"))
_WAITING_LINES = (".wait(", "dist.")
_GPU_LINES = (".item(", ".tolist(", ".cpu(", "synchronize(")

Frame = tuple[str, int, str]
"""File, line, function."""


def collective_in(stack: list[Frame], *, is_gpu: bool) -> str:
    """The collective operation that a stack waits in; empty where it is in none.

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
    """The innermost place, and the one in nobody's library that led there."""
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
    """Where torch lies, without importing it."""
    with suppress(ImportError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            return str(Path(spec.origin).parent)
    return "/no/torch"


_TORCH = _find_torch()
