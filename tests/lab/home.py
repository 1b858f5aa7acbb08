"""A run for the pretend hosts, and what tests ask of them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import psutil
import yaml

from isles.errors import ExitCode
from isles.run.checkpoints import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import read_last_step
from tests.deadline import DEADLINE_S, until
from tests.e2e.typed import Command
from tests.inputs import write_model, write_words
from tests.lab.hosts import MARK, Lab

ISLES = str(Path(sys.executable).with_name("isles"))
QUOTED_ISLES, QUOTED_PYTHON = shlex.quote(ISLES), shlex.quote(sys.executable)
"""As words of a shell."""
HOSTS = ("a1", "a2", "a3")
# A script that leaves, on every rank, its place and its arguments.
PLACE = """\
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "ISLES_RUN_DIR")
place = {name: os.environ[name] for name in names} | {"host": os.uname().nodename}
with open(f"place-{place['RANK']}.json", "w") as stream:
    json.dump([place, sys.argv[1:]], stream)
"""
_TRAINER = ("model", "tokenizer", "data", "strategy", "balance", "checkpoint", "track")
_SITE = Path(str(distribution("torch").locate_file("")))


def write_run(lab: Lab, name: str, *, hosts: Sequence[Any] = HOSTS, **more: Any) -> Path:
    """A run file /shared/NAME.yaml that trains a tiny model; its path as this machine sees it.

    Args:
        lab: the hosts.
        name: of the run.
        hosts: of the ssh launcher.
        more: sections of the run and keys of its cluster; None leaves one out. Where `training`
            names a script of the user's own, what only the trainer knows is left out.
    """
    if not (lab.shared / "tiny").exists():
        write_inputs(lab.shared)
    training = {
        "max_steps": 20,
        "global_batch_size": 12,
        "learning_rate": 0.001,
        "precision": "32-true",
        "logging_steps": 1,
        "eval_steps": None,
        **more.pop("training", {}),
    }
    if "script" in training:
        training = {key: training[key] for key in training if key.startswith("script")}
        more |= dict.fromkeys(_TRAINER)
    content: dict[str, Any] = {
        "name": name,
        "output_dir": "/shared/runs",
        "model": {"name_or_path": "./tiny", "init": "scratch"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {"sources": [{"path": "words.jsonl"}], "seq_length": 32, "packing": False},
        "training": training,
        "strategy": {"kind": "ddp"},
        "balance": "even",
        "checkpoint": {"every_steps": None, "every_minutes": None, "export_on_finish": False},
        "track": ["jsonl"],
        "outer": None,
        "watchdog": None,
        "clusters": None,
    }
    content |= {key: more.pop(key) for key in content if key in more}
    if content["clusters"] is None:
        launcher = {"kind": "ssh", "hosts": list(hosts)}
        cluster = {"workdir": "/shared", "launcher": launcher, **more}
        content["clusters"] = [{key: value for key, value in cluster.items() if value is not None}]
    path = lab.shared / f"{name}.yaml"
    given = {key: value for key, value in content.items() if value is not None}
    path.write_text(yaml.safe_dump(given))
    return path


def outcome_of(attempt: Attempt) -> dict[str, Any]:
    """How an attempt ended, once it has."""
    outcome: dict[str, Any] = until(lambda: read_record(attempt.outcome), f"{attempt.path} ends")
    return outcome


def assert_stopped(run_dir: RunDir) -> int:
    """Its last start has ended, is saved, and may go on; returns the step."""
    attempt = run_dir.last_attempt()
    assert attempt is not None
    outcome = outcome_of(attempt)
    assert (outcome["state"], outcome["exit_code"]) == ("stopped", ExitCode.REQUEUE), outcome
    assert list_checkpoints(run_dir)[-1].step == outcome["step"]
    return int(outcome["step"])


def has_done(attempt: Attempt, step: int, restart: int = 0) -> bool:
    """Whether rank 0 has done a step since a restart."""
    return (read_last_step(attempt, restart) or 0) >= step


def until_step(attempt: Attempt, step: int, restart: int = 0) -> None:
    """Wait until rank 0 has done a step since a restart; a start that has ended does no more."""

    def words() -> str:
        logs = sorted(attempt.path.glob("*.log"))
        return "\n".join([f"step {step}", *(f"{log}:\n{log.read_text()}" for log in logs)])

    def look() -> bool:
        outcome = read_record(attempt.outcome)
        is_done = has_done(attempt, step, restart)
        assert is_done or outcome is None, f"ended before: {outcome}\n{words()}"
        return is_done

    until(look, words)


def isles(lab: Lab, *words: str, host: str = "ctl", expected: int | None = 0) -> str:
    """Run one isles command in /shared of a host; all that it printed. None: any exit code."""
    done = lab.run(host, ["bash", "-c", 'cd /shared && exec "$@"', "-", ISLES, *words])
    text = done.stdout + done.stderr
    assert expected in (None, done.returncode), f"ended with {done.returncode}\n{text}"
    return text


def begin(lab: Lab, *words: str, host: str = "ctl") -> subprocess.Popen[bytes]:
    """Start one isles command in /shared of a host, in a session of its own."""
    return lab.popen(host, ["bash", "-c", 'cd /shared && exec "$@"', "-", ISLES, *words])


def end(process: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a command; all that it has printed and was not read yet."""
    return process.communicate(timeout=DEADLINE_S)[0].decode()


