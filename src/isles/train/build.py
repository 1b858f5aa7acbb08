"""The only assembler: from a resolved run file to the parts of the loop."""

from __future__ import annotations

import functools
import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isles.balance.balancer import Balancer
from isles.checkpoint.manager import CheckpointManager
from isles.checkpoint.rng import restore_rng
from isles.checkpoint.store import load_tensors
from isles.checkpoint.travel import Travel
from isles.config.layout import Strategy
from isles.config.resolve import Resolved
from isles.config.rules.shape import check_shape
from isles.config.sections.run import RunConfig
from isles.config.sections.training import length_in_steps
from isles.data.build import build_datasets
from isles.data.dataset import Dataset
from isles.data.loader import Loader
from isles.data.tokens.tokenizer import OTHER_TOKENIZER, check_vocabulary
from isles.dist.files import Disks
from isles.dist.mesh import Mesh
from isles.dist.nodes import on_every_rank
from isles.dist.world import World
from isles.errors import ConfigError, ConfigErrors, DataError
from isles.facts.units import format_bytes
from isles.models.attention import check_attention
from isles.models.build import fill_model, load_model_config, set_gradient_checkpointing
from isles.outer.trainer.build import join_clusters, make_exchange
from isles.outer.trainer.step import Exchange
from isles.run.env import cache_home
from isles.run.manifest import CheckpointInfo
from isles.run.paths import RunDir
from isles.strategies.base import Engine
from isles.train.balance import make_balancer, watch_speed
from isles.train.hosts import check_model_folder
from isles.train.metrics import Speed, StepMeter
from isles.train.model import (
    agree_on_base,
    count_parameters,
    empty_model,
    flops_per_token,
    whole_model,
)
from isles.train.optimizer import make_optimizers
from isles.train.parts import Parts
from isles.train.progress import Progress
from isles.train.record import Recorder
from isles.train.reference import Reference
from isles.train.stop import Agreement, StopSignals
from isles.train.strategy import (
    check_blocks,
    compile_model,
    is_sharded,
    make_engine,
    needs_fixed_length,
    settle_mesh,
    settle_strategy,
    use_attention,
)
from isles.train.tokenizer import make_tokenizer
from isles.train.trackers import make_trackers

log = logging.getLogger(__name__)


def build(
    resolved: Resolved,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    signals: StopSignals,
    resume_from: CheckpointInfo | None,
    travel: Travel,
    attempt: int,
) -> Parts:
    """Build every part, and take over the state of a checkpoint. All ranks must call this."""
    config = resolved.config
    check_attention(config.model.attn_implementation, world.device)
    tokenizer, training, validation = _make_data(
        config, run_dir, world, recorder, resume_from, travel.disks
    )
    recorder.phase("building model")
    base = agree_on_base(config, world, resume_from)
    built = _make_engine(config, run_dir, world, recorder, tokenizer, resume_from)
    mesh, balancer, engine = built.mesh, built.balancer, built.engine
    total_steps = length_in_steps(config.training, training.samples_per_epoch)
    if config.training.method == "dpo":
        # With the weights that the run begins with, so before any checkpoint is taken over.
        reference = Reference(engine, mesh, world, recorder, balancer.even_size)
        reference.score_all(training, validation, config.training, total_steps, run_dir)
    exchange = make_exchange(config, engine, world, run_dir, recorder, resume_from)
    progress = _take_over(engine, resume_from, config, world, travel, recorder, exchange)
    samples = None if exchange is None else exchange.begin(progress)
    meter = StepMeter(world, Speed.of(world.device, built.flops))
    now = meter.clock.now  # the watchdog compares when a save has moved
    checkpoints = CheckpointManager(run_dir, world, config.checkpoint, travel, attempt, now)
    checkpoints.begin(progress.step)
    recorder.use(make_trackers(resolved, run_dir, recorder, world, step=progress.step))
    recorder.update(step=progress.step, total_steps=total_steps)
    parts = Parts(
        resolved=resolved,
        run_dir=run_dir,
        world=world,
        mesh=mesh,
        strategy=built.strategy,
        recorder=recorder,
        tokenizer=tokenizer,
        engine=engine,
        loader=Loader(
            training,
            split=balancer.split,
            dp_rank=mesh.dp_rank,
            device=world.device,
            numbering=samples,
        ),
        validation=validation,
        progress=progress,
        agreement=_make_agreement(config, world, signals, progress),
        meter=meter,
        checkpoints=checkpoints,
        balancer=balancer,
        total_steps=total_steps,
        git_commit=_git_commit() if world.is_main else None,
        data_content=training.content,
        samples_per_epoch=training.samples_per_epoch,
        base=base,
    )
    if exchange is not None:
        parts.outer = join_clusters(
            exchange,
            config,
            world,
            run_dir,
            recorder=recorder,
            meter=meter,
            forget_ahead=parts.loader.forget,
            requested=lambda: signals.stop_code,
            total_steps=total_steps,
            data_content=parts.data_content,
            base=base,
        )
    return parts


