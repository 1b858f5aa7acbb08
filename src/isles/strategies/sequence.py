"""Context parallel: every rank has a part of each sequence, and ranks exchange keys and values.

B: rows. T: tokens of a sequence. t: tokens on this rank. H: heads. h: heads on this rank while
ulysses attends. D: head dimension. R: ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from isles.dist.batch import Batch, block_mask, isolation_inputs
from isles.dist.documents import Documents, attend_by_document, attends_by_document
from isles.dist.mesh import Mesh

_NAME = "isles_context_parallel"

_BY_DOCUMENT = "isles_context_parallel_varlen"
"""The same, document by document if it gets document boundaries."""


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

    If documents are kept apart and sequences are sharded, boundaries or mask cover the keys of the
    whole sequences, because each rank attends to the keys of all ranks.

    Args:
        batch: the micro-batch, with whole sequences.
        mesh: the grid.
        model: as for `whole`.
    """
    size = mesh.layout.cp
    if size == 1:
        return whole(batch, model)
    rows, length = batch.input_ids_BT.shape
    places_t = own_places(length, mesh, batch.input_ids_BT.device)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids_BT[:, places_t]}
    if batch.position_ids_BT is None:
        inputs["position_ids"] = places_t.expand(rows, -1)
    else:
        inputs["position_ids"] = batch.position_ids_BT[:, places_t]
        pieces = _pieces(length, mesh).own if mesh.deals_ends else None
        assert model is not None, "config/rules/data.py keeps pipelines away"
        by_document = model.config._attn_implementation == _BY_DOCUMENT
        # After ulysses has exchanged tokens for heads, each rank has the queries of all tokens.
        if by_document and batch.cu_seqlens_N is not None:
            inputs |= _boundaries(batch.cu_seqlens_N, batch.longest_document, rows, length, pieces)
        else:
            queries_t = None if pieces is None else places_t
            inputs["attention_mask"] = block_mask(batch.position_ids_BT, queries_t=queries_t)
    return MicroBatchPart(inputs, batch.targets_BT[:, places_t], None, batch.reference_B)


def own_places(length: int, mesh: Mesh, device: torch.device) -> Tensor:
    """The places in a sequence of this rank's tokens, [t]; int64.

    Args:
        length: of the whole sequence.
    """
    places_T = torch.arange(length, device=device)
    if mesh.deals_ends:
        return torch.cat([places_T[piece] for piece in _pieces(length, mesh).own])
    return places_T.chunk(mesh.layout.cp)[mesh.place.cp]


