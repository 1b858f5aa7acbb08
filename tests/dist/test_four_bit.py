"""Sharded weights in 4 bits: the adapter of one process however the ranks hold the frozen model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.world import join_world
from isles.models.build import build_empty_model, fill_model
from isles.models.four_bit import FourBitLinear
from isles.run.env import RankEnv
from isles.strategies.fsdp import allocate, shard_model
from isles.train.strategy import resolve_mesh
from tests.dist.test_adapter import LORA
from tests.dist.test_same_mathematics import (
    TOLERANCE,
    figures_of,
    give_weights,
    largest_difference,
    weights_of,
)
from tests.dist.test_strategies import check, preference_file  # noqa: F401  # a fixture
from tests.dist.test_strategy_resume import STRATEGIES, check_chain
from tests.ranks import run_ranks, train
from tests.small_models import small_config, small_model

QLORA = (*LORA, "adapter.type=qlora")
KINDS = {
    "nf4": (),
    "fp4": ("adapter.bnb_4bit_quant_type=fp4", "adapter.bnb_4bit_use_double_quant=false"),
    # With three times the rate, 20 steps make the rounding of context parallel twenty times larger.
    "dora": (
        "adapter.use_dora=true",
        "adapter.modules_to_save=[lm_head]",
        "training.learning_rate=0.003",
    ),
}
# Rows that are no whole blocks of 64 numbers, and blocks that are no whole shards.
SHAPE = {"hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 4, "head_dim": 18}


def give_base(run_file: Path, **shape: int) -> None:
    """Weights and a tokenizer of bytes."""
    give_weights(run_file, **SHAPE, **shape)
    train_tokenizer(["some words"], 260).save_pretrained(run_file.parent / "tiny")


@pytest.mark.brief("fsdp 2-nf4", "fsdp 3-fp4", "offload 2-dora", "pp 2-nf4")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        *("fsdp 2", "fsdp 3", "zero2-like 2", "offload 2", "offload 1", "hsdp 4", "cp 2"),
        *("pp 2", "fsdp-pp 4", "zbv 2"),
    ],
)
def test_sharded_four_bits_train_the_adapter_of_one_process(run_file, how, kind):
    """After 20 steps, with activations that are computed again."""
    name, ranks = how.split()
    # The schedule zbv has two stages on each rank.
    give_base(run_file, **({"num_hidden_layers": 4} if name == "zbv" else {}))
    options = (*QLORA, *KINDS[kind])
    reference = train(run_file, 1, *options)
    losses = figures_of(reference)
    assert losses[-1] < losses[0] - 0.1
    assert not any("_4bit" in weight for weight in weights_of(reference))
    options += ("training.gradient_checkpointing=full",)
    check(run_file, reference, int(ranks), STRATEGIES[name], *options)


def test_a_run_in_four_bits_resumes_under_ddp_and_fsdp_on_any_ranks(run_file):
    give_base(run_file)
    links = [("ddp", 2), ("fsdp", 2), ("fsdp", 3), ("pp", 2), ("ddp", 1)]
    check_chain(run_file, [(STRATEGIES[name], ranks) for name, ranks in links], *QLORA)


@pytest.mark.long
def test_dpo_on_sharded_four_bits(preference_file):  # noqa: F811
    give_base(preference_file)
    options = ("model.init=pretrained", "adapter={type: qlora, r: 4, alpha: 8}")
    options += ("tokenizer={chat_template: chatml}",)
    alone = train(preference_file, 1, "name=alone", "strategy.kind=ddp", *options)
    losses = figures_of(alone)
    assert losses[-1] < losses[0] - 0.1
    many = train(preference_file, 2, "name=many", "strategy.kind=fsdp", *options, resume="no")
    assert largest_difference(alone, many) < TOLERANCE


def _filled(env: RankEnv, model: Path) -> tuple[dict[str, list[int]], int, int]:
    """A GPT-2 or a mixture in bf16 compute: its parts on this rank; and the reads of one layer."""
    world = join_world(env, device="cpu", timeout_s=60)
    config = ModelConfig(name_or_path=str(model), init="pretrained")
    adapter = AdapterConfig(type="qlora", r=4)
    types = {"dtype": torch.float32, "frozen_dtype": torch.bfloat16}
    built = build_empty_model(config, **types, vocab_size=None, adapter=adapter)
    strategy = FSDPStrategyConfig()
    mesh = resolve_mesh(strategy, world)
    shard_model(built, strategy, mesh, world.device, precision="bf16-mixed")
    allocate(built, world.device)
    read: list[int] = []
    fill = FourBitLinear.fill

    def counted(layer: FourBitLinear, read_part: object) -> None:
        def counting(shape: tuple[int, ...], part: tuple[slice, ...]) -> torch.Tensor:
            found: torch.Tensor = read_part(shape, part)  # type: ignore[operator]
            read.append(found.numel())
            return found

        fill(layer, counting)

    FourBitLinear.fill = counted  # type: ignore[method-assign, assignment]
    try:
        fill_model(built, config, seed=0)
    finally:
        FourBitLinear.fill = fill  # type: ignore[method-assign]
    layers = [module for module in built.modules() if isinstance(module, FourBitLinear)]
    parts = {
        name: value.to_local().view(torch.uint8).flatten().tolist()  # type: ignore[attr-defined]
        for name, value in built.named_parameters()
        if "_4bit" in name
    }
    return parts, sum(read), sum(layer.numbers for layer in layers)


@pytest.mark.parametrize("kind", ["gpt2", "mixtral"])
def test_each_rank_reads_and_quantizes_its_own_blocks(tmp_path, kind):
    """The bytes of all ranks together are those of a single rank."""
    import transformers

    torch.manual_seed(0)
    config = small_config(kind)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    [(whole, _, _)] = run_ranks(_filled, 1, tmp_path / "model")
    ranks = run_ranks(_filled, 3, tmp_path / "model")
    for name, value in whole.items():
        assert [number for parts, _, _ in ranks for number in parts[name]] == value, name
    numbers = ranks[0][2]
    for _, read, _ in ranks:
        # Rows at the borders of a part are read by two ranks.
        assert read < numbers * 0.6


def _loaded(env: RankEnv, model: Path) -> int:
    """The most main memory that a rank takes while it loads its part, beyond what it had."""
    world = join_world(env, device="cpu", timeout_s=60)
    config = ModelConfig(name_or_path=str(model), init="pretrained")
    adapter, strategy = AdapterConfig(type="qlora", r=4), FSDPStrategyConfig()
    built = build_empty_model(config, dtype=torch.float32, vocab_size=None, adapter=adapter)
    shard_model(built, strategy, resolve_mesh(strategy, world), world.device, precision="32-true")
    Path("/proc/self/clear_refs").write_text("5")  # forget the most there was
    before = _status("VmRSS")
    allocate(built, world.device)
    fill_model(built, config, seed=0)
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def test_loading_in_four_bits_takes_far_less_main_memory_than_the_model(tmp_path):
    """Each of two ranks: less than half of the 16-bit weights, although it computes in 32 bits."""
    model = small_model(hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, head_dim=64)
    model.bfloat16().save_pretrained(tmp_path / "model")
    size = sum(p.numel() * 2 for p in model.parameters())
    assert size > 300e6
    del model
    for taken in run_ranks(_loaded, 2, tmp_path / "model"):
        assert taken < size / 2, (taken, size)
