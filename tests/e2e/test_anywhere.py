"""Following a run that is on another machine, over real ssh."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deadline import DEADLINE_S
from tests.lab.home import isles, processes, sh, started, until
from tests.lab.hosts import Lab
from tests.terminal import Terminal

ROOT = str(Path(__file__).parents[2])

BEGIN = """
import os, sys
from pathlib import Path
from isles.run.begin import new_attempt
from tests.runs import bare_run, make_pipes, start_fake
run_dir = bare_run(Path(sys.argv[1]))
pipes = make_pipes(run_dir)
start_fake(run_dir, new_attempt(run_dir))
os.read(pipes[1], 64)
"""

REMEMBER = """
import sys, time
from pathlib import Path
from isles.run.remote import RemoteRun, write_remote
path, host = sys.argv[1:]
write_remote(Path("/shared/runs"), RemoteRun(
    name=Path(path).name, ssh=host, path=path, lines=("cd /root || exit 1",),
    python=sys.executable, launcher="ssh", hosts=(host,), started_at=time.time(),
))
"""


class Run:
    """A run of one machine with a fake agent, which the laptop remembers."""

    def __init__(self, lab: Lab, name: str, host: str = "a1") -> None:
        self.lab, self.host, self.path = lab, host, f"/root/runs/{name}"
        for where, code, *more in ((host, BEGIN), ("ctl", REMEMBER, host)):
            words = [sys.executable, "-c", code, self.path, *more]
            done = lab.run(where, words, PYTHONPATH=ROOT)
            assert done.returncode == 0, done.stderr

    def order(self, do: str, **fields: Any) -> None:
        """Have the agent do something."""
        sh(self.lab, self.host, f"echo '{json.dumps({'do': do, **fields})}' >{self.path}/orders")


FOLLOW = """
import sys
from pathlib import Path
from isles.monitor.remote import RemoteFollower
from isles.monitor.stop import caught_signals
from isles.monitor.table import console
from isles.run.find import find_any
remote = find_any(sys.argv[1], Path("/shared/runs"))
with caught_signals() as signals:
    sys.exit(RemoteFollower(remote, 1, console(), console(stderr=True)).follow(signals))
"""


def follow(run: str) -> list[str]:
    """The command line that follows a run as `isles train` does."""
    environ = (f"PYTHONPATH={ROOT}", "TERM=xterm", "COLUMNS=120")
    return ["env", *environ, sys.executable, "-c", FOLLOW, run]


def inner(pid: int) -> psutil.Process:
    """The Python process inside the host."""
    children = psutil.Process(pid).children(recursive=True)
    return next(child for child in children if child.cmdline()[1:3] == ["-c", FOLLOW])


@pytest.mark.long
def test_two_follow_one_loses_its_connection_and_ctrl_c_stops_the_run(lab: Lab) -> None:
    """One on a terminal, where it is drawn."""
    run = Run(lab, "c-1")
    plain = started(lab, "ctl", follow("c"))
    # What is drawn at its end stays on the terminal.
    stays = ("bash", "-c", '"$@"; echo "exit code $?"; read', "-")
    command = lab.argv("ctl", follow("c"))
    with Terminal(*stays, *command, size=(120, 24), env=lab.environ()) as drawn:
        plain.until(lambda: "starting" in plain.text)
        run.order("status", phase="building model", detail="llama-2m")
        plain.until(lambda: "building model: llama-2m" in plain.text)
        ssh = [child for child in inner(plain.process.pid).children() if child.name() == "ssh"]
        ssh[0].kill()
        plain.until(lambda: "the connection to a1 is lost, but the run continues" in plain.text)
        run.order("status", phase="preparing data", detail="after the cut")
        plain.until(lambda: "preparing data: after the cut" in plain.text)
        run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
        drawn.until("3/60")
        # Not by the terminal: the leader of this session, which is the lab's, would end of it.
        inner(drawn.process.pid).send_signal(signal.SIGINT)
        drawn.until("c-1 stopped at step 7 (SIGINT)", "exit code 130")
    assert plain.end() == 130
    assert "c-1 stopped at step 7 (SIGINT)" in plain.text


def test_a_closed_laptop_leaves_the_run_and_nothing_else(lab: Lab) -> None:
    run = Run(lab, "f-1")
    followed = started(lab, "ctl", follow("f"))
    followed.until(lambda: "starting" in followed.text)
    words = ("follow", str(run.path))
    assert processes(lab, "a1", *words)
    python = inner(followed.process.pid)
    for process in (python, *python.children(recursive=True)):
        process.kill()
    followed.process.wait(timeout=DEADLINE_S)
    until(lambda: not processes(lab, "a1", *words), "nobody follows for a laptop that is gone")
    assert json.loads(isles(lab, "status", "f-1", "--json"))["state"] == "running"
    isles(lab, "stop", "f", "--now")
