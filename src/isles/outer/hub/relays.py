"""Which turns of engine gloo go through the rendezvous: of clusters that do not get together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_APART_S = 600.0
"""After so long it is tried again whether they do: a VPN may be up by then."""
_MOST_FAILURES = 3
_KEPT_TURNS = 1000


class Relays:
    """What is known of who can average with whom directly; it dies with this process.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turns: dict[int, str] = {}
        self._apart: dict[frozenset[int], tuple[float, str]] = {}
        self._failures: dict[int, int] = {}
        self._met: set[frozenset[int]] = set()

    def have_met(self, members: Sequence[int]) -> bool:
        """Whether just these have averaged directly, the last time that they tried."""
        return frozenset(members) in self._met

    def succeeded(self, turn: int, members: Sequence[int]) -> None:
        """Members have averaged a turn directly."""
        self._met.add(frozenset(members))
        self._failures.pop(turn, None)

    def failed(
        self, turn: int, members: Sequence[int], pairs: Sequence[frozenset[int]], why: str
    ) -> None:
        """Members could not average a turn directly.

        Args:
            turn: which one.
            members: all of the epoch.
            pairs: of them, those that cannot reach one another, if that is the reason.
            why: in words.
        """
        self._met.discard(frozenset(members))
        self._failures[turn] = self._failures.get(turn, 0) + 1
        found = [*pairs]
        if not found and self._failures[turn] >= _MOST_FAILURES:
            found = [frozenset(members)]
        for group in found:
            self._apart[group] = self._clock() + _APART_S, why

    def begin(self, turn: int, why: str) -> None:
        """From now on this turn goes through the rendezvous, whoever comes and goes."""
        kept = {other: why for other, why in self._turns.items() if other > turn - _KEPT_TURNS}
        self._turns = kept | {turn: why}
        self._failures.pop(turn, None)

    def reason(self, turn: int) -> str | None:
        """Why a turn goes through the rendezvous; None: it does not."""
        return self._turns.get(turn)

    def find_reason(self, members: frozenset[int]) -> str | None:
        """Why turns of these should: some did not get together lately; None: they should not."""
        now = self._clock()
        self._apart = {group: known for group, known in self._apart.items() if known[0] > now}
        found = (why for group, (_, why) in self._apart.items() if group <= members)
        return next(found, None)
