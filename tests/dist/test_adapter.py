"""Adapters over strategies: the same small matrices however a cluster holds the frozen model."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from isles.checkpoint.export import read_trained
from isles.config.resolve import load_resolved
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world
from isles.errors import ExitCode
from isles.models.build import build_empty_model, build_model, fill_model
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.strategies.base import Engine
from isles.strategies.ddp import DDPEngine
from isles.strategies.fsdp import FSDPEngine
from isles.train.finish import export_step
from isles.train.model import whole_model
from isles.train.optimizer import make_optimizers
from isles.train.strategy import resolve_mesh
from tests.deadline import DEADLINE_S
from tests.dist.test_same_mathematics import largest_difference, weights_of
from tests.dist.test_strategy_resume import check_state
from tests.ranks import run_ranks, start_training, train_to_end

TOLERANCE = 1e-5
LORA = ("adapter.type=lora", "adapter.r=4", "adapter.alpha=8", "training.learning_rate=0.01")
CONSTANT = ("training.lr_scheduler_type=constant", "training.warmup_steps=1")
STRATEGIES = {
    "ddp": "{kind: ddp}",
    "cp": "{kind: ddp, cp_size: 2}",
    "tp": "{kind: ddp, tp_size: 2}",
    "fsdp": "{kind: fsdp}",
    "hsdp": "{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 1}",
    "zero1": "{kind: deepspeed, zero_stage: 1}",
    "zero2": "{kind: deepspeed, zero_stage: 2}",
    "zero3": "{kind: deepspeed, zero_stage: 3}",
}


def make_base(folder: Path) -> None:
    """Weights for the model of a folder, as a repository of the hub holds them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.save_pretrained(folder)


