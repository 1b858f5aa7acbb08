"""The key track, and what an upload to the hub needs: faults with their place, and round trips."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from isles.config.load import Loaded, load_run_file
from isles.config.resolve import dump_resolved, load_resolved, resolve
from isles.config.sections.output import MLflowConfig, WandbConfig, tracker_sections
from isles.config.show import show
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError
from isles.run.begin import require_packages
from tests.each import each

RUN = """model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: python-docs}]}
training: {max_steps: 5}
"""
URI = "http://me:pa55word@tracker:5000/path"

FAULTS = [
    ("track: [wandbb]", "track.0", '"wandbb", not one of its values', "did you mean wandb?"),
    ("track: wandb", "track", "not a list", "track: [wandb]"),
    ("track: [3]", "track.0", "3, not one of its values", "jsonl, tensorboard, wandb, mlflow"),
    ("track: [null]", "track.0", "empty", "delete the line"),
    ("track: [comet]", "track.0", "not one of its values", "one of: jsonl"),
    ("track: [{kind: wandbb}]", "track.0.kind", '"wandbb"', "did you mean wandb?"),
    ("track: [{project: p}]", "track.0", "does not say its kind", "wandb, mlflow"),
    ("track: [{kind: wandb, projct: p}]", "track.0.projct", "unknown key", "mean project?"),
    ("track: [{kind: wandb, mode: off}]", "track.0.mode", '"off"', "online, offline"),
    ("track: [{kind: wandb, tags: a}]", "track.0.tags", "not a list", "[a, b]"),
    ("track: [{kind: mlflow, project: p}]", "track.0.project", "unknown", "kind: wandb"),
    ("track: [wandb, {kind: wandb}]", "track.1.kind", "wandb stands twice", "keep one"),
    ("track: [jsonl, jsonl]", "track.1", "jsonl stands twice", "keep one"),
    (
        "track: [{kind: mlflow, tracking_uri: tracker:5000}]",
        "track.0.tracking_uri",
        "tracker:5000 has no scheme",
        "write http://tracker:5000",
    ),
    (
        f"track: [{{kind: mlflow, tracking_uri: '{URI}'}}]",
        "track.0.tracking_uri",
        "holds a user name or a password",
        "write http://tracker:5000/path, and set MLFLOW_TRACKING_USERNAME",
    ),
    ("wandb_project: p", "wandb_project", "a name from axolotl", "here it is called track"),
    ("hub_model_id: a/b", "hub_model_id", "a name from", "checkpoint.push_to_hub"),
    ("checkpoint: {push_to_hub: me}", "checkpoint.push_to_hub", '"me", not the name', "owner/name"),
    (
        "checkpoint: {push_to_hub: a/b, export_on_finish: false}",
        "checkpoint.push_to_hub",
        "export_on_finish is false",
        "delete one",
    ),
    ("checkpoint: {max_shard_gb: 0}", "checkpoint.max_shard_gb", "too small", "at least"),
]


def load(tmp_path: Path, line: str) -> Loaded:
    path = tmp_path / "run.yaml"
    path.write_text(f"{RUN}{line}\n")
    return load_run_file(path)


@each(("line", "key", "what", "fix"), FAULTS)
def test_a_fault_names_its_line_its_value_and_a_fix(
    tmp_path: Path, line: str, key: str, what: str, fix: str
) -> None:
    with pytest.raises(ConfigErrors) as raised:
        load(tmp_path, line)
    (issue,) = raised.value.issues
    assert issue.where == f"{tmp_path}/run.yaml:5 {key}"
    assert what in issue.what and fix in issue.fix
    assert "pa55word" not in str(issue)


@each(
    "line",
    [
        "track: []",
        "track: [mlflow, wandb]",
        "track: [tensorboard, {kind: wandb, project: p, tags: [a, b], mode: offline}]",
        "track: [{kind: mlflow, tracking_uri: 'http://tracker:5000', experiment: 'a b'}, jsonl]",
        "track: [{kind: mlflow, tracking_uri: databricks}]",
        "track: [{kind: mlflow, tracking_uri: 'databricks://profile@x'}]",
    ],
)
def test_what_is_right_reads_back_the_same(tmp_path: Path, line: str) -> None:
    loaded = load(tmp_path, line)
    resolved = resolve(loaded, num_gpus=0)
    assert load_resolved(dump_resolved(resolved)) == resolved
    again = tmp_path / "again.yaml"
    again.write_text(show(resolved))
    assert load_run_file(again).config == loaded.config


def test_a_plain_name_is_a_section_with_its_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, "track: [wandb, {kind: mlflow, experiment: e}]").config
    assert tracker_sections(config.track) == (WandbConfig(), MLflowConfig(experiment="e"))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_package_that_is_missing_is_named_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = load(tmp_path, f"track: [{name}]").config
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    require_packages(config)
    monkeypatch.setitem(sys.modules, name, None)  # as find_spec sees what is not installed
    with pytest.raises(MissingDependencyError, match=name) as raised:
        require_packages(config)
    assert "pip install 'isles[" in raised.value.fix


def test_mlflow_needs_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI is not set"):
        require_packages(load(tmp_path, "track: [mlflow]").config)
    require_packages(load(tmp_path, "track: [{kind: mlflow, tracking_uri: 'http://a'}]").config)
