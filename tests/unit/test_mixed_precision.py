"""bf16-mixed on one rank: 16-bit weights compute, fp32 weights learn, as under FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.layout import Strategy, make_layout
from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch
from isles.dist.mesh import make_mesh
from isles.dist.world import World
from isles.models.adapter import add_adapter
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.base import Engine
from isles.strategies.ddp import DDPEngine
from isles.strategies.fsdp import FSDPEngine, find_blocks
from isles.strategies.mixed_precision import MixedPrecision
from tests.each import each
from tests.small_models import small_model
from tests.unit.test_counts import Casts, fake_ranks

CPU = torch.device("cpu")
IDS = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0))
BATCH = Batch(IDS, IDS, (0, 1))


def adamw(module: nn.Module) -> list[torch.optim.Optimizer]:
    trained = [p for p in module.parameters() if p.requires_grad]
    return [torch.optim.AdamW(trained, lr=0.01, fused=True)]


@pytest.fixture
def world() -> Iterator[World]:
    with fake_ranks(1) as alone:
        yield alone


def engine_of(model: Any, strategy: Strategy, world: World, precision: str) -> Engine:
    is_cut = isinstance(strategy, FSDPStrategyConfig)
    mesh = make_mesh(make_layout(strategy, 1, local_world_size=1), world, is_sharded=is_cut)
    if isinstance(strategy, FSDPStrategyConfig):
        values = {name: value.clone() for name, value in model.state_dict().items()}
        buffers = {name: value.clone() for name, value in model.named_buffers()}

        def fill(module: nn.Module) -> None:
            for name, value in (*module.named_parameters(), *module.named_buffers()):
                own: Any = value.data
                getattr(own, "_local_tensor", own).copy_((values | buffers)[name])

        return FSDPEngine(model, fill, adamw, strategy, mesh, world, precision=precision)
    assert isinstance(strategy, DDPStrategyConfig)
    return DDPEngine(model, adamw, strategy, mesh, world, precision=precision, comm_sample_every=10)


def gradients(engine: Engine) -> list[Tensor]:
    found: list[Any] = [p.grad for p in engine.trainable() if p.grad is not None]
    return [getattr(gradient, "_local_tensor", gradient).clone() for gradient in found]


def learn(engine: Engine) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of a step of two micro-batches."""
    for is_last in (False, True):
        loss = engine.forward_backward(BATCH, loss_divisor=60, is_last=is_last)
    return loss, gradients(engine)


@each("llama", "gpt2", "qwen3", "olmo2", "mixtral", "gpt_neox")
def test_one_rank_computes_as_many_do(kind, *, world):
    kinds: list[torch.dtype] = []
    found = []
    for strategy in (DDPStrategyConfig(), FSDPStrategyConfig()):
        model = small_model(kind)
        find_blocks(model)[0].register_forward_hook(
            lambda _, args, out: kinds.append((out[0] if isinstance(out, tuple) else out).dtype)
        )
        engine = engine_of(model, strategy, world, "bf16-mixed")
        loss, grads = learn(engine)
        assert all(p.dtype == torch.float32 for p in engine.trainable())
        assert all(gradient.dtype == torch.float32 for gradient in grads)
        found.append((loss, engine.evaluate(BATCH), grads))
    (loss, later, grads), (other_loss, other_later, other_grads) = found
    assert torch.equal(loss, other_loss) and torch.equal(later, other_later)
    assert len(grads) == len(other_grads) > 8
    assert all(map(torch.equal, grads, other_grads))
    assert set(kinds) == {torch.bfloat16}


def learn_in_one_context(model: Any) -> None:
    """Two micro-batches in flight, as in a pipeline."""
    with MixedPrecision(model, "bf16-mixed", CPU).micro_batch():
        for logits in [model(input_ids=IDS, use_cache=False).logits for _ in range(2)]:
            logits.float().logsumexp(-1).sum().backward()


@each(*product(("none", "selective", "full"), (False, True)))
def test_a_block_has_learned_before_the_block_before_it_goes_backward(
    checkpointing, is_one_context, *, world
):
    """So 16-bit gradients of one block exist at a time, and DDP sends while others compute."""
    model = small_model("llama", num_hidden_layers=3).train()
    set_gradient_checkpointing(model, checkpointing)
    events: list[str] = []

    def watch(name: str) -> Callable[[Any], None]:
        return lambda _: events.append(name)

    first, _, last = find_blocks(model)
    for name, module in (("head", model.lm_head), ("last", last)):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(watch(name))

    def watch_output(name: str, out: Any) -> None:
        if out.requires_grad:  # the engine first tries the model without gradients
            out.register_hook(watch(name))

    for name, block in (("first", first), ("into last", last)):
        block.register_forward_hook(lambda _, args, out, name=name: watch_output(name, out))
    if is_one_context:
        learn_in_one_context(model)
    else:
        learn(engine_of(model, DDPStrategyConfig(), world, "bf16-mixed"))
    assert events == ["head", "into last", *["last"] * 9, "first"] * 2


