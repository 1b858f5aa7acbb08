"""Recomputation of activations in the backward pass, to save memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from isles.errors import UserError


def set_gradient_checkpointing(model: nn.Module, kind: str) -> None:
    """Recompute activations in the backward pass: `none`, `full`, or `selective`.

    Selective keeps the results of attention, of every second matrix product and of grouped
    products, and recomputes the rest.

    Raises:
        UserError: the model does not support it.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), section 5, by the policies of
    torch.utils.checkpoint.
    """
    if kind == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise UserError(
            f"{type(model).__name__} does not support gradient checkpointing",
            where="training.gradient_checkpointing",
            fix="set training.gradient_checkpointing: none",
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        # With a bias, experts add it in place to the product, which must not be kept then.
        weights = (name for name, _ in model.named_parameters())
        has_bias = any("experts" in name and "bias" in name for name in weights)
        options["context_fn"] = functools.partial(_contexts, keeps_grouped=not has_bias)
    # transformers 5 renamed it, and version 6 removes the old name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable(options)


@functools.cache
def _kept(*, keeps_grouped: bool) -> tuple[frozenset[Any], frozenset[Any]]:
    # The matrix products, of which every second is kept, and the operations that are always kept.
    # Attention costs more than its output takes. The choice of experts is computed again: models
    # change its scores in place, and the same kernels give the same bits.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.nn.attention.varlen")  # registers its operation
    grouped = ("bmm",) if keeps_grouped else ()
    products = {"aten": ("mm", "addmm", "linear", *grouped), "bitsandbytes": ("gemm_4bit",)}
    always = {
        "aten": (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_attention_math",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_mm",
            *(("_grouped_mm",) if keeps_grouped else ()),
        ),
        "torch_attn": ("_varlen_attn",),
        "flash_attn": ("_flash_attn_forward", "_flash_attn_varlen_forward"),
        "_c10d_functional": ("reduce_scatter_tensor", "all_to_all_single"),
    }
    return _overloads(products), _overloads(always)


def _overloads(names: Mapping[str, Sequence[str]]) -> frozenset[Any]:
    # All forms of the operations that this torch has.
    found = set()
    for space, operations in names.items():
        for operation in operations:
            packet = getattr(getattr(torch.ops, space), operation, None)
            found |= {getattr(packet, form) for form in packet.overloads()} if packet else set()
    return frozenset(found)


def _contexts(*, keeps_grouped: bool) -> Any:
    # For one block: the forward pass and its recomputation count the products alike.
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    products, always = _kept(keeps_grouped=keeps_grouped)
    counts = {True: 0, False: 0}

    def keep(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> Any:
        if operation in always:
            return CheckpointPolicy.MUST_SAVE
        if operation in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Any = create_selective_checkpoint_contexts  # torch leaves it untyped
    return contexts(keep)
