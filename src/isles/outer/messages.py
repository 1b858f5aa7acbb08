"""Messages between clusters and the hub (over HTTP), and between the ranks of a cluster.

First the bodies of requests and answers; then the commands that rank 0 broadcasts to its ranks;
last the chunks of files.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from isles.outer.parallel import in_order
from isles.run.relay import LONGEST

CHUNK_BYTES = 2**20
"""Size of a file's chunks (the last chunk may be smaller)."""

PROTOCOL = 6
"""Version of the protocol; raise it when an older cluster could no longer talk to a newer hub."""

# Every value from a cluster or a hub has its bound here. The hub adds bounds that depend on the
# run.

MOST_CLUSTERS = 4096

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Id = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Word = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Phase = Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
"""Text without control characters, because terminals show it."""
Words = Annotated[str, StringConstraints(max_length=2000)]
"""A reason; logs and people get the whole text."""
NameOrNone = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]
Sha256OrNone = Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
Names = Annotated[list[Name], Field(max_length=MOST_CLUSTERS)]

Count = Annotated[int, Field(ge=0, lt=2**62)]
Steps = Annotated[int, Field(ge=0, le=10**12)]
"""Number of inner or outer steps; `training.max_steps` allows no more."""

Bytes = Annotated[int, Field(ge=0, le=2**60)]
Tokens = Annotated[int, Field(gt=0, lt=2**62)]
PieceSize = Annotated[int, Field(gt=0, le=2**24)]
"""Number of elements in a piece: the hub has a few pieces of each contribution in its memory."""

Pace = Annotated[int, Field(ge=0, le=100_000)]
Finite = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]

LAST_SAMPLE = 2**56
"""End of the sample numbers that can be leased, far below the reserved numbers."""
MOST_LEASED = 2**32
"""Maximum samples in one lease; a thousand inner steps of four million samples each."""
MOST_SPANS = 4096


def _spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    for start, stop in spans:
        if start >= stop:
            raise ValueError(f"samples from {start} to {stop} are empty")
    return spans


Interval = tuple[Count, Count]
"""Half-open interval of sample numbers."""

Intervals = Annotated[list[Interval], Field(max_length=MOST_SPANS), AfterValidator(_spans)]
AnswerIntervals = Annotated[list[Interval], Field(max_length=100_000), AfterValidator(_spans)]


class Message(BaseModel):
    """Body of a request: unknown keys are refused, values are not converted."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(BaseModel):
    """Body of an answer; a newer hub may send more keys than this cluster knows."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Join(Message):
    """A cluster's request to join or rejoin."""

    id: Id
    name: Name
    protocol: Steps = PROTOCOL
    identity: Annotated[dict[Word, Word], Field(max_length=64)]
    """Values that must be equal on all clusters (layout, outer settings …), by name."""
    codec: Annotated[str, StringConstraints(max_length=64, pattern=r"^[ -~]*$")]
    """Text of a codec, for `isles.outer.codec.parse_codec`."""
    pieces: Annotated[
        list[Annotated[list[PieceSize], Field(max_length=2**21)]],
        Field(min_length=1, max_length=4096),
    ]
    """For each fragment the sizes of its pieces, in elements."""
    version: Steps
    """Number of outer steps applied to its outer parameters."""
    has: Steps = 0
    """Number of outer steps that it has applied, or can apply with stored averages: at least
    `version`."""
    outer_params: Annotated[list[Sha256], Field(max_length=4096)]
    """For each fragment the digest of its outer parameters."""
    holding: Intervals = []
    """Samples that it has leased and still wants to train on, or has trained on since its last
    committed contribution. Its other leased samples are leased to others."""


Standing = Literal["first", "current", "late", "behind"]


class RunRules(Answer):
    """Rules of the hub that a cluster must know."""

    dead_after_s: Annotated[float, Field(gt=0)] = math.inf


