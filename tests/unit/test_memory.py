"""The memory of a step on paper, beside what a real step keeps: `benchmarks/plan_memory.py` does so
in hundreds of settings, of which a few are held here."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from isles.config.layout import make_layout
from isles.config.memory import step_memory
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.dist.mesh import make_mesh
from isles.dist.world import leave_world
from isles.facts.memory.architecture import KINDS, Architecture, UnknownShapeError
from isles.facts.memory.setting import BUCKET_NUMBERS
from isles.facts.models import load_shape
from isles.train.strategy import make_engine
from tests.documents import ROOT

# Last, so that no benchmark stands in the way of a package of its name.
sys.path.append(str(ROOT / "benchmarks"))
import plan_memory as benchmark
import plan_published as published

LLAMA_8B = Architecture.of(load_shape("llama-8b"))


def test_every_kind_has_as_many_numbers_as_transformers_gives_it():
    wrong = {}
    for kind in KINDS:
        if kind == "helium":  # the same as Llama, and heavy in its default sizes
            continue
        shape = benchmark.hf_config(benchmark.Case("", kind))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
        real = sum(p.numel() for p in model.parameters())
        if (paper := Architecture.of(shape.to_dict()).params) != real:
            wrong[kind] = (paper, real)
    assert not wrong


LORA = {"type": "lora"}
STACKS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
LONG = {"rows": 2, "length": 1024, "packs": True}
SETTINGS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("llama", {"gradient_checkpointing": "selective"}, {}),
    ("gemma2", {"precision": "bf16-true", "gradient_checkpointing": "full"}, {}),
    ("phi3", {}, {"strategy": FSDPStrategyConfig(), "ranks": 4}),
    ("qwen3", {}, {"adapter": {"type": "lora", "dropout": 0.1}}),
    ("gpt2", {"precision": "32-true"}, {}),
    ("llama", {"gradient_checkpointing": "full"}, {"adapter": {"type": "qlora"}}),
    ("qwen3", {}, {"strategy": DDPStrategyConfig(pp_size=2), "ranks": 2}),
    ("qwen3", {}, {"strategy": FSDPStrategyConfig(pp_size=2), "ranks": 2}),
    ("llama", {}, {"strategy": DDPStrategyConfig(pp_size=2), "ranks": 2, "adapter": LORA}),
    ("qwen3", {}, {"strategy": FSDPStrategyConfig(cp_size=2), "ranks": 4}),
    ("llama", {}, {"strategy": FSDPStrategyConfig(cp_size=2), "ranks": 4, **LONG}),
    ("gemma", {}, {"strategy": DDPStrategyConfig(pp_size=2), "ranks": 2, "micro_batches": 6}),
    ("llama", {}, {"adapter": {"type": "qlora"}, "strategy": FSDPStrategyConfig(), "ranks": 2}),
    ("llama", {"optimizer": "adamw_8bit"}, {}),
    ("qwen2", {}, {"packs": True}),
    ("mixtral", {}, {"adapter": {"type": "lora", "target_modules": STACKS}}),
)


@pytest.mark.brief("some")
@pytest.mark.parametrize("settings", [SETTINGS[:3], SETTINGS[3:]], ids=["some", "others"])
def test_the_peak_of_a_step_is_that_of_a_real_one(settings):
    for kind, training, more in settings:
        case = benchmark.Case("", kind, **{"rows": 1, "length": 256, "training": training, **more})
        shape = benchmark.hf_config(case)
        try:
            with benchmark.as_a_gpu_keeps_it():
                real = benchmark.counted(case, shape)
        finally:
            leave_world()  # the next setting has a process group of its own
        paper, what = benchmark.on_paper(case, shape), (kind, training, more)
        assert paper.peak.total == pytest.approx(real.peak, rel=benchmark.BAR), what
        assert paper.saved == pytest.approx(real.saved, rel=0.01), what


WIDE = 2 * BUCKET_NUMBERS
"""Numbers of an embedding that travels in two messages."""


def _messages(kind: str, strategy: Any, ranks: int, place: int) -> tuple[float, float]:
    """Bytes of the buffers after the backward pass of a stage, really and on paper."""
    case = benchmark.Case("", kind, rows=1, length=16, strategy=strategy, ranks=ranks)
    shape = benchmark.hf_config(case)
    shape.update({"vocab_size": WIDE // 64, "hidden_size": 64, "intermediate_size": 64})
    world = benchmark._world(ranks, place, alone=False)
    try:
        mesh = make_mesh(
            make_layout(strategy, ranks, local_world_size=ranks), world, is_sharded=False
        )
        model = benchmark._empty_model(case, shape)
        with FakeTensorMode(allow_non_fake_inputs=True):
            benchmark._allocate(model)
            engine: Any = make_engine(
                strategy,
                model,
                lambda module: None,
                lambda module: [torch.optim.SGD(module.parameters())],
                mesh,
                world,
                case.config(),
            )
            for parameter in engine.trainable():
                parameter.grad = torch.zeros_like(parameter)
            if engine._tied is not None and engine._tied._copy is not None:
                engine._tied._copy.grad = torch.zeros_like(engine._tied._copy)
            held = [x for p in engine.model.parameters() for x in (p, p.grad) if x is not None]
            with benchmark.Tracker(held) as tracker:
                before = tracker.peak
                if engine._tied is not None:
                    engine._tied.send_gradient()
                engine._whole.add_gradients(engine.trainable())
                if engine._tied is not None:
                    engine._tied.send_weight()
        paper = benchmark.on_paper(case, shape, mesh.place.pp)
        named = {moment.name: moment for moment in paper.moments}
        end = named["the end of the backward pass, with the exchange of gradients"]
        return tracker.peak - before, end.gradients - named["the optimizer's step"].gradients
    finally:
        leave_world()


def test_messages_after_the_backward_pass_have_buffers_of_32_mib():
    """An embedding of twice that size: the first stage of a tied head, and stages on two ranks."""
    for kind, ranks, place in (("gemma", 2, 0), ("llama", 4, 0), ("llama", 4, 3), ("gemma", 4, 0)):
        real, paper = _messages(kind, DDPStrategyConfig(pp_size=2), ranks, place)
        assert real <= paper == 4 * BUCKET_NUMBERS, (kind, ranks, place)


def test_stacks_of_experts_are_counted_in_16_bits_next_to_matrices_in_four():
    """The bytes of the model that the ranks have before a step, by its parameters."""
    cut = FSDPStrategyConfig()
    case = benchmark.Case("", "mixtral", adapter={"type": "qlora"}, strategy=cut, ranks=2)
    shape = benchmark.hf_config(case)
    held = sum(p.nbytes for p in benchmark._empty_model(case, shape).parameters())
    paper = case.ranks * benchmark.on_paper(case, shape).peak.weights
    assert paper == pytest.approx(held, rel=0.01)


def test_peaks_that_others_have_measured():
    """Of other trainers, whose step differs from isles' in ways that are not all written down."""
    off = {p.name: published.on_paper(p)[0] / p.measured - 1 for p in published.PEAKS}
    far = {name for name, error in off.items() if abs(error) > published.BAR}
    assert far == {"Mistral-7B LoRA, 4x4096, FSDP 2"}, off
    assert len(off) - len(far) >= 10


