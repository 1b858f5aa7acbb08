"""`isles.report`: what a script of the user's own may tell of its steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import isles
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import UserError
from isles.launch.worker import run_verb
from isles.monitor.follow import row_text
from isles.monitor.table import checkpoint_lines
from isles.run.begin import Begun, begin_run
from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from isles.run.restarts import Restart, read_last_step
from isles.run.state import script_of
from tests.unit.test_begin import end_attempt


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("ISLES_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("ISLES_ATTEMPT", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RANK", "0")
    run_dir = RunDir(tmp_path)
    run_dir.attempt(2).path.mkdir(parents=True)
    return run_dir


def test_rank_0_tells_its_steps(run_dir: RunDir) -> None:
    isles.report(1, total_steps=3, loss=torch.tensor(2.5))
    isles.report(3, total_steps=3, loss=float("nan"), tokens_per_second=10.0)
    rows = read_rows(run_dir.metrics)
    assert [(row["kind"], row["step"], row["loss"]) for row in rows] == [
        ("train", 1, 2.5),
        ("train", 3, None),
    ]
    status = read_record(run_dir.status) or {}
    assert (status["step"], status["total_steps"], status["loss"]) == (3, 3, None)
    assert status["tokens_per_second"] == 10.0
    assert read_last_step(run_dir.attempt(2), 1) == 3
    assert script_of(run_dir) is None  # that it is a script its starter says


def test_a_step_may_be_told_without_a_loss(run_dir: RunDir) -> None:
    isles.report(1)
    assert row_text(read_rows(run_dir.metrics)[0], {}) == "step 1  loss -"


def test_other_ranks_and_other_starters_tell_nothing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    isles.report(1, loss=1.0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("ISLES_RUN_DIR")
    isles.report(1, loss=1.0)
    assert not run_dir.metrics.exists()


def test_a_full_disk_does_not_end_the_script(run_dir: RunDir) -> None:
    run_dir.metrics.symlink_to("/dev/full")
    isles.report(1, loss=1.0)
    run_dir.metrics.unlink()
    isles.report(2, loss=0.5)
    assert [row["step"] for row in read_rows(run_dir.metrics)] == [2]


def test_a_script_is_spoken_of_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"
    file.write_text("name: own\ntraining: {script: mine.py}\n")

    def begin(*overrides: str) -> Begun:
        resolved = resolve(load_run_file(file, overrides), num_gpus=0)
        begun = begin_run(resolved, file.read_text(), "auto")
        end_attempt(begun.run_dir, "stopped")
        return begun

    run_dir = begin().run_dir
    assert begin().note == "going on with own-1: its script is started again"
    assert begin("training.script_args=[a]").note == (
        "own-1 ended with other values; this is a new run: own-2 (`--resume runs/own-1` goes on "
        "with the other)"
    )
    (line,) = checkpoint_lines(run_dir)
    assert line == "own-1 runs mine.py, a script of your own, which keeps checkpoints by itself"
    with pytest.raises(UserError, match="isles does not know its model"):
        run_verb("generate", run_dir, {})
    root_cause = {"is_script": True}
    restart = Restart(
        1, 0.0, "restart", root_cause, "rank 1 was killed", 7, None, 1, 3, is_counted=True
    )
    assert restart.text == (
        "rank 1 was killed at step 7; starting the script again (restart 1 of 3)"
    )
