"""What travels: between clusters and the hub (over HTTP), and between the ranks of a cluster.

First the bodies of requests and answers; then the commands that rank 0 broadcasts to its ranks; at
last the chunks in which files are sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from isles.run.relay import LONGEST

CHUNK_BYTES = 2**20
"""Every file travels in chunks of this size (the last one is what is left)."""

PROTOCOL = 6
"""Raised when an older cluster could no longer talk with a newer hub."""

# Every value that a cluster or a hub sends has its bound here. The hub adds bounds that depend on
# the run.

MOST_CLUSTERS = 4096

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Phase = Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
"""Terminals show these texts."""
Words = Annotated[str, StringConstraints(max_length=2000)]
"""Why something is as it is; logs and people are given it as a whole."""
NameOrNone = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]
Sha256OrNone = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Names = Annotated[list[Name], Field(max_length=MOST_CLUSTERS)]

Count = Annotated[int, Field(ge=0, lt=2**62)]
Steps = Annotated[int, Field(ge=0, le=10**12)]
"""Inner or outer steps; `training.max_steps` allows no more."""

Bytes = Annotated[int, Field(ge=0, le=2**60)]
Tokens = Annotated[int, Field(gt=0, lt=2**62)]
PieceSize = Annotated[int, Field(gt=0, le=2**24)]
"""Numbers in a piece: the hub has a few pieces of each contribution in its memory."""

Pace = Annotated[int, Field(ge=0, le=100_000)]
Finite = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]

LAST_SAMPLE = 2**56
"""End of the sample numbers that can be leased, far below the reserved numbers."""
MOST_LEASED = 2**32
"""Samples in one lease; a thousand inner steps of four million samples each."""
MOST_SPANS = 4096


def _spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    for start, stop in spans:
        if start >= stop:
            raise ValueError(f"samples from {start} to {stop} are empty")
    return spans


Interval = tuple[Count, Count]
"""Samples from a number up to, without, another."""

Intervals = Annotated[list[Interval], Field(max_length=MOST_SPANS), AfterValidator(_spans)]
AnswerIntervals = Annotated[list[Interval], Field(max_length=100_000), AfterValidator(_spans)]


class Message(BaseModel):
    """A body of a request: nothing unknown, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(BaseModel):
    """A body of an answer; a newer hub may say more than this cluster knows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Join(Message):
    """A cluster asks to take part, or to go on doing so."""

    id: Id
    name: Name
    protocol: Steps = PROTOCOL
    identity: Annotated[dict[Word, Word], Field(max_length=64)]
    """What must be equal on all clusters (layout, outer settings …), by its name."""
    codec: Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
    """As `isles.outer.codec.base.parse_codec` reads it."""
    pieces: Annotated[
        list[Annotated[list[PieceSize], Field(max_length=2**21)]],
        Field(min_length=1, max_length=4096),
    ]
    """Of each fragment its pieces: numbers of elements."""
    version: Steps
    """Outer steps applied to the outer parameters that it holds."""
    has: Steps = 0
    """Outer steps that it has applied, or can with averages that it has kept: `version` or more."""
    outer_params: Annotated[list[Sha256], Field(max_length=4096)]
    """Of each fragment the digest of its outer parameters."""
    holding: Intervals = []
    """Samples that it has leased before and still means to train on, or has trained on since its
    last committed contribution. Whatever else it has leased is leased to others."""


Standing = Literal["first", "current", "late", "behind"]


class RunRules(Answer):
    """What a cluster must know of the hub's rules."""

    dead_after_s: Annotated[float, Field(gt=0)] = math.inf


class JoinAnswer(Answer):
    standing: Standing
    """first: its weights are the run's. current: go on. late: apply the averages of the outer steps
    from `version` to `outer_step`, one after the other. behind: pull the state and join again."""
    outer_step: Count
    """The next outer step to be committed: so many have been."""
    from_step: Count
    """The first outer step that waits for this cluster."""
    settings: RunRules
    lost: AnswerIntervals
    """Of `holding`, the samples that others have been leased meanwhile: not to be trained on."""
    why: Words = ""
    """For `behind`: why."""


