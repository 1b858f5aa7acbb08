"""The reference of DPO: log-probabilities of each answer by the model before training.

All ranks together score every pair once before the first step. So no second model needs memory
during training, and no step runs a second model.
"""

from __future__ import annotations

import io
import logging
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from isles.config.sections.run import RunConfig
from isles.config.sections.training import Epochs
from isles.data.loader import numbered_batches
from isles.data.mix import Dataset
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.errors import UserError
from isles.run.paths import RunDir
from isles.run.records import write_bytes_atomic
from isles.strategies.base import Engine
from isles.train.record import Recorder

log = logging.getLogger(__name__)

_KEEP_EVERY_S = 300.0
"""Seconds between two writes of the scores, so that a killed run loses little."""

_BATCHES_AT_ONCE = 16


def pairs_read(config: RunConfig, total_steps: int | None, epochs: Epochs | None) -> int | None:
    """The number of global indices that a run reads from the first on; None: perhaps all.

    In a run of several clusters, a cluster reads its leased samples, which may be any.
    """
    if epochs is not None:
        return epochs.end
    if total_steps is None or config.diloco is not None:
        return None
    return total_steps * config.training.global_batch_size


def disable_dropout(model: nn.Module) -> None:
    """Turn off the dropout of a model's config, in place, and leave the dropout of its adapter.

    The reference is scored without dropout, and the loss compares the model with it.
    """
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for key, value in list(vars(module).items()):
            if isinstance(value, float) and ("dropout" in key or "pdrop" in key):
                setattr(module, key, 0.0)


def score_reference(
    engine: Engine,
    mesh: Mesh,
    world: World,
    recorder: Recorder,
    run_dir: RunDir,
    part: str,
    dataset: Dataset | None,
    num_samples: int | None,
    micro_batch_size: int,
) -> None:
    """Score a dataset's first samples with the current model and attach the scores.

    All ranks must call this, before any checkpoint is loaded.

    Args:
        run_dir: keeps the scores for later attempts.
        part: training or validation.
        dataset: of pairs; None if there is none.
        num_samples: number of global indices that will be read; None: perhaps all.
        micro_batch_size: pairs per forward pass.
    """
    if dataset is None:
        return
    path = run_dir.reference(part)
    scores = world.main_first(lambda: _known(dataset, path), group=world.work)
    wanted = _wanted(dataset, num_samples)
    missing = wanted[np.isnan(scores[wanted, 0])]
    if len(missing):
        log.info("reference: scoring pairs=%d of=%d", len(missing), dataset.num_samples)
    kept_at = time.monotonic()
    at_once = mesh.dp_size * micro_batch_size * _BATCHES_AT_ONCE
    engine.model.eval()
    try:
        for start in range(0, len(missing), at_once):
            numbers = missing[start : start + at_once]
            recorder.phase("scoring the reference", f"{start} of {len(missing)} pairs: {part}")
            scores[numbers] = _score(engine, mesh, world, dataset, numbers, micro_batch_size)
            is_last = start + at_once >= len(missing)
            if world.is_main and (is_last or time.monotonic() - kept_at > _KEEP_EVERY_S):
                buffer = io.BytesIO()
                np.savez(buffer, scores=scores, content=np.array(dataset.content))
                write_bytes_atomic(path, buffer.getvalue())
                kept_at = time.monotonic()
    finally:
        engine.model.train()
    dataset.reference = scores


def _score(
    engine: Engine, mesh: Mesh, world: World, dataset: Dataset, numbers: Any, size: int
) -> Any:
    # The scores of these samples, [len(numbers), 2], on every rank.
    share = -(-len(numbers) // mesh.dp_size)
    mine = slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
    found = torch.zeros((share * mesh.dp_size, 2), dtype=torch.float64)
    # All ranks run the model the same number of times; some pairs may be scored twice.
    padded = np.resize(numbers, share * mesh.dp_size)
    place = mine.start
    for batch in numbered_batches(dataset, padded[mine], size, world.device):
        rows = engine.row_scores(batch).double().cpu().view(-1, 2)
        if mesh.place.tp == 0:  # tensor parallel ranks have the same rows
            found[place : place + len(rows)] = rows
        place += len(rows)
    if world.world_size > 1:
        dist.all_reduce(found, group=world.control)
    return found[: len(numbers)].float().numpy()


def give_scores(dataset: Dataset, num_samples: int, path: Path) -> None:
    """Attach the scores that the run keeps at `path` to its dataset of pairs, for the first global
    indices.

    Raises:
        UserError: the run has not scored all these samples.
    """
    scores = _known(dataset, path)
    wanted = _wanted(dataset, num_samples)
    if missing := int(np.isnan(scores[wanted, 0]).sum()):
        raise UserError(
            f"{missing} of {len(wanted)} pairs have no score from the model before training",
            where=str(path),
            fix=f"give --samples {len(wanted) - missing} or fewer"
            if missing < len(wanted)
            else "resume this run with `isles train`: it scores them when it starts",
        )
    dataset.reference = scores


def _known(dataset: Dataset, path: Path) -> Any:
    # The scores of an earlier attempt on the same data, [num_samples, 2]; NaN if missing.
    unknown = np.full((dataset.num_samples, 2), np.nan, dtype=np.float32)
    if not path.is_file():
        return unknown
    try:
        with np.load(path, allow_pickle=False) as kept:
            scores = kept["scores"] if str(kept["content"]) == dataset.content else unknown
            return (
                scores
                if (scores.shape, scores.dtype) == (unknown.shape, unknown.dtype)
                else unknown
            )
    except (OSError, ValueError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        log.warning("cannot read the reference scores in %s, scoring again: %s", path, error)
        return unknown


def _wanted(dataset: Dataset, num_samples: int | None) -> Any:
    # The distinct sample numbers of the first global indices.
    total = dataset.num_samples
    if num_samples is None or num_samples >= total:
        return np.arange(total)
    return np.unique(dataset.numbers(np.arange(num_samples)))
