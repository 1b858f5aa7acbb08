"""Run files for people: the resolved one, templates to start from, and the schema for editors."""

from __future__ import annotations

import difflib
from copy import deepcopy
from importlib import resources
from typing import Any

from isles.config import keys
from isles.config.resolve import Resolved
from isles.config.yaml import dotted, scalar_text, yaml_lines
from isles.errors import ConfigError
from isles.facts.units import write_duration

_WIDEST = 60

TEMPLATES: dict[str, str] = {
    "quickstart": "a tiny model from scratch on the Python documentation, on any machine",
    "pretrain": "a model of 150 million parameters from scratch on your own text",
    "finetune": "all weights of a Hugging Face model on your own text",
    "chat": "all weights of a model on conversations",
    "lora": "an adapter on a frozen model, on conversations",
    "qlora": "the same with the frozen model in 4 bits, for small GPUs",
    "dpo": "an adapter on preferences: a chosen and a rejected answer to each prompt",
}
"""Names of templates, with their purpose."""
RECIPES: dict[str, str] = {
    "qlora-8b": "QLoRA of an 8B model on two GPUs of 24 GB",
    "full-1b": "all weights of a 1B model on one GPU of 24 GB",
    "dpo-after-sft": "DPO on the result of a supervised run",
    "three-home-pcs": "three PCs with unequal GPUs over ssh",
    "pretrain-1b-slurm": "a 1B model from scratch on two Slurm nodes",
    "continue-pretraining": "a pretrained model on streamed domain text",
    "sweep-slurm": "one Slurm job for each learning rate",
    "own-script-slurm": "your own training script on Slurm",
    "two-sites": "one model at two sites, over the internet",
    "spot-bucket": "a spot machine with checkpoints in a bucket",
    "long-context": "sequences of 131,072 tokens on eight GPUs",
}
"""Templates of the cookbook; docs/cookbook-NAME.md is the page of each."""


def show(resolved: Resolved, *, origins: bool = True) -> str:
    """Every value, as a run file that loads again.

    `origins`: add `# run.yaml:9`, `# command line` or `# default` to each line.
    """
    rows = [
        (text, resolved.origins[dotted(path)] if path else "")
        for text, path in yaml_lines(keys.as_written(resolved.config.values()))
    ]
    rows.append(("# derived:", ""))
    rows += [
        (f"#   {name}: {scalar_text(value)}", resolved.origins[f"derived.{name}"])
        for name, value in resolved.derived.items()
    ]
    if not origins:
        return "".join(f"{text}\n" for text, _ in rows)
    width = min(_WIDEST, max(len(text) for text, origin in rows if origin))
    return "".join(f"{text.ljust(width)}  # {o}\n" if o else f"{text}\n" for text, o in rows)


def template(kind: str) -> str:
    """A commented run file, ready to load. ConfigError: the template does not exist."""
    folder = "recipes" if kind in RECIPES else "templates"
    if kind not in (known := TEMPLATES | RECIPES):
        near = difflib.get_close_matches(kind, known, n=1)
        raise ConfigError(
            f'template not found: "{kind}"',
            where="command line",
            fix=f"{f'did you mean {near[0]}? ' if near else ''}use one of: {', '.join(known)}",
        )
    entry = resources.files("isles.config") / folder / f"{kind}.yaml"
    return entry.read_text(encoding="utf-8")


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, with a description of each key, for editors."""
    schema = _for_editors(deepcopy(keys.run_schema()))
    assert isinstance(schema, dict)
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft, **schema, "title": "isles run file"}


def _for_editors(node: object) -> object:
    # Times as text, and no defaults of whole sections, as their keys have defaults.
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    changed = {key: _for_editors(child) for key, child in node.items()}
    default = node.get("default")
    if isinstance(default, float) and "duration" in keys.value_types(node):
        changed["default"] = write_duration(default)
    first = default[0] if isinstance(default, list) and default else default
    if isinstance(first, dict):
        del changed["default"]
    return changed
