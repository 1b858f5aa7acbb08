"""Metrics of a step and of an evaluation, gathered from every rank."""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F

from isles.checkpoint.reread import probe_tokens
from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.facts.gpus import find_gpu
from isles.facts.units import format_bytes
from isles.strategies.base import Engine
from isles.train.clock import Laps, StepClock, gpu_laps
from isles.train.products import products_of_export

log = logging.getLogger(__name__)

_COMPARED_RANKS = 8
"""Ranks whose calculated memory is in the log next to the measured memory."""

PHASES = ("data", "forward_backward", "optimizer")
_STAGE_AFTER = {
    "data": "forward and backward",
    "forward_backward": "optimizer step",
    "optimizer": "agreeing",
}


class StepMeter:
    """Adds up losses and times between two recorded steps.

    On a GPU only recorded steps are timed in parts, by events in its stream. Only `row` waits for
    the GPU.

    Args:
        flops_per_token: FLOPs of training, forward and backward. With the GPU's peak they give the
            model FLOPs utilization. A CPU or an unknown GPU does not have it.
        memory_bytes: calculated memory of this rank in a step, on its device.
        process_bytes: memory of this process before it built the model, which counts on a CPU.
    """

    def __init__(
        self,
        world: World,
        flops_per_token: float,
        memory_bytes: float,
        process_bytes: int = 0,
    ) -> None:
        self.clock = StepClock()
        """The position of this rank in its step, for the watchdog."""
        self._world = world
        self._cuda = world.device.type == "cuda"
        self._memory_bytes = memory_bytes
        self._process_bytes = 0 if self._cuda else process_bytes
        self._is_compared = False
        gpu = find_gpu(world.device_name) if self._cuda else None
        self._tokens_per_second_at_peak = gpu.bf16_flops / flops_per_token if gpu else None
        self.parts: dict[str, float | None] | None = None
        """Seconds of the last recorded step on this rank, by part. The parts do not overlap, and
        communication includes the wait for other ranks."""
        self._laps = gpu_laps() if self._cuda else Laps()
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._rows = 0
        self._begin_row()
        self._timing = False

    def begin(self, *, is_recorded: bool) -> None:
        """A step begins."""
        self.clock.at("data loading")
        self._timing = is_recorded or not self._cuda
        if self._timing:
            self._timed += 1
            self._laps.begin()

    def mark(self, phase: str) -> None:
        """End a phase of the step."""
        self.clock.at(_STAGE_AFTER[phase])
        if self._timing:
            self._laps.end(phase)

    def add(self, loss_sum: torch.Tensor) -> None:
        """Add a micro-batch's summed loss on this rank."""
        # On the device: `.item()` would wait for the GPU in each micro-batch.
        self._loss += loss_sum

    def step_done(self, *, tokens: int, loss_divisor: int, padding_share: float) -> None:
        """End a step.

        Args:
            tokens: read by all ranks, trained or not, without padding.
            loss_divisor: divisor of the step's summed loss.
            padding_share: share of padding in the positions that all ranks computed.
        """
        self._tokens += tokens
        self._loss_divisor += loss_divisor
        self._padding += padding_share
        self._steps += 1

    def pause(self, phase: str) -> float:
        """Count the time from now to `resume` for this phase, not for a step. Returns now."""
        self.clock.begin(phase)
        return time.perf_counter()

    def resume(self, paused_at: float) -> None:
        """Steps go on."""
        self.clock.end()
        self._since += time.perf_counter() - paused_at

    def row(
        self,
        *,
        grad_norm: torch.Tensor,
        communication_s: float | None,
        blocks_s: float | None,
        sums: Mapping[str, torch.Tensor],
    ) -> dict[str, Any]:
        """The metrics since the last row, the same on every rank. All ranks must call this.

        Args:
            grad_norm: of the last step.
            communication_s: of the last timed step; None: unknown.
            blocks_s: see `Balancer.blocks_s`.
            sums: this rank's part of the method's other metrics.
        """
        if self._cuda:
            peak_bytes = own_bytes = float(torch.cuda.max_memory_allocated(self._world.device))
        else:  # memory of the whole process
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
            own_bytes = peak_bytes - _file_bytes() - self._process_bytes
        summed = {"loss": self._loss, **sums}
        # The host waits for the GPU here, so only recorded steps may come here.
        losses = {name: float(value.item()) for name, value in summed.items()}
        elapsed, laps = time.perf_counter() - self._since, self._laps.take()
        # Of the last step, as later laps replace earlier ones.
        last = {**dict.fromkeys(PHASES, 0.0), **dict(laps)}
        totals = {phase: sum(took_s for of, took_s in laps if of == phase) for phase in PHASES}
        seconds = {phase: took_s / max(1, self._timed) for phase, took_s in totals.items()}
        seconds["communication"] = math.nan if communication_s is None else communication_s
        passes = last["forward_backward"], blocks_s
        memory = own_bytes, self._memory_bytes, self._process_bytes
        ranks = self._world.gather((seconds, losses, peak_bytes, passes, memory))
        self._compare([of for *_, of in ranks])
        waited_s = communication_s
        if waited_s is None:
            waited_s = waiting_s(passes, [of for *_, of, _ in ranks])
        own_s = max(0.0, passes[0] - (waited_s or 0.0))
        self.parts = {**last, "forward_backward": own_s, "communication": waited_s}
        means = {name: sum(of[name] for of, *_ in ranks) / len(ranks) for name in seconds}
        communication = None if math.isnan(means["communication"]) else means["communication"]
        tokens_per_second = self._tokens / elapsed
        per_rank = tokens_per_second / self._world.world_size
        at_peak = self._tokens_per_second_at_peak
        row = {
            **{
                name: sum(of[name] for _, of, *_ in ranks) / max(1, self._loss_divisor)
                for name in summed
            },
            "grad_norm": float(grad_norm.item()),
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_gpu": per_rank,
            "padding_share": self._padding / self._steps,
            "step_time_s": elapsed / self._steps,
            "data_s": means["data"],
            "forward_backward_s": max(0.0, means["forward_backward"] - (communication or 0.0)),
            "communication_s": communication,
            "optimizer_s": means["optimizer"],
            "mfu": None if at_peak is None else per_rank / at_peak,
            "memory_bytes": int(max(peak for _, _, peak, *_ in ranks)),
        }
        self._begin_row()
        return row

    def _compare(self, ranks: Sequence[tuple[float, float, int]]) -> None:
        # Once: the calculated memory of each rank next to its measured memory. Optimizers make
        # their state in the first step, so that only a later step has its peak.
        self._rows += 1
        if self._is_compared or (self._rows == 1 and self._steps == 1):
            return
        self._is_compared = True
        kind = "GPU memory" if self._cuda else "memory"
        for rank, (own, calculated, process) in list(enumerate(ranks))[:_COMPARED_RANKS]:
            text = f"{kind} of rank {rank}: peak {format_bytes(own)}, "
            text += f"calculated {format_bytes(calculated)}"
            if process:
                text += f", next to {format_bytes(process)} of the process before the model"
            log.info("%s", text)

    def _begin_row(self) -> None:
        self._loss.zero_()
        self._tokens = self._loss_divisor = self._steps = self._timed = 0
        self._padding = 0.0
        self._since = time.perf_counter()


