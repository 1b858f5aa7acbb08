"""Status, logs, stop and following of a run that is on another machine, over real ssh."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S
from tests.lab.home import ISLES, isles, link_cut, sh, started, until, write_run
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
def test_a_run_elsewhere_is_found_shown_and_stopped(lab: Lab) -> None:
    """Of two; the machine of the other is down then, and its row says so."""
    run, other = Run(lab, "a-1"), Run(lab, "b-1", "a3")
    run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
    run.order("log", rank=0, text="hello from afar\n")
    other.order("status", phase="training", step=9, total_steps=60, loss=4.5)

    def row(of: str) -> list[str]:
        # A host so busy that ssh gives it up is asked again.
        found = next(line for line in isles(lab, "status").splitlines() if line.startswith(of))
        return [] if "unreachable" in found else found.split()

    assert until(lambda: row("a-1@a1"), "a1 answers")[1:4] == ["running", "3/60", "5.5000"]
    full = isles(lab, "status", "a-1")
    assert "running: training" in full and f"a1:{run.path}" in full
    assert json.loads(isles(lab, "status", "a-1@a1", "--json"))["step"] == 3
    assert "hello from afar" in isles(lab, "logs", "a")
    assert "no checkpoint yet" in isles(lab, "checkpoint", "list", "a")
    until(lambda: row("b-1@a3"), "a3 answers")
    with link_cut(lab, "a3"):
        rows = isles(lab, "status").splitlines()
        (down,) = (line for line in rows if line.startswith("b-1@a3"))
        assert down.split()[1:3] == ["unreachable", "9/60"] and "a3 cannot be asked" in down
        assert any(line.startswith("a-1@a1") for line in rows), rows  # the others are shown
        assert "ago it was running" in isles(lab, "status", "b")
        assert "cannot be reached" in isles(lab, "stop", "b", expected=2)
    assert "has ended: stopped at step 7" in isles(lab, "stop", "a")
    assert row("a-1@a1")[1] == "stopped"
    isles(lab, "stop", other.path, "--now", host="a3")


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
        plain.until(lambda: "the connection to a1 is lost; the run goes on there" in plain.text)
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
    followers = ["bash", "-c", f"pgrep -af 'isles follow {run.path}' | grep -v pgrep"]
    assert lab.run("a1", followers).stdout
    python = inner(followed.process.pid)
    for process in (python, *python.children(recursive=True)):
        process.kill()
    followed.process.wait(timeout=DEADLINE_S)
    until(lambda: not lab.run("a1", followers).stdout, "nobody follows for a laptop that is gone")
    assert json.loads(isles(lab, "status", "f-1", "--json"))["state"] == "running"
    isles(lab, "stop", "f", "--now")


@pytest.mark.long
def test_whoever_sees_the_directory_can_follow_and_stop_a_run(lab: Lab) -> None:
    here = {"launcher": {"kind": "local"}, "workdir": None}
    write_run(lab, "small", output_dir="/shared/out", training={"max_steps": 100_000}, **here)
    isles(lab, "train", "small.yaml", "--detach", host="a1")
    run_dir, run_dir_there = RunDir(lab.shared / "out" / "small-1"), "/shared/out/small-1"
    follower = started(lab, "a2", [ISLES, "logs", "-f", run_dir_there])
    follower.until(lambda: "phase=training" in follower.out)
    report = json.loads(isles(lab, "status", run_dir_there, "--json", host="a2"))
    assert (report["state"], report["host"]) == ("running", "a1")
    stopped = isles(lab, "stop", run_dir_there, host="a2")
    assert "small-1 has ended: stopped at step" in stopped and "everything is saved" in stopped
    assert follower.end() == 0, "it ends with the run"
    combined = run_dir.path / "logs" / "distributed_training" / "latest_node0.log"
    assert "[rank 0]" in combined.read_text()