def install(lab: Lab, host: str, names: str, text: str) -> None:
    """Put a program of these lines of sh on PATH of a host, under each of the names."""
    lines = f"tee {names} >/dev/null <<'END'\n#!/bin/sh\n{text}\nEND"
    sh(lab, host, f"cd /usr/local/bin\n{lines}\nchmod 755 {names}")


def started(lab: Lab, host: str, command: Sequence[str]) -> Command:
    """A command inside a host, which goes on beside the test."""
    return Command(cwd=lab.shared, env=lab.environ(), program=lab.argv(host, command))


def assert_places(lab: Lab, folder: Path, *arguments: str) -> None:
    """What PLACE has left, run with these arguments: a rank on each of a1 and a2."""
    for rank, host in enumerate(("a1", "a2")):
        place, words = json.loads((folder / f"place-{rank}.json").read_text())
        assert (place["RANK"], place["GROUP_RANK"], place["host"]) == (str(rank), str(rank), host)
        assert (place["WORLD_SIZE"], place["LOCAL_RANK"]) == ("2", "0")
        assert place["MASTER_ADDR"] == lab.address("a1") and place["ISLES_RUN_DIR"]
        assert words == list(arguments)


def sh(lab: Lab, host: str, text: str) -> str:
    """Run a line of bash on a host; it must succeed."""
    done = lab.run(host, ["bash", "-ec", text])
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    return done.stdout


@contextmanager
def undone(lab: Lab, host: str, do: str, undo: str) -> Iterator[None]:
    """Two lines of bash, one before a block and one after it, also where it fails."""
    sh(lab, host, do)
    try:
        yield
    finally:
        sh(lab, host, undo)


@contextmanager
def other_torch(lab: Lab, host: str) -> Iterator[None]:
    """The torch of a host says that it is 2.11.0."""
    metadata = next(_SITE.glob("torch-*.dist-info")) / "METADATA"
    path, kept = shlex.quote(str(metadata)), shlex.quote(f"{metadata}.kept")
    edit = f"sed -i.kept 's/^Version: .*/Version: 2.11.0/' {path}"
    with undone(lab, host, edit, f"mv {kept} {path}"):
        yield


@contextmanager
def link_cut(lab: Lab, host: str) -> Iterator[None]:
    """A host that nobody reaches, and that reaches nobody."""
    lab.link(host, "cut")
    try:
        yield
    finally:
        lab.link(host, "restore")


def processes(lab: Lab, host: str, *words: str) -> list[psutil.Process]:
    """Processes on a host that a test has begun, or what it has begun: not the lab's own daemons.

    Args:
        words: that stand one after the other in their command lines.
    """
    # Of a pod, and of what a container has of the host, the network is that of the host.
    network = Path(f"/proc/{lab.pid1(host)}/ns/net").readlink()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if Path(f"/proc/{process.pid}/ns/net").readlink() == network:
                typed = process.cmdline()
                starts = range(len(typed) - len(words) + 1)
                if MARK in process.environ() and any(
                    typed[start : start + len(words)] == [*words] for start in starts
                ):
                    found.append(process)
    return found


def signal_all(lab: Lab, host: str, number: signal.Signals, *words: str) -> None:
    """Send a signal to the processes on a host that have these words; there is one at least."""
    found = processes(lab, host, *words)
    assert found, f"no process on {host}: {words}"
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def left(lab: Lab, hosts: Sequence[str] = HOSTS) -> list[str]:
    """What tests have begun on the hosts, and runs there."""
    found = []
    for host in hosts:
        for process in processes(lab, host):
            with suppress(psutil.Error):
                found.append(f"{host}: {process.pid} {' '.join(process.cmdline())}")
    return found


def assert_nothing_left(lab: Lab, hosts: Sequence[str] = HOSTS) -> None:
    """No process that a test has begun stays on any host."""
    until(lambda: not left(lab, hosts), lambda: f"no process left: {left(lab, hosts)}")


def write_inputs(folder: Path) -> None:
    """A tiny model, as a config.json, and a text."""
    write_words(folder)
    write_model(folder)
