"""`isles train` in the foreground, above a fake agent: what signals and its end do to it.

The second Ctrl+C, SIGTERM and a killed agent are seen in test_train.py and test_elastic.py.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.state import attempt_state
from isles.run.stop import kill_now
from tests.deadline import DEADLINE_S
from tests.e2e.typed import Command
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
        pipes = make_pipes(run_dir)
        program = (sys.executable, "-u", "-c", DRIVER)
        self.command = Command(run_dir.path, cwd=Path(__file__).parents[2], program=program)
        ready, _, _ = select.select([pipes[1]], [], [], DEADLINE_S)
        assert ready, "the fake agent has not come up in time"
        os.read(pipes[1], 64)
        # The agent may be quicker than its record: the first line of output comes after it.
        self.command.until(lambda: "starting" in self.command.out)
        attempt = run_dir.attempt(1)
        process = ProcessId.from_record(read_record(attempt.launch) or {})
        assert process is not None
        self.agent = Agent(run_dir, attempt, process, *pipes)

    def close(self) -> None:
        kill_now(self.agent.process)
        self.command.kill()
        os.close(self.agent.orders)
        os.close(self.agent.answers)


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Foreground]:
    with nothing_left(tmp_path):
        made = Foreground(bare_run(tmp_path / "a-1"))
        try:
            yield made
        finally:
            made.close()


def test_the_first_ctrl_c_saves_and_stops(front: Foreground) -> None:
    front.command.process.send_signal(signal.SIGINT)
    assert front.command.end() == 130
    assert "Ctrl+C again stops now" in front.command.out
    assert "a-1 stopped at step 7 (SIGINT)" in front.command.out


def test_a_closed_terminal_leaves_the_run_going(front: Foreground) -> None:
    front.command.process.send_signal(signal.SIGHUP)
    assert front.command.end() == 0
    front.agent.order("log", rank=0, text="still here\n")
    assert attempt_state(front.agent.run_dir, front.agent.attempt).state == "running"


def test_the_exit_code_is_the_runs_and_the_culprit_is_named(front: Foreground) -> None:
    error = {"rank": 0, "host": "h", "what": "out of memory", "fix": "a smaller batch"}
    front.agent.order("outcome", state="failed", exit_code=4, step=None, error=error)
    front.agent.order("exit", code=4)
    assert front.command.end() == 4
    assert "error: out of memory" in front.command.out
    assert "a smaller batch" in front.command.out