def _pieces(length: int, mesh: Mesh) -> _Pieces:
    size = mesh.layout.cp
    return _Pieces(length // size, size, mesh.place.cp)


def _boundaries(
    starts_N: Tensor,
    longest: int | None,
    rows: int,
    length: int,
    pieces: tuple[slice, slice] | None,
) -> dict[str, Any]:
    # Boundaries of documents under the names that transformers passes to attention: for whole
    # sequences, or for this rank's two pieces, one after the other.
    starts_of_queries, starts_of_keys, tokens = starts_N, starts_N, length
    if pieces is not None:
        tokens = max(piece.stop - piece.start for piece in pieces)
        row_starts_B = length * torch.arange(rows, dtype=torch.int32, device=starts_N.device)
        of_queries, of_keys = [], []
        for piece in pieces:
            # Each row is also divided at the piece's end, so that the last query of a document is
            # aligned with the last key before it. Keys after the piece have no query.
            keys = torch.cat([starts_N, row_starts_B + piece.stop]).sort().values
            row, place = keys // length, keys % length
            before = place.clamp(piece.start, piece.stop) - piece.start
            of_queries.append(row * (piece.stop - piece.start) + before)
            of_keys.append(keys)
        starts_of_queries, starts_of_keys = torch.cat(of_queries), torch.cat(of_keys)
    longest = longest or length
    return {
        "cu_seq_lens_q": starts_of_queries,
        "cu_seq_lens_k": starts_of_keys,
        "max_length_q": min(longest, tokens),
        "max_length_k": longest,
    }


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Division of a sequence into two pieces per rank: rank 0 has the first and the last piece.

    A token attends to all earlier tokens. The later one piece of a rank is, the earlier is the
    other, so that all ranks have the same work.

    Args:
        tokens: of each rank, over both pieces.
        ranks: number of ranks.
        place: of this rank.
    """

    tokens: int
    ranks: int
    place: int

    @property
    def first(self) -> int:
        """Tokens of a rank's first piece."""
        return self.tokens // 2

    @property
    def own(self) -> tuple[slice, slice]:
        """Places of this rank's pieces in the sequence."""
        first, second = self.first, self.tokens - self.first
        start = self.ranks * first + (self.ranks - 1 - self.place) * second
        return (
            slice(self.place * first, (self.place + 1) * first),
            slice(start, start + second),
        )

    def join(self, of_ranks: Tensor) -> Tensor:
        """Tokens of all ranks in the order of the sequence.

        Args:
            of_ranks: [R, ..., t, H, D].

        Returns:
            [..., T, H, D].
        """
        firsts, seconds = torch.split(of_ranks, [self.first, self.tokens - self.first], -3)
        return torch.cat([*firsts.unbind(), *seconds.unbind()[::-1]], -3)

    def split(self, sequence: Tensor) -> Tensor:
        """The inverse of `join`, as contiguous memory."""
        sizes = [self.first] * self.ranks + [self.tokens - self.first] * self.ranks
        pieces = torch.split(sequence, sizes, -3)
        firsts, seconds = pieces[: self.ranks], pieces[: self.ranks - 1 : -1]
        return torch.stack([torch.cat(both, -3) for both in zip(firsts, seconds, strict=True)])


def use_context_parallel_attention(
    model: Any,
    mesh: Mesh,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    is_compiled: bool = False,
) -> None:
    """Switch a model to attention over the whole sequence: by all keys and values on each rank if
    the mesh deals both ends of a sequence to each rank, else by heads (ulysses).

    Args:
        model: a Hugging Face model with causal attention over the whole sequence, which accepts
            position_ids.
        mesh: the grid.
        device, dtype, is_compiled: as for `use_maskless_attention` (models/attention.py).

    Source: keys and values to all as in Llama 3 (arXiv:2407.21783, section 3.3.2); heads for
    tokens: Jacobs et al. 2023 (arXiv:2309.14509).
    """
    from transformers import AttentionInterface

    # config/rules/shape.py has checked that the layers attend to all tokens, and that the heads
    # divide.
    group = mesh.cp_group
    assert group is not None
    size = mesh.layout.cp
    attend = _AllGather(group, size, mesh.place.cp) if mesh.deals_ends else _Ulysses(group, size)
    by_document = attends_by_document(model.config, device, dtype, is_compiled=is_compiled)
    name = _BY_DOCUMENT if by_document else _NAME
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)


