"""Models of somebody else's making, by the commands that look at them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from isles.cli import main
from isles.config.sections.model import ModelConfig
from isles.errors import UserError
from isles.models.build import load_model_config
from isles.plan.model import files_params
from tests.deadline import run_program
from tests.small_models import small_model

FINE = small_model().config.to_dict()


def _other(**values: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**FINE, **values}))


def _pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


BAD: dict[str, Callable[[Path], object]] = {
    "brackets": _text("config.json", "[" * 100_000),
    "no heads": _other(num_attention_heads=0),
    "uneven heads": _other(num_key_value_heads=3),
    "huge": _other(hidden_size=10**12),
    "no theta": _other(rope_theta=0),
    "texts": _other(num_hidden_layers="2", hidden_size="64"),
    "labels": _other(num_labels=10**9),
    "dropout": _other(attention_dropout=5),
    "vision": _other(vision_config={"num_hidden_layers": 10**9}),
    "inner": _other(text_config={"text_config": {"hidden_size": 0}}),
    "pipe": _pipe,
}
NOT_FOR_PLANS: dict[str, Callable[[Path], object]] = {
    "rope": _other(rope_scaling={"rope_type": "evil", "factor": 2.0}),
    "activation": _other(hidden_act="evil"),
    "kind": _other(model_type="evil"),
}


@pytest.fixture
def model(tmp_path: Path, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model that the run file names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    content = yaml.safe_load(run_file.read_text())
    content["model"]["name_or_path"] = str(tmp_path / "model")
    run_file.write_text(yaml.safe_dump(content))
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_a_model_that_is_none_ends_each_command_in_words(
    model: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    for name, make in BAD.items():
        (model / "config.json").unlink(missing_ok=True)
        _other()(model)
        make(model)
        for words in (["plan"], ["data", "show"], ["train", "--dry-run"], ["train"]):
            code = main([*words, str(run_file)])
            said = "".join(capsys.readouterr())
            is_said = "error: " in said and "config.json" in said and "fix: " in said
            if code not in (1, 2) or not is_said or "Traceback" in said:
                wrong.append(f"{name}, {' '.join(words)}: {code} {said[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert not list(run_file.parent.glob("runs/*/attempts/*/restart-*"))


def test_a_check_names_the_config_of_a_model_that_is_none(
    model: Path, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BAD["no theta"](model)
    assert main(["check", str(run_file)]) == 2
    said = "".join(capsys.readouterr())
    assert "rope_theta: 0 is not a number above 0" in said and "Traceback" not in said


@pytest.mark.long
def test_ranks_end_in_words_without_a_restart(model: Path, run_file: Path) -> None:
    wrong = []
    for name, make in NOT_FOR_PLANS.items():
        make(model)
        done = run_program([sys.executable, "-m", "isles", "train", run_file, "--resume", "no"])
        said = done.stdout + done.stderr
        if done.returncode not in (1, 2) or "fix: " not in said or "Traceback" in said:
            wrong.append(f"{name}: {done.returncode} {said[-1500:]}")
    assert not wrong, "\n".join(wrong)
    decided = [json.loads(p.read_text()) for p in run_file.parent.glob("runs/*/*/*/restart-*")]
    assert all(record["decision"] != "restart" for record in decided), decided


def test_an_odd_generation_config_is_refused_before_training(tmp_path: Path) -> None:
    wrong = []
    odd = [{"eos_token_id": value} for value in ("x", {}, 10**30, [[]], 1.5, True, ["x"])]
    odd += [{"to_json_file": 1}, {"bos_token_id": {}}, {"pad_token_id": -7}]
    _other()(tmp_path)
    config = ModelConfig(name_or_path=str(tmp_path), init="pretrained")
    for values in odd:
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        try:
            load_model_config(config)
        except UserError as error:
            if next(iter(values)) not in str(error) + str(error.where):
                wrong.append(f"{values}: {error}")
        else:
            wrong.append(f"{values}: taken")
    assert not wrong, "\n".join(wrong)


def test_a_pipe_among_a_models_files_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja", "vocab.txt"):
        _other()(tmp_path)
        os.mkfifo(tmp_path / name)
        with pytest.raises(UserError, match="not a"):
            load_model_config(ModelConfig(name_or_path=str(tmp_path)))
        assert files_params(str(tmp_path)) is None
        (tmp_path / name).unlink()


def test_a_file_that_is_exchanged_after_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads what isles has checked, even if another user can write to the folder."""
    folder, private = tmp_path / "model", tmp_path / "private.json"
    small_model().save_pretrained(folder)
    folder.chmod(0o777)
    private.write_text(json.dumps({**FINE, "architectures": ["private"], "note": "private"}))
    config = ModelConfig(name_or_path=str(folder))
    read = AutoConfig.from_pretrained

    def exchange(*args: Any, **more: Any) -> Any:
        (folder / "config.json").unlink()
        (folder / "config.json").symlink_to(private)
        return read(*args, **more)

    monkeypatch.setattr(AutoConfig, "from_pretrained", exchange)
    found = load_model_config(config)
    assert "private" not in found.to_json_string() and found.name_or_path == str(folder)
