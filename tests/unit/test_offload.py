"""`gradient_checkpointing: offload`: block inputs are in main memory until the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.models import recompute
from isles.models.adapter import add_adapter
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.fsdp import find_blocks
from tests.each import each
from tests.small_models import small_model
from tests.unit.test_counts import fake_ranks
from tests.unit.test_mixed_precision import engine_of, learn

IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def model_of(kind: str, checkpointing: str, *, has_adapter: bool = False) -> Any:
    model = small_model(kind, num_hidden_layers=3, sliding_window=64)
    if has_adapter:
        add_adapter(model, AdapterConfig(type="lora"), dtype=torch.float32, name="")
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
    set_gradient_checkpointing(model.train(), checkpointing)
    return model


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum()
    return loss


@each(
    ("llama", False), ("llama", True), ("gpt2", False), ("mixtral", False), ("gemma3_text", False)
)
def test_the_gradients_are_those_of_full(kind, has_adapter):
    found = []
    for checkpointing in ("full", "offload"):
        model = model_of(kind, checkpointing, has_adapter=has_adapter)
        loss_of(model).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 5
    assert all(map(torch.equal, *found))


@each(DDPStrategyConfig(), FSDPStrategyConfig())
def test_every_engine_can_offload(strategy):
    with fake_ranks(1) as world:
        found = []
        for checkpointing in ("full", "offload"):
            engine = engine_of(model_of("llama", checkpointing), strategy, world, "bf16-mixed")
            found.append(learn(engine))
    (loss, grads), (again, more) = found
    assert torch.equal(loss, again) and all(map(torch.equal, grads, more))


@each(("full", 3), ("offload", 0))
def test_inputs_of_blocks_leave_the_device(checkpointing, expected):
    model = model_of("llama", checkpointing)
    given: list[Any] = []
    for block in find_blocks(model):
        block.register_forward_pre_hook(lambda _, args: given.append(weakref.ref(args[0])))
    loss = loss_of(model)
    assert len(given) == 3
    alive = [ref() for ref in given]
    assert sum(x is not None for x in alive) == expected
    del alive
    loss.backward()


def test_only_the_inputs_are_copied(monkeypatch):
    sizes: list[int] = []
    make = recompute._Kept.__init__

    def count(self: Any, value: Tensor) -> None:
        sizes.append(value.numel())
        make(self, value)

    monkeypatch.setattr(recompute._Kept, "__init__", count)
    loss_of(model_of("llama", "offload")).backward()
    assert sizes == [IDS.numel() * 32] * 3
