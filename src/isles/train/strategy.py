"""The grid of ranks, the engine and the attention of a run's `strategy` section."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from isles.config.auto import (
    Resources,
    choose_strategy,
    describe,
    fitting_pipeline,
    fitting_strategies,
)
from isles.config.interop.deepspeed import check_accumulation, deepspeed_settings, resolve_stage
from isles.config.layout import Strategy, make_layout
from isles.config.memory import has_whole_stages
from isles.config.roofline import Chip, Links, inside_rate, slowest
from isles.config.rules.shape import unbalanced
from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    AutoStrategy,
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
    MeshSection,
)
from isles.config.sections.training import TrainingConfig
from isles.dist.batch import COMPUTE_DTYPE
from isles.dist.mesh import Mesh, make_mesh
from isles.dist.world import World, gpu_bytes
from isles.errors import UserError
from isles.facts.gpus import find_gpu, lacking
from isles.facts.memory.layers import stages_of
from isles.models.attention import check_attention, use_maskless_attention
from isles.models.routers import find_routers
from isles.run.limits import memory
from isles.strategies.base import Engine
from isles.strategies.objective import DPO, CausalLM, MakeObjective
from isles.strategies.routers import Routers
from isles.train.model import architecture_of

log = logging.getLogger(__name__)

_LINK_BYTES = 32 * 2**20
_LINK_REPEATS = 3

MakeOptimizers = Callable[[nn.Module], Sequence[Optimizer]]


def check_devices(config: RunConfig, world: World) -> None:
    """Check that the GPUs of all ranks can train this run. All ranks must call this.

    Raises:
        UserError: names the setting that a GPU lacks.
    """
    check_attention(config.model.attn_implementation, world.device)
    check_precision(config.training.precision, world)


def check_precision(precision: str, world: World) -> None:
    """Refuse a precision that a rank's device does not have. All ranks must call this.

    The rank with the oldest device decides, because all ranks must compute alike.

    Raises:
        UserError: names these ranks, the same on every rank.
    """
    device, is_nvidia = world.device, torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    own = lacking(precision, capability, is_nvidia=is_nvidia)
    name = f"rank {world.rank} on {world.host} ({world.device_name})"
    found = [(where, lack) for where, lack in world.gather((name, own)) if lack is not None]
    if found:
        names = [name for name, _ in found]
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} other ranks"]
        *others, last = names
        where = f"{', '.join(others)} and {last}" if others else last
        # The fix of the oldest GPU is a precision that all devices have.
        least = max((lack for _, lack in found), key=lambda lack: "fp16" in lack.fix)
        raise UserError(
            f"training.precision {precision} {least.what.format(where)}",
            where="training.precision",
            fix=least.fix,
            id="gpu.precision",
        )


def resolve_strategy(
    config: RunConfig,
    world: World,
    empty_model: Callable[[], nn.Module],
    manifest: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Strategy, str]:
    """The run file's strategy, or the strategy that isles chooses for `auto`, and the reason ("" if
    the run file sets it). All ranks must call this.

    Args:
        empty_model: makes the model without allocating memory.
        manifest: of the checkpoint that the run resumes from. On as many ranks, `auto` keeps its
            strategy, because measured links vary and another strategy rounds otherwise.
    """
    match config.strategy:
        case AutoStrategy():
            is_same = manifest.get("world_size") == world.world_size
            before = manifest.get("sharding") if is_same else None
            return _choose(config, world, empty_model(), before)
        case given:
            return given, ""


def _choose(
    config: RunConfig, world: World, model: nn.Module, before: str | None
) -> tuple[Strategy, str]:
    size = architecture_of(model)
    # Memory of the rank with the least: its GPU's, or on a CPU its part of the machine's.
    if world.device.type == "cuda":
        mine = gpu_bytes(world.device)
    else:
        mine = memory().total // world.local_world_size
    names = world.gather(world.device_name)
    gpus = [find_gpu(name) for name in names]
    local = _ranks_per_node(world)
    machine = Resources(
        world.world_size,
        local,
        min(world.gather(mine)),
        Links(local, world.world_size // local, min(map(inside_rate, gpus)), 0.0),
        slowest([Chip.of(gpu, config.training.products) for gpu in gpus])
        if world.device.type == "cuda"
        else Chip(is_cuda=False),
    )
    fitting = fitting_strategies(size, config, machine)
    if not fitting and isinstance(config.strategy, AutoStrategy) and config.strategy.pp_size != 1:
        shape: Any = model.config
        every, is_cuda = world.gather(mine), machine.chip.is_cuda
        pipeline = fitting_pipeline(size, config, shape.to_dict(), every, is_cuda=is_cuda)
        if pipeline is not None:
            ranks = world.world_size
            return pipeline, f"a pipeline over {ranks} ranks, as neither ddp nor fsdp fits"
    for strategy, _ in fitting:
        if describe(strategy) == before:
            return strategy, f"{before}, as before the checkpoint"
    if len(fitting) > 1:
        machine = replace(machine, links=_measured(machine.links, world))
    chosen, why = choose_strategy(size, config, machine, fitting)
    return chosen, f"{describe(chosen)}, as {why}"


def _measured(links: Links, world: World) -> Links:
    # The slowest link of all ranks: between hosts, or if there is one host, within it.
    empty_s = _all_reduce_s(world, 4)
    seconds = max(_all_reduce_s(world, _LINK_BYTES) - empty_s, 1e-9)
    # Each rank sends 2 (n - 1) / n of the buffer: the bus bandwidth of NVIDIA's nccl-tests.
    peers = world.world_size - 1
    bytes_per_s = 2 * peers / world.world_size * _LINK_BYTES / seconds
    if links.hosts == 1:
        return replace(links, inside_bytes_per_s=bytes_per_s)
    return replace(links, network_bytes_per_s=bytes_per_s, latency_s=empty_s / (2 * peers))


def _all_reduce_s(world: World, size_bytes: int) -> float:
    # The fastest of a few tries, on the slowest rank.
    buffer = torch.zeros(size_bytes // 4, device=world.device)
    best = float("inf")
    for _ in range(_LINK_REPEATS):
        dist.barrier()
        _wait(world)
        began = time.perf_counter()
        dist.all_reduce(buffer)
        _wait(world)
        best = min(best, time.perf_counter() - began)
    return max(world.gather(best))


def _wait(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def resolve_mesh(strategy: Strategy, world: World) -> Mesh:
    """The grid of a strategy's ranks. All ranks must call this."""
    layout = make_layout(strategy, world.world_size, local_world_size=_ranks_per_node(world))
    deals_ends = isinstance(strategy, MeshSection) and strategy.cp_method == "allgather"
    return make_mesh(layout, world, is_sharded=is_sharded(strategy), deals_ends=deals_ends)


