"""How fast a rank is, and the largest micro-batch that fits on its GPU, by models of few layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from isles.balance.curve import Curve
from isles.balance.measure import Probe, calibrate
from isles.config.layout import Strategy
from isles.config.memory import step_memory
from isles.config.sections.data import isolates_any
from isles.config.sections.run import RunConfig
from isles.dist.batch import COMPUTE_DTYPE, MIXED_DTYPE, Batch, cu_seqlens
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.models.adapter import frozen_dtype
from isles.models.attention import use_maskless_attention
from isles.models.build import build_probe
from isles.models.recompute import set_gradient_checkpointing
from isles.run.limits import memory
from isles.strategies.objective import CausalLM
from isles.strategies.sequence import whole
from isles.train.model import architecture_of, weights_dtype

CPU_MICRO_BATCH_SIZE = 8
"""On a CPU large micro-batches gain nothing: this, or the largest divisor of the rank's rows below
it."""

_PLAUSIBLE = 4
"""A rank is not tried with micro-batches of more than so many times its even part of the rows."""

_MEMORY_SHARE = 0.9
"""Of the GPU's memory that a micro-batch may fill; the rest is for fragmentation."""


def even_micro_batch(rows: int, largest: int, before: int | None) -> int:
    """Size of equal micro-batches for a rank's rows.

    Args:
        rows: of the rank in a step.
        largest: most rows of a micro-batch.
        before: the size that the run has had, which it keeps where it divides the rows: another
            adds the same numbers in another order.
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
    """How fast this rank is and how many rows fit, None where not even one does; and whether what
    was measured settled. All ranks must call this.

    Args:
        model: the real one, of which only shapes are looked at: it may lie on the meta device.
        strategy: how the model is held; it decides what memory is left.
        most_rows: of a micro-batch, if the run file says so; on a CPU see `cpu_micro_batch`.
    """
    shape: Any = model.config
    text, training, layout = shape.get_text_config(), config.training, mesh.layout
    device, is_cpu = world.device, world.device.type == "cpu"

    def make(num_layers: int) -> nn.Module:
        probe = build_probe(
            config.model,
            num_layers=num_layers,
            device=device,
            dtype=weights_dtype(training.precision),
            vocab_size=int(text.vocab_size),
            adapter=config.adapter,
            frozen_dtype=frozen_dtype(training.precision, config.adapter),
        )
        set_gradient_checkpointing(probe, training.gradient_checkpointing)
        use_maskless_attention(
            probe,
            device=device,
            dtype=COMPUTE_DTYPE.get(training.precision),
            is_compiled=training.torch_compile,
        )
        return WithLoss(probe, config)

    probe = Probe(
        make=make,
        layers=int(text.num_hidden_layers),
        vocab_size=int(text.vocab_size),
        seq_length=max(1, config.data.seq_length // layout.cp),
        autocast=MIXED_DTYPE.get(training.precision),
        device=device,
        share=1 / (layout.tp * layout.pp),
        world=world if is_cpu else None,
    )
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


def cpu_micro_batch(
    model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh, world: World
) -> int:
    """The most rows of a micro-batch on CPUs: `CPU_MICRO_BATCH_SIZE`, or fewer if a rank's part of
    the machine's or container's memory is smaller. All ranks must call this."""
    mine = min(world.gather(memory().total // world.local_world_size))
    size, rows = architecture_of(model), CPU_MICRO_BATCH_SIZE
    while rows > 1:
        needed = step_memory(size, config, strategy, mesh.layout, rows=rows)
        if needed.peak.total + needed.host <= mine:
            break
        rows //= 2
    return rows


def standing_bytes(model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh) -> float:
    """What a rank holds beside activations: weights, gradients, optimizer state, and what is
    gathered of them."""
    return step_memory(architecture_of(model), config, strategy, mesh.layout, rows=1).standing


class WithLoss(nn.Module):
    """A model and the loss that its engine will compute, of as many rows as its samples have, and
    with what keeps documents of a row apart where the data does."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        super().__init__()
        self._model = model
        self._objective = CausalLM(model)
        self._rows_per_sample = 2 if config.training.method == "dpo" else 1
        self._isolates = isolates_any(config.data)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The summed loss when each token is its own target."""
        rows_BT = tokens_BT.repeat(self._rows_per_sample, 1)
        batch = Batch(rows_BT, rows_BT, ())
        if self._isolates:
            length = rows_BT.shape[1]
            # Two documents a row: of one, transformers would make no mask.
            positions_T = torch.arange(length, device=rows_BT.device) % (-(-length // 2))
            positions_BT = positions_T.repeat(len(rows_BT), 1)
            batch = replace(
                batch, position_ids_BT=positions_BT, cu_seqlens_N=cu_seqlens(positions_BT)
            )
        return self._objective.loss_sum(self._model, whole(batch, self._model))
