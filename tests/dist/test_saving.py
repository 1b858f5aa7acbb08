"""When ranks save, and that saving does not stop them."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isles.checkpoint import save as saving
from isles.config.sections.output import CheckpointConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.world import join_world
from isles.run.checkpoints import list_checkpoints, verify_checkpoint
from isles.run.env import RankEnv
from isles.train.stop import Agreement
from tests.dist.test_resume import is_saving, same_bits, until_recorded, with_dropout
from tests.ranks import one_rank, run_ranks, start_training, train

LENGTH = ("training.max_steps=60", "training.logging_steps=1", "checkpoint.keep=99")


def saves_of(env: RankEnv, minutes: Any, blocked_s: float) -> list[int]:
    """The steps that save, of 60 steps of half a minute. The clock of rank 1 is an hour ahead.

    Each save stops rank 1 for a time, and no other rank; rank 1 writes for two minutes.
    """
    world = join_world(env, device="cpu", timeout_s=100.0)
    clock, step, saved = 3600.0 * env.rank, 0, list[int]()
    config: Any = SimpleNamespace(
        training=TrainingConfig(max_steps=60, global_batch_size=1),
        checkpoint=CheckpointConfig(every_minutes=minutes),
    )
    signals: Any = SimpleNamespace(stop_code=0)
    agreement = Agreement(world, signals, config, 0.0, lambda: clock)
    for step in range(1, 61):
        is_writing = bool(saved) and env.rank == 1 and step - saved[-1] <= 4
        agreement.ask(is_saving=is_writing)
        clock += 30.0
        if agreement.may_save(agreement.decide(), is_due=step == 25):
            saved.append(step)
            agreement.saved(blocked_s * env.rank)
    return saved


@pytest.mark.parametrize(
    ("minutes", "blocked_s", "steps"),
    [
        # Rank 0 looks at its clock when a step begins: 10 minutes are over as step 21 begins. The
        # save of step 25 is due before the one of step 21 is written.
        ("auto", 1.0, [21, 26, 47]),
        # 18 s are 2 % of 15 minutes, 30 steps.
        ("auto", 18.0, [21, 26, 57]),
        (10.0, 18.0, [21, 26, 47]),
        (None, 1.0, [25]),
    ],
)
def test_ranks_save_at_the_same_steps_whatever_their_clocks_say(minutes, blocked_s, steps):
    assert run_ranks(saves_of, 2, minutes, blocked_s) == [steps, steps]


def test_saves_by_time_are_every_ten_minutes_unless_steps_are_set() -> None:
    every_s = {
        "{}": 600.0,
        "{every_steps: 100}": None,
        "{every_minutes: 5}": 300.0,
        "{every_steps: 100, every_minutes: 5}": 300.0,
        "{every_minutes: null}": None,
    }
    import yaml

    found = {text: CheckpointConfig(**yaml.safe_load(text)).save_every_s for text in every_s}
    assert found == every_s


def rank_on_a_slow_disk(env: RankEnv, *arguments: Any) -> int:
    """The disk of rank 1 takes the first checkpoint only when training has reached step 20."""
    has_come_far, write, ask = threading.Event(), saving.write_shards, Agreement.ask
    asked = 0

    def slow(*args: Any) -> Any:
        has_come_far.wait()
        return write(*args)

    def noted(agreement: Agreement, **options: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 20:
            has_come_far.set()
        ask(agreement, **options)

    if env.rank == 1:
        saving.write_shards, Agreement.ask = slow, noted  # type: ignore[method-assign]
    return one_rank(env, *arguments)


@pytest.mark.parametrize("saves", ["checkpoint.every_steps=2", "checkpoint.every_minutes=1e-5"])
def test_steps_do_not_wait_for_a_slow_disk(run_file: Path, saves: str) -> None:
    """The next checkpoint takes its turn when the one before is whole."""
    how: Any = {"rank": rank_on_a_slow_disk}
    run_dir, _, gang = start_training(run_file, 2, *LENGTH, saves, **how)
    assert gang.wait() == [0, 0]
    first, second, *others = [info.step for info in list_checkpoints(run_dir)]
    assert first <= 2 and second >= 20
    assert others[-1] == 60, "the last checkpoint is waited for"
    log = gang.log.read_text()
    assert log.count("the next checkpoint waits until the one before is written") >= 1
    for info in list_checkpoints(run_dir):
        assert verify_checkpoint(info.path) == []


def test_killed_and_resumed_from_a_save_by_time_equals_uninterrupted(run_file: Path) -> None:
    with_dropout(run_file)
    uninterrupted = train(run_file, 2, *LENGTH, "checkpoint.every_minutes=null")
    options = (*LENGTH, "checkpoint.every_minutes=1e-5", f"output_dir={run_file.parent / 'killed'}")
    for kill in range(3):
        run_dir, _, gang = start_training(run_file, 2, *options)
        until_recorded(run_dir, gang, 10 * kill + 5)
        gang.until(lambda run_dir=run_dir: is_saving(run_dir), every_s=0.0005)
        gang.kill()
        for info in list_checkpoints(run_dir):
            assert verify_checkpoint(info.path) == []
    assert list_checkpoints(run_dir), "saved by time"
    run_dir = train(run_file, 2, *options)
    assert len(run_dir.attempts()) == 4
    assert same_bits(uninterrupted, run_dir)
