"""`isles hub` and `isles join` as users type them at two sites, on one machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import yaml

from isles.errors import ExitCode
from isles.launch.hub import hub_process
from isles.run.find import typed_command
from isles.run.join_line import JoinLine, ask_hub
from isles.run.paths import RunDir
from isles.run.stop import kill_now
from tests.e2e.typed import Command, isles
from tests.runs import files_with, nothing_left, outer_steps_of

STEPS = 40
"""Outer steps are due every ten: one before the kill, and some after it."""


@pytest.mark.long
def test_two_sites_train_one_model_and_the_hub_dies(run_file: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(run_file.read_text())
    content["outer"] = {"kind": "diloco", "sync_every": 10, "min_clusters": 2, "deadline": "10m"}
    content["training"]["max_steps"] = STEPS
    content["data"] = {"sources": [{"type": "fake"}], "seq_length": 32, "validation_fraction": 0}
    content["model"]["name_or_path"] = "tiny"  # a path within the folder: each site has it
    del content["tokenizer"]
    run_file.write_text(yaml.safe_dump(content))
    opening = ("hub", str(run_file))
    state = tmp_path / "runs" / "tiny-hub-1"
    with nothing_left(tmp_path):
        first = Command(*opening, cwd=tmp_path)
        first.until((state / "join").exists)
        line = JoinLine.read(state / "join")
        clusters = {}
        for name, how in (("a", str(state / "join")), ("b", line.secret_text())):
            folder = tmp_path / name
            folder.mkdir()
            shutil.copytree(tmp_path / "tiny", folder / "tiny")
            clusters[name] = Command("join", how, "--name", name, "device=cpu", cwd=folder)
        runs = {name: RunDir(tmp_path / name / "runs" / f"tiny-{name}-1") for name in clusters}
        clusters["b"].until(runs["b"].join_line.exists)
        # Typed as it is, the line can be seen for an instant only.
        words = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
        assert not [text for text in words if line.token in text]

        clusters["a"].until(lambda: 0 in outer_steps_of(runs["a"]))
        kill_now(hub_process(state))
        assert first.end() == ExitCode.COMMUNICATION and "the hub resumes" in first.err
        assert "a joined" in first.out and "b joined" in first.out
        again = isles(*opening, "--detach", cwd=tmp_path)
        assert "goes on at" in again.out and JoinLine.read(state / "join") == line

        for command in clusters.values():
            assert command.end() == 0, command.text
        found = {name: outer_steps_of(run_dir) for name, run_dir in runs.items()}
        assert len(found["a"]) == STEPS // 10 and found["a"].keys() == found["b"].keys()
        for number, row in found["a"].items():
            assert row["digest"] == found["b"][number]["digest"]
            assert set(row["weights"]) == {"a", "b"}
        status = ask_hub(line, "/v1/status", 20)
        assert status["is_over"] and status["round"] == STEPS // 10
        for run_dir in runs.values():
            assert files_with(line.token, run_dir.path) == [run_dir.join_line]
        assert typed_command(runs["b"]) == "isles join - device=cpu --name b"
        # Who comes when all is over finishes as well, with the same weights.
        late = ("join", str(state / "join"), "--name", "c", "device=cpu", "track=[]")
        assert "all clusters of tiny have finished" in isles(*late, cwd=tmp_path).err
        rows = outer_steps_of(RunDir(tmp_path / "runs" / "tiny-c-1"))
        last = STEPS // 10 - 1
        assert rows[last]["digest"] == found["a"][last]["digest"]
        assert ask_hub(line, "/v1/status", 20)["is_over"]
        assert "c        finished" in isles("status", state.name, cwd=tmp_path).out
        isles("stop", "tiny-hub-1", cwd=tmp_path)
