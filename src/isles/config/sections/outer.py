"""The section `outer`: several clusters train one model and average periodically."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isles.config.sections.base import DurationS, Section, Text, own_type
from isles.facts.units import parse_bytes

CodecName = Literal["none", "bf16", "int8", "int4", "topk"]


def _rate(text: str) -> str:
    if parse_bytes(text.removesuffix("/s")) < 1:
        raise ValueError(f"{text} is not a valid rate")
    return text


Rate = Annotated[str, AfterValidator(_rate), own_type("rate", "20MB")]
"""Bytes per second, written as `500kB`, `20MB` or `20MB/s`."""

Address = Annotated[
    str,
    Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$", max_length=300),
    own_type("address", "hub.example.org:29400"),
]
"""A host and a port."""


PeerAddress = Annotated[
    str,
    Field(pattern=r"^/[^\s,]+/p2p/[A-Za-z0-9]+$", max_length=500),
    own_type("peer", "/ip4/203.0.113.5/tcp/30001/p2p/QmXyz"),
]
"""A libp2p multiaddress with the peer's id, as `hivemind-dht` prints it."""

ListenAddress = Annotated[
    str,
    Field(pattern=r"^/[^\s,]+$", max_length=500),
    own_type("maddr", "/ip4/0.0.0.0/tcp/30001"),
]
"""A libp2p multiaddress without a peer id."""


BucketUrl = Annotated[
    str,
    Field(pattern=r"^(file:///[^\s]+|[a-z][a-z0-9]*://[^\s/]+(/[^\s]*)?)$", max_length=1000),
    own_type("bucket", "s3://bucket/prefix"),
]
"""A prefix in object storage, or a folder that all clusters share."""


class NoOuter(Section):
    """One cluster, whose ranks take every step together."""

    kind: Literal["none"] = "none"
    """No outer steps."""


class CodecConfig(Section):
    """Compression of updates, with settings."""

    kind: CodecName = "int8"
    """Bytes per value of an update: none 4, bf16 2, int8 1, int4 0.5. topk sends only the largest
    values, with 2 bits each. int8, int4 and topk add the error of an update to the next update."""

    density: Annotated[float, Field(gt=0, le=1)] = 0.4
    """With topk: share of the values to send. With a smaller share, the model learns worse."""


class WaitConfig(Section):
    """A round that does not wait for every cluster."""

    time_boxed: Annotated[DurationS, Field(gt=0)] | None = None
    """Time from the first contribution to the end of a round. Slower clusters then contribute their
    current state, with a share in proportion to their tokens."""

    quorum: Annotated[int, Field(ge=1, le=4096)] | None = None
    """A round ends `grace` after this number of clusters has contributed."""

    grace: Annotated[DurationS, Field(ge=0)] = 30.0
    """With quorum: time for the other clusters to contribute."""


class HivemindConfig(Section):
    """engine hivemind: how the clusters find each other."""

    initial_peers: Annotated[tuple[PeerAddress, ...], Field(strict=False)] = ()
    """Addresses to connect to first, as `hivemind-dht` or another cluster prints them. Default:
    this cluster is the first."""

    host_maddrs: Annotated[tuple[ListenAddress, ...], Field(strict=False, min_length=1)] = (
        "/ip4/127.0.0.1/tcp/0",
    )
    """Addresses where this cluster listens, such as [/ip4/0.0.0.0/tcp/30001]. The default accepts
    connections from this machine only."""

    announce_maddrs: Annotated[tuple[ListenAddress, ...], Field(strict=False)] = ()
    """Addresses to announce instead, behind a router that forwards a port."""

    identity_path: Text | None = None
    """Private key that keeps this cluster's address the same. isles creates a missing file.
    Default: a key in the run directory."""

    secret_file: Text | None = None
    """A file with a long random line that all clusters share. Default: everyone who reaches a
    cluster can join."""

    relay: bool = False
    """Use relays if a direct connection is impossible (NAT)."""

    nat: bool = False
    """Ask the router to forward a port (UPnP)."""


