"""What a scheduler says about the job of a run: asked, kept in job.json, put into words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from isles.errors import UserError
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.records import read_record, write_record

JobWord = Literal["pending", "running", "requeued", "ended", "unknown"]
"""requeued: it has run before, and waits to go on. unknown: nobody here can ask."""

_MAX_AGE_S = 4.0
"""A word so young is not asked for again: a scheduler has better to do."""

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
    """

    state: JobWord
    reason: str
    job_id: str
    at: float
    word: str = ""
    nodes: str = ""
    fix: str = ""

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
        """How it stands now.

        Raises:
            PreflightError: the scheduler's commands are not here, or do not answer in time.
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


def queue_job(run_dir: RunDir, attempt: Attempt) -> QueueJob | None:
    """The job of an attempt; None where no queue has started it."""
    launch = read_record(attempt.launch) or {}
    if not launch.get("job_id"):
        return None
    match launch.get("launcher"):
        case "slurm":
            from isles.launch.slurm_queue import SlurmJob

            return SlurmJob.of(run_dir, attempt, launch)
        case "pbs":
            from isles.launch.pbs_queue import PbsJob

            return PbsJob.of(run_dir, attempt, launch)
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
        now: the clock.

    Returns:
        The answer; None where no queue has started the attempt.
    """
    job = queue_job(run_dir, attempt)
    if job is None:
        return None
    last = read_job(attempt)
    if last is not None and last.job_id == job.job_id:
        age_s = now() - last.at
        if last.state == "ended" or 0 <= age_s < max_age_s:
            return last
    try:
        report = job.state()
    except UserError as error:
        return last or JobReport("unknown", error.what, job.job_id, now(), fix=error.fix)
    write_job(attempt, report)
    if report.state == "ended" and not attempt.outcome.exists():
        write_record(attempt.outcome, job.ended(report))
    return report
