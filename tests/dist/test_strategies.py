"""Law 1 over strategies: the same weights however a cluster holds the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from isles.config.layout import Layout
from isles.config.sections.model import ModelConfig
from isles.config.sections.strategy import FSDPStrategyConfig
from isles.data.tokens.tokenizer import train_tokenizer
from isles.dist.world import join_world
from isles.models.build import build_empty_model, fill_model
from isles.run.checkpoints import find_checkpoint, list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.strategies.fsdp import allocate, shard_model
from isles.train.strategy import resolve_mesh
from tests.data import write_rows
from tests.dist.test_resume import same_bits
from tests.dist.test_same_mathematics import (
    FAKE,
    TOLERANCE,
    check_that_it_learns,
    figures_of,
    give_weights,
    largest_difference,
)
from tests.ranks import refusal, run_ranks, start_training, train
from tests.small_models import small_config

DDP = "{kind: ddp}"
FSDP = "{kind: fsdp}"
TP = "{kind: ddp, tp_size: 2}"
CP = "{kind: ddp, cp_size: 2}"


@pytest.fixture(scope="module")
def references() -> dict[str, RunDir]:
    """Runs of one process, by what they compute."""
    return {}


@pytest.fixture
def one_process(run_file: Path, references: dict[str, RunDir]) -> Callable[..., RunDir]:
    """Gives the run whose weights all must have; `run_file` differs between tests by paths only."""

    def run(*overrides: str) -> RunDir:
        key = (run_file.parent / "tiny" / "config.json").read_text() + " ".join(overrides)
        if key not in references:
            output = f"output_dir={run_file.parent / 'reference'}"
            whole = "training.micro_batch_size=12"
            references[key] = train(run_file, 1, whole, output, *overrides)
        return references[key]

    return run


def check(run_file: Path, reference: RunDir, world_size: int, strategy: str, *overrides: str):
    """Train in another way, and compare weights, losses and norms of gradients."""
    run_dir = train(run_file, world_size, f"strategy={strategy}", *overrides, resume="no")
    assert largest_difference(reference, run_dir) < TOLERANCE, (world_size, strategy, overrides)
    # By which each export is compared with the run.
    found, wanted = (find_checkpoint(one, None).manifest["probe"] for one in (run_dir, reference))
    assert found == pytest.approx(wanted, rel=1e-5), (world_size, strategy, overrides)
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
def test_every_strategy_gives_the_weights_of_one_process(run_file, one_process, name, ranks):
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
def test_what_users_tune_changes_no_weight(run_file, one_process, strategy):
    check(run_file, one_process(), 2, strategy, "training.micro_batch_size=3")
    check(run_file, one_process(), 2, strategy, 'balance={"0": 5}')


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("strategy", [FSDP, TP])
def test_optimizers_and_checkpointing_on_shards(run_file, one_process, strategy, optimizer):
    option, full = f"training.optimizer={optimizer}", "training.gradient_checkpointing=full"
    check(run_file, one_process(option), 2, strategy, full, option)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["none", "bf16", "fp16"])
def test_compressed_gradients_learn_as_well(run_file: Path, kind: str) -> None:
    check_that_it_learns(run_file, f"strategy={{kind: ddp, gradient_compression: {kind}}}")


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma": {"tie_word_embeddings": True},
    "phi3": {},
    "gpt2": {"tie_word_embeddings": True, "attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0},
    "mixtral": {},
    "llama": {"tie_word_embeddings": True},
}


@pytest.mark.long
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_other_architectures(run_file, one_process, name):
    """Blocks are found from the model; tensor parallel follows the model's plan or is refused."""
    config = small_config(name, vocab_size=512, **ARCHITECTURES[name])
    config.save_pretrained(run_file.parent / "tiny")
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
    allocate(model, world.device)
    fill_model(model, config, seed=0)
    return _peak_bytes() - before, size


