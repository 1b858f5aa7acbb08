"""Adapters over strategies: the same small matrices however a cluster holds the frozen model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from isles.checkpoint.export import read_trained
from isles.config.layout import Strategy
from isles.config.resolve import load_resolved
from isles.config.sections.model import AdapterConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.batch import Batch
from isles.dist.world import join_world
from isles.errors import TrainingError
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.train.finish import export_step
from isles.train.model import whole_model
from tests.deadline import run_program
from tests.dist.test_resume import same_bits, whole_and_resumed
from tests.dist.test_same_mathematics import (
    TOLERANCE,
    check_that_it_learns,
    figures_of,
    give_weights,
    largest_difference,
    weights_of,
)
from tests.dist.test_strategies import check
from tests.dist.test_strategy_resume import CONSTANT, STRATEGIES, check_chain
from tests.engines import engine_of, fake_run
from tests.ranks import refusal, run_ranks, train
from tests.small_models import small_config

LORA = ("adapter.type=lora", "adapter.r=4", "adapter.alpha=8", "training.learning_rate=0.01")
LORA += ("model.init=pretrained", "tokenizer={}")


@pytest.fixture
def base(run_file: Path, tiny_model: Path) -> Path:
    """The tiny model with weights and a tokenizer of bytes."""
    give_weights(run_file)
    train_tokenizer(["some words"], 260).save_pretrained(tiny_model)
    return tiny_model


@pytest.mark.brief("fsdp")
@pytest.mark.parametrize(
    "names",
    [
        ("fsdp",),
        ("ddp", "cp", "tp", "copies"),
        ("zero1", "zero2", "zero3"),
        ("pp", "fsdp-pp", "zbv", "interleaved"),
    ],
    ids=" ".join,
)
def test_every_strategy_trains_the_adapter_of_one_process(run_file, base, names):
    """After 20 steps, with unequal rows and recomputed activations where that is possible."""
    if "zbv" in names:
        give_weights(run_file, num_hidden_layers=4)
    reference = train(run_file, 1, *LORA)
    assert all(".lora_" in name for name in weights_of(reference))
    losses = figures_of(reference)
    assert losses[-1] < losses[0] - 0.1
    for name in names:
        options = LORA
        if name in ("ddp", "fsdp", "zero3"):
            options += ('balance={"0": 3, "1": 1}', "training.gradient_checkpointing=full")
        check(run_file, reference, 2, STRATEGIES[name], *options)


@pytest.mark.parametrize("last", [0, 1])
def test_a_stage_may_have_nothing_to_train(run_file: Path, base: Path, last: int) -> None:
    """Its neighbor has the only adapters: of the first layer, or of the last."""
    only = (f"adapter.target_modules=[layers.{last}.self_attn.q_proj,layers.{last}.mlp.up_proj]",)
    reference = train(run_file, 1, *LORA, *only)
    assert all(f".layers.{last}." in name for name in weights_of(reference))
    for name in ("pp", "fsdp-pp"):
        options = ("training.gradient_checkpointing=full",) if name == "pp" else ()
        check(run_file, reference, 2, STRATEGIES[name], *LORA, *only, *options)


@pytest.mark.long
def test_any_strategy_goes_on_from_any_other(run_file: Path, base: Path) -> None:
    links = [("ddp", 2), ("pp", 2), ("fsdp", 2), ("zero3", 2), ("ddp", 1)]
    check_chain(run_file, [(STRATEGIES[name], ranks) for name, ranks in links], *LORA)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_same_ranks_resume_bit_for_bit_and_on_the_same_base(run_file, base, name):
    """With dropout, whose random numbers go on too; other weights of the same shape are refused."""
    options = (*LORA, *CONSTANT, "adapter.dropout=0.2", f"strategy={STRATEGIES[name]}")
    once, resumed = whole_and_resumed(run_file, *options)
    assert same_bits(once, resumed)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] += 0.001
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    error = refusal(run_file, 2, *options, "training.max_steps=30", resume=str(once.path))
    assert "this adapter was trained with other weights" in error["what"]
    assert str(base) in error["what"] and "restore the model" in error["fix"]


class _Traffic(TorchDispatchMode):
    """Bytes that each kind of collective operation is handed, in tensors of more than a few."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [t.numel() * t.element_size() for t in tree_leaves(args) if torch.is_tensor(t)]
            name = func._schema.name.removeprefix("c10d::")
            self.num_bytes[name] = self.num_bytes.get(name, 0) + max(sizes)
        return func(*args, **(kwargs or {}))


def _traffic_of_a_step(env: RankEnv, model: Path, strategy: Strategy) -> tuple[dict[str, int], int]:
    """What travels in the second step, and the bytes of what is trained."""
    world = join_world(env, device="cpu", timeout_s=60)
    config = fake_run(model, AdapterConfig(type="lora", r=4), precision="32-true")
    engine: Any = engine_of(config, strategy, world)
    trained = sum(p.numel() * 4 for p in engine.model.parameters() if p.requires_grad)
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        with _Traffic() as traffic:
            engine.forward_backward(Batch(ids, ids, (0, 1)), loss_divisor=64, is_last=True)
        engine.optimizer_step(lr=1e-3, max_norm=1.0)
    return traffic.num_bytes, trained


