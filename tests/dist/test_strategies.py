"""Law 1 over strategies: the same weights however a cluster holds the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from isles.config.layout import Layout
from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.dist.world import join_world
from isles.models.build import build_empty_model, fill_model
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.strategies.fsdp import allocate, shard_model
from isles.train.strategy import resolve_mesh
from tests.dist.test_same_mathematics import (
    TOLERANCE,
    check_that_it_learns,
    figures_of,
    largest_difference,
    model_with,
)
from tests.ranks import refusal, run_ranks, train

DDP = "{kind: ddp}"
FSDP = "{kind: fsdp}"
TP = "{kind: ddp, tp_size: 2}"
CP = "{kind: ddp, cp_size: 2}"


@pytest.fixture(scope="module")
def references() -> dict[str, RunDir]:
    """Runs of one process, by what they compute."""
    return {}


OneProcess = Callable[..., RunDir]


@pytest.fixture
def one_process(run_file: Path, references: dict[str, RunDir]) -> OneProcess:
    """Gives the run whose weights all must have; `run_file` differs between tests by paths only."""

    def run(*overrides: str) -> RunDir:
        key = (run_file.parent / "tiny" / "config.json").read_text() + " ".join(overrides)
        if key not in references:
            output = f"output_dir={run_file.parent / 'reference'}"
            whole = "training.micro_batch_size=12"
            references[key] = train(run_file, 1, whole, output, *overrides)
        return references[key]

    return run


def check(
    run_file: Path, reference: RunDir, world_size: int, strategy: str, *overrides: str
) -> None:
    """Train in another way, and compare weights, losses and norms of gradients."""
    run_dir = train(run_file, world_size, f"strategy={strategy}", *overrides, resume="no")
    assert largest_difference(reference, run_dir) < TOLERANCE, (world_size, strategy, overrides)
    for figure in ("loss", "grad_norm"):
        found, wanted = (figures_of(one, figure) for one in (run_dir, reference))
        assert found == pytest.approx(wanted, rel=1e-4), (world_size, strategy, overrides)


# Pipelines have a table of their own: test_pipeline.py.
TABLE = {
    "ddp": (DDP, (1, 2, 4)),
    "fsdp": (FSDP, (1, 2, 4)),
    "shard-grad-op": ("{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}", (1, 2, 4)),
    "hsdp": ("{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}", (2, 4)),
    "no-shard": ("{kind: fsdp, sharding_strategy: NO_SHARD}", (2,)),
    "tp": (TP, (2, 4)),
    "fsdp-tp": ("{kind: fsdp, tp_size: 2}", (4,)),
    "cp": (CP, (2, 4)),
    "fsdp-cp": ("{kind: fsdp, cp_size: 2, cp_method: ulysses}", (2, 4)),
    "zero1": ("{kind: deepspeed, zero_stage: 1}", (1, 2, 4)),
    "zero2": ("{kind: deepspeed, zero_stage: 2}", (1, 2, 4)),
    "zero3": ("{kind: deepspeed, zero_stage: 3}", (1, 2, 4)),
}


@pytest.mark.brief("fsdp-two", "zero2-two")
@pytest.mark.parametrize("ranks", ["two", "any"])
@pytest.mark.parametrize("name", TABLE)
def test_every_strategy_gives_the_weights_of_one_process(
    run_file: Path, one_process: OneProcess, name: str, ranks: str
) -> None:
    """Each on 1, 2 and 4 ranks where it can, without and with accumulation, and unequal rows."""
    strategy, sizes = TABLE[name]
    reference = one_process()
    sizes = (2,) if ranks == "two" and 2 in sizes else sizes
    for world_size in sizes:
        # Where two ways are joined, each by itself has been through both.
        is_joined = name in ("fsdp-tp", "fsdp-cp")
        for accumulation in (3,) if ranks == "two" or is_joined else (1, 3):
            micro = f"training.micro_batch_size={max(1, 12 // world_size // accumulation)}"
            check(run_file, reference, world_size, strategy, micro)
    unequal = 'balance={"0": 3, "2": 2, "3": 0}' if sizes[-1] > 2 else 'balance={"0": 3}'
    check(run_file, reference, sizes[-1], strategy, "training.micro_batch_size=2", unequal)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "{kind: ddp, bucket_cap_mb: 0.01}",
        "{kind: ddp, static_graph: true}",
        "{kind: fsdp, cpu_offload: true}",
        "{kind: fsdp, forward_prefetch: 2, backward_prefetch: 2}",
        "{kind: fsdp, transformer_layer_cls_to_wrap: [MistralDecoderLayer, LlamaDecoderLayer]}",
        "{kind: fsdp, transformer_layer_cls_to_wrap: [LlamaDecoderLayer, LlamaMLP]}",
        "{kind: fsdp, sharding_strategy: HYBRID_SHARD_ZERO2, shard_size: 1}",
        "{kind: deepspeed, zero_stage: 1, offload_optimizer: cpu}",
        "{kind: deepspeed, zero_stage: 2, reduce_bucket_size: 1000}",
    ],
)
def test_what_users_tune_changes_no_weight(
    run_file: Path, one_process: OneProcess, strategy: str
) -> None:
    check(run_file, one_process(), 2, strategy, "training.micro_batch_size=3")
    check(run_file, one_process(), 2, strategy, 'balance={"0": 5}')


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", [FSDP, TP])
def test_optimizers_and_checkpointing_on_shards(
    run_file: Path, one_process: OneProcess, strategy: str, optimizer: str
) -> None:
    option, full = f"training.optimizer={optimizer}", "training.gradient_checkpointing=full"
    check(run_file, one_process(option), 2, strategy, full, option)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "bf16", "fp16"])
def test_compressed_gradients_learn_as_well(run_file: Path, kind: str) -> None:
    check_that_it_learns(run_file, f"strategy={{kind: ddp, gradient_compression: {kind}}}")


@pytest.mark.brief("{kind: fsdp}-bf16-mixed")
@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16-true"])
@pytest.mark.parametrize("strategy", [FSDP, TP, CP])
def test_every_precision_learns_on_shards(run_file: Path, strategy: str, precision: str) -> None:
    check_that_it_learns(run_file, f"strategy={strategy}", f"training.precision={precision}")


ARCHITECTURES = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
    "gemma": {
        "model_type": "gemma",
        "architectures": ["GemmaForCausalLM"],
        "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "phi3": {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(run_file: Path, one_process: OneProcess, name: str) -> None:
    """Blocks are found from the model; tensor parallel follows the model's plan or is refused."""
    model_with(run_file, **ARCHITECTURES[name])
    reference = one_process()
    check(run_file, reference, 2, FSDP)
    check(run_file, reference, 2, "{kind: fsdp, cp_size: 2}")
    if name in ("gpt2", "mixtral"):
        error = refusal(run_file, 2, f"strategy={TP}", resume="no")
        assert "tensor parallel" in error["what"] and "fsdp" in str(error)
    else:
        check(run_file, reference, 2, TP)


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _memory_of_a_rank(env: RankEnv, folder: str, init: str) -> tuple[int, int]:
    """Bytes that building a sharded model added to this rank's peak, and bytes of the model."""
    config = ModelConfig(name_or_path=folder, init=init)
    world = join_world(env, device="cpu", timeout_s=60)
    strategy = FSDPStrategyConfig()
    mesh = resolve_mesh(strategy, world)
    model = build_empty_model(config, dtype=torch.float32, vocab_size=None)
    size = sum(p.numel() for p in model.parameters()) * 4
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_bytes()
    shard_model(model, strategy, mesh, world.device, precision="32-true")
    allocate(model, strategy, world.device)
    fill_model(model, config, seed=0)
    return _peak_bytes() - before, size