def process_bytes() -> int:
    """Main memory of this process, without mapped files such as libraries."""
    return int(psutil.Process().memory_info().rss) - _file_bytes()


def _file_bytes() -> int:
    # Pages of files, which the kernel can drop, and which the processes of a host share.
    return int(psutil.Process().memory_info().shared)


def waiting_s(
    own: tuple[float, float | None], ranks: Sequence[tuple[float, float | None]]
) -> float | None:
    """Seconds of a rank's forward and backward pass that it spent waiting for slower ranks.

    If each block gathers its weights, all ranks end a pass together. The rank whose blocks took the
    largest part of its pass did not wait. The transfer itself, for which all ranks wait, counts as
    computing.

    Args:
        own: seconds of the pass, and of the blocks' forward pass in it; None: not timed.
        ranks: the same values of all ranks.

    Returns:
        None if some rank's blocks were not timed.
    """
    took_s, blocks_s = own
    parts = [blocks / took for took, blocks in ranks if blocks is not None and took > 0]
    if blocks_s is None or len(parts) < len(ranks) or max(parts) <= 0:
        return None
    return max(0.0, took_s - blocks_s / max(parts))


def evaluate(
    engine: Engine, batches: Iterable[Batch], world: World, *, counts: bool
) -> dict[str, float]:
    """Mean loss over all ranks' batches. All ranks must call this.

    Args:
        batches: this rank's part; all ranks have the same number of batches.
        counts: whether this rank counts its rows; one rank counts for all ranks with the same rows.

    Returns:
        `loss` and `tokens`. A loss of tokens (in nats) also gives `perplexity`, its exponential. A
        loss of pairs also gives `pairs` and the method's other metrics.
    """
    total = torch.zeros(3, dtype=torch.float64, device=world.device)
    of_pairs = False
    engine.take_figures(of_training=False)  # discard metrics from before
    engine.model.eval()
    try:
        for batch in batches:
            total[0] += engine.evaluate(batch)
            of_pairs = batch.reference_B is not None
            if counts:
                known_BT = batch.targets_BT != IGNORE_INDEX
                total[1] += known_BT.sum()
                # Every second row begins a pair. A pair without targets only fills up a batch.
                total[2] += known_BT.any(1)[0::2].sum()
    finally:
        engine.model.train()
    figures = engine.take_figures(of_training=False)
    # One tensor, so that all sums need one all-reduce.
    sums = torch.cat([total.cpu(), *(value.double().cpu().view(1) for value in figures.values())])
    if world.world_size > 1:
        dist.all_reduce(sums, group=world.control)
    tokens, pairs = float(sums[1]), float(sums[2])
    if of_pairs:
        more = zip(figures, (sums[3:] / pairs).tolist(), strict=True)
        return {"loss": float(sums[0]) / pairs, "tokens": tokens, "pairs": pairs, **dict(more)}
    loss = float(sums[0]) / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": tokens}


