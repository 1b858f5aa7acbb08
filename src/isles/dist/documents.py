"""Attention document by document: with torch's variable-length kernel, or on a CPU in a loop.

B: rows. T: tokens of a row that attend. S: tokens of a row that they may attend to. H: heads.
D: head dimension. N, M: T and S over all rows. P: pieces of documents.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import block_mask
from isles.facts.models import DEAF


@dataclass(frozen=True, slots=True)
class Documents:
    """Boundaries of the documents in flattened rows, as variable-length kernels expect.

    A piece of a document has its queries at the end of its keys, and may have keys only.
    """

    queries_P1: Tensor
    """int32: start of each piece among the queries, and the number of queries."""

    keys_P1: Tensor
    """int32: start of each piece among the keys, and the number of keys."""

    longest_queries: int
    """An upper bound of the queries of a piece."""

    longest_keys: int
    """An upper bound of the keys of a piece, with or without queries."""


def attends_by_document(
    config: Any, device: torch.device | None, dtype: torch.dtype | None, *, is_compiled: bool
) -> bool:
    """True if `attend_by_document` can compute the attention of a Hugging Face model.

    Args:
        config: of the model, which attends to all earlier tokens or to windows of these.
        device: of the model; None: any device.
        dtype: computing type of attention, if known.
        is_compiled: whether torch.compile will compile the model. On a CPU, it would compile the
            model again for each number of documents.
    """
    if config.model_type in DEAF:
        return False
    if device is not None and device.type == "cpu":
        return not is_compiled
    return _has_kernel(config, device, dtype)


def attend_by_document(
    query_BHTD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    documents: Documents,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Causal attention within each document, without a mask.

    Args:
        key_BHSD, value_BHSD: may have fewer heads than the queries.
        window: number of tokens that a token sees, itself included; None: no limit.
        dropout_p: 0 unless on a CPU.

    Returns:
        [B, T, H, D].
    """
    rows, heads, length, _ = query_BHTD.shape
    shared, kind = heads // key_BHSD.shape[1], query_BHTD.device.type
    if shared > 1 and not (kind != "cpu" and _shares_heads()):
        key_BHSD, value_BHSD = (x.repeat_interleave(shared, 1) for x in (key_BHSD, value_BHSD))
    query_NHD, key_MHD, value_MHD = (
        x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHSD, value_BHSD)
    )
    if kind == "cpu":
        out_NHD = _one_by_one(
            query_NHD, key_MHD, value_MHD, documents, window, dropout_p=dropout_p, scale=scale
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        if torch.is_autocast_enabled(kind):
            # Autocast does not cover this kernel, and rotary embeddings give fp32 queries.
            dtype = torch.get_autocast_dtype(kind)
            query_NHD, key_MHD, value_MHD = (x.to(dtype) for x in (query_NHD, key_MHD, value_MHD))
        grouped: dict[str, Any] = {"enable_gqa": shared > 1} if _shares_heads() else {}
        found = varlen_attn(
            query_NHD,
            key_MHD,
            value_MHD,
            documents.queries_P1,
            documents.keys_P1,
            documents.longest_queries,
            documents.longest_keys,
            scale=scale,
            # Causal. The kernel aligns the last query of a piece with its last key.
            window_size=(-1 if window is None else window - 1, 0),
            **grouped,
        )
        assert isinstance(found, Tensor)
        out_NHD = found
    return out_NHD.view(rows, length, heads, -1)


def _has_kernel(config: Any, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    # Whether torch's kernel for documents of different lengths can compute the model's attention.
    # The kernel does not support dropout, or values and keys of different sizes.
    if device is None or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    size = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    if getattr(text, "v_head_dim", None):
        return False
    dropouts = [getattr(text, name, 0.0) or 0.0 for name in ("attention_dropout", "attn_pdrop")]
    return 0 < size <= 256 and size % 8 == 0 and not any(dropouts)


@functools.cache
def _shares_heads() -> bool:
    # Whether the kernel takes fewer key heads than query heads, as from torch 2.13 on. Repeated,
    # keys and values take 4 to 8 times the memory and traffic, in the backward pass too.
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _one_by_one(
    query_NHD: Tensor,
    key_MHD: Tensor,
    value_MHD: Tensor,
    documents: Documents,
    window: int | None,
    **options: Any,
) -> Tensor:
    # Attention of one piece after another.
    outputs = []
    # Reading the lengths on a CPU does not wait.
    queries, keys = (x.diff().tolist() for x in (documents.queries_P1, documents.keys_P1))
    whole = (x.transpose(0, 1)[None] for x in (query_NHD, key_MHD, value_MHD))
    split = (torch.split(x, n, 2) for x, n in zip(whole, (queries, keys, keys), strict=True))
    for q, k, v in zip(*split, strict=True):
        length, seen = q.shape[2], k.shape[2]
        if not length:
            continue
        mask = None
        if length < seen or (window is not None and length > window):
            mask = block_mask(torch.arange(seen)[None], window, torch.arange(seen - length, seen))
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, **options)
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1).contiguous()
