"""What rank 0 must remember for a side process that is started again: nothing is said twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from isles.outer.link.messages import (
    Adopted,
    Alive,
    Begin,
    Claimed,
    ClaimSamples,
    Committed,
    Contribute,
    Event,
    Interval,
    Joined,
    KeepSince,
    Member,
    Obeyed,
    Progress,
    Reset,
    SamplesLost,
)
from isles.outer.link.settings import LinkSettings
from isles.outer.spans import joined, without


class Account:
    """Where a cluster stands; whoever uses it holds a lock.

    Args:
        version: turns applied.
        outer_params: digest of each fragment's outer parameters.
        holding: samples that are in no average.
    """

    def __init__(
        self, version: int, outer_params: Sequence[str], holding: Sequence[Interval]
    ) -> None:
        self._version, self._outer_params = version, list(outer_params)
        self._kept_since = version
        self.holding = joined(holding)
        """Samples of this cluster that no average has."""
        self.contributions: dict[int, Contribute] = {}
        """Those that are decided in no turn yet."""
        self._claims: dict[int, ClaimSamples] = {}
        self._num_claims = 0
        self._delivered = version
        self._reset = self._obeyed = ""
        self._has_joined = False

    def begin(
        self,
        member: Member,
        settings: LinkSettings,
        join_file: Path,
        spool: Path,
        progress: Progress,
    ) -> Begin:
        """What a side process is told first."""
        return Begin(
            member=member,
            settings=settings,
            join_file=join_file,
            spool=spool,
            version=self._version,
            kept_since=self._kept_since,
            outer_params=tuple(self._outer_params),
            holding=tuple(self.holding),
            contributions=tuple(self.contributions[turn] for turn in sorted(self.contributions)),
            claims=tuple(self._claims[number] for number in sorted(self._claims)),
            obeyed=self._obeyed,
            has_joined=self._has_joined,
            progress=progress,
        )

    # What rank 0 has done.

    def applied(self, turn: int, digest: str) -> None:
        """An average was applied."""
        self._version = turn + 1
        self.contributions.pop(turn, None)  # one that came after the turn was decided
        self._outer_params[turn % len(self._outer_params)] = digest

    def claim(self, num_samples: int) -> ClaimSamples:
        """Samples are needed."""
        self._num_claims += 1
        command = ClaimSamples(number=self._num_claims, num_samples=num_samples)
        self._claims[command.number] = command
        return command

    def adopted(self, version: int, outer_params: Sequence[str]) -> Adopted:
        """Another cluster's state was taken over; contributions under way are void."""
        self._version = self._delivered = version
        self._outer_params = list(outer_params)
        self.contributions.clear()
        return Adopted(
            version=version, outer_params=tuple(outer_params), holding=tuple(self.holding)
        )

    def keep_since(self, version: int) -> KeepSince:
        """A checkpoint is whole."""
        self._kept_since = version
        return KeepSince(version=version)

    def obey(self) -> Obeyed:
        """The weights are the outer parameters again."""
        self._obeyed = self._reset
        return Obeyed(why=self._obeyed)

    # What the side process has said.

    def take(self, event: Event | Alive) -> Event | None:
        """The event as rank 0 is to hear it; None: not at all."""
        match event:
            case Alive():
                return None
            case Joined():
                self._has_joined = True
            case Committed():
                return self._take_turn(event)
            case Claimed():
                if self._claims.pop(event.number, None) is None:
                    return None
                self.holding = joined([*self.holding, *event.samples])
            case SamplesLost():
                # What was contributed is counted there, or comes back with a refusal.
                pending = [span for own in self.contributions.values() for span in own.samples]
                gone = without(event.samples, pending)
                self.holding = without(self.holding, gone)
                return SamplesLost(samples=tuple(gone)) if gone else None
            case Reset():
                if event.why in (self._obeyed, self._reset):
                    return None
                self._reset = event.why
            case _:
                pass
        return event

    def _take_turn(self, event: Committed) -> Committed | None:
        """A side process that was started again says once more what was not applied yet."""
        if event.turn < self._delivered:
            return None
        self._delivered = event.turn + 1
        own = self.contributions.pop(event.turn, None)
        if own is None:
            # An earlier attempt has made it, or it was made of outer parameters since replaced.
            return replace(event, is_in=False)
        if event.is_in:
            self.holding = without(self.holding, own.samples)
        return event
