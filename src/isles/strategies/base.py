"""Interface between the training loop and a parallelism strategy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isles.dist.batch import Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.strategies.objective import Objective
from isles.strategies.routers import Routers, places_read
from isles.strategies.sequence import localize
from isles.strategies.stepper import Stepper


class Engine(ABC):
    """The model, its optimizer and their sharding in one cluster."""

    model: nn.Module
    """The model as called for evaluation, with Hugging Face's parameter names."""

    replicas: tuple[int, int]
    """This rank's index among the ranks that hold the same plain tensors in `state_dict`, and the
    number of these ranks; (0, 1) if this rank saves every plain tensor of its `state_dict`."""

    routers: Routers | None = None
    """The routers of a mixture of experts; see `use_routers`."""

    def use_routers(self, routers: Routers) -> None:
        """Balance the load of the model's experts from now on."""
        self.routers = routers
        routers.attach(self.model)

    def begin_step(self, *, input_tokens: int) -> None:
        """Begin a training step, before its first micro-batch. Without this call, the step has no
        balancing loss.

        Args:
            input_tokens: tokens that all ranks read in this step, without padding.
        """
        if self.routers is not None:
            self.routers.begin_step(input_tokens)

    @abstractmethod
    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        """Add one micro-batch's gradient. All ranks must call this, once per micro-step of the row
        split.

        Args:
            batch: this rank's micro-batch.
            loss_divisor: divisor of the summed loss of the whole step, over all ranks and
                micro-batches:
                its number of target tokens, or of pairs under dpo.
            is_last: whether gradients are reduced now; once per step.

        Returns:
            This rank's part of the summed loss, a detached fp32 scalar on the rank's device. Over
            all
            ranks and micro-batches of a step, these parts add up to the global sum. (Ranks that
            share rows
            share their loss, or one of them has all of it; an engine may postpone micro-batches
            until the
            last.) The gradient is the gradient of the sum divided by `loss_divisor`.
        """

    @abstractmethod
    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        """Clip, step, and clear the gradients. All ranks must call this.

        A gradient that is not finite changes nothing, in this step or later: the weights stay those
        of the last good step until the loop notices, see `good_steps`.

        Args:
            lr: learning rate.
            max_norm: largest norm after clipping; None: no clipping.

        Returns:
            The global gradient norm before clipping, an fp32 scalar on the rank's device.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's part of the summed loss of one micro-batch, without gradients.

        All ranks must call this, equally often. Like `forward_backward`, but never postpones a
        micro-batch.
        """

    @abstractmethod
    def row_scores(self, batch: Batch) -> Tensor:
        """This rank's part of the log-probability of the targets of each row, [B] in fp32, in
        evaluation.

        All ranks must call this, equally often. The ranks of a pipeline or of a sequence add up;
        tensor parallel ranks have the same.
        """

    @abstractmethod
    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        """This rank's part of the method's metrics other than the loss; see `Objective`."""

    @abstractmethod
    def good_steps(self) -> int | None:
        """Number of optimizer steps before the first step with a loss or gradient that was not
        finite.

        None if all were finite. Synchronizes with the GPU, so do not call this in every step there.
        """

    def communication_s(self) -> float | None:
        """Seconds of the last timed step during which this rank only waited for communication.

        None if the step was not timed.
        """
        return None

    @abstractmethod
    def trainable(self) -> list[nn.Parameter]:
        """This rank's trained parameters, or its shards of them."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, sharded as they are held, for torch.distributed.checkpoint.

        All ranks must call this.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`. All ranks must call this."""

    @abstractmethod
    def trained_shapes(self) -> Mapping[str, torch.Size]:
        """Full shapes of the trained parameters, in the model's order; tied parameters once.

        The same under every strategy.

        Raises:
            UserError: this engine cannot gather full parameters.
        """

    @abstractmethod
    def whole_weight(self, name: str) -> Tensor:
        """One trained parameter, gathered, in fp32, on the rank's device. All ranks must call this.

        Under mixed precision this is the fp32 master weight. The tensor may be the parameter
        itself: only read it, and only before anything changes the weights.
        """

    def whole_weights(self, names: Sequence[str]) -> list[Tensor]:
        """Several trained parameters as from `whole_weight`, gathered together if possible. All
        ranks must call this."""
        return [self.whole_weight(name) for name in names]

    @abstractmethod
    def set_whole_weight(self, name: str, value: Tensor) -> None:
        """Set one trained parameter. All ranks must call this.

        Args:
            name: name of the parameter.
            value: full value, in fp32, the same on every rank.
        """

    def add_to_weight(self, name: str, value: Tensor) -> None:
        """Add to one trained parameter, in fp32. All ranks must call this.

        Args:
            name: name of the parameter.
            value: what to add, in fp32, the same on every rank; it is overwritten.
        """
        self.set_whole_weight(name, value.add_(self.whole_weight(name)))

    def weights_set(self) -> None:  # noqa: B027  # not every engine caches weights
        """Called after the last `set_whole_weight`, before the model is used. All ranks must call
        this."""


