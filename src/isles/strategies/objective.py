"""Training objectives: the interface between the engines and the training methods.

B: rows. T: tokens per row. P: pairs, half the number of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isles.dist.batch import IGNORE_INDEX
from isles.strategies.head import LossHead
from isles.strategies.sequence import MicroBatchPart


class Objective(ABC):
    """The loss of one micro-batch, bound to a sharded model with weights."""

    def __init__(self, model: nn.Module) -> None:
        self._head = LossHead(model)

    @abstractmethod
    def loss_sum(self, forward: Callable[..., Any], part: MicroBatchPart) -> Tensor:
        """The loss summed over the units that the method counts: an fp32 scalar with gradients.

        All ranks that share the model must call this.

        Args:
            forward: the bound model, or its wrapper.
            part: this rank's part of the micro-batch.
        """

    @torch.no_grad()
    def row_scores(self, forward: Callable[..., Any], part: MicroBatchPart) -> Tensor:
        """Log-probability of the targets of each row, [B] in fp32; without gradients.

        All ranks that share the model must call this.
        """
        return -self._head.token_losses(forward, part.inputs, part.targets_BT).sum(1)

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        """Sums of the method's metrics other than the loss, since the last call.

        Summed over the same units as the loss, as scalars on the rank's device.

        Args:
            of_training: metrics of passes with gradients, or of passes without.
        """
        del of_training
        return {}


MakeObjective = Callable[[nn.Module], Objective]
"""Binds a method to the model of an engine, after the model is sharded and has weights."""


class CausalLM(Objective):
    """Predict the next token: cross-entropy, summed over the target tokens."""

    def loss_sum(self, forward: Callable[..., Any], part: MicroBatchPart) -> Tensor:
        return self._head.loss_sum(forward, part.inputs, part.targets_BT, part.places_N)


class DPO(Objective):
    """Prefer the chosen answer to the rejected answer; summed over pairs.

    Rows come in pairs, chosen and rejected, with the scores from the model before training. A pair
    without targets fills up a batch and does not count.

    Args:
        beta: strength of the constraint to the reference model.
        label_smoothing: fraction of pairs assumed to be mislabeled.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7; Mitchell 2023, "A note on DPO with
    noisy preferences" (https://ericmitchell.ai/cdpo.pdf), for the smoothing.
    """

    FIGURES = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")

    def __init__(self, model: nn.Module, *, beta: float, label_smoothing: float = 0.0) -> None:
        super().__init__(model)
        self._beta = beta
        self._smoothing = label_smoothing
        self._sums: dict[bool, Tensor | None] = {True: None, False: None}

    def loss_sum(self, forward: Callable[..., Any], part: MicroBatchPart) -> Tensor:
        assert part.reference_B is not None, "pairs carry the reference's scores"
        losses_BT = self._head.token_losses(forward, part.inputs, part.targets_BT)
        # A reward, up to a term that cancels between the two answers to one prompt.
        rewards_B = self._beta * (-losses_BT.sum(1) - part.reference_B)
        chosen_P, rejected_P = rewards_B[0::2], rewards_B[1::2]
        counts_P = (part.targets_BT != IGNORE_INDEX).any(1)[0::2]
        margins_P = chosen_P - rejected_P
        loss_P = -F.logsigmoid(margins_P) * (1 - self._smoothing)
        loss_P = loss_P - F.logsigmoid(-margins_P) * self._smoothing
        # A tie counts half: before the first step every pair is a tie, not an error.
        figures = ((margins_P.sign() + 1) / 2, margins_P, chosen_P, rejected_P)
        self._add(torch.stack([(figure.detach() * counts_P).sum() for figure in figures]))
        return (loss_P * counts_P).sum()

    def take_figures(self, *, of_training: bool) -> Mapping[str, Tensor]:
        sums, self._sums[of_training] = self._sums[of_training], None
        return {} if sums is None else dict(zip(self.FIGURES, sums, strict=True))

    def _add(self, figures: Tensor) -> None:
        of_training = torch.is_grad_enabled()
        before = self._sums[of_training]
        self._sums[of_training] = figures if before is None else before + figures
