"""How fast a rank is, and the largest micro-batch that fits on its GPU: found by trying."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.balance.curve import Curve
from isles.balance.measure import (
    Lockstep,
    Probe,
    calibrate,
    curve_file,
    keep_curve,
    read_curve,
)
from isles.config.layout import Strategy
from isles.config.sections.data import isolates_any
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DeepSpeedStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch, cu_seqlens
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.errors import OutOfMemoryError
from isles.facts.cost import optimizer_bytes
from isles.models.adapter import frozen_dtype
from isles.models.attention import use_maskless_attention
from isles.models.build import build_probe, set_gradient_checkpointing
from isles.run.checkpoints import CheckpointInfo
from isles.run.env import cache_home
from isles.strategies.objective import CausalLM
from isles.strategies.sequence import whole
from isles.train.strategy import SCORES_DTYPE

log = logging.getLogger(__name__)

CPU_MICRO_BATCH_SIZE = 8
"""On a CPU memory is shared and large micro-batches gain nothing: this, or the largest divisor of
the rank's rows below it."""

_PLAUSIBLE = 4
"""A rank is not tried with micro-batches of more than so many times its even part of the rows."""

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

_MEMORY_SHARE = 0.9
"""Of the GPU's memory that a micro-batch may fill; the rest is for fragmentation."""


def choose_micro_batch_size(
    model: nn.Module,
    config: RunConfig,
    rows_per_rank: int,
    world: World,
    resume_from: CheckpointInfo | None,
) -> int:
    """The run file's micro-batch size, or the largest that fits. All ranks must call this.

    A run that goes on keeps the size it had, as long as it divides this rank's rows: another size
    adds the same numbers in another order.

    Raises:
        OutOfMemoryError: not even one row fits.
    """
    wanted = config.training.micro_batch_size
    if isinstance(wanted, int):
        return wanted
    if resume_from is not None:
        before = int(resume_from.manifest["micro_batch_size"])
        if rows_per_rank % before == 0:
            return before
    divisors = [size for size in range(1, rows_per_rank + 1) if rows_per_rank % size == 0]
    if world.device.type == "cpu":
        return max(size for size in divisors if size <= CPU_MICRO_BATCH_SIZE)
    mine = _largest_that_fits(model, config, divisors, world.device)
    smallest = min(world.gather(mine))
    if smallest == 0:
        raise no_row_fits(config, world.rank, world.host)
    log.info("micro_batch_size=%d was found to fit", smallest)
    return smallest


