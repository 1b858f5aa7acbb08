"""What one rank computes in one micro-batch, and how documents of a row are kept apart in it.

B: rows. T: tokens of a row. N: places in all rows where documents or targets are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isles.facts.models import BLIND

IGNORE_INDEX = -100
"""A target that is not trained on, as in torch.nn.functional.cross_entropy."""

MIXED_DTYPE = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""In what a mixed `training.precision` computes, with weights in fp32."""

COMPUTE_DTYPE = MIXED_DTYPE | {"bf16-true": torch.bfloat16}
"""In what any `training.precision` computes; fp32 where it is not named."""

MASKED = "isles_causal_sdpa"
"""torch's fused attention, causal without a mask, or with the one that it is given."""

VARLEN = "isles_causal_varlen"
"""The same, by a kernel for documents of different lengths where it is told of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of one rank.

    Targets are shifted already: `targets_BT[b, t]` is the token that follows `input_ids_BT[b, t]`.
    """

    input_ids_BT: Tensor
    """int64, on the rank's device."""

    targets_BT: Tensor
    """int64; IGNORE_INDEX where nothing is trained."""

    sample_ids: tuple[int, ...]
    """The global sample index of each row; for preferences, of each two rows."""

    places_N: Tensor | None = None
    """int64; where the targets lie in the flattened rows, so that the head computes nothing else.
    None: every place is looked at."""

    reference_B: Tensor | None = None
    """fp32, for preferences: the log-probability of each row's targets before training."""

    position_ids_BT: Tensor | None = None
    """int64; a document that attends to itself alone begins at 0, and so does the padding behind
    the last. None: each row is one document, from 0 on."""

    cu_seqlens_N: Tensor | None = None
    """int32, there where position ids are; where documents begin in the flattened rows, and the
    end of these: as kernels for documents of different lengths want it."""

    def sample(self, index: int) -> Batch:
        """The rows of one sample; its `sample_ids` has at most one."""
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
        )


def cu_seqlens(position_ids_BT: Tensor) -> Tensor:
    """Where documents begin in the flattened rows, and the end of these; int32.

    On a GPU this waits for it: how many there are is a number that the host must know.
    """
    begins_N = (position_ids_BT.flatten() == 0).nonzero().flatten()
    return F.pad(begins_N, (0, 1), value=position_ids_BT.numel()).to(torch.int32)


def attends_plainly(config: Any) -> bool:
    """Whether every layer of a Hugging Face model, by its config, attends to all earlier tokens."""
    text = config.get_text_config()  # of models that see or hear too, what reads text
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(text, "sliding_window", None)


def block_mask(position_ids_BT: Tensor, window: int | None = None) -> Tensor:
    """Mask of attention to earlier tokens of the same document; bool, [B, 1, T, T].

    It is made on the device, waits for nothing, and takes B*T*T bytes.

    Args:
        position_ids_BT: int64, 0 where a document begins.
        window: how many tokens are seen, the token itself among them; None: all.
    """
    documents_BT = (position_ids_BT == 0).cumsum(-1)
    length = position_ids_BT.shape[1]
    seen_TT = torch.ones(length, length, dtype=torch.bool, device=position_ids_BT.device).tril()
    if window is not None:
        seen_TT = seen_TT.triu(1 - window)
    return ((documents_BT[:, :, None] == documents_BT[:, None, :]) & seen_TT).unsqueeze(1)


def _added(mask_B1TT: Tensor) -> Tensor:
    # A mask to be added to scores: 0, or the least number of bf16, which neither narrows nor widens
    # scores that are bf16 or fp32.
    scores_B1TT = torch.zeros_like(mask_B1TT, dtype=torch.bfloat16)
    return scores_B1TT.masked_fill_(~mask_B1TT, torch.finfo(torch.bfloat16).min)


def isolation_inputs(
    model: Any, position_ids_BT: Tensor, cu_seqlens_N: Tensor | None = None
) -> dict[str, Any]:
    """Inputs of a model besides token ids that keep the documents of a row apart.

    Made once for a micro-batch, by the attention that the model uses:

    - ours: a mask, or the places where documents begin, for the kernel that wants these;
    - flash_attention_2: these places;
    - eager, where every layer attends to all earlier tokens: a mask that is added to the scores;
    - other models that would not look at positions: a mask for each kind of layer;
    - else only position ids, from which transformers makes masks for each kind of layer. It looks
      at their values, for which the host waits for the GPU.

    Args:
        position_ids_BT: int64, 0 where a document begins.
        cu_seqlens_N: int32, places where documents begin in the flattened rows, and the end of
            these; None where they are not known: then a mask is made instead.
    """
    inputs: dict[str, Any] = {"position_ids": position_ids_BT}
    attention = model.config._attn_implementation
    if cu_seqlens_N is not None and attention in (VARLEN, "flash_attention_2"):
        # An upper bound does for the kernels; the longest would have to be asked of the GPU.
        length = position_ids_BT.shape[1]
        inputs |= {"cu_seq_lens_q": cu_seqlens_N, "cu_seq_lens_k": cu_seqlens_N}
        inputs |= {"max_length_q": length, "max_length_k": length}
    elif attention in (MASKED, VARLEN, "sdpa") and attends_plainly(model.config):
        inputs["attention_mask"] = block_mask(position_ids_BT)
    elif attention == "eager" and attends_plainly(model.config):
        inputs["attention_mask"] = _added(block_mask(position_ids_BT))
    elif model.config.model_type in BLIND:
        windows = {"full_attention": None, "sliding_attention": model.config.sliding_window}
        masks = {kind: block_mask(position_ids_BT, window) for kind, window in windows.items()}
        if attention == "eager":
            masks = {kind: _added(mask) for kind, mask in masks.items()}
        inputs["attention_mask"] = masks
    return inputs
