"""What a finished run leaves: the model in Hugging Face format, a summary, a picture."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from isles.checkpoint.export import export_checkpoint, export_model
from isles.checkpoint.hub import push
from isles.config.resolve import Resolved
from isles.config.sections.output import CheckpointConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.errors import UserError
from isles.models.build import converts_weights
from isles.run.manifest import find_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_rows, write_record
from isles.train.adapter import export_adapted
from isles.train.card import card_text
from isles.train.model import empty_model
from isles.train.parts import Parts
from isles.train.plot import plot_loss
from isles.train.strategy import is_sharded

log = logging.getLogger(__name__)


def finish(parts: Parts) -> None:
    """Export, summary and picture. Rank 0 writes; the others have nothing left to do."""
    parts.checkpoints.forget_parts()
    if not parts.world.is_main:
        return
    run_dir, progress = parts.run_dir, parts.progress
    pushed, elapsed_s = None, progress.elapsed_s  # an export is no training
    if parts.config.checkpoint.export_on_finish:
        parts.recorder.phase("exporting", str(run_dir.model))
        _export(parts)
        pushed = _push(parts)
    rows = read_rows(run_dir.metrics)
    losses = [row for row in rows if row["kind"] == "train"]
    evals = [row for row in rows if row["kind"] == "eval"]
    summary: dict[str, Any] = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "target_tokens": progress.target_tokens,
        "elapsed_s": elapsed_s,
        "tokens_per_second": progress.tokens / max(elapsed_s, 1e-9),
        "first_loss": losses[0]["loss"] if losses else None,
        "last_loss": losses[-1]["loss"] if losses else None,
        "eval_loss": evals[-1]["loss"] if evals else None,
        "perplexity": evals[-1].get("perplexity") if evals else None,
        "world_size": parts.world.world_size,
    }
    parts.recorder.finished(summary)
    write_record(run_dir.summary, summary | ({"hub": pushed} if pushed else {}))
    plot_loss(rows, run_dir.name, run_dir.loss_plot)


def export_step(
    run_dir: RunDir,
    resolved: Resolved,
    tokenizer: Any,
    step: int | None,
    folder: Path,
    *,
    repo: str | None = None,
    merge: bool | None = None,
) -> None:
    """Export a checkpoint, file by file, in one process.

    Args:
        run_dir: whose checkpoint.
        resolved: its run file.
        tokenizer: of the run; None where it had none.
        step: which checkpoint; None: the newest.
        folder: the result.
        repo: where it will lie on the hub, for the model card; None: as the run file says.
        merge: whether an adapter is merged into its model; None: as the run file says.

    Raises:
        UserError, TrainingError: see `export_checkpoint` and `export_adapted`.
    """
    config = resolved.config
    checkpoint = find_checkpoint(run_dir, step)
    if config.adapter.type != "none":
        merges = config.checkpoint.merge_adapter if merge is None else merge
        export_adapted(run_dir, resolved, tokenizer, checkpoint, folder, merge=merges, repo=repo)
        return
    model = empty_model(config, tokenizer)
    if converts_weights(model):
        log.warning(
            "the experts are exported joined, as transformers holds them; `isles checkpoint export`"
            " writes them one by one, as on the hub, and needs memory for the whole model"
        )
    export_checkpoint(
        checkpoint.path,
        model,
        tokenizer,
        folder,
        max_shard_bytes=max_shard_bytes(config.checkpoint),
        card=card_text(run_dir, resolved, checkpoint, tokenizer, repo=repo),
    )


def max_shard_bytes(config: CheckpointConfig) -> int:
    """The largest file of weights in an export."""
    return int(config.max_shard_gb * 10**9)


def _export(parts: Parts) -> None:
    strategy = parts.strategy
    has_adapter = parts.config.adapter.type != "none"
    if not has_adapter and isinstance(strategy, DDPStrategyConfig) and not is_sharded(strategy):
        checkpoint = find_checkpoint(parts.run_dir, parts.progress.step)
        export_model(
            parts.engine.model,
            parts.tokenizer,
            parts.run_dir.model,
            max_shard_bytes=max_shard_bytes(parts.config.checkpoint),
            card=card_text(parts.run_dir, parts.resolved, checkpoint, parts.tokenizer),
        )
    else:  # no rank has the whole model; the last checkpoint has, or has the whole adapter
        export_step(
            parts.run_dir, parts.resolved, parts.tokenizer, parts.progress.step, parts.run_dir.model
        )


def _push(parts: Parts) -> dict[str, str] | None:
    """Upload the export, if that was asked for. The run has its result already: a hub that does not
    take it is not the run's failure."""
    repo = parts.config.checkpoint.push_to_hub
    if repo is None:
        return None
    folder, name = parts.run_dir.model, parts.run_dir.name
    parts.recorder.phase("uploading", repo)
    try:
        url = push(folder, repo, message=f"{name}, step {parts.progress.step}")
    except UserError as error:
        parts.recorder.note(
            f"{error.where}: {error.what}; the model is in {folder}, and "
            f"`isles checkpoint export {name} --push-to-hub {repo}` tries again"
        )
        return {"repo": repo, "error": error.what}
    return {"repo": repo, "url": url}
