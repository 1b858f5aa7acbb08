"""The job of a run in a scheduler's queue, and how it stands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

JobWord = Literal["pending", "running", "requeued", "ended", "unknown"]
"""requeued: it has run before, and waits to go on. unknown: nobody here can ask."""

ASK_S = 20.0
"""Longest wait for a command of a scheduler, which may be busy for some seconds."""


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
