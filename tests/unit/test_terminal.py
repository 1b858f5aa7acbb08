"""What the command line prints before a run, word for word: tests/golden/terminal-*.txt."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from isles.cli import app, main
from tests.golden import check_golden

EXAMPLES = Path(__file__).parents[2] / "examples"
BAD = """\
name: bad run
model: {name_or_path: llama-2m, init: scrach}
tokenizer: {train_vocab_size: 2048}
data: {sources: [{path: missing.jsonl, colums: {text: body}}], seq_length: 12q}
training: {max_steps: 10, warmup_steps: 20, learning_rate: 3, precision: fp17, per_device_batch: 2}
clusters: [{launcher: {kind: slrum}, gpus_per_node: 0}]
"""
Said = Callable[..., str]


@pytest.fixture
def said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Said:
    """What a command prints in a folder with the example and a bad run file, without a GPU."""
    shutil.copy(EXAMPLES / "quickstart.yaml", tmp_path / "run.yaml")
    (tmp_path / "bad.yaml").write_text(BAD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "100")
    # cyclopts keeps the console, and with it the width, of the first help that a process prints.
    monkeypatch.setattr(app, "console", Console(width=100))

    def print_line(*words: str) -> str:
        code = main(words)
        out, err = capfd.readouterr()
        err = "".join(f"! {line}\n" for line in err.splitlines())
        text = f"$ isles {' '.join(words)}\n{out}{err}({int(code)})\n"
        text = text.replace(str(tmp_path), "/T")
        text = re.sub(r"(?m)^env .*$", "env …", text)  # variables that depend on the machine
        return re.sub(r"(?m) +$", "", text)

    return print_line


def test_help_of_every_verb(said: Said) -> None:
    verbs = [name for name in app if not name.startswith("-")]
    under = [(verb, name) for verb in verbs for name in app[verb] if not name.startswith("-")]
    commands = [(), *((verb,) for verb in verbs), *under]
    check_golden("terminal-help.txt", "\n".join(said(*words, "--help") for words in commands))


def test_what_is_said_before_a_run(said: Said) -> None:
    commands = [
        ("init", "--output", "new.yaml"),
        ("init",),
        ("init", "--template", "lora", "--output", "lora.yaml"),
        ("train", "run.yaml", "--dry-run"),
        ("train", "run.yaml", "training.max_step=10"),
        ("train", "bad.yaml"),
        ("train", "none.yaml"),
        ("render", "run.yaml", "--to", "slurm"),
        ("status",),
        ("checkpoint", "list", "none"),
        ("explain", "config.batch"),
        ("explain", "config.bath"),
    ]
    check_golden("terminal-before.txt", "\n".join(said(*words) for words in commands))
