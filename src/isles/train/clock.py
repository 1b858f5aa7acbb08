"""Where a rank is in its step, for its watchdog and for whoever watches the run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from isles.run.hang import STAGES

_RECENT_STEPS = 31


class Moment(NamedTuple):
    """Where a rank is.

    Args:
        phase: step, evaluating or saving; empty: nothing that is watched.
        step: its number.
        stage: the part of the step, or the phase.
        since: when the phase began, by the clock of the `StepClock`.
        stage_since: the same of the stage.
    """

    phase: str
    step: int
    stage: str
    since: float
    stage_since: float


class StepClock:
    """Where this rank is in its step. An update reads a clock and stores a value, nothing else.

    Args:
        now: monotonic clock, seconds; the watchdog uses the same.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.moment = Moment("", 0, "", began := now(), began)
        self.steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds that the last steps have taken."""
        self.longest_evaluation_s = 0.0

    def step(self, step: int) -> None:
        """A step begins."""
        self._leave("step", step, STAGES[0])

    def at(self, stage: str) -> None:
        """A part of the step begins: one of `STAGES`."""
        self.moment = self.moment._replace(stage=stage, stage_since=self.now())

    def begin(self, phase: str) -> None:
        """Another phase than a step begins: evaluating, saving."""
        self._leave(phase, self.moment.step, phase)

    def end(self) -> None:
        """That phase is over."""
        self._leave("", self.moment.step, "")

    def _leave(self, phase: str, step: int, stage: str) -> None:
        now = self.now()
        before, self.moment = self.moment, Moment(phase, step, stage, now, now)
        took_s = now - before.since
        if before.phase == "step":
            self.steps.append(took_s)
        elif before.phase == "evaluating":
            self.longest_evaluation_s = max(self.longest_evaluation_s, took_s)
