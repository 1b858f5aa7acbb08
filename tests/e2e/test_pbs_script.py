"""The job script of PBS under plain bash: a hand-made node file, and small fakes of pbsdsh, qsub
and torchrun on PATH; the decisions between are those of the real script and the real records."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shlex import quote

import pytest

from tests.deadline import run_program
from tests.e2e.typed import isles
from tests.programs import write_program

RUN = """\
name: tiny
model: {{name_or_path: llama-2m, init: scratch}}
data: {{sources: [{{type: fake}}], seq_length: 32}}
training: {{max_steps: 20, global_batch_size: 4}}
clusters:
  - launcher: {{kind: pbs, time: {time}, save_before: {save_before}, bin_path: {folder}/bin}}
    nodes: 2
    gpus_per_node: 1
    device: cpu
    max_restarts: 0
    environment: {{venv: {folder}/venv}}
"""

OWN = f"name: tiny\ntraining: {{{{script: own.py}}}}\n{RUN[RUN.index('clusters:') :]}"
"""With a script of the user's own."""

FAKES = {
    "qstat": 'case "$1" in --version) echo "pbs_version = 23.06" ;; *) exit 35 ;; esac',
    # The job's id tells how often it was called.
    "qsub": 'echo "$*" >>"$0.calls"; echo "$(wc -l <"$0.calls").srv"',
    # Once for each line of the node file, with the bare environment that real tasks have.
    "pbsdsh": """
[ "$1" != -- ] || shift
for host in $(cat "$PBS_NODEFILE"); do
  (cd / && exec env -i HOME=/ PATH=/bin:/usr/bin HOSTNAME="$host" PBS_JOBID="$PBS_JOBID" "$@") &
done
wait
exit 0
""",
}

TORCHRUN = """\
for word; do case $word in --node_rank=*) rank=${word#*=} ;; esac; done
echo "$rank $*" >>"$FOLDER/torchrun.calls"
"""


def prepare(folder: Path, torchrun: str = "", save_before: str = "5m", text: str = RUN) -> None:
    """A run file in a folder, and the programs of a PBS that it names."""
    for name, lines in FAKES.items():
        write_program(folder / "bin" / name, lines)
    write_program(folder / "venv/bin/torchrun", TORCHRUN + torchrun)
    write_program(folder / "venv/bin/python", f'exec {quote(sys.executable)} "$@"')
    activate = f'export FOLDER={folder} PATH={folder}/venv/bin:{folder}/bin:"$PATH"\n'
    (folder / "venv/bin/activate").write_text(activate)
    time = "60s" if save_before.endswith("s") else "1h"
    (folder / "run.yaml").write_text(text.format(folder=folder, time=time, save_before=save_before))


def run_rendered(folder: Path, **variables: str) -> int:
    """Run the script that needs no run directory as PBS would on two hosts, each of them twice in
    the node file."""
    script = folder / "render.sh"
    if not script.exists():
        isles("render", "run.yaml", "--to", "pbs", "-o", "render.sh", cwd=folder)
    (folder / "nodes").write_text("a1\na1\na2\na2\n")
    env = {
        "HOME": "/",
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "HOSTNAME": "a1",
        "PBS_JOBID": "1.srv",
        "PBS_NODEFILE": str(folder / "nodes"),
        "PBS_O_WORKDIR": str(folder),
        "PBS_O_HOST": "nowhere",
    }
    return run_program(["bash", script], Path("/"), env | variables).returncode


def calls(path: Path) -> list[str]:
    """What a program was called with."""
    return sorted(path.read_text().splitlines())


@pytest.mark.long
def test_a_rendered_job_of_a_users_script_does_not_go_on_for_ever(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    endless = "trap 'kill $!; exit 1' TERM; sleep 1000 & wait $!"
    prepare(tmp_path, endless, save_before="58s", text=OWN)
    assert run_rendered(tmp_path, ISLES_STARTS="19") == 0
    assert calls(tmp_path / "bin/qsub.calls") == [f"-v ISLES_STARTS=20 {tmp_path}/render.sh"]
    assert run_rendered(tmp_path, ISLES_STARTS="20") != 0
    assert len(calls(tmp_path / "bin/qsub.calls")) == 1


@pytest.mark.long
def test_the_rendered_script_needs_no_run_directory(tmp_path: Path) -> None:
    """It leaves the request to stop in the newest run, and is submitted again after progress."""
    torchrun = """\
run=$FOLDER/runs/tiny-7
[ "$rank" -ne 0 ] || mkdir -p "$run/attempts/001" "$run/checkpoints/step-00000003"
until [ -e "$run/attempts/001/stop-request.json" ]; do sleep 0.1; done
exit 1
"""
    prepare(tmp_path, torchrun, save_before="45s")
    assert run_rendered(tmp_path) == 0
    trained = [call.partition(" -m ")[2] for call in calls(tmp_path / "torchrun.calls")]
    assert trained == [f"isles.train {tmp_path}/run.yaml"] * 2
    assert calls(tmp_path / "bin/qsub.calls") == [f"{tmp_path}/render.sh"]
