"""Laws 2 and 3: a run that was killed and resumed equals the uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from isles.errors import ExitCode
from isles.run.checkpoints import PARTIAL_PREFIX, list_checkpoints, verify_checkpoint
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.dist.test_same_mathematics import largest_difference, weights_of
from tests.ranks import Gang, start_training, train_to_end


def same_bits(left: RunDir, right: RunDir) -> bool:
    """Whether weights and optimizer state are equal bit for bit."""
    one, other = weights_of(left), weights_of(right)
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def with_dropout(run_file: Path) -> None:
    """Make the model draw random numbers, so that a lost random state would show."""
    model = run_file.parent / "tiny" / "config.json"
    config = json.loads(model.read_text())
    model.write_text(json.dumps(config | {"attention_dropout": 0.1}))


def rows_after_start(run_dir: RunDir, gang: Gang, start: int) -> bool:
    """Wait until training has recorded a row beyond `start` rows; False if a rank ended first."""
    while len(read_rows(run_dir.metrics)) <= start:
        if gang.wait_or_timeout(0.01):
            return False
    return True


def saving(run_dir: RunDir, gang: Gang) -> bool:
    """Wait until a save is under way; False if a rank ended first."""
    while True:
        folder = run_dir.checkpoints
        if folder.is_dir() and any(p.name.startswith(PARTIAL_PREFIX) for p in folder.iterdir()):
            return True
        if gang.wait_or_timeout(0.0005):
            return False


@pytest.mark.brief("3")
@pytest.mark.parametrize("number", [3, 30])
def test_kills_at_any_instant_change_no_bit(run_file: Path, number: int) -> None:
    with_dropout(run_file)
    steps = 100 + 25 * number
    length = (f"training.max_steps={steps}", "training.logging_steps=1", "data.packing=true")
    saves = ("checkpoint.every_steps=7", "checkpoint.keep=2")
    uninterrupted, code = train_to_end(run_file, 2, *length, "checkpoint.every_steps=null")
    assert code == 0
    rng = random.Random(1)
    kills, in_save = 0, 0
    runs = run_file.parent / "killed"
    while kills < number:
        run_dir, _, gang = start_training(run_file, 2, *length, *saves, f"output_dir={runs}")
        began = len(read_rows(run_dir.metrics))
        if kills % 3 == 0:
            alive = saving(run_dir, gang)
        else:
            alive = rows_after_start(run_dir, gang, began)
            alive = alive and not gang.wait_or_timeout(rng.uniform(0, 0.25))
        assert alive, gang.log.read_text()[-2000:]
        partial = any(p.name.startswith(PARTIAL_PREFIX) for p in run_dir.checkpoints.iterdir())
        gang.kill()
        kills, in_save = kills + 1, in_save + partial
        for info in list_checkpoints(run_dir)[-1:]:
            assert verify_checkpoint(info.path) == []
    assert in_save >= number // 6, "too few kills fell into a save"
    run_dir, code = train_to_end(run_file, 2, *length, *saves, f"output_dir={runs}")
    assert code == 0
    assert run_dir.name == "tiny-1", "all attempts are one run"
    assert len(run_dir.attempts()) == number + 1
    assert len(list_checkpoints(run_dir)) == 2, "as many as the run file says"
    assert same_bits(uninterrupted, run_dir)
    seen = [row["step"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert seen == list(range(1, steps + 1)), "each step stands in the curve once"


@pytest.mark.brief("15")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_saves_and_resumes_exactly(run_file: Path, number: signal.Signals) -> None:
    with_dropout(run_file)
    length = ("training.max_steps=60", "training.logging_steps=1")
    uninterrupted, _ = train_to_end(run_file, 2, *length)
    runs = f"output_dir={run_file.parent / 'stopped'}"
    run_dir, attempt, gang = start_training(run_file, 2, *length, runs)
    assert rows_after_start(run_dir, gang, 3)
    # Only one rank hears of it: both must stop at the same step all the same.
    os.kill(gang.processes[1].pid or 0, number)
    expected = ExitCode.REQUEUE if number == signal.SIGTERM else ExitCode.INTERRUPTED
    assert gang.wait() == [expected, expected]
    outcome = read_record(attempt.outcome) or {}
    assert outcome["state"] == "stopped"
    assert 3 < outcome["step"] < 60
    assert list_checkpoints(run_dir)[-1].step == outcome["step"]
    again, code = train_to_end(run_file, 2, *length, runs)
    assert (again.path, code) == (run_dir.path, 0)
    assert same_bits(uninterrupted, run_dir)


def test_other_numbers_of_ranks_see_each_sample_once(run_file: Path) -> None:
    """2 ranks for 7 steps, then 1 for 6, then 3 for 7: the weights of one rank throughout."""
    once, _ = train_to_end(run_file, 1, f"output_dir={run_file.parent / 'once'}")
    last: RunDir | None = None
    for world_size, until in [(2, 7), (1, 13), (3, 20)]:
        # The schedule must be that of the whole run: stop by signal is tested elsewhere, here
        # the run is cut by its length and lengthened, with a schedule that does not depend on it.
        last, code = train_to_end(
            run_file,
            world_size,
            f"training.max_steps={until}",
            "training.lr_scheduler_type=constant",
            f"output_dir={run_file.parent / 'changing'}",
            resume="auto" if last is None else str(last.path),
        )
        assert code == 0
    assert last is not None
    constant, _ = train_to_end(
        run_file,
        1,
        "training.lr_scheduler_type=constant",
        f"output_dir={run_file.parent / 'constant'}",
    )
    assert largest_difference(constant, last) < 1e-5
    assert largest_difference(once, last) > 1e-5, "another schedule does change the weights"
    manifest = list_checkpoints(last)[-1].manifest
    assert manifest["samples"] == 20 * 12


def test_samples_over_ranks_and_resumes_are_each_index_once(run_file: Path) -> None:
    """The cursor itself: what each rank's loader is given, over changes of the number of ranks."""
    from isles.config.load import load_run_file
    from isles.data.loader import Loader
    from isles.data.mix import build_datasets
    from isles.dist.split import even_split

    data = load_run_file(run_file, ["data.sources=[{type: fake}]", "tokenizer={}"]).config.data
    dataset, _ = build_datasets(
        data,
        None,
        run_file.parent,
        seed=0,
        vocab_size=512,
        progress=lambda _: None,
    )
    seen: Counter[int] = Counter()
    cursor = 0
    for world_size, steps in [(2, 5), (1, 4), (3, 6)]:
        for _ in range(steps):
            nexts = set()
            for rank in range(world_size):
                loader = Loader(
                    dataset,
                    split=even_split(12, world_size, 2, in_step=False),
                    dp_rank=rank,
                    device=torch.device("cpu"),
                )
                data = loader.step(cursor)
                loader.close()
                seen.update(i for batch in data.micro_batches for i in batch.sample_ids)
                nexts.add(data.next_sample)
            (cursor,) = nexts
    assert sorted(seen) == list(range(15 * 12))
    assert set(seen.values()) == {1}


