"""The position of a rank within its step, for its watchdog and for the run's watchers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from isles.run.hang import STAGES

_RECENT_STEPS = 31


class CurrentStage(NamedTuple):
    """The position of a rank.

    Args:
        phase: step, evaluating or saving; empty: not watched.
        step: number of the step.
        stage: part of the step; outside a step the phase.
        since: when the phase began, by the clock of the `StepClock`.
        stage_since: when the stage began, by the same clock.
    """

    phase: str
    step: int
    stage: str
    since: float
    stage_since: float


class StepClock:
    """The position of this rank in its step. An update only reads a clock and stores a value.

    Args:
        now: monotonic clock, seconds; the watchdog uses the same.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.moment = CurrentStage("", 0, "", began := now(), began)
        self.steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds that each of the last steps took."""
        self.longest_evaluation_s = 0.0

    def step(self, step: int) -> None:
        """A step begins."""
        self._leave("step", step, STAGES[0])

    def at(self, stage: str) -> None:
        """Start a part of the step: one of `STAGES`."""
        self.moment = self.moment._replace(stage=stage, stage_since=self.now())

    def begin(self, phase: str) -> None:
        """Start a phase outside a step: evaluating or saving."""
        self._leave(phase, self.moment.step, phase)

    def end(self) -> None:
        """End the phase."""
        self._leave("", self.moment.step, "")

    def _leave(self, phase: str, step: int, stage: str) -> None:
        now = self.now()
        before, self.moment = self.moment, CurrentStage(phase, step, stage, now, now)
        took_s = now - before.since
        if before.phase == "step":
            self.steps.append(took_s)
        elif before.phase == "evaluating":
            self.longest_evaluation_s = max(self.longest_evaluation_s, took_s)
