"""How often the nodes of a run give a sign of life, and how long each end waits for one.

The times are those of the coordinator and of the agents alike, so that both come to the same end: a
node that the head takes for lost has ended its ranks by itself.
"""

from __future__ import annotations

SIGN_EVERY_S = 1.0
"""Each end of a connection says something at least so often."""

RECONNECT_AFTER_S = 4.0
"""An agent that has heard nothing for so long opens a second connection in place of the first."""

LOST_AFTER_S = 20.0
"""A node that has not been heard of for so long is lost: switched off, or its network is cut. A cut
or a freeze that is shorter costs nothing but its own time."""

GONE_AFTER_S = 4.0
"""A process that has closed its connection, and does not come back for so long, has ended."""

HELLO_S = 10.0
"""Longest wait for the first word on a new connection."""

END_GRACE_S = 5.0
"""What is left of a rank so long after it was told to end is killed."""

WAITING_EVERY_S = 5.0
"""How often the head says whom it waits for."""

CLOSING_S = 60.0
"""How long agents may take to end once the run has its outcome."""


class Silence:
    """Seconds since something was heard, as this process has lived through them.

    A process that was frozen for a minute has heard nothing in that minute, and must not take it
    for the silence of the others: a long gap between two looks counts as a short one.
    """

    _LONGEST_GAP_S = 2.5

    def __init__(self, now_s: float) -> None:
        self._looked_at = now_s
        self.seconds = 0.0

    def heard(self) -> None:
        """Something was heard just now."""
        self.seconds = 0.0

    def look(self, now_s: float) -> float:
        """Seconds of silence up to now."""
        self.seconds += min(now_s - self._looked_at, self._LONGEST_GAP_S)
        self._looked_at = now_s
        return self.seconds