class Heartbeat(Message):
    """A sign of life."""

    id: Id
    step: Steps
    """Inner steps done."""
    version: Steps
    has: Steps = 0
    """See `Join.has`."""
    since: Steps = 0
    """Inner steps since the last contribution."""
    tokens_per_s: Finite = 0.0
    phase: Phase = ""
    sent_bytes: Bytes = 0
    received_bytes: Bytes = 0
    sync_every: Pace = 0
    """Inner steps that this cluster would have in a round, for its link; 0: it asks for none."""
    loss: Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)] | None = None
    exposed_s: Finite = 0.0
    """Seconds in which no inner step was made, because of outer ones; in this attempt."""
    hidden_s: Finite = 0.0
    """Seconds in which outer steps went on beside inner ones; in this attempt."""
    ends: bool = False
    """Nothing of this cluster is left that is in no average, nor will be: no round waits for it."""


class OpenRound(Answer):
    """An outer step that waits for contributions."""

    outer_step: Count
    due_in_s: Finite | None = None
    """It is closed then without the missing; None where nothing is decided yet."""
    contributed: Names = []
    waits_for: Names = []


class HeartbeatAnswer(Answer):
    outer_step: Count
    open: Annotated[list[OpenRound], Field(max_length=4096)]
    members: Names
    """The living, by name."""
    command: Literal["", "pull", "reset"] = ""
    """pull: your outer parameters are not the run's, pull the state. reset: go back to your outer
    parameters (your local steps have been refused)."""
    command_reason: Words = ""
    ended: Count | None = None
    """All end with so many outer steps applied; None: one of them may still contribute."""
    send_state: bool = False
    """A cluster needs the state, and this one is asked for it."""
    sync_every: Pace = 0
    """The largest of the living clusters' paces; 0: nobody asks for one."""


class LeaseRequest(Message):
    """A request for samples to train on."""

    id: Id
    number: Annotated[int, Field(gt=0, le=10**12)]
    """Counts this cluster's leases up: a claim that is repeated with the same number gives the
    same samples."""
    samples: Annotated[int, Field(gt=0, le=MOST_LEASED)]


class LeaseAnswer(Answer):
    samples: AnswerIntervals


class Contribution(Message):
    """What one cluster adds to an outer step, once all its bytes have been sent."""

    id: Id
    tokens: Tokens
    """The weight: trained on since the last contribution to this fragment, as far as possible."""
    steps: Steps
    samples: Intervals
    """Trained on since the last contribution to any fragment."""
    digest: Sha256
    """sha256 over the sha256 (as bytes) of all chunks, in order."""


class ContributionAnswer(Answer):
    is_measured: bool = True
    """False: the hub is still looking at its numbers; say again that it is complete."""


class RoundAnswer(OpenRound):
    state: Literal["future", "collecting", "averaging", "committed"]
    weights: Annotated[dict[Name, Count], Field(max_length=MOST_CLUSTERS)] = {}
    """Committed: the tokens of each cluster that took part."""
    refused: Annotated[dict[Name, Words], Field(max_length=MOST_CLUSTERS)] = {}
    """Clusters whose contribution was refused, and why."""
    digest: Sha256OrNone = ""
    size_bytes: Count = 0
    """Committed: bytes of the average; 0 where all contributions were refused, so that there is
    none and the outer step changes nothing."""
    is_kept: bool = False
    """Its average can be downloaded."""


class Received(Answer):
    """The chunks of a file that the hub has, by number, with their hashes."""

    size_bytes: Bytes
    chunks: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}$")], Sha256]


class HeldAnswer(Answer):
    """Whether all clusters that live have the average of an outer step."""

    is_everywhere: bool


class Applied(Message):
    """A cluster has applied an average."""

    id: Id
    outer_step: Steps
    outer_params: Sha256
    """Digest of the fragment's outer parameters thereafter."""


class StateFile(Message):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,63}\.safetensors$")]
    size_bytes: Annotated[int, Field(gt=0, le=2**48)]
    digest: Sha256


class State(Message):
    """Outer parameters and outer state of a cluster."""

    version: Steps
    outer_params: Annotated[list[Sha256], Field(max_length=4096)]
    files: Annotated[list[StateFile], Field(min_length=1, max_length=4096)]


class StateOffer(State):
    id: Id


class StateNumber(Answer):
    """The answer to `StateOffer`."""

    state: Count