def _ranks_per_node(world: World) -> int:
    # Ranks per node; on unequal nodes the most successive ranks that always share a node. Every
    # rank must get the same value, or it would form other groups than its peers and hang.
    return math.gcd(*world.gather(world.local_world_size))


def is_sharded(strategy: Strategy) -> bool:
    """True if the model is built empty, sharded, and then filled piece by piece."""
    match strategy:
        case AutoStrategy():
            return False
        case DeepSpeedStrategyConfig():
            return resolve_stage(strategy) == 3
        case DDPStrategyConfig():
            # DistributedDataParallel does not support sharded parameters. FSDP2 on one rank is
            # the same mathematics.
            return strategy.tp_size > 1 or strategy.pp_size > 1
        case FSDPStrategyConfig():
            return True


def runs_in_step(strategy: Strategy) -> bool:
    """True if all ranks must make the same number of micro-steps."""
    return not isinstance(strategy, DDPStrategyConfig) or is_sharded(strategy)


def needs_fixed_length(config: RunConfig) -> bool:
    """True if every batch must have rows of data.seq_length.

    torch.compile would compile every other length again. Ranks that share a sequence cut it into
    equal pieces. A pipeline has buffers for one shape.
    """
    strategy = config.strategy
    if isinstance(strategy, AutoStrategy) and strategy.pp_size != 1:
        return True
    cut = isinstance(strategy, MeshSection) and max(strategy.cp_size, strategy.pp_size) > 1
    return config.training.torch_compile is True or cut


