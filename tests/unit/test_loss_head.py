"""The losses without whole logits, also DPO's, equal those from whole logits, and hold far less."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isles.dist.batch import IGNORE_INDEX
from isles.strategies import fused_loss
from isles.strategies.fused_loss import HeadWeights, fused_loss_sum
from isles.strategies.head import LossHead
from isles.strategies.objective import DPO
from isles.strategies.sequence import MicroBatchPart
from tests.each import each
from tests.small_models import small_model

B, T, V = 3, 17, 96
build = partial(small_model, vocab_size=V)


def batch(ignored: float = 0.4, rows: int = B) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, V, (2, rows, T), generator=generator)
    targets[torch.rand((rows, T), generator=generator) < ignored] = IGNORE_INDEX
    return tokens, targets


def places_of(targets: Tensor) -> Tensor:
    return (targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


def plain_loss(model: Any, tokens: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits.float().flatten(0, 1)
    how = {"ignore_index": IGNORE_INDEX, "reduction": reduction}
    return F.cross_entropy(logits, targets.flatten(), **how)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = value.abs().max().clamp(min=1e-8)
        assert (mine[name] - value).abs().max() / scale < tolerance, name


@each(
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"is_frozen": True}),  # a head that gets no gradient, and passes one on
    ("phi", {"layer_norm_eps": 1e-5}),  # a head with a bias
    ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 64}),  # after the head
    ("cohere", {"logit_scale": 0.25}),  # after the head
)
def test_losses_and_their_gradients_are_those_of_whole_logits(kind, settings, *, monkeypatch):
    monkeypatch.setattr(fused_loss, "chunk_tokens", lambda vocab, gpu_bytes: 7)
    model = build(kind, **settings)
    model.lm_head.weight.requires_grad_("is_frozen" not in settings)
    twin, head = copy.deepcopy(model), LossHead(model)
    tokens, targets = batch()
    wanted = plain_loss(twin, tokens, targets)
    (wanted * 0.37).backward()
    for places in (None, places_of(targets)):
        model.zero_grad()
        loss = head.loss_sum(model, {"input_ids": tokens}, targets, places)
        (loss * 0.37).backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert_same(gradients(model), gradients(twin), 1e-5)
    # Of each token.
    model.zero_grad()
    twin.zero_grad()
    factor = torch.arange(B, dtype=torch.float32).unsqueeze(1)
    wanted = plain_loss(twin, tokens, targets, reduction="none").view(B, T)
    (wanted.tanh() * factor).sum().backward()
    losses = head.token_losses(model, {"input_ids": tokens}, targets)
    (losses.tanh() * factor).sum().backward()
    assert torch.allclose(losses, wanted, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), gradients(twin), 1e-5)


def test_a_batch_without_targets_gives_zero_gradients_and_not_none():
    """DistributedDataParallel waits for the gradient of every parameter."""
    model = build()
    tokens, targets = batch(ignored=1.1)
    loss = LossHead(model).loss_sum(model, {"input_ids": tokens}, targets, places_of(targets))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@each(torch.bfloat16, torch.float16)
def test_under_autocast_it_is_as_close_as_whole_logits_are(dtype):
    model = build()
    twin, exact = copy.deepcopy(model), copy.deepcopy(model)
    tokens, targets = batch()
    plain_loss(exact, tokens, targets).backward()
    with torch.autocast("cpu", dtype=dtype):
        plain = plain_loss(twin, tokens, targets)
        mine = LossHead(model).loss_sum(model, {"input_ids": tokens}, targets)
    plain.backward()
    mine.backward()
    truth, rough, ours = gradients(exact), gradients(twin), gradients(model)
    for name, value in truth.items():
        error = (ours[name] - value).norm()
        assert error <= 1.2 * (rough[name] - value).norm() + 1e-6, name


def test_in_fp16_the_sum_over_tokens_may_be_large():
    """Its gradients are scaled afterwards, so that a smaller loss scale would not help."""
    hidden, targets = torch.full((4096, 4), 50.0), torch.zeros(4096, dtype=torch.int64)
    head = nn.Linear(4, 256, bias=False)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = fused_loss_sum(hidden, HeadWeights(head.weight), targets, may_ignore=False)
    (found,) = torch.autograd.grad(loss / 4096, head.weight)
    (exact,) = torch.autograd.grad(F.cross_entropy(head(hidden), targets), head.weight)
    assert (found - exact).norm() < 0.01 * exact.norm()


def test_the_factor_of_the_loss_is_not_rounded_to_16_bits():
    """1/80 in bf16 is 0.1 % more; every gradient below the head would be."""
    torch.manual_seed(0)
    head = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(80, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 256, (80,))
    norms = []
    for factor in (1.0, 1 / 80):
        loss = fused_loss_sum(hidden, HeadWeights(head.weight), targets, may_ignore=False)
        (found,) = torch.autograd.grad(loss * factor, hidden)
        norms.append(found.float().norm() / factor)
    assert abs(norms[1] / norms[0] - 1) < 2e-4


def test_torch_compile_keeps_one_graph_for_every_batch():
    model = build(num_hidden_layers=1)
    twin = copy.deepcopy(model)
    model.compile(backend="eager")
    head = LossHead(model)
    torch._dynamo.utils.counters.clear()
    for tokens in torch.randint(0, V, (4, B, T), generator=torch.Generator().manual_seed(0)):
        loss = head.loss_sum(model, {"input_ids": tokens}, tokens)
        assert loss.item() == pytest.approx(plain_loss(twin, tokens, tokens).item(), rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_whole_logits_are_never_in_memory():
    """The largest tensor that is made is a chunk, not tokens x vocabulary."""
    model = small_model(vocab_size=50_000, num_hidden_layers=1)
    tokens = torch.randint(0, 50_000, (4, 512))
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(value.numel() for value in tree_leaves(result) if torch.is_tensor(value))
            return result

    head = LossHead(model)
    with Watch():
        head.loss_sum(model, {"input_ids": tokens}, tokens).backward()
    assert max(sizes) < 4 * 512 * 50_000 / 2


BETA = 0.3


def pairs() -> tuple[Tensor, Tensor]:
    tokens, targets = batch(0, rows=4)
    targets[:, :5] = IGNORE_INDEX  # the prompt
    targets[1, 11:] = IGNORE_INDEX  # a shorter answer
    return tokens, targets


def scores(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return -plain_loss(model, tokens, targets, reduction="none").view(len(tokens), T).sum(1)


@each(0.0, 0.1)
def test_loss_gradients_and_figures_of_dpo_are_those_of_the_formula(smoothing):
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
    part = MicroBatchPart({"input_ids": tokens}, targets, reference_B=reference)
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


def test_its_own_scores_as_reference_give_log_2_a_pair():
    model = build().eval()
    tokens, targets = pairs()
    objective = DPO(model, beta=BETA)
    reference = objective.row_scores(model, MicroBatchPart({"input_ids": tokens}, targets))
    assert torch.allclose(reference, scores(model, tokens, targets), rtol=1e-5)
    with torch.no_grad():
        part = MicroBatchPart({"input_ids": tokens}, targets, reference_B=reference)
        loss = objective.loss_sum(model, part)
    assert loss.item() == pytest.approx(2 * 0.6931472, rel=1e-5)
    figures = objective.take_figures(of_training=False)
    assert figures["reward_margin"].item() == 0.0
    assert figures["reward_accuracy"].item() == 1.0, "of two pairs, each of them a tie"


def test_a_pair_without_targets_counts_for_nothing():
    model = build()
    tokens, targets = pairs()
    targets[2:] = IGNORE_INDEX
    objective = DPO(model, beta=BETA)
    reference = torch.tensor([-50.0, -49.0, 0.0, 0.0])
    both = MicroBatchPart({"input_ids": tokens}, targets, reference_B=reference)
    one = MicroBatchPart({"input_ids": tokens[:2]}, targets[:2], reference_B=reference[:2])
    loss, alone = objective.loss_sum(model, both), DPO(model, beta=BETA).loss_sum(model, one)
    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    assert objective.take_figures(of_training=True)["reward_accuracy"].item() <= 1
