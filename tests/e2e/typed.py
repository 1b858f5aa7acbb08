"""Shell blocks that are typed at the same time, each in a terminal of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.deadline import DEADLINE_S


class Typed:
    """A block that runs in bash, in a session of its own; its output goes to a file."""

    def __init__(self, folder: Path, block: str, log: Path) -> None:
        self._log = log
        environ = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
        environ |= {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                ["bash", "-ec", block],
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    def ended(self) -> int:
        """The exit code; fails, with the output, at the deadline."""
        try:
            return self.process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text[-6000:]) from None

    def kill(self) -> None:
        """End what is left of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def typed(folder: Path, *blocks: str) -> Iterator[list[Typed]]:
    """Type blocks at the same time; what is left of them is killed at the end."""
    found: list[Typed] = []
    try:
        for number, block in enumerate(blocks):
            found.append(Typed(folder, block, folder / f"terminal-{number}.log"))
        yield found
    finally:
        for each in found:
            each.kill()


def run_typed(folder: Path, *blocks: str) -> list[str]:
    """Type blocks at the same time; all must end well. Returns their output."""
    with typed(folder, *blocks) as terminals:
        codes = [terminal.ended() for terminal in terminals]
        texts = [terminal.text for terminal in terminals]
        assert not any(codes), "\n".join(f"{text[-4000:]}\n" for text in [str(codes), *texts])
    return texts
