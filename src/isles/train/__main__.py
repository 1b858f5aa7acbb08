"""One rank under a torchrun typed by hand: `torchrun --nproc-per-node=2 -m isles.train run.yaml`.

Takes a run file with overrides; rank 0 makes or chooses the run directory. Or, with `--attempt`, a
run directory that a launcher has made: so the script of a job starts it.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isles.config.load import load_run_file
from isles.config.resolve import Resolved, resolve
from isles.dist.world import World, join_world
from isles.errors import UserError
from isles.rundir.begin import begin_run, new_attempt, write_launch
from isles.rundir.env import RankEnv, read_rank_env
from isles.rundir.find import numbered_runs
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record
from isles.rundir.restarts import (
    checkpoint_to_load,
    has_saved,
    newest_step,
    read_last_step,
)
from isles.train.hosts import own_run_dir
from isles.train.job import die_with_torchrun, exit_status
from isles.train.node_log import job_node_log
from isles.train.rank_edges import log_to_file
from isles.train.verdict import trouble, write_failure
from isles.train.worker import run_rank


def main() -> int:
    """Train as the rank that the environment names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train")
    parser.add_argument("target", type=Path, help="a run file; with --attempt a run directory")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--resume", default="auto", help="auto, no, or a path")
    parser.add_argument("--attempt", type=int, help="a start of this run, made by a launcher")
    parser.add_argument("--resume-from", type=Path, help="with --attempt: a checkpoint")
    options = parser.parse_args()
    env = read_rank_env()
    if options.attempt is not None:
        return _train_for_launcher(options.target, options.attempt, options.resume_from, env)
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


def _train_for_launcher(target: Path, number: int, resume_from: Path | None, env: RankEnv) -> int:
    """Train in a run directory that is there; returns what torchrun is to be told."""
    die_with_torchrun()
    run_dir = RunDir(target.absolute())
    attempt, env = run_dir.attempt(number), replace(env, attempt=number)
    log_to_file(attempt, env)
    resume_from = checkpoint_to_load(run_dir, attempt, resume_from, env.restart)
    with job_node_log(run_dir, attempt, env):
        return exit_status(attempt, env, run_rank(run_dir, attempt, env, resume_from))


def _agree_on_run(
    resolved: Resolved, text: str, resume: str, world: World
) -> tuple[RunDir, Attempt, Path | None]:
    """The run directory and the attempt, chosen by rank 0. All ranks must call this."""

    agents = world.gather(ProcessId.of(os.getppid()).record())

    def begin() -> tuple[RunDir, Attempt, Path | None]:
        begun = begin_run(resolved, text, _after_restart(resolved, agents) or resume)
        attempt = new_attempt(begun.run_dir, text)
        write_launch(
            attempt,
            ProcessId.of(os.getpid()),
            world_size=world.world_size,
            device=resolved.device,
            command=tuple(sys.argv),
            resumed_from=begun.resume_from,
            agents=agents,
        )
        sys.stderr.write(f"{begun.note or 'a new run'}: {begun.run_dir.path}\n")
        return begun.run_dir, attempt, begun.resume_from

    run_dir, attempt, resume_from = world.main_first(begin)
    return *own_run_dir(run_dir, attempt, world), resume_from


def _after_restart(resolved: Resolved, agents: list[dict[str, Any]]) -> str | None:
    """Where to go on if torchrun has just started these ranks again; None: it has not.

    It is the same torchrun if one of its agents was there before. A restart goes on in the same
    run directory, whatever `--resume` says; an error that would only come again is not retried.
    """
    runs = numbered_runs(Path(resolved.config.output_dir).expanduser(), resolved.config.name)
    run_dir = next((run for _, run in reversed(runs) if run.attempts()), None)
    attempt = run_dir.last_attempt() if run_dir is not None else None
    if run_dir is None or attempt is None:
        return None
    launch = read_record(attempt.launch) or {}
    if not any(agent in launch.get("agents", ()) for agent in agents):
        return None
    outcome = read_record(attempt.outcome)
    error = (outcome or {}).get("error") or {}
    if error.get("will_recur"):
        raise UserError(
            f"torchrun has started this again, which would only fail again: {error['what']}",
            where=str(error.get("where", "")),
            fix=str(error.get("fix", "")),
        )
    if outcome is None:
        # Else a rank 0 that ran on another host would be taken for running still.
        write_failure(attempt, trouble("its ranks were lost", "torchrun has started them again"))
    reached, saved = read_last_step(attempt, 0), newest_step(run_dir)
    at = f" at step {reached}" if reached is not None else ""
    sys.stderr.write(f"the ranks were lost{at}, and torchrun has started them again\n")
    asked = launch.get("resumed_from")
    is_asked = asked and saved is not None and not has_saved(run_dir, attempt)
    return str(asked) if is_asked else str(run_dir.path)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread that waits for a dead disk or rank must not keep the process.
    os._exit(exit_code)
