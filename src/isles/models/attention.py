"""Causal attention for training that makes no mask, and so never waits for the GPU."""

from __future__ import annotations

from typing import Any

_NAME = "isles_causal_sdpa"


def use_maskless_attention(model: Any) -> bool:
    """Switch a model from sdpa to the same sdpa without a mask; False where that would differ.

    transformers looks at the position ids in every forward pass to find packed documents, and that
    look makes the CPU wait for the GPU. A batch of isles holds one sequence a row, from its first
    position on, padded at the right only; there, plain causal attention is the same function.
    A model with sliding windows or other kinds of layers keeps its own masks.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windows = getattr(config, "sliding_window", None)
    if config._attn_implementation != "sdpa" or kinds != {"full_attention"} or windows:
        return False
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Known to the attention functions and not to the mask functions: no mask is made for it.
    AttentionInterface.register(_NAME, sdpa_attention_forward)
    model.set_attn_implementation(_NAME)
    return True
