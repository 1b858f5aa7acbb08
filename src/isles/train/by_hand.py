"""Ranks that a torchrun typed by hand has started: rank 0 makes or chooses the run directory."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from isles.config.load import Loaded
from isles.config.resolve import Resolved, resolve
from isles.dist.files import find_disks
from isles.dist.world import World, join_world, raise_first
from isles.errors import UserError, more_lines
from isles.run.begin import begin_run, new_attempt, write_launch
from isles.run.env import RankEnv
from isles.run.find import numbered_runs
from isles.run.outcome import agent_error, end_failed
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, write_text_atomic
from isles.run.restarts import has_saved, newest_step, read_last_step
from isles.train.worker import run_rank


def train_by_hand(load: Callable[[], Loaded], resume: str, env: RankEnv) -> int:
    """Train as the rank that torchrun's variables name; returns the exit code.

    All ranks must call this. What is wrong with the run file is printed by rank 0 alone.

    Args:
        load: reads the run file.
        resume: `auto`, `no`, or the path of a run directory or of a checkpoint in one.
        env: this process' place.
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
        run_dir, attempt, resume_from = _agree_on_run(resolved, loaded.text, resume, world)
    except UserError as error:
        if env.rank == 0:
            sys.stderr.write("\n".join([f"error: {error}", *more_lines(error.ids), ""]))
        return int(error.exit_code)
    return run_rank(run_dir, attempt, env, resume_from, world)


def leave(exit_code: int) -> NoReturn:
    """End this process now: a thread that waits for a dead disk or rank must not keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


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
    run_dir, attempt = own_run_dir(run_dir, attempt, world)
    # Only now: relative to this rank's folder, and whole for what has sockets there.
    run_dir = RunDir(run_dir.path.absolute())
    return run_dir, run_dir.attempt(attempt.number), resume_from


def own_run_dir(run_dir: RunDir, attempt: Attempt, world: World) -> tuple[RunDir, Attempt]:
    """The run directory as this rank knows it, with what ranks read in it. All must call this.

    Rank 0 has made it. Nodes that do not see it get a hidden one of their own beside where it would
    be, so that it is never taken for a run of theirs.

    Args:
        run_dir: rank 0's.
        attempt: this start of it.
        world: the ranks.

    Raises:
        UserError: a node's disk does not take it; on every rank.
    """
    disks = find_disks(world, run_dir.path)
    if not disks.apart_leaders:
        return run_dir, attempt
    first_host = world.broadcast(world.host if world.is_main else None)
    text = world.main_first(lambda: run_dir.resolved.read_text(encoding="utf-8"))
    if disks.is_apart[world.rank]:
        path = run_dir.path.absolute()
        run_dir = RunDir(path.parent / f".of-{first_host}" / path.name)
        attempt = run_dir.attempt(attempt.number)
    failure = None
    if world.rank in disks.apart_leaders:
        try:
            attempt.path.mkdir(parents=True, exist_ok=True)
            write_text_atomic(run_dir.resolved, text)
        except OSError as error:
            failure = UserError(
                f"no folder for this run can be made: {error.strerror or error}",
                where=f"{run_dir.path}, rank {world.rank} on {world.host}",
                fix="set an output_dir that can be written on every host",
                id="files.output",
            )
    raise_first(world.gather(failure))
    return run_dir, attempt


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
            id=str(error.get("id", "")),
        )
    if outcome is None:
        # Else a rank 0 that ran on another host would be taken for running still.
        fix = "torchrun has started them again"
        end_failed(attempt, agent_error("its ranks were lost", fix, id="rank.died"))
    reached, saved = read_last_step(attempt, 0), newest_step(run_dir)
    at = f" at step {reached}" if reached is not None else ""
    sys.stderr.write(f"the ranks were lost{at}, and torchrun has started them again\n")
    asked = launch.get("resumed_from")
    is_asked = asked and saved is not None and not has_saved(run_dir, attempt)
    return str(asked) if is_asked else str(run_dir.path)
