"""Law 2 over strategies: a run saved under one way to hold the model goes on under any other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from isles.checkpoint.load import load_tensors
from isles.config.layout import Strategy
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from tests.dist.test_resume import same_bits, whole_and_resumed
from tests.dist.test_same_mathematics import (
    FAKE,
    figures_of,
    give_weights,
    model_with,
    weights_of,
)
from tests.engines import engine_of, fake_run
from tests.ranks import run_ranks, train

STRATEGIES = {
    "ddp": "{kind: ddp}",
    "fsdp": "{kind: fsdp}",
    "zero2-like": "{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}",
    "hsdp": "{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}",
    "copies": "{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 1}",
    "offload": "{kind: fsdp, cpu_offload: true}",
    "zero1": "{kind: deepspeed, zero_stage: 1}",
    "zero2": "{kind: deepspeed, zero_stage: 2}",
    "zero3": "{kind: deepspeed, zero_stage: 3}",
    "tp": "{kind: ddp, tp_size: 2}",
    "fsdp-tp": "{kind: fsdp, tp_size: 2}",
    "cp": "{kind: fsdp, cp_size: 2}",
    "pp": "{kind: ddp, pp_size: 2}",
    "fsdp-pp": "{kind: fsdp, pp_size: 2}",
    "interleaved": "{kind: fsdp, pp_size: 2, pp_schedule: interleaved-1f1b}",
    "zbv": "{kind: fsdp, pp_size: 2, pp_schedule: zbv}",
}
# Each arrow is one pair: saved on so many ranks, gone on with on as many others.
CHAINS = [
    "ddp 2 > fsdp 2 > zero3 2 > ddp 1 > ddp 3",
    "ddp 2 > fsdp 2 > ddp 1 > zero1 2 > fsdp 3 > zero2 2 > ddp 4 > zero3 2 > hsdp 4 > ddp 2",
    "zero3 4 > fsdp 1 > zero2 3 > ddp 3 > zero3 1 > zero1 4 > hsdp 2 > zero2 4 > zero3 2 > fsdp 4",
    "tp 2 > zero1 2 > pp 2 > fsdp 2 > cp 2 > fsdp-tp 4 > ddp 2 > fsdp-pp 4 > zero3 2 > tp 4 > cp 4",
    "zero2-like 2 > offload 2 > ddp 2 > pp 2 > zero2 2 > zero2-like 3 > fsdp-tp 4 > offload 1",
    "pp 2 > ddp 1 > zbv 2 > interleaved 2 > ddp 1",
    "pp 2 > ddp 1 > zbv 2 > fsdp 2 > fsdp-pp 4",
]
SHAPES: dict[str, dict[str, object]] = {
    CHAINS[2]: {"tie_word_embeddings": True},
    CHAINS[5]: {"num_hidden_layers": 5},
    CHAINS[6]: {"num_hidden_layers": 5, "tie_word_embeddings": True},
}
"""Where the model is another than the tiny one."""
STEPS = 2
CONSTANT = ("training.lr_scheduler_type=constant", "training.warmup_steps=1")


@pytest.mark.brief(CHAINS[0])
@pytest.mark.parametrize("chain", CHAINS)
def test_any_strategy_goes_on_from_any_other(run_file: Path, chain: str) -> None:
    model_with(run_file, **SHAPES.get(chain, {}))
    links = [link.split() for link in chain.split(" > ")]
    check_chain(run_file, [(STRATEGIES[name], int(ranks)) for name, ranks in links])


def check_chain(run_file: Path, links: Sequence[tuple[str, int]], *overrides: str) -> None:
    """Two steps under each strategy on its ranks: weights, optimizer state and evaluation after
    each are those of one uninterrupted process, and no sample is lost or seen twice."""
    options = (*CONSTANT, *overrides)
    steps = range(STEPS, STEPS * len(links) + 1, STEPS)
    saves = (f"checkpoint.every_steps={STEPS}", f"checkpoint.keep={len(links) + 1}")
    saves += ("checkpoint.async_save=false",)  # at each of these steps
    whole = (f"training.eval_steps={STEPS}", f"training.max_steps={steps[-1]}")
    reference = train(run_file, 1, *options, *saves, *whole)
    options += (f"output_dir={run_file.parent / 'changing'}",)
    resume = "no"
    for step, (strategy, ranks) in zip(steps, links, strict=True):
        part = (f"training.max_steps={step}", f"strategy={strategy}")
        run_dir = train(run_file, ranks, *options, *part, resume=resume)
        resume = str(run_dir.path)
        manifest = find_checkpoint(run_dir, None).manifest
        assert (manifest["step"], manifest["samples"]) == (step, step * 12)
        assert manifest["world_size"] == ranks
        check_state(reference, run_dir, step, f"{strategy} on {ranks}")
    evaluations = figures_of(reference, kind="eval")
    assert figures_of(run_dir, kind="eval") == pytest.approx(evaluations, abs=1e-5)


def check_state(reference: RunDir, run_dir: RunDir, step: int, name: str) -> None:
    """Every tensor of the two checkpoints of a step."""
    wanted, found = weights_of(reference, step), weights_of(run_dir, step)
    assert wanted.keys() == found.keys(), name
    for key, value in wanted.items():
        assert value.dtype == found[key].dtype, (name, key)
        difference = float((value.double() - found[key].double()).abs().max())
        scale = max(1.0, float(value.abs().max()))
        assert difference < 1e-5 * scale, (name, key, difference)


EXPORTED = ["fsdp", "copies", "tp", "cp", "zero1", "zero2", "zero3", "interleaved"]
EXPORTED += ["fsdp-tp", "fsdp-pp"]


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_the_same_ranks_resume_bit_for_bit_and_export_what_they_have_trained(run_file, name):
    """A Hugging Face folder at the end, with the weights of the last checkpoint."""
    model_with(run_file, num_hidden_layers=5)
    options = (*CONSTANT, f"strategy={STRATEGIES[name]}", "checkpoint.export_on_finish=true")
    ranks = 4 if name in ("fsdp-tp", "fsdp-pp") else 2
    whole, resumed = whole_and_resumed(run_file, *options, ranks=ranks)
    assert same_bits(whole, resumed)
    trained = weights_of(resumed)
    for key, value in AutoModelForCausalLM.from_pretrained(resumed.model).state_dict().items():
        assert torch.equal(value, trained[f"model.{key}"]), key


def test_an_export_of_shards_keeps_how_its_base_generates(run_file):
    give_weights(run_file)
    settings = {"do_sample": True, "temperature": 0.6, "eos_token_id": [2, 5]}
    (run_file.parent / "tiny" / "generation_config.json").write_text(json.dumps(settings))
    one = ("training.max_steps=1", "training.warmup_steps=0", "model.init=pretrained", *FAKE)
    export = ("checkpoint.export_on_finish=true", "strategy={kind: fsdp}")
    run_dir = train(run_file, 1, *one, *export)
    written = json.loads((run_dir.model / "generation_config.json").read_text())
    assert settings.items() <= written.items()


# AdamW with a small state: close to AdamW, exact on resume, alike on all replicas.
FAST = ("training.learning_rate=0.01", "training.lr_scheduler_type=constant")
EIGHT = (*FAST, "training.optimizer=adamw_8bit")
AT_RANDOM = (*FAST, "training.precision=bf16-true", "training.stochastic_rounding=true")


@pytest.mark.long
def test_eight_bit_state_goes_through_checkpoints_onto_any_ranks(run_file):
    exact = figures_of(train(run_file, 1, *FAST))
    sharded, again = whole_and_resumed(run_file, *EIGHT, "strategy={kind: fsdp}")
    assert same_bits(sharded, again)
    assert figures_of(sharded)[-1] - exact[-1] < 0.1 * (exact[0] - exact[-1])
    state = weights_of(sharded)
    coded = [key for key in state if key.endswith("_scale")]
    assert {state[key.removesuffix("_scale")].dtype for key in coded} == {torch.uint8}
    assert len(coded) == 4, "embedding and head, two moments each"

    vocab_size = state["model.lm_head.weight"].shape[0]
    folder = find_checkpoint(sharded, 20).path
    model = run_file.parent / "tiny"
    for ranks, strategy in ((1, DDPStrategyConfig()), (3, FSDPStrategyConfig())):
        for taken in run_ranks(taken_over, ranks, model, strategy, folder, vocab_size):
            assert not [key for key in state if bits(state[key]) != taken[key]]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_rounding_at_random_is_exact_on_resume_and_learns(run_file, optimizer):
    options = (*AT_RANDOM, f"training.optimizer={optimizer}", "strategy={kind: ddp}")
    once, again = whole_and_resumed(run_file, *options)
    assert same_bits(once, again)
    assert figures_of(once)[-1] < figures_of(once)[0] - 0.5


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def taken_over(
    env: RankEnv, model: Path, strategy: Strategy, folder: Path, vocab_size: int
) -> dict[str, bytes]:
    """The bytes of every tensor of an engine that has taken over a checkpoint, put together."""
    world = join_world(env, device="cpu", timeout_s=60)
    config = fake_run(model, optimizer="adamw_8bit", precision="32-true")
    engine = engine_of(config, strategy, world, vocab_size)
    state = engine.state_dict()
    load_tensors(state, folder)
    engine.load_state_dict(state)
    found = {
        key: bits(value.full_tensor() if isinstance(value, DTensor) else value)
        for key, value in engine.state_dict().items()
    }
    leave_world()
    return found


def rounded_weights(env: RankEnv, model: Path, strategy: Strategy) -> list[str]:
    """Digests of all ranks' shards after five steps, in bf16 with other rows on each rank."""
    world = join_world(env, device="cpu", timeout_s=60)
    torch.manual_seed(world.rank)  # as dropout's, which differs by rank
    rounding = {"precision": "bf16-true", "stochastic_rounding": True}
    config = fake_run(model, optimizer="adamw_8bit", **rounding)
    engine = engine_of(config, strategy, world)
    ids = torch.arange(32).reshape(2, 16) + 7 * world.rank
    for _ in range(5):
        batch = Batch(ids, ids, (0, 1))
        engine.forward_backward(batch, loss_divisor=32 * world.world_size, is_last=True)
        engine.optimizer_step(lr=1e-3, max_norm=1.0)
    digest = hashlib.sha256()
    for parameter in engine.trainable():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        digest.update(bits(local.float()))
    found = world.gather(digest.hexdigest())
    leave_world()
    return found


def test_ranks_that_hold_the_same_weights_round_them_alike(tiny_model):
    found = run_ranks(rounded_weights, 2, tiny_model, DDPStrategyConfig())[0]
    assert found[0] == found[1]
    hybrid = FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD", shard_size=2)
    found = run_ranks(rounded_weights, 4, tiny_model, hybrid)[0]
    assert found[0] == found[2] != found[1] == found[3]
