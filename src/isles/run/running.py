"""A run that is on its way already is not started a second time."""

from __future__ import annotations

from isles.errors import UserError
from isles.facts.units import format_duration
from isles.run.find import typed_name
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.state import AttemptState, Clock


def refuse_running(run_dir: RunDir, state: AttemptState, now: Clock) -> None:
    """Refuse a second start where the run, or its job, has not ended.

    Args:
        run_dir: the run.
        state: how it stands.
        now: the clock.

    Raises:
        UserError: it is running, is just ending, or its job waits.
    """
    if not state.is_alive:
        return
    age = f" for {format_duration(now() - state.begun_at)}" if state.begun_at else ""
    if state.process is None:
        raise _in_queue(run_dir, age)
    doing = "is running" if state.state == "running" else "is just ending"
    raise UserError(
        f"{run_dir.name} {doing} on {state.process.host}{age} (pid {state.process.pid})",
        where=str(run_dir.path),
        fix=f"`isles stop {typed_name(run_dir)}` stops it, and lets it save before; "
        "`--resume no` starts a second run",
        id="run.running",
    )


def _in_queue(run_dir: RunDir, age: str) -> UserError:
    attempt = run_dir.last_attempt()
    launch = (read_record(attempt.launch) if attempt else None) or {}
    job = (read_record(attempt.job) if attempt else None) or {}
    doing = {"pending": "is queued", "requeued": "is queued again"}.get(
        str(job.get("state")), "is running"
    )
    job_id = job.get("job_id") or launch.get("job_id")
    name = {"slurm": "Slurm", "pbs": "PBS"}.get(str(launch.get("launcher")), "a queue")
    why = f": {job['reason']}" if job.get("reason") else ""
    return UserError(
        f"{run_dir.name} {doing} as {name} job {job_id}{age}{why}",
        where=str(run_dir.path),
        fix=f"`isles stop {typed_name(run_dir)}` stops it, and lets it save before, or takes "
        "it out of the queue; "
        "`--resume no` starts a second run",
        id="run.running",
    )
