"""The seam between the loop and the way a cluster holds the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from isles.dist.batch import Batch


class Engine(Protocol):
    """The model, its optimizer and their sharding in one cluster."""

    model: nn.Module
    """The model as it is called for evaluation; names of parameters are Hugging Face's."""

    replicas: tuple[int, int]
    """This rank's number among those that hold the same plain tensors in `state_dict`, and how many
    they are; (0, 1) where every plain tensor there is this rank's to save."""

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
        ...

    def optimizer_step(self, *, lr: float, max_norm: float | None) -> Tensor:
        """Clip, step, and clear the gradients. All ranks must call this.

        A gradient that is not finite changes nothing, then or in any later step: the weights stay
        those of the last good step until the loop notices, see `good_steps`.

        Returns:
            The global gradient norm before clipping, an fp32 scalar on the rank's device.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """This rank's part of the summed loss of one micro-batch, without gradients.

        All ranks must call this, equally often. As in `forward_backward`, save that nothing is
        kept back.
        """
        ...

    def row_scores(self, batch: Batch) -> Tensor:
        """Log-probability of the targets of each row, [B] in fp32, in evaluation.

        All ranks must call this, equally often.
        """
        ...

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        """This rank's part of what the method tells besides the loss; see `Objective`."""
        ...

    def good_steps(self) -> int | None:
        """Optimizer steps before the first whose loss or gradient was not finite.

        None while all were good. Waits for the GPU: not to be called in every step there.
        """
        ...

    def communication_s(self) -> float | None:
        """Seconds of the last timed step in which this rank only waited for communication.

        None where it was not timed.
        """
        ...

    def trainable(self) -> list[nn.Parameter]:
        """This rank's parameters, or shards of them, that are trained."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, sharded as they are held, for torch.distributed.checkpoint.

        All ranks must call this.
        """
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave. All ranks must call this."""
        ...

    def trained_shapes(self) -> Mapping[str, torch.Size]:
        """Whole shapes of the trained parameters, in the model's order; tied ones once.

        The same under every strategy.

        Raises:
            UserError: this engine cannot give them whole.
        """
        ...

    def whole_weight(self, name: str) -> Tensor:
        """One trained parameter, whole, in fp32, on the rank's device. All ranks must call this.

        Under mixed precision these are the fp32 weights that are stepped. The tensor may be the
        parameter itself: it is to be read only, before anything changes the weights.
        """
        ...

    def set_whole_weight(self, name: str, value: Tensor) -> None:
        """Give one trained parameter another value. All ranks must call this.

        Args:
            name: of the parameter.
            value: whole, in fp32, the same on every rank.
        """
        ...

    def weights_set(self) -> None:
        """After the last `set_whole_weight`, before the model is used. All ranks must call this."""
        ...
