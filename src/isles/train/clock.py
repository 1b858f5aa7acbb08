"""The position of a rank within its step, for its watchdog and for the run's watchers, and the
seconds of the parts of a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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

    def forget(self) -> None:
        """The next steps may take longer than the last steps, as the first steps of a run."""
        self.steps.clear()

    def _leave(self, phase: str, step: int, stage: str) -> None:
        now = self.now()
        before, self.moment = self.moment, CurrentStage(phase, step, stage, now, now)
        took_s = now - before.since
        if before.phase == "step":
            self.steps.append(took_s)
        elif before.phase == "evaluating":
            self.longest_evaluation_s = max(self.longest_evaluation_s, took_s)


class Laps:
    """Seconds of consecutive parts. Nothing waits for a GPU before `take`.

    Args:
        mark: notes a time, for a GPU as an event in its stream.
        between: seconds between two marks. May wait for the second.
    """

    def __init__(
        self,
        mark: Callable[[], Any] = time.perf_counter,
        between: Callable[[Any, Any], float] = lambda begin, end: end - begin,
    ) -> None:
        self._mark, self._between = mark, between
        self._begin: Any = None
        self._found: list[tuple[str, Any, Any]] = []

    def begin(self) -> None:
        """The first part begins."""
        self._begin = self._mark()

    def end(self, part: str) -> None:
        """A part ends, and the next begins."""
        now = self._mark()
        self._found.append((part, self._begin, now))
        self._begin = now

    def take(self) -> list[tuple[str, float]]:
        """Names and seconds of the parts since the last call, in order."""
        found, self._found = self._found, []
        return [(part, self._between(begin, end)) for part, begin, end in found]


def gpu_laps() -> Laps:
    """Laps of the current GPU: what its stream spends in each part."""

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return Laps(mark, between)
