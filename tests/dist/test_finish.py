"""A run whose export fails has trained all its steps: it is finished, and says what is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import rmtree

from transformers import AutoModelForCausalLM

from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.train import worker
from isles.train.finish import finish
from isles.train.parts import Parts
from tests.dist.test_same_mathematics import give_weights
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


def rank_that_outlives_its_base(
    env: RankEnv, run: Path, attempt: int, resume_from: Path | None
) -> int:
    """A rank of training whose base model is deleted before the export."""

    def without_base(parts: Parts) -> bool:
        rmtree(parts.config.model.name_or_path)
        return finish(parts)

    worker.finish = without_base
    return one_rank(env, run, attempt, resume_from)


def test_a_run_exports_its_model_although_the_base_has_gone(run_file):
    give_weights(run_file)
    options = ("training.max_steps=1", "training.warmup_steps=0", *FAKE)
    options += ("checkpoint.export_on_finish=true", "model.init=pretrained")
    run_dir, _, gang = start_training(run_file, 1, *options, rank=rank_that_outlives_its_base)
    assert gang.wait() == [0]
    assert "export_error" not in (read_record(run_dir.summary) or {})
    AutoModelForCausalLM.from_pretrained(run_dir.model)


def rank_that_cannot_export(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank of training that finds an older export, and whose own does not read back."""
    model = RunDir(run).model
    model.mkdir()
    (model / "config.json").write_text("{}")
    sys.executable = "/bin/false"
    return one_rank(env, run, attempt, resume_from)


def test_an_older_export_is_not_sent_as_the_one_that_failed(run_file, tmp_path):
    options = ("training.max_steps=1", "training.warmup_steps=0", *FAKE)
    options += ("checkpoint.export_on_finish=true", f"checkpoint.remote={tmp_path / 'copy'}")
    run_dir, _, gang = start_training(run_file, 1, *options, rank=rank_that_cannot_export)
    assert gang.wait() == [0]
    assert (read_record(run_dir.summary) or {})["export_error"]
    sent = {path.name for path in (tmp_path / "copy").rglob("*")}
    assert "summary.json" in sent and "model" not in sent, sent
