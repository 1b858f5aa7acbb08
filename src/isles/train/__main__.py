"""One rank under a torchrun typed by hand: `torchrun --nproc-per-node=2 -m isles.train run.yaml`.

Takes a run file with overrides; rank 0 makes or chooses the run directory. Or, with `--attempt`, a
run directory that a launcher has made: so the script of a job starts it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from isles.config.load import load_run_file
from isles.run.env import RankEnv, read_rank_env
from isles.run.paths import RunDir
from isles.run.restarts import checkpoint_to_load
from isles.train.by_hand import leave, train_by_hand
from isles.train.job import die_with_torchrun, exit_status
from isles.agent.node_log import job_node_log
from isles.agent.rank_edges import log_to_file
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
    target, overrides = options.target, options.overrides
    return train_by_hand(lambda: load_run_file(target, overrides), options.resume, env)


def _train_for_launcher(target: Path, number: int, resume_from: Path | None, env: RankEnv) -> int:
    """Train in a run directory that is there; returns what torchrun is to be told."""
    die_with_torchrun()
    run_dir = RunDir(target.absolute())
    attempt, env = run_dir.attempt(number), replace(env, attempt=number)
    log_to_file(attempt, env)
    resume_from = checkpoint_to_load(run_dir, attempt, resume_from, env.restart)
    with job_node_log(run_dir, attempt, env):
        return exit_status(attempt, env, run_rank(run_dir, attempt, env, resume_from))


if __name__ == "__main__":
    leave(main())
