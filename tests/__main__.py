"""`python -m tests [arguments of pytest]`: run the tests, and look at what they have left behind.

pytest runs as a child of this process, which adopts every process whose parent has ended (a child
subreaper, prctl(2)): also an agent in a session of its own is found. What a test has made and not
taken away is named with the test, is ended, and fails the run; also after Ctrl+C, or where pytest
itself was killed. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

RUN = "ISLES_TEST_RUN"
"""Variable with the id of this run, a part of all names that tests give to what outlives them."""

_PR_SET_CHILD_SUBREAPER = 36
_GRACE_S = 60.0
"""What ends by itself, such as an agent whose run is over, may take so long on a busy machine."""
_NETNS, _SHM = Path("/run/netns"), Path("/dev/shm")


def main(arguments: list[str]) -> int:
    """The exit code of pytest, or 1 where something was left."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    run = f"{os.getpid():x}{time.time_ns() // 1_000_000 % 0xFFFFFF:x}"
    folder = Path(tempfile.mkdtemp(prefix="isles-"))  # short: sockets lie in it
    shared_memory = set(_entries(_SHM))
    given = any(argument.startswith("--basetemp") for argument in arguments)
    own = [] if given else [f"--basetemp={folder / 't'}"]
    pytest = subprocess.Popen(
        [sys.executable, "-m", "pytest", *own, *arguments],
        env=os.environ | {RUN: run, "TMPDIR": str(folder)},
    )
    # Ctrl+C reaches pytest from the terminal; who ends this process alone ends it the same way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: pytest.send_signal(signal.SIGINT))
    code = _reap_until(pytest.pid)
    left = [*_end_processes(), *_remove_namespaces(run), *_unmount(folder)]
    left += _remove_shared_memory(shared_memory)
    if code == 0:
        shutil.rmtree(folder, ignore_errors=True)
    if left:
        lines = [f"\n{len(left)} left behind by tests, and ended now:", *left]
        sys.stderr.write("\n  ".join(lines) + "\n")
    return code or int(bool(left))


def _reap_until(pid: int) -> int:
    """Take the exit codes of all children, adopted ones too, until this one has ended."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _end_processes() -> Iterator[str]:
    """Wait for those that end by themselves, kill the others; a line for each."""
    deadline = time.monotonic() + _GRACE_S
    while (rest := _alive()) and time.monotonic() < deadline:
        psutil.wait_procs(rest, timeout=1.0)
    while rest:
        # All are named before one is killed: a host's first process takes the others with it.
        yield from [_describe(process) for process in rest]
        for process in rest:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(rest, timeout=_GRACE_S)
        rest = _alive()


def _alive() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _describe(process: psutil.Process) -> str:
    """With its test, from the variable that pytest sets in it or in the nearest above it."""
    test = words = ""
    with suppress(psutil.Error):
        words = " ".join(process.cmdline()) or process.name()
        for candidate in (process, *process.parents()):
            with suppress(psutil.Error):
                test = test or candidate.environ().get("PYTEST_CURRENT_TEST", "")
    return f"process {process.pid} of {test.rsplit(' (', 1)[0] or 'some test'}: {words[:200]}"


def _remove_namespaces(run: str) -> list[str]:
    names = [name for name in _entries(_NETNS) if name.startswith(f"isles-{run}-")]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)
    return [f"network namespace {name}" for name in names]


def _unmount(folder: Path) -> list[str]:
    """Mounts below the tests' own folder, the innermost first."""
    left = []
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    for line in reversed(lines):
        # Blanks and the like stand there as octal numbers.
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), line.split(" ")[1])
        if Path(point).is_relative_to(folder):
            subprocess.run(["umount", "--lazy", point], check=False)
            left.append(f"mount {point}")
    return left


def _remove_shared_memory(before: set[str]) -> list[str]:
    """Files that have come, and that nobody uses: what runs beside the tests has its own."""
    new = {name for name in _entries(_SHM) if name not in before}
    for process in psutil.process_iter() if new else ():
        with suppress(psutil.Error, OSError):
            text = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
            held = {Path(f.path).name for f in process.open_files()}
            new -= {name for name in new if name in held or str(_SHM / name) in text}
    for name in new:
        with suppress(OSError):
            (_SHM / name).unlink()
    return [f"shared memory {_SHM / name}" for name in sorted(new)]


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
