"""The speed of a rank and its largest micro-batch, measured with models of few layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isles.balance.curve import Curve
from isles.balance.measure import Probe, calibrate
from isles.config.layout import Strategy
from isles.config.memory import CPU_MICRO_BATCH_SIZE, holding_of, step_memory
from isles.config.sections.data import isolates_any
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import MeshSection
from isles.dist.batch import COMPUTE_DTYPE, Batch, cu_seqlens
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.models.adapter import frozen_dtype
from isles.models.attention import use_maskless_attention
from isles.models.build import build_probe
from isles.models.recompute import set_gradient_checkpointing
from isles.run.limits import memory
from isles.strategies.mixed_precision import MixedPrecision
from isles.strategies.objective import CausalLM
from isles.strategies.pipeline.stages import stage_indices
from isles.strategies.sequence import whole
from isles.train.model import architecture_of, weights_dtype

_PLAUSIBLE = 4
"""Largest micro-batch to try, as a multiple of a rank's even part of the rows."""

_FEW_TOKENS = 256
"""Vocabulary of a model whose blocks alone are measured."""

_MEMORY_SHARE = 0.9
"""Share of the GPU's memory that a micro-batch may fill; the rest is for fragmentation."""


def even_micro_batch(rows: int, largest: int, before: int | None) -> int:
    """Size of equal micro-batches for a rank's rows.

    Args:
        rows: of the rank in a step.
        largest: most rows of a micro-batch.
        before: the run's earlier size, which stays if it divides the rows. Another size adds the
            same numbers in another order.
    """
    if before is not None and rows % before == 0:
        return before
    return max(size for size in range(1, min(rows, largest) + 1) if rows % size == 0)


