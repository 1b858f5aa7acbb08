"""The plan of one way to hold a model."""

from __future__ import annotations

from dataclasses import dataclass

from isles.config.issues import Issue
from isles.config.layout import Layout, Strategy
from isles.config.sections.run import RunConfig
from isles.facts.memory.result import StepMemory
from isles.plan.machines import Device


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank: its rows per step, and its memory.

    Args:
        rows: its sequences of the global batch.
        micro_batch: sequences of a forward pass.
        limit_bytes: bytes that a step may use. None: the memory of the device is unknown.
        least: memory with the smallest micro-batch that the run file allows.
        context_bytes: memory of CUDA and NCCL, in addition.
        busy_s: seconds of computing per step. None: the speed of the device is unknown.
        layers: layers of its stages in a pipeline, or 0 without a pipeline.
        offloaded: blocks in main memory under `cpu_offload: auto`.
        copied_bytes: bytes of a micro-batch between main memory and the GPU.
    """

    host: str
    device: Device
    rows: int
    micro_batch: int
    memory: StepMemory
    least: StepMemory
    limit_bytes: float | None
    context_bytes: float
    busy_s: float | None
    layers: int = 0
    offloaded: int = 0
    copied_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        return self.memory.peak.total

    @property
    def fits(self) -> bool | None:
        """True if it fits. None: unknown."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, on the slowest rank.

    Args:
        compute_s: seconds of computing of the average rank.
        idle_s: seconds that the average rank spends waiting for the slowest.
        bubble_s: seconds of a pipeline's bubble.
        sent_bytes: bytes that one rank sends.
        line_bytes: bytes that a host sends to other hosts. They take line_s without other traffic.
    """

    compute_s: float
    optimizer_s: float
    exposed_s: float
    idle_s: float
    bubble_s: float
    sent_bytes: float
    line_bytes: float
    line_s: float
    micro_steps: int

    @property
    def total_s(self) -> float:
        parts = (self.compute_s, self.optimizer_s, self.exposed_s, self.idle_s, self.bubble_s)
        return sum(parts)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The plan of one way to hold the model.

    Args:
        issue: why isles refuses it, or None. If isles refuses it, `ranks` is empty.
        time: None if the speed of a device is unknown.
        seen_bytes: most memory that an equal earlier run used on an equal GPU, which it did fit.
            None if no such run was found.
    """

    config: RunConfig
    strategy: Strategy
    layout: Layout | None
    ranks: tuple[RankPlan, ...] = ()
    time: StepTime | None = None
    issue: Issue | None = None
    seen_bytes: float | None = None

    @property
    def refused(self) -> str:
        """Why isles refuses it, or an empty text."""
        return "" if self.issue is None else self.issue.what

    @property
    def fits(self) -> bool | None:
        """True if every rank fits. None: unknown."""
        if self.refused:
            return False
        if self.seen_bytes is not None:
            return True
        answers = [rank.fits for rank in self.ranks]
        return False if False in answers else None if None in answers else True

    @property
    def tightest(self) -> RankPlan:
        """The rank that decides whether the run fits: with the smallest limit, or with the most
        memory in use."""

        def room(rank: RankPlan) -> tuple[float, float]:
            needed = rank.least.peak.total
            return (needed / rank.limit_bytes if rank.limit_bytes else 0.0, needed)

        return max(self.ranks, key=room)
