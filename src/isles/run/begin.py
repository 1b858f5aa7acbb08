"""Begin a run, in a new run directory or in one of an earlier start; refuse what cannot run."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from isles.config.resolve import Resolved, dump_resolved, load_resolved
from isles.config.resume import (
    Change,
    changed_error,
    changed_length,
    changed_mathematics,
    has_more_to_do,
    with_changes,
)
from isles.config.sections.output import MLflowConfig, tracker_sections
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError, MissingDependencyError, UserError
from isles.facts.units import format_duration
from isles.run.checkpoints import CheckpointInfo, list_checkpoints
from isles.run.env import has_mlflow_server
from isles.run.find import find_any, is_run_dir, numbered_runs, typed_command, typed_name
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import (
    clear_errors,
    read_record,
    write_record,
    write_secret,
    write_text_atomic,
)
from isles.run.state import AttemptState, Clock, attempt_state, run_state

_EXTRAS = {"tensorboard": "train", "wandb": "wandb", "mlflow": "mlflow"}
"""Optional dependencies of isles in which the package of a tracker is; both are called the same."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The run directory of a run that is about to start.

    Args:
        run_dir: where it is, or where `choose_run` would put it.
        resumed: whether it goes on in a directory that was there.
        note: one or more lines for the user; empty when there is nothing to say.
        resume_from: the checkpoint to load; None: the newest whole one, if there is any.
    """

    run_dir: RunDir
    resumed: bool
    note: str
    resume_from: Path | None = None


def choose_run(resolved: Resolved, resume: str, now: Clock = time.time) -> Begun:
    """Choose the run directory, and make nothing.

    Args:
        resume: `auto`, `no`, or the path of a run directory or of a checkpoint in one.

    Raises:
        UserError: the run is running already, cannot be gone on with, or does not exist.
    """
    match resume:
        case "auto":
            return _choose_auto(resolved, now)
        case "no":
            return Begun(_next_run(resolved), resumed=False, note="")
        case _:
            return _choose_given(resolved, resume, now)


def begin_run(resolved: Resolved, run_file_text: str, resume: str, *, join: str = "") -> Begun:
    """Choose the run directory as `choose_run` does, make it, and write resolved.yaml into it.

    Only one process of a run calls this: the launcher, or rank 0 where there is none.

    Args:
        resolved, resume: as in `choose_run`.
        run_file_text: the run file, word for word; a new run keeps it as run.yaml.
        join: join line of the hub, a secret; empty: a resumed run keeps what it has.

    Raises:
        UserError: as in `choose_run`, or the directory cannot be written.
    """
    begun = choose_run(resolved, resume)
    with clear_errors(begun.run_dir.path):
        run_dir = begun.run_dir if begun.resumed else _make_run_dir(resolved)
        try:
            if not begun.resumed:
                write_text_atomic(run_dir.run_file, run_file_text)
            write_text_atomic(run_dir.resolved, dump_resolved(resolved))
            if join:
                write_secret(run_dir.join_line, join)
        except BaseException:
            if not begun.resumed:
                shutil.rmtree(run_dir.path, ignore_errors=True)
            raise
    if begun.resumed:
        return begun
    note = begun.note.replace(begun.run_dir.name, run_dir.name)
    return Begun(run_dir, resumed=False, note=note)


def refuse_second(output_dir: Path, name: str, resume: str) -> None:
    """Refuse a second start of a run that runs or waits, before all its values are known.

    `resume` as in `choose_run`.
    """
    if resume == "no":
        return
    given = Path(resume).expanduser()
    runs = [run for _, run in numbered_runs(output_dir, name) if run.attempts()]
    if resume != "auto":
        runs = [RunDir(path) for path in (given, given.parent.parent) if is_run_dir(path)]
    if runs and _first_node(runs[-1]) is None:
        _refuse_running(runs[-1], run_state(runs[-1]), time.time)


def new_attempt(
    run_dir: RunDir,
    run_file_text: str | None = None,
    now: Clock = time.time,
    *,
    typed: str = "",
) -> Attempt:
    """The folder of the next start of a run, claimed for this process.

    Its launch record names this process until `write_launch` puts the agent there, so that of
    two users who start the same run at once one is refused.

    Args:
        run_file_text: the run file of this start; kept beside its logs if it is not the first's.
        typed: the command that goes on with this run, as its user would type it.

    Raises:
        UserError: the run is running, or the folder cannot be written.
    """
    folder = run_dir.path / "attempts"
    with clear_errors(folder):
        folder.mkdir(exist_ok=True)
        while True:
            # One look decides both, so that nobody can start in between.
            last = run_dir.last_attempt()
            if last:
                _refuse_running(run_dir, attempt_state(run_dir, last, now), now)
            attempt = run_dir.attempt(last.number + 1 if last else 1)
            staged = Path(tempfile.mkdtemp(prefix=f".{attempt.path.name}-", dir=folder))
            try:
                _fill_attempt(run_dir, Attempt(staged, attempt.number), run_file_text, now(), typed)
                staged.rename(attempt.path)
            except OSError as error:
                shutil.rmtree(staged, ignore_errors=True)
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    continue  # somebody else took this number just now
                raise
            return attempt


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
    """Record who runs an attempt: the agent, a job, or rank 0 under a torchrun typed by hand.

    Args:
        process: the process that ends when the attempt does; None: `more` names a job.
        resumed_from: the checkpoint that was asked for by name.
        more: `launcher`, where it is not local. Of a job: `job_id`, and `bin_path`, the folder of
            the queue's commands, or None where they are on PATH. Of a torchrun typed by hand:
            `agents`, the processes that start ranks again.
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
    with clear_errors(attempt.path):
        write_record(attempt.launch, record)