class StateAnswer(Answer):
    """The state for a cluster that is behind."""

    state: Count | None
    """Its number; None: not there yet."""
    version: Count = 0
    source: NameOrNone = ""
    """Who gives it, or is asked for it; empty where nobody can."""
    outer_params: Annotated[list[Sha256], Field(max_length=4096)] = []
    files: Annotated[list[StateFile], Field(max_length=4096)] = []


class LeaveRun(Message):
    """A cluster ends."""

    id: Id
    has_finished: bool = False
    """Its training is over; else it pauses, and comes back."""


class OnlyId(Message):
    """A body that says no more than who speaks."""

    id: Id


class Shown(Message):
    """What a cluster shows of itself to people who have no way to its machines."""

    id: Id
    record: Annotated[str, StringConstraints(max_length=LONGEST, pattern=r"^[A-Za-z0-9+/=]*$")]
    """As `isles.run.relay` packs it. The hub only keeps it."""


class ErrorBody(Answer):
    kind: str
    what: str
    fix: str = ""


# Commands. Rank 0 broadcasts them between two inner steps; all ranks do them in their order.


@dataclass(frozen=True, slots=True)
class Pending:
    """A contribution that no average has answered yet.

    Args:
        outer_step: to which outer step.
        tokens: its weight: what the pseudo-gradient was trained on, at least 1.
        inner_steps: in it.
        samples: trained on since the last contribution to any fragment, and those of earlier
            contributions that are in no average.
        steps: inner steps of this cluster when it was made.
    """

    outer_step: int
    tokens: int
    inner_steps: int
    samples: tuple[tuple[int, int], ...]
    steps: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Pending:
        """What `dataclasses.asdict` gave, through JSON."""
        samples = tuple((int(start), int(stop)) for start, stop in record["samples"])
        return cls(**{**record, "samples": samples})


@dataclass(frozen=True, slots=True)
class Contribute:
    """Make this cluster's contribution to an outer step."""

    outer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply the average of an outer step. One comes after the other; none is left out.

    Args:
        path: the average; rank 0's client removes it later. None: the outer step changes nothing,
            since all contributions were refused.
        weights: the tokens of each cluster that took part.
        refused: clusters whose contribution was refused, and why; not all, where there are many.
        sent_bytes, send_s: of this cluster's contribution.
        step: the number that the last inner step has at least, from then on.
    """

    outer_step: int
    path: Path | None
    weights: Mapping[str, int]
    refused: Mapping[str, str]
    size_bytes: int
    sent_bytes: int = 0
    received_bytes: int = 0
    send_s: float = 0.0
    receive_s: float = 0.0
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Take over another cluster's outer state.

    Args:
        version: outer steps applied to it.
        paths: a file for each fragment.
        outer_params: of each fragment the digest of its outer parameters.
        source: the cluster that gave it.
        step: as in `Apply`.
    """

    version: int
    paths: tuple[Path, ...]
    outer_params: tuple[str, ...]
    source: str
    step: int = 0


@dataclass(frozen=True, slots=True)
class SendState:
    """Write the outer state for a cluster that needs it."""


@dataclass(frozen=True, slots=True)
class Reset:
    """Go back to the outer parameters: the steps since were refused."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples that are this cluster's alone."""

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Samples of an earlier lease that others have by now: do not train on them."""

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class UseReserve:
    """Go on with so many samples that nobody leases, as long as the hub is away."""

    count: int


@dataclass(frozen=True, slots=True)
class End:
    """All clusters have nothing left to average: after so many outer steps they hold the same.

    Comes again and again, once this cluster has reported `ends`.
    """

    version: int


Command = Contribute | Apply | Adopt | SendState | Reset | Lease | Revoke | UseReserve | End


# Files.


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def chunk_size(size_bytes: int, index: int) -> int:
    return min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES)


def digest_of(chunks: Iterable[str]) -> str:
    """The digest of a file: sha256 over the sha256 of its chunks, so that none is read twice."""
    return hashlib.sha256(b"".join(bytes.fromhex(chunk) for chunk in chunks)).hexdigest()


def hash_chunks(path: Path) -> list[str]:
    with path.open("rb") as stream:
        chunks = iter(lambda: stream.read(CHUNK_BYTES), b"")
        return [hashlib.sha256(data).hexdigest() for data in chunks]
