"""Runs for tests of the control wing: real records, and a real process as their agent."""

from __future__ import annotations

import json
import os
import re
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from isles.launch.local import start_agent
from isles.monitor.stop import wait_for_end
from isles.run.begin import new_attempt
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_rows
from isles.run.stop import kill_now
from tests.deadline import DEADLINE_S

FAKE_AGENT = Path(__file__).with_name("fake_agent.py")


@dataclass
class Agent:
    """A running fake agent, its records and its pipe."""

    run_dir: RunDir
    attempt: Attempt
    process: ProcessId
    orders: int
    answers: int

    def order(self, do: str, **fields: Any) -> None:
        """Have the agent do something, and wait until it is done."""
        os.write(self.orders, json.dumps({"do": do, **fields}).encode() + b"\n")
        if do != "exit":
            self.wait_for_answer()

    def wait_for_answer(self) -> None:
        """Wait for one line from the agent."""
        ready, _, _ = select.select([self.answers], [], [], DEADLINE_S)
        assert ready, "the fake agent has not answered in time"
        assert os.read(self.answers, 64)


def start_fake(run_dir: RunDir, attempt: Attempt, world_size: int = 1) -> ProcessId:
    """Start the fake agent of an attempt."""
    path = str(run_dir.path)
    command = (sys.executable, str(FAKE_AGENT), path, "--attempt", str(attempt.number))
    child = start_agent(attempt, command, {}, world_size=world_size, device="cpu")
    return ProcessId.of(child.pid)


def make_pipes(run_dir: RunDir) -> tuple[int, int]:
    """The agent's two pipes, open here: orders and answers."""
    for name in ("orders", "answers"):
        os.mkfifo(run_dir.path / name)
    # Read-write: opening waits for nobody, and a reader that ends breaks nothing.
    return (
        os.open(run_dir.path / "orders", os.O_RDWR),
        os.open(run_dir.path / "answers", os.O_RDWR),
    )


def bare_run(path: Path) -> RunDir:
    """A run directory with nothing in it that is read here."""
    path.mkdir(parents=True)
    run_dir = RunDir(path)
    run_dir.resolved.write_text("config: {}\n")
    run_dir.run_file.write_text("name: x\n")
    return run_dir


def rows_of(run_dir: RunDir, kind: str = "train") -> list[dict[str, Any]]:
    """The rows of one kind among a run's metrics."""
    return [row for row in read_rows(run_dir.metrics) if row["kind"] == kind]


def losses_of(run_dir: RunDir) -> list[float]:
    """The training losses of a run."""
    return [row["loss"] for row in rows_of(run_dir)]


def outer_steps_of(run_dir: RunDir) -> dict[int, dict[str, Any]]:
    """The outer steps that a cluster has applied, by number."""
    return {row["outer_step"]: row for row in rows_of(run_dir, "outer")}


def files_with(text: str, folder: Path) -> list[Path]:
    """Files of a folder that hold a text; those that go meanwhile are left out."""
    found = []
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def processes_of(folder: Path) -> list[psutil.Process]:
    """Processes of the runs in a folder: their command line or environment names it."""
    found = []
    path = re.compile(re.escape(str(folder)) + r"(?![\w.-])")  # not that of `folder0` as well
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(map(path.search, words)):
            found.append(process)
    return found


def assert_ended(folder: Path) -> None:
    """All processes of the runs in a folder end by themselves; helpers a moment after the rest."""
    assert psutil.wait_procs(processes_of(folder), DEADLINE_S)[1] == []


def kill_all(folder: Path) -> None:
    """As a power cut: the processes of the runs in a folder, and what they start meanwhile."""
    while left := processes_of(folder):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, DEADLINE_S)


@contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """End the processes of the runs in a folder, also where a test fails before they have ended."""
    try:
        yield
    finally:
        kill_all(folder)


@contextmanager
def running_agent(run_dir: RunDir, world_size: int = 1) -> Iterator[Agent]:
    """A fake agent that runs as the next attempt of a run; killed at the end."""
    orders, answers = make_pipes(run_dir)
    attempt = new_attempt(run_dir)
    process = start_fake(run_dir, attempt, world_size)
    agent = Agent(run_dir, attempt, process, orders, answers)
    try:
        agent.wait_for_answer()
        yield agent
    finally:
        kill_now(process)
        assert wait_for_end(process, DEADLINE_S)
        os.close(orders)
        os.close(answers)
        for name in ("orders", "answers"):
            (run_dir.path / name).unlink()
