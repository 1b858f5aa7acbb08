"""The trackers of a run, which rank 0 opens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import assert_never

import torch

import isles
from isles.checkpoint.hub import check_push
from isles.config.resolve import Resolved, leaves
from isles.config.sections.output import (
    JsonlConfig,
    MLflowConfig,
    TensorBoardConfig,
    WandbConfig,
    tracker_sections,
)
from isles.dist.world import World
from isles.errors import UserError
from isles.run.begin import require_packages
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import RunDir
from isles.track.base import Background, RemoteTracker, RunFacts, Tracker, Trackers
from isles.track.local import JsonlTracker, TensorBoardTracker
from isles.track.mlflow import MLflowTracker, load_mlflow
from isles.track.wandb import WandbTracker, settle_mode
from isles.train.record import Recorder

log = logging.getLogger(__name__)


def check_outside(resolved: Resolved, run_dir: RunDir, recorder: Recorder, world: World) -> None:
    """Look at what the run will need outside, before hours are spent. All ranks must call this.

    Raises:
        UserError: a tracker lacks its package, its server's address or its key, or the hub would
            refuse the upload at the end and nothing is saved yet; on every rank.
    """

    def check() -> None:
        config = resolved.config
        require_packages(config)
        for section in tracker_sections(config.track):
            if isinstance(section, WandbConfig):
                _check_key(section, run_dir)
        if config.checkpoint.push_to_hub is not None:
            recorder.phase("starting", f"asking the hub about {config.checkpoint.push_to_hub}")
            _check_hub(config.checkpoint.push_to_hub, run_dir, recorder)

    world.main_first(check, group=world.work)


def make_trackers(
    resolved: Resolved, run_dir: RunDir, recorder: Recorder, world: World, *, step: int
) -> Trackers:
    """Open the trackers on rank 0; on other ranks there are none.

    Args:
        resolved: the run file.
        run_dir: where records and curves lie.
        recorder: takes what a tracker says to the user.
        world: the ranks.
        step: the inner steps that are done.
    """
    if not world.is_main:
        return Trackers([])
    local: list[Tracker] = [JsonlTracker(run_dir.metrics, resumed_step=step)]
    remote: list[Background] = []
    for section in tracker_sections(resolved.config.track):
        match section:
            case JsonlConfig():
                pass  # every run writes it: status and loss.png are made from it
            case TensorBoardConfig():
                local.append(TensorBoardTracker(run_dir.tensorboard, resumed_step=step))
            case WandbConfig() | MLflowConfig():
                opened = _open(section, resolved, run_dir, recorder, world)
                remote += [opened] if opened is not None else []
            case _:
                assert_never(section)
    return Trackers(local, remote, recorder.note)


def _check_hub(repo: str, run_dir: RunDir, recorder: Recorder) -> None:
    try:
        check_push(repo)
    except UserError as error:
        if not list_checkpoints(run_dir):
            raise
        # Hours are spent already: a hub that is away for a moment must not end a run that restarts.
        recorder.note(f"{error.where}: {error.what}; the upload at the end may fail")


def _check_key(section: WandbConfig, run_dir: RunDir) -> None:
    try:
        settle_mode(section, run_dir.path)
    except UserError:
        raise
    except Exception:  # a package that is there and broken; `make_trackers` says so
        log.debug("wandb failed", exc_info=True)


def _open(
    section: WandbConfig | MLflowConfig,
    resolved: Resolved,
    run_dir: RunDir,
    recorder: Recorder,
    world: World,
) -> Background | None:
    # None where its package is broken.
    facts = _facts(resolved, run_dir, section.kind, world)
    open_tracker: Callable[[], RemoteTracker]
    try:
        match section:
            case WandbConfig():
                mode, note = settle_mode(section, run_dir.path)
                if note:
                    recorder.note(note)
                open_tracker = functools.partial(WandbTracker, section, facts, mode=mode)
            case MLflowConfig():
                load_mlflow()
                open_tracker = functools.partial(MLflowTracker, section, facts)
            case _:
                assert_never(section)
    except Exception as error:  # a curve is not worth a run; the traceback says why
        log.info("%s failed", section.kind, exc_info=True)
        recorder.note(f"{section.kind} failed and is left out; training goes on: {error}")
        return None
    return Background(section.kind, open_tracker, say=recorder.note)


def _facts(resolved: Resolved, run_dir: RunDir, kind: str, world: World) -> RunFacts:
    import transformers

    config = resolved.config
    about = {
        "version": isles.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "world_size": world.world_size,
        "device": world.device_name,
        "strategy": config.strategy.kind,
        "host": world.host,
        "run_dir": str(run_dir.path),
    }
    record = run_dir.tracker_record(kind)
    return RunFacts(run_dir.name, run_dir.path, record, dict(leaves(config)), about)