def claim_of(attempt: Attempt) -> dict[str, Any]:
    """Fields of the launch record that `new_attempt` has written, and later ones keep."""
    claim = read_record(attempt.launch) or {}
    return {"begun_at": claim.get("begun_at", time.time()), "typed": claim.get("typed", "")}


def _fill_attempt(
    run_dir: RunDir, attempt: Attempt, text: str | None, now_s: float, typed: str
) -> None:
    attempt.path.chmod(0o755)
    claim = {**ProcessId.of(os.getpid()).record(), "begun_at": now_s, "typed": typed}
    write_record(attempt.launch, {"attempt": attempt.number, **claim})
    write_secret(attempt.token, secrets.token_hex(16))
    first = run_dir.run_file.read_text(encoding="utf-8") if run_dir.run_file.is_file() else None
    if text is not None and text != first:
        write_text_atomic(attempt.path / "run.yaml", text)


def _next_run(resolved: Resolved) -> RunDir:
    output_dir, name = Path(resolved.config.output_dir).expanduser(), resolved.config.name
    with clear_errors(output_dir):
        taken = numbered_runs(output_dir, name)
    return RunDir(output_dir / f"{name}-{taken[-1][0] + 1 if taken else 1}")


def _make_run_dir(resolved: Resolved) -> RunDir:
    Path(resolved.config.output_dir).expanduser().mkdir(parents=True, exist_ok=True)
    while True:
        run_dir = _next_run(resolved)
        try:
            run_dir.path.mkdir()
        except FileExistsError:
            continue  # somebody else took this number just now
        return run_dir


def _choose_auto(resolved: Resolved, now: Clock) -> Begun:
    output_dir, name = Path(resolved.config.output_dir).expanduser(), resolved.config.name
    fresh = _next_run(resolved)

    def new(why: str, more: str = "") -> Begun:
        note = f"{run_dir.name} {why}; this is a new run: {fresh.name}{more}"
        return Begun(fresh, resumed=False, note=note)

    with clear_errors(output_dir):
        # A directory without an attempt was never started, or is being made at this instant.
        started = [
            run
            for _, run in numbered_runs(output_dir, name)
            if is_run_dir(run.path) and run.attempts()
        ]
    if not started:
        return Begun(fresh, resumed=False, note="")
    run_dir = started[-1]
    if (owner := _first_node(run_dir)) is not None:
        return new(f"is kept by {owner}, its first host")
    state = run_state(run_dir, now)
    _refuse_running(run_dir, state, now)
    if state.state == "finished":
        more = f" (`--resume {run_dir.path}` trains {run_dir.name} on instead)"
        return new("is finished", more if _is_longer(run_dir, resolved) else "")
    saved = list_checkpoints(run_dir)
    changes = _changes(run_dir, resolved, saved[-1] if saved else None)
    asked = not all(change.is_free for change in changes)
    is_script = resolved.config.training.script is not None
    if asked and not saved:
        if is_script:
            more = f" (`--resume {run_dir.path}` goes on with the other)"
            return new("ended with other values", more)
        return new("ended before its first checkpoint, with other values")
    if asked:
        raise changed_error(run_dir.path, str(run_dir.path), typed_command(run_dir), changes)
    place = f" from step {saved[-1].step}" if saved else " from the start: it has no checkpoint"
    if is_script:
        place = ": its script is started again"
    note = with_changes(f"going on with {run_dir.name}{place}", changes)
    return Begun(run_dir, resumed=True, note=note)


