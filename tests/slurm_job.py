"""A run in a job of Slurm, whose commands are small programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.cluster import SlurmLauncherConfig
from isles.launch.queue.script import JobText, rendered_script
from isles.launch.queue.status import refresh
from isles.run.begin import write_launch
from isles.run.paths import RunDir
from tests.deadline import run_program
from tests.programs import write_program

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

COMMAND = ["-m", "isles.train", "run.yaml"]
_HERE = ("workdir=null", "environment={}", "nodes=1", "device=cpu")


class Job:
    """A run directory with a job of one node, and Slurm's commands as programs that all fail."""

    def __init__(self, folder: Path, text: str = RUN) -> None:
        self.bin = folder / "bin"
        self.calls = folder / "calls"
        run_file = folder / "run.yaml"
        run_file.write_text(text)
        loaded = load_run_file(run_file, [f"clusters.0.{override}" for override in _HERE])
        self.config = loaded.config
        launcher = self.config.clusters[0].launcher
        assert isinstance(launcher, SlurmLauncherConfig)
        self.launcher = launcher.model_copy(update={"bin_path": str(self.bin)})
        self.run_dir = RunDir(folder / "runs" / "llama-1b-1")
        self.attempt = self.run_dir.attempt(1)
        self.attempt.path.mkdir(parents=True)
        self.run_dir.resolved.write_text(dump_resolved(resolve(loaded, nproc=(4,), device="cpu")))
        write_launch(
            self.attempt,
            None,
            launcher="slurm",
            job_id="7",
            world_size=4,
            device="cpu",
            command=("sbatch",),
            bin_path=str(self.bin),
        )
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
        # The folder of this Python comes first in the script: torchrun must be found before it.
        text = rendered_script(self.config, job, COMMAND).replace(
            "set -uo pipefail", f'export PATH={self.bin}:"$PATH"\nset -uo pipefail'
        )
        search = f"{self.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "PATH": search, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a1"}
        return run_program(["bash", "-c", text], env=environ | variables)
