"""The results of a finished run: the exported model or adapter, a summary and a picture."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isles.checkpoint.card import ExportKind, card_text
from isles.checkpoint.export import (
    Verify,
    export_adapter,
    export_checkpoint,
    export_merged,
    export_model,
    read_trained,
)
from isles.checkpoint.reread import read_again
from isles.checkpoint.upload import push
from isles.config.resolve import Resolved
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.models.build import load_model_config, take_generation_config
from isles.models.fill import weights_folder
from isles.run.checkpoints import CheckpointInfo, find_checkpoint
from isles.run.find import typed_name
from isles.run.paths import RunDir
from isles.run.records import read_metrics, write_record
from isles.train.length import unmoved
from isles.train.model import base_files, base_of, empty_model, kept_base, whole_model, with_base
from isles.train.parts import Parts
from isles.train.strategy import holds_whole_model

log = logging.getLogger(__name__)


def finish(parts: Parts) -> bool:
    """Export the model, write the summary and the picture. Only rank 0 acts.

    Returns:
        Whether RUN/model is the export of this run, and not an older export.
    """
    if not parts.world.is_main:
        return False
    run_dir, progress = parts.run_dir, parts.progress
    failed, pushed = None, None
    elapsed_s = progress.elapsed_s  # an export is not training time
    exports = parts.config.checkpoint.export_on_finish
    if exports:
        failed = _export(parts)
        pushed = None if failed else _push(parts)
    curves = _read_losses(run_dir.metrics)
    losses, evals = curves["train"], curves["eval"]
    summary: dict[str, Any] = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "target_tokens": progress.target_tokens,
        "elapsed_s": elapsed_s,
        "tokens_per_second": progress.tokens / max(elapsed_s, 1e-9),
        "first_loss": losses[0][1] if losses else None,
        "last_loss": losses[-1][1] if losses else None,
        "eval_loss": evals[-1][1] if evals else None,
        "perplexity": evals[-1][2] if evals else None,
        "world_size": parts.world.world_size,
    }
    if note := unmoved(parts.config, losses, evals):
        parts.recorder.note(note)
    parts.recorder.finished(summary)
    notes = {"huggingface": pushed, "export_error": failed}
    write_record(run_dir.summary, summary | {k: v for k, v in notes.items() if v is not None})
    _plot_loss(curves, run_dir.name, run_dir.loss_plot)
    return exports and failed is None


def _export(parts: Parts) -> str | None:
    # The error of the export, if it failed. The run has trained all its steps and its checkpoint is
    # intact, so a failed export is not a failed run.
    run_dir, step = parts.run_dir, parts.progress.step
    parts.recorder.phase("exporting", str(run_dir.model))
    is_whole = holds_whole_model(parts.strategy) and parts.config.adapter.type == "none"
    model = parts.engine.model if is_whole else None
    try:
        export_step(run_dir, parts.resolved, parts.tokenizer, step, run_dir.model, model=model)
    except Exception as error:
        known = error if isinstance(error, UserError) else None
        if known is None:
            log.exception("export step=%d", step)
        what = f"{known.where}: {known.what}" if known else f"{type(error).__name__}: {error}"
        fix = f"{known.fix}; then " if known and known.fix else ""
        parts.recorder.note(
            f"the model was not exported: {what}. The checkpoint of step {step} is intact: {fix}"
            f"`isles checkpoint export {typed_name(run_dir)}` exports it"
        )
        return what
    return None


_Curves = dict[str, list[tuple[int, Any, Any]]]
"""Step, loss and perplexity of all rows: of `train` and of `eval`."""


def _read_losses(path: Path) -> _Curves:
    found: _Curves = {"train": [], "eval": []}
    for row in read_metrics(path):
        if row["kind"] in found:
            found[row["kind"]].append((row["step"], row.get("loss"), row.get("perplexity")))
    return found


def export_step(
    run_dir: RunDir,
    resolved: Resolved,
    tokenizer: Any,
    step: int | None,
    folder: Path,
    *,
    repo: str | None = None,
    merge: bool | None = None,
    model: Any = None,
) -> None:
    """Export a checkpoint in one process.

    Args:
        run_dir, resolved, tokenizer: of the run. None if the run has no tokenizer.
        step: of the checkpoint. Default: the newest checkpoint.
        folder: the result.
        repo: the Hugging Face repository for the model card. Default: from the run file.
        merge: whether to merge an adapter into its model, which needs memory for the whole model.
            Default: from the run file.
        model: the whole model with the checkpoint's weights. If omitted, the weights are exported
            from the checkpoint, file by file.

    Raises:
        UserError, TrainingError: see `export_checkpoint`, `export_adapter` and `export_merged`.
    """
    config = kept_base(resolved.config, run_dir)
    checkpoint = find_checkpoint(run_dir, step)
    has_adapter = config.adapter.type != "none"
    merges = has_adapter and (config.checkpoint.merge_adapter if merge is None else merge)
    kind: ExportKind = "adapter" if has_adapter and not merges else "model"
    if has_adapter:
        config = with_base(config, checkpoint)
    verify, trained = _verifying(config, checkpoint, kind)
    options: dict[str, Any] = {
        "card": card_text(run_dir, resolved, checkpoint, tokenizer, kind=kind, repo=repo),
        "trained": trained,
        "verify": verify,
    }
    if kind == "adapter":
        model = empty_model(config, tokenizer)
        base = base_of(config)["name"]
        export_adapter(checkpoint.path, model, tokenizer, folder, base=base, **options)
        return
    options |= _form(config, is_here=model is not None)
    if has_adapter:
        model = _with_adapter(config, checkpoint, tokenizer)
        write: Callable[..., None] = export_merged
    elif model is not None:
        write = export_model
    else:
        model = empty_model(config, tokenizer)
        take_generation_config(model, config.model)
        write = functools.partial(export_checkpoint, checkpoint.path)
    write(model, tokenizer, folder, **options)


def _form(config: RunConfig, *, is_here: bool) -> dict[str, Any]:
    # The base's config.json, the type of the weights and the size of a file.
    base: Mapping[str, Any] = {}
    dtype = None
    try:
        base, dtype = base_files(config.model)
    except UserError as error:
        if not is_here:
            raise  # the model needs these files
        # In a run of an older isles, or with custom code, the base model's folder may be gone.
        log.warning("%s: %s; exporting without the base's config.json", error.where, error.what)
    if config.checkpoint.export_dtype != "base":
        dtype = getattr(torch, config.checkpoint.export_dtype)
    shown = "of training" if dtype is None else str(dtype).removeprefix("torch.")
    log.info("exporting the weights as %s", shown)
    return {
        "max_shard_bytes": int(config.checkpoint.max_shard_gb * 10**9),
        "base": base,
        "dtype": dtype,
    }


def _with_adapter(config: RunConfig, checkpoint: CheckpointInfo, tokenizer: Any) -> Any:
    # The whole model with its trained adapter, in this machine's memory.
    frozen = None
    if config.adapter.type == "qlora":
        frozen = load_model_config(config.model).dtype or torch.float32
        log.info("merging the adapter into the unquantized model, in %s", frozen)
        plain = config.adapter.model_copy(update={"type": "lora"})
        config = config.model_copy(update={"adapter": plain})
    model = whole_model(config, tokenizer, torch.device("cpu"), frozen=frozen)
    read_trained(model, checkpoint.path)
    return model


def _verifying(
    config: RunConfig, checkpoint: CheckpointInfo, kind: ExportKind
) -> tuple[Verify, Tensor | None]:
    # The function that checks an export, and the scores that the export must give.
    scores = checkpoint.manifest.get("probe")
    trained = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    if config.adapter.type == "qlora":
        log.info("the logits of the export are not checked, because training used 4-bit weights")
        trained = None
    elif trained is None:
        log.info("the logits of the export are not checked, because the checkpoint has no scores")
    base_bytes = 0
    if kind == "adapter":
        if config.model.trust_remote_code:
            log.info("the exported adapter is not checked: its base model needs custom code")
            return lambda *_: None, None
        base, where = weights_folder(config.model.name_or_path)
        base_bytes = sum((base / file).stat().st_size for file in set(where.values()))
    is_rounded = config.training.precision != "32-true"
    return functools.partial(read_again, is_rounded=is_rounded, base_bytes=base_bytes), trained


def _push(parts: Parts) -> dict[str, str] | None:
    # The run has its result: a failed upload is not a failed run.
    repo = parts.config.checkpoint.push_to_hub
    if repo is None:
        return None
    folder, name = parts.run_dir.model, parts.run_dir.name
    parts.recorder.phase("uploading", repo)
    try:
        url = push(folder, repo, message=f"{name}, step {parts.progress.step}")
    except UserError as error:
        parts.recorder.note(
            f"{error.where}: {error.what}; the model is in {folder}. To upload it: `isles "
            f"checkpoint export {typed_name(parts.run_dir)} --push-to-hub {repo}`"
        )
        return {"repo": repo, "error": error.what}
    return {"repo": repo, "url": url}


def _plot_loss(curves: _Curves, title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, label, style in (("train", "training", "-"), ("eval", "validation", "o-")):
        points = [
            (step, loss) for step, loss, _ in curves[kind] if isinstance(loss, float) and loss
        ]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
