"""AdamW with a small state over ranks: close to AdamW, exact on resume, alike on all replicas."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isles.checkpoint.load import load_tensors
from isles.config.layout import Strategy
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.batch import Batch
from isles.dist.world import join_world, leave_world
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from tests.dist.test_resume import same_bits, whole_and_resumed
from tests.dist.test_same_mathematics import figures_of, weights_of
from tests.engines import engine_of, fake_run
from tests.ranks import run_ranks, train

FAST = ("training.learning_rate=0.01", "training.lr_scheduler_type=constant")
EIGHT = (*FAST, "training.optimizer=adamw_8bit")
AT_RANDOM = (*FAST, "training.precision=bf16-true", "training.stochastic_rounding=true")


@pytest.mark.long
def test_eight_bit_state_goes_through_checkpoints_onto_any_ranks(run_file: Path) -> None:
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
def test_shards_and_replicas_of_eight_bits_train_as_one_process(run_file: Path) -> None:
    one = figures_of(train(run_file, 1, *EIGHT))
    for strategy in ("{kind: fsdp}", "{kind: ddp}"):
        other = figures_of(train(run_file, 2, *EIGHT, f"strategy={strategy}", resume="no"))
        # Equal but for gradients that round to the other side of a border between two codes.
        assert other == pytest.approx(one, abs=2e-3)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_rounding_at_random_is_exact_on_resume_and_learns(run_file: Path, optimizer: str) -> None:
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


def test_ranks_that_hold_the_same_weights_round_them_alike(tiny_model: Path) -> None:
    found = run_ranks(rounded_weights, 2, tiny_model, DDPStrategyConfig())[0]
    assert found[0] == found[1]
    hybrid = FSDPStrategyConfig(sharding_strategy="HYBRID_SHARD", shard_size=2)
    found = run_ranks(rounded_weights, 4, tiny_model, hybrid)[0]
    assert found[0] == found[2] != found[1] == found[3]
