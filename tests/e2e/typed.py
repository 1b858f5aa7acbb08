"""What users type: a command, or blocks of a shell at the same time, each in its own terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S

ISLES = (sys.executable, "-m", "isles")


class Command:
    """A program in a session of its own, isles where no other is named; its output is kept."""

    def __init__(
        self,
        *words: str | Path,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        program: Sequence[str | Path] = ISLES,
    ) -> None:
        self._out, self._err = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115
        self.process = subprocess.Popen(
            [*program, *words],
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return _text_of(self._out)

    @property
    def err(self) -> str:
        """What it has said on stderr so far."""
        return _text_of(self._err)

    @property
    def text(self) -> str:
        """Both."""
        return self.out + self.err

    def end(self) -> int:
        """Wait for its end; its exit code."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(DEADLINE_S)
        raise AssertionError(f"it does not end\n{self.text[-6000:]}")

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for what a record or its output will show; fails where it ends before."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            has_ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not has_ended, f"it has ended\n{self.text}"
            assert time.monotonic() < deadline, f"it goes on, without that\n{self.text}"
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)

    def kill(self) -> None:
        """End what is left of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _text_of(stream: IO[bytes]) -> str:
    return os.pread(stream.fileno(), os.fstat(stream.fileno()).st_size, 0).decode(errors="replace")


def isles(
    *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, expected: int | None = 0
) -> Command:
    """Run one command to its end. None: with any exit code."""
    command = Command(*words, cwd=cwd, env=env)
    try:
        code = command.end()
    except BaseException:  # Ctrl+C does not reach a session of its own
        command.kill()
        raise
    assert expected in (None, code), f"ended with {code}\n{command.text}"
    return command


_WAITING = """
import sys, runpy
import isles.launch.start, isles.monitor.verbs
gate = open(sys.argv.pop(1))
print("ready", flush=True)
gate.read()
runpy.run_module("isles", run_name="__main__", alter_sys=True)
"""


def at_one_instant(words: Sequence[str | Path], cwd: Path, count: int = 3) -> list[Command]:
    """Run one command in several processes that all wait for the same moment; all have ended."""
    gate = cwd / "gate"
    os.mkfifo(gate)
    held = os.open(gate, os.O_RDWR)
    program = (sys.executable, "-c", _WAITING, gate)
    commands = [Command(*words, cwd=cwd, program=program) for _ in range(count)]
    try:
        for command in commands:
            command.until(lambda command=command: command.out)
        os.close(held)
        for command in commands:
            command.end()
    except BaseException:
        for command in commands:
            command.kill()
        raise
    return commands


@contextmanager
def typed(folder: Path, *blocks: str) -> Iterator[list[Command]]:
    """Type blocks of bash at the same time; what is left of them is killed at the end."""
    env = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    bash = ("env", "--unset=VIRTUAL_ENV", "bash", "-ec")
    with ExitStack() as stack:
        found = []
        for block in blocks:
            # One stream, as a terminal has it.
            found.append(Command(f"exec 2>&1\n{block}", cwd=folder, env=env, program=bash))
            stack.callback(found[-1].kill)
        yield found


def run_typed(folder: Path, *blocks: str) -> list[str]:
    """Type blocks at the same time; all must end well. Returns their output."""
    with typed(folder, *blocks) as terminals:
        codes = [terminal.end() for terminal in terminals]
        texts = [terminal.text for terminal in terminals]
        assert not any(codes), "\n".join([str(codes), *(text[-4000:] for text in texts)])
    return texts


def the_run(run_file: Path) -> RunDir:
    """The run directory of the tiny run beside its file."""
    return RunDir(run_file.parent / "runs" / "tiny-1")
