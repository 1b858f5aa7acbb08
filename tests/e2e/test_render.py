"""What `isles render` writes, started without isles: the scripts that torchrun runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isles.run.paths import RunDir
from isles.run.records import read_record, read_rows
from tests.deadline import DEADLINE_S
from tests.ports import free_port

RUN = """\
name: tiny
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training:
  {max_steps: 8, global_batch_size: 4, micro_batch_size: 2, precision: 32-true,
   learning_rate: 1e-2, logging_steps: 1, eval_steps: null, eval_samples: 4}
checkpoint: {export_on_finish: false}
track: [jsonl]
clusters:
  - {nodes: 2, gpus_per_node: 1, device: cpu}
"""

OWN = """\
name: own
training: {script: own.py, script_args: [--word, hello there]}
clusters:
  - {gpus_per_node: 2, device: cpu}
"""

SCRIPT = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
line = " ".join(os.environ[name] for name in names) + f" {sys.argv[1:]}"
open(f"rank-{os.environ['RANK']}.txt", "w").write(line)
"""


def render(folder: Path, text: str, *words: str) -> Path:
    """Render to a script, and give it."""
    (folder / "run.yaml").write_text(text)
    command = [sys.executable, "-m", "isles", "render", "run.yaml", *words, "-o", "job.sh"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / "job.sh"


@pytest.mark.long
def test_one_line_for_each_of_two_nodes_trains(tmp_path: Path) -> None:
    script = render(tmp_path, RUN, "--to", "torchrun")
    # The command isles is nowhere to be found: only the trainer is needed.
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env |= {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    nodes = [
        subprocess.Popen(["bash", script, str(node)], cwd="/", env=env, stderr=subprocess.PIPE)
        for node in (1, 0)  # the order does not matter
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=DEADLINE_S)
        assert node.returncode == 0, errors.decode()
    run_dir = RunDir(tmp_path / "runs" / "tiny-1")
    attempt = run_dir.attempt(1)
    assert (read_record(attempt.outcome) or {})["state"] == "finished"
    assert (read_record(attempt.launch) or {})["world_size"] == 2
    losses = [row["loss"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert len(losses) == 8


def test_a_script_of_the_users_own_is_all_that_runs(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    script = render(tmp_path, OWN, "--to", "torchrun")
    env = {**os.environ, "MASTER_PORT": str(free_port())}
    subprocess.run(["bash", script], cwd="/", env=env, check=True, timeout=DEADLINE_S)
    for rank in (0, 1):
        found = (tmp_path / f"rank-{rank}.txt").read_text()
        assert found == f"{rank} {rank} 2 127.0.0.1 ['--word', 'hello there']"
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    render(tmp_path, RUN, "--to", "pbs")
    done = subprocess.run(
        [sys.executable, "-m", "isles", "render", "run.yaml", "--to", "pbs", "-o", "job.sh"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "--force" in done.stderr
