"""AdamW with a small state, bf16 weights rounded at random, Muon; what a step waits for; rates."""

from __future__ import annotations

import copy
import math
import sys
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig, learning_rate
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.errors import MissingDependencyError
from isles.models.build import build_model
from isles.run.env import RankEnv
from isles.strategies.stepper import Stepper
from isles.train.metrics import StepMeter
from isles.train.optimizer.make import _start_momentum, make_optimizers
from isles.train.optimizer.muon import Muon
from tests.each import each
from tests.engines import ReadsToHost, engine_of, fake_run

LR = 1e-3
CPU = torch.device("cpu")


class Model(nn.Module):
    """A matrix that is held in 8 bits, one that is too small for it, and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter((torch.randn(96, 192) / 10).to(dtype))
        self.small = nn.Parameter((torch.randn(8, 64) / 10).to(dtype))
        self.norm = nn.Parameter(torch.ones(192, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.norm) @ self.large.T)[:, :64] @ self.small.T

    def get_output_embeddings(self) -> None:
        return None


def optimizers_of(model: nn.Module, **settings: Any) -> Any:
    config = TrainingConfig(max_steps=1, learning_rate=LR, weight_decay=0.1, **settings)
    return make_optimizers(config, model, seed=3)


def optimizer_of(model: nn.Module, **settings: Any) -> Any:
    (optimizer,) = optimizers_of(model, **settings)
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> float:
    """Toward a fixed random target; the last loss."""
    loss = torch.zeros(())
    for step in range(start, start + steps):
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(64, 192, generator=dice).to(next(model.parameters()).dtype)
        target = (x[:, :8] * 2 + 1).float()
        loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def everything(model: nn.Module, *optimizers: Any) -> list[Tensor]:
    states = [fields for optimizer in optimizers for fields in optimizer.state.values()]
    state = [t for fields in states for t in fields.values()]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_eight_bits_train_nearly_as_well_with_a_quarter_of_the_state():
    exact, coded = Model(), Model()
    full, small = optimizer_of(exact), optimizer_of(coded, optimizer="adamw_8bit")
    before = train(Model(), optimizer_of(Model()), 1)
    losses = [train(exact, full, 150), train(coded, small, 150)]
    assert max(losses) < before / 5
    assert losses[1] == pytest.approx(losses[0], rel=0.1)

    def size(optimizer: Any, parameter: nn.Parameter) -> int:
        fields = optimizer.state[parameter]
        return sum(t.nbytes for name, t in fields.items() if name != "step")

    assert size(full, exact.large) == 8 * exact.large.numel()
    # Two codes a weight, and two fp32 scales for each block of 64, which 192 is a multiple of.
    assert size(small, coded.large) == (2 + 2 * 4 / 64) * coded.large.numel()
    assert size(small, coded.norm) == 8 * coded.norm.numel()
    # Tensors too small for 8 bits are stepped as by torch's own AdamW.
    exact, ours = Model(), Model()
    for model, name in ((exact, "adamw"), (ours, "adamw_8bit")):
        model.large.requires_grad_(False)
        train(model, optimizer_of(model, optimizer=name), 20)
    for one, other in zip(exact.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=2e-6)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [
        t.contiguous().view(torch.uint8).numpy().tobytes() for t in map(torch.atleast_1d, tensors)
    ]


KINDS = [*product(("adamw", "adamw_8bit"), (False, True)), ("sgd", False), ("muon", False)]


@each(*product(KINDS, (0, 3), (torch.nan, torch.inf)))
def test_a_skipped_step_changes_no_bit(kind, warm, gradient):
    name, at_random = kind
    model = Model(torch.bfloat16 if at_random else torch.float32)
    model.norm.data[0] = -0.0  # which a sum with 0.0 would change
    settings = {"optimizer": name, "stochastic_rounding": at_random}
    optimizers = optimizers_of(model, precision="bf16-true", **settings)
    stepper = Stepper([model], lambda _: optimizers, device=CPU, precision="bf16-true")
    for _ in range(warm):
        take_step(model, stepper)
    before = bits(everything(model, *optimizers))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    stepper.step(lr=LR, max_norm=1.0)
    assert stepper.good_steps() == warm
    take_step(model, stepper)  # later steps change nothing either
    after = everything(model, *optimizers)
    assert bits(after[: len(before)]) == before
    assert not any(t.any() for t in after[len(before) :])  # torch makes AdamW's state late


@each("adamw", "adamw_8bit", "sgd", "muon")
def test_steps_after_an_overflow_are_those_without_it(name):
    """Under fp16 one step is skipped, and the next one counts."""
    steady, shaken = Model(), Model()
    for model, overflows in ((steady, False), (shaken, True)):
        optimizers = optimizers_of(model, optimizer=name, precision="fp16-mixed")
        stepper = Stepper([model], lambda _, o=optimizers: o, device=CPU, precision="fp16-mixed")
        for step in range(4):
            if overflows and step in (0, 2):
                scale = stepper._scaler.scale(torch.tensor(1.0))
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.inf)
                stepper.step(lr=LR, max_norm=1.0)
                assert stepper._scaler.scale(torch.tensor(1.0)) == scale / 2
            take_step(model, stepper)
        assert stepper.good_steps() is None
    assert bits(everything(steady)) == bits(everything(shaken))


def take_step(model: Model, stepper: Stepper) -> None:
    dice = torch.Generator().manual_seed(7)
    x = torch.randn(64, 192, generator=dice).to(model.large.dtype)
    loss = model(x).float().square().mean()
    stepper.scaled(loss, loss).backward()
    stepper.step(lr=LR, max_norm=1.0)


@each("adamw", "adamw_8bit")
def test_state_that_is_taken_over_goes_on_bit_for_bit(optimizer):
    settings = {"optimizer": optimizer, "stochastic_rounding": True, "precision": "bf16-true"}
    once, half, again = (Model(torch.bfloat16) for _ in range(3))
    first, before, after = (optimizer_of(model, **settings) for model in (once, half, again))
    train(once, first, 8)
    train(half, before, 5)
    again.load_state_dict(half.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(again, after, 3, start=5)
    assert same(everything(once, first), everything(again, after))


def mean_of_20_steps(**settings: Any) -> float:
    """Where a weight of 1 goes along a gradient of ones, on average over many; in fp64."""
    model = Model(torch.bfloat16)
    model.large.data.fill_(1.0)  # where bf16 has steps of 1/128 and 1/256
    optimizer = optimizer_of(model, precision="bf16-true", **settings)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        group["lr"] = 1e-5
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return float(model.large.detach().double().mean()) - 1


@each("adamw", "adamw_8bit")
def test_updates_that_bf16_would_lose_are_kept_in_the_mean(optimizer):
    """Adam's step along a constant gradient is the learning rate, whatever the moments' type."""
    assert mean_of_20_steps(optimizer=optimizer) == 0.0
    at_random = mean_of_20_steps(optimizer=optimizer, stochastic_rounding=True)
    # 18432 weights, each a walk of 20 steps: down 1/256 with probability 1e-5 x 256.
    expected = -20 * 1e-5
    deviation = (20 * 1e-5 / 256) ** 0.5 / 18_432**0.5
    assert abs(at_random - expected) < 5 * deviation
    assert abs(expected) > 15 * deviation, "the law would hold for no movement as well"


def test_without_torchao_a_run_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    for settings in ({"optimizer": "adamw_8bit"}, {"stochastic_rounding": True}):
        with pytest.raises(MissingDependencyError, match="torchao") as raised:
            optimizer_of(Model(), precision="bf16-true", **settings)
        assert raised.value.fix == "pip install 'isles[torchao]'"


@each((torch.float32, True, 2e-6), (torch.float32, False, 0.02), (torch.bfloat16, False, 0.02))
def test_muon_on_a_cpu_is_torchs_without_its_rounding_to_bf16(dtype, exact, gap, *, monkeypatch):
    if exact:
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    torch.manual_seed(0)
    shapes = (24, 80), (80, 24), (24, 80)
    ours = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    mine = Muon(ours, **settings)
    _start_momentum(mine)
    torchs = torch.optim.Muon(theirs, **settings, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape).to(dtype)
            other.grad = one.grad.clone()
        mine.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=0, atol=gap)
        assert not torch.allclose(one.float(), other.float() * 1.02, atol=0.02)


@each((None, 6.0), (0.5, 0.5))
def test_gradients_are_clipped_to_the_norm_that_the_run_file_names(max_norm, moved):
    """By SGD of rate 1 the weights move by the gradient as it was clipped."""
    model = nn.Linear(8, 4)
    for parameter in model.parameters():
        parameter.data.zero_()
        parameter.grad = torch.ones_like(parameter)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, fused=True)
    stepper = Stepper([model], lambda _: [sgd], device=CPU, precision="32-true")
    norm = stepper.step(lr=1.0, max_norm=max_norm)
    assert norm.item() == pytest.approx(6.0)  # of 36 ones, before it is clipped
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert weights.norm().item() == pytest.approx(moved, rel=1e-5)


@each("adamw", "sgd", "muon")
def test_weights_of_matrices_decay_and_norms_do_not(optimizer, *, tiny_model):
    """By steps of no gradient, only decay moves a weight."""
    config = ModelConfig(name_or_path=str(tiny_model), init="scratch")
    model = build_model(config, device=CPU, dtype=torch.float32, seed=0, vocab_size=None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = TrainingConfig(max_steps=1, optimizer=optimizer, learning_rate=LR, weight_decay=0.5)
    for one in make_optimizers(training, model):
        for parameter in (p for group in one.param_groups for p in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        one.step()
    decayed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert decayed == {name for name, p in before.items() if p.ndim >= 2}


DDP, FSDP = DDPStrategyConfig(), FSDPStrategyConfig()
CASES = [(DDP, "adamw"), (DDP, "sgd"), (FSDP, "adamw"), (FSDP, "sgd"), (FSDP, "muon")]
CASES += [(DDP, "muon"), (FSDP, "adamw_8bit")]


@each(*product(CASES, ("32-true", "bf16-mixed", "fp16-mixed")))
def test_a_step_that_is_not_recorded_reads_no_number_back_to_the_host(
    case, precision, *, tiny_model
):
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        strategy, optimizer = case
        config = fake_run(tiny_model, optimizer=optimizer, precision=precision)
        engine, meter = engine_of(config, strategy, world), StepMeter(world, 1.0, 0.0)
        ids = torch.arange(32).reshape(2, 16)

        def step() -> None:
            meter.begin(is_recorded=False)
            done = engine.forward_backward(Batch(ids, ids, (0, 1)), loss_divisor=32, is_last=True)
            meter.add(done)
            engine.optimizer_step(lr=1e-3, max_norm=1.0)
            meter.step_done(tokens=32, loss_divisor=32, padding_share=0.0)

        step()  # optimizers look at numbers when they make their state
        with ReadsToHost() as reads:
            step()
        assert reads.count == 0
        with ReadsToHost() as reads:
            engine.good_steps()
        assert reads.count > 0, "the counter sees what it should see"
    finally:
        leave_world()


def rates(total: int, **fields: object) -> list[float]:
    config = TrainingConfig.model_validate({"max_steps": total, "learning_rate": 1.0, **fields})
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


def test_the_learning_rate_warms_up_to_the_peak_and_falls_toward_the_minimum():
    for shape in ("constant", "linear", "cosine", "wsd"):
        found = rates(100, lr_scheduler_type=shape, warmup_steps=10)
        assert all(low < high for low, high in pairwise(found[:11])), shape
        assert found[0] > 0, "no step is wasted on a rate of zero"
        assert max(found) == found[10] == 1.0
        found = rates(100, lr_scheduler_type=shape, min_lr_ratio=0.1)
        assert all(high >= low for high, low in pairwise(found)), shape
        assert shape == "constant" or 0.1 < found[-1] < 0.2, "nor one at the end"
    assert math.isclose(rates(100, lr_scheduler_type="cosine")[50], 0.5)
    found = rates(100, lr_scheduler_type="wsd", decay_steps=20)
    assert found[:81] == [1.0] * 81 and found[81] < 1.0
    endless = TrainingConfig(max_time=60.0, learning_rate=0.5, lr_scheduler_type="constant")
    assert learning_rate(endless, 10**6, None) == 0.5