class _AllGather:
    """Attention of this rank's queries over all earlier keys and values."""

    def __init__(self, group: dist.ProcessGroup, size: int, place: int) -> None:
        self._group = group
        self._size, self._place = size, place

    def __call__(
        self,
        module: Any,
        query_BHtD: Tensor,
        key_BHtD: Tensor,
        value_BHtD: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        query_BHtD, key_BHtD, value_BHtD = _autocast(query_BHtD, key_BHtD, value_BHtD)
        pieces = _Pieces(query_BHtD.shape[2], self._size, self._place)
        # Tokens before heads, so that the rows of documents are flattened without a copy.
        both_2BtHD = torch.stack([key_BHtD.transpose(1, 2), value_BHtD.transpose(1, 2)])
        both_2BTHD = _gather_tokens(both_2BtHD, self._group, pieces)
        key_BHTD, value_BHTD = both_2BTHD.transpose(2, 3)
        given: dict[str, Any] = {
            "scale": scaling,
            "dropout_p": dropout if module.training else 0.0,
        }
        outputs, start = [], 0
        for index, place in enumerate(pieces.own):
            tokens, seen = place.stop - place.start, place.stop
            here = slice(start, start := start + tokens)
            if not tokens:
                continue
            documents = _documents(options, index)
            if documents is not None:
                query_BHqD = query_BHtD[:, :, here]
                out = attend_by_document(query_BHqD, key_BHTD, value_BHTD, documents, **given)
                outputs.append(out)
                continue
            if attention_mask is not None:
                mask = attention_mask[:, :, here, :seen]
            else:  # not as a mask of numbers, which would rule out flash attention
                mask = _causal(tokens, seen)
            out = F.scaled_dot_product_attention(
                query_BHtD[:, :, here],
                # No query of this piece attends to later keys, so they are not computed.
                key_BHTD[:, :, :seen],
                value_BHTD[:, :, :seen],
                attn_mask=mask,
                enable_gqa=query_BHtD.shape[1] != key_BHtD.shape[1],
                **given,
            )
            outputs.append(out.transpose(1, 2))
        return torch.cat(outputs, 1), None


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
        **options: Any,
    ) -> tuple[Tensor, None]:
        query_BhTD, key_BhTD, value_BhTD = (
            _exchange(x, self._group, split=1, join=2)
            for x in _autocast(query_BHtD, key_BHtD, value_BHtD)
        )
        given: dict[str, Any] = {
            "scale": scaling,
            "dropout_p": dropout if module.training else 0.0,
        }
        documents = _documents(options)
        if documents is not None:
            out_BThD = attend_by_document(query_BhTD, key_BhTD, value_BhTD, documents, **given)
            out_BhTD = out_BThD.transpose(1, 2)
        else:
            out_BhTD = F.scaled_dot_product_attention(
                query_BhTD,
                key_BhTD,
                value_BhTD,
                attn_mask=attention_mask,
                is_causal=attention_mask is None,
                enable_gqa=query_BhTD.shape[1] != key_BhTD.shape[1],
                **given,
            )
        out_BHtD = _exchange(out_BhTD, self._group, split=2, join=1)
        return out_BHtD.transpose(1, 2).contiguous(), None


def _documents(options: Mapping[str, Any], piece: int | None = None) -> Documents | None:
    # The boundaries of `_boundaries`, if attention got any: of whole sequences, or of one piece.
    if options.get("cu_seq_lens_q") is None:
        return None
    queries, keys = options["cu_seq_lens_q"], options["cu_seq_lens_k"]
    if piece is not None:
        queries, keys = queries.view(2, -1)[piece], keys.view(2, -1)[piece]
    return Documents(queries, keys, options["max_length_q"], options["max_length_k"])


def _causal(tokens: int, seen: int) -> Tensor:
    # That the last tokens of those seen attend to all before them.
    if torch.compiler.is_compiling():
        return causal_lower_right(tokens, seen)
    # Within a dispatch mode, such as that of selective checkpointing, torch cannot make it.
    with _disable_current_modes():
        return causal_lower_right(tokens, seen)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    # Before they are sent: rotary embeddings give fp32, twice the bytes.
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) for x in tensors)


def _gather_tokens(x: Tensor, group: dist.ProcessGroup, pieces: _Pieces) -> Tensor:
    gathered: Tensor = _Gather.apply(x, group, pieces)  # type: ignore[no-untyped-call]
    return gathered


def _exchange(x: Tensor, group: dist.ProcessGroup, *, split: int, join: int) -> Tensor:
    exchanged: Tensor = _Exchange.apply(x, split, join, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Gather(torch.autograd.Function):
    """The tokens of all ranks in their order; backward sums the gradients of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, pieces: _Pieces) -> Tensor:
        ctx.group, ctx.pieces = group, pieces
        of_ranks = x.new_empty((pieces.ranks * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(of_ranks, x, group=group)
        return pieces.join(of_ranks.view(pieces.ranks, *x.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # The queries of every rank have used the keys and values of this rank.
        of_ranks = ctx.pieces.split(grad)
        own = torch.empty_like(of_ranks[0])
        dist.reduce_scatter_tensor(own, of_ranks.flatten(0, 1), group=ctx.group)
        return own, None, None


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
