"""Finds the stragglers: ranks that the others of their cluster wait for, again and again."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from isles.run.hang import STAGES

_CLEAR, _PLAIN = 0.25, 0.10
"""Part of a step that the others wait. A rank is a straggler if the part is above the first value
in two consecutive looks, or if the medians of five looks and of the five before are above the
second."""

_KEPT = 0.5
"""A straggler stays marked until the median wait of three looks is below this part of the limit."""

_MEDIAN_OF, _KEEPS = 5, 3
_LATE_S, _LATE_STEPS = 5.0, 3.0
"""A rank is late once one stage of a step takes this many seconds and this many steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """The last step that a rank has timed.

    Args:
        communication_s: communication, with the wait for other ranks.
        step_s: the whole step.
    """

    communication_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Stage:
    """Current stage of a rank, and its duration so far."""

    step: int
    stage: str
    since_s: float


class Waits:
    """The last steps of the ranks of one cluster, as seen at each look.

    The others wait for the rank that communicates least. Equally fast ranks change places at
    random, so a rank is marked only if the difference is large and repeats (`_CLEAR`, `_PLAIN`).
    The first look marks no rank.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[Step]] = {}
        self._marked: set[int] = set()
        self.step_s: dict[int, float] = {}
        """Seconds of the whole step, with waits, of each rank in the last look."""

    def look(self, steps: Mapping[int, Step]) -> dict[int, float]:
        """Add the newest steps. Returns the stragglers, with the seconds that others wait."""
        if self._seen.keys() != steps.keys():
            self._seen = {rank: deque(maxlen=2 * _MEDIAN_OF) for rank in steps}
            self._marked.clear()
        for rank, step in steps.items():
            seen = self._seen[rank]
            if not seen or seen[-1] != step:
                seen.append(step)
        if len(steps) < 2:
            return {}
        num = min(map(len, self._seen.values()))
        now, last = self._behind(1, 0, _CLEAR), self._behind(2, 1, _CLEAR)
        clear = now.keys() & last.keys() if num > 1 else now.keys()
        recent = self._behind(_KEEPS, 0, _PLAIN * _KEPT)
        plain, steady = set[int](), self._behind(_MEDIAN_OF, 0, _PLAIN)
        if num == 2 * _MEDIAN_OF:
            plain = steady.keys() & self._behind(num, _MEDIAN_OF, _PLAIN).keys()
        self._marked = clear | plain | (self._marked & recent.keys())
        both = {**now, **recent, **steady}
        self.step_s = {rank: both[rank][1] for rank in self._marked}
        return {rank: both[rank][0] for rank in sorted(self._marked)}

    def _behind(self, first: int, last: int, share: float) -> dict[int, tuple[float, float]]:
        # Ranks for which the others have waited for this share of a step, by the medians of the
        # looks from one to another, counted from the newest.
        middle = {}
        for rank, seen in self._seen.items():
            steps = list(seen)[-first : len(seen) - last] or [seen[-1]]
            middle[rank] = Step(
                statistics.median(step.communication_s for step in steps),
                statistics.median(step.step_s for step in steps),
            )
        return _waits(middle, share)


def _waits(steps: Mapping[int, Step], share: float) -> dict[int, tuple[float, float]]:
    # Seconds of waiting, and of the step in which they were.
    # Half of the ranks or more wait: of two slow ranks on one host both are named.
    least_s = min(step.communication_s for step in steps.values())
    waits = {rank: step.communication_s - least_s for rank, step in steps.items()}
    typical_s = sorted(waits.values())[len(waits) // 2]
    step_s = max(step.step_s for step in steps.values())
    if step_s <= 0 or typical_s < share * step_s:
        return {}
    return {
        rank: (typical_s - wait, step_s) for rank, wait in waits.items() if wait < typical_s / 2
    }


def late(stages: Mapping[int, Stage], step_s: float | None) -> dict[int, Stage]:
    """Ranks that all others have passed in the present step, and that do not move."""
    known = {rank: stage for rank, stage in stages.items() if stage.stage in STAGES}
    if len(known) < 2 or len(known) < len(stages):
        return {}
    places = {rank: (s.step, STAGES.index(s.stage)) for rank, s in known.items()}
    first, last = min(places.values()), max(places.values())
    limit_s = max(_LATE_S, _LATE_STEPS * (step_s or 0.0))
    behind = {rank: known[rank] for rank, place in places.items() if place == first}
    is_still = all(stage.since_s > limit_s for stage in known.values())
    return behind if first != last and is_still and 2 * len(behind) <= len(known) else {}
