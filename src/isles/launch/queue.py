"""What a scheduler says about the job of a run: asked, kept in job.json, put into words."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from isles.errors import UserError
from isles.facts.units import format_duration
from isles.launch.shell import on_all
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record

JobWord = Literal["pending", "running", "requeued", "ended", "unknown"]
"""requeued: it has run before, and waits to go on. unknown: nobody here can ask."""

_MAX_AGE_S = 4.0
"""A word so young is not asked for again: a scheduler has better to do."""

ASK_S = 20.0
"""Longest wait for a command of a scheduler, which may be busy for some seconds."""

_GLANCE_S = 5.0
"""The same where many runs are shown at once, and what is known already will do."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class JobReport:
    """How a job stands.

    Args:
        state: in one word.
        reason: in words: why it waits, where it runs, or how it ended.
        job_id: its number, as the scheduler's commands take it.
        at: when the scheduler was asked, in seconds since the epoch.
        word: the scheduler's own words, such as `PENDING Resources`.
        nodes: the nodes that it has, as the scheduler writes them.
        fix: what can be done; empty where nothing needs to be.
        starts_at: when it may start at the earliest; None: not said.
    """

    state: JobWord
    reason: str
    job_id: str
    at: float
    word: str = ""
    nodes: str = ""
    fix: str = ""
    starts_at: float | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or will."""
        return self.state in ("pending", "running", "requeued")

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


class QueueJob(Protocol):
    """The job of one start of a run."""

    @property
    def job_id(self) -> str:
        """Its number, as the scheduler's commands take it."""
        ...

    @property
    def text(self) -> str:
        """For messages, such as `Slurm job 4711`."""
        ...

    def state(self) -> JobReport:
        """How it stands now; this look changes nothing.

        Raises:
            PreflightError: the scheduler's commands are not here, or do not answer in time.
        """
        ...

    def hasten(self, report: JobReport) -> None:
        """Let it start at once where the scheduler holds it only because it was queued again.

        For who has asked for the run to go on, never for who looks.
        """
        ...

    def cancel(self, *, now: bool) -> None:
        """End it: with `now` at once; else it saves first, if it runs.

        Raises:
            UserError: the scheduler refuses, or does not answer in time.
        """
        ...

    def ended(self, report: JobReport) -> dict[str, Any]:
        """The outcome record of a job that is over, and whose run has left none."""
        ...


def queue_job(run_dir: RunDir, attempt: Attempt, *, ask_s: float = ASK_S) -> QueueJob | None:
    """The job of an attempt; None where no queue has started it.

    Args:
        run_dir: the run.
        attempt: a start of it.
        ask_s: longest wait for one answer of the scheduler.
    """
    launch = read_record(attempt.launch) or {}
    if not launch.get("job_id"):
        return None
    match launch.get("launcher"):
        case "slurm":
            from isles.launch.slurm_queue import SlurmJob

            return SlurmJob.of(run_dir, attempt, launch, ask_s=ask_s)
        case "pbs":
            from isles.launch.pbs_queue import PbsJob

            return PbsJob.of(run_dir, attempt, launch, ask_s=ask_s)
        case _:
            return None


def read_job(attempt: Attempt) -> JobReport | None:
    """What the scheduler said when it was last asked; None where it never was."""
    record = read_record(attempt.job)
    if record is None or "state" not in record:
        return None
    known = {name: record[name] for name in JobReport.__dataclass_fields__ if name in record}
    return JobReport(**{"reason": "", "job_id": "", "at": 0.0, **known})


def write_job(attempt: Attempt, report: JobReport) -> None:
    """Keep what the scheduler said, for who cannot ask it."""
    write_record(attempt.job, report.record(), durable=False)


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
    Where the scheduler cannot be asked (another machine, a scheduler that is down), what it said
    last stands.

    Args:
        run_dir: the run.
        attempt: a start of it.
        max_age_s: an answer so young is taken as it is.
        hasten: the run is to go on: see `QueueJob.hasten`.
        now: the clock.

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
    """How the jobs of many runs stand, as `refresh`: a scheduler that is silent is asked once.

    Args:
        runs: whose last starts are meant.
        ask_s: longest wait for one answer of a scheduler.
        now: the clock.

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
            launch = read_record(attempt.launch) or {}
            queues[launch["launcher"], launch.get("bin_path")].append((job, attempt))
    answers, _ = on_all(list(queues.values()), lambda jobs: _ask_together(jobs, now))
    for answer in answers:
        found |= answer or {}
    return found


def _ask_together(jobs: list[tuple[QueueJob, Attempt]], now: Clock) -> Mapping[Path, JobReport]:
    """Ask one scheduler about its jobs: the others only once it has answered for the first."""
    found: dict[Path, JobReport] = {}

    def ask(entry: tuple[QueueJob, Attempt]) -> None:
        job, attempt = entry
        report = job.state()
        found[attempt.path] = report
        with suppress(OSError):  # in somebody else's directory it cannot be kept
            _keep(job, attempt, report)

    silence: UserError | None = None
    for some in (jobs[:1], jobs[1:]):
        if silence is None and some:
            _, faults = on_all(some, ask)
            silence = faults[0][1] if faults else None
    for job, attempt in jobs:
        if attempt.path not in found and silence is not None:
            found[attempt.path] = _unanswered(job, attempt, silence, now)
    return found


def _known(job: QueueJob, attempt: Attempt, max_age_s: float, now: Clock) -> JobReport | None:
    """What it said last, if that still holds."""
    last = read_job(attempt)
    if last is None or last.job_id != job.job_id:
        return None
    is_young = 0 <= now() - last.at < max_age_s
    return last if last.state == "ended" or is_young else None


def _unanswered(job: QueueJob, attempt: Attempt, error: UserError, now: Clock) -> JobReport:
    """What it said last stands, with the time of it."""
    last = read_job(attempt)
    if last is None:
        return JobReport("unknown", error.what, job.job_id, now(), fix=error.fix)
    age = format_duration(max(0.0, now() - last.at))
    return replace(last, reason=f"{last.reason}; that was {age} ago: {error.what}", fix=error.fix)


def _keep(job: QueueJob, attempt: Attempt, report: JobReport) -> None:
    write_job(attempt, report)
    if report.state == "ended" and not attempt.outcome.exists():
        write_record(attempt.outcome, job.ended(report))
