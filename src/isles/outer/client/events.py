"""What rank 0 hears of the other clusters, and what it tells them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from isles.outer.messages import Standing

log = logging.getLogger(__name__)


Interval = tuple[int, int]
"""Samples from a number up to, without, another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Who a cluster is, and what it averages.

    Args:
        name: of the cluster.
        member_id: 32 hexadecimal digits, made once and kept in the run directory.
        identity: what must be equal on all clusters, by its name: digest of the layout, the outer
            settings …; where they differ the hub names the key and both values.
        codec: of contributions, as `Codec.text` says it.
        pieces: of each fragment the numbers in its pieces.
    """

    name: str
    member_id: str
    identity: dict[str, str]
    codec: str
    pieces: list[list[int]]


@dataclass(frozen=True, slots=True)
class HivemindSettings:
    """How a cluster finds the others without a hub that was started for them.

    Args:
        run: name of the run.
        rules: of the run, as a hub is told (`isles.outer.hub.rules.Settings`).
        initial_peers: multiaddresses of peers to begin with; none: the others begin with this one.
        host_maddrs: where it listens.
        announce_maddrs: what it tells the others, where that is something else.
        identity_path: private key; None: one is made and kept in the spool.
        secret_file: holds what all clusters of the run share; None: anybody may come.
        relay: reach others, and be reached, through public or other relays.
        nat: ask the router to let others in.
    """

    run: str
    rules: dict[str, str | int | float]
    initial_peers: tuple[str, ...] = ()
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    identity_path: str | None = None
    secret_file: str | None = None
    relay: bool = False
    nat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How a cluster reaches the hub.

    Args:
        connections: so many chunks travel at a time.
        max_bytes_per_s: limit on what is sent, and on what is fetched, on the wire; 0: none.
        beat_s: between two heartbeats.
        hivemind: the hub is in one of the clusters; None: it was started by itself.
    """

    connections: int = 4
    max_bytes_per_s: float = 0.0
    beat_s: float = 2.0
    hivemind: HivemindSettings | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """A contribution that no average has answered yet.

    Args:
        turn: to which turn.
        tokens: its weight: what the pseudo-gradient was trained on, at least 1.
        inner_steps: in it.
        samples: trained on since the last contribution to any fragment, and those of earlier
            contributions that are in no average.
        steps: inner steps of this cluster when it was made.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the others are told of this cluster: see `isles.outer.messages.Beat`."""

    step: int = 0
    since: int = 0
    tokens_per_s: float = 0.0
    phase: str = ""
    pace: int = 0
    loss: float | None = None
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    ends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The hub has let this cluster in; also each time that it has joined anew.

    Args:
        standing: first: its weights are the run's. current: go on. late: the averages that it
            missed follow, one `Committed` each. behind: see `Behind`.
        turn: the next to be committed: so many have been.
        from_turn: the first that waits for this cluster.
    """

    standing: Standing
    turn: int
    from_turn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDue:
    """A turn will be closed soon, and this cluster has not contributed. Comes again and again.

    Args:
        turn: which one.
        due_in_s: seconds that are left when this is said.
        waits_for: the clusters that are missing.
    """

    turn: int
    due_in_s: float
    waits_for: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A turn is decided, and its average is here. One comes after the other; none is left out.

    Args:
        turn: which one.
        path: the average; it stays until `Link.applied`. None: the turn changes nothing, since all
            contributions were refused: call `Link.applied` with the digest as it was.
        is_in: this cluster's contribution is in the average. If not, the turn is applied as
            `late`, and the samples of its contribution belong into the next one.
        weights: the tokens of each cluster that took part.
        refused: clusters whose contribution was refused, and why.
        size_bytes: of the average.
        sent_bytes: that this cluster sent for it.
        received_bytes: that this cluster received for it.
        send_s: seconds that the former took.
        receive_s: seconds that the latter took.
    """

    turn: int
    path: Path | None
    is_in: bool
    weights: dict[str, int]
    refused: dict[str, str]
    size_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    send_s: float = 0.0
    receive_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The outer parameters here are not the run's; contribute nothing until `StateReady`."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReady:
    """Another cluster's outer state is here: import it, then call `Link.adopted`.

    Args:
        version: turns applied to them.
        paths: a file for each fragment, for `Cluster.import_state`.
        outer_params: the digest of each fragment's outer parameters, to be compared with
            `Cluster.digest`.
        donor: who gave them.
    """

    version: int
    paths: tuple[Path, ...]
    outer_params: tuple[str, ...]
    donor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Donate:
    """A cluster needs the state: export all fragments, then call `Link.give_state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Go back to the outer parameters: the steps since were refused. Then call `Link.obeyed`."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Samples that are this cluster's alone: the answer to `Link.claim`."""

    samples: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLost:
    """Samples of an earlier claim that others have been dealt: do not train on them."""

    samples: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All clusters have nothing left to average: with so many turns applied they hold the same.

    Comes again and again, from when this cluster has said so in its `Progress`.
    """

    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousLost:
    """The hub does not answer. It is tried for ever; the training goes on."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousFound:
    """It answers again."""

    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The hub does not let this cluster in, and never will as things are: a user's fault.

    Args:
        reason: in one word, for programs: other_run, token, protocol, ahead, full, certificate …
        what: what is wrong.
        where: the hub.
        fix: what to do.
    """

    reason: str
    what: str
    where: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who takes part now, as it changes."""

    names: tuple[str, ...]


Event = (
    Joined
    | TurnDue
    | Committed
    | Behind
    | StateReady
    | Donate
    | Reset
    | Claimed
    | SamplesLost
    | Ended
    | RendezvousLost
    | RendezvousFound
    | Refused
    | Note
    | Members
)
