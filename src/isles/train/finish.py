"""What a finished run leaves: the model in Hugging Face format, a summary, a picture."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from isles.checkpoint.export import export_checkpoint, export_model
from isles.config.resolve import Resolved
from isles.config.strategy import DDPStrategyConfig
from isles.models.build import build_empty_model, converts_weights
from isles.rundir.manifest import find_checkpoint
from isles.rundir.paths import RunDir
from isles.rundir.records import read_rows, write_record
from isles.train.parts import Parts
from isles.train.plot import plot_loss
from isles.train.strategy import is_sharded

log = logging.getLogger(__name__)


def finish(parts: Parts) -> None:
    """Export, summary and picture. Rank 0 writes; the others have nothing left to do."""
    if not parts.world.is_main:
        return
    run_dir, progress = parts.run_dir, parts.progress
    if parts.config.checkpoint.export_on_finish:
        parts.recorder.phase("exporting", str(run_dir.model))
        _export(parts)
    rows = read_rows(run_dir.metrics)
    losses = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    summary: dict[str, Any] = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "elapsed_s": progress.elapsed_s,
        "tokens_per_second": progress.tokens / max(progress.elapsed_s, 1e-9),
        "first_loss": losses[0]["loss"] if losses else None,
        "last_loss": losses[-1]["loss"] if losses else None,
        "eval_loss": evals[-1]["loss"] if evals else None,
        "perplexity": evals[-1]["perplexity"] if evals else None,
        "world_size": parts.world.world_size,
    }
    write_record(run_dir.summary, summary)
    plot_loss(rows, run_dir.name, run_dir.loss_plot)


def export_step(
    run_dir: RunDir, resolved: Resolved, tokenizer: Any, step: int | None, folder: Path
) -> None:
    """Export a checkpoint, file by file, in one process.

    Args:
        run_dir: whose checkpoint.
        resolved: its run file.
        tokenizer: of the run; None where it had none.
        step: which checkpoint; None: the newest.
        folder: the result.

    Raises:
        UserError, TrainingError: see `export_checkpoint`.
    """
    config = resolved.config
    trained = tokenizer is not None and config.tokenizer.train_vocab_size is not None
    model = build_empty_model(
        config.model,
        dtype=torch.bfloat16 if config.training.precision == "bf16-true" else torch.float32,
        vocab_size=len(tokenizer) if trained else None,
    )
    if converts_weights(model):
        log.warning(
            "the experts are exported joined, as transformers holds them; `isles checkpoint export`"
            " writes them one by one, as on the hub, and needs memory for the whole model"
        )
    export_checkpoint(find_checkpoint(run_dir, step).path, model, tokenizer, folder)


def _export(parts: Parts) -> None:
    strategy = parts.strategy
    if isinstance(strategy, DDPStrategyConfig) and not is_sharded(strategy):
        export_model(parts.engine.model, parts.tokenizer, parts.run_dir.model)
    else:  # no rank has the whole model; the last checkpoint has
        export_step(
            parts.run_dir, parts.resolved, parts.tokenizer, parts.progress.step, parts.run_dir.model
        )
