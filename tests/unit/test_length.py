"""The length of a run, its warm-up, and what is said of them at the start and at the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.check.checks.files import files
from isles.check.plan import CheckedRun, NodePlan
from isles.config.length import data_of, guessed_issues, length_notes
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import Resolved, resolve
from isles.config.sections.training import TrainingConfig, learning_rate, length_in_steps
from isles.config.show import TEMPLATES, template
from isles.data.mix import Dataset
from isles.data.order import SampleOrder
from isles.data.samples import FakeSamples
from isles.errors import ConfigErrors
from isles.train.length import run_length, unmoved
from tests.disks import closed
from tests.run_files import issues, load

RUN = """\
name: a
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: python-docs}], seq_length: 64}
training: {num_train_epochs: 1, global_batch_size: 4}
"""
TOKENS = 20
"""Of a row: a short chat."""


def resolved(folder: Path, *values: str) -> Resolved:
    return resolve(load(folder, RUN, *values))


def length(run: Resolved, samples: int, note: Callable[[str], None] = print) -> int | None:
    """Of a run with so many training samples."""
    fake = FakeSamples(64, 8, 0, samples)
    data = Dataset([fake], SampleOrder([samples], None, 0), 8)
    steps, epochs = run_length(run, data, None, note)
    assert (epochs is None) == (run.config.training.num_train_epochs is None)
    return steps


def refused(run: Resolved, samples: int) -> str:
    with pytest.raises(ConfigErrors) as raised:
        length(run, samples)
    return str(raised.value)


def node_run(loaded: Loaded) -> dict[str, Any] | None:
    """The run as a node's check gets it."""
    return CheckedRun.of(loaded).plan("a", {"a": 1}, "cpu").run


def test_a_schedule_that_is_longer_than_the_epochs_is_refused(tmp_path: Path) -> None:
    text = refused(resolved(tmp_path, "training.warmup_steps=100"), 20)
    assert "command line training.warmup_steps" in text
    assert "warmup_steps 100 leaves no step of the 5 steps of num_train_epochs 1" in text
    assert "below 5" in text and "num_train_epochs" in text.partition("fix:")[2]
    wsd = ("training.lr_scheduler_type=wsd", "training.decay_steps=5", "training.warmup_steps=1")
    assert "decay_steps 5 is more than the 5 steps" in refused(resolved(tmp_path, *wsd), 20)
    # One step that warms up would end at half the rate.
    assert "the 1 step of" in refused(resolved(tmp_path, "training.warmup_steps=1"), 3)
    for values in (("training.warmup_steps=4",), ("training.warmup_steps=0.9",), wsd[:2]):
        assert length(resolved(tmp_path, *values), 20) == 5


