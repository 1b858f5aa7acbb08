"""Causal attention for training that does not read values, and so never waits for the GPU.

B: rows. T: tokens of a row. N: tokens of all rows. H: heads. D: head dimension.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import MASKED, VARLEN, attends_plainly, block_mask, passes_windows
from isles.errors import MissingDependencyError, UserError
from isles.facts.models import DEAF


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

    on_cpu = device is not None and device.type == "cpu"
    by_document = not is_compiled if on_cpu else _has_kernel(config, device, dtype)
    by_document = by_document and config.model_type not in DEAF
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

    rows, heads, length, _ = query_BHTD.shape
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
    del cu_seq_lens_k, max_length_k  # queries and keys belong to the same documents
    names = ("softcap", "s_aux", "position_bias")
    biases = [name for name in names if options.get(name) is not None]
    if biases:
        raise UserError(
            f"{type(module).__name__} changes its attention scores ({', '.join(biases)}), which "
            "attention document by document does not support",
            where="data.isolate_documents",
            fix="use model.attn_implementation: eager, or data.packing: false",
        )
    shared, kind = heads // key_BHTD.shape[1], query_BHTD.device.type
    if shared > 1 and not (kind != "cpu" and _shares_heads()):
        key_BHTD, value_BHTD = (x.repeat_interleave(shared, 1) for x in (key_BHTD, value_BHTD))
    query_NHD, key_NHD, value_NHD = (
        x.transpose(1, 2).flatten(0, 1) for x in (query_BHTD, key_BHTD, value_BHTD)
    )
    scale = options.get("scaling")
    if kind == "cpu":
        out_NHD = _one_by_one(
            query_NHD,
            key_NHD,
            value_NHD,
            # Reading the lengths on a CPU does not wait.
            cu_seq_lens_q.diff().tolist(),
            window,
            dropout_p=options.get("dropout", 0.0),
            scale=scale,
        )
    else:
        from torch.nn.attention.varlen import varlen_attn

        if torch.is_autocast_enabled(kind):
            # Autocast does not cover this kernel, and rotary embeddings give fp32 queries.
            dtype = torch.get_autocast_dtype(kind)
            query_NHD, key_NHD, value_NHD = (x.to(dtype) for x in (query_NHD, key_NHD, value_NHD))
        grouped: dict[str, Any] = {"enable_gqa": shared > 1} if _shares_heads() else {}
        found = varlen_attn(
            query_NHD,
            key_NHD,
            value_NHD,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # causal
            **grouped,
        )
        assert isinstance(found, Tensor)
        out_NHD = found
    return out_NHD.view(rows, length, heads, -1), None


def _one_by_one(
    query_NHD: Tensor,
    key_NHD: Tensor,
    value_NHD: Tensor,
    lengths: list[int],
    window: int | None,
    **options: Any,
) -> Tensor:
    # Attention of one document after another.
    outputs = []
    whole = (x.transpose(0, 1)[None] for x in (query_NHD, key_NHD, value_NHD))
    split = [torch.split(x, lengths, 2) for x in whole]
    for q, k, v in zip(*split, strict=True):
        length, mask = q.shape[2], None
        if window is not None and length > window:
            mask = block_mask(torch.arange(length)[None], window)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, **options)
        )
    return torch.cat(outputs, 2)[0].transpose(0, 1).contiguous()