def measure_curve(
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    world: World,
    most_rows: int | None,
) -> tuple[Curve | None, bool]:
    """The speed of this rank and the number of rows that fit, and whether the measurement settled.
    All ranks must call this.

    Args:
        model: the real model, used for its shapes only; it may be on the meta device.
        strategy: decides the memory that the model leaves free.
        most_rows: of a micro-batch, if the run file sets it; on a CPU see `cpu_micro_batch`.
    """
    training, layout, device = config.training, mesh.layout, world.device
    is_cpu, share = device.type == "cpu", 1 / (layout.tp * layout.pp)
    if layout.cut and isinstance(strategy, MeshSection):
        stages = stage_indices(strategy.pp_schedule, mesh.place.pp, layout.pp)
        share = sum(layout.cut[stage] for stage in stages) / sum(layout.cut) / layout.tp
    shape: Any = model.config
    vocab_size = int(shape.get_text_config().vocab_size)
    kept = 1
    if layout.pp > 1:
        # Embedding and head are on the first and the last rank alone, and may not fit the others.
        vocab_size = _FEW_TOKENS
        most_steps = -(-training.global_batch_size // layout.dp_size)
        holding = holding_of(config, strategy, layout, architecture_of(model), most_steps)
        kept = holding.in_flight[mesh.place.pp]
    probe = _probe(model, config, mesh, world, share=share, vocab_size=vocab_size, kept=kept)
    plausible = _PLAUSIBLE * -(-training.global_batch_size // layout.dp_size)
    most = most_rows or plausible
    most = min(most, training.global_batch_size)
    sizes = [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]
    if is_cpu:
        return calibrate(probe, sizes, free_bytes=None)
    free, total = torch.cuda.mem_get_info(device)
    usable = min(total * _MEMORY_SHARE, free + torch.cuda.memory_reserved(device))
    budget = usable - standing_bytes(model, config, strategy, mesh)
    try:
        return calibrate(probe, sizes, free_bytes=budget)
    except torch.OutOfMemoryError:
        return None, True
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_blocks(
    model: nn.Module, config: RunConfig, mesh: Mesh, world: World
) -> tuple[float | None, bool]:
    """Seconds of this rank for one row through all blocks of the model, and whether the measurement
    settled. None: the GPU has no room for it. All ranks must call this.

    Arguments as for `measure_curve`. The vocabulary is small, because only one stage has the head.
    """
    device, given = world.device, config.training.micro_batch_size
    rows = [given] if isinstance(given, int) else [1, 4] if device.type == "cuda" else [1]
    probe = _probe(model, config, mesh, world, share=1.0, vocab_size=_FEW_TOKENS)
    try:
        curve, is_settled = calibrate(probe, rows, free_bytes=None)
    except torch.OutOfMemoryError:
        return None, True
    return 1 / curve.rows_per_second, is_settled


def _probe(
    model: nn.Module,
    config: RunConfig,
    mesh: Mesh,
    world: World,
    *,
    share: float,
    vocab_size: int,
    kept: int = 1,
) -> Probe:
    shape: Any = model.config
    training, device = config.training, world.device

    def make(num_layers: int) -> nn.Module:
        probe = build_probe(
            config.model,
            num_layers=num_layers,
            device=device,
            dtype=weights_dtype(training.precision),
            vocab_size=vocab_size,
            adapter=config.adapter,
            frozen_dtype=frozen_dtype(training.precision, config.adapter),
        )
        set_gradient_checkpointing(probe, training.gradient_checkpointing)
        use_maskless_attention(
            probe,
            device=device,
            dtype=COMPUTE_DTYPE.get(training.precision),
            is_compiled=training.torch_compile is True,
        )
        # In bf16 with fp8-mixed too: it needs the same memory, and uncompiled fp8 would be slow.
        return Training(probe, config, device)

    return Probe(
        make=make,
        layers=int(shape.get_text_config().num_hidden_layers),
        vocab_size=vocab_size,
        seq_length=max(1, config.data.seq_length // mesh.layout.cp),
        device=device,
        share=share,
        kept=kept,
        world=world if device.type == "cpu" else None,
    )


def cpu_micro_batch(
    model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh, world: World
) -> int:
    """The most rows of a micro-batch on CPUs: `CPU_MICRO_BATCH_SIZE`, or fewer if the rank's share
    of the machine's or container's memory is too small. All ranks must call this."""
    mine, pp_rank = memory().total // world.local_world_size, mesh.place.pp
    size, rows = architecture_of(model), CPU_MICRO_BATCH_SIZE
    while rows > 1:
        needed = step_memory(size, config, strategy, mesh.layout, rows=rows, pp_rank=pp_rank)
        if needed.peak.total + needed.host <= mine:
            break
        rows //= 2
    return min(world.gather(rows))


def standing_bytes(model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh) -> float:
    """Bytes of a rank without activations: weights, gradients, optimizer state, and gathered
    weights."""
    size, pp_rank = architecture_of(model), mesh.place.pp
    memory = step_memory(
        size, config, strategy, mesh.layout, rows=1, pp_rank=pp_rank, offloaded=mesh.offloaded
    )
    return memory.standing


class Training(nn.Module):
    """A model that its engine will train. A sample has as many rows as in training, and documents
    in a row are kept apart if the data does so."""

    def __init__(self, model: nn.Module, config: RunConfig, device: torch.device) -> None:
        super().__init__()
        self._precision = MixedPrecision(model, config.training.precision, device)
        self._model = model
        self._objective = CausalLM(model)
        self._rows_per_sample = 2 if config.training.method == "dpo" else 1
        self._isolates = isolates_any(config.data)

    def forward(self, tokens_BT: Tensor) -> None:
        """A forward and a backward pass with each token as its own target."""
        rows_BT = tokens_BT.repeat(self._rows_per_sample, 1)
        batch = Batch(rows_BT, rows_BT, ())
        if self._isolates:
            length = rows_BT.shape[1]
            # Two documents per row, because transformers makes no mask for one.
            positions_T = torch.arange(length, device=rows_BT.device) % (-(-length // 2))
            positions_BT = positions_T.repeat(len(rows_BT), 1)
            batch = replace(
                batch, position_ids_BT=positions_BT, cu_seqlens_N=cu_seqlens(positions_BT)
            )
        with self._precision.micro_batch():
            with self._precision.forward():
                loss = self._objective.loss_sum(self._model, whole(batch, self._model))
            loss.backward()  # type: ignore[no-untyped-call]
