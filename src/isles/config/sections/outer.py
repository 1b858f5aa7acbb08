"""The section `outer`: one model on several clusters that average now and then."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from isles.config.sections.base import DurationS, Section, Text, own_type
from isles.facts.units import parse_bytes

CodecName = Literal["none", "bf16", "int8", "int4", "topk"]


def _rate(text: str) -> str:
    if parse_bytes(text.removesuffix("/s")) < 1:
        raise ValueError(f"{text} is no rate")
    return text


Rate = Annotated[str, AfterValidator(_rate), own_type("rate", "20MB")]
"""Bytes a second, written as `500kB`, `20MB` or `20MB/s`."""

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
"""A libp2p multiaddress that names the peer, as `hivemind-dht` prints it."""

ListenAddress = Annotated[
    str,
    Field(pattern=r"^/[^\s,]+$", max_length=500),
    own_type("maddr", "/ip4/0.0.0.0/tcp/30001"),
]
"""A libp2p multiaddress without a peer."""


BucketUrl = Annotated[
    str,
    Field(pattern=r"^(file:///[^\s]+|[a-z][a-z0-9]*://[^\s/]+(/[^\s]*)?)$", max_length=1000),
    own_type("bucket", "s3://bucket/prefix"),
]
"""A prefix in object storage, or a folder that all share."""


class NoOuter(Section):
    """One cluster, whose ranks take every step together."""

    kind: Literal["none"] = "none"
    """No outer steps."""


class CodecConfig(Section):
    """How updates travel, with settings."""

    kind: CodecName = "int8"
    """none: as fp32. bf16: 2 bytes a number. int8: 1 byte. int4: half a byte. topk: only the
    largest numbers, in 2 bits each. What int8, int4 and topk leave out is added to the next."""

    density: Annotated[float, Field(gt=0, le=1)] = 0.4
    """topk: which part of the numbers travels. With fewer it learns worse."""


class WaitConfig(Section):
    """A round that does not wait for every cluster."""

    time_boxed: Annotated[DurationS, Field(gt=0)] | None = None
    """So long after the first contribution a round is closed. A slower cluster contributes what it
    has by then, weighted by its tokens."""

    quorum: Annotated[int, Field(ge=1, le=4096)] | None = None
    """A round is closed when so many clusters have contributed and `grace` is over."""

    grace: Annotated[DurationS, Field(ge=0)] = 30.0
    """quorum: for so long the others may still come."""


class HivemindConfig(Section):
    """engine hivemind: how a cluster finds the others, and is found."""

    initial_peers: Annotated[tuple[PeerAddress, ...], Field(strict=False)] = ()
    """Where to begin: what `hivemind-dht`, or another cluster, prints after --initial_peers.
    Empty: this cluster is the first."""

    host_maddrs: Annotated[tuple[ListenAddress, ...], Field(strict=False, min_length=1)] = (
        "/ip4/127.0.0.1/tcp/0",
    )
    """Where this cluster listens, such as [/ip4/0.0.0.0/tcp/30001]. The default is reached from
    this machine only."""

    announce_maddrs: Annotated[tuple[ListenAddress, ...], Field(strict=False)] = ()
    """What the others are told instead, behind a router that passes a port on."""

    identity_path: Text | None = None
    """Private key, which makes this cluster's address last; made where it is not there. null: one
    in the run directory."""

    secret_file: Text | None = None
    """A file whose content all clusters share, a long random line. null: whoever reaches a
    cluster may take part."""

    relay: bool = False
    """Reach others, and be reached, through relays, where there is no other way (NAT)."""

    nat: bool = False
    """Ask the router to pass a port on (UPnP)."""


class DiLoCoConfig(Section):
    """Clusters train alone for `sync_every` inner steps, then average what they have learnt
    (DiLoCo, arXiv:2311.08105; with fragments Streaming DiLoCo, arXiv:2501.18512)."""

    kind: Literal["diloco"] = "diloco"
    """Averages of pseudo-gradients, and SGD with Nesterov momentum on them."""

    sync_every: Annotated[int, Field(ge=1, le=10**9)] | Literal["auto"] = 500
    """Inner steps in which every weight is averaged once. auto: from the measured links and steps,
    so that averaging takes at most max_sync_overhead of the time."""

    max_sync_overhead: Annotated[float, Field(gt=0, le=1)] = 0.02
    """sync_every auto: which part of the time the links may take."""

    lr: Annotated[float, Field(gt=0, le=10)] = 0.7
    """Learning rate of the outer optimizer."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of the outer optimizer. codec topk: at most 0.7,
    with lr: 0.9."""

    warmup_rounds: Annotated[int, Field(ge=0, le=10**6)] = 0
    """So many first rounds only average, with lr 1 and no momentum. A model that begins from
    scratch learns better with some, see docs/clusters.md."""

    warmup_sync_every: Annotated[int, Field(ge=1, le=10**9)] | None = None
    """warmup_rounds: inner steps of each of these rounds. null: as sync_every."""

    max_norm: Annotated[float, Field(gt=0)] | None = None
    """Clip the norm of an averaged update to this. null: no clipping."""

    codec: CodecName | CodecConfig = "int8"
    """How updates travel: none, bf16, int8, int4, topk, or with settings such as
    {kind: topk, density: 0.01}."""

    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    """Parts of the model that are averaged by turns, one every sync_every / fragments steps."""

    delay: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Inner steps that go on while a fragment is averaged. 0: the cluster waits for the average."""

    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    """delay: how much of the way to the average is not gone, when it comes."""

    engine: Literal["hub", "hivemind", "bucket"] = "hub"
    """hub: through the hub, to which clusters only dial out. hivemind: the hub is in
    one of the clusters, found and reached over libp2p; see docs/hivemind.md. bucket: in
    object storage, without a hub; see docs/bucket.md."""

    url: BucketUrl | None = None
    """engine bucket: where the clusters meet, s3://bucket/prefix, gs://… or file:///shared/folder.
    Credentials are found as by your provider's own tools."""

    hivemind: HivemindConfig | None = None
    """engine hivemind: addresses."""

    wait: Literal["all"] | WaitConfig = "all"
    """Whom a round waits for: all clusters that live, or {time_boxed: 60s}, or
    {quorum: 2, grace: 30s}."""

    min_clusters: Annotated[int, Field(ge=1, le=4096)] = 1
    """A round has at least so many contributions."""

    hub: Address | None = None
    """Where the clusters meet, host:port. null: a hub is started with the run."""

    public: Address | None = None
    """How clusters elsewhere reach the hub that is started with the run, host:port.
    null: by this machine's own name."""

    max_rate: Rate | None = None
    """Bytes a second that a cluster sends at most, and that it fetches at most. null: no limit."""

    outlier: Annotated[float, Field(gt=1, le=10**6)] = 10.0
    """An update is refused, with its cluster's name, when it is so many times larger than usual."""

    dead_after: Annotated[DurationS, Field(ge=1)] = 10.0
    """A cluster that is not heard for so long is dropped from the round; it may come back."""

    deadline: Annotated[DurationS, Field(ge=1)] = 60.0
    """Longest wait of a cluster for an average; then its inner steps go on, and the average is
    taken in when it comes."""

    def is_warmup(self, outer_step: int, num_fragments: int) -> bool:
        """Whether a round, of a layout of so many fragments, is of the rounds that only average."""
        return outer_step // num_fragments < self.warmup_rounds

    @property
    def codec_config(self) -> CodecConfig:
        """The codec with its settings."""
        return CodecConfig(kind=self.codec) if isinstance(self.codec, str) else self.codec

    @property
    def codec_text(self) -> str:
        """The codec in a word, as the hub knows it."""
        codec = self.codec_config
        return f"topk:{codec.density!r}" if codec.kind == "topk" else codec.kind

    @property
    def hub_settings(self) -> dict[str, str | int | float]:
        """What the hub of the run is told (`isles.outer.hub.rules.Settings`)."""
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
        """`max_rate` as a number; 0: no limit."""
        return 0.0 if self.max_rate is None else parse_bytes(self.max_rate.removesuffix("/s"))


OuterConfig = Annotated[NoOuter | DiLoCoConfig, Field(discriminator="kind")]
