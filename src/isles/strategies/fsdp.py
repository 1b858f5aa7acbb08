"""FSDP2 (fully_shard): parameters, gradients and optimizer state sharded over the ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.batch import MIXED_DTYPE, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.errors import UserError
from isles.strategies.base import TorchEngine
from isles.strategies.objective import CausalLM, MakeObjective
from isles.strategies.stepper import MakeOptimizers, Stepper


class FSDPEngine(TorchEngine):
    """A model that is sharded block by block, and gathered block by block for use.

    Args:
        model: on the meta device; tensor parallel, if used, has been applied.
    """

    def __init__(
        self,
        model: nn.Module,
        materialize: Callable[[nn.Module], None],
        make_optimizers: MakeOptimizers,
        config: FSDPStrategyConfig,
        mesh: Mesh,
        world: World,
        *,
        precision: str,
        make_objective: MakeObjective = CausalLM,
    ) -> None:
        self._sharded = hold(model, config, mesh, world.device, precision=precision)
        materialize(model)
        objective = make_objective(model)
        stepper = Stepper([model], make_optimizers, device=world.device, precision=precision)
        super().__init__(model, objective, stepper, mesh, world)
        # FSDP2 averages over the data-parallel ranks, but we need the global sum.
        self._parts = mesh.dp_size * mesh.layout.cp
        self._reduces_each = reduces_each_micro_step(config)
        self._has_evaluated = False

    def evaluate(self, batch: Batch) -> Tensor:
        self._has_evaluated = True
        return super().evaluate(batch)

    def row_scores(self, batch: Batch) -> Tensor:
        self._has_evaluated = True
        return super().row_scores(batch)

    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        if self._has_evaluated:
            # A pass without gradients leaves the head gathered, next to the embedding.
            self.weights_set()
            self._has_evaluated = False
        set_sync(self._sharded, is_last=is_last, reduces_each=self._reduces_each)
        self._begin_routers(batch, self._parts)
        loss_sum = self._loss_sum(self.model, batch)
        loss = loss_sum * (self._parts / loss_divisor)
        self._stepper.scaled(loss, loss_sum).backward()  # type: ignore[no-untyped-call]
        return self._counted(loss_sum.detach())

    def weights_set(self) -> None:
        # Parameters that an evaluation has left gathered are the old weights.
        for module in self._sharded:
            module.reshard()


def hold(
    model: nn.Module,
    config: FSDPStrategyConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
) -> Sequence[FSDPModule]:
    """Shard a model, and allocate this rank's shards. Arguments and result as for `shard_model`."""
    moved = _in_main_memory(model, config, mesh.offloaded)
    sharded = shard_model(model, config, mesh, device, precision=precision, moved=moved)
    allocate(model, device, moved)
    return sharded


def shard_model(
    model: nn.Module,
    config: FSDPStrategyConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    precision: str,
    moved: Set[nn.Module] = frozenset(),
) -> Sequence[FSDPModule]:
    """Shard a model, or a pipeline stage, block by block. All ranks must call this.

    Args:
        model: on the meta device.
        precision: `training.precision` of the run file.
        moved: modules whose parameters, gradients and optimizer state are in main memory. Ranks
            may differ: each copies its own shards to its device before they are gathered.

    Returns:
        The sharded modules, the model last.

    Raises:
        UserError: the blocks cannot be found.
    """
    assert mesh.root is not None
    axes = ("shard",) if mesh.layout.replicate == 1 else ("replicate", "shard")
    options: dict[str, Any] = {
        "mesh": mesh.root[axes],
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=MIXED_DTYPE.get(precision),
            reduce_dtype=torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32,
        ),
    }
    reshards = reduces_each_micro_step(config)  # the same choice of memory over speed
    blocks = find_blocks(model, config.transformer_layer_cls_to_wrap)

    def place(module: nn.Module) -> OffloadPolicy:
        is_moved = module in moved
        return CPUOffloadPolicy(pin_memory=device.type == "cuda") if is_moved else OffloadPolicy()

    # Some models give their blocks fp32 on purpose, such as rotary positions.
    as_given = replace(options["mp_policy"], cast_forward_inputs=False)
    for block in reversed(blocks):  # of nested blocks the inner one first
        own = options | {"mp_policy": as_given, "offload_policy": place(block)}
        fully_shard(block, **own, reshard_after_forward=reshards)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    for end in _ends(model):
        # The backward pass begins with the head, whose gradient is known already: to free its
        # weights after the forward pass would gather them again, before anything could hide it.
        own = options | {"offload_policy": place(end)}
        fully_shard(end, **own, reshard_after_forward=reshards and end is not head)
    # Backward begins with the root, so a release after forward would only gather it again.
    # The root keeps the last norm. Grouped with the head, as in torchtitan, the norm would need no
    # messages of its own. But from the second micro-batch on, FSDP2 ends a backward pass with the
    # prefetch of the last unit of the forward pass before: the root, which is still gathered, or
    # for a root without weights the head, for nothing (one gathering more in each step, counted).
    own = options | {"offload_policy": place(model)}
    fully_shard(model, **own, reshard_after_forward=False)
    _prefetch(blocks, config)
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    is_apart = isinstance(embedding, FSDPModule)  # else the root holds it
    if is_apart and not any(weight.requires_grad for weight in embedding.parameters()):
        # Otherwise the backward pass of the first block gathers the embedding, which a backward
        # pass without gradients of it never uses: twice its 16-bit bytes, at the end of a step.
        # The root is gathered already.
        first: Any = blocks[0]
        first.set_modules_to_backward_prefetch([model])
    return [module for module in model.modules() if isinstance(module, FSDPModule)][::-1]


