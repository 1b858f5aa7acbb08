"""Laws 2 and 3: a run that was killed and resumed equals the uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch

from isles.errors import ExitCode
from isles.run.checkpoints import PARTIAL_PREFIX, list_checkpoints, verify_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.dist.test_same_mathematics import model_with, weights_of
from tests.ranks import Gang, refusal, start_training, train


def same_bits(left: RunDir, right: RunDir) -> bool:
    """Whether weights and optimizer state are equal bit for bit."""
    one, other = weights_of(left), weights_of(right)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def whole_and_resumed(run_file: Path, *overrides: str, ranks: int = 2) -> tuple[RunDir, RunDir]:
    """20 steps of two ranks at once, and in two starts."""
    whole = train(run_file, ranks, *overrides)
    runs = f"output_dir={run_file.parent / 'twice'}"
    first = train(run_file, ranks, *overrides, runs, "training.max_steps=11")
    resumed = train(run_file, ranks, *overrides, runs, resume=str(first.path))
    assert len(resumed.attempts()) == 2
    return whole, resumed


def with_dropout(run_file: Path) -> None:
    """Make the model draw random numbers, so that a lost random state would show."""
    model_with(run_file, attention_dropout=0.1)


def until_recorded(run_dir: RunDir, gang: Gang, rows: int) -> None:
    """Wait until training has recorded more than so many rows; fails where a rank ends first."""
    gang.until(lambda: len(list(read_rows(run_dir.metrics))) > rows)


def is_saving(run_dir: RunDir) -> bool:
    return any(run_dir.checkpoints.glob(f"{PARTIAL_PREFIX}*"))


@pytest.mark.brief("3")
@pytest.mark.parametrize("number", [3, 30])
def test_kills_at_any_instant_change_no_bit(run_file: Path, number: int) -> None:
    with_dropout(run_file)
    steps = 50 + 25 * number
    length = (f"training.max_steps={steps}", "training.logging_steps=1", "data.packing=true")
    saves = ("checkpoint.every_steps=7", "checkpoint.keep=2")
    uninterrupted = train(run_file, 2, *length, "checkpoint.every_steps=null")
    rng = random.Random(1)
    in_save = 0
    options = (*length, *saves, f"output_dir={run_file.parent / 'killed'}")
    for kill in range(number):
        run_dir, _, gang = start_training(run_file, 2, *options)
        if kill % 3 == 0:
            gang.until(lambda run_dir=run_dir: is_saving(run_dir), every_s=0.0005)
        else:
            until_recorded(run_dir, gang, len(list(read_rows(run_dir.metrics))))
            assert not gang.wait_or_timeout(rng.uniform(0, 0.25)), gang.said()
        in_save += is_saving(run_dir)
        gang.kill()
        for info in list_checkpoints(run_dir)[-1:]:
            assert verify_checkpoint(info.path) == []
    assert in_save >= number // 6, "too few kills fell into a save"
    run_dir = train(run_file, 2, *options)
    assert run_dir.name == "tiny-1", "all attempts are one run"
    assert len(run_dir.attempts()) == number + 1
    assert len(list_checkpoints(run_dir)) == 2, "as many as the run file says"
    assert same_bits(uninterrupted, run_dir)
    seen = [row["step"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert seen == list(range(1, steps + 1)), "each step stands in the curve once"


def test_stops_and_a_broken_checkpoint_change_no_bit(run_file):
    """A stop saves; of a broken newest checkpoint the one before is taken."""
    with_dropout(run_file)
    length = ("training.max_steps=90", "training.logging_steps=1")
    uninterrupted = train(run_file, 2, *length)
    options = (*length, "checkpoint.every_steps=40", f"output_dir={run_file.parent / 'stopped'}")
    step = 0
    codes = {signal.SIGTERM: ExitCode.REQUEUE, signal.SIGINT: ExitCode.INTERRUPTED}
    for number, code in codes.items():
        run_dir, attempt, gang = start_training(run_file, 2, *options)
        until_recorded(run_dir, gang, step + 3)
        # Only one rank hears of it: both must stop at the same step all the same.
        os.kill(gang.processes[1].pid or 0, number)
        assert gang.wait() == [code, code]
        outcome = read_record(attempt.outcome) or {}
        assert outcome["state"] == "stopped"
        assert step + 3 < outcome["step"] < 90
        step = outcome["step"]
        assert list_checkpoints(run_dir)[-1].step == step
    assert train(run_file, 2, *options).path == run_dir.path
    assert same_bits(uninterrupted, run_dir)
    newest, before = (info.path for info in list_checkpoints(run_dir)[:-3:-1])
    shard = max(newest.glob("tensors-*.bin"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    assert shard.name in verify_checkpoint(newest)[0]
    _, _, gang = start_training(run_file, 2, *options, resume=str(run_dir.path))
    assert gang.wait() == [0, 0]
    log = gang.log.read_text()
    assert "step-00000090 is broken" in log
    assert f"resumed step={int(before.name.partition('-')[2])}" in log
    assert verify_checkpoint(newest) == []
    assert same_bits(uninterrupted, run_dir)


def test_going_on_from_an_older_checkpoint_leaves_the_newer_branch(run_file: Path) -> None:
    """The steps after it are done again, with another rate; nothing of the old branch is taken."""
    saves = ("checkpoint.every_steps=10", "checkpoint.keep=9", "checkpoint.async_save=false")
    run_dir = train(run_file, 1, "training.max_steps=30", *saves)
    before = weights_of(run_dir, 20)
    start = str(run_dir.checkpoints / "step-00000010")
    changed = ("training.max_steps=20", "training.learning_rate=0.05", *saves)
    run_dir = train(run_file, 1, *changed, resume=start)
    assert [info.step for info in list_checkpoints(run_dir)] == [10, 20]
    after = weights_of(run_dir, 20)
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_data_that_changed_is_noticed(run_file: Path) -> None:
    run_dir = train(run_file, 1, "training.max_steps=5")
    words = run_file.parent / "words.jsonl"
    words.write_text("".join(words.read_text().splitlines(keepends=True)[:250]))
    error = refusal(run_file, 1, "training.max_steps=9", resume=str(run_dir.path))
    assert "training data has changed since step 5" in error["what"]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adamw"])
def test_a_first_step_that_a_loss_scaler_skips_does_no_harm(run_file: Path, optimizer: str) -> None:
    """The first scale overflows fp16, so the first steps are skipped; saved then, it resumes."""
    options = ("training.precision=fp16-mixed", f"training.optimizer={optimizer}")
    options += ("training.learning_rate=0.01", "training.max_steps=25")
    options += ("checkpoint.every_steps=1", "checkpoint.keep=99", "checkpoint.async_save=false")
    run_dir = train(run_file, 2, *options)
    saved = list_checkpoints(run_dir)
    for info in (saved[0], saved[1], saved[-1]):
        state = weights_of(run_dir, info.step)
        assert all(bool(torch.isfinite(value).all()) for value in state.values()), info.step
    again = train(run_file, 2, *options, resume=str(saved[0].path))
    assert list_checkpoints(again)[-1].step == 25