def test_a_share_that_warms_up_leaves_a_step_at_the_peak() -> None:
    for steps in (1, 2, 3, 20, 1000):
        config = TrainingConfig(max_steps=steps, warmup_steps=0.3)
        rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
        assert max(rates) == config.learning_rate
        assert rates.index(config.learning_rate) == min(-(-3 * steps // 10), steps - 1)


def test_a_share_is_below_1_and_needs_a_last_step(tmp_path: Path) -> None:
    for value in ("1.5", "-0.1", "true", "half"):
        (found,) = issues(tmp_path, RUN, f"training.warmup_steps={value}")
        assert "training.warmup_steps" in found
    timed = ("training.num_train_epochs=null", "training.max_time=1h")
    timed = (*timed, "training.lr_scheduler_type=constant", "training.warmup_steps=0.1")
    (found,) = issues(tmp_path, RUN, *timed)
    assert "0.1 is a share of the run" in found


def test_every_template_reaches_its_rate_or_says_what_to_change(tmp_path: Path) -> None:
    silent = set()
    for name in TEMPLATES:
        path = tmp_path / f"{name}.yaml"
        path.write_text(template(name), encoding="utf-8")
        run = resolve(load_run_file(path))
        training, data = run.config.training, run.config.data
        for rows in (50, 500, 5000):
            kept = round(rows * (1 - data.validation_fraction))
            is_apart = data.sources[0].type != "text" and not data.packing
            samples = (
                kept if is_apart or training.method == "dpo" else kept * TOKENS // data.seq_length
            )
            notes: list[str] = []
            steps = length(run, max(1, samples), notes.append)
            assert steps is not None
            rates = [
                learning_rate(training, step, steps) for step in range(1, min(steps, 2000) + 1)
            ]
            assert max(rates) == training.learning_rate, (name, rows)
            if not notes:
                assert steps >= 20, (name, rows)
                silent.add((name, rows))
            else:
                (note,) = notes
                words = f"{steps} step{'s' * (steps > 1)}"
                assert words in note and "global_batch_size" in note.rpartition(": ")[2]
    assert {(name, 500) for name in ("chat", "lora", "qlora", "dpo")} <= silent
    assert not {name for name, _ in silent} & {"pretrain"}, "20,000 steps over 100,000 tokens"


def test_a_run_that_reads_its_data_very_often_says_so(tmp_path: Path) -> None:
    def said(samples: int, *values: str) -> str:
        notes: list[str] = []
        length(resolved(tmp_path, "training.num_train_epochs=null", *values), samples, notes.append)
        return "\n".join(notes)

    steps = "training.max_steps=10000"
    text = said(500, steps, "training.global_batch_size=512")
    assert "reads its data 10240 times: 10000 steps" in text and "500 samples" in text
    assert "num_train_epochs" in text and "training.max_steps" in text
    assert said(1000, steps) == "" and "50 times" in said(800, steps)
    timed = ("training.max_time=1h", "training.lr_scheduler_type=constant")
    assert said(1, *timed) == ""
    epochs = length_notes(TrainingConfig(num_train_epochs=100, global_batch_size=1), 100, 1)
    assert not list(epochs), "the file asks for it"


def test_a_plan_and_a_check_guess_what_the_run_would_say(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a few words"}\n' * 60)
    source = ("data.packing=false", f"data.sources=[{{path: {rows}}}]")

    def guessed(*values: str) -> str:
        config = load(tmp_path, RUN, *source, *values).config
        return "\n".join(issue.what for issue in guessed_issues(config, data_of(config)))

    assert "the run has 15 steps" in guessed()
    config = load(tmp_path, RUN, *source).config
    with closed(rows):
        assert data_of(config).steps is None, "the run says that it cannot be read"
    assert guessed("training.global_batch_size=2") == ""
    assert "warmup_steps 20 leaves no step of the 15 steps" in guessed("training.warmup_steps=20")
    wsd = ("training.lr_scheduler_type=wsd", "training.decay_steps=16")
    assert "decay_steps 16 is more than the 15 steps" in guessed(*wsd)
    often = ("training.num_train_epochs=null", "training.max_steps=900")
    assert "reads its data 61 times" in guessed(*often)
    plan = NodePlan("a", run=node_run(load(tmp_path, RUN, *source, "training.warmup_steps=20")))
    found = {finding.id: finding for finding in files(plan)}["files.data"]
    assert found.level == "warning" and "warmup_steps 20" in found.text and "below 15" in found.fix


def test_a_run_whose_loss_did_not_move_says_so(tmp_path: Path) -> None:
    config = resolved(tmp_path).config

    def said(losses: list[Any], evals: list[Any] = []) -> str:  # noqa: B006
        points = [[(step, loss, None) for step, loss in enumerate(x, 1)] for x in (losses, evals)]
        return unmoved(config, *points)

    for losses in ([2.558, 2.556], [2.0, 1.0, 2.1], [3.0 - i / 10_000 for i in range(100)]):
        text = said(losses)
        assert "did not move" in text or "loss rose" in text
        assert "learning_rate" in text
    for losses in ([], [2.0], [2.0, 1.5], [None, 2.0], [3.0 - i / 100 for i in range(100)]):
        assert said(losses) == ""
    # It learned before its first evaluation, or it learned its training data by heart.
    assert said([2.0, 1.5], [1.5, 1.499]) == said([2.0, 0.5], [1.5, 1.8]) == ""
    # A noisy training loss.
    assert said([1.5, 2.0], [2.0, 1.9]) == ""
    assert "the validation loss did not" in said([2.0, 2.0], [2.0, 1.999])
    fake = load(tmp_path, RUN, "data.sources=[{type: fake}]", "tokenizer={}").config
    assert unmoved(fake, [(1, 2.0, None), (9, 2.0, None)], []) == ""


def test_the_length_of_epochs() -> None:
    for epochs, samples, batch, steps in ((1, 20, 4, 5), (2, 20, 4, 10), (0.5, 20, 4, 3)):
        config = TrainingConfig(num_train_epochs=epochs, global_batch_size=batch)
        assert length_in_steps(config, samples) == steps
