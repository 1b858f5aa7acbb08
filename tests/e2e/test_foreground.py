"""`isles train` in the foreground, above a fake agent: what signals and its end do to it.

The second Ctrl+C, SIGTERM and a killed agent are seen in test_train.py and test_elastic.py.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from isles.facts.console import Console
from isles.monitor.follow import RunFollower
from isles.monitor.stop import caught_signals
from isles.run.state import attempt_state
from tests.runs import Agent, bare_run, running_agent


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    # As below a terminal, also where the tests run below nohup: a signal that is ignored stays so.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with running_agent(bare_run(tmp_path / "a-1")) as made:
        yield made
    signal.signal(signal.SIGHUP, before)


def follow(agent: Agent, *numbers: signal.Signals) -> tuple[int, str]:
    """Follow a run, with a signal to this process; the exit code, and what is printed."""
    console = Console(file=io.StringIO(), width=200)
    with caught_signals() as signals:
        for number in numbers:
            os.kill(os.getpid(), number)
        code = RunFollower(agent.run_dir, agent.attempt, console, console).follow(signals)
    return code, console.file.getvalue()


def test_the_first_ctrl_c_saves_and_stops(agent: Agent) -> None:
    code, text = follow(agent, signal.SIGINT)
    assert code == 130
    assert "Ctrl+C again stops now" in text and "a-1 stopped at step 7 (SIGINT)" in text


def test_a_closed_terminal_leaves_the_run_going(agent: Agent) -> None:
    assert follow(agent, signal.SIGHUP)[0] == 0
    agent.order("log", rank=0, text="still here\n")
    assert attempt_state(agent.run_dir, agent.attempt).state == "running"
