"""Is this machine fit for the training: its card, what is installed, what the run file needs.

    python train_single_test.py                   on each machine, before the first training

It is `isles check --smoke` for this machine alone: a kernel really runs on the card, and a small
model is trained for three steps. Exit code 2 where something is wrong, with what to type.
"""

from __future__ import annotations

import subprocess
import sys

import torch
import train_distributed

from isles.launch.gpus import find_gpus


def main() -> int:
    """Check this machine; returns the exit code of `isles check`."""
    names = [f"GPU: {gpu.name}" for gpu in find_gpus().gpus]
    print(f"CUDA: {torch.cuda.is_available()}", *names, sep="\n", flush=True)
    values = [*train_distributed.settings(1), *sys.argv[1:]]
    command = [sys.executable, "-m", "isles", "check", str(train_distributed.RUN_FILE), *values]
    return subprocess.run(
        [*command, "--smoke", "--no-net"], cwd=train_distributed.PROJECT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
