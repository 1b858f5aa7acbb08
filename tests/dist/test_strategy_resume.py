"""Law 2 over strategies: a run saved under one way to hold the model goes on under any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from tests.dist.test_same_mathematics import weights_of
from tests.ranks import train_to_end

STRATEGIES = {
    "ddp": "{kind: ddp}",
    "fsdp": "{kind: fsdp}",
    "zero2-like": "{kind: fsdp, sharding_strategy: SHARD_GRAD_OP}",
    "hsdp": "{kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}",
    "offload": "{kind: fsdp, cpu_offload: true}",
    "zero1": "{kind: deepspeed, zero_stage: 1}",
    "zero2": "{kind: deepspeed, zero_stage: 2}",
    "zero3": "{kind: deepspeed, zero_stage: 3}",
    "tp": "{kind: ddp, tp_size: 2}",
    "fsdp-tp": "{kind: fsdp, tp_size: 2}",
    "cp": "{kind: fsdp, cp_size: 2}",
    "pp": "{kind: ddp, pp_size: 2}",
    "fsdp-pp": "{kind: fsdp, pp_size: 2}",
}
# Each arrow is one pair: saved on so many ranks, gone on with on as many others.
CHAINS = [
    "ddp 2 > fsdp 2 > zero3 2 > ddp 1",
    "ddp 2 > fsdp 2 > ddp 1 > zero1 2 > fsdp 3 > zero2 2 > ddp 4 > zero3 2 > hsdp 4 > ddp 2",
    "zero3 4 > fsdp 1 > zero2 3 > ddp 3 > zero3 1 > zero1 4 > hsdp 2 > zero2 4 > zero3 2 > fsdp 4",
    "tp 2 > zero1 2 > pp 2 > fsdp 2 > cp 2 > fsdp-tp 4 > ddp 2 > fsdp-pp 4 > zero3 2 > tp 4 > cp 4",
    "zero2-like 2 > offload 2 > ddp 2 > pp 2 > zero2 2 > zero2-like 3 > fsdp-tp 4 > offload 1",
]
STEPS = 2
CONSTANT = ("training.lr_scheduler_type=constant", "training.warmup_steps=1")


@pytest.mark.brief(CHAINS[0])
@pytest.mark.parametrize("chain", CHAINS)
def test_any_strategy_goes_on_from_any_other(run_file: Path, chain: str) -> None:
    """Weights and optimizer state after every change are those of one uninterrupted process."""
    links = [link.split() for link in chain.split(" > ")]
    reference, code = train_to_end(
        run_file,
        1,
        *CONSTANT,
        f"training.max_steps={STEPS * len(links)}",
        f"checkpoint.every_steps={STEPS}",
        f"checkpoint.keep={len(links) + 1}",
    )
    assert code == 0
    run_dir: RunDir | None = None
    for number, (name, ranks) in enumerate(links, 1):
        run_dir, code = train_to_end(
            run_file,
            int(ranks),
            *CONSTANT,
            f"output_dir={run_file.parent / 'changing'}",
            f"training.max_steps={STEPS * number}",
            f"strategy={STRATEGIES[name]}",
            resume="no" if run_dir is None else str(run_dir.path),
        )
        assert code == 0, (name, ranks)
        manifest = find_checkpoint(run_dir, None).manifest
        assert (manifest["step"], manifest["samples"]) == (STEPS * number, STEPS * number * 12)
        assert manifest["world_size"] == int(ranks)
        check_state(reference, run_dir, STEPS * number, f"{name} on {ranks}")


def check_state(reference: RunDir, run_dir: RunDir, step: int, name: str) -> None:
    """Every tensor of the two checkpoints of a step."""
    wanted, found = weights_of(reference, step), weights_of(run_dir, step)
    assert wanted.keys() == found.keys(), name
    for key, value in wanted.items():
        difference = float((value.double() - found[key].double()).abs().max())
        scale = max(1.0, float(value.abs().max()))
        assert difference < 1e-5 * scale, (name, key, difference)


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "hsdp", "tp", "cp"])
def test_the_same_ranks_resume_bit_for_bit(run_file: Path, name: str) -> None:
    options = (*CONSTANT, f"strategy={STRATEGIES[name]}")
    once, code = train_to_end(run_file, 2, *options)
    assert code == 0
    runs = f"output_dir={run_file.parent / 'twice'}"
    first, _ = train_to_end(run_file, 2, *options, runs, "training.max_steps=11")
    again, code = train_to_end(run_file, 2, *options, runs, resume=str(first.path))
    assert (code, len(again.attempts())) == (0, 2)
    one, other = weights_of(once), weights_of(again)
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different


@pytest.mark.long
@pytest.mark.parametrize("name", ["fsdp", "fsdp-tp", "fsdp-pp", "cp", "zero1", "zero3"])
def test_every_strategy_exports_what_it_has_trained(run_file: Path, name: str) -> None:
    """A Hugging Face folder at the end, with the weights of the last checkpoint."""
    ranks = 4 if "-" in name else 2
    export = "checkpoint.export_on_finish=true"
    run_dir, code = train_to_end(run_file, ranks, f"strategy={STRATEGIES[name]}", export)
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(run_dir.model)
    trained = weights_of(run_dir)
    for key, value in model.state_dict().items():
        assert torch.equal(value, trained[f"model.{key}"]), key
