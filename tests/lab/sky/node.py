"""A node of the stand-in for SkyPilot: runs a task's setup and run, as its skylet would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.05
GRACE_S = 30.0
"""SkyPilot kills what has not ended so long after its SIGTERM."""

JOB: dict[str, Any] = json.load(sys.stdin)
FOLDER, RANK = Path(JOB["folder"]), int(JOB["rank"])
CANCEL = FOLDER / "cancel"


def main() -> None:
    name = "head" if RANK == 0 else f"worker{RANK}"
    os.chdir(Path.home() / "sky_workdir")
    code, turn = run("setup", "setup", "setup"), 0
    is_ready = codes_of("setup", wait=True) == [0] * len(JOB["nodes"])
    while is_ready and not CANCEL.exists():
        code = run("run", f"{name}, rank={RANK}", f"code-{turn}")
        if not set(codes_of(f"code-{turn}", wait=True)) & set(JOB["codes"]):
            break
        turn += 1
    (FOLDER / f"end-{RANK}").write_text(str(code))


def codes_of(what: str, *, wait: bool = False) -> list[int]:
    """The exit codes of what all nodes run; `wait`: until all have ended, or it is canceled."""
    paths = [FOLDER / f"{what}-{rank}" for rank in range(len(JOB["nodes"]))]
    while True:
        texts = [path.read_text() for path in paths if path.exists()]
        found = [int(text) for text in texts if text]
        if not wait or len(found) == len(paths) or CANCEL.exists():
            return found
        time.sleep(LOOK_S)


def run(script: str, name: str, what: str) -> int:
    """Run a script of the task, and leave its exit code; where another node's fails, it ends."""
    process = subprocess.Popen(
        ["bash", "-c", JOB[script]],
        env={**os.environ, **JOB["environ"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (FOLDER / f"pid-{RANK}").write_text(str(process.pid))
    mark = ["sed", "-u", f"s/^/\x1b[36m({name}, pid={process.pid})\x1b[0m /"]
    with (FOLDER / "log").open("ab") as log:
        copying = subprocess.Popen(mark, stdin=process.stdout, stdout=log)
    told_at = None
    while process.poll() is None:
        if told_at is None and (CANCEL.exists() or any(codes_of(what))):
            told_at = time.monotonic()
            # SkyPilot's daemon tells the whole group, with the ranks in it.
            os.killpg(process.pid, signal.SIGTERM)
        if told_at is not None and time.monotonic() - told_at > GRACE_S:
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    with suppress(subprocess.TimeoutExpired):
        copying.wait(5)
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    (FOLDER / f"{what}-{RANK}").write_text(str(code))
    return code


main()
