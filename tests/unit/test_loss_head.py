"""The loss without whole logits equals the loss from whole logits, and holds far less."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isles.dist.batch import IGNORE_INDEX
from isles.strategies import head as head_module
from isles.strategies.head import LossHead
from tests.each import each
from tests.small_models import small_model

B, T, V = 3, 17, 96


build = functools.partial(small_model, vocab_size=V)


def batch(ignored: float = 0.4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, V, (B, T), generator=generator)
    targets = torch.randint(0, V, (B, T), generator=generator)
    targets[torch.rand((B, T), generator=generator) < ignored] = IGNORE_INDEX
    return tokens, targets


def places_of(targets: Tensor) -> Tensor:
    return (targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


def plain_loss(model: Any, tokens: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits.float().flatten(0, 1)
    return F.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction
    )


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == wanted.keys()
    for name, value in wanted.items():
        scale = value.abs().max().clamp(min=1e-8)
        assert (mine[name] - value).abs().max() / scale < tolerance, name


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_CHUNK_LOGITS", 7 * V)
    monkeypatch.setattr(head_module, "_LEAST_TOKENS", 1)


CASES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "bias": ("phi", {"layer_norm_eps": 1e-5}),  # a head with a bias
    "soft cap after the head": ("gemma2", {"final_logit_softcapping": 3.0, "sliding_window": 64}),
    "scaled after the head": ("cohere", {"logit_scale": 0.25}),
}


def twins(case: str) -> tuple[Any, Any]:
    kind, settings = CASES[case]
    model = build(kind, **settings)
    return model, copy.deepcopy(model)


@each("case", CASES)
@each("given", ["places", "no places"])
@pytest.mark.usefixtures("small_chunks")
def test_loss_and_gradients_are_those_of_whole_logits(case: str, given: str) -> None:
    model, twin = twins(case)
    tokens, targets = batch()
    wanted = plain_loss(twin, tokens, targets)
    (wanted * 0.37).backward()
    places = places_of(targets) if given == "places" else None
    loss = LossHead(model).loss_sum(model, {"input_ids": tokens}, targets, places)
    (loss * 0.37).backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert_same(gradients(model), gradients(twin), 1e-5)


@each("case", CASES)
@pytest.mark.usefixtures("small_chunks")
def test_losses_of_tokens_and_their_gradients(case: str) -> None:
    model, twin = twins(case)
    tokens, targets = batch()
    factor = torch.arange(B, dtype=torch.float32).unsqueeze(1)
    wanted = plain_loss(twin, tokens, targets, reduction="none").view(B, T)
    (wanted.tanh() * factor).sum().backward()
    losses = LossHead(model).token_losses(model, {"input_ids": tokens}, targets)
    (losses.tanh() * factor).sum().backward()
    assert torch.allclose(losses, wanted, rtol=1e-5, atol=1e-6)
    assert_same(gradients(model), gradients(twin), 1e-5)


def test_a_frozen_head_gets_no_gradient_and_passes_one_on() -> None:
    model = build()
    model.lm_head.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    tokens, targets = batch()
    plain_loss(twin, tokens, targets).backward()
    LossHead(model).loss_sum(model, {"input_ids": tokens}, targets).backward()
    assert model.lm_head.weight.grad is None
    assert_same(gradients(model), gradients(twin), 1e-5)


def test_a_batch_without_targets_gives_zero_gradients_and_not_none() -> None:
    """DistributedDataParallel waits for the gradient of every parameter."""
    model = build()
    tokens, targets = batch(ignored=1.1)
    loss = LossHead(model).loss_sum(model, {"input_ids": tokens}, targets, places_of(targets))
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@each("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_as_close_as_whole_logits_are(dtype: torch.dtype) -> None:
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


def test_in_fp16_the_sum_over_tokens_may_be_large() -> None:
    """Its gradients are scaled afterwards, so that a smaller loss scale would not help."""
    hidden, targets = torch.full((4096, 4), 50.0), torch.zeros(4096, dtype=torch.int64)
    head = nn.Linear(4, 256, bias=False)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = head_module._fused_loss_sum(hidden, head, targets, may_ignore=False)
    (found,) = torch.autograd.grad(loss / 4096, head.weight)
    (exact,) = torch.autograd.grad(F.cross_entropy(head(hidden), targets), head.weight)
    assert (found - exact).norm() < 0.01 * exact.norm()


def test_the_factor_of_the_loss_is_not_rounded_to_16_bits() -> None:
    """1/80 in bf16 is 0.1 % more; every gradient below the head would be."""
    torch.manual_seed(0)
    head = nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(80, 64, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 256, (80,))
    norms = []
    for factor in (1.0, 1 / 80):
        loss = head_module._fused_loss_sum(hidden, head, targets, may_ignore=False)
        (found,) = torch.autograd.grad(loss * factor, hidden)
        norms.append(found.float().norm() / factor)
    assert abs(norms[1] / norms[0] - 1) < 2e-4


def test_torch_compile_keeps_one_graph_for_every_batch() -> None:
    model = build(num_hidden_layers=1)
    twin = copy.deepcopy(model)
    model.compile(backend="eager")
    head = LossHead(model)
    torch._dynamo.utils.counters.clear()
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, V, (B, T), generator=generator)
        loss = head.loss_sum(model, {"input_ids": tokens}, tokens)
        assert loss.item() == pytest.approx(plain_loss(twin, tokens, tokens).item(), rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_whole_logits_are_never_in_memory() -> None:
    """The largest tensor that is made is a chunk, not tokens x vocabulary."""
    model = small_model(vocab_size=50_000, num_hidden_layers=1)
    tokens = torch.randint(0, 50_000, (4, 512))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, tuple | list) else (result,):
                if isinstance(value, Tensor):
                    largest = max(largest, value.numel())
            return result

    head = LossHead(model)
    with Watch():
        head.loss_sum(model, {"input_ids": tokens}, tokens).backward()
    assert largest < 4 * 512 * 50_000 / 2
