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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S
from tests.lab.hosts import Lab, hosts

ROOT = Path(__file__).parents[2]
LAPTOP = "/root/laptop"

BEGIN = """
import sys, time
from pathlib import Path
from isles.run.begin import new_attempt
from tests.runs import bare_run, make_pipes, start_fake
run_dir = bare_run(Path(sys.argv[1]))
pipes = make_pipes(run_dir)
start_fake(run_dir, new_attempt(run_dir))
import os
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

FLEET = """
import sys, time
from pathlib import Path
from isles.run.nodes import Fleet, FleetNode
from isles.run.records import write_record
from tests.runs import bare_run
node = int(sys.argv[2])
run_dir = bare_run(Path(sys.argv[1]))
attempt = run_dir.attempt(1)
attempt.path.mkdir(parents=True)
nodes = (FleetNode(0, "a1", "a1", "10.77.1.1", 2), FleetNode(1, "a2", "a2", "10.77.1.2", 1))
Fleet("ssh", nodes, 29500, 2, "cpu", 60.0, "").write(attempt)
write_record(attempt.launch, {"begun_at": time.time(), "launcher": "ssh", "world_size": 3})
attempt.node_log(node).write_text(f"agent of {node}\\n")
for rank in ((0, 1), (2,))[node]:
    attempt.rank_log(rank).write_text(f"rank {rank} says one\\nrank {rank} says two\\n")
write_record(attempt.outcome, {"state": "finished", "exit_code": 0, "at": time.time()})
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A laptop and three machines."""
    with hosts(tmp_path_factory.mktemp("lab"), 3) as made:
        yield made


def python(lab: Lab, host: str, code: str, *arguments: str) -> str:
    """Run Python on a host, with the tests to import."""
    words = [sys.executable, "-c", code, *arguments]
    done = lab.run(host, words, timeout_s=DEADLINE_S, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    return done.stdout


def isles(lab: Lab, host: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Type an isles command on a host."""
    command = f'mkdir -p {LAPTOP} && cd {LAPTOP} && exec {sys.executable} -m isles "$@"'
    return lab.run(host, ["bash", "-c", command, "isles", *words], timeout_s=DEADLINE_S)


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


class Typed:
    """`isles follow`, as `isles train` calls it, on the laptop; on a terminal or not."""

    CODE = """
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

    def __init__(
        self, lab: Lab, run: str, *, terminal: bool = False, words: list[str] | None = None
    ) -> None:
        self.text = b""
        words = words or ["-c", self.CODE, run, f"{LAPTOP}/runs"]
        self._words = words
        command = f'mkdir -p {LAPTOP}; cd {LAPTOP}; exec {sys.executable} "$@"'
        argv = lab.argv(
            "ctl",
            ["bash", "-c", command, "python", *words],
            PYTHONPATH=str(ROOT),
            TERM="xterm",
            COLUMNS="120",
        )
        if terminal:
            self.reader, theirs = pty.openpty()
            stdin = theirs
        else:
            self.reader, theirs = os.pipe()
            stdin = subprocess.DEVNULL
        self.process = subprocess.Popen(
            argv,
            env=lab.environ(),
            stdin=stdin,
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
        found = [
            process
            for process in psutil.Process(self.process.pid).children(recursive=True)
            if process.cmdline()[1:] == self._words
        ]
        return found[-1] if found else psutil.Process(self.process.pid)

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(timeout=DEADLINE_S)
        os.close(self.reader)
        return code


def test_a_run_elsewhere_is_found_shown_and_stopped(lab: Lab) -> None:
    run = Run(lab, "a-1")
    run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
    run.order("log", rank=0, text="hello from afar\n")
    table = isles(lab, "ctl", "status").stdout.splitlines()
    assert table[1].split()[:4] == ["a-1@a1", "running", "3/60", "5.5000"]
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
    lab.link("a3", "cut")
    try:
        rows = isles(lab, "ctl", "status").stdout.splitlines()
        row = next(row for row in rows if row.startswith("b-1@a3"))
        assert row.split()[1:3] == ["unreachable", "9/60"]
        assert "a3 cannot be asked" in row
        assert any(row.startswith("i-1@a1") for row in rows), rows  # the others are shown
        full = isles(lab, "ctl", "status", "b")
        assert "ago it was running" in full.stdout
        stopped = isles(lab, "ctl", "stop", "b")
        assert stopped.returncode == 2
        assert "cannot be reached" in stopped.stderr
    finally:
        lab.link("a3", "restore")
    isles(lab, "a3", "stop", run.path, "--now")
    isles(lab, "a1", "stop", other.path, "--now")


@pytest.mark.long
def test_ctrl_c_reaches_a_run_that_is_followed_from_afar(lab: Lab) -> None:
    run = Run(lab, "c-1")
    typed = Typed(lab, "c")
    typed.until("starting")
    run.order("status", phase="building model", detail="llama-2m")
    typed.until("building model: llama-2m")
    typed.inner().send_signal(signal.SIGINT)
    typed.until("c-1 stopped at step 7 (SIGINT)")
    assert typed.end() == 130


@pytest.mark.long
def test_on_a_terminal_it_is_drawn_there_and_hears_ctrl_c(lab: Lab) -> None:
    run = Run(lab, "d-1")
    typed = Typed(lab, "d", terminal=True)
    run.order("status", phase="training", step=3, total_steps=60, loss=5.5)
    typed.until("3/60")
    # Not by the terminal: the leader of this session, which is the lab's, would end of it.
    typed.inner().send_signal(signal.SIGINT)
    typed.until("d-1 stopped at step 7 (SIGINT)")
    assert typed.end() == 130


@pytest.mark.long
def test_a_lost_connection_is_made_again(lab: Lab) -> None:
    run = Run(lab, "e-1")
    typed = Typed(lab, "e")
    typed.until("starting")
    ssh = [p for p in typed.inner().children() if p.name() == "ssh"]
    ssh[0].kill()
    typed.until("the connection to a1 is lost; the run goes on there")
    run.order("status", phase="preparing data", detail="after the cut")
    typed.until("preparing data: after the cut")
    run.order("outcome", state="finished", exit_code=0, step=60, reason="", error=None)
    run.order("exit", code=0)
    typed.until("e-1 is finished")
    assert typed.end() == 0


def test_a_closed_laptop_leaves_the_run_and_nothing_else(lab: Lab) -> None:
    run = Run(lab, "f-1")
    typed = Typed(lab, "f")
    typed.until("starting")
    followers = ["bash", "-c", f"pgrep -af 'isles follow {run.path}' | grep -v pgrep"]
    assert lab.run("a1", followers).stdout
    for process in (typed.inner(), *typed.inner().children(recursive=True)):
        process.kill()
    typed.process.wait(timeout=DEADLINE_S)
    deadline = time.monotonic() + DEADLINE_S
    while lab.run("a1", followers).stdout:
        assert time.monotonic() < deadline, "somebody still follows for a laptop that is gone"
    state = json.loads(isles(lab, "ctl", "status", "f-1", "--json").stdout)["state"]
    assert state == "running"
    assert isles(lab, "ctl", "stop", "f", "--now").returncode == 0


@pytest.mark.long
def test_logs_of_hosts_that_share_no_directory_are_one_stream(lab: Lab) -> None:
    path = "/root/runs/g-1"
    python(lab, "a1", FLEET, path, "0")
    python(lab, "a2", FLEET, path, "1")
    python(lab, "ctl", REMEMBER, path, "a1", "a2")
    wanted = ["[a1 agent] agent of 0"]
    wanted += [f"[a1 rank {rank}] rank {rank} says {word}" for rank in (0, 1) for word in _WORDS]
    second = ["[a2 agent] agent of 1", *(f"[a2 rank 2] rank 2 says {word}" for word in _WORDS)]
    assert isles(lab, "ctl", "logs", "g").stdout.splitlines() == wanted + second
    assert isles(lab, "ctl", "logs", "g", "--node", "1").stdout.splitlines() == second
    assert isles(lab, "ctl", "logs", "g", "--rank", "2", "-n", "1").stdout == "rank 2 says two\n"
    blocks = isles(lab, "ctl", "logs", "g", "--by-node", "-n", "1").stdout.splitlines()
    assert blocks[0] == "=== Node 0 (a1) ==="
    assert "=== Node 1 (a2) ===" in blocks
    # The head itself has no key for the others: it shows what it has, and says where the rest is.
    head = isles(lab, "a1", "logs", path)
    assert head.stdout.splitlines() == wanted
    assert "the logs of node 1 are on a2" in head.stderr


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


_WORDS = ("one", "two")

RUN_FILE = """\
name: far
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 512}
data: {sources: [{path: text.txt}], seq_length: 64}
training: {max_steps: 10, global_batch_size: 2}
clusters:
  - launcher: {kind: slurm, login: a1, bin_path: /shared/slurm}
    nodes: 2
    gpus_per_node: 1
    device: cpu
    workdir: /shared/work
