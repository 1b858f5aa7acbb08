"""Law 1 for the loss that balances experts: the same under every strategy, and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isles.checkpoint.load import load_tensors
from isles.run.checkpoints import find_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.strategies.routers import LOAD
from tests.dist.test_resume import same_bits, whole_and_resumed
from tests.dist.test_same_mathematics import TOLERANCE, figures_of, largest_difference, weights_of
from tests.dist.test_strategy_resume import CONSTANT
from tests.ranks import train
from tests.small_models import small_config

FIGURES = ("loss", "router_loss", "router_entropy", "router_busiest_share", "grad_norm")


@pytest.fixture
def mixture(run_file: Path) -> Path:
    """The run file with a mixture of four layers, whose balancing loss is large."""
    sizes = {"vocab_size": 512, "num_hidden_layers": 4, "router_aux_loss_coef": 0.5}
    small_config("qwen3_moe", **sizes).save_pretrained(run_file.parent / "tiny")
    return run_file


FULL = "training.gradient_checkpointing=full"
UNEQUAL, UNEQUAL_OF_4 = 'balance={"0": 3}', 'balance={"0": 3, "1": 1, "2": 3, "3": 1}'
# Ranks, strategy, rows of a micro-batch, and other keys. A step has 12 rows.
SHORT = [
    (2, "kind: ddp", 2, UNEQUAL),
    (2, "kind: fsdp", 3, FULL),
    (2, "kind: ddp, pp_size: 2", 2, FULL),
]
OTHERS = [
    (1, "kind: ddp", 3),
    (3, "kind: ddp, static_graph: true", 1),
    (2, "kind: fsdp, sharding_strategy: SHARD_GRAD_OP", 2, UNEQUAL),
    (2, "kind: ddp, cp_size: 2", 6),
    (2, "kind: fsdp, cp_size: 2, cp_method: ulysses", 3, FULL),
    (2, "kind: ddp, pp_size: 2, pp_schedule: gpipe", 3),
    (2, "kind: ddp, pp_size: 2, pp_schedule: interleaved-1f1b", 2),
    (2, "kind: ddp, pp_size: 2, pp_schedule: zbv", 2, FULL),
    (4, "kind: fsdp, pp_size: 2", 2, UNEQUAL_OF_4),
    (4, "kind: fsdp, cp_size: 2, pp_size: 2", 3),
    (2, "kind: deepspeed, zero_stage: 1", 2, UNEQUAL),
    (2, "kind: deepspeed, zero_stage: 2", 3),
    (2, "kind: deepspeed, zero_stage: 3", 2),
]


def moved(left: RunDir, right: RunDir) -> list[float]:
    """The largest difference of each weight."""
    one, other = weights_of(left), weights_of(right)
    names = [name for name in one if name.startswith("model.")]
    return [float((one[name] - other[name]).abs().max()) for name in names]


@pytest.mark.brief("short")
@pytest.mark.parametrize("cases", [SHORT, OTHERS], ids=["short", "others"])
def test_experts_are_balanced_alike_under_every_strategy(mixture, cases):
    reference = train(mixture, 1, "training.micro_batch_size=12")
    without = train(mixture, 1, "model.router_aux_loss_coef=0", resume="no")
    assert max(moved(reference, without)) > 100 * TOLERANCE
    for ranks, strategy, micro, *more in cases:
        size = f"training.micro_batch_size={micro}"
        run_dir = train(mixture, ranks, f"strategy={{{strategy}}}", size, *more, resume="no")
        case = (ranks, strategy, micro, *more)
        for name in FIGURES:
            wanted = figures_of(reference, name)
            assert figures_of(run_dir, name) == pytest.approx(wanted, rel=1e-4), (case, name)
        assert largest_difference(reference, run_dir) < TOLERANCE, case
        loads = [weights_of(one)[LOAD] for one in (reference, run_dir)]
        assert torch.equal(*loads), case


@pytest.mark.brief("kind: ddp")
@pytest.mark.parametrize("strategy", ["kind: ddp", "kind: fsdp", "kind: deepspeed, zero_stage: 2"])
def test_a_resumed_run_knows_the_load_of_its_experts(mixture, strategy):
    assert same_bits(*whole_and_resumed(mixture, *CONSTANT, f"strategy={{{strategy}}}"))


def test_a_checkpoint_without_a_load_is_resumed(mixture):
    """As of an isles that did not balance."""
    run_dir: RunDir = train(mixture, 1, "model.router_aux_loss_coef=0", "training.max_steps=4")
    folder = find_checkpoint(run_dir, None).path
    state = {LOAD: torch.ones(4, 4)}
    load_tensors(state, folder, alone=True, optional=(LOAD,))
    assert torch.equal(state[LOAD], torch.ones(4, 4))


def test_a_run_that_did_not_balance_says_that_its_loss_changes(mixture):
    """Its checkpoint is as of an older isles, which did not know the key."""
    off = "router_aux_loss_coef: 0"
    options = (*CONSTANT, "model.router_aux_loss_coef=0")
    run_dir: RunDir = train(mixture, 1, *options, "training.max_steps=2")
    text = run_dir.resolved.read_text()
    assert off in text
    run_dir.resolved.write_text(text.replace(off, "router_aux_loss_coef: null"))

    def said(steps: int) -> list[str]:
        resumed = train(
            mixture, 1, *CONSTANT, f"training.max_steps={steps}", resume=str(run_dir.path)
        )
        notes = (read_record(resumed.status) or {}).get("notes", [])
        return [note for note in notes if "now part of the loss" in note]

    assert len(said(4)) == 1
    assert not said(6), "the second checkpoint knows the load"
