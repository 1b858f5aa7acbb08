"""Status, logs, stop and following of a run that is on another machine, over real ssh."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S
from tests.lab.home import link_cut, until
from tests.lab.hosts import Lab

ROOT = Path(__file__).parents[2]
LAPTOP = "/root/laptop"

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

REMEMBER = f"""
import sys, time
from pathlib import Path
from isles.run.remote import RemoteRun, write_remote
path, *hosts = sys.argv[1:]
write_remote(Path("{LAPTOP}/runs"), RemoteRun(
    name=Path(path).name, ssh=hosts[0], path=path, lines=("cd /root || exit 1",),
    python=sys.executable, launcher="ssh", hosts=tuple(hosts), started_at=time.time(),
))
"""


def python(lab: Lab, host: str, code: str, *arguments: str) -> None:
    """Run Python on a host, with the tests to import."""
    done = lab.run(host, [sys.executable, "-c", code, *arguments], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


def isles(lab: Lab, host: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Type an isles command on a host."""
    command = f'mkdir -p {LAPTOP} && cd {LAPTOP} && exec {sys.executable} -m isles "$@"'
    return lab.run(host, ["bash", "-c", command, "isles", *words])


class Run:
    """A run of one machine with a fake agent, which the laptop remembers."""

    def __init__(self, lab: Lab, name: str, host: str = "a1") -> None:
        self.lab, self.host, self.path = lab, host, f"/root/runs/{name}"
        python(lab, host, BEGIN, self.path)
        python(lab, "ctl", REMEMBER, self.path, host)

    def order(self, do: str, **fields: Any) -> None:
        """Have the agent do something."""
        text = json.dumps({"do": do, **fields})
        done = self.lab.run(self.host, ["bash", "-c", f"echo '{text}' >{self.path}/orders"])
        assert done.returncode == 0, done.stderr


FOLLOW = """
import sys
from pathlib import Path
from isles.monitor.remote import RemoteFollower
from isles.monitor.stop import caught_signals
from isles.monitor.table import console
from isles.run.find import find_any
remote = find_any(sys.argv[1], Path(sys.argv[2]))
with caught_signals() as signals:
    sys.exit(RemoteFollower(remote, 1, console(), console(stderr=True)).follow(signals))
"""