class TorchEngine(Engine):
    """Common part of the engines on plain PyTorch, with parameters whole or sharded over ranks.

    Args:
        model: the model, with its parameters in place, sharded or whole.
        objective: the loss, bound to the model; None: the engine computes it itself.
        stepper: the optimizers over the parameters of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | None,
        stepper: Stepper,
        mesh: Mesh,
        world: World,
    ) -> None:
        self.model = model
        self.replicas = (world.rank, world.world_size)
        self._bound = objective
        self._stepper = stepper
        self._mesh, self._world = mesh, world
        # Tied weights are one parameter, listed under the first of their names.
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        return self._step(lr=lr, max_norm=max_norm)

    def _step(self, *, lr: float, max_norm: float | None, keep_gradients: bool = False) -> Tensor:
        norm = self._stepper.step(lr=lr, max_norm=max_norm, keep_gradients=keep_gradients)
        if self.routers is not None:
            self.routers.end_step(self._stepper.poison)
        return norm

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        with self._computing():
            return self._counted(self._loss_sum(self.model, batch))

    @torch.no_grad()
    def row_scores(self, batch: Batch) -> Tensor:
        with self._computing():
            part = localize(batch, self._mesh, self.model)
            return self._objective.row_scores(self.model, part)

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        figures = self._objective.take_figures(of_training=of_training)
        return {name: self._counted(value) for name, value in figures.items()}

    def good_steps(self) -> int | None:
        return self._stepper.good_steps()

    def trainable(self) -> list[nn.Parameter]:
        return self._stepper.parameters

    def state_dict(self) -> dict[str, Any]:
        balance = {} if self.routers is None else self.routers.state_dict()
        return self._stepper.state_dict() | balance

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stepper.load_state_dict(state)
        if self.routers is not None:
            self.routers.load_state_dict(state)

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._trained.items()}

    def whole_weight(self, name: str) -> Tensor:
        value = self._trained[name].detach()
        # With offload, ranks may hold their parts on different devices, but all must send alike.
        value = value.to(self._world.device)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.float()

    def whole_weights(self, names: Sequence[str]) -> list[Tensor]:
        found = {}
        alike = dict[object, dict[str, DTensor]]()
        for name in names:
            value = self._trained[name].detach()
            if isinstance(value, DTensor) and _row_axis(value) is not None:
                alike.setdefault((value.device_mesh, value.placements), {})[name] = value
            else:
                found[name] = self.whole_weight(name)
        for values in alike.values():
            whole = _gather_rows([*values.values()], self._world.device)
            found |= zip(values, whole, strict=True)
        return [found[name] for name in names]

    @torch.no_grad()
    def set_whole_weight(self, name: str, value: Tensor) -> None:
        held, part = self._own_part(name, value)
        held.copy_(part)

    @torch.no_grad()
    def add_to_weight(self, name: str, value: Tensor) -> None:
        held, part = self._own_part(name, value)
        held.copy_(part.add_(held.to(part.device, torch.float32)))

    def _own_part(self, name: str, value: Tensor) -> tuple[Tensor, Tensor]:
        # What this rank holds of a parameter, and the same part of a whole value. Every rank has
        # the whole value, so no communication is needed.
        held = self._trained[name].detach()
        if not isinstance(held, DTensor):
            return held, value
        shape, offset = compute_local_shape_and_global_offset(
            held.shape, held.device_mesh, held.placements
        )
        part = tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))
        return held.to_local(), value[part]

    @property
    def _objective(self) -> Objective:
        assert self._bound is not None, "config/rules/training.py keeps other methods away"
        return self._bound

    def _loss_sum(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        return self._objective.loss_sum(forward, localize(batch, self._mesh, self.model))

    def _begin_routers(self, batch: Batch, scale: float) -> None:
        # `scale`: factor of the loss of all ranks, without the division by its units.
        if self.routers is not None:
            read_Bt = places_read(batch, self._mesh)
            self.routers.begin(read_Bt, scale * self._stepper.loss_scale)

    def _counted(self, figure: Tensor) -> Tensor:
        # All tensor parallel ranks have the same loss, so only one of them counts it.
        return figure if self._mesh.place.tp == 0 else torch.zeros_like(figure)

    def _computing(self) -> AbstractContextManager[object]:
        # Within it, a forward pass computes in the run's precision.
        return contextlib.nullcontext()  # FSDP2 casts by itself


def _row_axis(value: DTensor) -> int | None:
    # The axis of the mesh that shards the rows of a parameter; None: it is sharded in other ways.
    axes = [axis for axis, each in enumerate(value.placements) if not isinstance(each, Replicate)]
    is_plain = len(axes) == 1 and type(value.placements[axes[0]]) is Shard
    return axes[0] if is_plain and value.placements[axes[0]].is_shard(0) else None


def _gather_rows(values: Sequence[DTensor], device: torch.device) -> list[Tensor]:
    # One all-gather for all of these; they have one mesh and one placement.
    mesh, axis = values[0].device_mesh, _row_axis(values[0])
    assert axis is not None
    ranks = mesh.size(axis)
    # As torch.chunk shards: the last shards may have fewer rows, or none.
    sizes = [-(-value.shape[0] // ranks) * (value.numel() // value.shape[0]) for value in values]
    own = torch.zeros(sum(sizes), device=device)
    for value, part in zip(values, torch.split(own, sizes), strict=True):
        local = value.to_local().reshape(-1)
        part[: local.numel()].copy_(local)
    gathered = own.new_empty(ranks * own.numel())
    dist.all_gather_into_tensor(gathered, own, group=mesh.get_group(axis))
    parts = zip(values, torch.split(gathered.view(ranks, -1), sizes, dim=1), strict=True)
    return [part.reshape(-1)[: value.numel()].view(value.shape) for value, part in parts]
