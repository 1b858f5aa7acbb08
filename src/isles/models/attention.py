"""Causal attention for training that looks at no values, and so never waits for the GPU.

B: rows. T: tokens of a row. N: tokens of all rows. H: heads. D: head dimension.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import MASKED, VARLEN, attends_plainly
from isles.errors import MissingDependencyError, UserError
from isles.facts.architectures import DEAF


def use_maskless_attention(
    model: Any,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> bool:
    """Switch a model from sdpa to the same sdpa without a mask; False where that would differ.

    transformers looks at the position ids in every forward pass to find packed documents, and that
    look makes the CPU wait for the GPU. A batch of isles holds one document a row, padded at the
    right only: there, plain causal attention is the same function; or it says itself where
    documents begin (`dist/batch.py`).
    A model with sliding windows or other kinds of layers keeps its own masks.

    Args:
        model: a Hugging Face model.
        device: where it computes; None: any, and documents that are kept apart go through a mask.
            Else nothing is computed between them where that can be done: on a GPU with bf16 or
            fp16 by a kernel for it, on a CPU document by document.
        dtype: in what attention is computed, as far as it is known.
        is_compiled: whether torch.compile will have the model. On a CPU documents then go through
            a mask, as their number would be part of what is compiled.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or not attends_plainly(config):
        return False
    from transformers import AttentionInterface

    on_cpu = device is not None and device.type == "cpu"
    by_document = not is_compiled if on_cpu else _has_kernel(config, device, dtype)
    name = VARLEN if by_document and config.model_type not in DEAF else MASKED
    # Known to the attention functions and not to the mask functions: no mask is made for it.
    AttentionInterface.register(name, _attend)
    model.set_attn_implementation(name)
    return True


def check_attention(name: str, device: torch.device) -> None:
    """Whether the attention that the run file names can train here.

    Args:
        name: model.attn_implementation.
        device: of this rank.

    Raises:
        UserError: it needs a GPU, or a package.
    """
    if name not in ("flash_attention_2", "flex_attention"):
        return
    if device.type != "cuda":
        raise UserError(
            f"attn_implementation {name} trains on a GPU only, and this rank has none",
            where="model.attn_implementation",
            fix="use model.attn_implementation: sdpa, which is fused attention too",
        )
    if name == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise MissingDependencyError(
            "attn_implementation flash_attention_2 needs the package flash-attn",
            where="model.attn_implementation",
            fix="pip install flash-attn --no-build-isolation, or use "
            "model.attn_implementation: sdpa, which is fused attention too",
        )


def _has_kernel(config: Any, device: torch.device | None, dtype: torch.dtype | None) -> bool:
    # Whether torch's kernel for documents of different lengths can do the model's attention.
    # It knows no dropout, and no values of another size than the keys.
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


def _attend(
    module: Any,
    query_BHTD: Tensor,
    key_BHTD: Tensor,
    value_BHTD: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    # Attention as transformers calls it. Returns [B, T, H, D].
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if cu_seq_lens_q is None or max_length_q is None:
        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query_BHTD, key_BHTD, value_BHTD, attention_mask, **options
        )
        return done
    del cu_seq_lens_k, max_length_k  # queries and keys are of the same documents
    names = ("softcap", "s_aux", "position_bias")
    biases = [name for name in names if options.get(name) is not None]
    if biases:
        raise UserError(
            f"{type(module).__name__} changes its scores ({', '.join(biases)}), which attention "
            "document by document does not know",
            where="data.isolate_documents",
            fix="use model.attn_implementation: eager, or data.packing: false",
        )
    rows, heads, length, _ = query_BHTD.shape
    # Before torch 2.13 the kernel takes no keys with fewer heads than the queries have.
    shared = heads // key_BHTD.shape[1]
    key_BHTD, value_BHTD = (
        x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key_BHTD, value_BHTD)
    )
    query_NHD, key_NHD, value_NHD = (
        x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHTD, value_BHTD)
    )
    tokens = query_NHD, key_NHD, value_NHD
    scale = options.get("scaling")
    if query_BHTD.device.type == "cpu":
        out_NHD = _one_by_one(*tokens, cu_seq_lens_q, scale, options.get("dropout", 0.0))
    else:
        out_NHD = _by_kernel(*tokens, cu_seq_lens_q, max_length_q, scale)
    return out_NHD.view(rows, length, heads, -1), None


def _one_by_one(
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    cu_seqlens: Tensor,
    scale: float | None,
    dropout: float,
) -> Tensor:
    # Attention of one document after another; a CPU waits for nothing when it is asked for their
    # lengths.
    lengths = cu_seqlens.diff().tolist()
    pieces = zip(
        *(
            torch.split(x.transpose(0, 1)[None], lengths, 2)
            for x in (query_NHD, key_NHD, value_NHD)
        ),
        strict=True,
    )
    done = [
        F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
        for query, key, value in pieces
    ]
    return torch.cat(done, 2)[0].transpose(0, 1).contiguous()


def _by_kernel(
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    scale: float | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    kind = query_NHD.device.type
    if torch.is_autocast_enabled(kind):
        # Autocast does not know this kernel, and rotary embeddings give queries and keys in fp32.
        dtype = torch.get_autocast_dtype(kind)
        query_NHD, key_NHD, value_NHD = (x.to(dtype) for x in (query_NHD, key_NHD, value_NHD))
    out = varlen_attn(
        query_NHD,
        key_NHD,
        value_NHD,
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
    )
    assert isinstance(out, Tensor)
    return out
