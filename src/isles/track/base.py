"""The seams for curves, and the rule that a tracker never stops training."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from isles.track.background import Background

log = logging.getLogger(__name__)

Row = dict[str, Any]
"""One recorded step or evaluation: `kind` (train or eval), `step`, `at`, and numbers by name."""

CLOSE_S = 30.0
"""Longest wait for all trackers together, once training is over."""
_SAY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a tracker shows of a run besides its curves; there are no secrets in it.

    Args:
        name: the run's name.
        folder: the run directory.
        config: every value of the run file by its dotted key, defaults filled in.
        about: versions, ranks, device, strategy.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """Takes rows of numbers, at once: it writes to a disk of this machine. Rank 0 only."""

    def log(self, row: Row) -> None:
        """Write one row."""
        ...

    def close(self) -> None:
        """Write what is still in memory."""
        ...


class Trackers:
    """Several trackers as one; one that fails is named once, and training goes on.

    Args:
        trackers: written to at once; one that fails is left out from then on.
        remote: behind a thread each; see `Background`.
        say: takes a line for the user.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        remote: Sequence[Background] = (),
        say: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._trackers = list(trackers)
        self._remote = tuple(remote)
        self._say = say

    def log(self, row: Row) -> None:
        """Hand a row to every tracker."""
        for tracker in list(self._trackers):
            try:
                tracker.log(row)
            except Exception as error:  # a curve is not worth a run; the traceback says why
                self._leave_out(tracker, error)
        for remote in self._remote:
            remote.log(row)

    def close(self, summary: dict[str, Any] | None = None, *, timeout_s: float = CLOSE_S) -> None:
        """Close every tracker; those behind a thread have `timeout_s` together.

        Args:
            summary: the final figures; None: the run has stopped, and will go on.
            timeout_s: longest wait.
        """
        end = time.monotonic() + timeout_s
        for remote in self._remote:
            remote.begin_close(summary)
        for tracker in list(self._trackers):
            try:
                tracker.close()
            except Exception as error:  # as above
                self._leave_out(tracker, error)
        soon = min(end, time.monotonic() + _SAY_AFTER_S)
        late = [remote.name for remote in self._remote if not remote.wait(soon)]
        if late:
            self._say(f"waiting for {' and '.join(late)}, {timeout_s:.0f}s at most")
        for remote in self._remote:
            remote.end_close(end)

    def _leave_out(self, tracker: Tracker, error: Exception) -> None:
        name = type(tracker).__name__.removesuffix("Tracker")
        log.info("%s failed", name, exc_info=error)
        self._say(f"{name} failed and is left out; training goes on: {error}")
        self._trackers.remove(tracker)