class Followed:
    """Following a run as `isles train` does, on the laptop; on a terminal or not."""

    def __init__(self, lab: Lab, run: str, *, terminal: bool = False) -> None:
        self.text = b""
        self._words = ["-c", FOLLOW, run, f"{LAPTOP}/runs"]
        variables = {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
        argv = lab.argv("ctl", [sys.executable, *self._words], **variables)
        self.reader, theirs = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            argv,
            env=lab.environ(),
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def until(self, words: str) -> None:
        """Wait until it has said these words."""
        deadline = time.monotonic() + DEADLINE_S
        while words.encode() not in self.text:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.reader], [], [], max(0.0, left))
            assert ready, f"never said {words!r}: {self.text.decode(errors='replace')}"
            try:
                block = os.read(self.reader, 65536)
            except OSError:
                block = b""
            assert block, f"ended without {words!r}: {self.text.decode(errors='replace')}"
            self.text += block

    def inner(self) -> psutil.Process:
        """The Python process inside the host."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [process for process in children if process.cmdline()[1:] == self._words]
        return found[-1] if found else psutil.Process(self.process.pid)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(timeout=DEADLINE_S)
        os.close(self.reader)
        return code


@pytest.mark.long
def test_a_run_elsewhere_is_found_shown_and_stopped(lab: Lab) -> None:
    run = Run(lab, "a-1")
    run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
    run.order("log", rank=0, text="hello from afar\n")

    def row() -> str:
        # A host so busy that ssh gives it up is asked again.
        found = isles(lab, "ctl", "status").stdout.splitlines()[1]
        return "" if "unreachable" in found else found

    shown = until(row, "a1 answers")
    assert shown.split()[:4] == ["a-1@a1", "running", "3/60", "5.5000"]
    full = isles(lab, "ctl", "status", "a").stdout
    assert "running: training" in full
    assert f"a1:{run.path}" in full
    assert json.loads(isles(lab, "ctl", "status", "a-1@a1", "--json").stdout)["step"] == 3
    assert "hello from afar" in isles(lab, "ctl", "logs", "a").stdout
    assert "no checkpoint yet" in isles(lab, "ctl", "checkpoint", "list", "a").stdout
    stopped = isles(lab, "ctl", "stop", "a")
    assert stopped.returncode == 0, stopped.stderr
    assert "has ended: stopped at step 7" in stopped.stdout
    assert isles(lab, "ctl", "status").stdout.splitlines()[1].split()[1] == "stopped"


@pytest.mark.long
def test_a_machine_that_is_down_is_a_row_that_says_so(lab: Lab) -> None:
    other, run = Run(lab, "i-1"), Run(lab, "b-1", "a3")
    run.order("status", phase="training", step=9, total_steps=60, loss=4.5)
    assert "b-1@a3" in isles(lab, "ctl", "status").stdout
    with link_cut(lab, "a3"):
        rows = isles(lab, "ctl", "status").stdout.splitlines()
        row = next(row for row in rows if row.startswith("b-1@a3"))
        assert row.split()[1:3] == ["unreachable", "9/60"]
        assert "a3 cannot be asked" in row
        assert any(row.startswith("i-1@a1") for row in rows), rows  # the others are shown
        assert "ago it was running" in isles(lab, "ctl", "status", "b").stdout
        stopped = isles(lab, "ctl", "stop", "b")
        assert stopped.returncode == 2
        assert "cannot be reached" in stopped.stderr
    isles(lab, "a3", "stop", run.path, "--now")
    isles(lab, "a1", "stop", other.path, "--now")


@pytest.mark.long
def test_two_follow_one_loses_its_connection_and_ctrl_c_stops_the_run(lab: Lab) -> None:
    """One on a terminal, where it is drawn."""
    run = Run(lab, "c-1")
    plain, drawn = Followed(lab, "c"), Followed(lab, "c", terminal=True)
    plain.until("starting")
    run.order("status", phase="building model", detail="llama-2m")
    plain.until("building model: llama-2m")
    ssh = [process for process in plain.inner().children() if process.name() == "ssh"]
    ssh[0].kill()
    plain.until("the connection to a1 is lost; the run goes on there")
    run.order("status", phase="preparing data", detail="after the cut")
    plain.until("preparing data: after the cut")
    run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
    drawn.until("3/60")
    # Not by the terminal: the leader of this session, which is the lab's, would end of it.
    drawn.inner().send_signal(signal.SIGINT)
    for followed in (drawn, plain):
        followed.until("c-1 stopped at step 7 (SIGINT)")
        assert followed.end() == 130


def test_a_closed_laptop_leaves_the_run_and_nothing_else(lab: Lab) -> None:
    run = Run(lab, "f-1")
    followed = Followed(lab, "f")
    followed.until("starting")
    followers = ["bash", "-c", f"pgrep -af 'isles follow {run.path}' | grep -v pgrep"]
    assert lab.run("a1", followers).stdout
    for process in (followed.inner(), *followed.inner().children(recursive=True)):
        process.kill()
    followed.process.wait(timeout=DEADLINE_S)
    until(lambda: not lab.run("a1", followers).stdout, "nobody follows for a laptop that is gone")
    state = json.loads(isles(lab, "ctl", "status", "f-1", "--json").stdout)["state"]
    assert state == "running"
    assert isles(lab, "ctl", "stop", "f", "--now").returncode == 0


SMALL = """\
name: small
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 512}
data: {sources: [{path: /shared/words.txt}], seq_length: 32, validation_fraction: 0}
training: {max_steps: 100000, global_batch_size: 2, precision: 32-true, logging_steps: 1}
checkpoint: {export_on_finish: false}
track: [jsonl]
output_dir: /shared/runs
"""


@pytest.mark.long
def test_whoever_sees_the_directory_can_follow_and_stop_a_run(lab: Lab) -> None:
    (lab.shared / "words.txt").write_text("some words to learn from\n" * 400)
    (lab.shared / "small.yaml").write_text(SMALL)
    started = isles(lab, "a1", "train", "/shared/small.yaml", "--detach")
    assert started.returncode == 0, started.stderr
    run_dir, run_dir_there = RunDir(lab.shared / "runs" / "small-1"), "/shared/runs/small-1"
    logs = f"exec timeout {DEADLINE_S:.0f} {sys.executable} -m isles logs -f {run_dir_there}"
    follower = lab.popen("a2", ["bash", "-c", logs])
    assert follower.stdout is not None
    assert any(b"phase=training" in line for line in follower.stdout)
    report = json.loads(isles(lab, "a2", "status", run_dir_there, "--json").stdout)
    assert (report["state"], report["host"]) == ("running", "a1")
    stopped = isles(lab, "a2", "stop", run_dir_there)
    assert stopped.returncode == 0, stopped.stderr
    assert "small-1 has ended: stopped at step" in stopped.stdout
    assert "everything is saved" in stopped.stdout
    follower.communicate(timeout=DEADLINE_S)
    assert follower.returncode == 0, "it ends with the run"
    combined = run_dir.path / "logs" / "distributed_training" / "latest_node0.log"
    assert "[rank 0]" in combined.read_text()
