"""The memory of a step on paper, beside what a real step keeps: `benchmarks/plan_memory.py` does so
in hundreds of settings, of which a few are held here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.config.layout import make_layout
from isles.config.memory import step_memory
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.facts.memory.architecture import KINDS, Architecture, UnknownShapeError
from isles.facts.models import load_shape

ROOT = Path(__file__).parents[2]
LLAMA_8B = Architecture.of(load_shape("llama-8b"))


def run_config(**training: Any) -> RunConfig:
    return RunConfig(
        model={"name_or_path": "llama-8b"},
        data={"sources": ({"type": "fake"},), "seq_length": 2048},
        training={"max_steps": 1, **training},
    )


def load_benchmark(name: str) -> Any:
    """A file of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The benchmark that counts."""
    yield load_benchmark("plan_memory")
    del sys.modules["plan_memory"]


def test_every_kind_has_as_many_numbers_as_transformers_gives_it(benchmark: Any) -> None:
    from transformers import AutoModelForCausalLM

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


SETTINGS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("llama", {"gradient_checkpointing": "selective"}, {}),
    ("gemma2", {"precision": "bf16-true", "gradient_checkpointing": "full"}, {}),
    ("qwen3", {}, {"adapter": {"type": "lora", "dropout": 0.1}}),
    ("phi3", {}, {"strategy": FSDPStrategyConfig(), "ranks": 4}),
    ("gpt2", {"precision": "32-true"}, {}),
    ("llama", {"gradient_checkpointing": "full"}, {"adapter": {"type": "qlora"}}),
    ("qwen3", {}, {"strategy": DDPStrategyConfig(pp_size=2), "ranks": 2}),
    ("qwen3", {}, {"strategy": FSDPStrategyConfig(cp_size=2), "ranks": 4}),
    ("llama", {"optimizer": "adamw_8bit"}, {}),
    ("qwen2", {}, {"packs": True}),
)


@pytest.mark.brief("some")
@pytest.mark.parametrize("settings", [SETTINGS[:4], SETTINGS[4:]], ids=["some", "others"])
def test_the_peak_of_a_step_is_that_of_a_real_one(benchmark: Any, settings: tuple[Any, ...]):
    for kind, training, more in settings:
        case = benchmark.Case("", kind, rows=1, length=256, training=training, **more)
        shape = benchmark.hf_config(case)
        with benchmark.as_a_gpu_keeps_it():
            real = benchmark.counted(case, shape)
        paper, what = benchmark.on_paper(case, shape), (kind, training, more)
        assert paper.peak.total == pytest.approx(real.peak, rel=benchmark.BAR), what
        assert paper.saved == pytest.approx(real.saved, rel=0.01), what


def test_peaks_that_others_have_measured() -> None:
    """Of other trainers, whose step differs from isles' in ways that are not all written down."""
    published = load_benchmark("plan_published")
    del sys.modules["plan_published"]
    off = {
        peak.name: paper / peak.measured - 1
        for peak in published.PEAKS
        for paper, _ in [published.on_paper(peak)]
    }
    far = {name for name, error in off.items() if abs(error) > published.BAR}
    assert far == {"Mistral-7B LoRA, 4x4096, FSDP 2"}, off
    assert len(off) - len(far) >= 10


def test_what_each_way_to_save_memory_saves() -> None:
    """Of Llama 3 8B: 16 bytes a weight for AdamW, 2 for autocast's copy; less where more is cut."""

    def peak(strategy: Any = None, ranks: int = 1, **training: Any) -> float:
        strategy = strategy or DDPStrategyConfig()
        layout = make_layout(strategy, ranks, local_world_size=8)
        config = run_config(**training)
        return step_memory(LLAMA_8B, config, strategy, layout, rows=1).peak.total

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
    layout = make_layout(offloaded, 8, local_world_size=8)
    assert step_memory(LLAMA_8B, run_config(), offloaded, layout, rows=1).host == pytest.approx(
        16 * LLAMA_8B.params / 8
    )


def test_a_config_that_does_not_say_its_size_and_a_kind_that_nobody_knows() -> None:
    with pytest.raises(UnknownShapeError, match="hidden_size, vocab_size"):
        Architecture.of({"num_hidden_layers": 2, "num_attention_heads": 2})
    guess = Architecture.of({**load_shape("llama-15m"), "model_type": "llama_next"})
    assert not guess.is_known
    assert guess.with_params(20_000_000).params == pytest.approx(20_000_000, abs=guess.layers)
    assert Architecture.opaque(123_456).params == 123_456
