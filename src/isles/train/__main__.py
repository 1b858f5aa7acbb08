"""One rank started by torchrun manually: `torchrun --nproc-per-node=2 -m isles.train run.yaml`.

Takes a run file with overrides; rank 0 makes or chooses the run directory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from isles.config.load import Loaded, load_run_file
from isles.config.resolve import Resolved, resolve
from isles.dist.files import find_disks
from isles.dist.world import World, join_world, raise_first
from isles.errors import UserError, more_lines
from isles.facts.terminal import show_streams
from isles.run.begin import begin_attempt, write_launch
from isles.run.entry import make_own_folder
from isles.run.env import RankEnv, num_restarts, read_rank_env, refuse_kernels, settle_home
from isles.run.find import own_runs
from isles.run.outcome import agent_error, end_failed
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_text_atomic
from isles.run.restarts import read_last_step
from isles.train.worker import run_rank


def main() -> int:
    """Train as the rank that the environment names; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--resume", default="auto", help="auto, no, or a path")
    options = parser.parse_args()
    path, overrides = options.run_file, options.overrides
    refuse_kernels()
    settle_home()
    return train_by_hand(lambda: load_run_file(path, overrides), options.resume, read_rank_env())


def train_by_hand(load: Callable[[], Loaded], resume: str, env: RankEnv) -> int:
    """Train as the rank that torchrun's variables name; returns the exit code.

    All ranks must call this. Only rank 0 prints the errors of the run file.

    Args:
        load: reads the run file.
        resume: `auto`, `no`, or the path of a run directory or of a checkpoint in one.
    """
    try:
        loaded = load()
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        resolved = resolve(loaded, num_gpus=num_gpus, world_size=env.world_size)
        world = join_world(
            env,
            device=resolved.device,
            timeout_s=resolved.config.clusters[0].comm_timeout,
            work_timeout_s=resolved.config.checkpoint.timeout,
        )
        run_dir, number, resume_from = world.main_first(
            lambda: _begin(resolved, loaded.text, resume, world.world_size)
        )
        run_dir = _own_run_dir(run_dir, number, world)
    except UserError as error:
        if env.rank == 0:
            sys.stderr.write("\n".join([f"error: {error}", *more_lines(error.ids), ""]))
        return int(error.exit_code)
    return run_rank(run_dir, run_dir.attempt(number), env, resume_from, world)


def leave(exit_code: int) -> NoReturn:
    """End this process now: a thread that waits for a dead disk or rank must not keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _begin(
    resolved: Resolved, text: str, resume: str, world_size: int
) -> tuple[RunDir, int, Path | None]:
    # The run directory, the number of the attempt, and the checkpoint to load. Rank 0 only.
    begun, attempt = begin_attempt(resolved, text, _after_restart(resolved) or resume)
    write_launch(
        attempt,
        ProcessId.of(os.getpid()),
        world_size=world_size,
        device=resolved.device,
        command=tuple(sys.argv),
        resumed_from=begun.resume_from,
    )
    sys.stderr.write(f"{begun.note or 'a new run'}: {begun.run_dir.path}\n")
    return begun.run_dir, attempt.number, begun.resume_from


def _after_restart(resolved: Resolved) -> str | None:
    # The run that torchrun has just restarted, which resumes whatever `--resume` says; or None.
    if not num_restarts():
        return None
    runs = own_runs(Path(resolved.config.output_dir).expanduser(), resolved.config.name)
    run_dir = runs[-1] if runs else None
    attempt = run_dir.last_attempt() if run_dir is not None else None
    if run_dir is None or attempt is None:
        return None
    if read_record(attempt.outcome) is None:
        # Otherwise a rank 0 that ran on another host would still count as running.
        fix = "torchrun has restarted them"
        end_failed(attempt, agent_error("its ranks died", fix, id="rank.died"))
    reached = read_last_step(attempt, 0)
    at = f" at step {reached}" if reached is not None else ""
    sys.stderr.write(f"the ranks died{at}, and torchrun has restarted them\n")
    return str(run_dir.path)


def _own_run_dir(run_dir: RunDir, number: int, world: World) -> RunDir:
    # The run directory, which rank 0 has made, as this rank sees it. A node that does not see it
    # gets a hidden folder next to the same path for what its ranks read, so that the folder never
    # counts as a run. All ranks must call this.
    disks = find_disks(world, run_dir.path)
    host, text = world.main_first(lambda: (world.host, run_dir.resolved.read_text("utf-8")))
    path = run_dir.path.absolute()  # only now: relative to this rank's folder
    if disks.is_apart[world.rank]:
        # Another user's ranks may have created this host's folder.
        path = path.parent / f".of-{host}.{os.geteuid()}" / path.name
    run_dir = RunDir(path)
    failure = None
    if world.rank in disks.apart_leaders:
        try:
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            make_own_folder(path.parent)
            make_own_folder(path)
            run_dir.attempt(number).path.mkdir(parents=True, exist_ok=True)
            write_text_atomic(run_dir.resolved, text)
        except UserError as error:
            failure = error
        except OSError as error:
            failure = UserError(
                f"cannot create a folder for this run: {error.strerror or error}",
                where=f"{run_dir.path}, rank {world.rank} on {world.host}",
                fix="set an output_dir that can be written on every host",
                id="files.output",
            )
    raise_first(world.gather(failure))
    return run_dir


if __name__ == "__main__":
    show_streams()
    leave(main())
