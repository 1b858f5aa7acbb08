"""The sections `model` and `tokenizer`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    name_or_path: Annotated[str, Field(min_length=1)]
    """A Hugging Face hub id, a local folder or config.json, or a shape shipped with isles."""

    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained: load the weights (safetensors). scratch: the architecture with fresh weights."""

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention: sdpa is PyTorch's fused attention; eager is the plain one, for looking inside;
    flash_attention_2 needs the package flash-attn and a GPU; flex_attention needs a GPU."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


class TokenizerConfig(Section):
    """Which tokenizer; left out, the model's own."""

    name_or_path: Annotated[str, Field(min_length=1)] | None = None
    """A hub id or a local folder. null: the tokenizer in the model's folder."""

    chat_template: Annotated[str, Field(min_length=1)] | None = None
    """How messages become text: a Jinja file, or chatml, which is built in and works with any
    tokenizer. null: the tokenizer's own; of one that is trained here, chatml."""

    train_vocab_size: Annotated[int, Field(ge=260, le=1_000_000)] | None = None
    """Train a byte-level BPE of this many tokens on the data, and keep it with the run."""
