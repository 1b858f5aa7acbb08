"""When ranks save, and that saving does not stop them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from isles.checkpoint import save as saving
from isles.config.sections.output import CheckpointConfig
from isles.config.sections.training import TrainingConfig
from isles.dist.world import join_world
from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints, verify_checkpoint
from isles.run.env import RankEnv
from isles.run.records import read_record
from isles.train.stop import Agreement
from tests.dist.test_resume import is_saving, same_bits, until_recorded, with_dropout
from tests.dist.test_unshared import rank_on_host
from tests.ranks import one_rank, run_ranks, start_training, train

LENGTH = ("training.max_steps=60", "training.logging_steps=1", "checkpoint.keep=99")


def saves_of(env: RankEnv, minutes: Any, blocked_s: Sequence[float]) -> list[int]:
    """The steps that save, of 60 steps of half a minute. The clock of rank 1 is an hour ahead.

    Each save stops rank 1 for a time, and no other rank; rank 1 writes for two minutes.
    `blocked_s`: of the first saves; the last of it for later saves.
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
            stopped_s = blocked_s[min(len(saved), len(blocked_s) - 1)]
            saved.append(step)
            agreement.saved(stopped_s * env.rank)
    return saved


@pytest.mark.parametrize(
    ("minutes", "blocked_s", "steps"),
    [
        # Rank 0 looks at its clock when a step begins: 10 minutes are over as step 21 begins. The
        # save of step 25 is due before the one of step 21 is written.
        ("auto", [1.0], [21, 26, 47]),
        # 18 s are 2 % of 15 minutes, 30 steps.
        ("auto", [18.0], [21, 26, 57]),
        ("auto", [600.0, 1.0], [21, 26, 47]),  # once, for memory
        ("auto", [1.0, 600.0, 1.0], [21, 26, 47]),  # once, as a disk stalled
        (10.0, [18.0], [21, 26, 47]),
        (None, [1.0], [25]),
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


def files_read_back(rank: Any, env: RankEnv, *arguments: Any) -> list[tuple[str, int]]:
    """The files that a rank reads back from the disk, with their sizes."""
    found, read = list[tuple[str, int]](), saving._hash_on_disk

    def noted(file: Path, moved: Any) -> str:
        found.append((file.name, file.stat().st_size))
        return read(file, moved)

    saving._hash_on_disk = noted
    assert rank(env, *arguments) == 0
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_reads_back_its_own_files(run_file: Path, strategy: str) -> None:
    options = ("training.max_steps=5", f"strategy={{kind: {strategy}}}")
    how: Any = {"rank": functools.partial(files_read_back, one_rank)}
    run_dir, _, gang = start_training(run_file, 2, *options, **how)
    first, second = map(dict, gang.wait())
    assert set(first) == {"tensors-00000.bin", "rng-00000.safetensors", "tensors.json"}
    assert set(second) == {"tensors-00001.bin", "rng-00001.safetensors"}
    one, other = first["tensors-00000.bin"], second["tensors-00001.bin"]
    assert abs(one - other) < 0.2 * (one + other), "halves"
    (saved,) = list_checkpoints(run_dir)
    assert {name: facts.size for name, facts in saved.manifest.files.items()} == first | second
    assert verify_checkpoint(saved.path) == [], "hashed from memory, as the disk has it"


def test_rank_0_reads_back_the_files_of_ranks_that_do_not_see_its_disk(run_file: Path) -> None:
    apart = ("training.max_steps=5", f"output_dir={run_file.parent / 'apart'}")
    how: Any = {"rank": functools.partial(files_read_back, rank_on_host)}
    run_dir, _, gang = start_training(run_file, 2, *apart, **how)
    first, second = map(dict, gang.wait())
    assert set(first) == set(list_checkpoints(run_dir)[0].manifest.files) and not second


def rank_on_a_failing_disk(env: RankEnv, *arguments: Any) -> int:
    """The disk of rank 1 changes a byte of the second checkpoint."""
    write, count = saving.write_shards, 0

    def damage(staged: Any, folder: Path, *more: Any) -> Any:
        nonlocal count
        count += 1
        files = write(staged, folder, *more)
        if count == 2:
            with (folder / "tensors-00001.bin").open("r+b") as stream:
                stream.seek(100)
                byte = stream.read(1)[0]
                stream.seek(100)
                stream.write(bytes([byte ^ 1]))
        return files

    if env.rank == 1:
        saving.write_shards = damage
    return one_rank(env, *arguments)


def test_a_checkpoint_that_a_disk_changes_is_refused(run_file: Path) -> None:
    saves = ("checkpoint.every_steps=5", "checkpoint.async_save=false", "training.max_steps=20")
    how: Any = {"rank": rank_on_a_failing_disk}
    run_dir, attempt, gang = start_training(run_file, 2, *saves, **how)
    assert gang.wait() == [ExitCode.TRAINING] * 2
    for rank in range(2):
        what = (read_record(attempt.rank_error(rank)) or {})["what"]
        assert "differs from the written data: tensors-00001.bin: its bytes have changed" in what
    (whole,) = list_checkpoints(run_dir)
    assert whole.step == 5 and verify_checkpoint(whole.path) == []
    assert not is_saving(run_dir)


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