class DiLoCoConfig(Section):
    """Clusters train alone for `sync_every` inner steps, then average their updates (DiLoCo,
    arXiv:2311.08105)."""

    kind: Literal["diloco"] = "diloco"
    """Averages of pseudo-gradients, and SGD with Nesterov momentum on them."""

    sync_every: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = 500
    """Inner steps between two averages of the same parameter. auto: isles measures links and steps,
    and keeps averaging below max_sync_overhead of the time."""

    max_sync_overhead: Annotated[float, Field(gt=0, le=1)] = 0.02
    """With sync_every auto: largest share of the time for averaging."""

    lr: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Learning rate of the outer optimizer."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer optimizer. With topk, use at most 0.7, and lr 0.9."""

    warmup_rounds: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Number of first rounds with lr 1 and without momentum. They help a model from scratch, see
    docs/clusters.md."""

    warmup_sync_every: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """Inner steps of each warm-up round. Default: sync_every."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest norm of an averaged update. Default: no limit."""

    codec: CodecName | CodecConfig = "int8"
    """Compression of updates: a name, or a section such as {kind: topk, density: 0.01}."""

    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of parts of the model. Every sync_every / fragments steps, the clusters average the
    next part (Streaming DiLoCo, arXiv:2501.18512)."""

    delay: Annotated[int, Field(ge=0, le=10**6)] | Literal["auto"] = 0
    """Inner steps that a cluster takes while it waits for the average of a fragment. auto: isles
    measures the first rounds, and hides averaging that takes more than 1 % of the inner steps."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """With delay: share of the cluster's own values when the average arrives. 0 takes the average,
    1 keeps the own values."""

    engine: Literal["hub", "hivemind", "bucket"] = "hub"
    """hub: clusters connect to a hub, and need only outgoing connections. hivemind: clusters find
    each other by libp2p, and a cluster does the work of the hub. bucket: clusters exchange files
    in object storage."""

    url: BucketUrl | None = None
    """With engine bucket: s3://bucket/prefix, gs://… or file:///shared/folder, see
    docs/bucket.md."""

    hivemind: HivemindConfig | None = None
    """With engine hivemind: addresses, see docs/hivemind.md."""

    wait: Literal["all"] | WaitConfig = "all"
    """Condition for the end of a round. all: every connected cluster has contributed. Otherwise
    {time_boxed: 60s} or {quorum: 2, grace: 30s}."""

    min_clusters: Annotated[int, Field(ge=1, le=4096)] = 1
    """Smallest number of contributions in a round."""

    hub: Address | None = None
    """Address of the hub. Default: isles starts a hub with the run."""

    public: Address | None = None
    """Address of the started hub, as clusters at other sites see it. Default: the
    machine's address towards the clusters."""

    max_rate: Rate | None = None
    """Limit of a cluster's send rate, and of its receive rate. Default: no limit."""

    outlier: Annotated[float, Field(gt=1, le=10**6)] = 10.0
    """isles refuses an update of more than this many times the usual size, and logs the cluster."""

    dead_after: Annotated[DurationS, Field(ge=1)] = 10.0
    """After this time without a heartbeat of a cluster, rounds continue without the cluster. It may
    reconnect."""

    deadline: Annotated[DurationS, Field(ge=1)] = 60.0
    """Longest time that a cluster waits for an average. Then the cluster trains on, and applies the
    average when it arrives."""

    def is_warmup(self, outer_step: int, num_fragments: int) -> bool:
        """True if a round, with this number of fragments, is one of the warmup_rounds."""
        return outer_step // num_fragments < self.warmup_rounds

    @property
    def codec_config(self) -> CodecConfig:
        """The codec with its settings."""
        return CodecConfig(kind=self.codec) if isinstance(self.codec, str) else self.codec

    @property
    def codec_text(self) -> str:
        """The codec as one word, as the hub writes it."""
        codec = self.codec_config
        return f"topk:{codec.density!r}" if codec.kind == "topk" else codec.kind

    @property
    def hub_settings(self) -> dict[str, str | int | float]:
        """Settings for the hub of the run (`isles.outer.hub.rules.Settings`)."""
        found: dict[str, str | int | float] = {
            "wait": "all",
            "min_clusters": self.min_clusters,
            "dead_after_s": self.dead_after,
            "outlier": self.outlier,
        }
        if isinstance(self.wait, WaitConfig):
            if self.wait.quorum is not None:
                quorum = {"quorum": self.wait.quorum, "grace_s": self.wait.grace}
                found |= {"wait": "quorum", **quorum}
            elif self.wait.time_boxed is not None:
                found |= {"wait": "time_boxed", "time_box_s": self.wait.time_boxed}
        return found

    @property
    def max_bytes_per_s(self) -> float:
        """`max_rate` as a number, or 0 without a limit."""
        return 0.0 if self.max_rate is None else parse_bytes(self.max_rate.removesuffix("/s"))


OuterConfig = Annotated[NoOuter | DiLoCoConfig, Field(discriminator="kind")]