def test_a_broken_newest_checkpoint_is_named_and_the_one_before_is_taken(run_file: Path) -> None:
    length = ("training.max_steps=30", "checkpoint.every_steps=10")
    uninterrupted, _ = train_to_end(run_file, 2, *length)
    runs = f"output_dir={run_file.parent / 'broken'}"
    run_dir, _ = train_to_end(run_file, 2, *length, runs)
    newest = list_checkpoints(run_dir)[-1].path
    shard = max(newest.glob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(bytes(data))
    assert shard.name in verify_checkpoint(newest)[0]
    again, _, gang = start_training(run_file, 2, *length, runs, resume=str(run_dir.path))
    assert gang.wait() == [0, 0]
    log = gang.log.read_text()
    assert "step-00000030 is broken" in log
    assert "resumed step=20" in log
    assert verify_checkpoint(newest) == []
    assert same_bits(uninterrupted, again)


def test_going_on_from_an_older_checkpoint_leaves_the_newer_branch(run_file: Path) -> None:
    """The steps after it are done again, with another rate; nothing of the old branch is taken."""
    saves = ("checkpoint.every_steps=10", "checkpoint.keep=9")
    run_dir, _ = train_to_end(run_file, 1, "training.max_steps=30", *saves)
    before = weights_of(run_dir, 20)
    start = str(run_dir.checkpoints / "step-00000010")
    changed = ("training.max_steps=20", "training.learning_rate=0.05", *saves)
    run_dir, code = train_to_end(run_file, 1, *changed, resume=start)
    assert code == 0
    assert [info.step for info in list_checkpoints(run_dir)] == [10, 20]
    after = weights_of(run_dir, 20)
    assert not all(torch.equal(before[name], after[name]) for name in before)


def test_data_that_changed_is_noticed(run_file: Path) -> None:
    run_dir, _ = train_to_end(run_file, 1, "training.max_steps=5")
    words = run_file.parent / "words.jsonl"
    words.write_text("".join(words.read_text().splitlines(keepends=True)[:250]))
    again = str(run_dir.path)
    run_dir, attempt, gang = start_training(run_file, 1, "training.max_steps=9", resume=again)
    assert gang.wait() == [ExitCode.USER]
    error = read_record(attempt.rank_error(0)) or {}
    assert "training data has changed since step 5" in error["what"]


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["sgd", "muon", "adamw"])
def test_a_first_step_that_a_loss_scaler_skips_does_no_harm(run_file: Path, optimizer: str) -> None:
    """The first scale overflows fp16, so the first steps are skipped; saved then, it resumes."""
    options = ("training.precision=fp16-mixed", f"training.optimizer={optimizer}")
    saves = ("training.learning_rate=0.01", "checkpoint.every_steps=1", "checkpoint.keep=99")
    run_dir, code = train_to_end(run_file, 2, *options, *saves, "training.max_steps=25")
    assert code == 0
    for info in list_checkpoints(run_dir)[:2] + list_checkpoints(run_dir)[-1:]:
        state = weights_of(run_dir, info.step)
        assert all(bool(torch.isfinite(value).all()) for value in state.values()), info.step
    first = list_checkpoints(run_dir)[0].path
    again, _, gang = start_training(
        run_file, 2, *options, *saves, "training.max_steps=25", resume=str(first)
    )
    assert gang.wait() == [0, 0]
    assert list_checkpoints(again)[-1].step == 25