"""

# Programs in place of Slurm's: one job, of which a file says how it stands.
FAKE_SLURM = {
    "sbatch": 'echo "PENDING Resources" >/shared/slurm/state; echo 4711',
    "scontrol": "read -r state reason </shared/slurm/state; echo JobId=4711 JobName=far "
    'JobState=$state Reason=${reason:-None} NodeList="(null)" Restarts=0',
    "scancel": "echo CANCELLED >/shared/slurm/state",
    "sinfo": "true",
}


@pytest.fixture
def login(lab: Lab) -> Path:
    """a1 is a login node, with a queue that never gets anywhere; the laptop has a run file."""
    programs = lab.shared / "slurm"
    programs.mkdir()
    for name, line in FAKE_SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    (lab.shared / "work").mkdir()
    (lab.shared / "work" / "text.txt").write_text("some words to learn from\n" * 200)
    (lab.shared / "far.yaml").write_text(RUN_FILE)
    return lab.shared / "far.yaml"


@pytest.mark.long
def test_a_queue_is_used_from_a_machine_that_has_none(lab: Lab, login: Path) -> None:
    wrong = isles(lab, "ctl", "train", "/shared/far.yaml", "data.sources.0.path=none.txt")
    assert wrong.returncode == 1
    assert "none.txt" in wrong.stderr
    assert "/tmp/isles-login-" not in wrong.stderr, "the file's own name, not that of its copy"
    dry = isles(lab, "ctl", "train", "/shared/far.yaml", "--dry-run")
    assert "#SBATCH --nodes=2" in dry.stdout, dry.stderr
    typed = Typed(lab, "", words=["-m", "isles", "train", "/shared/far.yaml"])
    typed.until("submitted far-1 as Slurm job 4711")
    typed.until("queued: ")
    row = isles(lab, "ctl", "status").stdout
    assert "far-1@a1  queued" in row
    assert "slurm job 4711" in row
    typed.inner().send_signal(signal.SIGINT)
    typed.until("taking Slurm job 4711 out of the queue")
    typed.until("far-1 stopped")
    typed.end()
    assert (lab.shared / "slurm" / "state").read_text() == "CANCELLED\n"
    assert not list((lab.root("a1") / "tmp").glob("isles-login-*"))