def _make_data(
    config: RunConfig,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    resume_from: CheckpointInfo | None,
    disks: Disks,
) -> tuple[Any, Dataset, Dataset | None]:
    # Tokenizer, training and validation data. All ranks must call this.
    recorder.phase("preparing data")
    # First: its errors say more than a tokenizer's.
    check_model_folder(config.model, world)
    hf_config = on_every_rank(world, lambda: load_model_config(config.model))
    tokenizer = make_tokenizer(config, run_dir, world, disks)
    _check_shape(config, hf_config.to_dict())
    # A tokenizer that is trained for the run decides how many tokens the model knows.
    trained = config.tokenizer.train_vocab_size is not None
    vocab_size = len(tokenizer) if trained else int(hf_config.vocab_size)
    if tokenizer is not None and (warning := check_vocabulary(tokenizer, vocab_size)):
        recorder.note(warning)
    training, validation = build_datasets(
        config.data,
        tokenizer,
        Path(config.data.cache_dir) if config.data.cache_dir else cache_home() / "data",
        seed=config.seed,
        vocab_size=vocab_size,
        progress=lambda text: recorder.phase("preparing data", text),
        world=world,
        pairs=config.training.method == "dpo",
        fixed_length=needs_fixed_length(config),
        stream_state=None if resume_from is None else resume_from.manifest.get("stream"),
    )
    _compare_data(training, world)
    if resume_from is not None:
        _check_data(training, resume_from)
    needed = max(part.vocab_size_needed for part in (training, validation) if part is not None)
    if needed > vocab_size:
        raise DataError(
            f"the data holds token {needed - 1}, the model knows {vocab_size} tokens",
            where="tokenizer.name_or_path",
            fix=OTHER_TOKENIZER,
            id="data.tokenizer",
        )
    return tokenizer, training, validation


def _compare_data(training: Dataset, world: World) -> None:
    # Every rank must have the same samples. All ranks must call this.
    found = world.gather((world.host, training.content))
    odd = [
        f"{rank} on {host}" for rank, (host, content) in enumerate(found) if content != found[0][1]
    ]
    if odd:
        raise DataError(
            f"these ranks have other training data than rank 0 on {found[0][0]}: {', '.join(odd)}",
            where="data.sources",
            fix="give every machine the same files, or let one of them alone have them: what is "
            "prepared there is sent to the others",
            id="data.changed",
        )


def _check_shape(config: RunConfig, shape: dict[str, Any]) -> None:
    # What could not be told before the start, where the model's config was not on that machine.
    if violations := check_shape(config, shape):
        raise ConfigErrors([ConfigError(v.what, where=v.keys[0], fix=v.fix) for v in violations])


@dataclass(frozen=True, slots=True)
class _Built:
    """The model in the hands of its strategy."""

    strategy: Strategy
    mesh: Mesh
    balancer: Balancer
    engine: Engine
    flops: float


def _make_engine(
    config: RunConfig,
    run_dir: RunDir,
    world: World,
    recorder: Recorder,
    tokenizer: Any,
    resume_from: CheckpointInfo | None,
) -> _Built:
    strategy, why = settle_strategy(config, world, lambda: empty_model(config, tokenizer))
    recorder.phase("building model", why)
    mesh = settle_mesh(strategy, world)
    model = _make_model(config, strategy, mesh, world, tokenizer)
    flops = flops_per_token(model, config.data.seq_length)  # before the model is cut
    balancer = make_balancer(model, config, strategy, mesh, world, run_dir, recorder, resume_from)
    optimizers = functools.partial(make_optimizers, config.training, seed=config.seed)
    fill = functools.partial(fill_model, config=config.model, seed=config.seed)
    engine = make_engine(strategy, model, fill, optimizers, mesh, world, config)
    watch_speed(balancer, engine.model, config, world)
    return _Built(strategy, mesh, balancer, engine, flops)


