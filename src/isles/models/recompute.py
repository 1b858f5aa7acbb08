"""Recomputation of activations in the backward pass, to save memory."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from isles.errors import UserError


def set_gradient_checkpointing(model: nn.Module, kind: str) -> None:
    """Recompute activations in the backward pass: `none`, `full`, or `selective`.

    Selective keeps the results of matrix products and attention and recomputes the rest.

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
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_products
        )
    # transformers 5 renamed it, and version 6 removes the old name.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable: Any = next(getattr(model, name) for name in names if hasattr(model, name))
    enable(options)


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    name = str(operation)
    expensive = ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear", "scaled_dot_product")
    if any(sign in name for sign in expensive):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
