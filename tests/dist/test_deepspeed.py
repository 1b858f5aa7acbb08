"""DeepSpeed ZeRO 1, 2 and 3: its own options and scale, and steps that are not finite.

The mathematics of one process: test_strategies.py; its checkpoints: test_strategy_resume.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.config.sections.strategy import DeepSpeedStrategyConfig
from isles.dist.batch import Batch
from isles.dist.world import World, join_world, leave_world
from isles.errors import ExitCode
from isles.run.env import RankEnv
from tests.dist.test_same_mathematics import figures_of, weights_of
from tests.dist.test_strategies import check
from tests.engines import engine_of, fake_run
from tests.ranks import refusal, run_ranks, start_training, train

CPU = {"device": "cpu"}
FILES = {
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "infinity": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    "small": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
}


@pytest.mark.long
def test_a_file_of_deepspeeds_changes_no_weight(run_file: Path) -> None:
    reference = train(run_file, 1, "training.micro_batch_size=12")
    for name, zero in FILES.items():
        path = run_file.parent / f"{name}.json"
        path.write_text(json.dumps({"zero_optimization": zero, "gradient_clipping": "auto"}))
        strategy = f"{{kind: deepspeed, config_file: {path}}}"
        check(run_file, reference, 2, strategy, 'balance={"0": 3}', "training.micro_batch_size=3")


def stage(number: int) -> str:
    return f"strategy={{kind: deepspeed, zero_stage: {number}}}"


def take_step(engine: Any, number: int, world: World) -> tuple[float, float]:
    """The loss over all ranks, and the norm; each of two steps in turn has its own rows."""
    dice = torch.Generator().manual_seed(number % 2 + 2 * world.rank)
    ids = torch.randint(0, 512, (3, 16), generator=dice)
    tokens = ids.numel() * world.world_size
    loss = float(engine.forward_backward(Batch(ids, ids, ()), loss_divisor=tokens, is_last=True))
    norm = float(engine.optimizer_step(lr=0.002, max_norm=0.5))
    return sum(world.gather(loss)) / tokens, norm


def step_on_after_a_bad_step(env: RankEnv, model: Path) -> list[float]:
    """How far weights move, by stage, in good steps that come after one that was not finite."""
    world = join_world(env, device="cpu", timeout_s=100)
    moved = []
    for number in (1, 2, 3):
        config = fake_run(model, precision="32-true")
        engine: Any = engine_of(config, DeepSpeedStrategyConfig(zero_stage=number), world)
        for step in range(2):
            take_step(engine, step, world)
        assert engine._objective._head._is_last, "the loss is computed in chunks"
        before = [part.detach().clone() for part in engine.trainable()]
        engine._guard.watch(torch.tensor(torch.nan))
        for step in range(2, 4):
            take_step(engine, step, world)
        pairs = zip(engine.trainable(), before, strict=True)
        moved.append(max(float((now - then).abs().max()) for now, then in pairs))
        assert engine.good_steps() == 2
    leave_world()
    return moved


@pytest.mark.long
def test_no_step_after_a_bad_one_moves_the_weights(tiny_model: Path) -> None:
    """On a GPU the host looks only now and then; momentum must not go on until it does."""
    assert run_ranks(step_on_after_a_bad_step, 2, tiny_model) == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_bf16_learns_and_leaves_nothing_but_the_run(run_file, number, tmp_path, monkeypatch):
    empty = tmp_path / "here"
    empty.mkdir()
    monkeypatch.chdir(empty)
    options = ("training.precision=bf16-mixed", "training.learning_rate=0.01")
    run_dir, _, gang = start_training(run_file, 2, stage(number), *options)
    assert gang.wait() == [0, 0]
    losses = figures_of(run_dir)
    assert losses[-1] < losses[0] - 0.5
    assert all(value.dtype == torch.float32 for value in weights_of(run_dir).values())
    assert list(empty.iterdir()) == []
    chatter = [line for line in gang.log.read_text().splitlines() if "deepspeed" in line.lower()]
    assert not [line for line in chatter if "isles." not in line], chatter


def overflow_first(env: RankEnv, model: Path, file: str) -> tuple[list[float], dict[str, float]]:
    """Train in fp16 from a scale that overflows; losses, and the scale that is saved."""
    world = join_world(env, device="cpu", timeout_s=100)
    from isles.strategies.deepspeed.engine import import_deepspeed

    # DeepSpeed wants a CPU with fp16 instructions; torch computes without, only slower.
    accelerator: Any = import_deepspeed(world).accelerator.get_accelerator()
    type(accelerator).is_fp16_supported = lambda _: True
    config = fake_run(model, precision="fp16-mixed")
    engine = engine_of(config, DeepSpeedStrategyConfig(config_file=file), world)
    before = {k: v for k, v in engine.state_dict().items() if k.startswith("model.")}
    losses = []
    for step in range(40):
        loss, norm = take_step(engine, step, world)
        losses.append(loss)
        if step == 0:
            after = engine.state_dict()
            assert norm == float("inf")
            assert all(torch.equal(after[name], value) for name, value in before.items())
    assert engine.good_steps() is None
    state = engine.state_dict()
    engine.load_state_dict(state)
    again = engine.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())
    leave_world()
    return losses, {k: float(v) for k, v in state.items() if k.startswith("scaler.")}


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3])
def test_fp16_lowers_its_scale_and_learns(tiny_model: Path, number: int) -> None:
    file = tiny_model / "ds.json"
    fp16 = {"enabled": "auto", "initial_scale_power": 28, "hysteresis": 1}
    file.write_text(json.dumps({"fp16": fp16, "zero_optimization": {"stage": number}}))
    (losses, scaler), *_ = run_ranks(overflow_first, 2, tiny_model, str(file))
    assert losses[-1] < losses[0] - 0.2
    assert 2**8 < scaler["scaler.scale"] < 2**28 and scaler["scaler.growth"] > 5


def test_fp16_on_a_cpu_without_it_is_refused_by_name(run_file: Path) -> None:
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU computes in fp16")
    options = (stage(2), "training.precision=fp16-mixed")
    error = refusal(run_file, 1, *options, code=ExitCode.PREFLIGHT)
    assert "cannot compute in fp16" in error["what"] and "32-true" in error["fix"]
