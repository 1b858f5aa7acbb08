"""A run whose export fails has trained all its steps: it is finished, and says what is missing."""

from __future__ import annotations

from pathlib import Path

from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.records import read_record
from tests.ranks import one_rank, start_training

FAKE = ("data={sources: [{type: fake}], seq_length: 32, validation_fraction: 0}", "tokenizer={}")


def rank_with_a_file_in_the_way(
    env: RankEnv, run: Path, attempt: int, resume_from: Path | None
) -> int:
    """A rank of training that finds a user's file where the model shall be."""
    (run / "model").write_text("mine")
    return one_rank(env, run, attempt, resume_from)


def test_a_run_whose_export_fails_is_finished_and_keeps_its_checkpoint(run_file):
    options = ("training.max_steps=1", "training.warmup_steps=0", *FAKE)
    options += ("checkpoint.export_on_finish=true",)
    run_dir, _, gang = start_training(run_file, 1, *options, rank=rank_with_a_file_in_the_way)
    assert gang.wait() == [0]
    assert find_checkpoint(run_dir, None).step == 1
    assert run_dir.model.read_text() == "mine"
    assert "this is a file" in (read_record(run_dir.summary) or {})["export_error"]
    status = read_record(run_dir.status) or {}
    [note] = [note for note in status["notes"] if "not exported" in note]
    assert "isles checkpoint export" in note and "step 1" in note
