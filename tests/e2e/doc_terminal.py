"""A terminal in which lines are typed one after the other, as a reader of the pages does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.deadline import DEADLINE_S

BINS = Path(sys.executable).absolute().parent
# What is looked at until one has seen it, and what it shows by then; Ctrl+C ends it.
FOLLOWED = {"isles logs -f": "phase=training", "tail -f": "\n", "tensorboard ": "Press CTRL+C"}
# The folder and the variables outlive the line that sets them, as in a shell.
SHELL = """\
cd "$(cat "$STATE/cwd")" && [ ! -f "$STATE/env" ] || . "$STATE/env"
eval "$1"
code=$?
pwd > "$STATE/cwd"; export -p > "$STATE/env"
exit $code
"""


@dataclass(frozen=True)
class Said:
    """What came of a line: its exit code, and what was printed on both streams."""

    code: int
    text: str


class Terminal:
    """A shell in a folder.

    Args:
        folder: where it begins; it need not be there yet.
        home: of the user, with `bin` first on its PATH.
        name: another for each terminal of a home.
    """

    def __init__(self, folder: Path, home: Path, name: str) -> None:
        self.folder = folder
        self._state = home / "state" / name
        self._state.mkdir(parents=True, exist_ok=True)
        (self._state / "cwd").write_text(str(folder))
        path = f"{home / 'bin'}:{BINS}:{os.environ['PATH']}"
        self._environ = {
            "HOME": str(home),
            "PATH": path,
            "STATE": str(self._state),
            "USER": "user",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # Whatever a page says: the environment of the tests stays as it is.
            "PIP_NO_INDEX": "1",
            "PYTHONUNBUFFERED": "1",
        }

    def type(self, line: str) -> Said:
        """Type a line and wait for its end, or end it by Ctrl+C where it only shows something."""
        self.folder.mkdir(parents=True, exist_ok=True)
        seen = next((text for start, text in FOLLOWED.items() if line.startswith(start)), None)
        process = subprocess.Popen(
            # Where the tests run in the background, Ctrl+C would be ignored.
            ["env", "--default-signal=INT", "bash", "-c", SHELL, "bash", line],
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        text = b""
        end = time.monotonic() + DEADLINE_S
        with process.stdout as stream:
            while select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
                if not (piece := os.read(stream.fileno(), 65536)):
                    break
                text += piece
                if seen is not None and seen.encode() in text:
                    os.killpg(process.pid, signal.SIGINT)
                    seen = None
            else:
                os.killpg(process.pid, signal.SIGKILL)
                raise AssertionError(f"{line}: no end within {DEADLINE_S} s\n{text.decode()}")
        code = process.wait(timeout=DEADLINE_S)
        was_followed = line.startswith(tuple(FOLLOWED))
        return Said(0 if was_followed and code in (130, -signal.SIGINT) else code, text.decode())

    def must(self, line: str) -> str:
        """Type a line that must end well; what it prints."""
        said = self.type(line)
        assert said.code == 0, f"$ {line}\n{said.text}\nexit code {said.code}"
        return said.text
