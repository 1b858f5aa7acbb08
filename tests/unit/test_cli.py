"""The command line: verbs, errors, exit codes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from shlex import quote

import pytest

from isles.cli import main
from tests.deadline import run_program
from tests.documents import ROOT
from tests.each import each
from tests.runs import bare_run
from tests.test_architecture import HEAVY
from tests.unit.test_begin import add_checkpoint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, on a machine without GPUs."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder


def test_help_and_a_plan_import_nothing_that_they_do_not_need() -> None:
    code = (
        "import sys; from isles.cli import main; assert main(sys.argv[1:]) == 0;"
        "print(*(m for m in sys.modules if '.' not in m), file=sys.stderr)"
    )
    plan = ["plan", str(ROOT / "examples" / "quickstart.yaml"), "--gpus=8xh100"]
    for words, others in (
        (plan, {"aiohttp", "jinja2"}),
        (["--help"], {"pydantic", "yaml", "psutil", "jinja2"}),
    ):
        result = run_program([sys.executable, "-c", code, *words])
        modules = set(result.stderr.splitlines()[-1].split())
        assert "isles" in modules and not modules & (HEAVY | others), words
    for verb in ("init", "train", "status", "logs", "stop", "checkpoint", "generate", "eval"):
        assert verb in result.stdout


@each(
    ("trian run.yaml", 'Did you mean "train"?'),
    ("train run.yaml --resum no", "Did you mean --resume?"),
    ("logs --rank x", "--rank"),
    ("train", "RUN_FILE"),
    ("stop --timeout soon", "--timeout"),
    ("eval a training.eval_samples=10", "`isles eval` does not take training.eval_samples=10"),
    ("status a b", "`isles status --help` shows what it takes"),
    ("init --template quikstart", "did you mean quickstart?"),
)
def test_a_wrong_command_line_is_exit_code_1(words: str, hint: str, *, here, capsys):
    assert main(words.split()) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and hint in captured.err
    assert "Traceback" not in captured.err and captured.out == ""


@each("status x", "logs", "stop", "checkpoint list", "eval", "generate")
def test_a_run_that_is_not_there_is_exit_code_1(verb: str, *, here: Path, capsys) -> None:
    assert main(verb.split()) == 1
    assert re.search(r"error: no run (.x. )?found", capsys.readouterr().err)


def test_init_replaces_a_file_only_with_force(here: Path, capsys) -> None:
    assert main(["init"]) == 0
    first = Path("run.yaml").read_text()
    assert main(["init", "--template", "finetune"]) == 1
    assert Path("run.yaml").read_text() == first
    assert main(["init", "--template", "finetune", "--force"]) == 0
    assert Path("run.yaml").read_text() != first
    assert main(["init", "--output", "no/such/folder.yaml"]) == 1


def test_init_takes_the_file_as_an_argument(here: Path, capsys) -> None:
    """And the comments of the file name it."""
    assert main(["init", "my run.yaml", "--template", "lora"]) == 0
    assert "isles train 'my run.yaml'" in capsys.readouterr().out
    assert "isles train 'my run.yaml'" in Path("my run.yaml").read_text()
    assert main(["init", "a.yaml", "--output", "b.yaml"]) == 1
    assert "a.yaml and b.yaml" in capsys.readouterr().err


def test_config_show_and_schema(here: Path, capsys) -> None:
    main(["init"])
    capsys.readouterr()
    assert main(["config", "show", "run.yaml", "--training.max-steps", "77"]) == 0
    assert "max_steps: 77" in capsys.readouterr().out
    assert main(["config", "schema"]) == 0
    assert "training" in json.loads(capsys.readouterr().out)["properties"]


def test_without_torch_train_says_what_to_install(here: Path) -> None:
    main(["init"])
    code = """
import sys
sys.modules.update(torch=None, transformers=None, numpy=None)  # as find_spec sees it
from isles.cli import main
assert main(["train", "run.yaml", "--dry-run"]) == 0
sys.exit(main(["train", "run.yaml"]))
"""
    refused = run_program([sys.executable, "-c", code])
    assert refused.returncode == 1, refused.stderr
    assert "pip install 'isles[train]'" in refused.stderr
    assert "torch, transformers, numpy" in refused.stderr
    assert "isles.agent" in refused.stdout, "a dry run needs none of them"
    assert not (here / "runs").exists()


def test_verify_names_the_broken_checkpoint(here: Path, capsys) -> None:
    run_dir = bare_run(Path("runs/a-1"))
    add_checkpoint(run_dir, 10)
    add_checkpoint(run_dir, 20, files={"x": {"size": 5, "sha256": "0" * 64}})
    assert main(["checkpoint", "list", "a"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert main(["checkpoint", "verify", "a"]) == 3
    out = capsys.readouterr().out
    assert "step-00000010: whole" in out and "step-00000020: NOT whole" in out
    assert main(["checkpoint", "verify", "a", "--step", "10"]) == 0
    assert main(["checkpoint", "verify", "a", "--step", "11"]) == 1


def test_a_reader_that_has_seen_enough_is_no_error(here: Path) -> None:
    log = bare_run(Path("runs/a-1")).attempt(1).rank_log(0)
    log.parent.mkdir(parents=True)
    log.write_text("x" * 80 + "\n" * 200_000)
    command = f"{quote(sys.executable)} -m isles logs -n 200000 | head -1; echo ${{PIPESTATUS[0]}}"
    result = run_program(["bash", "-c", command])
    assert (result.stdout.splitlines(), result.stderr) == (["x" * 80, "0"], "")


def test_an_error_of_ours_keeps_its_traceback(here: Path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "isles.config.show", None)  # an installation that lacks a file
    assert main(["init"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "please report it" in err
