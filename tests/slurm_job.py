"""Job scripts of a run, and a run in a job of Slurm, whose commands are small programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from isles.config.resolve import dump_resolved, resolve
from isles.launch.queue.script import JobText, job_script, rendered_script
from isles.launch.queue.status import refresh
from isles.run.begin import write_launch
from isles.run.paths import RunDir
from tests.deadline import run_program
from tests.programs import write_program
from tests.run_files import load

RUN = """\
name: llama-1b
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 32}
clusters:
  - launcher:
      kind: slurm
      partition: gpu
      account: physics
      qos: long
      constraint: "a100|h100"
      time: 1d
      save_before: 10m
      memory_per_node: 200G
      cpus_per_node: 28
      extra: [--mail-type=END]
    nodes: 2
    gpus_per_node: 4
    workdir: /home/me/train
    environment: {conda: train, modules: [cuda/12.8], variables: {HF_HOME: /scratch/hf}}
    network: {profile: infiniband}
"""
OWN = f"name: mine\ntraining: {{script: my.py}}\n{RUN[RUN.index('clusters:') :]}"
"""With a script of the user's own."""

RUN_DIR = "/home/me/train/runs/llama-1b-1"
_COMMAND = ["-m", "isles.train", "run.yaml"]
_HERE = ("workdir=null", "nodes=1", "device=cpu")


def script_text(folder: Path, *overrides: str, run_dir: str | None = RUN_DIR, **more: Any) -> str:
    """The script of a job; without a run directory the one that needs no isles.

    `more`: of the section of the launcher.
    """
    config = load(folder, RUN, *overrides).config
    cluster = config.clusters[0]
    device = "cpu" if cluster.device == "cpu" else "cuda"
    launcher: Any = cluster.launcher.model_copy(update=more)
    job = JobText(launcher, cluster.max_nodes, 4, device, "/home/me/train", run_dir)
    if run_dir is None:
        return rendered_script(config, job, _COMMAND, path="/home/me/train/job.sh")
    return job_script(config, job.of(RunDir(Path(run_dir)).attempt(1)))


class Job:
    """A run directory with a job of one node, and Slurm's commands as programs that all fail."""

    def __init__(self, folder: Path, text: str = RUN) -> None:
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        # The folder of the run file's Python comes first on the script's PATH.
        python = f"environment={{python: {self.bin}/python}}"
        here = (*_HERE, python, f"launcher.bin_path={self.bin}")
        loaded = load(folder, text, *(f"clusters.0.{override}" for override in here))
        self.config = loaded.config
        self.launcher: Any = self.config.clusters[0].launcher
        self.run_dir = RunDir(folder / "runs" / "llama-1b-1")
        self.attempt = self.run_dir.attempt(1)
        self.attempt.path.mkdir(parents=True)
        self.run_dir.resolved.write_text(dump_resolved(resolve(loaded, nproc=(4,), device="cpu")))
        job: Any = {"launcher": "slurm", "job_id": "7", "bin_path": str(self.bin)}
        write_launch(self.attempt, None, world_size=4, device="cpu", command=("sbatch",), **job)
        for name in ("scontrol", "sbatch", "scancel", "sinfo", "srun", "torchrun", "sacct"):
            self.program(name, "exit 1")

    def program(self, name: str, lines: str) -> None:
        """A command of this name: lines of bash, after its call is noted."""
        write_program(self.bin / name, f'echo "{name} $*" >>{self.calls}\n{lines}')

    def ask(self) -> Any:
        """What the queue answers now."""
        return refresh(self.run_dir, self.attempt, max_age_s=0.0)

    def run_rendered(self, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script that needs no isles to its end under plain bash."""
        job = JobText(self.launcher, 1, 4, "cpu", str(self.bin.parent))
        self.program("srun", 'SLURM_NODEID=0 exec bash -c "${@: -1}"')
        text = rendered_script(self.config, job, _COMMAND)
        environ = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1", **variables}
        environ["PATH"] = f"{self.bin}:{os.environ['PATH']}"
        return run_program(["bash", "-c", text], env=environ)