class JoinAnswer(Answer):
    standing: Standing
    """first: its weights are the run's. current: continue. late: apply the averages of the outer
    steps from `version` to `outer_step`, in order. behind: pull the state and rejoin."""
    outer_step: Count
    """The next outer step to be committed, which is the number of committed ones."""
    from_step: Count
    """The first outer step that waits for this cluster."""
    settings: RunRules
    lost: AnswerIntervals
    """Samples of `holding` that were leased to others in the meantime: do not train on them."""
    why: Words = ""
    """Reason for `behind`."""


class Heartbeat(Message):
    """A heartbeat."""

    id: Id
    step: Steps
    """Number of inner steps done."""
    version: Steps
    has: Steps = 0
    """See `Join.has`."""
    since: Steps = 0
    """Number of inner steps since the last contribution."""
    tokens_per_s: Finite = 0.0
    phase: Phase = ""
    sent_bytes: Bytes = 0
    received_bytes: Bytes = 0
    sync_every: Pace = 0
    """Inner steps per round that this cluster's link needs; 0: no request."""
    loss: Annotated[float, Field(allow_inf_nan=False, ge=-1e15, le=1e15)] | None = None
    exposed_s: Finite = 0.0
    """Seconds without inner steps because of outer steps; in this attempt."""
    hidden_s: Finite = 0.0
    """Seconds of outer steps during inner steps; in this attempt."""
    ends: bool = False
    """True if all work of this cluster is in averages, and no more will come: no round waits for
    it."""


class OpenRound(Answer):
    """An outer step that waits for contributions."""

    outer_step: Count
    due_in_s: Finite | None = None
    """Seconds until it closes without the missing clusters; None if not decided yet."""
    contributed: Names = []
    waits_for: Names = []


class HeartbeatAnswer(Answer):
    outer_step: Count
    open: Annotated[list[OpenRound], Field(max_length=4096)]
    members: Names
    """Living clusters, by name."""
    command: Literal["", "pull", "reset"] = ""
    """pull: your outer parameters differ from the run's, so pull the state. reset: go back to your
    outer parameters (your local steps were refused)."""
    command_reason: Words = ""
    ended: Count | None = None
    """Number of outer steps after which all clusters end; None: a cluster may still contribute."""
    send_state: bool = False
    """True if this cluster must send its state to a cluster that needs it."""
    sync_every: Pace = 0
    """The largest pace of the living clusters; 0: no cluster requests one."""


class LeaseRequest(Message):
    """A request for samples to train on."""

    id: Id
    number: Annotated[int, Field(gt=0, le=10**12)]
    """Number of this request: a repeated request with the same number gives the same samples."""
    samples: Annotated[int, Field(gt=0, le=MOST_LEASED)]


class LeaseAnswer(Answer):
    samples: AnswerIntervals


class Contribution(Message):
    """One cluster's contribution to an outer step, sent after all its bytes."""

    id: Id
    tokens: Tokens
    """The weight: tokens trained on since the last contribution to this fragment, as far as
    possible."""
    steps: Steps
    samples: Intervals
    """Samples trained on since the last contribution to any fragment."""
    digest: Sha256
    """sha256 over the sha256 (as bytes) of all chunks, in order."""


class ContributionAnswer(Answer):
    is_measured: bool = True
    """False: the hub is still measuring it; report its completion again."""


class RoundAnswer(OpenRound):
    state: Literal["future", "collecting", "averaging", "committed"]
    weights: Annotated[dict[Name, Count], Field(max_length=MOST_CLUSTERS)] = {}
    """If committed: the tokens of each cluster that took part."""
    refused: Annotated[dict[Name, Words], Field(max_length=MOST_CLUSTERS)] = {}
    """Clusters whose contribution was refused, with the reason."""
    digest: Sha256OrNone = ""
    size_bytes: Count = 0
    """If committed: bytes of the average; 0 if all contributions were refused, so that there is no
    average and the outer step changes nothing."""
    is_kept: bool = False
    """True if its average can be downloaded."""


class Received(Answer):
    """The chunks of a file that the hub has, by number, with their hashes."""

    size_bytes: Bytes
    chunks: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,12}$")], Sha256]


