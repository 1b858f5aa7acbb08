"""Choose the run directory of a start, new or existing. This module creates nothing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from isles.config.resolve import Resolved, load_resolved
from isles.config.resume import (
    Change,
    changed_error,
    changed_length,
    changed_mathematics,
    has_more_to_do,
    with_changes,
)
from isles.config.sections.run import RunConfig
from isles.errors import MissingDependencyError, UserError
from isles.facts.units import format_duration
from isles.run.bucket import BucketRun, find_named, find_newest
from isles.run.checkpoints import CheckpointInfo, checkpoint_name, list_checkpoints
from isles.run.find import (
    find_any,
    is_run_dir,
    next_run,
    numbered_runs,
    own_runs,
    refuse_others,
    typed_command,
    typed_name,
)
from isles.run.manifest import step_of
from isles.run.owner import read_text
from isles.run.paths import RunDir
from isles.run.records import explain_write_errors, read_record
from isles.run.state import AttemptState, Clock, run_state


@dataclass(frozen=True, slots=True)
class Begun:
    """The run directory of a run that is about to start.

    Args:
        run_dir: the directory; `choose_run` does not create a new one.
        resumed: whether the start resumes an existing directory.
        note: lines for the user, or empty.
        resume_from: the checkpoint to load. Default: the newest complete checkpoint, if any.
        found: the run's copy in `checkpoint.remote`, if its records are newer than the local ones.
    """

    run_dir: RunDir
    resumed: bool
    note: str
    resume_from: Path | None = None
    found: BucketRun | None = None


def choose_run(resolved: Resolved, resume: str, now: Clock = time.time) -> Begun:
    """Choose the run directory, without creating it.

    Args:
        resume: `auto`, `no`, or the path or URL (below `checkpoint.remote`) of a run directory or
            of a checkpoint.

    Raises:
        UserError: the run is already running, cannot resume, or does not exist, or
            `checkpoint.remote` does not respond.
    """
    url = resolved.config.checkpoint.remote
    match resume:
        case "auto":
            return _choose_auto(resolved, now)
        case "no":
            found = find_newest(url, resolved.config.name) if url is not None else None
            return Begun(_next_run(resolved, found), resumed=False, note="")
        case _ if url is not None and resume.startswith(f"{url.rstrip('/')}/"):
            return _choose_copy(resolved, url, resume, now)
        case _:
            return _choose_given(resolved, resume, now)


def refuse_second(output_dir: Path, name: str, resume: str) -> None:
    """Refuse a second start of a running or queued run, before all its values are known.

    For `resume`, see `choose_run`.
    """
    if resume == "no":
        return
    given = Path(resume).expanduser()
    runs = own_runs(output_dir, name)
    if resume != "auto":
        runs = [RunDir(path) for path in (given, given.parent.parent) if is_run_dir(path)]
    if runs and _first_node(runs[-1]) is None:
        refuse_running(runs[-1], run_state(runs[-1]), time.time)


def refuse_running(run_dir: RunDir, state: AttemptState, now: Clock) -> None:
    """Raise a UserError if a run with this state is running or queued."""
    if not state.is_alive:
        return
    age = f" for {format_duration(now() - state.begun_at)}" if state.begun_at else ""
    if state.process is not None:
        doing = "is running" if state.state == "running" else "is ending"
        what = f"{doing} on {state.process.host}{age} (pid {state.process.pid})"
        saves = "saves a checkpoint first"
    else:
        attempt = run_dir.last_attempt()
        assert attempt is not None, "only an attempt can be alive"
        launch, job = read_record(attempt.launch) or {}, read_record(attempt.job) or {}
        waiting = {"pending": "is queued", "requeued": "is queued again"}
        queue = {"slurm": "Slurm", "pbs": "PBS", "ray": "Ray"}.get(state.launcher, "a queue")
        what = f"{waiting.get(str(job.get('state')), 'is running')} as {queue} job "
        what += f"{job.get('job_id') or launch.get('job_id')}{age}"
        what += f": {job['reason']}" if job.get("reason") else ""
        saves = "saves a checkpoint first, or removes its job from the queue"
    raise UserError(
        f"{run_dir.name} {what}",
        where=str(run_dir.path),
        fix=f"stop it with `isles stop {typed_name(run_dir)}`, which {saves}, or start a second "
        "run "
        "with `--resume no`",
        id="run.running",
    )


def _next_run(resolved: Resolved, found: BucketRun | None = None) -> RunDir:
    output_dir, name = Path(resolved.config.output_dir).expanduser(), resolved.config.name
    with explain_write_errors(output_dir):
        return RunDir(next_run(output_dir, name, above=found.number if found is not None else 0))


def _choose_auto(resolved: Resolved, now: Clock) -> Begun:
    output_dir, name = Path(resolved.config.output_dir).expanduser(), resolved.config.name

    def new(why: str, more: str = "") -> Begun:
        note = f"{run_dir.name} {why}. Starting a new run, {fresh.name}{more}"
        return Begun(fresh, resumed=False, note=note)

    with explain_write_errors(output_dir):
        # A directory without an attempt was never started, or another process is creating it now.
        started = own_runs(output_dir, name)
    found, unasked = _find_copy(resolved, is_needed=not started)
    fresh = _next_run(resolved, found)
    if not started or (found is not None and _is_ahead(found, started[-1])):
        return _choose_found(resolved, found, fresh, now)
    run_dir = started[-1]
    if (owner := _first_node(run_dir)) is not None:
        return new(f"is on {owner}, its first host")
    state = run_state(run_dir, now)
    refuse_running(run_dir, state, now)
    if state.state == "finished":
        more = f" (resume {run_dir.name} with `--resume {shlex.quote(str(run_dir.path))}`)"
        return new("is finished", more if _is_longer(run_dir, resolved) else "")
    saved = list_checkpoints(run_dir)
    changes = _changes(run_dir, resolved, saved[-1] if saved else None)
    asked = not all(change.is_free for change in changes)
    is_script = resolved.config.training.script is not None
    if asked and not saved:
        if is_script:
            more = f" (resume it with `--resume {shlex.quote(str(run_dir.path))}`)"
            return new("ended with other values", more)
        return new("ended before its first checkpoint, with other values")
    if asked:
        raise changed_error(run_dir.path, str(run_dir.path), typed_command(run_dir), changes)
    place = f" from step {saved[-1].step}" if saved else " from step 0, as it has no checkpoint"
    if is_script:
        place = ", whose script starts again"
    note = with_changes(f"resuming {run_dir.name}{place}{unasked}", changes)
    return Begun(run_dir, resumed=True, note=note)


def _find_copy(resolved: Resolved, *, is_needed: bool) -> tuple[BucketRun | None, str]:
    # The newest run in `checkpoint.remote`, and a remark if it does not respond.
    url = resolved.config.checkpoint.remote
    if url is None:
        return None, ""
    try:
        return find_newest(url, resolved.config.name), ""
    except UserError as error:
        # The run has trained for hours: a missing bucket must not prevent it from resuming.
        if is_needed or isinstance(error, MissingDependencyError):
            raise
        return (
            None,
            f"; {error.what}, so isles cannot check for newer checkpoints of another machine",
        )


def _is_ahead(found: BucketRun, run_dir: RunDir) -> bool:
    number = int(run_dir.name.rpartition("-")[2])
    if found.number != number:
        return found.number > number
    limit = (read_record(run_dir.remote) or {}).get("forget_after")
    if limit is not None and (found.step or 0) > limit:
        return False  # checkpoints of steps that this directory repeats
    saved = list_checkpoints(run_dir)
    is_finished = found.is_finished and run_state(run_dir).state != "finished"
    return is_finished or (found.step or 0) > (saved[-1].step if saved else 0)


def _choose_found(resolved: Resolved, found: BucketRun | None, fresh: RunDir, now: Clock) -> Begun:
    # Resume a run of `checkpoint.remote` that is missing or older on this machine.
    if found is None:
        runs = (run for _, run in numbered_runs(fresh.path.parent, resolved.config.name))
        notes = [
            f"{run.name} belongs to {run.owner}. Starting a new run, " for run in runs if run.owner
        ]
        return Begun(fresh, resumed=False, note=notes[-1] + fresh.name if notes else "")
    run_dir = RunDir(fresh.path.with_name(found.name))
    if run_dir.attempts():
        refuse_running(run_dir, run_state(run_dir, now), now)
    if found.is_finished:
        note = f"{found.name} is finished at {found.copy.url}. Starting a new run, "
        more = f" (resume {found.name} with `--resume {shlex.quote(found.copy.url)}`)"
        is_longer = found.manifest and has_more_to_do(resolved.config, found.manifest)
        return Begun(fresh, resumed=False, note=f"{note}{fresh.name}{more if is_longer else ''}")
    changes = _changes_since(found, resolved)
    if not all(change.is_free for change in changes):
        raise changed_error(Path(found.name), found.copy.url, "", changes)
    return _from_copy(run_dir, found, f"from step {found.step}", changes)


def _choose_copy(resolved: Resolved, url: str, resume: str, now: Clock) -> Begun:
    # `--resume URL/NAME-N`, or `--resume URL/NAME-N/checkpoints/step-N`.
    name, _, rest = resume.removeprefix(f"{url.rstrip('/')}/").rstrip("/").partition("/")
    folder, _, checkpoint = rest.rpartition("/")
    step = step_of(checkpoint) if folder == "checkpoints" else None
    found = find_named(url, name)
    has_it = found is not None and (not rest or step in found.steps)
    if found is None or found.step is None or not has_it:
        raise UserError(
            f"{'checkpoint' if rest else 'run'} not found: {resume}",
            where="--resume",
            fix=f"give {url.rstrip('/')}/NAME-N, or a checkpoint from `isles checkpoint list`",
            id="run.checkpoint",
        )
    run_dir = RunDir(Path(resolved.config.output_dir).expanduser() / name)
    if run_dir.attempts():
        refuse_running(run_dir, run_state(run_dir, now), now)
    place = f"from step {found.step if step is None else step}"
    begun = _from_copy(run_dir, found, place, _changes_since(found, resolved))
    asked = None if step is None else run_dir.checkpoints / checkpoint_name(step)
    return replace(begun, resume_from=asked)


def _from_copy(run_dir: RunDir, found: BucketRun, place: str, changes: Sequence[Change]) -> Begun:
    refuse_others(run_dir)
    here = "which is not on this machine"
    if is_run_dir(run_dir.path):
        saved = list_checkpoints(run_dir)
        here = (
            "which this machine has "
            f"{f'up to step {saved[-1].step}' if saved else 'without a checkpoint'}"
        )
    note = f"resuming {found.name}, {here}, {place} at {found.copy.url}"
    return Begun(run_dir, resumed=True, note=with_changes(note, changes), found=found)


def _changes_since(found: BucketRun, resolved: Resolved) -> list[Change]:
    old = _config_from(found.resolved, found.copy.url)
    length = changed_length(old, resolved.config, found.manifest) if found.manifest else []
    return changed_mathematics(old, resolved.config) + length


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
                    f"{found.name} is a run of several machines",
                    where="--resume",
                    fix=f"run the command again that started {found.name}",
                    id="run.elsewhere",
                )
            run_dir = found
    refuse_others(run_dir)
    if (owner := _first_node(run_dir)) is not None:
        raise UserError(
            f"{run_dir.name} is on {owner}, its first host, and this machine has only its logs",
            where=str(run_dir.path),
            fix=f"put {owner} first in the list of hosts, start the run on {owner}, or start a "
            "new run with `--resume no`",
            id="run.elsewhere",
        )
    if checkpoint is not None and not checkpoint.is_dir():
        raise UserError(
            f"checkpoint not found: {checkpoint.name}",
            where=str(checkpoint.parent),
            fix=f"choose one of `isles checkpoint list {typed_name(run_dir)}`",
            id="run.checkpoint",
        )
    refuse_running(run_dir, run_state(run_dir, now), now)
    note = f"resuming {run_dir.name}" + (f" from {checkpoint.name}" if checkpoint else "")
    saved = [info for info in list_checkpoints(run_dir) if checkpoint in (None, info.path)]
    try:
        changes = _changes(run_dir, resolved, saved[-1] if saved else None)
    except UserError as error:
        note += f" (isles could not compare its old values: {error.what})"
    else:
        note = with_changes(note, changes)
    return Begun(run_dir, resumed=True, note=note, resume_from=checkpoint)


def _first_node(run_dir: RunDir) -> str | None:
    # The host with the checkpoints of a run, if this host was only a node of it.
    mark = read_record(run_dir.node_of)
    return str(mark.get("first_node")) if mark is not None else None


def _changes(run_dir: RunDir, resolved: Resolved, info: CheckpointInfo | None) -> list[Change]:
    # Changes since the last attempt. `info`: the checkpoint to load.
    old = _old_config(run_dir)
    changes = changed_mathematics(old, resolved.config)
    return changes + (changed_length(old, resolved.config, info.manifest) if info else [])


def _is_longer(run_dir: RunDir, resolved: Resolved) -> bool:
    # Whether a run file equals the run file of a finished run, but with a greater length.
    saved = list_checkpoints(run_dir)
    if not saved or not has_more_to_do(resolved.config, saved[-1].manifest):
        return False
    try:
        old = _old_config(run_dir)
    except UserError:
        return False  # of another isles, which cannot resume it
    return not (
        has_more_to_do(old, saved[-1].manifest) or changed_mathematics(old, resolved.config)
    )


def is_unchanged(run_dir: RunDir, resolved: Resolved) -> bool:
    """True if the last attempt of a run had exactly these values."""
    try:
        return _old_config(run_dir) == resolved.config
    except UserError:
        return False  # of another version of isles


def _old_config(run_dir: RunDir) -> RunConfig:
    try:
        text = read_text(run_dir.resolved)[0]
    except (OSError, ValueError) as error:
        raise _unusable(str(error), str(run_dir.resolved)) from error
    return _config_from(text, str(run_dir.resolved))


def _config_from(text: str, place: str) -> RunConfig:
    # The text of a resolved.yaml, and the path or URL of the run.
    try:
        return load_resolved(text).config
    except UserError as error:
        raise _unusable(error.what, place) from error


def _unusable(why: str, place: str) -> UserError:
    return UserError(
        f"resolved.yaml is not usable: {why}",
        where=place,
        fix="resume with the version of isles that wrote the file, or start a new run with "
        "`--resume no`",
    )
