"""The hub of a simulated run: members, rounds, and work of its threads."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from isles.plan.simulate.member import Member
from isles.plan.simulate.setting import KEPT_AVERAGES, NUMBER_THREADS, SimulationSettings


@dataclass(slots=True)
class RoundPart:
    """Contribution of equal clusters to a round: their number, and the inner steps of each."""

    count: int
    inner: float


@dataclass(slots=True)
class Round:
    """An open outer step at the hub.

    Args:
        first_at: time when the first contribution was complete.
        last_begun: time when the newest of its contributions was made.
        quorum_at: time when there were enough contributions for `quorum`.
    """

    parts: dict[Member, RoundPart] = field(default_factory=dict)
    first_at: float | None = None
    first_begun: float = 0.0
    last_begun: float = 0.0
    quorum_at: float | None = None
    is_closed: bool = False

    @property
    def num_parts(self) -> int:
        return sum(part.count for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class Committed:
    """A committed outer step, for the report."""

    outer_step: int
    first_begun: float
    last_begun: float
    at: float
    num_parts: int


class Threads:
    """The threads of the hub that measure and average: first come, first served."""

    def __init__(self) -> None:
        self.number = NUMBER_THREADS
        self._free_at = [0.0] * self.number
        self.busy_s = 0.0

    def take(self, now: float, seconds: float, count: int = 1) -> float:
        """End of `count` jobs of equal length that arrive now."""
        self.busy_s += seconds * count
        if count > self.number:  # the jobs fill all threads
            begin = sum(max(now, free) for free in self._free_at) / self.number
            end = begin + seconds * count / self.number
            self._free_at = [end] * self.number
            return end
        for _ in range(count):
            end = max(now, self._free_at[0]) + seconds
            heapq.heapreplace(self._free_at, end)
        return end


class Hub:
    """Rounds by outer step, and the rule that closes them; see `isles.outer.hub.rounds`."""

    def __init__(self, setting: SimulationSettings) -> None:
        self._setting = setting
        self.next = 0
        """The next outer step to commit."""
        self.rounds: dict[int, Round] = {}
        self.living: dict[Member, None] = {}
        self.committed: list[Committed] = []
        self.threads = Threads()
        self.is_away = False
        self.kept: dict[int, int] = {}
        """Number of parts of each available average, by outer step."""
        self._missing: Member | None = None
        self.state_version = -1
        """Version of the newest state that a cluster has uploaded."""
        self.is_state_coming = False

    @property
    def kept_since(self) -> int:
        return max(0, self.next - KEPT_AVERAGES)

    def round(self, outer_step: int) -> Round:
        return self.rounds.setdefault(outer_step, Round())

    def first_round(self) -> int:
        """First round that waits for a member that joins now."""
        current = self.rounds.get(self.next)
        return self.next + int(current is not None and bool(current.parts))

    def admit(self, member: Member) -> None:
        """Add a member after its first heartbeat, or after a silence."""
        if not member.is_living:
            member.is_living = True
            member.from_round = self.first_round()
        self.living[member] = None

    def drop(self, member: Member) -> None:
        member.is_living = False
        self.living.pop(member, None)

    def is_expected(self, member: Member) -> bool:
        return not (member.is_behind or member.is_finished) and member.from_round <= self.next

    def waits(self) -> bool:
        """True if the next round waits for a member whose contribution is missing."""
        parts = self.round(self.next).parts
        known = self._missing  # a member that was missing before is usually still missing
        if known and known in self.living and known not in parts and self.is_expected(known):
            return True
        for member in self.living:
            if member not in parts and self.is_expected(member):
                self._missing = member
                return True
        self._missing = None
        return False

    def due_at(self) -> float | None:
        """Time when the next round closes without missing members. None: not decided yet."""
        current, setting = self.round(self.next), self._setting
        if setting.wait == "time_boxed" and current.first_at is not None:
            return current.first_at + setting.time_box_s
        if setting.wait == "quorum" and current.quorum_at is not None:
            return current.quorum_at + setting.grace_s
        return None

    def is_time(self, now: float) -> bool:
        """True if it is time to close the next round."""
        current = self.rounds.get(self.next)
        if current is None or current.is_closed or not current.parts or self.is_away:
            return False
        if current.num_parts < self._least():
            return False
        due = self.due_at()
        return (due is not None and now >= due - 1e-9) or not self.waits()

    def _least(self) -> int:
        goes_on = sum(m.count for m in self.living if not m.is_finished)
        finished = any(m.is_finished for m in self.living)
        least = self._setting.min_clusters
        return max(1, min(least, goes_on)) if finished else least

    def take(self, member: Member, outer_step: int, inner: float, begun: float, at: float) -> bool:
        """Add a complete contribution. False: its round is over."""
        current = self.round(outer_step)
        if outer_step < self.next or current.is_closed:
            return False
        current.parts[member] = RoundPart(member.count, inner)
        if current.first_at is None:
            current.first_at, current.first_begun = at, begun
        current.first_begun = min(current.first_begun, begun)
        current.last_begun = max(current.last_begun, begun)
        if current.quorum_at is None and current.num_parts >= self._setting.quorum:
            current.quorum_at = at
        return True

    def split(self, member: Member, one: Member) -> None:
        """Register one of a member's clusters as a separate member."""
        if member in self.living:
            self.living[one] = None
        for current in self.rounds.values():
            if (part := current.parts.get(member)) is not None:
                part.count -= 1
                current.parts[one] = RoundPart(1, part.inner)

    def merge(self, member: Member, into: Member) -> None:
        """Merge a member into another member."""
        self.living.pop(member, None)
        for current in self.rounds.values():
            if (part := current.parts.pop(member, None)) is not None:
                whole = current.parts.setdefault(into, RoundPart(0, part.inner))
                count = whole.count + part.count
                whole.inner = (whole.inner * whole.count + part.inner * part.count) / count
                whole.count = count

    def commit(self, now: float) -> Round:
        """Commit the next round, whose average is on the disk."""
        done = self.rounds.pop(self.next)
        self.committed.append(
            Committed(self.next, done.first_begun, done.last_begun, now, done.num_parts)
        )
        self.kept[self.next] = done.num_parts
        self.next += 1
        self.kept.pop(self.next - 1 - 2 * KEPT_AVERAGES, None)
        return done
