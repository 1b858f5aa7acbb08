"""What rank 0 tells the ranks of its cluster to do between two inner steps, in this order."""

from __future__ import annotations

from dataclasses import dataclass

from isles.outer.link.messages import (
    Claimed,
    Committed,
    Donate,
    Ended,
    Interval,
    Reset,
    SamplesLost,
    StateReady,
)


@dataclass(frozen=True, slots=True)
class Contribute:
    """Make this cluster's contribution to a turn."""

    turn: int


@dataclass(frozen=True, slots=True)
class Take:
    """Take in the average of a turn.

    Args:
        event: what is known of it.
        step: the number that the last step has at least, from then on.
    """

    event: Committed
    step: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take over another cluster's state.

    Args:
        event: where it is.
        step: as in `Take`.
    """

    event: StateReady
    step: int


@dataclass(frozen=True, slots=True)
class UseReserve:
    """Go on with samples that nobody deals, as long as the rendezvous is away."""

    count: int


Order = Contribute | Take | Adopt | UseReserve | Claimed | SamplesLost | Donate | Reset | Ended


@dataclass(frozen=True, slots=True)
class Sent:
    """A contribution that no average has answered yet.

    Args:
        turn: to which turn.
        tokens: its weight.
        inner_steps: in it.
        samples: that it reports.
        steps: inner steps of this cluster when it was made.
        norm: of the pseudo-gradient; not known while it is encoded.
    """

    turn: int
    tokens: int
    inner_steps: int
    samples: tuple[Interval, ...]
    steps: int

    def record(self) -> dict[str, object]:
        """For a manifest."""
        return {
            "turn": self.turn,
            "tokens": self.tokens,
            "inner_steps": self.inner_steps,
            "samples": [list(span) for span in self.samples],
            "steps": self.steps,
        }


def sent_from(record: dict[str, object]) -> Sent:
    """What a manifest says."""
    found: dict[str, int] = {
        name: int(record[name])  # type: ignore[call-overload]  # of our own manifest
        for name in ("turn", "tokens", "inner_steps", "steps")
    }
    spans = record["samples"]
    assert isinstance(spans, list)
    return Sent(**found, samples=tuple((int(a), int(b)) for a, b in spans))
