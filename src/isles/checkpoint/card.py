"""The model card of an export: README.md, with the front matter that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from isles.config.files import may_be_hub_id
from isles.config.resolve import Resolved
from isles.config.sections.data import SourceConfig
from isles.config.sections.run import RunConfig
from isles.config.show import show
from isles.facts.units import format_count, format_duration
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.records import read_rows

_SHOWN_VERSIONS = ("isles", "torch", "transformers", "peft")

ExportKind = Literal["model", "adapter"]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Contents of a model card.

    Args:
        repo: where it will lie on the hub, owner/name; None: not there.
        kind: a whole model, or an adapter that needs its base.
        base: what training began from, as the run file names it.
        base_repo: the same, where it is a repository on the hub.
        adapter: lora or qlora; None: all weights were trained.
        sources: a line a source of data.
        datasets: those of them that are datasets on the hub.
        figures: measured numbers by name; those that are None are left out.
        run_file: the run file with its defaults.
    """

    name: str
    repo: str | None
    kind: ExportKind
    base: str
    base_repo: str | None
    from_scratch: bool
    method: Literal["causal_lm", "dpo"]
    adapter: str | None
    is_chat: bool
    has_tokenizer: bool
    sources: tuple[str, ...]
    datasets: tuple[str, ...]
    figures: Mapping[str, float | str | None]
    versions: Mapping[str, str]
    run_file: str


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
        checkpoint: what is exported; figures are those up to its step.
        tokenizer: that lies beside the weights; None: there is none.
    """
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
            figures=_measured(run_dir, checkpoint, config),
            versions={key: versions[key] for key in _SHOWN_VERSIONS if key in versions},
            run_file=show(resolved, origins=False),
        )
    )


def make_card(facts: CardFacts) -> str:
    """The text of README.md. What is not known, such as a licence, is left out."""
    return "\n\n".join(
        (
            f"---\n{_front_matter(facts)}\n---",
            f"# {(facts.repo or facts.name).rpartition('/')[2]}",
            _what_it_is(facts),
            f"## Use\n\n```python\n{_snippet(facts)}\n```",
            "## Data\n\n" + "\n".join(f"- {source}" for source in facts.sources),
            _figures(facts.figures),
            "## Versions\n\n" + "\n".join(f"- {name} {v}" for name, v in facts.versions.items()),
            f"## Run file\n\n```yaml\n{facts.run_file.strip()}\n```\n",
        )
    )


def _front_matter(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    tags = ["isles"]
    tags += [facts.adapter] if facts.adapter else []
    tags += ["dpo"] if facts.method == "dpo" else []
    tags += ["conversational"] if facts.is_chat else []
    data = ModelCardData(
        library_name="peft" if facts.kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        base_model=facts.base_repo,
        datasets=list(facts.datasets) or None,
        tags=tags,
    )
    return str(data.to_yaml()).strip()


def _what_it_is(facts: CardFacts) -> str:
    link = f"[{facts.base}](https://huggingface.co/{facts.base_repo})"
    began = link if facts.base_repo else facts.base
    how = {"lora": "LoRA", "qlora": "QLoRA"}.get(facts.adapter or "", "all weights")
    if facts.from_scratch:
        text = f"A language model of the shape {began}, trained from fresh weights"
    elif facts.method == "dpo":
        text = f"{began}, tuned on preferences by DPO (arXiv:2305.18290; {how})"
    else:
        text = f"{began}, fine-tuned ({how})"
    if facts.kind == "adapter":
        text += "; this is the adapter alone, which needs that model"
    return f"{text}. Trained with isles, run `{facts.name}`."


def _snippet(facts: CardFacts) -> str:
    # Python that loads the export and lets it write; `folder` is the README's own.
    at = "its name on the hub" if facts.repo else "this folder, or its name on the hub"
    loader = "AutoPeftModelForCausalLM" if facts.kind == "adapter" else "AutoModelForCausalLM"
    imports = [f"from {'peft' if facts.kind == 'adapter' else 'transformers'} import {loader}"]
    load = f"model = {loader}.from_pretrained(folder)"
    first = f'folder = "{facts.repo or "."}"  # {at}'
    if not facts.has_tokenizer:
        lines = ["import torch", *imports, "", first, load]
        return "\n".join([*lines, "print(model(torch.tensor([[1, 2, 3]])).logits.shape)"])
    if facts.kind == "adapter":
        imports.append("from transformers import AutoTokenizer")
    else:
        imports = [f"from transformers import {loader}, AutoTokenizer"]
    lines = [*imports, "", first, "tokenizer = AutoTokenizer.from_pretrained(folder)", load]
    if facts.is_chat:
        lines += [
            'messages = [{"role": "user", "content": "Hello"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"',
            ")",
        ]
    else:
        lines.append('inputs = tokenizer("Once upon a time", return_tensors="pt")')
    start = 'inputs["input_ids"].shape[1]' if facts.is_chat else "0"
    return "\n".join(
        [
            *lines,
            'inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}',
            "output = model.generate(**inputs, max_new_tokens=50)",
            f"print(tokenizer.decode(output[0][{start}:], skip_special_tokens=True))",
        ]
    )


_FIGURES = (
    ("steps", "steps", "{:,.0f}"),
    ("tokens", "tokens", "count"),
    ("samples", "samples", "{:,.0f}"),
    ("loss", "last training loss", "{:.4f}"),
    ("eval_loss", "validation loss", "{:.4f}"),
    ("perplexity", "validation perplexity", "{:.2f}"),
    ("tokens_per_second", "tokens per second", "count"),
    ("elapsed_s", "training time", "duration"),
    ("devices", "devices", "{}"),
    ("strategy", "strategy", "{}"),
)


def _figures(figures: Mapping[str, float | str | None]) -> str:
    rows = []
    for key, label, form in _FIGURES:
        value = figures.get(key)
        if value is None:
            continue
        match form:
            case "count":
                text = format_count(float(value))
            case "duration":
                text = format_duration(float(value))
            case _:
                text = form.format(value)
        rows.append(f"| {label} | {text} |")
    return "\n".join(("## Training", "", "| | |", "|---|---|", *rows))


def _measured(
    run_dir: RunDir, checkpoint: CheckpointInfo, config: RunConfig
) -> Mapping[str, float | str | None]:
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
    # One part alone may as well be a file or a shape.
    return name.count("/") == 1 and may_be_hub_id(name) and not _is_local(name)
