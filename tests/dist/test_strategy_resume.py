"""Law 2 over strategies: a run saved under one way to hold the model goes on under any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from tests.dist.test_resume import same_bits, whole_and_resumed
from tests.dist.test_same_mathematics import figures_of, model_with, weights_of
from tests.ranks import train

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
]
SHAPES: dict[str, dict[str, object]] = {
    CHAINS[2]: {"tie_word_embeddings": True},
    CHAINS[5]: {"num_hidden_layers": 5},
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


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["fsdp", "copies", "tp", "cp", "zero1", "zero2", "zero3", "interleaved"]
)
def test_the_same_ranks_resume_bit_for_bit(run_file: Path, name: str) -> None:
    model_with(run_file, num_hidden_layers=5)
    assert same_bits(*whole_and_resumed(run_file, *CONSTANT, f"strategy={STRATEGIES[name]}"))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "fsdp-tp", "fsdp-pp", "cp", "zero1", "zero3"])
def test_every_strategy_exports_what_it_has_trained(run_file: Path, name: str) -> None:
    """A Hugging Face folder at the end, with the weights of the last checkpoint."""
    ranks = 4 if "-" in name else 2
    export = "checkpoint.export_on_finish=true"
    run_dir = train(run_file, ranks, f"strategy={STRATEGIES[name]}", export)
    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    trained = weights_of(run_dir)
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained[f"model.{key}"]), key