def test_only_gradients_of_the_adapter_travel(base: Path) -> None:
    for traffic, trained in run_ranks(_traffic_of_a_step, 2, base, DDPStrategyConfig()):
        assert traffic.pop("allreduce_") == trained
        assert sum(traffic.values()) < 1000  # buffers and the like
    for traffic, trained in run_ranks(_traffic_of_a_step, 2, base, FSDPStrategyConfig()):
        assert traffic.pop("_reduce_scatter_base_") == trained
        assert traffic.keys() == {"_allgather_base_"}  # of parameters, which are cut


def _gathers_of_frozen_ends(env: RankEnv, model: Path) -> list[dict[str, int]]:
    """How often an evaluation and two steps gather the embedding and the head."""
    world = join_world(env, device="cpu", timeout_s=60)
    training = {"precision": "32-true", "gradient_checkpointing": "full"}
    config = fake_run(model, AdapterConfig(type="lora", r=4), **training)
    engine: Any = engine_of(config, FSDPStrategyConfig(), world)
    ids = torch.arange(32).view(2, 16)
    batch, found = Batch(ids, ids, (0, 1)), []

    def counted(action: Callable[[], Any]) -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            action()
        names = [event.name for event in profile.events() if "FSDP::all_gather (" in event.name]
        ends = ("embed_tokens", "lm_head")
        found.append({end: sum(end in name for name in names) for end in ends})

    def step() -> None:
        engine.forward_backward(batch, loss_divisor=64, is_last=True)
        engine.optimizer_step(lr=1e-3, max_norm=1.0)

    for action in (lambda: engine.evaluate(batch), step, step):
        counted(action)
    return found


def test_frozen_ends_are_gathered_one_after_the_other_and_not_for_the_backward_pass(base: Path):
    """Each is gathered into a buffer of its size first, so that both take a lot of memory."""
    once = {"embed_tokens": 1, "lm_head": 1}
    for found in run_ranks(_gathers_of_frozen_ends, 2, base):
        # The first pass tries whether the head is last, and frees it again.
        assert found == [{"embed_tokens": 2, "lm_head": 2}, once, once]


EXPORTS = {
    "whole": ("ddp", ("adapter.modules_to_save=[lm_head,norm]",)),
    "dora": ("zero3", ("adapter.use_dora=true", "adapter.target_modules=[q_proj,lm_head]")),
    "rslora": ("fsdp", ("adapter.use_rslora=true", "adapter.target_modules=[embed_tokens,v_proj]")),
    "stages": ("pp", ("adapter.use_dora=true", "adapter.modules_to_save=[lm_head]")),
    "cut": ("fsdp", ("adapter.use_dora=true", "adapter.modules_to_save=[embed_tokens,lm_head]")),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTS)