@pytest.mark.brief("pretrained")
@pytest.mark.parametrize("init", ["pretrained", "scratch"])
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, init: str) -> None:
    """215 MB over four ranks: each holds its quarter, and one module more while it is filled."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        vocab_size=4096,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    if init == "pretrained":
        LlamaForCausalLM(config).save_pretrained(tmp_path)
    for peak, size in run_ranks(_memory_of_a_rank, 4, str(tmp_path), init):
        assert size > 200e6
        assert peak < 0.6 * size, (peak, size)


def _layout_on_unequal_nodes(env: RankEnv, sizes: list[int]) -> Layout:
    env = replace(env, local_world_size=sizes[env.rank])
    world = join_world(env, device="cpu", timeout_s=60)
    return resolve_mesh(FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD"), world).layout


@pytest.mark.parametrize(("sizes", "shard"), [([2, 2, 1, 1], 1), ([2, 2, 2, 2], 2)])
def test_ranks_of_unequal_nodes_make_the_same_groups(sizes: list[int], shard: int) -> None:
    layouts = run_ranks(_layout_on_unequal_nodes, 4, sizes)
    assert {layout.dp_shard for layout in layouts} == {shard}


@pytest.mark.parametrize("strategy", [DDP, FSDP, "{kind: ddp, pp_size: 2}"])
def test_weights_without_a_place_are_refused(run_file: Path, strategy: str) -> None:
    """A matrix in fp8, read without the scale that lies beside it, would be nonsense."""
    folder = run_file.parent / "quantized"
    config = AutoConfig.from_pretrained(run_file.parent / "tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = (weights[name] * 1000).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = torch.tensor([[0.001]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    content = yaml.safe_load(run_file.read_text())
    content |= {"model": {"name_or_path": str(folder), "init": "pretrained"}, "tokenizer": {}}
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32}
    run_file.write_text(yaml.safe_dump(content))
    error = refusal(run_file, 2, f"strategy={strategy}")
    assert "up_proj.weight_scale_inv" in error["what"]
