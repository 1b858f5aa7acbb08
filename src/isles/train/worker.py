"""One rank, from its first log line to its exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from pathlib import Path
from typing import Literal

import torch

from isles.checkpoint.load import refuse_other_run
from isles.config.fit import memory_advice
from isles.config.resolve import Resolved, digest, load_resolved
from isles.dist.files import find_disks
from isles.dist.world import World, is_communication_error, join_world, leave_world
from isles.errors import (
    CommunicationError,
    ExitCode,
    OutOfMemoryError,
    UserError,
)
from isles.run.env import RankEnv
from isles.run.live import Tell
from isles.run.outcome import end, end_without_agent, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import error_if_deleted, write_record
from isles.run.restarts import LastStep, read_last_step, read_restart
from isles.train.build import build
from isles.train.finish import finish
from isles.train.hang import watching
from isles.train.host import bind_to_gpu, map_large_blocks
from isles.train.logs import log_of_rank
from isles.train.loop import finish_together, train
from isles.train.products import fp32_products
from isles.train.record import Recorder, check_outside
from isles.train.remote import find_checkpoint_to_load, finish_copy
from isles.train.stop import StopBeforeTraining, StopSignals
from isles.train.telemetry import sending

log = logging.getLogger(__name__)


def run_rank(
    run_dir: RunDir,
    attempt: Attempt,
    env: RankEnv,
    resume_from: Path | None,
    world: World | None = None,
    tell: Tell | None = None,
) -> int:
    """Train as one rank of a run and record the outcome; returns the exit code.

    Args:
        resume_from: a checkpoint that the user named. Default: the latest good checkpoint.
        tell: sends messages to this node's agent; None without an agent.
    """
    log_of_rank(env.rank)
    signals = StopSignals(attempt if env.rank == 0 else None)
    try:
        # After the handlers, because a reader of this record may send a signal.
        place = {"rank": env.rank, "restart": env.restart}
        write_record(attempt.rank_record(env.rank), {**place, **ProcessId.of(os.getpid()).record()})
        restart = read_restart(attempt, env.restart) if env.restart and env.rank == 0 else None
        if restart is not None:
            log.warning("%s", restart.text)
        resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
        if resolved.device == "cpu" and resolved.config.adapter.type == "qlora":
            map_large_blocks()
        with fp32_products(resolved.config.training, resolved.device):
            code = int(_train(resolved, run_dir, attempt, env, signals, resume_from, world, tell))
        leave_world()
        return code
    except StopBeforeTraining as stop:
        # Otherwise the agent knows whether a user asked for it or another rank died.
        if env.rank == 0 and (env.attempt == 0 or signals.was_requested):
            step = read_last_step(attempt, env.restart)
            _write_outcome(attempt, env, "stopped", stop.code, step=step, reason=stop.reason)
        return int(stop.code)
    except Exception as error:  # the process's top level: every error is recorded
        if signals.requested and is_communication_error(error):
            return signals.requested  # the other ranks got the stop a moment earlier
        return record_error(attempt, env, error)
    finally:
        signals.restore()


def _train(
    resolved: Resolved,
    run_dir: RunDir,
    attempt: Attempt,
    env: RankEnv,
    signals: StopSignals,
    resume_from: Path | None,
    world: World | None,
    tell: Tell | None,
) -> ExitCode:
    cluster = resolved.config.clusters[0]
    last_step = LastStep(attempt.last_step, env.restart) if env.rank == 0 else None
    recorder = Recorder(
        run_dir,
        is_main=env.rank == 0,
        world_size=env.world_size,
        last_step=last_step,
        live=attempt.live,
    )
    recorder.phase("starting", f"waiting for {env.world_size} ranks" if env.world_size > 1 else "")
    if world is None:
        world = join_world(
            env,
            device=resolved.device,
            timeout_s=cluster.comm_timeout,
            work_timeout_s=resolved.config.checkpoint.timeout,
        )
    _compare_configs(resolved, world)
    disks = find_disks(world, run_dir.path)
    if disks.apart_leaders:
        log.info("separate disks: %s; they send checkpoints to rank 0", disks.apart_names)
    refuse_other_run(run_dir, world, disks)
    check_outside(resolved, run_dir, recorder, world)
    saving = resolved.config.checkpoint
    checkpoint, uploader = find_checkpoint_to_load(saving, run_dir, resume_from, world, recorder)
    number = attempt.number
    parts = build(resolved, run_dir, world, recorder, signals, checkpoint, disks, number, uploader)
    bind_to_gpu(world)
    signals.training_begins()
    recorder.step_done(parts.progress.step)
    recorder.phase("training")
    clock, checkpoints = parts.meter.clock, parts.checkpoints
    with (
        watching(clock, parts.config, attempt, env, world, recorder, lambda: checkpoints.moved_at),
        sending(parts, env.restart, tell),
    ):
        try:
            code = ExitCode(finish_together(parts)) or train(parts)
        except BaseException:
            parts.close(is_over=False)
            raise
        parts.close(is_over=True)
    parts.checkpoints.close()
    has_model = code is ExitCode.OK and finish(parts)
    finish_copy(uploader, code, recorder, has_model=has_model)
    if code is ExitCode.OK:
        reason = "finished"
    elif code is ExitCode.HANDOVER:
        recorder.phase("restarting", "saved, restarting with other nodes")
        recorder.close()
        return code
    else:
        asked = code is ExitCode.INTERRUPTED
        reason = "interrupted" if asked else "stopped on request, or time was up"
        reason += "; everything is saved"
    recorder.phase("finished" if code is ExitCode.OK else "stopped", reason)
    recorder.close()
    if world.is_main:
        state: Literal["finished", "stopped"] = "finished" if code is ExitCode.OK else "stopped"
        _write_outcome(attempt, env, state, code, step=parts.progress.step, reason=reason)
    log.info("ended exit_code=%d step=%d", int(code), parts.progress.step)
    return code


def _compare_configs(resolved: Resolved, world: World) -> None:
    # Check that every rank has read the same run.
    mine = (world.rank, world.host, digest(resolved.config), torch.__version__)
    for rank, host, other, version in world.gather(mine):
        if other != mine[2]:
            raise UserError(
                f"the run files of rank {rank} and rank {world.rank} differ",
                where=f"host {host}",
                fix="start all ranks with the same run directory",
                id="start.refused",
            )
        if version != mine[3]:
            raise UserError(
                f"rank {rank} has torch {version}, rank {world.rank} has {mine[3]}",
                where=f"host {host}",
                fix="install the same torch on all hosts",
                id="version.torch",
            )


def record_error(attempt: Attempt, env: RankEnv, error: Exception) -> int:
    """Record an error for the search of the root cause; returns the exit code."""
    error = error_if_deleted(attempt) or error  # a later failure is a consequence
    named = _as_user_error(error)
    is_communication = is_communication_error(error)
    exit_code = int(named.exit_code if named else ExitCode.TRAINING)
    text = "".join(traceback.format_exception(error))
    record = error_record(
        named.what if named else f"{type(error).__name__}: {error}",
        id=named.id if named else "",
        kind=type(error).__name__,
        code=ExitCode(exit_code),
        fix=named.fix if named else "",
        where=named.where if named else "",
        rank=env.rank,
        is_communication=is_communication,
        will_recur=named is not None and not is_communication,
        restart=env.restart,
        traceback=None if isinstance(error, UserError) else text,
    )
    with contextlib.suppress(OSError):  # a full disk: the log below still has it
        write_record(attempt.rank_error(env.rank, env.restart), record)
        if env.attempt == 0:  # no agent searches for the root cause
            end_without_agent(attempt, record)
    if isinstance(error, UserError):
        log.error("%s", error)
    else:
        log.error("rank %d on %s failed\n%s", env.rank, record["host"], text)
    return exit_code


def _as_user_error(error: Exception) -> UserError | None:
    # The user error that a library's error means, if known.
    if isinstance(error, UserError):
        return error
    no_memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
    if no_memory:
        return OutOfMemoryError(
            f"out of memory: {str(error).splitlines()[0] if str(error) else 'no memory left'}",
            fix=memory_advice(),
        )
    if is_communication_error(error):
        first = str(error).strip().splitlines()
        return CommunicationError(
            f"another rank was lost: {first[0] if first else type(error).__name__}",
            fix="find the rank that failed first with `isles logs`",
            id="rank.others",
        )
    return None


def _write_outcome(
    attempt: Attempt,
    env: RankEnv,
    state: Literal["finished", "stopped"],
    code: ExitCode,
    *,
    step: int | None,
    reason: str,
) -> None:
    if env.in_job and code == ExitCode.REQUEUE:
        # The job may be queued again. The run has no outcome until its coordinator decides.
        record = {"exit_code": int(code), "step": step, "reason": reason}
        write_record(attempt.stopped, record)
    else:
        end(attempt, state, code, reason, step=step)
