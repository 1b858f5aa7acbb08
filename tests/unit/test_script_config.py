"""The run file of a user's own script: small, and nothing in it that the script never sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.config.files import data_issues
from isles.config.resolve import dump_resolved, load_resolved, resolve
from isles.config.resume import changed_mathematics
from isles.config.show import show
from isles.launch.render import script_command
from tests.run_files import faults, issues, load

SMALL = """\
name: own
training:
  script: train_phase2.py
  script_args: [--epochs, 20, --lr, 1e-4, --name, "007"]
clusters:
  - gpus_per_node: 2
"""


def test_a_script_needs_neither_model_nor_data(tmp_path: Path) -> None:
    resolved = resolve(load(tmp_path, SMALL), num_gpus=0)
    assert resolved.world_size == 2
    assert resolved.derived == {"device": "cpu", "world_size": 2}
    text = dump_resolved(resolved)
    assert "llama" not in text
    assert load_resolved(text) == resolved
    shown = show(resolved)
    assert not [word for word in ("model", "data:", "strategy", "checkpoint") if word in shown]
    # What is shown is a run file that means the same.
    again = resolve(load(tmp_path, show(resolved, origins=False)), num_gpus=0)
    assert again.config == resolved.config
    # Its time to save survives.
    resolved = resolve(load(tmp_path, SMALL, "checkpoint.timeout=90s"), num_gpus=0)
    checkpoint = load_resolved(dump_resolved(resolved)).config.checkpoint
    assert checkpoint.timeout == 90.0 and "timeout" in checkpoint.model_fields_set


def test_what_the_script_never_sees_is_refused(tmp_path: Path) -> None:
    text = SMALL.replace("training:", "training:\n  max_steps: 5") + (
        "model: {name_or_path: gpt2}\ndata: {sources: [{type: fake}]}\nseed: 1\n"
        "checkpoint: {keep: 2, timeout: 90s}\nwatchdog: {action: stop}\ntrack: [jsonl]\n"
    )
    found = issues(tmp_path, text, "balance=even")
    *keys, last = [line.partition(" | ")[0].removeprefix("run.yaml:") for line in found]
    expected = "3 training.max_steps, 8 model, 9 data, 10 seed, 11 checkpoint.keep, 13 track"
    assert ", ".join(keys) == expected
    assert last == "command line balance=even"
    assert "has no effect with training.script: train_phase2.py does not read" in found[0]


def test_what_torchrun_is_given(tmp_path: Path) -> None:
    """All arguments as they were written: a truth value is to be quoted."""
    command = ["train_phase2.py", "--epochs", "20", "--lr", "0.0001", "--name", "007"]
    config = load(tmp_path, SMALL).config
    assert script_command(config) == command
    # Other arguments are another run.
    new = ("training.script_args=[--epochs, 3]", "clusters.0.max_restarts=0")
    (change,) = changed_mathematics(config, load(tmp_path, SMALL, *new).config)
    assert change.key == "training.script_args"
    quoted = SMALL.replace('"007"', '"true"')
    assert script_command(load(tmp_path, quoted).config)[-1] == "true"
    (issue,) = faults(tmp_path, SMALL.replace('"007"', "true"))
    assert issue.where == f"{tmp_path}/run.yaml:4 training.script_args.5"
    assert issue.what == "script_args.5 is true, not text"
    assert issue.fix == 'put it in quotes: "true"'


def test_without_a_script_all_is_as_before(tmp_path: Path) -> None:
    model, data = issues(tmp_path, "training: {max_steps: 5}\n")
    assert "the section model is missing" in model and "the section data is missing" in data
    text = "model: {name_or_path: llama-2m, init: scratch}\ndata: {sources: [{type: fake}]}\n"
    found = issues(tmp_path, f"{text}training: {{max_steps: 5, script_args: [x]}}\n")
    assert "script_args needs training.script, which is not set" in found[0]
    found = issues(tmp_path, f"{text}training: {{max_steps: 5}}\nwatchdog: {{max_silence: 5m}}\n")
    assert "max_silence is only for training.script" in found[0]


def test_a_script_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_phase1.py").touch()
    loaded = load(tmp_path, SMALL)
    (issue,) = data_issues(loaded)
    assert issue.what == f"script not found: {tmp_path}/train_phase2.py"
    assert "run.yaml:3 training.script" in issue.where
    assert issue.fix == "did you mean train_phase1.py?"
    (tmp_path / "train_phase2.py").mkdir()
    assert "is a folder" in data_issues(loaded)[0].what
