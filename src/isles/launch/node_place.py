"""The folder of a run on a node other than the head: the head's own, or a place for logs here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.rundir.fleet import Fleet
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record, write_text_atomic
from isles.rundir.refusals import clear_errors


def make_place(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> bool:
    """Make the folder of an attempt ready on this node.

    Args:
        run_dir: the run directory, where the head has it.
        attempt: of it.
        args: `begun_at` and `born_at` of the attempt and the run; `fleet`, `resolved`, `text`.

    Returns:
        Whether the head's own folder is here, on a file system that they share.

    Raises:
        UserError: a run of this node's own is there, or the folder cannot be written.
    """
    with clear_errors(run_dir.path):
        launch = read_record(attempt.launch)
        if launch is not None and launch.get("begun_at") == args["begun_at"]:
            return True
        mark = {"head": args["fleet"]["nodes"][0]["name"], "born_at": args["born_at"]}
        _clear(run_dir, mark)
        if attempt.path.exists():
            attempt.path.rename(_aside(attempt.path))
        attempt.path.mkdir(parents=True)
        write_record(run_dir.node_of, mark)
        write_text_atomic(run_dir.resolved, args["resolved"])
        write_text_atomic(run_dir.run_file, args["text"])
        Fleet.of(args["fleet"]).write(attempt)
        write_record(attempt.launch, {"attempt": attempt.number, "begun_at": args["begun_at"]})
    return False


def _clear(run_dir: RunDir, mark: dict[str, Any]) -> None:
    """Make way for a run: what another run of a head has left goes aside, never one of ours."""
    if not run_dir.path.exists() or not any(run_dir.path.iterdir()):
        return
    left = read_record(run_dir.node_of)
    if left == mark:
        return
    if left is None:
        raise UserError(
            "this host has a run of its own in this folder, which the run would write into",
            where=str(run_dir.path),
            fix="move it away, or give the run file another name or output_dir",
        )
    run_dir.path.rename(_aside(run_dir.path))


def _aside(path: Path) -> Path:
    folder = path.parent / ".old"
    folder.mkdir(exist_ok=True)
    return folder / f"{path.name}-{time.time_ns()}"