def test_what_each_way_to_save_memory_saves():
    """Of Llama 3 8B: 16 bytes a weight for AdamW, 2 for autocast's copy; less where more is cut."""

    def memory(strategy: Any, ranks: int, **training: Any) -> Any:
        layout = make_layout(strategy, ranks, local_world_size=8)
        data = {"sources": ({"type": "fake"},), "seq_length": 2048}
        training = {"max_steps": 1, **training}
        config = RunConfig(model={"name_or_path": "llama-8b"}, data=data, training=training)
        return step_memory(LLAMA_8B, config, strategy, layout, rows=1)

    def peak(strategy: Any = None, ranks: int = 1, **training: Any) -> float:
        return memory(strategy or DDPStrategyConfig(), ranks, **training).peak.total

    full = peak(gradient_checkpointing="full")
    assert 18 < full / LLAMA_8B.params < 18.6
    assert full < peak(gradient_checkpointing="selective") < peak()
    assert peak(precision="bf16-true") < 0.6 * peak()
    assert peak(optimizer="adamw_8bit") < peak() - 5 * LLAMA_8B.params
    cut = [peak(FSDPStrategyConfig(), ranks) for ranks in (2, 4, 8, 16)]
    assert cut == sorted(cut, reverse=True)
    gathered = peak(FSDPStrategyConfig(sharding_strategy="SHARD_GRAD_OP"), 8)
    assert cut[2] < gathered < peak()
    zero = [DeepSpeedStrategyConfig(zero_stage=stage) for stage in (1, 2, 3)]
    stages = [peak(own, 8, gradient_checkpointing="full") for own in zero]
    assert stages == sorted(stages, reverse=True)
    offloaded = FSDPStrategyConfig(cpu_offload=True)
    assert peak(offloaded, 8) < cut[2]
    assert memory(offloaded, 8).host == pytest.approx(16 * LLAMA_8B.params / 8)


def test_a_config_that_does_not_say_its_size_and_a_kind_that_nobody_knows():
    with pytest.raises(UnknownShapeError, match="hidden_size, vocab_size"):
        Architecture.of({"num_hidden_layers": 2, "num_attention_heads": 2})
    guess = Architecture.of({**load_shape("llama-15m"), "model_type": "llama_next"})
    assert not guess.is_known
    assert guess.with_params(20_000_000).params == pytest.approx(20_000_000, abs=guess.layers)
    assert Architecture.opaque(123_456).params == 123_456