@each("none", "selective", "full")
def test_blocks_that_are_computed_again_use_the_same_weights(checkpointing, *, world):
    found = []
    for kind in ("none", checkpointing):
        model = small_model("llama")
        set_gradient_checkpointing(model, kind)
        found.append(learn(engine_of(model, DDPStrategyConfig(), world, "bf16-mixed")))
    (loss, grads), (again, more) = found
    assert torch.equal(loss, again) and all(map(torch.equal, grads, more))


def test_the_weights_are_back_even_if_the_forward_pass_fails():
    model = small_model("llama", tie_word_embeddings=True)
    before = dict(model.named_parameters(remove_duplicate=False))
    precision = MixedPrecision(model, "bf16-mixed", CPU)
    with contextlib.suppress(RuntimeError), precision.micro_batch():
        assert model.lm_head.weight.dtype == torch.bfloat16
        assert model.lm_head.weight is model.model.embed_tokens.weight, "tied weights stay tied"
        raise RuntimeError("out of memory")
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


@each("32-true", "bf16-true", "fp16-mixed")
def test_other_precisions_keep_the_weights_as_they_are(precision):
    model = small_model("llama")
    with MixedPrecision(model, precision, CPU).micro_batch():
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    runs = MixedPrecision(model, precision, CPU).forward()
    with runs:
        assert torch.is_autocast_enabled("cpu") == (precision == "fp16-mixed")


def layer_casts(kind: str, run: Callable[[Any], None], **changes: Any) -> float:
    """Casts that one more layer adds to a forward and a backward pass."""
    counts = []
    for layers in (2, 4):
        model = small_model(kind, num_hidden_layers=layers, **changes)
        with Casts() as casts:
            run(model)
        counts.append(casts.count)
    return (counts[1] - counts[0]) / 2


def step(model: Any) -> None:
    precision = MixedPrecision(model, "bf16-mixed", CPU)
    with precision.micro_batch(), precision.forward():
        model(input_ids=IDS).logits.float().logsumexp(-1).sum().backward()


def autocast(model: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS).logits.float().logsumexp(-1).sum()
    loss.backward()


@each("llama", "gpt_neox")
def test_a_layer_casts_only_in_its_norms(kind):
    assert layer_casts(kind, step) <= 16
    assert layer_casts(kind, autocast) > 2 * layer_casts(kind, step)


class GroupedKinds(TorchDispatchMode):
    """The types of the operands of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.found = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in func.name():
            self.found.update(x.dtype for x in args[:2])
        return func(*args, **(kwargs or {}))


STACKS = ("experts.gate_up_proj", "experts.down_proj")


@each(
    *product(
        ("mixtral", "qwen3_moe", "olmoe"),
        (DDPStrategyConfig(), FSDPStrategyConfig()),
        ("bf16-mixed", "fp16-mixed"),
        ((), ("q_proj",), ("q_proj", *STACKS)),
    )
)
def test_experts_multiply_in_16_bits(kind, strategy, precision, targets, *, world):
    """Grouped products are not on autocast's list, so autocast would compute them in fp32."""
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16
    model = small_model(kind, experts_implementation="grouped_mm")
    if targets:
        model = model.to(dtype)
        adapter = AdapterConfig(type="lora", target_modules=targets)
        add_adapter(model, adapter, dtype=torch.float32, name="")
    engine = engine_of(model, strategy, world, precision)
    with GroupedKinds() as kinds:
        _, grads = learn(engine)
    assert kinds.found == {dtype}
    assert grads and all(gradient.dtype == torch.float32 for gradient in grads)


def test_an_adapter_computes_in_16_bits_and_learns_in_32(world):
    model = small_model("llama").to(torch.bfloat16)
    add_adapter(model, AdapterConfig(type="lora"), dtype=torch.float32, name="")
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    engine = engine_of(model, DDPStrategyConfig(), world, "bf16-mixed")
    with Casts() as casts:
        _, grads = learn(engine)
    assert grads and all(gradient.dtype == torch.float32 for gradient in grads)
    assert casts.count
