"""The sections `model`, `tokenizer` and `adapter`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from isles.config.sections.base import Section, Text
from isles.errors import MissingDependencyError, not_installed


class ModelConfig(Section):
    """Which model is trained, and from what it starts."""

    name_or_path: Text
    """A Hugging Face hub id, a local folder or config.json, or a shape shipped with isles."""

    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained: load the weights (safetensors). scratch: the architecture with fresh weights."""

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """Attention: sdpa is PyTorch's fused attention; eager is the plain one, for looking inside;
    flash_attention_2 needs the package flash-attn and a GPU; flex_attention needs a GPU."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


OWN_VARIABLES = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversations", "return_assistant_tokens_mask"),
    )
)
"""Variables of a chat template that isles and transformers give to it."""


class TokenizerConfig(Section):
    """Which tokenizer; left out, the model's own."""

    name_or_path: Text | None = None
    """A Hugging Face id or a local folder. Default: the tokenizer in the model's folder."""

    chat_template: Text | None = None
    """How messages become text: a Jinja file, or chatml, which is built in and works with any
    tokenizer. Default: the tokenizer's own template, or chatml if isles trains the tokenizer."""

    chat_template_kwargs: dict[Text, Any] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Variables for the chat template, such as {enable_thinking: false}, in training and in
    `isles generate --chat`. A row may set its own in the column chat_template_kwargs."""

    add_special_tokens: bool = True
    """Begin and end a text as the tokenizer does: with BOS for Llama and Gemma, without for Qwen. A
    chat is what its template writes. false: a text gets its end-of-text token alone, and so does
    the tokenizer that the run keeps and exports."""

    train_vocab_size: Annotated[int, Field(ge=260, le=1_000_000)] | None = None
    """Train a byte-level BPE of at most this many tokens on the data, and keep it with the run."""


class AdapterConfig(Section):
    """Low-rank adapters (arXiv:2106.09685), by peft, beside a frozen model."""

    type: Literal["none", "lora", "qlora"] = "none"
    """none: every weight is trained. lora: the model is frozen, and small matrices beside its own
    are trained. qlora (arXiv:2305.14314): as lora, and the frozen matrices are held in 4 bits by
    bitsandbytes, whole on every rank. What is frozen is held in 16 bits unless
    training.precision is 32-true."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank of the small matrices."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What they compute is scaled by alpha / r (with rslora: by alpha / sqrt(r))."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on what goes into them."""

    target_modules: (
        Literal["all-linear"] | Annotated[tuple[Text, ...], Field(min_length=1, strict=False)]
    ) = "all-linear"
    """Matrices that get an adapter, by the ends of their names such as [q_proj, v_proj].
    all-linear: every linear layer except the output head."""

    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules to train and save in full next to the adapter, such as [embed_tokens, lm_head]."""

    use_rslora: bool = False
    """Rank-stabilised scale (arXiv:2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adapters: magnitude and direction apart (arXiv:2402.09353)."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """qlora: the 4-bit type."""

    bnb_4bit_use_double_quant: bool = True
    """qlora: quantise the quantisation constants too, about 0.4 bits a weight less."""


def missing_package(adapter: AdapterConfig) -> MissingDependencyError | None:
    """The error to raise where a package of the adapter is not installed; imports nothing."""
    needed = {"none": {}, "lora": {"peft": "train"}}
    needed["qlora"] = {**needed["lora"], "bitsandbytes": "qlora"}
    user, key = f"adapter.type {adapter.type}", "adapter.type"
    found = (not_installed(p, user, key, extra) for p, extra in needed[adapter.type].items())
    return next((error for error in found if error is not None), None)
