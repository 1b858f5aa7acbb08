"""Snapshot of a run: the JSON of `isles top --json` and of the page."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Mark = Literal["", "straggler", "throttled", "dead", "silent"]
"""straggler: the other ranks wait for this rank. throttled: the GPU runs below its normal clock.
dead: the process has ended. silent: the rank sends no heartbeat."""


class Live(BaseModel, frozen=True):
    """Times are seconds since the epoch (`_at`) or seconds (`_s`), sizes are bytes, shares 0 to 1,
    rates per second. None or empty: not known."""


class Head(Live, frozen=True):
    """The run as a whole."""

    name: str = ""
    path: str = ""
    state: str = "unknown"
    phase: str = ""
    reason: str = ""
    step: int | None = None
    total_steps: int | None = None
    left_s: float | None = None
    loss: float | None = None
    tokens: int | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    goodput: float | None = None
    """Share of the time since the start that went into steps that are in the model."""
    begun_at: float | None = None
    recorded_age_s: float | None = None
    """Since the newest record of a step."""
    saved_step: int | None = None
    saved_age_s: float | None = None
    restarts: int = 0
    last_restart: str = ""
    eval_loss: float | None = None
    values: dict[str, str] = {}
    """Values of the run file by key, to compare runs."""


class Point(Live, frozen=True):
    """A recorded step; of a long run only some."""

    step: int
    loss: float | None
    tokens: int = 0
    elapsed_s: float = 0.0
    eval_loss: float | None = None


class StepSeconds(Live, frozen=True):
    """Seconds of the last step that was timed, of one rank."""

    data_s: float = 0.0
    compute_s: float = 0.0
    """Forward, backward and optimizer."""
    communication_s: float = 0.0
    waiting_s: float = 0.0
    """For ranks that came later to the same communication."""


class RankRow(Live, frozen=True):
    cluster: str = ""
    rank: int = 0
    node: int = 0
    host: str = ""
    device: str = ""
    """Name of its GPU, or of its processor."""
    rows: int | None = None
    """Sequences of the global batch that this rank computes per step."""
    micro_batch: int | None = None
    step: int | None = None
    stage: str = ""
    """Current stage, such as `forward and backward`."""
    stage_s: float | None = None
    use: float | None = None
    """Utilization of the GPU, from 0 to 1. Without a GPU, CPU cores in use."""
    memory_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    throttle: str = ""
    """Why the GPU is throttled, such as `heat`."""
    parts: StepSeconds | None = None
    heard_s: float | None = None
    """Seconds since the last heartbeat."""
    pid: int | None = None
    mark: Mark = ""
    note: str = ""
    """Text for the mark, with its values."""


class HostRow(Live, frozen=True):
    cluster: str = ""
    node: int = 0
    host: str = ""
    address: str = ""
    ranks: tuple[int, int] | None = None
    state: str = ""
    cpu: float | None = None
    """Share of all cores."""
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Where the run directory is."""
    net_in: float | None = None
    net_out: float | None = None
    """Bytes per second on the interface of the run, or on all interfaces if it is unknown."""
    skew_s: float | None = None
    """Difference between its clock and the clock of the first node."""
    heard_s: float | None = None
    mark: Mark = ""
    note: str = ""


class LinkRow(Live, frozen=True):
    """One way from a host to another, or from a cluster to the hub."""

    cluster: str = ""
    source: str = ""
    target: str = ""
    measured: float | None = None
    """Bytes per second, as `isles check` has measured; or the speed of the interface; or, to and
    from the hub, what the last averages have had."""
    measured_by: str = ""
    """`check`, `interface`, `averages`, or empty."""
    rtt_s: float | None = None
    used: float | None = None
    """Bytes per second now."""
    state: str = ""
    """ok, or the problem."""


class ClusterRow(Live, frozen=True):
    name: str = ""
    launcher: str = ""
    state: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    outer_step: int | None = None
    inner_steps: int | None = None
    """Inner steps since the last outer step."""
    weight: float | None = None
    """Share in the last average."""
    up_bytes: int | None = None
    down_bytes: int | None = None
    sync_s: float | None = None
    hidden_share: float | None = None
    lag: int | None = None
    """Outer steps behind the hub."""
    heard_s: float | None = None
    mark: Mark = ""
    note: str = ""


class HubRow(Live, frozen=True):
    address: str = ""
    round: int | None = None
    waits_for: tuple[str, ...] = ()
    due_s: float | None = None
    error: str = ""


class Snapshot(Live, frozen=True):
    """A run at one moment; of a run on several clusters all of them."""

    version: str = ""
    at: float = 0.0
    run: Head = Head()
    curve: tuple[Point, ...] = ()
    clusters: tuple[ClusterRow, ...] = ()
    """Empty for a run that is one cluster."""
    hub: HubRow | None = None
    hosts: tuple[HostRow, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    links: tuple[LinkRow, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes for the user, the worst first: a lost rank, a straggler, a link that is down."""
