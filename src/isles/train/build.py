"""The only assembler: from a resolved run file to the parts of the loop."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from isles.balance.balancer import Balancer
from isles.checkpoint.load import load_tensors, on_this_disk, restore_rng
from isles.checkpoint.save import CheckpointManager
from isles.config.interop.deepspeed import deepspeed_notes
from isles.config.layout import Strategy
from isles.config.memory import step_memory
from isles.config.resolve import Resolved
from isles.config.sections.run import RunConfig
from isles.data.loader import Loader
from isles.data.mix import Dataset
from isles.dist.files import Disks
from isles.dist.mesh import Mesh
from isles.dist.world import World, gpu_bytes
from isles.facts.units import format_bytes
from isles.models.build import fill_model
from isles.models.recompute import set_gradient_checkpointing
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.upload import Uploader
from isles.strategies.base import Engine
from isles.strategies.routers import LOAD
from isles.train.balance import make_balancer, watch_speed
from isles.train.compiled import compile_blocks, resolve_compile
from isles.train.cut import PipelineCut, cut_pipeline
from isles.train.data import make_data
from isles.train.length import run_length
from isles.train.metrics import StepMeter, process_bytes
from isles.train.model import (
    ModelSize,
    agree_on_base,
    count_parameters,
    empty_model,
    keep_base,
    whole_model,
)
from isles.train.offload import offload_blocks
from isles.train.optimizer.make import make_optimizers
from isles.train.parts import Parts
from isles.train.products import keep_angles_exact, products_note
from isles.train.progress import Progress
from isles.train.reach import adapter_notes, balance_notes
from isles.train.record import Recorder, make_trackers
from isles.train.reference import disable_dropout, pairs_read, score_reference
from isles.train.stop import Agreement, StopSignals
from isles.train.strategy import (
    check_blocks,
    check_devices,
    check_is_read_whole,
    is_sharded,
    make_engine,
    make_routers,
    resolve_mesh,
    resolve_strategy,
    use_attention,
)

if TYPE_CHECKING:
    from isles.outer.samples import OwnSamples
    from isles.outer.trainer.step import OuterStep

log = logging.getLogger(__name__)


def build(
    resolved: Resolved,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    signals: StopSignals,
    resume_from: CheckpointInfo | None,
    disks: Disks,
    attempt: int,
    uploader: Uploader | None = None,
) -> Parts:
    """Build every part, and load the state of a checkpoint. All ranks must call this."""
    config = resolved.config
    check_devices(config, world)
    tokenizer, training, held_out = make_data(config, run_dir, world, recorder, resume_from, disks)
    total_steps, epochs = run_length(resolved, training, resume_from, recorder.note)
    config = resolve_compile(config, world, total_steps, (training, held_out))
    resolved = replace(resolved, config=config)
    recorder.phase("building model")
    base, before = agree_on_base(config, world, resume_from), process_bytes()
    strategy, mesh, balancer, engine, model_size, cut = _make_engine(
        config, run_dir, world, recorder, tokenizer, resume_from
    )
    if resume_from is None and world.is_main:
        _note(recorder, config, engine, tokenizer, training, world)
    if config.training.method == "dpo":
        # The scores need the run's first weights, so they come before any checkpoint is loaded.
        score = functools.partial(score_reference, engine, mesh, world, recorder, run_dir)
        score("training", training, pairs_read(config, total_steps, epochs), balancer.even_size)
        score("validation", held_out, config.training.eval_samples, balancer.even_size)
    exchange = _make_exchange(config, engine, world, run_dir, recorder, resume_from)
    progress = _take_over(engine, resume_from, config, run_dir, world, disks, recorder, exchange)
    samples = _begin(exchange, progress, resume_from)
    rank, device = mesh.dp_rank, world.device
    loader = Loader(training, balancer.split, rank, device, numbering=samples, epochs=epochs)
    meter = _make_meter(model_size, config, strategy, mesh, balancer, world, before)
    now, saves = meter.clock.now, config.checkpoint  # the watchdog asks when a save last progressed
    checkpoints = CheckpointManager(run_dir, world, saves, disks, attempt, now, uploader)
    checkpoints.begin(progress.step)
    recorder.use(make_trackers(resolved, run_dir, recorder, world, step=progress.step))
    recorder.update(step=progress.step, total_steps=total_steps)
    parts = Parts(
        resolved=resolved,
        run_dir=run_dir,
        world=world,
        mesh=mesh,
        strategy=strategy,
        recorder=recorder,
        tokenizer=tokenizer,
        engine=engine,
        loader=loader,
        validation=held_out,
        progress=progress,
        agreement=Agreement(world, signals, config, progress.elapsed_s),
        meter=meter,
        checkpoints=checkpoints,
        balancer=balancer,
        total_steps=total_steps,
        training=training,
        base=base,
        vocab_size=model_size.vocab_size,
        cut=cut,
    )
    if exchange is not None:
        from isles.outer.trainer.build import join_clusters

        parts.outer = join_clusters(
            exchange,
            config,
            world,
            run_dir,
            recorder=recorder,
            meter=meter,
            forget_ahead=loader.forget,
            requested=lambda: signals.stop_code,
            total_steps=total_steps,
            data_content=training.content,
            base=base,
        )
    return parts


def _make_exchange(
    config: RunConfig,
    engine: Engine,
    world: World,
    run_dir: RunDir,
    recorder: Recorder,
    resume_from: CheckpointInfo | None,
) -> OuterStep | None:
    if config.diloco is None:
        return None
    # Its web client takes a third of a second to import, so other runs skip it.
    from isles.outer.trainer.build import make_exchange

    return make_exchange(config, engine, world, run_dir, recorder, resume_from)


def _note(
    recorder: Recorder,
    config: RunConfig,
    engine: Engine,
    tokenizer: Any,
    training: Dataset,
    world: World,
) -> None:
    # Lines shown to the user at the start of a new run.
    lines = deepspeed_notes(config)
    if note := products_note(config.training, world):
        lines.append(note)
    # Each of several stages has the names of the whole model.
    stages = engine.model
    model = stages[0] if isinstance(stages, nn.ModuleList) else stages
    if config.adapter.type != "none":
        lines += adapter_notes(config, model, tokenizer, training)
    if config.model.init == "scratch" and engine.routers is not None:
        lines += balance_notes(config.model, model, engine.routers.coefficient)
    for line in lines:
        recorder.note(line)


def _make_meter(
    model: ModelSize,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    balancer: Balancer,
    world: World,
    before: int,
) -> StepMeter:
    # Includes the calculated memory of this rank and its rows.
    rows = balancer.split.micro_steps(mesh.dp_rank)
    layout, count = mesh.layout, len(rows)
    memory = step_memory(
        model.known,
        config,
        strategy,
        layout,
        rows=max(1, *rows),
        micro_batches=count,
        gpu_bytes=gpu_bytes(world.device),
        pp_rank=mesh.place.pp,
        offloaded=mesh.offloaded,
    )
    # Offloaded tensors of a rank on a CPU are in the same memory.
    calculated = memory.peak.total + (memory.host if world.device.type == "cpu" else 0.0)
    return StepMeter(world, model.flops_per_token, calculated, before)


def _make_engine(
    config: RunConfig,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    tokenizer: Any,
    resume_from: CheckpointInfo | None,
) -> tuple[Strategy, Mesh, Balancer, Engine, ModelSize, PipelineCut | None]:
    # The model inside its strategy's engine, its size, and the cut of a pipeline.
    manifest = {} if resume_from is None else resume_from.manifest
    make = functools.partial(empty_model, config, tokenizer)
    strategy, why = resolve_strategy(config, world, make, manifest)
    recorder.phase("building model", why)
    mesh = resolve_mesh(strategy, world)
    model = _make_model(config, strategy, mesh, world, tokenizer)
    # Before the model is sharded.
    size = ModelSize.of(model, config.data.seq_length)
    mesh, cut = cut_pipeline(model, config, strategy, mesh, world, manifest)
    mesh = offload_blocks(model, config, strategy, mesh, world, recorder.note)
    parts = model, config, strategy, mesh, world, run_dir, recorder, resume_from
    balancer = make_balancer(*parts, is_cut_kept=cut is None or cut.is_kept)
    routers = make_routers(config.model, model, mesh, world)  # by names that a sharded model lacks
    optimizers = functools.partial(make_optimizers, config.training, seed=config.seed)
    fill = functools.partial(fill_model, config=config.model, seed=config.seed)
    engine = make_engine(strategy, model, fill, optimizers, mesh, world, config)
    if routers is not None:
        engine.use_routers(routers)
    is_pipeline = cut is not None and config.balance == "auto"
    watch_speed(balancer, engine.model, config, world, is_pipeline=is_pipeline)
    if world.is_main:
        keep_base(config, run_dir)
    return strategy, mesh, balancer, engine, size, cut


def _make_model(
    config: RunConfig, strategy: Strategy, mesh: Mesh, world: World, tokenizer: Any
) -> nn.Module:
    # The model: whole on this rank's device, or empty if it will be sharded.
    if is_sharded(strategy):
        model = empty_model(config, tokenizer)
        check_blocks(model, strategy)
    else:
        model = whole_model(config, tokenizer, world.device)
        check_is_read_whole(model, strategy, world)
    if config.training.method == "dpo":
        disable_dropout(model)
    set_gradient_checkpointing(model, config.training.gradient_checkpointing)
    use_attention(model, mesh, world.device, config.training)
    if config.training.tf32:
        keep_angles_exact(model)
    names = getattr(strategy, "transformer_layer_cls_to_wrap", ())
    if config.training.precision == "fp8-mixed":
        from isles.train.fp8 import use_fp8  # torchao takes seconds to import

        use_fp8(model, config.training, names)
    if config.training.torch_compile is True:
        compile_blocks(model, names)
    log.info(
        "model=%s parameters=%d trained=%d ranks=%d threads=%d",
        config.model.name_or_path,
        count_parameters(model),
        count_parameters(model, trained=True),
        world.world_size,
        torch.get_num_threads(),
    )
    return model


def _begin(
    exchange: OuterStep | None, progress: Progress, checkpoint: CheckpointInfo | None
) -> OwnSamples | None:
    with nullcontext() if checkpoint is None else checkpoint.reading("outer"):
        return None if exchange is None else exchange.begin(progress)


def _take_over(
    engine: Engine,
    checkpoint: CheckpointInfo | None,
    config: RunConfig,
    run_dir: RunDir,
    world: World,
    disks: Disks,
    recorder: Recorder,
    exchange: OuterStep | None,
) -> Progress:
    # The state of a checkpoint, or the state of a new run.
    seed = config.seed + 1_000_003 * (world.rank + 1)  # of dropout: differs per rank
    torch.manual_seed(seed)
    if checkpoint is None:
        return Progress.fresh()
    state = engine.state_dict()
    outer = {} if exchange is None else exchange.loaded_tensors()
    progress = Progress.from_manifest(checkpoint.manifest)
    saved_world_size = int(checkpoint.manifest["world_size"])

    def report(done: int, total: int) -> None:
        moved = f"{format_bytes(done)} of {format_bytes(total)}"
        recorder.phase("bringing checkpoint", f"step {checkpoint.step}: {moved}")

    with on_this_disk(checkpoint, run_dir, world, disks, report) as folder:
        if load_tensors(state | outer, folder, optional=(LOAD,)) and world.is_main:
            recorder.note(
                "the checkpoint is of a run without the loss that balances experts, which is now "
                "part of the loss. model.router_aux_loss_coef: 0 turns it off"
            )
        engine.load_state_dict(state)
        is_restored = restore_rng(
            folder, world.rank, saved_world_size=saved_world_size, world_size=world.world_size
        )
    if not is_restored:
        torch.manual_seed(seed + 7_919 * progress.step)
    log.info(
        "resumed step=%d samples=%d ranks=%d saved_with=%d checkpoint=%s",
        progress.step,
        progress.samples,
        world.world_size,
        saved_world_size,
        checkpoint.path,
    )
    return progress
