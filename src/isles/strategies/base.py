"""The seam between the loop and the way a cluster holds the model."""

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
    """The model as it is called for evaluation; names of parameters are Hugging Face's."""

    replicas: tuple[int, int]
    """This rank's number among those that hold the same plain tensors in `state_dict`, and how many
    they are; (0, 1) where every plain tensor there is this rank's to save."""

    @abstractmethod
    def forward_backward(self, batch: Batch, *, loss_divisor: int, is_last: bool) -> Tensor:
        """Add one micro-batch's gradient. All ranks must call this, as often as the row split says.

        Args:
            batch: this rank's micro-batch.
            loss_divisor: what the summed loss of the whole step is divided by, over all ranks and
                micro-batches: its target tokens, or its pairs under dpo.
            is_last: whether gradients travel now; once a step.

        Returns:
            This rank's part of the summed loss, a detached fp32 scalar on the
            rank's device: over all ranks and micro-batches of a step these add up to the global
            sum. (Ranks that share rows share their loss, or one of them has it; an engine may keep
            micro-batches back until the last.) The gradient is that of the sum divided by
            `loss_divisor`.
        """

    @abstractmethod
    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        """Clip, step, and clear the gradients. All ranks must call this.

        A gradient that is not finite changes nothing, then or in any later step: the weights stay
        those of the last good step until the loop notices, see `good_steps`.

        Returns:
            The global gradient norm before clipping, an fp32 scalar on the rank's device.
        """

    @abstractmethod
    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's part of the summed loss of one micro-batch, without gradients.

        All ranks must call this, equally often. As in `forward_backward`, save that nothing is
        kept back.
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
        """This rank's part of what the method tells besides the loss; see `Objective`."""

    @abstractmethod
    def good_steps(self) -> int | None:
        """Optimizer steps before the first whose loss or gradient was not finite.

        None while all were good. Waits for the GPU: not to be called in every step there.
        """

    def communication_s(self) -> float | None:
        """Seconds of the last timed step in which this rank only waited for communication.

        None where it was not timed.
        """
        return None

    @abstractmethod
    def trainable(self) -> list[nn.Parameter]:
        """This rank's parameters, or shards of them, that are trained."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, sharded as they are held, for torch.distributed.checkpoint.

        All ranks must call this.
        """

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. All ranks must call this."""

    @abstractmethod
    def trained_shapes(self) -> Mapping[str, torch.Size]:
        """Whole shapes of the trained parameters, in the model's order; tied ones once.

        The same under every strategy.

        Raises:
            UserError: this engine cannot give them whole.
        """

    @abstractmethod
    def whole_weight(self, name: str) -> Tensor:
        """One trained parameter, whole, in fp32, on the rank's device. All ranks must call this.

        Under mixed precision these are the fp32 weights that are stepped. The tensor may be the
        parameter itself: it is to be read only, before anything changes the weights.
        """

    @abstractmethod
    def set_whole_weight(self, name: str, value: Tensor) -> None:
        """Give one trained parameter another value. All ranks must call this.

        Args:
            name: of the parameter.
            value: whole, in fp32, the same on every rank.
        """

    def weights_set(self) -> None:  # noqa: B027  # not every engine keeps something of them
        """After the last `set_whole_weight`, before the model is used. All ranks must call this."""


class TorchEngine(Engine):
    """What the engines on plain PyTorch share: their parameters are whole, or cut over ranks.

    Args:
        model: with its parameters in place, cut or whole.
        objective: what is minimised, bound to the model; None: the engine computes it itself.
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
        # Tied weights are one parameter, under the first of their names.
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        return self._stepper.step(lr=lr, max_norm=max_norm)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        return self._counted(self._loss_sum(self.model, batch))

    @torch.no_grad()
    def row_scores(self, batch: Batch) -> Tensor:
        with self._autocasting():
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
        held.to_local().copy_(value[part])

    @property
    def _objective(self) -> Objective:
        assert self._bound is not None, "config/rules/training.py keeps other methods away"
        return self._bound

    def _loss_sum(self, forward: Callable[..., Any], batch: Batch) -> Tensor:
        with self._autocasting():
            return self._objective.loss_sum(forward, localize(batch, self._mesh, self.model))

    def _counted(self, figure: Tensor) -> Tensor:
        # Tensor parallel ranks all have the same loss; one of them counts it.
        return figure if self._mesh.place.tp == 0 else torch.zeros_like(figure)

    def _autocasting(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()  # FSDP2 casts by itself
