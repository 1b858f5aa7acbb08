"""What the model card of an export says, gathered from a run's records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from isles.checkpoint.card import CardFacts, ExportKind, make_card
from isles.config.files import may_be_hub_id
from isles.config.resolve import Resolved
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.config.show import show
from isles.run.manifest import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_rows

_SHOWN_VERSIONS = ("isles", "torch", "transformers", "peft")


def card_text(
    run_dir: RunDir,
    resolved: Resolved,
    checkpoint: CheckpointInfo,
    tokenizer: Any,
    *,
    kind: ExportKind = "model",
    repo: str | None = None,
) -> str:
    """The model card of an export.

    Args:
        run_dir: whose run.
        resolved: its run file.
        checkpoint: what is exported; figures are those up to its step.
        tokenizer: that lies beside the weights; None: there is none.
        kind: a whole model, or an adapter alone.
        repo: where it will lie on the hub; None: not there.
    """
    assert kind in get_args(ExportKind)
    config = resolved.config
    name = config.model.name_or_path
    sources = config.data.sources
    is_from_scratch = config.model.init == "scratch"
    versions = checkpoint.manifest.get("versions") or {}
    return make_card(
        CardFacts(
            name=run_dir.name,
            repo=repo or config.checkpoint.push_to_hub,
            kind=kind,
            base=name if not _is_local(name) else Path(name).name,
            base_repo=name if _is_on_hub(name) and not is_from_scratch else None,
            from_scratch=is_from_scratch,
            method=config.training.method,
            adapter=None if config.adapter.type == "none" else config.adapter.type,
            is_chat=bool(getattr(tokenizer, "chat_template", None)),
            has_tokenizer=tokenizer is not None,
            sources=tuple(_source(source) for source in sources),
            datasets=tuple(
                dict.fromkeys(s.path for s in sources if s.path is not None and _is_on_hub(s.path))
            ),
            figures=_figures(run_dir, checkpoint, config),
            versions={key: versions[key] for key in _SHOWN_VERSIONS if key in versions},
            run_file=show(resolved, origins=False),
        )
    )


def _figures(
    run_dir: RunDir, checkpoint: CheckpointInfo, config: RunConfig
) -> Mapping[str, float | str | None]:
    """What was measured up to a checkpoint."""
    manifest = checkpoint.manifest
    rows = [row for row in read_rows(run_dir.metrics) if int(row["step"]) <= checkpoint.step]
    trained = [row for row in rows if row["kind"] == "train"]
    evaluated = [row for row in rows if row["kind"] == "eval"]
    last: dict[str, Any] = trained[-1] if trained else {}
    evaluation: dict[str, Any] = evaluated[-1] if evaluated else {}
    elapsed_s = float(manifest["elapsed_s"])
    device = str(manifest.get("device") or "device of unknown kind")
    return {
        "steps": checkpoint.step,
        "tokens": manifest["tokens"],
        "samples": manifest["samples"],
        "loss": last.get("loss"),
        "eval_loss": evaluation.get("loss"),
        "perplexity": evaluation.get("perplexity"),
        "tokens_per_second": manifest["tokens"] / elapsed_s if elapsed_s > 0 else None,
        "elapsed_s": elapsed_s,
        "devices": f"{manifest['world_size']} x {device}",
        "strategy": str(manifest.get("strategy") or config.strategy.kind),
    }


def _source(source: SourceConfig) -> str:
    if source.path is None:
        return f"{source.type} token ids"
    on_hub = _is_on_hub(source.path)
    name = f"[{source.path}](https://huggingface.co/datasets/{source.path})"
    parts = [name if on_hub else f"`{Path(source.path).name}`", f"type {source.type}"]
    if on_hub:
        parts += [f"subset {source.subset}"] if source.subset else []
        parts.append(f"split {source.split}")
    parts += [f"weight {source.weight:g}"] if source.weight is not None else []
    return ", ".join(parts)


def _is_local(name: str) -> bool:
    return Path(name).expanduser().exists()


def _is_on_hub(name: str) -> bool:
    """Whether a name is that of a repository; one part alone may as well be a file or a shape."""
    return name.count("/") == 1 and may_be_hub_id(name) and not _is_local(name)
