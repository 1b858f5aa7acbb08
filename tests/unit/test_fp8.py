"""fp8-mixed: which layers multiply in fp8, and how near the results are to bf16-mixed.

Here torchao emulates fp8 products; only the graph of a compiled block has the real ones.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.batch import Batch
from isles.dist.world import World
from isles.errors import MissingDependencyError, UserError
from isles.models.attention import use_maskless_attention
from isles.models.fill import fill_fresh
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.fsdp import find_blocks
from isles.strategies.mixed_precision import MixedPrecision
from isles.train import fp8
from isles.train.fp8 import use_fp8
from isles.train.products import products_of_export
from tests.each import each
from tests.small_models import small_model
from tests.unit.test_counts import fake_ranks
from tests.unit.test_mixed_precision import BATCH, IDS, engine_of, gradients, learn

FP8 = TrainingConfig(max_steps=10, precision="fp8-mixed")
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_settings", lambda: Float8LinearConfig(emulate=True))


@pytest.fixture
def world() -> Iterator[World]:
    with fake_ranks(1) as alone:
        yield alone


def in_fp8(model: nn.Module) -> list[str]:
    """The last parts of the names of converted layers."""
    found = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    assert all(".layers." in name for name in found), "no embedding and no head"
    return [name.rpartition(".")[2] for name in found]


def model_in_fp8(kind: str = "llama", checkpointing: str = "none", **changes: Any) -> Any:
    model = small_model(kind, **changes)
    set_gradient_checkpointing(model, checkpointing)
    use_fp8(model, FP8)
    return model


@each(
    ("llama", {}, MATRICES),
    ("qwen2", {"tie_word_embeddings": True}, MATRICES),
    ("llama", {"intermediate_size": 72}, MATRICES[:4]),
    ("llama", {"num_key_value_heads": 1}, [m for m in MATRICES if m[:2] not in ("k_", "v_")]),
)
def test_suitable_layers_of_the_blocks_are_converted_and_nothing_else(kind, changes, names):
    plain = small_model(kind, **changes)
    model = model_in_fp8(kind, **changes)
    assert in_fp8(model) == [*names] * 2
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [*dict(model.named_modules())] == [*dict(plain.named_modules())]
    for name, value in model.named_parameters():
        assert type(value) is nn.Parameter and value.dtype == torch.float32
        assert torch.equal(value, plain.get_parameter(name))


@each(
    ("gpt2", {}, "no torch.nn.Linear in its blocks, but Conv1D, and torchao"),
    ("llama", {"hidden_size": 40, "head_dim": 10}, "whose two sizes are multiples of 16"),
)
def test_a_model_without_a_suitable_layer_is_refused(kind, changes, reason):
    with pytest.raises(UserError, match=reason) as caught:
        use_fp8(small_model(kind, **changes), FP8)
    assert "bf16-mixed" in caught.value.fix and caught.value.where == "training.precision"


def test_torchao_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)  # as find_spec sees it
    with pytest.raises(MissingDependencyError, match="torchao") as caught:
        use_fp8(small_model("llama"), FP8)
    assert "isles[torchao]" in caught.value.fix and caught.value.where == "training.precision"


def test_fresh_weights_are_those_of_bf16_mixed():
    """The weights of a sharded model are filled after its layers are converted."""
    found = []
    for convert in (False, True):
        model = small_model("llama")
        if convert:
            use_fp8(model, FP8)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        fill_fresh(model, 0)
        found.append(model.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@each("none", "full", "selective")
def test_one_rank_computes_in_fp8_as_many_do(checkpointing, *, world):
    found = []
    for strategy in (DDPStrategyConfig(), FSDPStrategyConfig()):
        engine = engine_of(model_in_fp8("qwen2", checkpointing), strategy, world, "fp8-mixed")
        loss, grads = learn(engine)
        assert all(p.dtype == torch.float32 for p in engine.trainable())
        found.append((loss, engine.evaluate(BATCH), grads))
    (loss, later, grads), (other_loss, other_later, other_grads) = found
    assert torch.equal(loss, other_loss) and torch.equal(later, other_later)
    assert len(grads) == len(other_grads) > 20
    assert all(map(torch.equal, grads, other_grads))
    if checkpointing != "none":
        plain = engine_of(model_in_fp8("qwen2"), DDPStrategyConfig(), world, "fp8-mixed")
        assert all(map(torch.equal, grads, learn(plain)[1]))


def losses(model: Any, precision: str, world: Any) -> list[float]:
    engine = engine_of(model, DDPStrategyConfig(), world, precision)
    found = []
    for _ in range(10):
        found.append(float(engine.forward_backward(BATCH, loss_divisor=30, is_last=True)) / 30)
        engine.optimizer_step(lr=0.01, max_norm=None)
    return found


def test_ten_steps_are_near_those_of_bf16_mixed(world):
    exact = losses(small_model("llama"), "bf16-mixed", world)
    found = losses(model_in_fp8(), "fp8-mixed", world)
    assert found != exact and exact[-1] < exact[0] - 0.2
    assert found[0] == pytest.approx(exact[0], rel=1e-3)
    assert found == pytest.approx(exact, rel=0.03), "AdamW's first steps magnify differences"


def test_the_state_has_the_names_and_types_of_bf16_mixed(world):
    for strategy in (DDPStrategyConfig(), FSDPStrategyConfig()):
        states = []
        for model, precision in ((small_model(), "bf16-mixed"), (model_in_fp8(), "fp8-mixed")):
            engine = engine_of(model, strategy, world, precision)
            learn(engine)
            engine.optimizer_step(lr=0.01, max_norm=1.0)
            states.append(engine.state_dict())
        plain, other = states
        assert plain.keys() == other.keys()
        for name, value in plain.items():
            if isinstance(value, Tensor):
                assert type(value) is type(other[name]) and value.dtype == other[name].dtype
                assert type(value) in (Tensor, nn.Parameter, DTensor), name


@each(float("nan"), float("inf"))
def test_a_loss_that_is_not_finite_still_poisons_the_gradients(value, *, world):
    """A cast that clamped it would hide it, and the optimizer would take a step."""
    model = model_in_fp8()
    model.lm_head.weight.data[5] = value
    engine = engine_of(model, DDPStrategyConfig(), world, "fp8-mixed")
    engine.forward_backward(BATCH, loss_divisor=30, is_last=True)
    inside = find_blocks(model)[0].self_attn.q_proj.weight.grad
    assert not bool(torch.isfinite(inside).any())


def test_a_micro_batch_without_targets_has_gradients_of_zero(world):
    engine = engine_of(model_in_fp8(), DDPStrategyConfig(), world, "fp8-mixed")
    nothing = Batch(IDS, torch.full_like(IDS, -100), (0, 1))
    engine.forward_backward(nothing, loss_divisor=30, is_last=True)
    assert all(not bool(gradient.any()) for gradient in gradients(engine))


def test_an_uncompiled_block_keeps_what_bf16_mixed_keeps():
    """So the memory of a step is counted as that of bf16-mixed."""
    kept = []
    for model, precision in ((small_model(), "bf16-mixed"), (model_in_fp8(), "fp8-mixed")):
        storages: dict[int, int] = {}

        def keep(value: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        use_maskless_attention(model)
        mixed = MixedPrecision(model, precision, torch.device("cpu"))
        with mixed.micro_batch(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = model.model(input_ids=IDS).last_hidden_state
        kept.append((sum(storages.values()), len(storages), out.dtype))
    assert kept[0] == kept[1]


def test_scores_for_the_export_are_without_fp8():
    layer = nn.Linear(32, 32)
    plain = copy.deepcopy(layer)
    model = nn.ModuleList([nn.Sequential(layer)])
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    x = torch.randn(4, 32)
    assert not torch.equal(model[0](x), plain(x))
    with products_of_export(model):
        assert torch.equal(model[0](x), plain(x))
    assert not torch.equal(model[0](x), plain(x))
