"""A rank that dies is started again with the others; nodes come and go; nothing is left behind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.restarts import list_restarts, read_last_step
from tests.dist.test_same_mathematics import weights_of
from tests.e2e.typed import ISLES, Command, isles, the_run
from tests.ranks import train_to_end
from tests.runs import assert_ended, nothing_left, rows_of

STEPS = 24
SLOW = ("training.global_batch_size=48", f"training.max_steps={STEPS}", "training.logging_steps=1")
SAVES = ("checkpoint.every_steps=4", "checkpoint.keep=100")
TWO = "clusters.0.gpus_per_node=2"


def rank_of(attempt: Attempt, rank: int, restart: int) -> ProcessId | None:
    """The process that a rank is since this restart; None until it can take a signal."""
    record = read_record(attempt.rank_record(rank)) or {}
    return ProcessId.from_record(record) if record.get("restart") == restart else None


def kill_rank(command: Command, attempt: Attempt, rank: int, restart: int) -> None:
    process = command.until(lambda: rank_of(attempt, rank, restart))
    os.kill(process.pid, signal.SIGKILL)


def has_done(attempt: Attempt, restart: int, step: int) -> bool:
    return (read_last_step(attempt, restart) or 0) >= step


@contextmanager
def started(
    run_file: Path, *overrides: str, program: tuple[str, ...] = (*ISLES, "train")
) -> Iterator[tuple[Command, Attempt]]:
    """`isles train`, and a check that none of its processes outlives it."""
    cwd = run_file.parent
    with nothing_left(cwd):
        env = {"OMP_NUM_THREADS": "1"}
        command = Command(str(run_file), *overrides, cwd=cwd, env=env, program=program)
        yield command, the_run(run_file).attempt(1)
        assert_ended(cwd)


@pytest.mark.long
def test_after_a_kill_the_run_finishes_as_if_nothing_had_happened(run_file: Path) -> None:
    with started(run_file, TWO, *SLOW, *SAVES) as (command, attempt):
        command.until(lambda: has_done(attempt, 0, 8))
        kill_rank(command, attempt, 1, 0)
        assert command.end() == 0, command.err
    (restart,) = list_restarts(attempt)
    assert (restart.reached or 0) >= 8 and 0 < (restart.saved or 0) < STEPS
    assert restart.root_cause is not None and restart.root_cause["rank"] == 1
    assert restart.text.startswith(f"rank 1 on {os.uname().nodename} was killed by SIGKILL at step")
    assert restart.text.endswith("(restart 1 of 3)")
    shown = isles("status", "tiny", cwd=run_file.parent).out
    log, agent_log = attempt.rank_log(0).read_text(), attempt.agent_log.read_text()
    assert all(restart.text in text for text in (command.out, log, agent_log, shown))
    assert "---- restart 1 ----" in attempt.rank_log(1).read_text()
    run_dir = the_run(run_file)
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, STEPS + 1))
    whole, _ = train_to_end(run_file, 2, *SLOW, *SAVES, "name=whole")
    ours, theirs = weights_of(run_dir, STEPS), weights_of(whole, STEPS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.long
def test_a_stop_during_a_restart_is_heard(run_file: Path) -> None:
    long = ("training.max_steps=100000", "checkpoint.every_steps=4")
    with started(run_file, TWO, *long) as (command, attempt):
        command.until(lambda: list_checkpoints(the_run(run_file)))
        kill_rank(command, attempt, 1, 0)
        command.until(lambda: attempt.restart(1).exists())
        command.process.send_signal(signal.SIGTERM)
        assert command.end() == ExitCode.REQUEUE, command.err
    outcome = read_record(attempt.outcome) or {}
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE)


def test_nodes_come_and_go(run_file: Path) -> None:
    several = (*SLOW, *SAVES, "clusters.0.nodes=1:2")
    cwd, run_dir = run_file.parent, the_run(run_file)
    with started(run_file, *several) as (command, attempt):
        command.until(lambda: has_done(attempt, 0, 5))
        nodes = (read_record(attempt.nodes) or {})["nodes"]
        rank = next(entry["first_rank"] for entry in nodes if entry["node"] == 1)
        lost = read_record(attempt.node_record(1)) or {}
        assert read_record(attempt.node_record(0))
        os.kill(lost["pid"], signal.SIGKILL)
        with suppress(ProcessLookupError):  # it ends with its agent, as a rule before this
            kill_rank(command, attempt, rank, 0)

        # One goes on. It is held up, so that it has not finished before the other is back.
        command.until(lambda: read_last_step(attempt, 1) is not None)
        held = rank_of(attempt, 0, 1)
        assert held is not None
        os.kill(held.pid, signal.SIGSTOP)
        back = isles("train", str(run_file), *several, "--detach", cwd=cwd)
        assert "running with 1 of 2 nodes; starting node 1 again" in back.out
        log, waiting = attempt.node_log(0), "other nodes are waiting to join"
        command.until(lambda: waiting in log.read_text(errors="replace"))
        os.kill(held.pid, signal.SIGCONT)

        command.until(lambda: read_last_step(attempt, 2) is not None)
        assert command.end() == 0, command.err

    gone, come = list_restarts(attempt)
    assert "node 1" in gone.why and "is gone" in gone.why and gone.world_size == 1
    assert "node 1" in come.why and "has joined" in come.why and come.world_size == 2
    assert come.reached == come.saved, "a node that comes costs no step"
    assert gone.text in command.out and come.text in command.out
    assert [info.manifest["world_size"] for info in list_checkpoints(run_dir)][-1] == 2

    alone, _ = train_to_end(run_file, 1, *SLOW, *SAVES, "name=alone")
    for one, other in zip(rows_of(run_dir), rows_of(alone), strict=True):
        # The tokens differ from sample to sample: a sample that is lost or seen twice would show.
        assert (one["step"], one["tokens"]) == (other["step"], other["tokens"])
        assert abs(one["loss"] - other["loss"]) < 1e-4
    ours, theirs = (
        {name: value for name, value in weights_of(d, STEPS).items() if name.startswith("model.")}
        for d in (run_dir, alone)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.long
def test_torchrun_typed_by_hand_goes_on_in_the_same_run(run_file: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2")
    torchrun += ("--monitor-interval=0.1", "--nproc-per-node=2", "-m", "isles.train")
    words = (*SLOW, *SAVES, "--resume", "no")
    with started(run_file, *words, program=torchrun) as (command, attempt):
        command.until(lambda: has_done(attempt, 0, 8))
        kill_rank(command, attempt, 1, 0)
        assert command.end() == 0, command.err
    assert "the ranks died at step" in command.err
    run_dir = the_run(run_file)
    assert len(run_dir.attempts()) == 2
    assert [row["step"] for row in rows_of(run_dir)] == list(range(1, STEPS + 1))
    assert "finished" in isles("status", cwd=run_file.parent).out