def holds_whole_model(strategy: Strategy) -> bool:
    """True if every rank holds the whole model and its optimizer."""
    return isinstance(strategy, DDPStrategyConfig) and not is_sharded(strategy)


def as_fsdp(strategy: DDPStrategyConfig | FSDPStrategyConfig) -> FSDPStrategyConfig:
    """The FSDP2 settings of a sharded strategy; ddp becomes replicas without shards."""
    match strategy:
        case FSDPStrategyConfig():
            return strategy
        case DDPStrategyConfig():
            return FSDPStrategyConfig(
                sharding_strategy="NO_SHARD",
                tp_size=strategy.tp_size,
                cp_size=strategy.cp_size,
                cp_method=strategy.cp_method,
                pp_size=strategy.pp_size,
                pp_schedule=strategy.pp_schedule,
            )


def make_engine(
    strategy: Strategy,
    model: nn.Module,
    materialize: Callable[[nn.Module], None],
    make_optimizers: MakeOptimizers,
    mesh: Mesh,
    world: World,
    config: RunConfig,
) -> Engine:
    """The engine of a strategy. All ranks must call this.

    Args:
        strategy: a resolved strategy.
        model: empty if the strategy is sharded, else whole.
        materialize: fills an empty model, or this rank's part of it, once it is allocated.
        make_optimizers: returns the optimizers of a module.
    """
    objective = make_objective(config.training)
    precision = config.training.precision
    match strategy:
        case AutoStrategy():
            raise AssertionError("resolve_strategy has chosen another strategy")
        case DeepSpeedStrategyConfig():
            from isles.strategies.deepspeed.engine import DeepSpeedEngine

            check_accumulation(config, strategy, world.world_size)
            if is_sharded(strategy):
                _check_stacks(model)
            return DeepSpeedEngine(
                model,
                materialize,
                make_optimizers,
                world,
                settings=deepspeed_settings(config, strategy),
                make_objective=objective,
            )
        case DDPStrategyConfig() if not is_sharded(strategy):
            from isles.strategies.ddp import DDPEngine

            return DDPEngine(
                model,
                make_optimizers,
                strategy,
                mesh,
                world,
                precision=precision,
                comm_sample_every=config.training.logging_steps,
                make_objective=objective,
            )
        case DDPStrategyConfig() | FSDPStrategyConfig() if strategy.pp_size > 1:
            from isles.strategies.pipeline.engine import PipelineEngine

            return PipelineEngine(
                model,
                materialize,
                make_optimizers,
                as_fsdp(strategy),
                mesh,
                world,
                precision=precision,
                is_whole=has_whole_stages(strategy),
                layers=_stages(strategy, model, mesh, config),
                parallelize=functools.partial(_cut_matrices, mesh=mesh),
            )
        case DDPStrategyConfig() | FSDPStrategyConfig():
            from isles.strategies.fsdp import FSDPEngine

            return FSDPEngine(
                _cut_matrices(model, mesh),
                materialize,
                make_optimizers,
                as_fsdp(strategy),
                mesh,
                world,
                precision=precision,
                make_objective=objective,
            )
        case _:
            assert_never(strategy)


def _stages(
    strategy: MeshSection, model: nn.Module, mesh: Mesh, config: RunConfig
) -> Sequence[range]:
    # The layers of each stage.
    from isles.strategies.pipeline.stages import stages_per_rank

    count = strategy.pp_size * stages_per_rank(strategy.pp_schedule)
    return stages_of(architecture_of(model), config.data.seq_length, count, mesh.layout.cut)