def no_row_fits(config: RunConfig, rank: int, host: str) -> OutOfMemoryError:
    """The error of a rank whose memory is too small for anything."""
    return OutOfMemoryError(
        f"one sequence of {config.data.seq_length} tokens does not fit on the GPU",
        where=f"rank {rank} on {host}",
        fix="training.gradient_checkpointing: full, a shorter data.seq_length, an adapter, "
        "strategy: {kind: fsdp} over more GPUs, training.optimizer: adamw_8bit, "
        "training.precision: bf16-true, or a smaller model",
        id="memory.gpu",
    )


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
        config: the run file.
        strategy: how the model is held; it decides what memory is left.
        mesh: the grid.
        world: the ranks.
        most_rows: of a micro-batch, where the run file says so.
    """
    shape: Any = model.config
    training, layout = config.training, mesh.layout
    layers = int(shape.get_text_config().num_hidden_layers)
    dtype = torch.bfloat16 if training.precision == "bf16-true" else torch.float32

    def make(num_layers: int) -> nn.Module:
        probe = build_probe(
            config.model,
            num_layers=num_layers,
            device=world.device,
            dtype=dtype,
            vocab_size=int(shape.get_text_config().vocab_size),
            adapter=config.adapter,
            frozen_dtype=frozen_dtype(training.precision, config.adapter),
        )
        set_gradient_checkpointing(probe, training.gradient_checkpointing)
        use_maskless_attention(
            probe,
            device=world.device,
            dtype=SCORES_DTYPE.get(training.precision),
            is_compiled=training.torch_compile,
        )
        return WithLoss(probe, config)

    probe = Probe(
        make=make,
        layers=layers,
        vocab_size=int(shape.get_text_config().vocab_size),
        seq_length=max(1, config.data.seq_length // layout.cp),
        autocast=_AUTOCAST.get(training.precision),
        device=world.device,
        share=1 / (layout.tp * layout.pp),
    )
    rows = training.global_batch_size
    if world.device.type == "cpu":
        most = min(most_rows or CPU_MICRO_BATCH_SIZE, rows)
        together = replace(probe, lockstep=Lockstep(world))
        return calibrate(together, _doubling(most), free_bytes=None)
    most = min(most_rows or _PLAUSIBLE * -(-rows // layout.dp_size), rows)
    return _measure_gpu(probe, _doubling(most), model, config, strategy, mesh)


def _measure_gpu(
    probe: Probe,
    sizes: list[int],
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
) -> tuple[Curve | None, bool]:
    # As it was measured in an earlier run, or now.
    device, shape = probe.device, cast(Any, model).config
    free, total = torch.cuda.mem_get_info(device)
    usable = min(total * _MEMORY_SHARE, free + torch.cuda.memory_reserved(device))
    budget = usable - state_bytes(model, config, strategy, mesh)
    key: dict[str, object] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "model": shape.to_json_string(),
        "attention": config.model.attn_implementation,
        "precision": config.training.precision,
        "checkpointing": config.training.gradient_checkpointing,
        "optimizer": config.training.optimizer,
        "adapter": config.adapter.model_dump(),
        "method": config.training.method,
        "isolates": isolates_any(config.data),
        "strategy": strategy.model_dump(),
        "shape": [probe.seq_length, probe.share, sizes[-1], mesh.layout.world_size],
        "budget_gib": round(budget / 2**30),
    }
    file = curve_file(cache_home(), key)
    if (known := read_curve(file)) is not None:
        return known, True
    try:
        curve, is_settled = calibrate(probe, sizes, free_bytes=budget)
    except torch.OutOfMemoryError:
        return None, True
    finally:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if is_settled:
        keep_curve(file, curve)
    return curve, is_settled


def state_bytes(model: nn.Module, config: RunConfig, strategy: Strategy, mesh: Mesh) -> float:
    """Weights, gradients and optimizer state on one rank, and what is gathered of them.

    Rather too much than too little; activations come on top.
    """
    numel = sum(p.numel() for p in model.parameters())
    total = float(sum(p.numel() * p.element_size() for p in model.parameters()))
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = float(sum(p.numel() * p.element_size() for p in trained))
    frozen = total - weights
    optimizer = optimizer_bytes(sum(p.numel() for p in trained), weights, config.training.optimizer)
    cut = mesh.layout.tp * mesh.layout.pp
    # Two blocks and the embeddings are whole at a time, with their gradients.
    gathered = 4 * max((p.numel() for p in model.parameters()), default=0) * total / max(1, numel)
    match strategy:
        case FSDPStrategyConfig():
            shards = mesh.layout.dp_shard * mesh.layout.cp
            kept = (frozen + 2 * weights + optimizer) / shards
            if strategy.cpu_offload:
                kept = 0.0
            if strategy.sharding_strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"):
                gathered = total + weights
            return (kept + gathered) / cut
        case DeepSpeedStrategyConfig():
            ranks, stage = mesh.layout.dp_size, strategy.zero_stage
            kept = total / (ranks if stage == 3 else 1)
            kept += weights / (ranks if stage >= 2 else 1)
            if strategy.offload_optimizer == "none":
                kept += (optimizer + weights) / ranks  # DeepSpeed keeps a second, exact copy
            return kept + gathered
        case _:
            return (frozen + 2 * weights + optimizer + weights) / cut


def _doubling(most: int) -> list[int]:
    # 1, 2, 4 … and the last one.
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return [*sizes, most]


def _largest_that_fits(
    model: nn.Module, config: RunConfig, sizes: list[int], device: torch.device
) -> int:
    # Try sizes upwards; stop where the next is foreseen to overflow, or does.
    total = torch.cuda.get_device_properties(device).total_memory
    trained = [p for p in model.parameters() if p.requires_grad]
    weights = sum(p.numel() * p.element_size() for p in trained)
    # DDP keeps a second copy of the gradients at most.
    reserve = optimizer_bytes(sum(p.numel() for p in trained), weights, config.training.optimizer)
    reserve += weights if dist.get_world_size() > 1 else 0
    budget = total * _MEMORY_SHARE - reserve
    state = torch.cuda.get_rng_state(device)
    best = 0
    try:
        for size in sizes:
            torch.cuda.reset_peak_memory_stats(device)
            base = torch.cuda.memory_allocated(device)
            _try(model, config, size, device)
            peak = torch.cuda.max_memory_allocated(device)
            if peak > budget:
                break
            best = size
            larger = [other for other in sizes if other > size]
            if larger and base + (peak - base) * larger[0] / size > budget:
                break
    except torch.OutOfMemoryError:
        pass  # the size before this one is the answer
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.set_rng_state(state, device)
        torch.cuda.reset_peak_memory_stats(device)
    return best


def _try(model: Any, config: RunConfig, rows: int, device: torch.device) -> None:
    precision = config.training.precision
    dtype = torch.float16 if precision == "fp16-mixed" else torch.bfloat16
    tokens = torch.zeros((rows, config.data.seq_length), dtype=torch.int64, device=device)
    # Compiled it takes less memory, and a minute for each size that is tried.
    with torch.compiler.set_stance("force_eager"):
        with torch.autocast("cuda", dtype=dtype, enabled=precision.endswith("mixed")):
            loss = WithLoss(model, config)(tokens)
        loss.backward()


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
