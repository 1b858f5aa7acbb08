"""The sections `model`, `tokenizer` and `adapter`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from isles.config.sections.base import Section, Text
from isles.errors import MissingDependencyError, not_installed


class ModelConfig(Section):
    """The model to train, and its initial weights."""

    name_or_path: Text
    """A Hugging Face id, a local folder or config.json, or a shape shipped with isles."""

    init: Literal["pretrained", "scratch"] = "pretrained"
    """pretrained loads the weights (safetensors). scratch starts with random weights."""

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    """sdpa is PyTorch's fused attention. eager is slower, and gemma2, gpt_oss and bloom need
    it. flash_attention_2 needs the package flash-attn and a GPU. flex_attention needs a GPU."""

    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    """Weight of the loss that balances the experts of a mixture; 0 turns it off. Default: the value
    in the model's config, or 0 if an adapter freezes the routers."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Read that code first."""


OWN_VARIABLES = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "conversations", "return_assistant_tokens_mask"),
    )
)
"""Variables of a chat template that isles and transformers set."""


class TokenizerConfig(Section):
    """The tokenizer. Default: the tokenizer of the model."""

    name_or_path: Text | None = None
    """A Hugging Face id or a local folder. Default: the tokenizer in the model's folder."""

    chat_template: Text | None = None
    """A Jinja file that turns messages into text, or chatml, which works with any tokenizer.
    Default: the tokenizer's own template, or chatml if isles trains the tokenizer."""

    chat_template_kwargs: dict[Text, Any] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Variables for the chat template, such as {enable_thinking: false}, also for `isles generate
    --chat`. The column chat_template_kwargs sets them for one row."""

    add_special_tokens: bool = True
    """Add the tokenizer's special tokens (BOS for Llama and Gemma) to each text, but not to chats.
    false: add only the end-of-text token, also in the exported tokenizer."""

    train_vocab_size: Annotated[int, Field(ge=260, le=1_000_000)] | None = None
    """Train a byte-level BPE tokenizer of at most this many tokens on the data."""


class AdapterConfig(Section):
    """Low-rank adapters (arXiv:2106.09685) from peft, on a frozen model."""

    type: Literal["none", "lora", "qlora"] = "none"
    """none trains every weight. lora freezes the model, adds small matrices, and trains only these.
    qlora also holds the frozen matrices in 4 bits (bitsandbytes). With strategy {kind: fsdp} the
    ranks shard them; with {kind: ddp} every rank has all of them. Other frozen weights have 16
    bits, or 32 bits with training.precision 32-true."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank of the adapter matrices."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapter output: alpha / r, or alpha / sqrt(r) with use_rslora."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter input."""

    target_modules: (
        Literal["all-linear"] | Annotated[tuple[Text, ...], Field(min_length=1, strict=False)]
    ) = "all-linear"
    """Matrices that get an adapter, by the ends of their names, such as [q_proj, v_proj].
    all-linear: every linear layer except the output head. The experts of a mixture are stacked
    matrices: [all-linear, experts.gate_up_proj, experts.down_proj]."""

    modules_to_save: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Modules to train and save in full, such as [embed_tokens, lm_head]."""

    use_rslora: bool = False
    """Rank-stabilized scale (arXiv:2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adapters (arXiv:2402.09353)."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """With qlora: the 4-bit type."""

    bnb_4bit_use_double_quant: bool = True
    """With qlora: also quantize the quantization constants, which saves 0.4 bits per weight."""


def missing_package(adapter: AdapterConfig) -> MissingDependencyError | None:
    """The error to raise if a package of the adapter is not installed. Imports nothing."""
    needed = {"none": {}, "lora": {"peft": "train"}}
    needed["qlora"] = {**needed["lora"], "bitsandbytes": "qlora"}
    user, key = f"adapter.type {adapter.type}", "adapter.type"
    found = (not_installed(p, user, key, extra) for p, extra in needed[adapter.type].items())
    return next((error for error in found if error is not None), None)