def allocate(model: nn.Module, device: torch.device, moved: Set[nn.Module] = frozenset()) -> None:
    """Allocate this rank's shard of a model that was sharded on the meta device. For `moved`, see
    `shard_model`."""
    # Inner modules first: FSDP2 looks for the new parameters of a unit when it allocates its root.
    for module in reversed(list(model.modules())):
        where = torch.device("cpu") if module in moved else device
        module.to_empty(device=where, recurse=False)
    for buffer in model.buffers():
        # FSDP2 offloads only parameters. The forward pass needs the buffers on the device.
        buffer.data = buffer.data.to(device)


def _in_main_memory(model: nn.Module, config: FSDPStrategyConfig, offloaded: int) -> Set[nn.Module]:
    # Modules whose parameters, gradients and optimizer state this rank keeps in main memory.
    if config.cpu_offload is not True and not offloaded:
        return set()
    found = find_blocks(model, config.transformer_layer_cls_to_wrap)
    inner = {module for block in found for module in block.modules() if module is not block}
    blocks = [block for block in found if block not in inner]
    total = len(blocks)
    if config.cpu_offload is True or offloaded >= total:
        return set(model.modules())
    # Spread over the model, so that a block can be copied while others compute.
    places = [i for i in range(total) if i * offloaded // total < (i + 1) * offloaded // total]
    return {module for place in places for module in blocks[place].modules()}


def reduces_each_micro_step(config: FSDPStrategyConfig) -> bool:
    """True if gradients are sharded after every micro-batch, so that they are never held whole.

    Otherwise they are reduced once per step, and each rank holds the whole gradients of all
    parameters that it uses.
    """
    return config.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")


def set_sync(sharded: Sequence[FSDPModule], *, is_last: bool, reduces_each: bool) -> None:
    """Set how the next backward pass treats gradients and gathered parameters."""
    for module in sharded:
        module.set_requires_gradient_sync(is_last or reduces_each, recurse=False)
        # Weights that are held whole from forward to backward stay so until the step's end.
        module.set_reshard_after_backward(is_last or reduces_each, recurse=False)
        # Between replicas, gradients are reduced once per step in any case.
        module.set_requires_all_reduce(is_last, recurse=False)
    sharded[-1].set_is_last_backward(is_last)


def _ends(model: nn.Module) -> list[nn.Module]:
    # Embedding and head, if they are large and separate.
    embedding: Any = getattr(model, "get_input_embeddings", lambda: None)()
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    ends = [m for m in (embedding, head) if getattr(m, "weight", None) is not None]
    if len(ends) == 2 and ends[0].weight is ends[1].weight:
        return []  # tied: both belong to the root, which is gathered from first to last
    return ends


def _prefetch(blocks: Sequence[nn.Module], config: FSDPStrategyConfig) -> None:
    forward, backward = config.forward_prefetch, config.backward_prefetch
    for index, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        if forward:
            ahead: Any = blocks[index + 1 : index + 1 + forward]
            block.set_modules_to_forward_prefetch(list(ahead))
        if backward:
            behind: Any = blocks[max(0, index - backward) : index]
            block.set_modules_to_backward_prefetch(list(reversed(behind)))


def find_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """The transformer blocks of a model, in order.

    Args:
        class_names: class names of the blocks; if empty, the model's own list of classes that must
            not
            be split, else the longest list of modules of one class.

    Raises:
        UserError: the model has no blocks, or no module of a given class.
    """
    if class_names:
        # Lists written by other tools may contain the blocks of several models.
        if not {type(module).__name__ for module in model.modules()} & set(class_names):
            raise UserError(
                f"{type(model).__name__} has no module of class {' or '.join(class_names)}",
                where="strategy.transformer_layer_cls_to_wrap",
                fix="delete the key so that isles finds the blocks, or use one of "
                f"{_classes(model)}",
                id="strategy.model",
            )
        return _of_classes(model, class_names)
    found = _of_classes(model, getattr(model, "_no_split_modules", None) or ())
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    found = found or max(lists, key=len, default=[])
    if not found:
        raise UserError(
            f"cannot find the blocks of {type(model).__name__}: it has no list of modules of "
            "one class",
            where="strategy.transformer_layer_cls_to_wrap",
            fix=f"set this key to the classes of its blocks; the model has {_classes(model)}",
            id="strategy.model",
        )
    return found


def _of_classes(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    wanted = set(names)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in wanted and module is not model
    ]


def _classes(model: nn.Module) -> str:
    # The most frequent classes; blocks are among them.
    counts = Counter(type(module).__name__ for module in model.modules() if any(module.children()))
    counts.pop(type(model).__name__, None)
    return ", ".join(name for name, _ in counts.most_common(6)) or "no modules within modules"
