"""The job script of PBS under plain bash: a hand-made node file, and small fakes of pbsdsh, qsub
and torchrun on PATH; the decisions between are those of the real script and the real records."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S

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
#!/bin/bash
for word; do case $word in --node_rank=*) rank=${word#*=} ;; esac; done
echo "$rank $*" >>"$FOLDER/torchrun.calls"
"""


class Job:
    """A run that was submitted to the fake qsub, and its script."""

    def __init__(
        self,
        folder: Path,
        torchrun: str,
        *,
        time: str = "1h",
        save_before: str = "5m",
        text: str = RUN,
    ) -> None:
        self.folder = folder
        for name, lines in FAKES.items():
            write_program(folder / "bin" / name, f"#!/bin/bash\n{lines}\n")
        write_program(folder / "venv" / "bin" / "torchrun", TORCHRUN + torchrun)
        write_program(
            folder / "venv" / "bin" / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        )
        activate = f'export FOLDER={folder} PATH={folder}/venv/bin:{folder}/bin:"$PATH"\n'
        (folder / "venv" / "bin" / "activate").write_text(activate)
        text = text.format(folder=folder, time=time, save_before=save_before)
        (folder / "run.yaml").write_text(text)
        self.train("--detach")
        self.attempt = RunDir(folder / "runs" / "tiny-1").attempt(1)
        self.script = self.attempt.script

    def train(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "isles", "train", "run.yaml", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stderr if code else done.stdout

    def run(self, **variables: str) -> int:
        """Run the script as PBS would on two hosts, each of them twice in the node file."""
        (self.folder / "nodes").write_text("a1\na1\na2\na2\n")
        done = subprocess.run(
            ["bash", self.script],
            cwd="/",
            check=False,
            timeout=DEADLINE_S,
            env={
                "HOME": "/",
                "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
                "HOSTNAME": "a1",
                "PBS_JOBID": "1.srv",
                "PBS_NODEFILE": str(self.folder / "nodes"),
                "PBS_O_WORKDIR": str(self.folder),
                "PBS_O_HOST": "nowhere",
                **variables,
            },
        )
        return done.returncode

    @property
    def calls(self) -> list[str]:
        return sorted((self.folder / "torchrun.calls").read_text().splitlines())


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_the_dry_run_shows_what_is_submitted(tmp_path: Path) -> None:
    job = Job(tmp_path, "")
    text = job.train("--dry-run", "--resume", "no")
    expected = job.attempt.script.read_text().replace("/tiny-1", "/tiny-2")
    assert text.endswith(f"qsub would take this script:\n\n{expected}\n")
    assert (job.folder / "bin" / "qsub.calls").read_text() == f"{job.attempt.script}\n"


@pytest.mark.long
def test_a_rendered_job_of_a_users_script_does_not_go_on_for_ever(tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    job = Job(
        tmp_path,
        "trap 'kill $!; exit 1' TERM; sleep 1000 & wait $!",
        time="60s",
        save_before="58s",
        text=OWN,
    )
    job.script = tmp_path / "render.sh"
    words = [sys.executable, "-m", "isles", "render", "run.yaml", "--to", "pbs"]
    subprocess.run([*words, "-o", job.script], cwd=tmp_path, check=True, timeout=DEADLINE_S)
    assert job.run(ISLES_STARTS="19") == 0
    submitted = (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:]
    assert submitted == [f"-v ISLES_STARTS=20 {job.script}"]
    assert job.run(ISLES_STARTS="20") != 0
    assert (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:] == submitted


def test_what_qsub_refuses_is_shown_with_its_place(tmp_path: Path) -> None:
    job = Job(tmp_path, "")
    for said, key, fix in (
        ("qsub: Unknown queue", "queue", "qstat -Q"),
        ("qsub: Invalid account", "account", "-P NAME"),
        ("qsub: node(s) specification error", "resources", "dialect"),
    ):
        write_program(tmp_path / "bin" / "qsub", f"#!/bin/sh\necho '{said}' >&2; exit 1\n")
        text = job.train("--resume", "no", f"clusters.0.launcher.{key}=x", code=1)
        assert said.removeprefix("qsub: ") in text
        assert f"command line clusters.0.launcher.{key}" in text
        assert fix in text


@pytest.mark.long
def test_the_rendered_script_needs_no_run_directory(tmp_path: Path) -> None:
    """It leaves the request to stop in the newest run, and is submitted again after progress."""
    torchrun = """\
run=$FOLDER/runs/tiny-7
[ "$rank" -ne 0 ] || mkdir -p "$run/attempts/001" "$run/checkpoints/step-00000003"
until [ -e "$run/attempts/001/stop-request.json" ]; do sleep 0.1; done
exit 1
"""
    job = Job(tmp_path, torchrun, time="60s", save_before="45s")
    script = tmp_path / "render.sh"
    words = [sys.executable, "-m", "isles", "render", "run.yaml", "--to", "pbs", "-o", str(script)]
    subprocess.run(words, cwd=tmp_path, check=True, timeout=DEADLINE_S)
    job.script = script
    assert job.run() == 0
    assert [call.partition(" -m ")[2] for call in job.calls] == [
        f"isles.train {tmp_path}/run.yaml"
    ] * 2
    assert (tmp_path / "bin" / "qsub.calls").read_text().splitlines()[1:] == [str(script)]
