"""DPO's loss against the paper's formula, written out for whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import IGNORE_INDEX
from isles.strategies.objective import DPO
from isles.strategies.sequence import Part
from tests.each import each
from tests.unit.test_loss_head import T, V, assert_same, build, gradients

BETA = 0.3


def pairs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (4, T), generator=generator)
    targets = torch.randint(0, V, (4, T), generator=generator)
    targets[:, :5] = IGNORE_INDEX  # the prompt
    targets[1, 11:] = IGNORE_INDEX  # a shorter answer
    return tokens, targets


def scores(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    known = targets != IGNORE_INDEX
    each = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (each * known).sum(-1)


@each("smoothing", [0.0, 0.1])
def test_loss_gradients_and_figures_are_those_of_the_formula(smoothing: float) -> None:
    model, twin = build(), build()
    tokens, targets = pairs()
    reference = torch.tensor([-50.0, -49.0, -47.5, -52.0])
    found = scores(twin, tokens, targets)
    chosen = BETA * (found - reference)[0::2]
    rejected = BETA * (found - reference)[1::2]
    wanted = -(1 - smoothing) * F.logsigmoid(chosen - rejected)
    wanted = (wanted - smoothing * F.logsigmoid(rejected - chosen)).sum()
    wanted.backward()

    objective = DPO(model, beta=BETA, label_smoothing=smoothing)
    part = Part({"input_ids": tokens}, targets, reference_B=reference)
    loss = objective.loss_sum(model, part)
    loss.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same(gradients(model), gradients(twin), 1e-5)
    figures = objective.take_figures(of_training=True)
    for name, value in {
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "reward_margin": chosen - rejected,
        "reward_accuracy": chosen > rejected,
    }.items():
        assert figures[name].item() == pytest.approx(value.sum().item(), rel=1e-4), name
    assert not objective.take_figures(of_training=True), "they are taken once"
    assert not objective.take_figures(of_training=False)


def test_its_own_scores_as_reference_give_log_2_a_pair() -> None:
    model = build().eval()
    tokens, targets = pairs()
    objective = DPO(model, beta=BETA)
    reference = objective.row_scores(model, Part({"input_ids": tokens}, targets))
    assert torch.allclose(reference, scores(model, tokens, targets), rtol=1e-5)
    with torch.no_grad():
        part = Part({"input_ids": tokens}, targets, reference_B=reference)
        loss = objective.loss_sum(model, part)
    assert loss.item() == pytest.approx(2 * 0.6931472, rel=1e-5)
    figures = objective.take_figures(of_training=False)
    assert figures["reward_margin"].item() == 0.0
    assert figures["reward_accuracy"].item() == 1.0, "of two pairs, each of them a tie"


def test_a_pair_without_targets_counts_for_nothing() -> None:
    model = build()
    tokens, targets = pairs()
    targets[2:] = IGNORE_INDEX
    objective = DPO(model, beta=BETA)
    reference = torch.tensor([-50.0, -49.0, 0.0, 0.0])
    both = Part({"input_ids": tokens}, targets, reference_B=reference)
    one = Part({"input_ids": tokens[:2]}, targets[:2], reference_B=reference[:2])
    loss, alone = objective.loss_sum(model, both), DPO(model, beta=BETA).loss_sum(model, one)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert objective.take_figures(of_training=True)["reward_accuracy"].item() <= 1
