"""Recomputation of activations in the backward pass, to save memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isles.errors import UserError


def set_gradient_checkpointing(model: nn.Module, kind: str) -> None:
    """Recompute activations in the backward pass: `none`, `full`, `selective` or `offload`.

    Selective keeps the results of attention, of every second matrix product and of grouped
    products, and recomputes the rest. Full keeps only the inputs of blocks, and offload keeps them
    in main memory.

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
    if hasattr(model, "_require_grads_hook"):
        # transformers makes the embedding's output require gradients, as checkpoints that are
        # reentrant need it. FSDP2 would gather a frozen embedding for its backward pass.
        disable: Any = model.disable_input_require_grads
        disable()
    if kind == "offload":
        block: Any
        for block in model.modules():
            if hasattr(block, "_gradient_checkpointing_func"):
                block._gradient_checkpointing_func = checkpoint_offloaded


def checkpoint_offloaded(function: Callable[..., Any], *args: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, which keeps the block's input in main memory.

    Args:
        function: a block, with all its other arguments bound.
        args: of the block; the first floating-point tensor is kept in main memory.
    """
    place = next((n for n, x in enumerate(args) if _is_activation(x)), None)
    if place is None:
        return checkpoint(function, *args, use_reentrant=False)
    kept = _Kept(args[place])
    ticket = _Leave.apply(args[place], kept)  # type: ignore[no-untyped-call]

    def run(ticket: Tensor, *others: Any) -> Any:
        again = _Return.apply(ticket, kept)  # type: ignore[no-untyped-call]
        return function(*others[:place], again, *others[place:])

    # The checkpoint itself would hold what it is given, so it is given a ticket.
    others = args[:place] + args[place + 1 :]
    return checkpoint(run, ticket, *others, use_reentrant=False)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1


class _Kept:
    # The input of a block: on its device until it is first taken, then in main memory. The copies
    # are in the order of the device's stream, so that nobody waits for them.

    def __init__(self, value: Tensor) -> None:
        self._device = value.device
        self._value: Tensor | None = value.detach()
        self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
        self._host.copy_(value.detach(), non_blocking=True)
        self.gradient: Tensor | None = None

    def take(self) -> Tensor:
        value, self._value = self._value, None
        return self._host.to(self._device, non_blocking=True) if value is None else value


class _Leave(torch.autograd.Function):
    # From a block's input to a ticket, which carries no numbers.

    @staticmethod
    def forward(ctx: Any, value: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        return value.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, _ticket: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.kept.gradient = ctx.kept.gradient, None
        return gradient, None


class _Return(torch.autograd.Function):
    # From the ticket to the block's input.

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, kept: _Kept) -> Tensor:
        ctx.kept = kept
        ctx.save_for_backward(ticket)
        return kept.take()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.kept.gradient = gradient
        return torch.zeros_like(ctx.saved_tensors[0]), None


@functools.cache
def _kept(*, keeps_grouped: bool, has_4bit: bool) -> tuple[frozenset[Any], frozenset[Any]]:
    # The matrix products, of which every second is kept, and the operations that are always kept.
    # Attention costs more than its output takes. The choice of experts is computed again: models
    # change its scores in place, and the same kernels give the same bits.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.nn.attention.varlen")  # registers its operation
    grouped = ("bmm",) if keeps_grouped else ()
    products = {"aten": ("mm", "addmm", "linear", *grouped)}
    if has_4bit:
        products["bitsandbytes"] = ("gemm_4bit",)
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

    # Operations of bitsandbytes exist once it is imported.
    has_4bit = "bitsandbytes" in sys.modules
    products, always = _kept(keeps_grouped=keeps_grouped, has_4bit=has_4bit)
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
