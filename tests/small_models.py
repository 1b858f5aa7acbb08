"""Models of any kind that transformers has, too small to be of use."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "sliding_window": None,
}
TOKENS = {
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def small_config(kind: str, **changes: Any) -> Any:
    """The config of a kind; of sizes and changes what the kind knows."""
    known = AutoConfig.for_model(kind).to_dict()
    values = SIZES | TOKENS | changes
    values.setdefault("layer_types", ["full_attention"] * values["num_hidden_layers"])
    names = known.keys() | TOKENS.keys()
    return AutoConfig.for_model(kind, **{n: value for n, value in values.items() if n in names})


def small_model(kind: str = "llama", **changes: Any) -> Any:
    """A model of that config, in fp32 and train mode, with the same weights each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(kind, **changes), dtype=torch.float32)
