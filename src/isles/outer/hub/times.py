"""Usual time of each cluster per round, as far as others wait for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

from isles.outer.hub.rules import Settings

_LAST = 4
"""Number of rounds of a cluster that determine its usual time."""


class Times:
    """Times that clusters needed for their last rounds; lost when the hub restarts.

    A cluster that contributes later in each round counts with at most twice its shortest time and
    twice the time box. A new name counts as no slower than the known names, so clusters that rejoin
    under other names do not make rounds longer without limit.

    Args:
        settings: settings of the run; `grace_s` is the time box of a quorum.
    """

    def __init__(self, settings: Settings) -> None:
        is_quorum = settings.wait == "quorum"
        self._box_s = settings.grace_s if is_quorum else settings.time_box_s
        self._last_s: dict[str, list[float]] = {}
        self._least_s: dict[str, float] = {}

    def usual_s(self, name: str) -> float:
        """The shortest of its last times; 0 if none is known."""
        return min(self._last_s.get(name, [0.0]))

    def note(self, needed_s: Mapping[str, float], known: Set[str]) -> None:
        """Record the times of a finished round.

        Args:
            needed_s: seconds that its clusters needed, by name.
            known: the names of all clusters; others are forgotten.
        """
        for times in (self._last_s, self._least_s):
            for name in [*times.keys() - known]:
                del times[name]
        new_s = max(self._least_s.values(), default=math.inf)
        for name, seconds in needed_s.items():
            least_s = self._least_s[name] = min(seconds, self._least_s.get(name, new_s))
            last_s = [min(seconds, 2.0 * (least_s + self._box_s)), *self._last_s.get(name, [])]
            self._last_s[name] = last_s[:_LAST]
