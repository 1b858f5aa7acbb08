"""How the jobs of runs stand: the scheduler is asked, and its answer is kept in job.json."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from isles.errors import UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import ASK_S, JobReport, QueueJob, resubmitted_id
from isles.launch.queue.pbs import Pbs, PbsJob
from isles.launch.queue.slurm import Slurm, SlurmJob
from isles.launch.ssh.shell import on_all
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record

_MAX_AGE_S = 4.0
"""An answer younger than this is not asked for again."""

_GLANCE_S = 5.0
"""Longest wait for a scheduler where many runs are shown at once."""

Clock = Callable[[], float]


def queue_job(run_dir: RunDir, attempt: Attempt, *, ask_s: float = ASK_S) -> QueueJob | None:
    """The job of an attempt, or the one that it was submitted again as; None: no queue started it.

    Args:
        ask_s: longest wait for one answer of the scheduler.
    """
    launch = read_record(attempt.launch) or {}
    if not launch.get("job_id"):
        return None
    job_id = resubmitted_id(attempt) or str(launch["job_id"])
    match launch.get("launcher"):
        case "slurm":
            slurm = Slurm(launch.get("bin_path"), ask_s=ask_s)
            return SlurmJob(run_dir, attempt, job_id, slurm)
        case "pbs":
            return PbsJob(run_dir, attempt, job_id, Pbs(launch.get("bin_path"), ask_s=ask_s))
        case _:
            return None


def read_job(attempt: Attempt) -> JobReport | None:
    """The scheduler's last answer; None: it was never asked."""
    record = read_record(attempt.job)
    if record is None or "state" not in record:
        return None
    known = {name: record[name] for name in JobReport.__dataclass_fields__ if name in record}
    return JobReport(**{"reason": "", "job_id": "", "at": 0.0, **known})


def refresh(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    max_age_s: float = _MAX_AGE_S,
    hasten: bool = False,
    now: Clock = time.time,
) -> JobReport | None:
    """Ask the scheduler how an attempt's job stands, and keep its answer in job.json.

    A job that is over, and whose run has no outcome, gets one: it was killed with its script.
    Where the scheduler cannot be asked (another machine, a scheduler that is down), its last
    answer stands.

    Args:
        max_age_s: an answer younger than this is taken as it is.
        hasten: the run is to go on: see `QueueJob.hasten`.

    Returns:
        The answer; None where no queue has started the attempt.
    """
    job = queue_job(run_dir, attempt)
    if job is None:
        return None
    last = _known(job, attempt, max_age_s, now)
    if last is not None:
        return last
    try:
        report = job.state()
        if hasten:
            job.hasten(report)
    except UserError as error:
        return _unanswered(job, attempt, error, now)
    _keep(job, attempt, report)
    return report


def refresh_all(
    runs: Sequence[RunDir], *, ask_s: float = _GLANCE_S, now: Clock = time.time
) -> dict[Path, JobReport]:
    """How the jobs of many runs stand, as `refresh`; a scheduler that is silent is asked once.

    Args:
        runs: whose last starts are meant.
        ask_s: longest wait for one answer of a scheduler.

    Returns:
        The answers by the folders of the attempts, of those that a queue has started.
    """
    found: dict[Path, JobReport] = {}
    queues: dict[tuple[object, ...], list[tuple[QueueJob, Attempt]]] = defaultdict(list)
    for run_dir in runs:
        attempt = run_dir.last_attempt()
        job = queue_job(run_dir, attempt, ask_s=ask_s) if attempt is not None else None
        if attempt is None or job is None:
            continue
        known = _known(job, attempt, _MAX_AGE_S, now)
        if known is not None:
            found[attempt.path] = known
        else:
            queues[job.queue.name, job.queue.bin_path].append((job, attempt))
    answers, _ = on_all(list(queues.values()), lambda jobs: _ask_together(jobs, now))
    for answer in answers:
        found |= answer or {}
    return found


def _ask_together(jobs: list[tuple[QueueJob, Attempt]], now: Clock) -> Mapping[Path, JobReport]:
    found: dict[Path, JobReport] = {}

    def ask(entry: tuple[QueueJob, Attempt]) -> None:
        job, attempt = entry
        report = job.state()
        found[attempt.path] = report
        with suppress(OSError):  # in another user's directory it cannot be kept
            _keep(job, attempt, report)

    # The others only once the scheduler has answered for the first.
    silence: UserError | None = None
    for some in (jobs[:1], jobs[1:]):
        if silence is None and some:
            _, failures = on_all(some, ask)
            silence = failures[0][1] if failures else None
    for job, attempt in jobs:
        if attempt.path not in found and silence is not None:
            found[attempt.path] = _unanswered(job, attempt, silence, now)
    return found


def _known(job: QueueJob, attempt: Attempt, max_age_s: float, now: Clock) -> JobReport | None:
    last = read_job(attempt)
    if last is None or last.job_id != job.job_id:
        return None
    is_young = 0 <= now() - last.at < max_age_s
    return last if last.state == "ended" or is_young else None


def _unanswered(job: QueueJob, attempt: Attempt, error: UserError, now: Clock) -> JobReport:
    last = read_job(attempt)
    if last is None:
        return JobReport("unknown", error.what, job.job_id, now(), fix=error.fix)
    age = format_duration(max(0.0, now() - last.at))
    return replace(last, reason=f"{last.reason}; that was {age} ago: {error.what}", fix=error.fix)


def _keep(job: QueueJob, attempt: Attempt, report: JobReport) -> None:
    write_record(attempt.job, asdict(report), durable=False)
    if report.state == "ended":
        job.write_outcome(report)