def test_what_is_exported_answers_as_it_was_trained(run_file: Path, base: Path, name: str) -> None:
    """The adapter alone beside its model, and merged into it; trained by one process or two."""
    strategy, options = EXPORTS[name]
    options += (*LORA, "checkpoint.export_on_finish=true", "training.max_steps=8")
    run_dir = train(run_file, 2, *options, f"strategy={STRATEGIES[strategy]}")
    reference = train(run_file, 1, *options, resume="no")
    assert largest_difference(reference, run_dir) < TOLERANCE
    assert not (run_dir.model / "model.safetensors").exists()
    described = json.loads((run_dir.model / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    before = AutoModelForCausalLM.from_pretrained(base)
    exported = with_adapter(base, run_dir)
    assert float((logits_of(exported) - logits_of(before)).abs().max()) > 0.01
    resolved = load_resolved(run_dir.resolved.read_text())
    checkpoint = find_checkpoint(run_dir, None)
    trained = whole_model(resolved.config, None, torch.device("cpu"))
    read_trained(trained, checkpoint.path)
    assert_same_answers(trained.eval(), exported)
    merged = run_file.parent / "merged"
    export_step(run_dir, resolved, None, checkpoint.step, merged, merge=True)
    assert_same_answers(AutoModelForCausalLM.from_pretrained(merged), exported)
    # Neither form of an adapter that computes otherwise than the trained one is an export.
    config = resolved.config
    larger = config.adapter.model_copy(update={"alpha": 4 * config.adapter.alpha})
    other = replace(resolved, config=config.model_copy(update={"adapter": larger}))
    for merge in (False, True):
        with pytest.raises(TrainingError, match=r"probabilities of a probe differ by \d"):
            export_step(run_dir, other, None, checkpoint.step, merged, merge=merge)


def with_adapter(base: Path, run_dir: RunDir) -> Any:
    """The base model with the adapter that a run has exported, as peft puts it together."""
    from peft import PeftModel  # three seconds for each worker that only collects this file

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run_dir.model)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    logits: Tensor = model(torch.arange(64).view(2, 32)).logits
    return logits


def assert_same_answers(one: Any, other: Any) -> None:
    torch.testing.assert_close(logits_of(one), logits_of(other), rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3"])
def test_a_frozen_model_in_bf16_learns_and_is_merged(run_file, base, name):
    """Weights that are trained stay in fp32 beside it."""
    options = (*LORA, "training.precision=bf16-mixed", "adapter.modules_to_save=[lm_head]")
    export = ("checkpoint.export_on_finish=true", "checkpoint.merge_adapter=true")
    export += ("checkpoint.export_dtype=bfloat16",)  # else as the files of the base
    run_dir = check_that_it_learns(run_file, *options, *export, f"strategy={STRATEGIES[name]}")
    assert {value.dtype for value in weights_of(run_dir).values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    assert model.dtype == torch.bfloat16
    assert not any("lora" in key for key in model.state_dict())


def verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A worker command, as `isles` starts it."""
    return run_program([sys.executable, "-m", "isles.train.verbs", *arguments])


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_qlora_from_the_first_step_to_the_export(run_file: Path, base: Path, name: str) -> None:
    """In 4 bits on two ranks; resumed bit for bit; every command works on what it leaves."""
    options = (*LORA, *CONSTANT, "adapter.type=qlora", "adapter.use_dora=true")
    options += (f"strategy={STRATEGIES[name]}",)
    once, again = whole_and_resumed(run_file, *options, "checkpoint.export_on_finish=true")
    assert same_bits(once, again)
    losses = figures_of(once)
    assert losses[-1] < losses[0] - 0.1
    merged, run = run_file.parent / "merged", str(once.path)
    result = verb("export", run, "--merge-adapter", f"--output={merged}")
    assert result.returncode == 0, result.stderr
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert getattr(whole.config, "quantization_config", None) is None
    assert_same_answers(whole, with_adapter(base, once))
    result = verb("generate", run, "--prompt=abc", "--max-new-tokens=5", "--temperature=0")
    assert result.returncode == 0 and result.stdout.startswith("abc"), result.stderr
    result = verb("eval", run)
    assert result.returncode == 0 and "validation loss" in result.stdout, result.stderr


STACKS = "adapter.target_modules=[all-linear, experts.gate_up_proj, experts.down_proj]"


@pytest.fixture
def mixture(run_file: Path) -> Path:
    """A base whose layers have experts."""
    torch.manual_seed(0)
    folder = run_file.parent / "tiny"
    config = small_config("qwen3_moe", vocab_size=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    train_tokenizer(["some words"], 260).save_pretrained(folder)
    return folder


@pytest.mark.brief("fsdp")
@pytest.mark.parametrize("names", [("fsdp",), ("ddp", "cp", "zero1", "zero2")], ids=" ".join)
def test_every_strategy_trains_the_adapters_of_experts(run_file, mixture, names):
    reference = train(run_file, 1, *LORA, STACKS)
    assert any("experts" in name for name in weights_of(reference))
    for name in names:
        check(run_file, reference, 2, STRATEGIES[name], *LORA, STACKS)
    zero = f"strategy={STRATEGIES['zero3']}"
    error = refusal(run_file, 2, *LORA, STACKS, zero, resume="no")
    assert "zero_stage 3 does not support adapters of stacked experts" in error["what"]


@pytest.mark.brief("fsdp")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_adapters_of_experts_are_resumed_and_exported(run_file, mixture, strategy):
    options = (*LORA, *CONSTANT, STACKS, f"strategy={STRATEGIES[strategy]}")
    export = "checkpoint.export_on_finish=true"
    whole, resumed = whole_and_resumed(run_file, *options, export)
    assert same_bits(whole, resumed)
    resolved = load_resolved(whole.resolved.read_text())
    checkpoint = find_checkpoint(whole, None)
    trained = whole_model(resolved.config, None, torch.device("cpu"))
    read_trained(trained, checkpoint.path)
    exported = with_adapter(mixture, whole)
    before = AutoModelForCausalLM.from_pretrained(mixture)
    assert float((logits_of(exported) - logits_of(before)).abs().max()) > 0.01
    assert_same_answers(trained.eval(), exported)
    merged = run_file.parent / "merged"
    export_step(whole, resolved, None, checkpoint.step, merged, merge=True)
    assert_same_answers(AutoModelForCausalLM.from_pretrained(merged), exported)


@pytest.mark.brief("qlora")
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_one_rank_trains_a_mixture_that_is_in_main_memory(run_file, mixture, kind):
    """As a process that holds all of it; resumed bit for bit, and exported."""
    options = (*LORA, *CONSTANT, f"adapter.type={kind}", "training.gradient_checkpointing=full")
    reference = train(run_file, 1, *options, "name=held")
    options += (f"strategy={STRATEGIES['offload']}", "checkpoint.export_on_finish=true")
    whole, resumed = whole_and_resumed(run_file, *options, ranks=1)
    assert same_bits(whole, resumed)
    assert largest_difference(reference, whole) < TOLERANCE
    losses = figures_of(whole)
    assert losses[-1] < losses[0] - 0.1
    before = AutoModelForCausalLM.from_pretrained(mixture)
    exported = with_adapter(mixture, whole)
    assert float((logits_of(exported) - logits_of(before)).abs().max()) > 0.01
