"""What rank 0 and its side process say to each other: one line of JSON each, over a pipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from isles.outer.link.settings import LinkSettings
from isles.outer.messages import Standing

Interval = tuple[int, int]
"""Samples from a number up to, without, another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Who a cluster is, and what it averages.

    Args:
        name: of the cluster.
        member_id: 32 hexadecimal digits, made once and kept in the run directory.
        identity: what must be equal on all clusters, by its name: digest of the layout, the outer
            settings …; where they differ the rendezvous names the key and both values.
        codec: of contributions, as `Codec.text` says it.
        pieces: of each fragment the numbers in its pieces.
    """

    name: str
    member_id: str
    identity: dict[str, str]
    codec: str
    pieces: list[list[int]]


# Events: the side process to rank 0.


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The rendezvous has let this cluster in; also after each restart of the side process.

    Args:
        standing: first: its weights are the run's. current: go on. late: the averages that it
            missed follow, one `Committed` each. behind: see `Behind`.
        turn: the next to be committed: so many have been.
        from_turn: the first that waits for this cluster.
    """

    standing: Standing
    turn: int
    from_turn: int
    kind: Literal["joined"] = "joined"


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
    kind: Literal["turn_due"] = "turn_due"


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A turn is decided, and its average is here. One comes after the other; none is left out.

    Args:
        turn: which one.
        path: the average; it stays until `Link.applied`. None: the turn changes nothing, since all
            contributions were refused: call `Link.applied` with the digest as it was.
        digest: of the average, as the rendezvous computes it (`blobs.digest_of`).
        is_in: this cluster's contribution is in the average. If not, the turn is applied as
            `late`, and the samples of its contribution belong into the next one.
        weights: the tokens of each cluster that took part.
        refused: clusters whose contribution was refused, and why.
        size_bytes: of the average.
        sent_bytes: that this cluster sent for it.
        received_bytes: that this cluster received for it.
        send_s: seconds that the former took; with gloo those of the whole exchange.
        receive_s: seconds that the latter took.
        waited_s: from this cluster's contribution to this event; 0 without one.
    """

    turn: int
    path: Path | None
    digest: str
    is_in: bool
    weights: dict[str, int]
    refused: dict[str, str]
    size_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    send_s: float = 0.0
    receive_s: float = 0.0
    waited_s: float = 0.0
    kind: Literal["committed"] = "committed"

    @property
    def participants(self) -> tuple[str, ...]:
        """Those whose contribution is in the average."""
        return tuple(sorted(self.weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """The outer parameters here are not the run's; contribute nothing until `StateReady`."""

    why: str
    kind: Literal["behind"] = "behind"


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
    kind: Literal["state_ready"] = "state_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Donate:
    """A cluster needs the state: export all fragments, then call `Link.give_state`."""

    kind: Literal["donate"] = "donate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Go back to the outer parameters: the steps since were refused. Then call `Link.obeyed`."""

    why: str
    kind: Literal["reset"] = "reset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """Samples that are this cluster's alone: the answer to `Link.claim`, which gave the number."""

    number: int
    samples: tuple[Interval, ...]
    kind: Literal["claimed"] = "claimed"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesLost:
    """Samples of an earlier claim that others have been dealt: do not train on them."""

    samples: tuple[Interval, ...]
    kind: Literal["samples_lost"] = "samples_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """All clusters have nothing left to average: with so many turns applied they hold the same.

    Comes again and again, from when this cluster has said so in its `Progress`.
    """

    turns: int
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousLost:
    """The rendezvous does not answer. It is tried for ever; the training goes on."""

    why: str
    kind: Literal["rendezvous_lost"] = "rendezvous_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousFound:
    """It answers again."""

    away_s: float
    kind: Literal["rendezvous_found"] = "rendezvous_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The rendezvous does not let this cluster in, and never will as things are: a user's fault.

    Args:
        reason: in one word, for programs: other_run, token, protocol, ahead, full, certificate …
        what: what is wrong.
        where: the rendezvous.
        fix: what to do.
    """

    reason: str
    what: str
    where: str
    fix: str
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line for the log."""

    text: str
    is_warning: bool = False
    kind: Literal["note"] = "note"


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Who takes part now, and how long a round is for the slowest link; as they change."""

    names: tuple[str, ...]
    pace: int = 0
    kind: Literal["members"] = "members"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The side process lives; not passed on to the caller of `Link.poll`."""

    sent_bytes: int
    received_bytes: int
    kind: Literal["alive"] = "alive"


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

# Commands: rank 0 to the side process.


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribute:
    """A contribution lies in a file, which is the side process' from now on."""

    turn: int
    path: Path
    tokens: int
    samples: tuple[Interval, ...]
    inner_steps: int
    norm: float
    kind: Literal["contribute"] = "contribute"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimSamples:
    """So many samples are needed."""

    number: int
    num_samples: int
    kind: Literal["claim"] = "claim"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedTurn:
    """An average has been applied; the digest of the fragment's outer parameters since."""

    turn: int
    digest: str
    kind: Literal["applied"] = "applied"


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveState:
    """The state for a cluster that asked for it."""

    version: int
    outer_params: tuple[str, ...]
    paths: tuple[Path, ...]
    kind: Literal["give_state"] = "give_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Another cluster's state has been taken over."""

    version: int
    outer_params: tuple[str, ...]
    holding: tuple[Interval, ...]
    kind: Literal["adopted"] = "adopted"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSince:
    """There is a checkpoint with so many turns applied: the averages of all since are kept."""

    version: int
    kind: Literal["keep_since"] = "keep_since"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed:
    """The weights are the outer parameters again, as `Reset` has told."""

    why: str
    kind: Literal["obeyed"] = "obeyed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For the signs of life: see `isles.outer.messages.Beat`."""

    step: int = 0
    since: int = 0
    tokens_per_s: float = 0.0
    phase: str = ""
    pace: int = 0
    loss: float | None = None
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    ends: bool = False
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """The training ends here: say so, and end.

    Args:
        has_finished: it is over; else it pauses.
    """

    has_finished: bool = False
    kind: Literal["leave"] = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """All that a side process needs to know: the first line, also after a restart."""

    member: Member
    settings: LinkSettings
    join_file: Path
    spool: Path
    version: int
    kept_since: int
    outer_params: tuple[str, ...]
    holding: tuple[Interval, ...]
    contributions: tuple[Contribute, ...] = ()
    claims: tuple[ClaimSamples, ...] = ()
    obeyed: str = ""
    has_joined: bool = False
    progress: Progress = field(default_factory=Progress)
    kind: Literal["begin"] = "begin"


Command = (
    Begin
    | Contribute
    | ClaimSamples
    | AppliedTurn
    | GiveState
    | Adopted
    | KeepSince
    | Obeyed
    | Progress
    | Leave
)

EVENTS: TypeAdapter[Event | Alive] = TypeAdapter(
    Annotated[Event | Alive, Field(discriminator="kind")]
)
COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
