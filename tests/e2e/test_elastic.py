"""A rank that dies is started again with the others; nodes come and go; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from isles.errors import ExitCode
from isles.monitor.stop import wait_for_end
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record, read_rows
from isles.run.restarts import current_restart, list_restarts, read_last_step
from tests.deadline import DEADLINE_S
from tests.dist.test_same_mathematics import weights_of
from tests.e2e.test_train import Command, isles, the_run
from tests.ranks import train_to_end

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
def started(run_file: Path, *overrides: str) -> Iterator[tuple[Command, Attempt]]:
    """`isles train`, and a check that none of its processes outlives it."""
    attempt = the_run(run_file).attempt(1)
    command = Command("train", str(run_file), *overrides, cwd=run_file.parent)
    try:
        command.until(lambda: read_record(attempt.launch))
        yield command, attempt
        assert_gone(processes(attempt))
    finally:
        for process in processes(attempt):
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
        command.process.kill()


def processes(attempt: Attempt) -> set[ProcessId]:
    """Everybody who is named in the records of an attempt."""
    records = [attempt.launch, *attempt.path.glob("rank-?.json"), *attempt.path.glob("node-?.json")]
    found = (ProcessId.from_record(read_record(path) or {}) for path in records)
    return {process for process in found if process is not None}


def family(attempt: Attempt) -> set[ProcessId]:
    """They, and all the processes that they have started."""
    found = set()
    for process in processes(attempt):
        if process.is_alive():
            children = psutil.Process(process.pid).children(recursive=True)
            found |= {process, *(ProcessId.of(child.pid) for child in children)}
    return found


def assert_gone(family: set[ProcessId]) -> None:
    """None of them is left; helpers of a process end a moment after it."""
    assert not [process for process in family if not wait_for_end(process, DEADLINE_S)]


@pytest.mark.long
def test_after_a_kill_the_run_finishes_as_if_nothing_had_happened(run_file: Path) -> None:
    with started(run_file, TWO, *SLOW, *SAVES) as (command, attempt):
        command.until(lambda: has_done(attempt, 0, 8))
        kill_rank(command, attempt, 1, 0)
        assert command.end() == 0, command.err
    (restart,) = list_restarts(attempt)
    assert restart.reached is not None and restart.reached >= 8
    assert restart.saved is not None and restart.saved < STEPS
    assert restart.root_cause is not None and restart.root_cause["rank"] == 1
    assert restart.text.startswith(f"rank 1 on {os.uname().nodename} was killed by SIGKILL at step")
    assert restart.text.endswith("(restart 1 of 3)")
    assert restart.text in command.out, "who watches the run is told"
    assert restart.text in attempt.rank_log(0).read_text(), "and its log"
    assert restart.text in attempt.agent_log.read_text()
    assert "---- restart 1 ----" in attempt.rank_log(1).read_text()
    assert restart.text in isles("status", "tiny", cwd=run_file.parent).out
    run_dir = the_run(run_file)
    train = [row["step"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert train == list(range(1, STEPS + 1)), "each step once"
    whole, _ = train_to_end(run_file, 2, *SLOW, *SAVES, "name=whole")
    one, other = weights_of(run_dir, STEPS), weights_of(whole, STEPS)
    assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.long
def test_an_error_that_would_come_again_is_not_retried(run_file: Path) -> None:
    hell = ("training.learning_rate=100.0", "training.optimizer=sgd", "training.max_grad_norm=null")
    with started(run_file, *hell, "training.max_steps=200") as (command, attempt):
        assert command.end() == ExitCode.TRAINING
    assert "not finite" in command.err
    assert current_restart(attempt) == 0
    assert rank_of(attempt, 0, 0), "the one rank that there was, has never been started again"


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


def node_process(attempt: Attempt, node: int) -> ProcessId | None:
    """The agent of a node; None where none has come."""
    return ProcessId.from_record(read_record(attempt.node_record(node)) or {})


def agent_says(attempt: Attempt, node: int, words: str) -> bool:
    return words in attempt.node_log(node).read_text(errors="replace")


def rank_on(attempt: Attempt, node: int) -> int | None:
    """The rank of a node with one rank, once the nodes have met."""
    nodes = (read_record(attempt.nodes) or {}).get("nodes", ())
    return next((entry["first_rank"] for entry in nodes if entry["node"] == node), None)


def test_nodes_come_and_go(run_file: Path) -> None:
    several = (*SLOW, *SAVES, "clusters.0.nodes=1:2")
    cwd, run_dir = run_file.parent, the_run(run_file)
    with started(run_file, *several) as (command, attempt):
        command.until(lambda: has_done(attempt, 0, 5))
        lost = node_process(attempt, 1)
        assert lost is not None
        seen = family(attempt)
        assert len([node for node in range(2) if node_process(attempt, node)]) == 2
        rank = rank_on(attempt, 1)
        assert rank is not None
        os.kill(lost.pid, signal.SIGKILL)
        kill_rank(command, attempt, rank, 0)

        # One goes on. It is held up, so that it has not finished before the other is back.
        command.until(lambda: read_last_step(attempt, 1) is not None)
        held = rank_of(attempt, 0, 1)
        assert held is not None
        os.kill(held.pid, signal.SIGSTOP)
        back = isles("train", str(run_file), *several, "--detach", cwd=cwd)
        assert "running with 1 of 2 nodes: bringing back node 1" in back.out
        waiting = "other nodes are waiting to join"
        command.until(lambda: agent_says(attempt, 0, waiting))
        os.kill(held.pid, signal.SIGCONT)

        command.until(lambda: read_last_step(attempt, 2) is not None)
        seen |= family(attempt)
        assert command.end() == 0, command.err
        assert_gone(seen)

    gone, come = list_restarts(attempt)
    assert "node 1" in gone.why and "is gone" in gone.why and gone.world_size == 1
    assert "node 1" in come.why and "has come" in come.why and come.world_size == 2
    assert come.reached == come.saved, "a node that comes costs no step"
    assert gone.text in command.out and come.text in command.out
    assert [info.manifest["world_size"] for info in list_checkpoints(run_dir)][-1] == 2

    alone, _ = train_to_end(run_file, 1, *SLOW, *SAVES, "name=alone")
    rows = [[r for r in read_rows(d.metrics) if r["kind"] == "train"] for d in (run_dir, alone)]
    for one, other in zip(*rows, strict=True):
        # The tokens differ from sample to sample: a sample that is lost or seen twice would show.
        assert (one["step"], one["tokens"]) == (other["step"], other["tokens"])
        assert abs(one["loss"] - other["loss"]) < 1e-4
    assert_close(run_dir, alone)


def assert_close(one: RunDir, other: RunDir) -> None:
    left, right = weights_of(one, STEPS), weights_of(other, STEPS)
    for name, value in right.items():
        if name.startswith("model."):
            torch.testing.assert_close(left[name], value, atol=1e-5, rtol=0)


@pytest.mark.long
def test_torchrun_typed_by_hand_goes_on_in_the_same_run(run_file: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    torchrun += ["--monitor-interval=0.1", "--nproc-per-node=2", "-m", "isles.train"]
    process = subprocess.Popen(
        [*torchrun, str(run_file), *SLOW, *SAVES, "--resume", "no"],
        cwd=run_file.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    run_dir = the_run(run_file)
    deadline = time.monotonic() + DEADLINE_S
    while not has_done(run_dir.attempt(1), 0, 8):
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.02)
    rank = rank_of(run_dir.attempt(1), 1, 0)
    assert rank is not None
    os.kill(rank.pid, signal.SIGKILL)
    _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, said
    assert "the ranks were lost at step" in said
    assert len(run_dir.attempts()) == 2
    train = [row["step"] for row in read_rows(run_dir.metrics) if row["kind"] == "train"]
    assert train == list(range(1, STEPS + 1))
