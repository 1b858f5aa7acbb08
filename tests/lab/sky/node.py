"""A node of the stand-in for SkyPilot: runs a task's setup and run, as its skylet would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LOOK_S = 0.05
GRACE_S = 30.0
"""SkyPilot kills what has not ended so long after its SIGTERM."""


def main() -> None:
    job: dict[str, Any] = json.load(sys.stdin)
    folder, rank, num = Path(job["folder"]), int(job["rank"]), len(job["nodes"])
    name = "head" if rank == 0 else f"worker{rank}"
    os.chdir(Path.home() / "sky_workdir")
    code, turn = run(job["setup"], job, "setup", (folder / "cancel").exists), 0
    (folder / f"setup-{rank}").write_text(str(code))
    is_ready = code == 0 and wait_for(folder, "setup-{}", num)
    while is_ready and not (folder / "cancel").exists():
        code = run(
            job["run"], job, f"{name}, rank={rank}", lambda turn=turn: has_to_end(folder, num, turn)
        )
        (folder / f"code-{turn}-{rank}").write_text(str(code))
        if not wait_for(folder, f"code-{turn}-{{}}", num):
            break
        codes = {int((folder / f"code-{turn}-{n}").read_text()) for n in range(num)}
        if not codes & set(job["codes"]):
            break
        turn += 1
    (folder / f"end-{rank}").write_text(str(code))


def wait_for(folder: Path, pattern: str, num: int) -> bool:
    paths = [folder / pattern.format(rank) for rank in range(num)]
    while not all(path.exists() and path.read_text() for path in paths):
        if (folder / "cancel").exists():
            return False
        time.sleep(LOOK_S)
    return True


def has_to_end(folder: Path, num: int, turn: int) -> bool:
    """Whether the job is cancelled, or a node of it has failed: the others end with it."""
    codes = [folder / f"code-{turn}-{rank}" for rank in range(num)]
    failed = [path for path in codes if path.exists() and path.read_text() not in ("", "0")]
    return bool(failed) or (folder / "cancel").exists()


def run(script: str, job: dict[str, Any], name: str, has_to_end: Any) -> int:
    environ = {**os.environ, **job["environ"]}
    process = subprocess.Popen(
        ["bash", "-c", script],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (Path(job["folder"]) / f"pid-{job['rank']}").write_text(str(process.pid))

    def copy() -> None:
        assert process.stdout is not None
        with (Path(job["folder"]) / "log").open("ab", buffering=0) as log:
            for line in process.stdout:
                log.write(f"\x1b[36m({name}, pid={process.pid})\x1b[0m ".encode() + line)

    reader = threading.Thread(target=copy, daemon=True)
    reader.start()
    told_at = None
    while process.poll() is None:
        if told_at is None and has_to_end():
            told_at = time.monotonic()
            signal_all(process.pid, signal.SIGTERM)
        if told_at is not None and time.monotonic() - told_at > GRACE_S:
            signal_all(process.pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    reader.join(timeout=5)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def signal_all(pid: int, number: signal.Signals) -> None:
    # SkyPilot's daemon tells the whole group, with the ranks in it.
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


if __name__ == "__main__":
    main()
