"""Causal attention for training that does not read values, and so never waits for the GPU.

B: rows. T: tokens of a row. N: tokens of all rows. H: heads. D: head dimension.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from isles.dist.batch import MASKED, VARLEN, attends_plainly, passes_windows
from isles.dist.documents import Documents, attend_by_document, attends_by_document
from isles.errors import MissingDependencyError, UserError


def use_maskless_attention(
    model: Any,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> bool:
    """Switch a model from sdpa to sdpa without a mask; False if the result would differ.

    transformers reads the position ids in every forward pass to find packed documents, and that
    makes the CPU wait for the GPU. A batch of isles has one document per row with padding only at
    the right, where plain causal attention gives the same result. Otherwise the batch itself has
    the document boundaries (`dist/batch.py`). Sliding windows are computed like documents, without
    a mask, if isles can. A model with other kinds of layers keeps its own masks.

    Args:
        device: of the model; None: any device, and separate documents use a mask. With a device,
            isles skips the computation between documents if it can: with a kernel on a GPU in bf16
            or fp16, and document by document on a CPU.
        dtype: computing type of attention, if known.
        is_compiled: whether torch.compile will compile the model. On a CPU, documents then use
            a mask, as their number would be part of what is compiled.
    """
    config = model.config
    if config._attn_implementation != "sdpa":
        return False
    from transformers import AttentionInterface

    by_document = attends_by_document(config, device, dtype, is_compiled=is_compiled)
    if not (passes_windows(config) if by_document else attends_plainly(config)):
        return False
    name = VARLEN if by_document else MASKED
    # Registered as an attention function but not as a mask function, so no mask is made.
    AttentionInterface.register(name, _attend)
    model.set_attn_implementation(name)
    return True


def check_attention(name: str, device: torch.device) -> None:
    """Check that the run file's attention can train on this machine.

    Raises:
        UserError: the attention needs a GPU or a package that is missing.
    """
    if name not in ("flash_attention_2", "flex_attention"):
        return
    if device.type != "cuda":
        raise UserError(
            f"attn_implementation {name} trains only on a GPU, but this rank has none",
            where="model.attn_implementation",
            fix="use model.attn_implementation: sdpa, which is also fused attention",
        )
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise MissingDependencyError(
            "attn_implementation flash_attention_2 needs the package flash-attn",
            where="model.attn_implementation",
            fix="pip install flash-attn --no-build-isolation, or use "
            "model.attn_implementation: sdpa, which is also fused attention",
        )


def _attend(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    # Attention as transformers calls it. Returns [B, T, H, D].
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, _, length, _ = query_BHTD.shape
    window: int | None = options.get("sliding_window")
    if window is not None and length <= window:
        window = None
    if cu_seq_lens_q is None and window is not None and attention_mask is None:
        # Each row is one document.
        starts = torch.arange(rows + 1, dtype=torch.int32, device=query_BHTD.device)
        cu_seq_lens_q, max_length_q = starts * length, length
    if cu_seq_lens_q is None or max_length_q is None:
        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options
        )
        return done
    names = ("softcap", "s_aux", "position_bias")
    biases = [name for name in names if options.get(name) is not None]
    if biases:
        raise UserError(
            f"{type(module).__name__} changes its attention scores ({', '.join(biases)}), which "
            "attention document by document does not support",
            where="data.isolate_documents",
            fix="use model.attn_implementation: eager, or data.packing: false",
        )
    out_BTHD = attend_by_document(
        query_BHTD,
        key_BHTD,
        value_BHTD,
        # Queries and keys belong to the same documents.
        Documents(cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q),
        window=window,
        scale=options.get("scaling"),
        dropout_p=options.get("dropout", 0.0),
    )
    return out_BTHD, None
