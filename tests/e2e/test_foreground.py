"""`isles train` in the foreground: what Ctrl+C, SIGTERM and a closed terminal do to a run."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.state import attempt_state
from isles.run.stop import kill_now
from tests.deadline import DEADLINE_S
from tests.runs import Agent, bare_run, make_pipes, nothing_left

# As below a terminal, also where the tests run below nohup: a signal that is ignored stays so.
DRIVER = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from pathlib import Path
from rich.console import Console
from isles.monitor.follow import RunFollower
from isles.monitor.stop import caught_signals
from isles.run.begin import new_attempt
from isles.run.paths import RunDir
from tests.runs import start_fake
run_dir = RunDir(Path(sys.argv[1]))
attempt = new_attempt(run_dir)
with caught_signals() as signals:
    process = start_fake(run_dir, attempt)
    console = Console(width=200)
    sys.exit(RunFollower(run_dir, attempt, console, console).follow(signals))
"""


class Foreground:
    """`isles train` as a process of its own, with a fake agent below it."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.pipes = make_pipes(run_dir)
        self.command = subprocess.Popen(
            [sys.executable, "-u", "-c", DRIVER, str(run_dir.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
        )
        ready, _, _ = select.select([self.pipes[1]], [], [], DEADLINE_S)
        assert ready, "the fake agent has not come up in time"
        os.read(self.pipes[1], 64)
        self.attempt = run_dir.attempt(1)
        # The agent may be quicker than its record: the first line of output comes after it.
        self.read_until("starting")
        record = read_record(self.attempt.launch)
        assert record is not None
        process = ProcessId.from_record(record)
        assert process is not None
        self.agent = Agent(run_dir, self.attempt, process, *self.pipes)

    def read_until(self, words: str) -> None:
        assert self.command.stdout is not None
        # Without a line in time the command is ended, and so is its output.
        watch = threading.Timer(DEADLINE_S, self.command.kill)
        watch.start()
        try:
            for line in self.command.stdout:
                if words in line.decode():
                    return
        finally:
            watch.cancel()
        raise AssertionError(f"never said {words!r}")

    def ended(self) -> tuple[int, str]:
        out, _ = self.command.communicate(timeout=DEADLINE_S)
        return self.command.returncode, out.decode()

    def close(self) -> None:
        kill_now(self.agent.process)
        self.command.kill()
        self.command.communicate()
        for pipe in self.pipes:
            os.close(pipe)


@contextmanager
def foreground(tmp_path: Path) -> Iterator[Foreground]:
    with nothing_left(tmp_path):
        front = Foreground(bare_run(tmp_path / "a-1"))
        try:
            yield front
        finally:
            front.close()


def test_the_first_ctrl_c_saves_and_stops(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        front.command.send_signal(signal.SIGINT)
        code, out = front.ended()
    assert code == 130
    assert "Ctrl+C again stops now" in out
    assert "a-1 stopped at step 7 (SIGINT)" in out


@pytest.mark.long
def test_the_second_ctrl_c_stops_now(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        os.kill(front.agent.process.pid, signal.SIGSTOP)  # an agent that takes for ever to save
        front.command.send_signal(signal.SIGINT)
        front.read_until("Ctrl+C again stops now")
        front.command.send_signal(signal.SIGINT)
        code, out = front.ended()
        assert code == 130
        assert "stopped now" in out
        assert not front.agent.process.is_alive()


@pytest.mark.long
def test_sigterm_stops_for_requeue(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        front.command.send_signal(signal.SIGTERM)
        assert front.ended()[0] == 85


def test_a_closed_terminal_leaves_the_run_going(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        front.command.send_signal(signal.SIGHUP)
        assert front.ended()[0] == 0
        front.agent.order("log", rank=0, text="still here\n")
        assert attempt_state(front.run_dir, front.attempt).state == "running"


def test_the_exit_code_is_the_runs_and_the_culprit_is_named(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        error = {"rank": 0, "host": "h", "what": "out of memory", "fix": "a smaller batch"}
        front.agent.order("outcome", state="failed", exit_code=4, step=None, error=error)
        front.agent.order("exit", code=4)
        code, out = front.ended()
    assert code == 4
    assert "error: out of memory" in out
    assert "a smaller batch" in out


@pytest.mark.long
def test_a_killed_agent_is_training_failed(tmp_path: Path) -> None:
    with foreground(tmp_path) as front:
        os.kill(front.agent.process.pid, signal.SIGKILL)
        code, out = front.ended()
    assert code == 3
    assert "are gone" in out
