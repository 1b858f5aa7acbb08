"""Context parallel: every rank has a part of each sequence, and ranks exchange keys and values.

B: rows. T: tokens of a sequence. t: tokens on this rank. H: heads. h: heads on this rank while
ulysses attends. D: head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import Batch, block_mask, isolation_inputs
from isles.dist.mesh import Mesh

_NAME = "isles_context_parallel"


@dataclass(frozen=True, slots=True)
class MicroBatchPart:
    """This rank's part of a micro-batch."""

    inputs: dict[str, Any]
    """The model's inputs: input_ids; position_ids if the sequence is sharded or documents are kept
    apart; and the mask or boundaries that keep documents apart."""

    targets_BT: Tensor
    """The targets of the same tokens."""

    places_N: Tensor | None = None
    """Positions of the targets in the flattened rows; None: any position may have a target."""

    reference_B: Tensor | None = None
    """See `Batch`."""


def whole(batch: Batch, model: Any | None) -> MicroBatchPart:
    """A micro-batch whose whole sequences are on this rank.

    Args:
        batch: the micro-batch.
        model: the Hugging Face model that will get it. None: it goes to pipeline stages, which get
            document boundaries only through position ids.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids_BT}
    if batch.position_ids_BT is not None:
        if model is None:
            inputs["position_ids"] = batch.position_ids_BT
        else:
            inputs |= isolation_inputs(
                model, batch.position_ids_BT, batch.cu_seqlens_N, batch.longest_document
            )
    return MicroBatchPart(inputs, batch.targets_BT, batch.places_N, batch.reference_B)


def localize(batch: Batch, mesh: Mesh, model: Any | None) -> MicroBatchPart:
    """This rank's part of the sequences of a micro-batch.

    If documents are kept apart and sequences are sharded, the mask covers the whole sequences,
    because each rank attends to the keys of all ranks.

    Args:
        batch: the micro-batch, with whole sequences.
        mesh: the grid.
        model: as for `whole`.
    """
    size = mesh.layout.cp
    if size == 1:
        return whole(batch, model)
    rows, length = batch.input_ids_BT.shape
    length //= size
    here = slice(mesh.place.cp * length, (mesh.place.cp + 1) * length)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids_BT[:, here]}
    if batch.position_ids_BT is None:
        positions = torch.arange(here.start, here.stop, device=batch.input_ids_BT.device)
        inputs["position_ids"] = positions.expand(rows, -1)
    else:
        inputs["position_ids"] = batch.position_ids_BT[:, here]
        inputs["attention_mask"] = block_mask(batch.position_ids_BT)
    return MicroBatchPart(inputs, batch.targets_BT[:, here], None, batch.reference_B)


def use_context_parallel_attention(model: Any, mesh: Mesh, method: str) -> None:
    """Switch a model to attention over the whole sequence.

    Args:
        model: a Hugging Face model with causal attention over the whole sequence, which accepts
            position_ids.
        mesh: the grid.
        method: `allgather` or `ulysses`.

    Source: keys and values to all as in Llama 3 (arXiv:2407.21783, section 3.3.2); heads for
    tokens: Jacobs et al. 2023 (arXiv:2309.14509).
    """
    from transformers import AttentionInterface

    # config/rules/shape.py has checked that the layers attend to all tokens, and that the heads
    # divide.
    group = mesh.cp_group
    assert group is not None
    size = mesh.layout.cp
    attend = _Ulysses(group, size) if method == "ulysses" else _AllGather(group, mesh.place.cp)
    AttentionInterface.register(_NAME, attend)
    model.set_attn_implementation(_NAME)


class _AllGather:
    """Attention of this rank's queries over all keys and values."""

    def __init__(self, group: dist.ProcessGroup, place: int) -> None:
        self._group = group
        self._place = place

    def __call__(
        self,
        module: Any,
        query_BHtD: Tensor,
        key_BHtD: Tensor,
        value_BHtD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        key_BHTD = _gather_tokens(key_BHtD, self._group)
        value_BHTD = _gather_tokens(value_BHtD, self._group)
        length, device = query_BHtD.shape[2], query_BHtD.device
        first, seen = self._place * length, (self._place + 1) * length
        if attention_mask is None:
            mine = torch.arange(first, seen, device=device)
            mask = torch.arange(seen, device=device)[None, :] <= mine[:, None]
        else:
            mask = attention_mask[:, :, first:seen, :seen]
        out_BHtD = F.scaled_dot_product_attention(
            query_BHtD,
            # No query of this rank attends to later keys, so they are not computed.
            key_BHTD[:, :, :seen],
            value_BHTD[:, :, :seen],
            attn_mask=mask,
            dropout_p=dropout if module.training else 0.0,
            scale=scaling,
            enable_gqa=query_BHtD.shape[1] != key_BHtD.shape[1],
        )
        return out_BHtD.transpose(1, 2).contiguous(), None


class _Ulysses:
    """Attention of some heads over the whole sequence, on every rank."""

    def __init__(self, group: dist.ProcessGroup, size: int) -> None:
        self._group = group
        self._size = size

    def __call__(
        self,
        module: Any,
        query_BHtD: Tensor,
        key_BHtD: Tensor,
        value_BHtD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **_: Any,
    ) -> tuple[Tensor, None]:
        query_BhTD, key_BhTD, value_BhTD = (
            _exchange(x, self._group, split=1, join=2) for x in (query_BHtD, key_BHtD, value_BHtD)
        )
        out_BhTD = F.scaled_dot_product_attention(
            query_BhTD,
            key_BhTD,
            value_BhTD,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            dropout_p=dropout if module.training else 0.0,
            scale=scaling,
            enable_gqa=query_BhTD.shape[1] != key_BhTD.shape[1],
        )
        out_BHtD = _exchange(out_BhTD, self._group, split=2, join=1)
        return out_BHtD.transpose(1, 2).contiguous(), None


def _gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered


def _exchange(x: Tensor, group: dist.ProcessGroup, *, split: int, join: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Gather(torch.autograd.Function):
    """Concatenate the ranks' parts along dimension 2; backward sums the gradients for this part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        pieces = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, x.contiguous(), group=group)
        return torch.cat(pieces, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        # The queries of every rank have used the keys and values of this rank.
        dist.all_reduce(grad, group=ctx.group)
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, 2)[rank].contiguous(), None


class _Exchange(torch.autograd.Function):
    """Split along one dimension, send the parts to the ranks, and concatenate along the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.how = (split, join, group)
        size = dist.get_world_size(group)
        sent = torch.stack([piece.contiguous() for piece in x.chunk(size, split)])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return torch.cat(list(received), join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        split, join, group = ctx.how
        back: Tensor = _Exchange.apply(grad, join, split, group)  # type: ignore[no-untyped-call]
        return back, None, None, None