def _check_stacks(model: nn.Module) -> None:
    # ZeRO 3 gathers the weights of a module when the module is called.
    if any(hasattr(module, "parameter_name") for module in model.modules()):
        raise UserError(
            "deepspeed with zero_stage 3 does not support adapters of stacked experts: peft reads "
            "the adapter's weights without calling their module, so that ZeRO does not gather them",
            where="strategy.zero_stage",
            fix="use strategy: {kind: fsdp}, or remove the experts from adapter.target_modules",
            id="adapter.modules",
        )


def make_routers(config: ModelConfig, model: Any, mesh: Mesh, world: World) -> Routers | None:
    """The routers of a mixture of experts; None for other models.

    Args:
        model: not sharded yet.

    Raises:
        UserError: the run file balances experts that transformers cannot balance.
    """
    found = find_routers(model)
    own = getattr(model.config.get_text_config(), "router_aux_loss_coef", None)
    given = config.router_aux_loss_coef
    if given and (own is None or not found):
        issue = unbalanced(model.config.get_text_config().model_type)
        raise UserError(issue.what, where=issue.keys[0], fix=issue.fix)
    if not found:
        return None
    is_trained = any(p.requires_grad for n in found for p in model.get_submodule(n).parameters())
    coefficient = given if given is not None else float(own or 0) if is_trained else 0.0
    return Routers(found, coefficient, world, counts=mesh.place.tp == 0)


def make_objective(training: TrainingConfig) -> MakeObjective:
    """The loss function of a run."""
    match training.method:
        case "causal_lm":
            return CausalLM
        case "dpo":
            return functools.partial(
                DPO, beta=training.dpo_beta, label_smoothing=training.dpo_label_smoothing
            )
        case _:
            assert_never(training.method)


def check_blocks(model: nn.Module, strategy: Strategy) -> None:
    """Find the blocks that a strategy will shard, before the model is measured or filled.

    Raises:
        UserError: the blocks cannot be found.
    """
    if isinstance(strategy, FSDPStrategyConfig):
        from isles.strategies.fsdp import find_blocks

        find_blocks(model, strategy.transformer_layer_cls_to_wrap)


def check_is_read_whole(model: Any, strategy: Strategy, world: World) -> None:
    """Refuse a multimodal model if every trained weight needs a gradient.

    Raises:
        UserError: text input never uses some of its trained weights.
    """
    if world.world_size == 1 or not isinstance(strategy, DDPStrategyConfig):
        return
    if model.config.get_text_config() is model.config:
        return
    ends = (model.get_input_embeddings(), model.get_decoder(), model.get_output_embeddings())
    read = {id(p) for part in ends if part is not None for p in part.parameters()}
    unread = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in read]
    if unread:
        raise UserError(
            f"{type(model).__name__} has weights that text input never uses (such as {unread[0]}), "
            f"but ddp on {world.world_size} ranks needs a gradient for every weight",
            where="model.name_or_path",
            fix="train on one GPU, or save the model's text part as a separate model and train "
            "that",
        )


def use_attention(
    model: nn.Module, mesh: Mesh, device: torch.device, training: TrainingConfig
) -> None:
    """Set the attention of a training run: without masks, or over ranks that share a sequence."""
    given: dict[str, Any] = {
        "device": device,
        "dtype": COMPUTE_DTYPE.get(training.precision),
        "is_compiled": training.torch_compile is True,
    }
    if mesh.layout.cp == 1:
        use_maskless_attention(model, **given)
        return
    from isles.strategies.sequence import use_context_parallel_attention

    use_context_parallel_attention(model, mesh, **given)


def _cut_matrices(model: nn.Module, mesh: Mesh) -> nn.Module:
    if mesh.layout.tp > 1:
        from isles.strategies.tensor_parallel import apply_tensor_parallel

        assert mesh.root is not None
        apply_tensor_parallel(model, mesh.root["tp"])
    return model
