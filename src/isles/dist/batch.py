"""One micro-batch of one rank, and the inputs that keep documents in a row apart.

B: rows. T: tokens per row. N: number of positions, over all rows, that start a document or have a
target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.facts.models import BLIND, WINDOWED

IGNORE_INDEX = -100
"""Target value that the loss ignores, as in torch.nn.functional.cross_entropy."""

MIXED_DTYPE = {
    "bf16-mixed": torch.bfloat16,
    "fp8-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
}
"""Compute dtype of each mixed `training.precision` (the weights are fp32). With fp8-mixed, it is
the type around the fp8 products."""

COMPUTE_DTYPE = MIXED_DTYPE | {"bf16-true": torch.bfloat16}
"""Compute dtype of each `training.precision`; precisions not listed compute in fp32."""

MASKED = "isles_causal_sdpa"
"""torch's fused attention: causal without a mask, or with the mask that it gets."""

VARLEN = "isles_causal_varlen"
"""The same, with a variable-length kernel if it gets document boundaries."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank.

    Targets are shifted already: `targets_BT[b, t]` is the token that follows `input_ids_BT[b, t]`.
    """

    input_ids_BT: Tensor
    """int64, on the rank's device."""

    targets_BT: Tensor
    """int64; IGNORE_INDEX at positions without a training target."""

    sample_ids: tuple[int, ...]
    """The global sample index of each row; for preferences, of each pair of rows."""

    places_N: Tensor | None = None
    """int64; positions of the targets in the flattened rows, so that the head computes only these.
    None: the head computes every position."""

    reference_B: Tensor | None = None
    """fp32, for preferences: the log-probability of each row's targets before training."""

    position_ids_BT: Tensor | None = None
    """int64; starts at 0 for each document that attends only to itself, and for the padding after
    the last document. None: each row is one document, numbered from 0."""

    cu_seqlens_N: Tensor | None = None
    """int32, set if position ids are set: start of each document in the flattened rows, and the
    total length, as variable-length attention kernels expect."""

    longest_document: int | None = None
    """Set if position ids are set: an upper bound of the documents' lengths, known on the host."""

    def sample(self, index: int) -> Batch:
        """The rows of one sample; `sample_ids` has at most one entry."""
        each = len(self.input_ids_BT) // max(1, len(self.sample_ids))
        rows = slice(index * each, (index + 1) * each)
        positions = None if self.position_ids_BT is None else self.position_ids_BT[rows]
        return Batch(
            self.input_ids_BT[rows],
            self.targets_BT[rows],
            self.sample_ids[index : index + 1],
            reference_B=None if self.reference_B is None else self.reference_B[rows],
            position_ids_BT=positions,
            cu_seqlens_N=None if positions is None else cu_seqlens(positions),
            longest_document=self.longest_document,
        )


def cu_seqlens(position_ids_BT: Tensor) -> Tensor:
    """Start of each document in the flattened rows, and the total length; int32.

    On a GPU this synchronizes, because the host must know the number of documents.
    """
    begins_N = (position_ids_BT.flatten() == 0).nonzero().flatten()
    return F.pad(begins_N, (0, 1), value=position_ids_BT.numel()).to(torch.int32)


def longest_document(cu_seqlens_N: Tensor, length: int) -> int:
    """An upper bound of the documents' lengths: a power of two, or the length of a row.

    Reads values, so on a GPU it waits. Few different numbers, so that torch.compile makes few
    graphs.

    Args:
        length: tokens of a row.
    """
    longest = int(cu_seqlens_N.diff().max())
    return min(length, 1 << (longest - 1).bit_length())


def attends_plainly(config: Any) -> bool:
    """True if every layer of a Hugging Face model attends to all earlier tokens, by its config."""
    text = config.get_text_config()  # for multimodal models, the text part
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(text, "sliding_window", None)


