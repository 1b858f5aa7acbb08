"""The ranks of a check on one node: processes of torch, started early and asked later."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

_NOISE = 2000


class Ranks:
    """A process for each rank of this node."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, args: dict[str, Any]) -> dict[str, Any]:
        """Start them, and wait until each has imported torch and launched a kernel.

        Args:
            args: `device`, `nproc`, `timeout_s`.

        Returns:
            ranks: for each what `isles.train.check_rank.look` says.
        """
        command = [sys.executable, "-m", "isles.train.check_rank", "--device", args["device"]]
        pipe = subprocess.PIPE
        # A tiny sum on many cores only waits; and the ranks share this machine with the check.
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*command, "--index", str(index)],
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env=environ,
                start_new_session=True,
            )
            for index in range(int(args["nproc"]))
        ]
        return {"ranks": self._answers(float(args["timeout_s"]))}

    def reduce(self, args: dict[str, Any]) -> dict[str, Any]:
        """Give each its order, and wait for all.

        Args:
            args: `orders`: one for each rank, as `isles.train.check_rank.reduce` takes them;
                `timeout_s`.
        """
        for process, order in zip(self._processes, args["orders"], strict=True):
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
            except OSError:
                pass  # it has ended: its answer says so
        return {"ranks": self._answers(float(args["timeout_s"]))}

    def end(self, args: dict[str, Any]) -> dict[str, Any]:
        """End them all, and wait until they have: whoever asks has a deadline."""
        del args
        self.kill()
        for process in self._processes:
            process.wait()
        self._processes = []
        return {}

    def kill(self) -> None:
        """End them, without waiting for one that is stuck in a driver."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()

    def _answers(self, timeout_s: float) -> list[dict[str, Any]]:
        end = time.monotonic() + timeout_s
        return [_answer(process, end) for process in self._processes]


def _answer(process: subprocess.Popen[bytes], end: float) -> dict[str, Any]:
    """The next line of a rank; or how it ended, or that it hangs."""
    assert process.stdout is not None and process.stderr is not None
    streams, line, noise = [process.stdout.fileno(), process.stderr.fileno()], b"", b""
    while (left := end - time.monotonic()) > 0:
        for stream in select.select(streams, [], [], left)[0]:
            data = os.read(stream, 65_536)
            if not data:
                streams.remove(stream)
            elif stream == process.stdout.fileno():
                line += data
            else:
                noise = (noise + data)[-_NOISE:]
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not streams:
            return {"stage": "died", "fault": _ending(process, noise)}
    return {"stage": "silent", "fault": "no answer in time"}


def _ending(process: subprocess.Popen[bytes], noise: bytes) -> str:
    code = process.wait(timeout=10)
    words = noise.decode(errors="replace").strip().splitlines()
    said = f": {words[-1]}" if words else ""
    if code < 0:
        return f"ended by {signal.Signals(-code).name}{said}"
    return f"ended with exit code {code}{said}"