def make_tokenizer(folder: Path) -> None:
    """Bytes and nothing else."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


@pytest.fixture
def base(run_file: Path, tiny_model: Path) -> Path:
    """The tiny model with weights and a tokenizer; `run_file` then fine-tunes it."""
    make_base(tiny_model)
    make_tokenizer(tiny_model)
    content = yaml.safe_load(run_file.read_text())
    content["model"]["init"] = "pretrained"
    del content["tokenizer"]
    run_file.write_text(yaml.safe_dump(content))
    return tiny_model


def losses_of(run_dir: RunDir) -> list[float]:
    """Of the recorded steps."""
    return [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]


@pytest.mark.brief("fsdp")
@pytest.mark.parametrize(
    "names", [("fsdp",), ("ddp", "cp", "tp", "hsdp"), ("zero1", "zero2", "zero3")], ids=" ".join
)
def test_every_strategy_trains_the_adapter_of_one_process(
    run_file: Path, base: Path, names: tuple[str, ...]
) -> None:
    """After 20 steps, with unequal rows and recomputed activations where that is possible."""
    reference, code = train_to_end(run_file, 1, *LORA)
    assert code == 0
    assert all(".lora_" in name for name in weights_of(reference))
    losses = losses_of(reference)
    assert losses[-1] < losses[0] - 0.1
    for name in names:
        options = [f"strategy={STRATEGIES[name]}"]
        if name in ("ddp", "fsdp", "zero3"):
            options += ['balance={"0": 3, "1": 1}', "training.gradient_checkpointing=full"]
        run_dir, code = train_to_end(run_file, 2, *LORA, *options, resume="no")
        assert code == 0, name
        assert largest_difference(reference, run_dir) < TOLERANCE, name
        assert losses_of(run_dir) == pytest.approx(losses, rel=1e-5), name


@pytest.mark.long
def test_any_strategy_goes_on_from_any_other(run_file: Path, base: Path) -> None:
    """Adapter and optimizer state after every change are those of one uninterrupted process."""
    links = [("ddp", 2), ("fsdp", 2), ("zero3", 2), ("ddp", 1)]
    last = f"training.max_steps={2 * len(links)}"
    every = ("checkpoint.every_steps=2", "checkpoint.keep=9")
    reference, code = train_to_end(run_file, 1, *LORA, *CONSTANT, *every, last)
    assert code == 0
    run_dir: RunDir | None = None
    for number, (name, ranks) in enumerate(links, 1):
        run_dir, code = train_to_end(
            run_file,
            ranks,
            *LORA,
            *CONSTANT,
            f"output_dir={run_file.parent / 'changing'}",
            f"training.max_steps={2 * number}",
            f"strategy={STRATEGIES[name]}",
            resume="no" if run_dir is None else str(run_dir.path),
        )
        assert code == 0, (name, ranks)
        check_state(reference, run_dir, 2 * number, f"{name} on {ranks}")


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_same_ranks_resume_bit_for_bit_and_on_the_same_base(
    run_file: Path, base: Path, name: str
) -> None:
    """With dropout, whose random numbers go on too; other weights of the same shape are refused."""
    options = (*LORA, *CONSTANT, "adapter.dropout=0.2", f"strategy={STRATEGIES[name]}")
    once, code = train_to_end(run_file, 2, *options, "training.max_steps=8")
    assert code == 0
    runs = f"output_dir={run_file.parent / 'twice'}"
    first, _ = train_to_end(run_file, 2, *options, runs, "training.max_steps=4")
    again = ("training.max_steps=8", runs)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][3] += 0.001
    good = (base / "model.safetensors").read_bytes()
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    _, attempt, gang = start_training(run_file, 2, *options, *again, resume=str(first.path))
    assert set(gang.wait()) == {ExitCode.USER}
    error = read_record(attempt.rank_error(0)) or {}
    assert "not those that this adapter was trained beside" in error["what"]
    assert str(base) in error["what"] and "put the model back" in error["fix"]
    (base / "model.safetensors").write_bytes(good)
    resumed, code = train_to_end(run_file, 2, *options, *again, resume=str(first.path))
    assert code == 0
    one, other = weights_of(once), weights_of(resumed)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


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


def _traffic_of_a_step(env: RankEnv, folder: str, kind: str) -> tuple[dict[str, int], int]:
    """What travels in the second step, and the bytes of what is trained."""
    config, adapter = ModelConfig(name_or_path=folder), AdapterConfig(type="lora", r=4)
    world = join_world(env, device="cpu", timeout_s=60)
    optimizers = functools.partial(make_optimizers, TrainingConfig(max_steps=1))
    options: dict[str, Any] = {"dtype": torch.float32, "vocab_size": None, "adapter": adapter}
    engine: Engine
    if kind == "ddp":
        ddp = DDPStrategyConfig()
        model = build_model(config, device=world.device, seed=0, **options)
        arguments = (ddp, resolve_mesh(ddp, world), world)
        engine = DDPEngine(
            model, optimizers, *arguments, precision="32-true", comm_sample_every=100
        )
    else:
        fsdp = FSDPStrategyConfig()
        model = build_empty_model(config, **options)
        trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
        fill = functools.partial(fill_model, config=config, seed=0)
        mesh = resolve_mesh(fsdp, world)
        engine = FSDPEngine(model, fill, optimizers, fsdp, mesh, world, precision="32-true")
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        with _Traffic() as traffic:
            engine.forward_backward(Batch(ids, ids, (0, 1)), loss_divisor=64, is_last=True)
        engine.optimizer_step(lr=1e-3, max_norm=1.0)
    trained = sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
    return traffic.num_bytes, trained


def test_only_gradients_of_the_adapter_travel(base: Path) -> None:
    for traffic, trained in run_ranks(_traffic_of_a_step, 2, str(base), "ddp"):
        assert traffic.pop("allreduce_") == trained
        assert sum(traffic.values()) < 1000  # buffers and the like
    for traffic, trained in run_ranks(_traffic_of_a_step, 2, str(base), "fsdp"):
        assert traffic.pop("_reduce_scatter_base_") == trained
        assert traffic.keys() == {"_allgather_base_"}  # of parameters, which are cut


EXPORTS = {
    "whole": ("ddp", ("adapter.modules_to_save=[lm_head,norm]",)),
    "dora": ("zero3", ("adapter.use_dora=true", "adapter.target_modules=[q_proj,lm_head]")),
    "rslora": ("fsdp", ("adapter.use_rslora=true", "adapter.target_modules=[embed_tokens,v_proj]")),
    "sharded": (
        "fsdp",
        ("adapter.use_dora=true", "adapter.modules_to_save=[embed_tokens,lm_head]"),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTS)
def test_what_is_exported_answers_as_it_was_trained(run_file: Path, base: Path, name: str) -> None:
    """The adapter alone beside its model, and merged into it; trained by one process or two."""
    strategy, options = EXPORTS[name]
    options += (*LORA, "checkpoint.export_on_finish=true", "training.max_steps=8")
    run_dir, code = train_to_end(run_file, 2, *options, f"strategy={STRATEGIES[strategy]}")
    assert code == 0
    reference, code = train_to_end(run_file, 1, *options, resume="no")
    assert code == 0
    assert largest_difference(reference, run_dir) < TOLERANCE
    assert not (run_dir.model / "model.safetensors").exists()
    described = json.loads((run_dir.model / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base)
    tokens = torch.arange(64).view(2, 32)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base)
        before = model(tokens).logits
        logits = PeftModel.from_pretrained(model, run_dir.model)(tokens).logits
        assert float((logits - before).abs().max()) > 0.01
        resolved = load_resolved(run_dir.resolved.read_text())
        checkpoint = find_checkpoint(run_dir, None)
        trained = whole_model(resolved.config, None, torch.device("cpu"))
        read_trained(trained, checkpoint.path)
        torch.testing.assert_close(trained.eval()(tokens).logits, logits, rtol=0, atol=1e-5)
        merged = run_file.parent / "merged"
        export_step(run_dir, resolved, None, checkpoint.step, merged, merge=True)
        whole = AutoModelForCausalLM.from_pretrained(merged)
        torch.testing.assert_close(whole(tokens).logits, logits, rtol=0, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero3"])
def test_a_frozen_model_in_bf16_learns_and_is_merged(run_file: Path, base: Path, name: str) -> None:
    """Weights that are trained stay in fp32 beside it."""
    options = (*LORA, "training.precision=bf16-mixed", "adapter.modules_to_save=[lm_head]")
    export = ("checkpoint.export_on_finish=true", "checkpoint.merge_adapter=true")
    run_dir, code = train_to_end(run_file, 2, *options, *export, f"strategy={STRATEGIES[name]}")
    assert code == 0
    losses = losses_of(run_dir)
    assert losses[-1] < losses[0] - 0.5
    state = weights_of(run_dir)
    assert {value.dtype for value in state.values()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    assert model.dtype == torch.bfloat16
    assert not any("lora" in key for key in model.state_dict())


def verb(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A worker command, as `isles` starts it."""
    command = [sys.executable, "-m", "isles.train.verbs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.long
def test_qlora_from_the_first_step_to_the_export(run_file: Path, base: Path) -> None:
    """In 4 bits on two ranks; resumed bit for bit; every command works on what it leaves."""
    options = (*LORA, *CONSTANT, "adapter.type=qlora", "adapter.use_dora=true")
    options += ("checkpoint.export_on_finish=true",)
    once, code = train_to_end(run_file, 2, *options)
    assert code == 0
    losses = losses_of(once)
    assert losses[-1] < losses[0] - 0.1
    runs = f"output_dir={run_file.parent / 'twice'}"
    first, _ = train_to_end(run_file, 2, *options, runs, "training.max_steps=11")
    again, code = train_to_end(run_file, 2, *options, runs, resume=str(first.path))
    assert code == 0
    one, other = weights_of(once), weights_of(again)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []
    tokens = torch.arange(64).view(2, 32)
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, once.model)(tokens).logits
    merged = run_file.parent / "merged"
    run = str(once.path)
    result = verb("export", run, "--merge-adapter", f"--output={merged}")
    assert result.returncode == 0, result.stderr
    whole = AutoModelForCausalLM.from_pretrained(merged)
    assert getattr(whole.config, "quantization_config", None) is None
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens).logits, logits, rtol=0, atol=1e-5)
    result = verb("generate", run, "--prompt=abc", "--max-new-tokens=5", "--temperature=0")
    assert result.returncode == 0 and result.stdout.startswith("abc"), result.stderr
    result = verb("eval", run)
    assert result.returncode == 0 and "validation loss" in result.stdout, result.stderr


@pytest.mark.long
def test_merging_is_refused_where_there_is_no_adapter(run_file: Path) -> None:
    run_dir, code = train_to_end(run_file, 1, "training.max_steps=1", "training.warmup_steps=0")
    assert code == 0
    result = verb("export", str(run_dir.path), "--merge-adapter")
    assert result.returncode == ExitCode.USER
    assert "has trained no adapter" in result.stderr and "leave it out" in result.stderr