class HeldAnswer(Answer):
    """True if all living clusters have the average of an outer step."""

    is_everywhere: bool


class Applied(Message):
    """A report that a cluster has applied an average."""

    id: Id
    outer_step: Steps
    outer_params: Sha256
    """Digest of the fragment's outer parameters after it."""


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
    """Its number; None: not available yet."""
    version: Count = 0
    source: NameOrNone = ""
    """The member that sends it, or is asked for it; empty if no member can."""
    outer_params: Annotated[list[Sha256], Field(max_length=4096)] = []
    files: Annotated[list[StateFile], Field(max_length=4096)] = []


class LeaveRun(Message):
    """A report that a cluster leaves."""

    id: Id
    has_finished: bool = False
    """True if its training is over. False if it pauses and comes back."""


class OnlyId(Message):
    """A body with only the sender's id."""

    id: Id


class ShownRecord(Message):
    """A cluster's record for people who cannot reach its machines."""

    id: Id
    record: Annotated[str, StringConstraints(max_length=LONGEST, pattern=r"^[A-Za-z0-9+/=]*$")]
    """Snapshot in the encoding of `isles.run.relay`. The hub only stores it."""


class ErrorBody(Answer):
    kind: str
    what: str
    fix: str = ""


# Commands. Rank 0 broadcasts them between two inner steps; all ranks execute them in order.


@dataclass(frozen=True, slots=True)
class Pending:
    """A contribution that no average has answered yet.

    Args:
        outer_step: its outer step.
        tokens: its weight: number of tokens of the pseudo-gradient, at least 1.
        inner_steps: number of inner steps in it.
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
        """Read the result of `dataclasses.asdict`, after JSON."""
        samples = tuple((int(start), int(stop)) for start, stop in record["samples"])
        return cls(**{**record, "samples": samples})


@dataclass(frozen=True, slots=True)
class Contribute:
    """Make this cluster's contribution to an outer step."""

    outer_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Apply:
    """Apply the average of an outer step. Averages come in order, without gaps.

    Args:
        path: the average; rank 0's client removes it later. None: the outer step changes nothing,
            because all contributions were refused.
        weights: the tokens of each cluster that took part.
        refused: clusters whose contribution was refused, with the reason; only some of many.
        sent_bytes, send_s: of this cluster's contribution.
        step: minimum number of the last inner step, from then on.
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
    """Copy another cluster's outer state.

    Args:
        version: number of outer steps applied to it.
        paths: a file for each fragment.
        outer_params: for each fragment the digest of its outer parameters.
        source: the cluster that sent it.
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
    """Go back to the outer parameters: the steps since then were refused."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Samples for this cluster alone."""

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Revoke:
    """Samples of an earlier lease that others have now: do not train on them."""

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class UseReserve:
    """Continue with `count` samples that are never leased, while the hub is unreachable."""

    count: int


@dataclass(frozen=True, slots=True)
class End:
    """All clusters have nothing left to average: after this many outer steps they have equal
    weights.

    Sent repeatedly, after this cluster has reported `ends`.
    """

    version: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Take this many inner steps while an average is on its way; see `outer.delay`."""

    steps: int


Command = Contribute | Apply | Adopt | SendState | Reset | Lease | Revoke | UseReserve | End | Delay


# Files.


def num_chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def chunk_size(size_bytes: int, index: int) -> int:
    return min(CHUNK_BYTES, size_bytes - index * CHUNK_BYTES)


def digest_of(chunks: Iterable[str]) -> str:
    """The digest of a file: sha256 over the sha256 of its chunks, so that the file is read only
    once."""
    return hashlib.sha256(b"".join(bytes.fromhex(chunk) for chunk in chunks)).hexdigest()


def hash_chunks(path: Path, *, threads: int = 1) -> list[str]:
    with path.open("rb") as stream:
        chunks = iter(lambda: stream.read(CHUNK_BYTES), b"")
        return [*in_order(_sha256, chunks, threads=threads)]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