def _make_model(
    config: RunConfig, strategy: Strategy, mesh: Mesh, world: World, tokenizer: Any
) -> nn.Module:
    # The model, whole on this rank's device, or empty where it will be cut.
    if is_sharded(strategy):
        model = empty_model(config, tokenizer)
        check_blocks(model, strategy)
    else:
        model = whole_model(config, tokenizer, world.device)
    shape: Any = model.config
    if world.is_main and getattr(shape, "output_router_logits", False):
        log.warning(
            "the model's config sets output_router_logits; its loss that balances the experts is "
            "not part of the training loss, which is that of the target tokens alone"
        )
    set_gradient_checkpointing(model, config.training.gradient_checkpointing)
    use_attention(model, strategy, mesh, world.device, config.training)
    if config.training.torch_compile:
        compile_model(model, strategy)
    log.info(
        "model=%s parameters=%d trained=%d ranks=%d",
        config.model.name_or_path,
        count_parameters(model),
        count_parameters(model, trained=True),
        world.world_size,
    )
    return model


def _rank_seed(seed: int, rank: int) -> int:
    # Seed of a rank's dropout; different on every rank.
    return seed + 1_000_003 * (rank + 1)


def _make_agreement(
    config: RunConfig, world: World, signals: StopSignals, progress: Progress
) -> Agreement:
    limits = config.training
    ends_run = limits.max_steps is None and limits.num_train_epochs is None
    stop_at = None
    if limits.max_time is not None:
        already = progress.elapsed_s if ends_run else 0.0
        stop_at = time.monotonic() + limits.max_time - already
    minutes = config.checkpoint.every_minutes
    return Agreement(
        world,
        signals,
        stop_at=stop_at,
        time_ends_run=ends_run,
        save_every_s=None if minutes is None else minutes * 60,
    )


def _check_data(training: Dataset, checkpoint: CheckpointInfo) -> None:
    # The cursor of a checkpoint means something only for the same samples.
    before = checkpoint.manifest.get("data")
    if before is not None and before != training.content:
        raise DataError(
            f"the training data has changed since step {checkpoint.step} was saved",
            where="data.sources",
            fix="put it back to go on exactly, or start a new run with `--resume no` (for other "
            "text with these weights: model.init: pretrained from this run's export)",
            id="data.changed",
        )


def _take_over(
    engine: Engine,
    checkpoint: CheckpointInfo | None,
    config: RunConfig,
    world: World,
    travel: Travel,
    recorder: Recorder,
    exchange: Exchange | None,
) -> Progress:
    # The state of a checkpoint, or that of a run's beginning. All ranks must call this.
    torch.manual_seed(_rank_seed(config.seed, world.rank))
    if checkpoint is None:
        return Progress.fresh()
    state = engine.state_dict()
    outer = {} if exchange is None else exchange.loaded_tensors()
    progress = Progress.from_manifest(checkpoint.manifest)
    saved_world_size = int(checkpoint.manifest["world_size"])

    def say(done: int, total: int) -> None:
        moved = f"{format_bytes(done)} of {format_bytes(total)}"
        recorder.phase("bringing checkpoint", f"step {checkpoint.step}: {moved}")

    with travel.brought(checkpoint, say) as folder:
        load_tensors(state | outer, folder)
        engine.load_state_dict(state)
        is_restored = restore_rng(
            folder, world.rank, saved_world_size=saved_world_size, world_size=world.world_size
        )
    if not is_restored:
        torch.manual_seed(_rank_seed(config.seed, world.rank) + 7_919 * progress.step)
    log.info(
        "resumed step=%d samples=%d ranks=%d saved_with=%d checkpoint=%s",
        progress.step,
        progress.samples,
        world.world_size,
        saved_world_size,
        checkpoint.path,
    )
    return progress


def _git_commit() -> str | None:
    # The commit of the folder that the run was started in, if it is under git.
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
