"""The folder of a run on a node other than the head: the head's own, or a place for logs here."""

from __future__ import annotations

import shutil
import tempfile
import time
from errno import EEXIST, ENOENT, ENOTEMPTY
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.run.nodes import Fleet
from isles.run.paths import Attempt, RunDir
from isles.run.records import (
    clear_errors,
    read_record,
    write_record,
    write_secret,
    write_text_atomic,
)

_TRIES = 20


def make_place(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> bool:
    """Make the folder of an attempt ready on this node.

    Args:
        run_dir: the run directory, where the head has it.
        attempt: of it.
        args: `begun_at` and `born_at` of the attempt and the run; `fleet`, `resolved`, `text`;
            `token`, the secret of the attempt.

    Returns:
        Whether the head's own folder is here, on a file system that they share.

    Raises:
        UserError: a run of this node's own is there, or the folder cannot be written.
    """
    with clear_errors(run_dir.path):
        for left in reversed(range(_TRIES)):
            launch = read_record(attempt.launch)
            if launch is not None and launch.get("begun_at") == args["begun_at"]:
                return True
            try:
                _make(run_dir, attempt, args)
            except OSError as error:
                # Another process makes it at this moment: here, or on a host that has this disk.
                if not left or error.errno not in (ENOENT, EEXIST, ENOTEMPTY):
                    raise
            else:
                return False
    raise AssertionError("the last try has raised")


def _make(run_dir: RunDir, attempt: Attempt, args: dict[str, Any]) -> None:
    """Each step is whole or not done; the folder of the attempt comes last, with all that it has.

    Raises:
        FileNotFoundError, OSError: somebody else was quicker, among other reasons.
    """
    mark = {"head": args["fleet"]["nodes"][0]["name"], "born_at": args["born_at"]}
    _clear(run_dir, mark)
    run_dir.path.mkdir(parents=True, exist_ok=True)
    write_record(run_dir.node_of, mark)
    attempt.path.parent.mkdir(exist_ok=True)
    if attempt.path.exists():
        _put_aside(attempt, args["begun_at"])
    write_text_atomic(run_dir.resolved, args["resolved"])
    write_text_atomic(run_dir.run_file, args["text"])
    folder = tempfile.mkdtemp(prefix=f".{attempt.path.name}-", dir=attempt.path.parent)
    staged = Attempt(Path(folder), attempt.number)
    try:
        staged.path.chmod(0o755)
        Fleet.of(args["fleet"]).write(staged)
        write_secret(staged.token, args["token"])
        write_record(staged.launch, {"attempt": attempt.number, "begun_at": args["begun_at"]})
        staged.path.rename(attempt.path)
    except BaseException:
        shutil.rmtree(staged.path, ignore_errors=True)
        raise


def _clear(run_dir: RunDir, mark: dict[str, Any]) -> None:
    """Make way for a run: what another run of a head has left goes aside, never one of ours."""
    if not run_dir.path.exists():
        return
    # Hidden: a record of another process that does the same at this moment.
    if all(entry.name.startswith(".") for entry in run_dir.path.iterdir()):
        return
    left = read_record(run_dir.node_of)
    if left == mark:
        return
    if left is None:
        raise UserError(
            "this host has a run of its own in this folder, which the run would write into",
            where=str(run_dir.path),
            fix="move it away, or give the run file another name or output_dir",
            id="run.elsewhere",
        )
    run_dir.path.rename(_aside(run_dir.path))


def _put_aside(attempt: Attempt, begun_at: Any) -> None:
    """Move an older attempt of this number away."""
    place = _aside(attempt.path)
    attempt.path.rename(place)
    moved = read_record(Attempt(place, attempt.number).launch) or {}
    if moved.get("begun_at") == begun_at:
        # Somebody else has just made the one that is wanted, in the moment between two looks.
        place.rename(attempt.path)


def _aside(path: Path) -> Path:
    folder = path.parent / ".old"
    folder.mkdir(exist_ok=True)
    return folder / f"{path.name}-{time.time_ns()}"
