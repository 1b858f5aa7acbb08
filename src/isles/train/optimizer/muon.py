"""Muon: matrices of one shape are orthogonalized together, each by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from isles.train.optimizer.shards import found_inf, local, put

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS, _EPS = 5, 1e-7

_LARGEST_STACK = 2**24
"""Numbers of a stack of matrices on one rank. A step adds up to 14 bytes for each number to the
memory of weights and state: 235 MB. A stack has at least one matrix for each rank."""

Directions = Callable[[int, int], Tensor]
"""Returns this rank's parts of a range of a stack."""


class Muon(Optimizer):
    """Muon with Nesterov momentum and updates of AdamW's size, on whole or sharded matrices.

    `torch.optim.Muon` with `match_rms_adamw` gives the same updates. Newton-Schulz iterations
    cost 15 to 30 n^3 operations a matrix, so each rank computes only its part of the matrices. A
    shape needs one all-gather if all ranks hold whole matrices, and two all-to-all exchanges if
    ranks hold rows of them. All ranks must call `step` with gradients for the same parameters.

    Args:
        parameters: matrices. Plain parameters, which are not DTensors, are equal on all ranks.

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), torch/optim/_muon.py; Liu et al.
    2025 (arXiv:2502.16982) for the size of updates.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, unless `found_inf` is 1.0."""
        assert closure is None, "isles evaluates a loss once a step"
        for group in self.param_groups:
            for parameters in _stacks(p for p in group["params"] if p.grad is not None):
                self._step_stack(parameters, group)

    def _step_stack(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        weights = [local(p) for p in parameters]
        gradients = [local(p.grad) for p in parameters]
        buffers = [local(self.state[p]["momentum_buffer"]) for p in parameters]
        averages = torch._foreach_lerp(buffers, gradients, 1 - group["momentum"])
        device, shape = weights[0].device, weights[0].shape
        # torch iterates in bf16, which a CPU without AVX-512 emulates eight times slower than fp32.
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16

        def directions(start: int, end: int) -> Tensor:
            stack = torch.empty(end - start, *shape, dtype=dtype, device=device)
            if end > start:
                part = slice(start, end)
                ahead = torch._foreach_lerp(gradients[part], averages[part], group["momentum"])
                torch._foreach_copy_(stack.unbind(), ahead)
            return stack

        updates = _updates(parameters[0], len(parameters), directions)
        # A foreach of tensors of two types is a loop of single operations.
        updates = updates.to(torch.promote_types(dtype, weights[0].dtype))
        new = torch._foreach_mul(weights, 1 - group["lr"] * group["weight_decay"])
        step_size = group["lr"] * 0.2 * max(parameters[0].shape) ** 0.5
        torch._foreach_add_(new, updates.unbind(), alpha=-step_size)
        put(found_inf(self), [*weights, *buffers], [*new, *averages])


def _stacks(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    # Parameters of the same shape and placement, in stacks that fit into memory.
    alike: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        cut = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        alike.setdefault((p.shape, p.dtype, p.device, cut), []).append(p)
    for same in alike.values():
        rows = _rows_group(same[0])
        group = rows or _copies_group(same[0])
        ranks = 1 if group is None else dist.get_world_size(group)
        # Of the rank with the most rows: from its own rows, a rank with fewer would make longer
        # stacks than the others, and wait for exchanges that they never begin.
        height, *width = same[0].shape
        held = math.prod((-(-height // ranks) if rows else height, *width))
        size = max(_LARGEST_STACK // held // ranks, 1) * ranks  # the same part for each rank
        for start in range(0, len(same), size):
            yield same[start : start + size]


def _cuts(parameter: Any) -> dict[int, Any]:
    # Axes of the mesh along which ranks hold different parts, and these parts.
    if not isinstance(parameter, DTensor):
        return {}
    sizes = parameter.device_mesh.shape
    placements = enumerate(zip(parameter.placements, sizes, strict=True))
    return {axis: cut for axis, (cut, size) in placements if size > 1 and not cut.is_replicate()}


def _rows_group(parameter: Any) -> dist.ProcessGroup | None:
    # The ranks that hold the rows of a matrix in their order; None if it is whole or cut otherwise.
    match list(_cuts(parameter).items()):
        case [(axis, cut)] if type(cut) is Shard and cut.dim == 0:
            group: dist.ProcessGroup = parameter.device_mesh.get_group(axis)
            return group
        case _:
            return None


def _copies_group(parameter: Any) -> dist.ProcessGroup | None:
    # Ranks that hold the same whole matrix; None if there is one rank, or the matrix is cut.
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = [axis for axis, size in enumerate(mesh.shape) if size > 1]
        return mesh.get_group(axes[0]) if axes and not _cuts(parameter) else None
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return None if is_alone else dist.group.WORLD


def _updates(first: Any, count: int, directions: Directions) -> Tensor:
    # This rank's parts of the orthogonalized directions of a stack of parameters like `first`.
    if (rows := _rows_group(first)) is not None:
        return _exchanged(first.shape, count, directions, rows)
    if (copies := _copies_group(first)) is not None:
        return _gathered(first.shape, count, directions, copies)
    if _cuts(first):
        return _gathered_one_by_one(first, directions(0, count))
    return _orthogonalized(directions(0, count))


def _gathered(
    shape: torch.Size,
    count: int,
    directions: Directions,
    group: dist.ProcessGroup,
) -> Tensor:
    # Each rank computes the updates of its part of the matrices, and gathers those of all ranks.
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    each = -(-count // ranks)
    start, end = min(rank * each, count), min((rank + 1) * each, count)
    own = _orthogonalized(directions(start, end))
    sent = own.new_zeros(each, *shape)
    sent[: end - start] = own
    everything = own.new_empty(ranks * each, *shape)
    # The old name is deprecated in torch 2.13; torch 2.11 has only the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everything, sent, group=group)
    return everything[:count]


def _exchanged(
    shape: torch.Size,
    count: int,
    directions: Directions,
    group: dist.ProcessGroup,
) -> Tensor:
    # Each rank receives all rows of its part of the matrices, and sends the rows of their updates.
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    each, chunk = -(-count // ranks), -(-shape[0] // ranks)
    owned = [len(range(count)[r * each : (r + 1) * each]) for r in range(ranks)]
    rows = [len(range(shape[0])[r * chunk : (r + 1) * chunk]) for r in range(ranks)]
    mine = directions(0, count)
    assert mine.shape[1] == rows[rank], (mine.shape, rows)
    sizes = [n * rows[rank] * shape[1] for n in owned]
    whole_sizes = [owned[rank] * n * shape[1] for n in rows]
    received = mine.new_empty(sum(whole_sizes))
    dist.all_to_all_single(received, mine.view(-1), whole_sizes, sizes, group=group)
    parts = torch.split(received, whole_sizes)
    views = [part.view(owned[rank], n, shape[1]) for part, n in zip(parts, rows, strict=True)]
    whole = _orthogonalized(torch.cat(views, dim=1))
    sent = torch.cat([part.reshape(-1) for part in torch.split(whole, rows, dim=1)])
    updates = torch.empty_like(mine)
    dist.all_to_all_single(updates.view(-1), sent, sizes, whole_sizes, group=group)
    return updates


def _gathered_one_by_one(first: DTensor, directions: Tensor) -> Tensor:
    # Tensor parallel shards some matrices by columns, and FSDP2 shards their parts again. Such
    # matrices are gathered one by one, and orthogonalized by every rank.
    device = directions.device
    whole = []
    for direction in directions:
        cut: Any = torch.empty_like(first, dtype=direction.dtype)
        local(cut).copy_(direction)
        whole.append(cut.full_tensor())
    copies = [Replicate()] * first.device_mesh.ndim
    parts = [
        DTensor.from_local(one, first.device_mesh, copies, run_check=False)
        .redistribute(placements=first.placements)
        .to_local()
        for one in _orthogonalized(torch.stack(whole))
    ]
    return torch.stack(parts).to(device)  # `from_local` moves offloaded matrices to the GPU


def _orthogonalized(x: Tensor) -> Tensor:
    # The nearest matrices whose singular values are about 1, by Newton-Schulz iterations; x: a
    # stack.
    a, b, c = _COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
