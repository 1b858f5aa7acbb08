"""`isles checkpoint list` and `verify`, as lines."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from isles.facts.units import format_bytes
from isles.run.manifest import find_checkpoint, list_checkpoints, verify_checkpoint
from isles.run.paths import RunDir
from isles.run.state import script_of


def checkpoint_lines(run_dir: RunDir) -> list[str]:
    """One line a checkpoint, oldest first."""
    lines = []
    for info in list_checkpoints(run_dir):
        saved = datetime.fromtimestamp(info.created_at).strftime("%Y-%m-%d %H:%M:%S")
        size = format_bytes(info.size_bytes)
        lines.append(f"step {info.step:<8} {saved}  {size:>10}  {info.path}")
    return lines or [_none_yet(run_dir)]


def verify_lines(run_dir: RunDir, step: int | None) -> Iterator[tuple[str, bool]]:
    """Read checkpoints back; pairs of a line and whether it is good news.

    Args:
        run_dir: the run.
        step: only the checkpoint of this step; None: all, broken ones too.

    Raises:
        UserError: there is no checkpoint of that step.
    """
    if step is not None:
        folders = [find_checkpoint(run_dir, step).path]
    else:
        folders = sorted(run_dir.checkpoints.glob("step-*"))
    if not folders:
        yield _none_yet(run_dir), True
    for folder in folders:
        faults = verify_checkpoint(folder)
        yield f"{folder.name}: {'NOT whole' if faults else 'whole'}", not faults
        yield from ((f"  {fault}", False) for fault in faults)


def _none_yet(run_dir: RunDir) -> str:
    script = script_of(run_dir)
    if script is None:
        return f"{run_dir.name} has no checkpoint yet"
    return f"{run_dir.name} runs {script}, a script of your own, which keeps checkpoints by itself"
