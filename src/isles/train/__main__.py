"""One rank under a torchrun typed by hand: `torchrun --nproc-per-node=2 -m isles.train run.yaml`.

Takes a run file with overrides, or a run directory. Rank 0 makes or chooses the run directory.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from isles.config.load import load_run_file
from isles.config.resolve import Resolved, resolve
from isles.dist.world import World, join_world
from isles.errors import UserError
from isles.rundir.begin import begin_run, new_attempt, write_launch
from isles.rundir.env import read_rank_env
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.train.worker import run_rank


def main() -> int:
    """Train as the rank that the environment names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train")
    parser.add_argument("target", type=Path, help="a run file")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--resume", default="auto", help="auto, no, or a path")
    options = parser.parse_args()
    env = read_rank_env()
    try:
        loaded = load_run_file(options.target, options.overrides)
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        resolved = resolve(loaded, num_gpus=num_gpus, world_size=env.world_size)
        timeout_s = resolved.config.clusters[0].comm_timeout
        world = join_world(
            env,
            device=resolved.device,
            timeout_s=timeout_s,
            work_timeout_s=resolved.config.checkpoint.timeout,
        )
        run_dir, attempt, resume_from = _agree_on_run(resolved, loaded.text, options.resume, world)
    except UserError as error:
        if env.rank == 0:
            sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    return run_rank(run_dir, attempt, env, resume_from, world)


def _agree_on_run(
    resolved: Resolved, text: str, resume: str, world: World
) -> tuple[RunDir, Attempt, Path | None]:
    """The run directory and the attempt, chosen by rank 0. All ranks must call this."""

    def begin() -> tuple[RunDir, Attempt, Path | None]:
        begun = begin_run(resolved, text, resume)
        attempt = new_attempt(begun.run_dir, text)
        write_launch(
            attempt,
            ProcessId.of(os.getpid()),
            world_size=world.world_size,
            device=resolved.device,
            command=tuple(sys.argv),
            resumed_from=begun.resume_from,
        )
        sys.stderr.write(f"{begun.note or 'a new run'}: {begun.run_dir.path}\n")
        return begun.run_dir, attempt, begun.resume_from

    return world.main_first(begin)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that waits for a dead disk or rank must not keep the process.
    os._exit(exit_code)
