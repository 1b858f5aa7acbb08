"""Where a rank is in its step: put down by the step, read by the watchdog's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from isles.run.hang import STAGES

_RECENT_STEPS = 31

_GAP_S = 3.0
"""The watchdog looks twice a second; longer than this between two looks, it was kept from it."""

_BUSY = 0.1
"""Of a gap in which this process has had less of a processor than this, it did not run at all."""


class Moment(NamedTuple):
    """Where a rank is.

    Args:
        phase: step, evaluating or saving; empty: nothing that is watched.
        step: its number.
        stage: the part of the step, or the phase.
        since: when the phase began, by the clock of the `StepClock`.
    """

    phase: str
    step: int
    stage: str
    since: float


class StepClock:
    """A clock is read and a value is put down: that is all it costs a step.

    Args:
        now: seconds that only ever grow. The watchdog and its signs of life take the same.
        busy: seconds of a processor that this process has had.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        busy: Callable[[], float] = time.process_time,
    ) -> None:
        self.now = now
        self.busy = busy
        self.moment = Moment("", 0, "", now())
        self.steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        """Seconds that the last steps have taken."""
        self.longest_evaluation_s = 0.0

    def step(self, step: int) -> None:
        """A step begins."""
        self._leave(Moment("step", step, STAGES[0], self.now()))

    def at(self, stage: str) -> None:
        """A part of the step begins: one of `STAGES`."""
        self.moment = Moment(self.moment.phase, self.moment.step, stage, self.moment.since)

    def begin(self, phase: str) -> None:
        """Something else than a step begins: evaluating, saving."""
        self._leave(Moment(phase, self.moment.step, phase, self.now()))

    def end(self) -> None:
        """It is over."""
        self._leave(Moment("", self.moment.step, "", self.now()))

    def _leave(self, moment: Moment) -> None:
        before, self.moment = self.moment, moment
        took_s = moment.since - before.since
        if before.phase == "step":
            self.steps.append(took_s)
        elif before.phase == "evaluating":
            self.longest_evaluation_s = max(self.longest_evaluation_s, took_s)


class Frozen:
    """Times in which this process did not run: a queue had stopped it, or its machine was paused.

    A gap in which it was busy is none of these: something held the interpreter, and the step.
    """

    def __init__(self, now_s: float, processor_s: float) -> None:
        self._looked = now_s, processor_s
        self._gaps: deque[tuple[float, float]] = deque(maxlen=64)

    def look(self, now_s: float, processor_s: float) -> None:
        """Called every half second, with the clock and the processor time of this process."""
        gap_s, busy_s = now_s - self._looked[0], processor_s - self._looked[1]
        if gap_s > _GAP_S and busy_s < _BUSY * gap_s:
            self._gaps.append((now_s, gap_s))
        self._looked = now_s, processor_s

    def since(self, moment_s: float) -> float:
        """Seconds since then in which it did not run."""
        return sum(gap_s for end_s, gap_s in self._gaps if end_s > moment_s)
