"""AdamW with a small state, and bf16 weights that are rounded at random."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isles.config.load import load_run_file
from isles.config.sections.model import ModelConfig
from isles.config.sections.training import TrainingConfig
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError
from isles.models.build import build_empty_model, fill_model
from isles.strategies.stepper import Stepper
from isles.train.optimizer import MuonFp32, _start_momentum, make_optimizers
from tests.each import each

LR = 1e-3


class Model(nn.Module):
    """A matrix that is held in 8 bits, one that is too small for it, and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Parameter((torch.randn(96, 192) / 10).to(dtype))
        self.small = nn.Parameter((torch.randn(8, 64) / 10).to(dtype))
        self.norm = nn.Parameter(torch.ones(192, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = (x * self.norm) @ self.large.T
        return hidden[:, :64] @ self.small.T


def optimizer_of(model: nn.Module, **settings: Any) -> Any:
    config = TrainingConfig(max_steps=1, learning_rate=LR, weight_decay=0.1, **settings)
    (optimizer,) = make_optimizers(config, model, seed=3)
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: int, start: int = 0) -> float:
    """Towards a fixed random target; the last loss."""
    loss = torch.zeros(())
    for step in range(start, start + steps):
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(64, 192, generator=dice).to(next(model.parameters()).dtype)
        target = (x[:, :8] * 2 + 1).float()
        loss = (model(x).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(loss.detach())


def state_tensors(optimizer: Any) -> list[Tensor]:
    return [t for fields in optimizer.state.values() for t in fields.values()]


def everything(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *state_tensors(optimizer))]


def test_eight_bits_train_nearly_as_well_with_a_quarter_of_the_state() -> None:
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


def test_what_is_not_coded_is_adamw() -> None:
    """Tensors too small for 8 bits are stepped as by torch's own AdamW."""
    exact, ours = Model(), Model()
    for model in (exact, ours):
        model.large.requires_grad_(False)
    train(exact, optimizer_of(exact), 20)
    train(ours, optimizer_of(ours, optimizer="adamw_8bit"), 20)
    for one, other in zip(exact.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=2e-6)


@each(
    "settings",
    [
        {"optimizer": "adamw_8bit"},
        {"optimizer": "adamw_8bit", "stochastic_rounding": True},
        {"optimizer": "adamw", "stochastic_rounding": True},
    ],
)
@each("warm", [0, 3])
def test_a_skipped_step_changes_no_bit(settings: dict[str, Any], warm: int) -> None:
    dtype = torch.bfloat16 if settings.get("stochastic_rounding") else torch.float32
    model = Model(dtype)
    made: list[Any] = []

    def make(module: nn.Module) -> list[Any]:
        made.append(optimizer_of(module, precision="bf16-true", **settings))
        return made

    stepper = Stepper([model], make, device=torch.device("cpu"), precision="bf16-true")
    (optimizer,) = made
    train(model, optimizer, warm)
    before = everything(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    stepper.step(lr=LR, max_norm=1.0)
    assert stepper.good_steps() == 0
    after = everything(model, optimizer)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    train(model, optimizer, 1)
    changed = everything(model, optimizer)
    assert all(t.isfinite().all() for t in changed)
    assert not torch.equal(changed[0], before[0])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_state_that_is_taken_over_goes_on_bit_for_bit(optimizer: str) -> None:
    def make() -> tuple[Model, Any]:
        model = Model(torch.bfloat16)
        settings = {"optimizer": optimizer, "stochastic_rounding": True, "precision": "bf16-true"}
        return model, optimizer_of(model, **settings)

    once, first = make()
    train(once, first, 8)
    half, before = make()
    train(half, before, 5)
    again, after = make()
    again.load_state_dict(half.state_dict())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    train(again, after, 3, start=5)
    left, right = everything(once, first), everything(again, after)
    assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def moved(model: Model, make: Callable[[Model], Any]) -> float:
    """Mean change of the weights in 20 steps along a gradient of ones, in fp64."""
    start = model.large.detach().double().clone()
    optimizer = make(model)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
        group["lr"] = 1e-5
    for _ in range(20):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return float((model.large.detach().double() - start).mean())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_updates_that_bf16_would_lose_are_kept_in_the_mean(name: str) -> None:
    """Adam's step along a constant gradient is the learning rate, whatever the moments' type."""

    def ones() -> Model:
        model = Model(torch.bfloat16)
        model.large.data.fill_(1.0)  # where bf16 has steps of 1/128 and 1/256
        return model

    rounding = {"optimizer": name, "precision": "bf16-true"}
    nearest = moved(ones(), lambda m: optimizer_of(m, **rounding))
    assert nearest == 0.0
    at_random = moved(ones(), lambda m: optimizer_of(m, **rounding, stochastic_rounding=True))
    # 18432 weights, each a walk of 20 steps: down 1/256 with probability 1e-5 x 256.
    expected = -20 * 1e-5
    deviation = (20 * 1e-5 / 256) ** 0.5 / 18_432**0.5
    assert abs(at_random - expected) < 5 * deviation
    assert abs(expected) > 15 * deviation, "the law would hold for no movement as well"


def test_without_torchao_a_run_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    for settings in ({"optimizer": "adamw_8bit"}, {"stochastic_rounding": True}):
        with pytest.raises(MissingDependencyError, match="torchao") as raised:
            optimizer_of(Model(), precision="bf16-true", **settings)
        assert raised.value.fix == "pip install 'isles[torchao]'"


@pytest.mark.parametrize(
    ("changes", "place", "words"),
    [
        (("optimizer: adamw_8bit", "deepspeed"), "8 training.optimizer", "flat pieces"),
        (("stochastic_rounding: true", "ddp"), "8 training.stochastic_rounding", "in fp32"),
    ],
)
def test_what_does_not_go_together_is_said_before_the_start(
    tmp_path: Path, changes: tuple[str, str], place: str, words: str
) -> None:
    training, strategy = changes
    file = tmp_path / "run.yaml"
    file.write_text(
        "model:\n  name_or_path: llama-2m\n  init: scratch\ntokenizer: {train_vocab_size: 2048}\n"
        "data:\n  sources: [{path: python-docs}]\n"
        f"training:\n  {training}\n  max_steps: 5\nstrategy: {{kind: {strategy}}}\n"
    )
    with pytest.raises((ConfigError, ConfigErrors)) as raised:
        load_run_file(file)
    message = str(raised.value)
    assert f"run.yaml:{place}" in message
    assert words in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_on_a_cpu_is_torchs_without_its_rounding_to_bf16(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((24, 80), (80, 24))]
    theirs = [nn.Parameter(parameter.detach().clone()) for parameter in ours]
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    settings["adjust_lr_fn"] = "match_rms_adamw"
    mine = MuonFp32(ours, **settings)
    _start_momentum(mine)
    torchs = torch.optim.Muon(theirs, **settings)
    for _ in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape).to(dtype)
            other.grad = one.grad.clone()
        mine.step()
        torchs.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=0.02)
        assert not torch.allclose(one.float(), other.float() * 1.02, atol=0.02)


