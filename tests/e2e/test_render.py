"""What `isles render` writes, started without isles: the scripts that torchrun runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isles.run.records import read_record
from tests.deadline import run_program
from tests.e2e.typed import isles, run_typed, the_run
from tests.ports import free_port
from tests.runs import losses_of

OWN = """\
name: own
training: {script: my own.py, script_args: [--word, hello there]}
clusters:
  - {gpus_per_node: 2, device: cpu}
"""

SCRIPT = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
line = " ".join(os.environ[name] for name in names) + f" {sys.argv[1:]}"
open(f"rank-{os.environ['RANK']}.txt", "w").write(line)
"""


def render(folder: Path, *words: str) -> Path:
    """Render to a script of torchrun, and give it."""
    isles("render", "run.yaml", *words, "--to", "torchrun", "-o", "job.sh", cwd=folder)
    return folder / "job.sh"


@pytest.mark.long
def test_one_line_for_each_of_two_nodes_trains(run_file: Path) -> None:
    tmp_path, run_dir = run_file.parent, the_run(run_file)
    nodes = "clusters=[{nodes: 2, gpus_per_node: 1, device: cpu}]"
    script = render(tmp_path, nodes, "training.max_steps=8", "training.logging_steps=1")
    # The command isles is nowhere to be found: only the trainer is needed.
    place = f"cd /; export MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()} PATH=/usr/bin:/bin"
    run_typed(tmp_path, *(f"{place}; bash {script} {node}" for node in (1, 0)))  # in any order
    attempt = run_dir.attempt(1)
    assert (read_record(attempt.outcome) or {})["state"] == "finished"
    assert (read_record(attempt.launch) or {})["world_size"] == 2
    assert len(losses_of(run_dir)) == 8


def test_a_script_of_the_users_own_is_all_that_runs(tmp_path: Path) -> None:
    (tmp_path / "my own.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text(OWN)
    script = render(tmp_path)
    done = run_program(["bash", script], Path("/"), {**os.environ, "MASTER_PORT": str(free_port())})
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = (tmp_path / f"rank-{rank}.txt").read_text()
        assert found == f"{rank} {rank} 2 127.0.0.1 ['--word', 'hello there']"
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_there_is_not_replaced(run_file: Path) -> None:
    job = run_file.with_name("job.sh")
    job.write_text("mine")
    words = ("render", run_file, "--to", "pbs", "-o", job)
    again = isles(*words, cwd=job.parent, expected=1)
    assert "--force" in again.err and job.read_text() == "mine"
    assert f"submit it: qsub {job}" in isles(*words, "--force", cwd=job.parent).err
