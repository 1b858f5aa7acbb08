"""Begin a run and its attempts, in a new run directory or in the directory of an earlier run."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.config.foreign import open_regular
from isles.config.resolve import Resolved, dump_resolved
from isles.run.bring import bring_records, drop_staged
from isles.run.bucket import explain_bucket_errors
from isles.run.choose import Begun, choose_run, refuse_running
from isles.run.claim import claimed
from isles.run.entry import make_own_folder
from isles.run.find import NUMBERED, is_run_dir
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import (
    explain_write_errors,
    read_record,
    refuse_long,
    write_record,
    write_secret,
    write_text_atomic,
)
from isles.run.state import Clock, attempt_state

_LONGEST_RUN_FILE_BYTES = 16 << 20


def begin_attempt(
    resolved: Resolved,
    run_file_text: str,
    resume: str,
    *,
    join: str = "",
    typed: str = "",
    token: str = "",
) -> tuple[Begun, Attempt]:
    """Begin a run and its next attempt, whose path is absolute.

    Only one process of a run calls this: the launcher, or rank 0 if nothing launched it. If several
    processes start a run at the same time, each sees the run that the previous process has begun.
    It is then refused, or begins the next run with `--resume no`.

    Arguments and errors: see `begin_run` and `new_attempt`.
    """
    with claimed(*_name_of(resolved, resume)):
        begun = begin_run(resolved, run_file_text, resume, join=join)
        run_dir = RunDir(begun.run_dir.path.absolute())
        return begun, new_attempt(run_dir, run_file_text, typed=typed, token=token)


def _name_of(resolved: Resolved, resume: str) -> tuple[Path, str]:
    # The folder and the name of the run, before a run directory is chosen.
    given = Path(resume).expanduser()
    for path in (given, given.parent.parent):
        if resume not in ("auto", "no") and is_run_dir(path):
            numbered = NUMBERED.fullmatch(path.name)
            return path.absolute().parent, numbered["name"] if numbered else path.name
    return Path(resolved.config.output_dir).expanduser(), resolved.config.name


def begin_run(resolved: Resolved, run_file_text: str, resume: str, *, join: str = "") -> Begun:
    """Choose the run directory as `choose_run` does, make it, and write resolved.yaml into it.

    For `begin_attempt`, which prevents two such calls at the same time.

    Args:
        resolved, resume: see `choose_run`.
        run_file_text: the text of the run file. A new run keeps it as run.yaml.
        join: join line of the hub, a secret. If empty, a resumed run keeps its join line.

    Raises:
        UserError: see `choose_run`, or the directory is not writable.
    """
    begun = choose_run(resolved, resume)
    with explain_write_errors(begun.run_dir.path):
        begun.run_dir.path.parent.mkdir(parents=True, exist_ok=True)
        if begun.resumed:
            run_dir, is_made = begun.run_dir, make_own_folder(begun.run_dir.path)
        else:
            run_dir, is_made = _make_run_dir(begun.run_dir), True
        is_new = is_made or not is_run_dir(run_dir.path)
        try:
            drop_staged(run_dir)
            if begun.found is not None:
                with explain_bucket_errors(begun.found.copy.url):
                    bring_records(begun.found.copy, run_dir)
            if is_new:
                write_text_atomic(run_dir.run_file, run_file_text)
            write_text_atomic(run_dir.resolved, dump_resolved(resolved))
            if join:
                write_secret(run_dir.join_line, join)
        except BaseException:
            if is_made:
                shutil.rmtree(run_dir.path, ignore_errors=True)
            raise
    if begun.resumed:
        return begun
    note = begun.note.replace(begun.run_dir.name, run_dir.name)
    return Begun(run_dir, resumed=False, note=note)


def new_attempt(
    run_dir: RunDir,
    run_file_text: str | None = None,
    now: Clock = time.time,
    *,
    typed: str = "",
    token: str = "",
) -> Attempt:
    """The folder of the next attempt of a run, claimed for this process.

    Its launch record has this process until `write_launch` replaces it by the agent. If two users
    start the same run at the same time, isles refuses one of them.

    Args:
        run_file_text: the run file of this attempt. isles keeps it next to the logs if it differs
            from the first attempt's.
        typed: the command that resumes this run, as the user would type it.
        token: secret for its agents to identify each other, or empty for a new token.

    Raises:
        UserError: the run is running, the folder cannot be written, or a record is too long.
    """
    folder = run_dir.path / "attempts"
    with explain_write_errors(folder):
        folder.mkdir(exist_ok=True)
        first = _first_run_file(run_dir)
        while True:
            # One look decides both, so that no other process can start in between.
            last = run_dir.last_attempt()
            if last:
                refuse_long(run_dir, last)
                refuse_running(run_dir, attempt_state(run_dir, last, now), now)
            attempt = run_dir.attempt(last.number + 1 if last else 1)
            staged = Path(tempfile.mkdtemp(prefix=f".{attempt.path.name}-", dir=folder))
            try:
                staged.chmod(0o755)
                made = Attempt(staged, attempt.number)
                claim = {**ProcessId.of(os.getpid()).record(), "begun_at": now(), "typed": typed}
                write_record(made.launch, {"attempt": made.number, **claim})
                write_secret(made.token, token or secrets.token_hex(16))
                if run_file_text is not None and run_file_text != first:
                    write_text_atomic(staged / "run.yaml", run_file_text)
                staged.rename(attempt.path)
            except OSError as error:
                shutil.rmtree(staged, ignore_errors=True)
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    continue  # somebody else took this number just now
                raise
            return attempt


def _first_run_file(run_dir: RunDir) -> str | None:
    # None also for a link or a pipe of another user.
    try:
        with open_regular(run_dir.run_file, os.O_NOFOLLOW) as stream:
            return stream.read(_LONGEST_RUN_FILE_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None


def write_launch(
    attempt: Attempt,
    process: ProcessId | None,
    *,
    world_size: int,
    device: str,
    command: tuple[str, ...],
    resumed_from: Path | None = None,
    **more: Any,
) -> None:
    """Record the process or job of an attempt: the agent, a job, or rank 0 under a manual torchrun.

    Args:
        process: the process that ends with the attempt, or None if `more` has a job.
        resumed_from: the checkpoint that the user gave.
        more: `launcher`, if it is not local. For a job: `job_id`, and `bin_path`, the folder of the
            queue's commands, or None if they are on PATH. For a Ray job: `request`, the requested
            resources. For a manual torchrun: `agents`, which restart ranks.
    """
    record = {
        "attempt": attempt.number,
        **(process.record() if process is not None else {}),
        **more,
        "world_size": world_size,
        "device": device,
        "command": list(command),
        **claim_of(attempt),
        "resumed_from": str(resumed_from) if resumed_from else None,
    }
    with explain_write_errors(attempt.path):
        write_record(attempt.launch, record)


def claim_of(attempt: Attempt) -> dict[str, Any]:
    """Fields of the launch record that `new_attempt` has written, and later calls keep."""
    claim = read_record(attempt.launch) or {}
    return {"begun_at": claim.get("begun_at", time.time()), "typed": claim.get("typed", "")}


def _make_run_dir(chosen: RunDir) -> RunDir:
    name, _, number = chosen.name.rpartition("-")
    for later in itertools.count(int(number)):
        with suppress(FileExistsError):  # somebody else took this number just now
            run_dir = RunDir(chosen.path.with_name(f"{name}-{later}"))
            run_dir.path.mkdir()
            return run_dir
    raise AssertionError("numbers do not end")
