"""What tiny runs train: a model of 30 thousand parameters, and a text."""

from __future__ import annotations

import json
import random
from pathlib import Path

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}

OTHER = 5
"""The user games, whom every Debian has."""


def write_model(folder: Path) -> Path:
    """A Llama, as a config.json in the folder `tiny`."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))
    return model


def write_words(folder: Path) -> Path:
    """A JSONL file of documents with very different lengths."""
    rng = random.Random(0)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(200)]
    rows = [{"text": " ".join(rng.choices(vocabulary, k=rng.randint(1, 60)))} for _ in range(300)]
    path = folder / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