def score_probe(engine: Engine, mesh: Mesh, world: World, vocab_size: int) -> list[float] | None:
    """The model's log-probability of each row of the probe, on every rank.

    A checkpoint keeps these scores, and each export of the checkpoint must reproduce them. None if
    some score is not finite. All ranks must call this.
    """
    tokens_BT = probe_tokens(vocab_size)
    size = mesh.layout.cp
    # Ranks that share a sequence have equal parts of it.
    longer_BT = F.pad(tokens_BT, (0, -tokens_BT.shape[1] % size))
    targets_BT = torch.full_like(longer_BT, IGNORE_INDEX)
    targets_BT[:, : tokens_BT.shape[1] - 1] = tokens_BT[:, 1:]
    device, rows = world.device, tuple(range(len(tokens_BT)))
    batch = Batch(longer_BT.to(device), targets_BT.to(device), rows)
    found = torch.zeros(len(tokens_BT), dtype=torch.float64)
    engine.model.eval()
    try:
        # The usual shape, so that nothing is compiled for the probe.
        with torch.compiler.set_stance("force_eager"), products_of_export(engine.model):
            part = engine.row_scores(batch).double().cpu()
    finally:
        engine.model.train()
    if mesh.dp_rank == 0 and mesh.place.tp == 0:  # the others have the same
        found += part
    if world.world_size > 1:
        dist.all_reduce(found, group=world.control)
    return found.tolist() if bool(torch.isfinite(found).all()) else None
