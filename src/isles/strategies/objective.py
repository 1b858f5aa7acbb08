"""What is minimised: the seam between the engines and the methods of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from isles.strategies.head import LossHead
from isles.strategies.sequence import Part


class Objective(Protocol):
    """The loss of one micro-batch."""

    def loss_sum(self, forward: Callable[..., Any], part: Part) -> Tensor:
        """The loss summed over what the method counts: a scalar in fp32, with gradients.

        All ranks that share the model must call this.

        Args:
            forward: the model that was bound, or what wraps it.
            part: what this rank computes of the micro-batch.
        """
        ...


MakeObjective = Callable[[nn.Module], Objective]
"""Binds a method to the model of an engine, once it is cut and filled."""


class CausalLM:
    """Predict the next token: cross-entropy, summed over the target tokens.

    Args:
        model: the Hugging Face model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._head = LossHead(model)

    def loss_sum(self, forward: Callable[..., Any], part: Part) -> Tensor:
        """See Objective."""
        return self._head.loss_sum(forward, part.inputs, part.targets_BT, part.places_N)
