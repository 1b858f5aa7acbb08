"""The model card of an export: README.md, with the front matter for Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from isles.config.files import may_be_huggingface_id
from isles.config.resolve import Resolved
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.config.show import show
from isles.facts.secrets import without_secrets
from isles.facts.units import format_count, format_duration
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_metrics
from isles.run.state import number_of

_SHOWN_VERSIONS = ("isles", "torch", "transformers", "peft")
_METRICS_BYTES = 256 * 2**20
"""Bytes at the end of metrics.jsonl that the metrics come from: 600,000 rows."""

ExportKind = Literal["model", "adapter"]
"""A whole model, or an adapter that needs its base."""


def card_text(
    run_dir: RunDir,
    resolved: Resolved,
    checkpoint: CheckpointInfo,
    tokenizer: Any,
    *,
    kind: ExportKind = "model",
    repo: str | None = None,
) -> str:
    """The text of an export's model card. Unknown values, such as a license, are omitted.

    Args:
        checkpoint: the exported checkpoint; the metrics are up to its step.
        tokenizer: the tokenizer next to the weights, if any.
        repo: the Hugging Face repository, owner/name. Default: from the run file.
    """
    config = resolved.config
    # An older isles, which did not refuse secrets, may have started the run.
    run_file = without_secrets(show(resolved, origins=False))
    repo = repo or config.checkpoint.push_to_hub
    versions = checkpoint.manifest.get("versions") or {}
    shown = [f"- {name} {versions[name]}" for name in _SHOWN_VERSIONS if name in versions]
    return "\n\n".join(
        (
            f"---\n{_front_matter(config, kind, tokenizer)}\n---",
            f"# {(repo or run_dir.name).rpartition('/')[2]}",
            f"{_what_it_is(config, kind)}. Trained with isles, run `{run_dir.name}`.",
            f"## Use\n\n```python\n{_snippet(kind, repo, tokenizer)}\n```",
            "\n".join(["## Data\n", *(f"- {_source(source)}" for source in config.data.sources)]),
            _figures(run_dir, checkpoint, config),
            "\n".join(["## Versions\n", *shown]),
            f"## Run file\n\n```yaml\n{run_file.strip()}\n```\n",
        )
    )


def _front_matter(config: RunConfig, kind: ExportKind, tokenizer: Any) -> str:
    from huggingface_hub import ModelCardData

    tags = ["isles"]
    tags += [config.adapter.type] if config.adapter.type != "none" else []
    tags += ["dpo"] if config.training.method == "dpo" else []
    tags += ["conversational"] if _is_chat(tokenizer) else []
    paths = (source.path for source in config.data.sources)
    datasets = dict.fromkeys(
        path for path in paths if path is not None and _is_on_huggingface(path)
    )
    data = ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        base_model=_base_repo(config),
        datasets=list(datasets) or None,
        tags=tags,
    )
    return str(data.to_yaml()).strip()


def _what_it_is(config: RunConfig, kind: ExportKind) -> str:
    began = name = config.model.name_or_path
    if _base_repo(config):
        began = f"[{name}](https://huggingface.co/{name})"
    elif _is_local(name):
        began = Path(name).name
    how = {"lora": "LoRA", "qlora": "QLoRA"}.get(config.adapter.type, "all weights")
    if config.model.init == "scratch":
        text = f"A language model of the shape {began}, trained from random weights"
    elif config.training.method == "dpo":
        text = f"{began}, tuned on preferences by DPO (arXiv:2305.18290; {how})"
    else:
        text = f"{began}, fine-tuned ({how})"
    if kind == "adapter":
        text += "; this is only the adapter, which needs that model"
    return text


def _snippet(kind: ExportKind, repo: str | None, tokenizer: Any) -> str:
    # Python code that loads the export and generates text; `folder` is the README's folder.
    at = "its name on Hugging Face" if repo else "this folder, or its name on Hugging Face"
    loader = "AutoPeftModelForCausalLM" if kind == "adapter" else "AutoModelForCausalLM"
    imports = [f"from {'peft' if kind == 'adapter' else 'transformers'} import {loader}"]
    load = f"model = {loader}.from_pretrained(folder)"
    first = f'folder = "{repo or "."}"  # {at}'
    if tokenizer is None:
        lines = ["import torch", *imports, "", first, load]
        return "\n".join([*lines, "print(model(torch.tensor([[1, 2, 3]])).logits.shape)"])
    if kind == "adapter":
        imports.append("from transformers import AutoTokenizer")
    else:
        imports = [f"from transformers import {loader}, AutoTokenizer"]
    lines = [*imports, "", first, "tokenizer = AutoTokenizer.from_pretrained(folder)", load]
    if _is_chat(tokenizer):
        lines += [
            'messages = [{"role": "user", "content": "Hello"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines.append('inputs = tokenizer("Once upon a time", return_tensors="pt")')
    start = 'inputs["input_ids"].shape[1]' if _is_chat(tokenizer) else "0"
    return "\n".join(
        [
            *lines,
            'inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}',
            "output = model.generate(**inputs, max_new_tokens=50)",
            f"print(tokenizer.decode(output[0][{start}:], skip_special_tokens=True))",
        ]
    )


def _figures(run_dir: RunDir, checkpoint: CheckpointInfo, config: RunConfig) -> str:
    manifest = checkpoint.manifest
    last: dict[str, dict[str, Any]] = {"train": {}, "eval": {}}
    for row in read_metrics(run_dir.metrics, _METRICS_BYTES):
        if row["kind"] in last and row["step"] <= checkpoint.step:
            last[row["kind"]] = row
    train, evaluation = last["train"], last["eval"]
    tokens, elapsed_s = manifest["tokens"], float(manifest["elapsed_s"])
    device = manifest.get("device") or "device of unknown kind"
    figures = {
        "steps": f"{checkpoint.step:,}",
        "tokens": format_count(tokens),
        "samples": f"{manifest['samples']:,}",
        "last training loss": _number(train, "loss", 4),
        "validation loss": _number(evaluation, "loss", 4),
        "validation perplexity": _number(evaluation, "perplexity", 2),
        "tokens per second": format_count(tokens / elapsed_s) if elapsed_s > 0 else None,
        "training time": format_duration(elapsed_s),
        "devices": f"{manifest['world_size']} x {device}",
        "strategy": str(manifest.get("strategy") or config.strategy.kind),
    }
    lines = [f"| {label} | {text} |" for label, text in figures.items() if text is not None]
    return "\n".join(("## Training", "", "| | |", "|---|---|", *lines))


def _number(row: dict[str, Any], key: str, digits: int) -> str | None:
    value = number_of(row, key)  # the rows may come from a bucket and have any type
    return None if value is None else f"{value:.{digits}f}"


def _source(source: SourceConfig) -> str:
    if source.path is None:
        return "fake token ids" if source.type == "fake" else f"type {source.type}"
    on_hub = _is_on_huggingface(source.path)
    name = f"[{source.path}](https://huggingface.co/datasets/{source.path})"
    parts = [name if on_hub else f"`{Path(source.path).name}`", f"type {source.type}"]
    if on_hub:
        parts += [f"subset {source.subset}"] if source.subset else []
        parts.append(f"split {source.split}")
    parts += [f"weight {source.weight:g}"] if source.weight is not None else []
    return ", ".join(parts)


def _is_chat(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _base_repo(config: RunConfig) -> str | None:
    # The Hugging Face repository of the run's first weights, if there is one.
    name = config.model.name_or_path
    return name if config.model.init != "scratch" and _is_on_huggingface(name) else None


def _is_local(name: str) -> bool:
    return Path(name).expanduser().exists()


def _is_on_huggingface(name: str) -> bool:
    # A name without a slash may also be a file or a shape.
    return name.count("/") == 1 and may_be_huggingface_id(name) and not _is_local(name)