def passes_windows(config: Any) -> bool:
    """True if every layer attends to all earlier tokens, or passes its sliding window on."""
    kinds = set(getattr(config, "layer_types", None) or [])
    known = kinds <= {"full_attention", "sliding_attention"} and config.model_type in WINDOWED
    return attends_plainly(config) or known


def block_mask(
    position_ids_BT: Tensor, window: int | None = None, queries_t: Tensor | None = None
) -> Tensor:
    """Mask for attention to earlier tokens of the same document; bool, [B, 1, t, T].

    Made on the device without a synchronization; takes B*t*T bytes.

    Args:
        position_ids_BT: int64, 0 where a document begins.
        window: number of tokens that a token sees, itself included; None: no limit.
        queries_t: places in a row of the tokens that attend; None: all, so that t is T.
    """
    documents_BT = (position_ids_BT == 0).cumsum(-1)
    places_T = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    if queries_t is None:
        queries_t = places_T
    seen_tT = places_T <= queries_t[:, None]
    if window is not None:
        seen_tT &= places_T > queries_t[:, None] - window
    own_Bt = documents_BT[:, queries_t]
    return ((own_Bt[:, :, None] == documents_BT[:, None, :]) & seen_tT).unsqueeze(1)


def _added(mask_B1TT: Tensor) -> Tensor:
    # Added to scores: 0, or the most negative bf16 number, which keeps the dtype of bf16 and fp32
    # scores.
    scores_B1TT = torch.zeros_like(mask_B1TT, dtype=torch.bfloat16)
    return scores_B1TT.masked_fill_(~mask_B1TT, torch.finfo(torch.bfloat16).min)


def isolation_inputs(
    model: Any,
    position_ids_BT: Tensor,
    cu_seqlens_N: Tensor | None = None,
    longest: int | None = None,
) -> dict[str, Any]:
    """Model inputs, in addition to token ids, that keep the documents of a row apart.

    Made once per micro-batch; depends on the attention that the model uses:

    - ours: a mask, or the document boundaries for the kernel that needs them;
    - flash_attention_2: the document boundaries;
    - eager, if every layer attends to all earlier tokens: a mask that is added to the scores;
    - other models that ignore position ids: one mask per kind of layer;
    - ours, if some layers have sliding windows, and the boundaries are unknown: the same;
    - otherwise only position ids. transformers makes masks for each kind of layer from their
      values,
      which synchronizes with the GPU.

    Args:
        model: the Hugging Face model that gets the inputs.
        position_ids_BT: int64, 0 where a document begins.
        cu_seqlens_N: int32, start of each document in the flattened rows, and the total length;
            None
            if unknown, and then a mask is made instead.
        longest: an upper bound of the documents' lengths; None: the length of a row.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids_BT}
    attention = model.config._attn_implementation
    if cu_seqlens_N is not None and attention in (VARLEN, "flash_attention_2"):
        # The kernels start blocks for documents of this length, so a row's length would start many
        # empty blocks. The exact maximum on the device would make the host wait.
        length = longest or position_ids_BT.shape[1]
        inputs |= {"cu_seq_lens_q": cu_seqlens_N, "cu_seq_lens_k": cu_seqlens_N}
        inputs |= {"max_length_q": length, "max_length_k": length}
    elif attention in (MASKED, VARLEN, "sdpa") and attends_plainly(model.config):
        inputs["attention_mask"] = block_mask(position_ids_BT)
    elif attention == "eager" and attends_plainly(model.config):
        inputs["attention_mask"] = _added(block_mask(position_ids_BT))
    elif attention == VARLEN and not getattr(model.config, "layer_types", None):
        inputs["attention_mask"] = block_mask(position_ids_BT, model.config.sliding_window)
    elif attention == VARLEN or model.config.model_type in BLIND:
        windows = {"full_attention": None, "sliding_attention": model.config.sliding_window}
        masks = {kind: block_mask(position_ids_BT, window) for kind, window in windows.items()}
        if attention == "eager":
            masks = {kind: _added(mask) for kind, mask in masks.items()}
        inputs["attention_mask"] = masks
    return inputs
