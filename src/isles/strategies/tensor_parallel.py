"""Tensor parallel: the matrices of each block sharded over ranks, by the model's own plan."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from isles.errors import UserError

_FIX = "set strategy.tp_size to 1 (kind: fsdp shards any model)"


def apply_tensor_parallel(model: Any, mesh: DeviceMesh) -> None:
    """Shard the model over a mesh of one dimension. All ranks of the mesh must call this.

    Args:
        model: a Hugging Face model, on the meta device, not sharded yet.
        mesh: the tensor parallel ranks.

    Raises:
        UserError: the model has no plan, or a plan that isles cannot follow exactly.

    Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3; the plan is transformers' `tp_plan`.
    """
    plan: dict[str, str] = dict(model.tp_plan or {})
    if not any(".layers." in name or ".h." in name for name in plan):
        raise UserError(
            f"{type(model).__name__} has no plan for tensor parallel",
            where="strategy.tp_size",
            fix=_FIX,
            id="strategy.model",
        )
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and embedding.weight is head.weight
    ends = {id(embedding), id(head)}
    # Tied weights are one matrix, which both must shard in the same way: by rows.
    sharded = {id(m) for name in plan for m in _matching(model, name).values()} & ends
    keeps_ends = is_tied and (sharded != ends or not isinstance(head, nn.Linear))
    styles: dict[str, ParallelStyle] = {}
    for name, kind in plan.items():
        found = _matching(model, name)
        is_end = any(module is embedding or module is head for module in found.values())
        if is_end and (keeps_ends or not _divides(next(iter(found.values())), mesh.size())):
            continue  # kept whole on every rank, which is mathematically equivalent
        for each, module in found.items():
            if hasattr(module, "base_layer"):
                styles |= _adapted_styles(kind, each, model)
            else:
                styles[each] = _style(kind, name, model)
    parallelize_module(model, mesh, styles)
    if is_tied:
        head.weight = embedding.weight
    if isinstance(embedding.weight, DTensor):
        # The local part of a DTensor is a view. A compiled block would lose its gradient.
        embedding.register_forward_hook(lambda _module, _inputs, output: output.clone())


def _style(kind: str, name: str, model: Any) -> ParallelStyle:
    match kind:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_gather_output":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise_split_input" | "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "replicated_with_grad_allreduce":
            # A norm over each head: B, T, H, D, with this rank's part of H.
            return SequenceParallel(sequence_dim=2, use_local_output=True)
        case _:
            raise UserError(
                f"the tensor parallel plan of {type(model).__name__} shards {name} by {kind!r}, "
                "which isles cannot follow exactly",
                where="strategy.tp_size",
                fix=_FIX,
                id="strategy.model",
            )


def _adapted_styles(kind: str, name: str, model: Any) -> dict[str, ParallelStyle]:
    # A layer with an adapter: of its two small matrices, the matrix on the sharded side of the
    # layer is sharded in the same way.
    if kind in ("colwise", "colwise_gather_output"):
        cut = "lora_B"
    elif kind == "rowwise":
        cut = "lora_A"
    else:
        raise UserError(
            f"{name} has an adapter, and the tensor parallel plan of {type(model).__name__} "
            f"shards it by {kind!r}",
            where="adapter.target_modules",
            fix=f"remove {name.rpartition('.')[2]} from them, or {_FIX}",
            id="strategy.model",
        )
    adapters = model.get_submodule(f"{name}.{cut}")
    parts = [f"{name}.base_layer", *(f"{name}.{cut}.{each}" for each in adapters)]
    return {part: _style(kind, part, model) for part in parts}


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    # The modules of a plan's name; `*` stands for any number.
    parts = pattern.split(".")
    return {
        name: module
        for name, module in model.named_modules()
        if len(own := name.split(".")) == len(parts)
        and all(p in (o, "*") for p, o in zip(parts, own, strict=True))
    }


def _divides(module: nn.Module, size: int) -> bool:
    weight: Any = module.weight  # None: the layer is in another pipeline stage
    return weight is not None and int(weight.shape[0]) % size == 0