@pytest.mark.brief("pretrained")
@pytest.mark.parametrize("init", ["pretrained", "scratch"])
def test_no_rank_ever_holds_the_whole_model(tmp_path: Path, init: str) -> None:
    """215 MB over four ranks: each holds its quarter, and one module more while it is filled."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    config = LlamaConfig(**sizes, num_hidden_layers=16, vocab_size=4096)
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


def test_weights_without_a_place_are_refused_by_a_pipeline(run_file):
    """A matrix in fp8, read without the scale that lies beside it, would be nonsense.

    Of other strategies: `test_weights_that_do_not_fit_are_named` of unit/test_models.py.
    """
    give_weights(run_file)
    file = run_file.parent / "tiny" / "model.safetensors"
    weights, name = load_file(file), "model.layers.0.mlp.up_proj.weight"
    weights[name] = (weights[name] * 1000).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = torch.tensor([[0.001]])
    save_file(weights, file, metadata={"format": "pt"})
    options = (*FAKE, "model.init=pretrained", "strategy={kind: ddp, pp_size: 2}")
    assert "up_proj.weight_scale_inv" in refusal(run_file, 2, *options)["what"]


# DPO gives the same weights on any number of ranks, under every strategy, and after a kill.


@pytest.fixture
def preference_file(run_file: Path, words: Path) -> Path:
    """The tiny run, on preferences made of the words."""
    texts = [json.loads(line)["text"] for line in words.read_text().splitlines()]
    rows = [
        {"prompt": one[:40], "chosen": two[:60], "rejected": three[:50].upper()}
        for one, two, three in zip(texts[0:240:3], texts[1:240:3], texts[2:240:3], strict=True)
        if min(len(one), len(two), len(three)) > 4
    ]
    path = write_rows(run_file.parent / "preferences.jsonl", rows)
    content = yaml.safe_load(run_file.read_text())
    content["data"]["sources"] = [{"path": str(path), "type": "preference"}]
    content["data"]["seq_length"] = 64
    content["tokenizer"]["chat_template"] = "chatml"
    content["training"] |= {"method": "dpo", "max_steps": 8, "global_batch_size": 6}
    content["training"] |= {"logging_steps": 1, "learning_rate": 0.003}
    run_file.write_text(yaml.safe_dump(content))
    return run_file


OF_DPO = [
    ("strategy.kind=ddp", "training.micro_batch_size=1"),
    # One rank has five pairs of a step, the other one, whose gradient travels twice in the first.
    ("strategy={kind: ddp, static_graph: true}", 'balance={"0": 5}', "training.micro_batch_size=1"),
    ("strategy.kind=fsdp", "training.micro_batch_size=3"),
    ("strategy={kind: deepspeed, zero_stage: 3}", "training.micro_batch_size=1"),
]


@pytest.mark.long
def test_every_strategy_learns_the_same(preference_file):
    alone = train(preference_file, 1, "name=alone", "strategy.kind=ddp")
    losses = figures_of(alone)
    assert losses[0] == pytest.approx(0.6931472, abs=1e-4)
    assert losses[-1] < losses[0] - 0.1, "capital letters are rejected"
    for options in OF_DPO:
        run_dir = train(preference_file, 2, "name=many", *options, resume="no")
        assert largest_difference(alone, run_dir) < 1e-5, options
        for key in ("loss", "reward_margin", "reward_accuracy", "reward_chosen"):
            assert figures_of(run_dir, key) == pytest.approx(figures_of(alone, key), abs=1e-4)


def test_killed_and_resumed_equals_uninterrupted(preference_file):
    """The reference is that of the first weights, also after the weights have moved."""
    options = ("checkpoint.every_steps=3", "strategy.kind=ddp", "training.micro_batch_size=3")
    whole = train(preference_file, 2, "name=whole", *options)
    run_dir, _, gang = start_training(preference_file, 2, "name=cut", *options)
    gang.until(lambda: list_checkpoints(run_dir))
    gang.kill()
    first, scored = list_checkpoints(run_dir)[0], run_dir.reference("training").read_bytes()
    again = train(preference_file, 2, "name=cut", *options)
    assert again.path == run_dir.path
    assert run_dir.reference("training").read_bytes() == scored, "nothing was scored twice"
    assert same_bits(whole, again)
    run_dir.reference("training").write_bytes(b"not an archive")
    again = train(preference_file, 2, "name=cut", *options, resume=str(first.path))
    assert again.path == run_dir.path
    assert same_bits(whole, again), "what was lost is made again from the first weights"


@pytest.mark.long
def test_a_fresh_adapter_on_a_model_with_dropout_starts_at_the_reference(preference_file):
    """Neither side of the comparison drops values."""
    drops = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    config = small_config("gpt2", vocab_size=512, **drops)
    base = preference_file.parent / "tiny"
    AutoModelForCausalLM.from_config(config).save_pretrained(base)
    train_tokenizer(["some words"], 260).save_pretrained(base)
    options = (
        "model.init=pretrained",
        "tokenizer={chat_template: chatml}",
        "adapter={type: lora, r: 2, dropout: 0.5}",
    )
    options += ("training.max_steps=1", "training.warmup_steps=0", "strategy.kind=fsdp")
    [loss] = figures_of(train(preference_file, 2, *options))
    assert loss == pytest.approx(0.6931472, abs=1e-4)


def test_a_cluster_of_several_has_every_pair_scored(preference_file):
    """It reads what the hub leases to it, which a short run of its own would not come to."""
    outer = "outer={kind: diloco, sync_every: 1}"
    options = ("training.max_steps=1", "training.warmup_steps=0", "strategy.kind=ddp", outer)
    run_dir = train(preference_file, 1, *options)
    with np.load(run_dir.reference("training")) as kept:
        assert len(kept["scores"]) > 6 and not np.isnan(kept["scores"]).any()


@pytest.mark.long
def test_a_mixture_as_the_hub_has_it_is_the_same_model_cut_or_whole(run_file):
    """Each rank reads the experts of its own part, of files that hold each by itself."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config("mixtral", vocab_size=512)).save_pretrained(
        run_file.parent / "tiny"
    )
    names = load_file(run_file.parent / "tiny" / "model.safetensors")
    assert any("experts.0.w1" in name for name in names)
    options = (*FAKE, "model.init=pretrained", "training.max_steps=3", "training.warmup_steps=0")
    whole = train(run_file, 1, *options, "strategy.kind=ddp")
    for ranks, strategy in ((2, "fsdp"), (2, "deepspeed")):
        zero = ("strategy.zero_stage=3",) if strategy == "deepspeed" else ()
        run_dir = train(run_file, ranks, *options, f"strategy.kind={strategy}", *zero, resume="no")
        assert largest_difference(whole, run_dir) < TOLERANCE