def test_gradients_are_clipped_to_the_norm_that_the_run_file_names() -> None:
    """By SGD of rate 1 the weights move by the gradient as it was clipped."""
    moved = {}
    for max_norm in (None, 0.5):
        model = nn.Linear(8, 4)
        model.load_state_dict({"weight": torch.zeros(4, 8), "bias": torch.zeros(4)})
        stepper = Stepper(
            [model],
            lambda part: [torch.optim.SGD(part.parameters(), lr=0.0, fused=True)],
            device=torch.device("cpu"),
            precision="32-true",
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        norm = stepper.step(lr=1.0, max_norm=max_norm)
        assert norm.item() == pytest.approx(6.0)  # of 36 ones, before it is clipped
        moved[max_norm] = (
            torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()
        )
    assert moved[None] == pytest.approx(6.0) and moved[0.5] == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_weights_of_matrices_decay_and_norms_do_not(tiny_model: Path, optimizer: str) -> None:
    """By steps of no gradient, only decay moves a weight."""
    config = ModelConfig(name_or_path=str(tiny_model), init="scratch")
    model = build_empty_model(config, dtype=torch.float32, vocab_size=None)
    model.to_empty(device="cpu")
    fill_model(model, config, seed=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = TrainingConfig(max_steps=1, optimizer=optimizer, learning_rate=LR, weight_decay=0.5)
    for one in make_optimizers(training, model):
        for parameter in (p for group in one.param_groups for p in group["params"]):
            parameter.grad = torch.zeros_like(parameter)
        one.step()
    decayed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert decayed == {name for name, p in before.items() if p.ndim >= 2}
