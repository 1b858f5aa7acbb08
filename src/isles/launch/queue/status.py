"""State of the jobs of runs: isles queries the scheduler, and keeps its answer in job.json."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import cast, get_args

from isles.errors import UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import ASK_S, JobQueue, JobReport, JobState, QueueJob, training_job
from isles.launch.queue.pbs import Pbs
from isles.launch.queue.slurm import Slurm
from isles.launch.ray.jobs import RayJobs
from isles.launch.ssh.shell import on_all
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_own, read_record, write_record
from isles.run.state import number_of, text_of

_MAX_AGE_S = 4.0
"""Age of an answer below which isles does not query again."""

_GLANCE_S = 5.0
"""Longest wait for a scheduler when many runs are shown."""

Clock = Callable[[], float]


def queue_job(run_dir: RunDir, attempt: Attempt, *, ask_s: float = ASK_S) -> QueueJob | None:
    """The job of an attempt, or the job that continues it; None: no queue has started the attempt,
    or another user has."""
    launch = None if attempt.owner else read_own(attempt.launch)
    if launch is None or not launch.get("job_id"):
        return None
    queue: JobQueue
    match launch.get("launcher"):
        case "slurm":
            queue = Slurm(launch.get("bin_path"), ask_s=ask_s)
        case "pbs":
            queue = Pbs(launch.get("bin_path"), ask_s=ask_s)
        case "ray":
            queue = RayJobs(str(launch.get("address")), ask_s=ask_s)
        case _:
            return None
    job_id = training_job(attempt) or str(launch["job_id"])
    return QueueJob(run_dir, attempt, job_id, queue)


def read_job(attempt: Attempt) -> JobReport | None:
    """The scheduler's last answer; None: it was never queried."""
    record = read_record(attempt.job)
    state = text_of(record, "state")
    if state not in get_args(JobState):
        return None
    return JobReport(
        cast("JobState", state),
        reason=text_of(record, "reason"),
        job_id=text_of(record, "job_id"),
        word=text_of(record, "word"),
        fix=text_of(record, "fix"),
        at=number_of(record, "at") or 0.0,
    )


def refresh(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    max_age_s: float = _MAX_AGE_S,
    ask_s: float = ASK_S,
    hasten: bool = False,
    now: Clock = time.time,
) -> JobReport | None:
    """Query the scheduler for the state of an attempt's job, and keep its answer in job.json.

    If a job is over and its run has no outcome, the run gets an outcome: the job was killed with
    its script. If the scheduler cannot be queried (another machine, a scheduler that is down), its
    last answer is returned.

    Args:
        max_age_s: a younger answer is returned without a query.
        ask_s: longest wait for the scheduler.
        hasten: whether the run should continue: see `JobQueue.hasten`.

    Returns:
        The answer; None if no queue, or another user, has started the attempt.
    """
    job = queue_job(run_dir, attempt, ask_s=ask_s)
    if job is None:
        return None
    last = read_job(attempt)
    is_young = last is not None and 0 <= now() - last.at < max_age_s
    if last is not None and last.job_id == job.job_id and (is_young or last.state == "ended"):
        return last
    try:
        report = job.look()
        if hasten and (why := job.queue.hasten(report)):
            report = replace(report, reason=why, fix="")
    except UserError as error:
        if last is None:
            return JobReport("unknown", error.what, job.job_id, fix=error.fix, at=now())
        age = format_duration(max(0.0, now() - last.at))
        reason = f"{last.reason} ({age} ago; {error.what})"
        return replace(last, reason=reason, fix=error.fix)
    with suppress(OSError):  # another user's directory is read-only
        if report.state == "ended":  # first: a follower that sees the end reads the outcome
            job.write_outcome(report)
        write_record(attempt.job, asdict(report), durable=False)
    return report


def refresh_all(
    runs: Sequence[RunDir], *, ask_s: float = _GLANCE_S, now: Clock = time.time
) -> dict[Path, JobReport]:
    """State of the jobs of the last attempts of many runs, queried in parallel; by the folders of
    the attempts that a queue has started. See `refresh`."""
    found: dict[Path, JobReport] = {}

    def ask(run_dir: RunDir) -> None:
        attempt = run_dir.last_attempt()
        if attempt is None:
            return
        if (report := refresh(run_dir, attempt, ask_s=ask_s, now=now)) is not None:
            found[attempt.path] = report

    on_all(runs, ask)
    return found