def _choose_given(resolved: Resolved, resume: str, now: Clock) -> Begun:
    path = Path(resume).expanduser()
    run_dir, checkpoint = RunDir(path), None
    if not is_run_dir(path):
        if path.parent.name == "checkpoints" and is_run_dir(path.parent.parent):
            run_dir, checkpoint = RunDir(path.parent.parent), path
        else:
            found = find_any(resume, Path(resolved.config.output_dir).expanduser())
            if not isinstance(found, RunDir):
                raise UserError(
                    f"there is no run directory of {found.name} on this machine alone",
                    where="--resume",
                    fix=f"type the command that has started {found.name} once more",
                    id="run.elsewhere",
                )
            run_dir = found
    if (owner := _first_node(run_dir)) is not None:
        raise UserError(
            f"{run_dir.name} is kept by {owner}, its first host; here are only logs of it",
            where=str(run_dir.path),
            fix=f"make {owner} the first of the hosts, or start it there; `--resume no` starts a "
            "new run",
            id="run.elsewhere",
        )
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(
            f"there is no checkpoint {checkpoint.name}",
            where=str(checkpoint.parent),
            fix=f"`isles checkpoint list {run_dir.path}` shows those there are",
            id="run.checkpoint",
        )
    _refuse_running(run_dir, run_state(run_dir, now), now)
    note = f"going on with {run_dir.name}" + (f" from {checkpoint.name}" if checkpoint else "")
    saved = [info for info in list_checkpoints(run_dir) if checkpoint in (None, info.path)]
    try:
        changes = _changes(run_dir, resolved, saved[-1] if saved else None)
    except UserError as error:
        note += f"; its old values could not be compared: {error.what}"
    else:
        note = with_changes(note, changes)
    return Begun(run_dir, resumed=True, note=note, resume_from=checkpoint)


def _first_node(run_dir: RunDir) -> str | None:
    # The host that has the checkpoints of a run of which this one was only a node.
    mark = read_record(run_dir.node_of)
    return str(mark.get("first_node")) if mark is not None else None


def _changes(run_dir: RunDir, resolved: Resolved, info: CheckpointInfo | None) -> list[Change]:
    # What has changed since the last start; `info`: the checkpoint that would be loaded.
    old = _old_config(run_dir)
    changes = changed_mathematics(old, resolved.config)
    return changes + (changed_length(old, resolved.config, info.manifest) if info else [])


def _is_longer(run_dir: RunDir, resolved: Resolved) -> bool:
    # Whether a run file is that of a finished run, with a greater length.
    saved = list_checkpoints(run_dir)
    if not saved or not has_more_to_do(resolved.config, saved[-1].manifest):
        return False
    try:
        old = _old_config(run_dir)
    except UserError:
        return False  # of another isles: it could not be gone on with
    return not (
        has_more_to_do(old, saved[-1].manifest) or changed_mathematics(old, resolved.config)
    )


def _old_config(run_dir: RunDir) -> RunConfig:
    try:
        return load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
    except (OSError, ValueError) as error:
        raise UserError(
            f"resolved.yaml cannot be read: {error}",
            where=str(run_dir.resolved),
            fix="`--resume no` starts a new run",
        ) from error


def _refuse_running(run_dir: RunDir, state: AttemptState, now: Clock) -> None:
    if not state.is_alive:
        return
    age = f" for {format_duration(now() - state.begun_at)}" if state.begun_at else ""
    if state.process is not None:
        doing = "is running" if state.state == "running" else "is just ending"
        what = f"{doing} on {state.process.host}{age} (pid {state.process.pid})"
        saves = "lets it save before"
    else:
        attempt = run_dir.last_attempt()
        assert attempt is not None, "only an attempt can be alive"
        launch, job = read_record(attempt.launch) or {}, read_record(attempt.job) or {}
        waiting = {"pending": "is queued", "requeued": "is queued again"}
        queue = {"slurm": "Slurm", "pbs": "PBS", "ray": "Ray"}.get(state.launcher, "a queue")
        what = f"{waiting.get(str(job.get('state')), 'is running')} as {queue} job "
        what += f"{job.get('job_id') or launch.get('job_id')}{age}"
        what += f": {job['reason']}" if job.get("reason") else ""
        saves = "lets it save before, or takes it out of the queue"
    raise UserError(
        f"{run_dir.name} {what}",
        where=str(run_dir.path),
        fix=f"`isles stop {typed_name(run_dir)}` stops it, and {saves}; `--resume no` starts a "
        "second run",
        id="run.running",
    )


def require_packages(config: RunConfig) -> None:
    """Refuse a run whose trackers lack a package or a server; imports none of them.

    Raises:
        MissingDependencyError: a package is missing; the message says how to install it.
        ConfigError: MLflow has no server.
    """
    for tracker in tracker_sections(config.track):
        extra = _EXTRAS.get(tracker.kind)
        if extra is not None and find_spec(tracker.kind) is None:
            raise MissingDependencyError(
                f"track names {tracker.kind}, and the package {tracker.kind} is not installed",
                where=sys.executable,
                fix=f"pip install 'isles[{extra}]', or set track to a list without {tracker.kind}",
            )
        if (
            isinstance(tracker, MLflowConfig)
            and tracker.tracking_uri is None
            and not has_mlflow_server()
        ):
            raise ConfigError(
                "mlflow has no tracking_uri, and MLFLOW_TRACKING_URI is not set",
                where="track",
                fix="write track: [{kind: mlflow, tracking_uri: http://HOST:5000}], or set "
                "MLFLOW_TRACKING_URI",
                id="track.account",
            )
