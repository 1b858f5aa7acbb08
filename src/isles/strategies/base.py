"""Interface between the training loop and a parallelism strategy."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isles.dist.batch import Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.strategies.objective import Objective
from isles.strategies.sequence import localize
from isles.strategies.stepper import Stepper


class Engine(ABC):
    """The model, its optimizer and their sharding in one cluster."""

    model: nn.Module
    """The model as called for evaluation, with Hugging Face's parameter names."""

    replicas: tuple[int, int]
    """This rank's index among the ranks that hold the same plain tensors in `state_dict`, and the
    number of these ranks; (0, 1) if this rank saves every plain tensor of its `state_dict`."""

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

    @abstractmethod
    def set_whole_weight(self, name: str, value: Tensor) -> None:
        """Set one trained parameter. All ranks must call this.

        Args:
            name: name of the parameter.
            value: full value, in fp32, the same on every rank.
        """

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
        return self._stepper.step(lr=lr, max_norm=max_norm)

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
        return self._stepper.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stepper.load_state_dict(state)

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._trained.items()}

    def whole_weight(self, name: str) -> Tensor:
        value = self._trained[name].detach()
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return whole.to(self._world.device, torch.float32)

    @torch.no_grad()
    def set_whole_weight(self, name: str, value: Tensor) -> None:
        held = self._trained[name].detach()
        if not isinstance(held, DTensor):
            held.copy_(value)
            return
        shape, offset = compute_local_shape_and_global_offset(
            held.shape, held.device_mesh, held.placements
        )
        part = tuple(slice(start, start + n) for start, n in zip(offset, shape, strict=True))
        # Every rank has the whole value, so no communication is needed.
        held.to_local().copy_(value[part])

    @property
    def _objective(self) -> Objective:
        assert self._bound is not None, "config/rules/training.py keeps other methods away"
        return self._bound

    def _loss_sum(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        return self._objective.loss_sum(forward, localize(batch, self._mesh, self.model))

    def _counted(self, figure: Tensor) -> Tensor:
        # All tensor parallel ranks have the same loss, so only one of them counts it.
        return figure if self._mesh.place.tp == 0 else torch.zeros_like(figure)

    def _computing(self) -> AbstractContextManager[object]:
        # Within it, a forward pass computes in the run's precision.
        return contextlib.nullcontext()  # FSDP2 casts by itself
