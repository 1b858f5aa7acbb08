"""The model card of an export: README.md, with the front matter that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from isles.facts.units import format_count, format_duration

ExportKind = Literal["model", "adapter"]


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a model card says.

    Args:
        name: the run's name.
        repo: where it will lie on the hub, owner/name; None: not there.
        kind: a whole model, or an adapter that needs its base.
        base: what training began from, as the run file names it.
        base_repo: the same, where it is a repository on the hub.
        from_scratch: whether it began from fresh weights.
        method: causal_lm or dpo.
        adapter: lora or qlora; None: all weights were trained.
        is_chat: whether the tokenizer has a chat template.
        has_tokenizer: whether a tokenizer lies beside the weights.
        sources: a line a source of data.
        datasets: those of them that are datasets on the hub.
        figures: measured numbers by name; those that are None are left out.
        versions: packages and their versions.
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
    """Python that loads the export and lets it write; `folder` is the README's own."""
    at = "its name on the hub" if facts.repo else "this folder, or its name on the hub"
    loader = "AutoPeftModelForCausalLM" if facts.kind == "adapter" else "AutoModelForCausalLM"
    imports = [f"from {'peft' if facts.kind == 'adapter' else 'transformers'} import {loader}"]
    load = f"model = {loader}.from_pretrained(folder)"
    head = f'folder = "{facts.repo or "."}"  # {at}'
    if not facts.has_tokenizer:
        lines = ["import torch", *imports, "", head, load]
        return "\n".join([*lines, "print(model(torch.tensor([[1, 2, 3]])).logits.shape)"])
    if facts.kind == "adapter":
        imports.append("from transformers import AutoTokenizer")
    else:
        imports = [f"from transformers import {loader}, AutoTokenizer"]
    lines = [*imports, "", head, "tokenizer = AutoTokenizer.from_pretrained(folder)", load]
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
