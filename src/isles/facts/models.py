"""The shapes of models that are shipped with isles, and what a config.json says of size."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def shape_names() -> tuple[str, ...]:
    """The names of the shapes, smallest model first."""
    names = [
        entry.name.removesuffix(".json")
        for entry in (resources.files("isles.facts") / "shapes").iterdir()
        if entry.name.endswith(".json")
    ]
    return tuple(sorted(names, key=lambda name: llama_parameters(load_shape(name))))


def load_shape(name: str) -> dict[str, Any]:
    """The Hugging Face config of a shipped shape.

    Raises:
        KeyError: there is no such shape.
    """
    if not name.replace("-", "").isalnum():
        raise KeyError(name)
    entry = resources.files("isles.facts") / "shapes" / f"{name}.json"
    if not entry.is_file():
        raise KeyError(name)
    loaded: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
    return loaded


def llama_parameters(config: dict[str, Any]) -> int:
    """Parameters of a Llama, from its config.json; tied embeddings are counted once.

    Source: Touvron et al. 2023 (arXiv:2302.13971), section 2.2, with grouped-query attention.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = hidden // config["num_attention_heads"]
    kv_width = config["num_key_value_heads"] * head
    attention = 2 * hidden * hidden + 2 * hidden * kv_width
    mlp = 3 * hidden * config["intermediate_size"]
    embeddings = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return int(embeddings + layers * (attention + mlp + 2 * hidden) + hidden)
