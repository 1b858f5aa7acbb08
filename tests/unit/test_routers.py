"""The loss that balances experts: its gradient, what it counts, and what it does."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.world import World
from isles.errors import UserError
from isles.models.adapter import add_adapter
from isles.models.recompute import set_gradient_checkpointing
from isles.models.routers import find_routers
from isles.strategies.base import Engine
from isles.strategies.routers import _PLACE, Routers, _balance, _Place
from isles.train.compiled import compile_blocks
from isles.train.reach import balance_notes
from isles.train.strategy import make_routers
from tests.each import each
from tests.small_models import small_model
from tests.unit.test_compile import _forget, graphs
from tests.unit.test_counts import fake_ranks
from tests.unit.test_exported_files import LATENT
from tests.unit.test_mixed_precision import engine_of

__all__ = ["graphs"]

BALANCED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "granitemoe", "flex_olmo")
BALANCED += ("ernie4_5_moe",)
OTHERS = ("phimoe", "deepseek_v2", "deepseek_v3", "glm4_moe")


@pytest.fixture
def world() -> Iterator[World]:
    with fake_ranks(1) as alone:
        yield alone


def small_mixture(kind: str, **changes: Any) -> Any:
    sizes = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    sizes |= {"moe_layer_start_index": 0, "moe_num_experts": 4, "moe_k": 2, "sliding_window": 64}
    sizes |= LATENT if "deepseek" in kind else {}
    model = small_model(kind, **sizes, **changes)
    model.config._attn_implementation = "eager"
    return model


def balanced(model: Any, world: World, coefficient: float, precision: str = "32-true") -> Engine:
    engine = engine_of(model, DDPStrategyConfig(), world, precision)
    engine.use_routers(Routers(find_routers(model), coefficient, world, counts=True))
    return engine


def rows_of(*lengths: int, seed: int = 0) -> Batch:
    """Rows of 16 places whose last places are padding."""
    dice = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (len(lengths), 16), generator=dice)
    targets = ids.roll(-1, 1)
    for row, length in enumerate(lengths):
        targets[row, length:] = IGNORE_INDEX
        targets[row, : length // 3] = IGNORE_INDEX  # a prompt, which the model reads
    return Batch(ids, targets, tuple(range(len(lengths))))


def learn(engine: Engine, *batches: Batch) -> list[Tensor]:
    """The gradients of a step that changes no weight."""
    read = sum(int((b.targets_BT != IGNORE_INDEX).flip(1).cumsum(1).gt(0).sum()) for b in batches)
    engine.begin_step(input_tokens=read)
    for batch in batches:
        engine.forward_backward(batch, loss_divisor=20, is_last=batch is batches[-1])
    found = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in engine.trainable()]
    engine.model.zero_grad()
    if engine.routers is not None:
        engine.routers.end_step(torch.zeros(()))
    return found


def loss_of_transformers(model: Any, batch: Batch) -> Tensor:
    """The mean over layers of the loss of transformers for one layer, without padding."""
    source = importlib.import_module(type(model).__module__)
    read = (batch.targets_BT != IGNORE_INDEX).flip(1).cumsum(1).flip(1) > 0
    scores = model(batch.input_ids_BT, output_router_logits=True).router_logits
    config = model.config
    names = ("num_experts", "num_local_experts", "moe_num_experts")
    experts = next(getattr(config, name) for name in names if hasattr(config, name))
    losses = [
        source.load_balancing_loss_func((x,), experts, config.num_experts_per_tok, read.long())
        for x in scores
    ]
    return torch.stack(losses).mean()


@each(*BALANCED)
def test_the_gradient_is_that_of_transformers_over_the_global_batch(kind, *, world):
    """In the second step of a batch, whose load is known then; in one or in several parts."""
    whole = rows_of(16, 9, 3, 12)
    parts = [replace(whole.sample(n), places_N=None) for n in range(4)]
    for batches in ([whole], parts):
        model, other = small_mixture(kind), small_mixture(kind)
        engine = balanced(model, world, 0.5)
        plain = learn(engine_of(other, DDPStrategyConfig(), world, "32-true"), *batches)
        first = learn(engine, *batches)
        assert all(map(torch.equal, plain, first)), "no load is known yet"
        second = learn(engine, *batches)
        loss = loss_of_transformers(model, whole)
        wanted = torch.autograd.grad(0.5 * loss, engine.trainable(), allow_unused=True)
        moved = 0
        for before, after, given in zip(plain, second, wanted, strict=True):
            exact = torch.zeros(1) if given is None else given
            torch.testing.assert_close(after - before, exact.expand_as(after), atol=2e-6, rtol=1e-3)
            moved += int(exact.abs().max() > 1e-5)
        assert moved > 2
        assert engine.routers is not None
        figures = engine.routers.figures()
        assert figures["router_loss"] == pytest.approx(0.5 * float(loss.detach()), rel=1e-4)


@each(*BALANCED, *OTHERS)
def test_padding_and_filled_rows_are_not_counted(kind, *, world):
    """So that the statistics are those of the tokens, each counted once."""
    batch = rows_of(16, 9, 0)
    for checkpointing in ("none", "full", "selective"):
        model = small_mixture(kind)
        set_gradient_checkpointing(model, checkpointing)
        engine = balanced(model, world, 0.0)
        learn(engine, batch, rows_of(5))
        assert engine.routers is not None
        load = engine.routers._load_LE
        assert torch.allclose(load.sum(1), torch.full((2,), 2.0, dtype=torch.float64)), load
        figures = engine.routers.figures()
        assert figures.keys() == {"router_entropy", "router_busiest_share"}
        assert 0 < figures["router_entropy"] <= 1 <= figures["router_busiest_share"] <= 2.0


@each("none", "full", "selective", "offload")
def test_recomputed_blocks_balance_alike(checkpointing, *, world):
    model = small_mixture("mixtral")
    set_gradient_checkpointing(model, checkpointing)
    engine, plain = balanced(model, world, 0.5), balanced(small_mixture("mixtral"), world, 0.5)
    for seed in range(3):
        batches = rows_of(16, 7, seed=seed), rows_of(9, 4, seed=seed + 9)
        assert all(map(torch.equal, learn(engine, *batches), learn(plain, *batches)))
    assert engine.routers is not None and plain.routers is not None
    assert engine.routers.figures() == plain.routers.figures()


@each("bf16-mixed", "fp16-mixed")
def test_16_bits_balance_as_32_do(precision, *, world):
    found = []
    for kind in ("32-true", precision):
        engine = balanced(small_mixture("qwen3_moe"), world, 1.0, kind)
        for _ in range(2):
            gradients = learn(engine, rows_of(16, 9))
        names = [name for name, _ in engine.model.named_parameters()]
        (router,) = [
            g for n, g in zip(names, gradients, strict=True) if n.endswith("1.mlp.gate.weight")
        ]
        found.append(router / (2.0**16 if kind == "fp16-mixed" else 1))
    torch.testing.assert_close(found[1], found[0], atol=0.2 * float(found[0].abs().max()), rtol=0)


def test_compiled_blocks_balance_in_one_graph(graphs, world):
    _forget()
    graphs.clear()
    compiled = small_mixture("qwen3_moe", num_hidden_layers=4)
    compile_blocks(compiled)
    engine = balanced(compiled, world, 0.5)
    plain = balanced(small_mixture("qwen3_moe", num_hidden_layers=4), world, 0.5)
    for seed in range(3):
        batches = rows_of(16, 7, seed=seed), rows_of(9, 4, seed=seed + 9)
        for mine, exact in zip(learn(engine, *batches), learn(plain, *batches), strict=True):
            torch.testing.assert_close(mine, exact, atol=1e-5, rtol=1e-3)
    assert engine.routers is not None and plain.routers is not None
    assert engine.routers.figures() == pytest.approx(plain.routers.figures())
    assert len(graphs) <= 2
    assert not counters["graph_break"]


def mesh_alone() -> Any:
    return SimpleNamespace(place=SimpleNamespace(tp=0))


def coefficient_of(model: Any, world: World, given: float | None = None) -> float | None:
    config = ModelConfig(name_or_path="x", router_aux_loss_coef=given)
    routers = make_routers(config, model, mesh_alone(), world)
    return None if routers is None else routers.coefficient


def test_the_coefficient_is_that_of_the_model_unless_given(world):
    model = small_mixture("mixtral", router_aux_loss_coef=0.02)
    assert coefficient_of(model, world) == 0.02
    assert coefficient_of(model, world, 0.0) == 0
    assert coefficient_of(model, world, 0.5) == 0.5
    add_adapter(model, AdapterConfig(type="lora"), dtype=torch.float32, name="")
    assert coefficient_of(model, world) == 0, "frozen routers"
    assert coefficient_of(model, world, 0.5) == 0.5
    assert coefficient_of(small_mixture("deepseek_v3"), world) == 0
    assert coefficient_of(small_model("llama"), world, 0.0) is None
    for kind in ("llama", "deepseek_v3"):
        with pytest.raises(UserError, match=f"{kind} has no loss that balances experts"):
            coefficient_of(small_mixture(kind), world, 0.1)


@each((0.0, None, 1), (0.0, 0.0, 0), (0.01, None, 0))
def test_a_mixture_from_scratch_that_nothing_balances_is_named(coefficient, given, count):
    config = ModelConfig(name_or_path="x", router_aux_loss_coef=given)
    notes = [*balance_notes(config, small_mixture("deepseek_v3"), coefficient)]
    assert len(notes) == count and all("deepseek_v3" in note for note in notes)


def entropy_after(world: World, coefficient: float, steps: int) -> tuple[float, float]:
    """Of the load of a tiny mixture that learns a text of a few frequent words; and its loss."""
    model = small_model(
        "qwen3_moe", num_experts=16, num_hidden_layers=1, norm_topk_prob=True, hidden_size=16
    )
    engine = engine_of(model, DDPStrategyConfig(), world, "32-true")
    engine._stepper._optimizers = [[torch.optim.AdamW(model.parameters(), fused=True)]]  # type: ignore[attr-defined]
    engine.use_routers(Routers(find_routers(model), coefficient, world, counts=True))
    dice = torch.Generator().manual_seed(0)
    frequencies = torch.arange(1, 65).float() ** -1.2
    found = []
    for _ in range(steps):
        ids = torch.multinomial(frequencies, 8 * 33, True, generator=dice).view(8, 33)
        ids[:, 1::2] = (ids[:, :-1:2] * 7 + 3) % 64
        engine.begin_step(input_tokens=8 * 32)
        batch = Batch(ids[:, :-1], ids[:, 1:], tuple(range(8)))
        loss = engine.forward_backward(batch, loss_divisor=8 * 32, is_last=True)
        engine.optimizer_step(lr=0.01, max_norm=None)
        assert engine.routers is not None
        found.append((engine.routers.figures()["router_entropy"], float(loss) / 256))
    entropies, losses = zip(*found[-20:], strict=True)
    return sum(entropies) / 20, sum(losses) / 20


def test_a_mixture_from_scratch_keeps_its_experts_in_use(world):
    """After 200 steps, within a tenth of an even load. Without the loss it does not."""
    with_loss, without = (entropy_after(world, coefficient, 200) for coefficient in (0.02, 0.0))
    assert with_loss[0] > 0.9, with_loss
    assert without[0] < 0.8, without
    assert with_loss[1] < F.cross_entropy(torch.zeros(1, 64), torch.tensor([0])) - 1.0


def test_what_a_router_returns_beside_its_choice_stays(world):
    router = nn.Module()
    place = _Place(torch.zeros(2, 4), torch.ones(3), torch.zeros(4))
    setattr(router, _PLACE, place)
    scores, weights = torch.randn(3, 4), torch.rand(3, 2, requires_grad=True)
    chosen, more = torch.tensor([[0, 1], [1, 2], [3, 0]]), object()
    found = _balance(router, None, (scores, weights, chosen, more))
    assert found[0] is scores and torch.equal(found[1], weights)
    assert found[2] is chosen and found[3] is more
