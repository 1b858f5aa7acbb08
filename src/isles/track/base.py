"""The seam for curves, and the rule that a tracker never stops training."""

from __future__ import annotations

import logging
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes rows of numbers. Rank 0 only."""

    def log(self, row: dict[str, Any]) -> None:
        """One row: `kind` (train or eval), `step`, and numbers by name."""
        ...

    def close(self) -> None:
        """Write what is still in memory."""
        ...


class Trackers:
    """Several trackers as one; one that fails is named once and left out from then on."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = trackers

    def log(self, row: dict[str, Any]) -> None:
        """Hand a row to every tracker."""
        for tracker in list(self._trackers):
            try:
                tracker.log(row)
            except Exception:  # a curve is not worth a run; the traceback says why
                self._leave_out(tracker)

    def close(self) -> None:
        """Close every tracker."""
        for tracker in list(self._trackers):
            try:
                tracker.close()
            except Exception:  # as above
                self._leave_out(tracker)

    def _leave_out(self, tracker: Tracker) -> None:
        name = type(tracker).__name__
        log.warning("%s failed and is left out; training goes on", name, exc_info=True)
        self._trackers.remove(tracker)
