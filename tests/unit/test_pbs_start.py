"""The launcher pbs up to `qsub`, which is a small program here."""

from __future__ import annotations

from pathlib import Path

import pytest

from isles.errors import ConfigError, UserError
from isles.launch.base import Started, StartOptions
from isles.launch.start import start
from isles.run.records import read_record

RUN = """\
name: tiny
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 2, global_batch_size: 4}
clusters:
  - launcher: {kind: pbs, time: 1h}
    nodes: 2
    gpus_per_node: 1
    device: cpu
"""


def begin(
    folder: Path, qsub: str, *overrides: str, monkeypatch: pytest.MonkeyPatch
) -> Started | str:
    """Start from a folder that is not `workdir`."""
    for name, text in {
        "qsub": qsub,
        "qstat": "[ $1 = --version ] && echo pbs_version = 23 || echo '    job_state = Q'",
    }.items():
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    (folder / "here").mkdir()
    (folder / "my work").mkdir()
    monkeypatch.chdir(folder / "here")
    Path("run.yaml").write_text(RUN)
    more = (
        f"clusters.0.launcher.bin_path={folder}/bin",
        f"clusters.0.workdir={folder}/my work",
        *overrides,
    )
    told: list[str] = []
    return start(StartOptions(Path("run.yaml"), more, "auto", False, told.append, told.append))


def test_paths_are_those_of_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = begin(tmp_path, "echo 7.server", monkeypatch=monkeypatch)
    assert isinstance(started, Started)
    assert started.run_dir.path == tmp_path / "my work" / "runs" / "tiny-1"
    assert (read_record(started.attempt.launch) or {})["job_id"] == "7.server"
    text = started.attempt.script.read_text()
    assert f"cd '{tmp_path}/my work' || exit 1" in text
    assert f"isles.agent '{started.run_dir.path}' --attempt 1" in text
    assert not list((tmp_path / "here").glob("runs*"))


def test_a_job_that_is_refused_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="Unknown queue") as error:
        begin(tmp_path, "echo 'qsub: Unknown queue' >&2; exit 1", monkeypatch=monkeypatch)
    assert "run.yaml" in error.value.where and "qstat -Q" in error.value.fix
    assert not list(tmp_path.rglob("tiny-*"))


@pytest.mark.parametrize("option", ["-J 1-4", "-t 0-3"])
def test_an_array_of_jobs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    extra = f"clusters.0.launcher.extra=[{option}]"
    with pytest.raises(ConfigError, match="would start the same run many times"):
        begin(tmp_path, "echo 7[].server", extra, monkeypatch=monkeypatch)
