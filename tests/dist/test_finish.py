"""A run whose export fails has trained all its steps: it is finished, and says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from shutil import rmtree

import pytest
import torch
from transformers import AutoModelForCausalLM

from isles.checkpoint.reread import difference, scores
from isles.config.load import load_run_file
from isles.errors import ExitCode, OutOfMemoryError, TrainingError
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape
from isles.monitor.results import push
from isles.monitor.status import collect
from isles.run.checkpoints import find_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.resolved import read_resolved
from isles.train import worker
from isles.train.finish import export_step, finish
from isles.train.parts import Parts
from isles.train.verbs import check_room
from tests.deadline import run_program
from tests.dist.test_same_mathematics import give_weights, model_with
from tests.ranks import one_rank, start_training, train

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


SHARDED = "strategy={kind: fsdp}"


def test_a_checkpoint_is_exported_although_the_base_has_gone_and_answers_as_it_was_trained(
    run_file, caplog
):
    """The run has scored a probe; an export whose scores differ is refused."""
    caplog.set_level("INFO")
    give_weights(run_file, dtype="bfloat16", my_own_key=1)
    model_with(run_file, dtype="float32")
    options = ("training.max_steps=1", "training.warmup_steps=0", *FAKE, SHARDED)
    run_dir = train(run_file, 1, *options, "model.init=pretrained")
    resolved = read_resolved(run_dir)
    rmtree(resolved.config.model.name_or_path)
    export_step(run_dir, resolved, None, None, run_dir.model)
    assert "exporting the weights as bfloat16" in caplog.text, "of the base's files"
    config = json.loads((run_dir.model / "config.json").read_text())
    assert config["my_own_key"] == 1
    model = AutoModelForCausalLM.from_pretrained(run_dir.model).eval()
    trained = torch.tensor(find_checkpoint(run_dir, None).manifest["probe"])
    assert difference(scores(model), trained) < 0.1
    kept = run_dir.base / "config.json"
    changed = json.loads(kept.read_text()) | {"rope_theta": 10.0, "rms_norm_eps": 1.0}
    kept.write_text(json.dumps(changed))
    with pytest.raises(TrainingError, match=r"probabilities of a probe differ by \d"):
        export_step(run_dir, resolved, None, None, run_dir.path / "other")
    assert not (run_dir.path / "other").exists()


def rank_that_cannot_export(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank of training that finds an older export, and whose own does not read back."""
    model = RunDir(run).model
    model.mkdir()
    (model / "config.json").write_text("{}")
    sys.executable = "/bin/false"
    return one_rank(env, run, attempt, resume_from)


def test_an_older_export_is_not_sent_as_the_one_that_failed(run_file, tmp_path, capfd):
    options = ("training.max_steps=1", "training.warmup_steps=0", *FAKE)
    options += ("checkpoint.export_on_finish=true", f"checkpoint.remote={tmp_path / 'copy'}")
    run_dir, _, gang = start_training(run_file, 1, *options, rank=rank_that_cannot_export)
    assert gang.wait() == [0]
    assert (read_record(run_dir.summary) or {})["export_error"]
    copy = tmp_path / "copy"
    sent = {path.name for path in copy.rglob("*")}
    assert "summary.json" in sent and "model" not in sent, sent
    # Nor later, until the last step is exported; whoever asks is told.
    report = collect(run_dir)
    assert report.exit_code == 3 and report.reason.startswith("the export failed: ")
    assert "isles checkpoint export" in report.hint
    assert push(str(run_dir.path)) == 3
    assert "is not sent: the export failed: " in capfd.readouterr().out
    assert not list(copy.rglob("model"))
    rmtree(run_dir.model)
    export_step(run_dir, read_resolved(run_dir), None, None, run_dir.model)
    assert collect(run_dir).reason == "finished"
    assert push(str(run_dir.path)) == 0
    assert list(copy.rglob("model/config.json"))


LARGE = {"intermediate_size": 2**24, "hidden_size": 2**20}


def test_eval_and_generate_refuse_a_model_that_one_device_cannot_hold(run_file):
    """A sharded run, whose model has become larger than any main memory; and 100,000 layers in
    4 bits, with their real size."""
    run_dir = train(run_file, 2, "strategy.kind=fsdp", "training.max_steps=4")
    file = run_dir.base / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | LARGE))
    for verb in ("eval", "generate"):
        found = run_program([sys.executable, "-m", "isles.train.verbs", verb, str(run_dir.path)])
        assert found.returncode == ExitCode.OUT_OF_MEMORY, found.stderr
        assert "loads the whole model on one device: its weights need" in found.stderr
    keys = ["model.init=pretrained", "adapter.type=qlora", "tokenizer={}"]
    config = load_run_file(run_file, keys).config
    shape, cpu = load_shape("llama-8b"), torch.device("cpu")
    check_room(config, Architecture.of({**shape, "num_hidden_layers": 1}), cpu, run_dir)
    deep = Architecture.of({**shape, "num_hidden_layers": 10**5})
    with pytest.raises(OutOfMemoryError, match="whole model in 4 bits on one device") as error:
        check_room(config, deep, cpu, run_dir)
    blocks = (deep.params - 2 * deep.head_params) * 4.127 / 8 / 2**40
    needed = float(error.value.what.partition("weights need ")[2].partition(" TiB")[0])
    assert blocks < needed < 1.1 * blocks, "with the adapter"
    assert "exports the adapter without loading the model" in (error.value.fix or "")
