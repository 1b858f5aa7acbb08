"""Processes forked from the agent's fork server: a node's ranks, and the store where they meet."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from isles.errors import ExitCode, UserError
from isles.agent.rank import die_with_agent

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Rank:
    """One rank.

    Args:
        process: of it.
        answer: through which its exit code comes, where its work has come to an end by itself.
        code: that, once it has come.
    """

    process: ForkServerProcess
    answer: Connection
    code: int | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has come to its own end, and the process is gone.

        One that is asked to stop when it has nothing left to do ends with 0, without an answer.
        """
        return self.process.exitcode == 0

    @property
    def failure(self) -> int | None:
        """The exit code of one that has not come to its own end; negative: of a signal."""
        code = self.process.exitcode
        return None if code is None or self.is_done else code

    def look(self) -> None:
        """Take the answer, if it is there."""
        ended = self.process.exitcode is not None  # before: what it has said is complete then
        if self.code is None and (ended or self.answer.poll()):
            with suppress(EOFError, OSError):
                self.code = int(self.answer.recv()) if self.answer.poll() else None


class Ranks:
    """The ranks of this node in one start of all ranks.

    Args:
        entry: what each of them runs; it returns an exit code, or ends the process itself.
        args: its arguments.
        environs: for each rank, by its number, the variables of its own.
    """

    def __init__(
        self,
        entry: Callable[..., int],
        args: tuple[Any, ...],
        environs: Mapping[int, Mapping[str, str]],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Rank] = {}
        for rank, environ in environs.items():
            answer, end = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(entry, args, dict(environ), end))
            _start(process)
            end.close()
            self._ranks[rank] = _Rank(process, answer)

    def look(self) -> tuple[dict[int, int], dict[int, int]]:
        """See which have ended.

        Returns:
            The codes of those that have come to their own end, and of those that failed, by rank.
        """
        for rank in self._ranks.values():
            rank.look()
        done = {n: int(r.code or 0) for n, r in self._ranks.items() if r.is_done}
        failed = {n: code for n, r in self._ranks.items() if (code := r.failure) is not None}
        return done, failed

    def are_all(self, done: Mapping[int, int]) -> bool:
        """Whether these are all of them."""
        return len(done) == len(self._ranks)

    def are_any_left(self) -> bool:
        """Whether some have not ended."""
        return any(rank.process.exitcode is None for rank in self._ranks.values())

    def signal(self, number: int) -> None:
        """Send this to all that are alive."""
        for rank in self._ranks.values():
            if rank.process.exitcode is None and rank.process.pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, number)

    def end(self, number: int, timeout_s: float) -> None:
        """Send this to all, and kill those that have not ended in time."""
        self.signal(number)
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks.values():
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self.signal(signal.SIGKILL)
        for rank in self._ranks.values():
            # Not without end: what hangs in the kernel, as on a lost disk, cannot be killed.
            rank.process.join(timeout_s)
            if rank.process.exitcode is None:
                sys.stderr.write(
                    f"process {rank.process.pid} has not ended {timeout_s:.0f} s after SIGKILL: "
                    "it hangs in a driver or a file system; see `dmesg | tail`\n"
                )
            rank.answer.close()


class MeetingPlace:
    """The store at which the ranks of all nodes meet: this node's part, if it is the first.

    It listens from the start, so that who comes early waits; the process that answers comes from
    the fork server, which has torch, and this one does not need it.

    Args:
        address: of this node, the only one at which it listens.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0))
        self._process: ForkServerProcess | None = None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def open(self) -> None:
        """Answer from now on, to the end of this process."""
        if self._process is not None and self._process.exitcode is None:
            return
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve_store, args=(self._listener,))
        _start(self._process)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._listener.close()


def _start(process: ForkServerProcess) -> None:
    try:
        process.start()
    except (EOFError, ConnectionError, BrokenPipeError) as error:
        raise UserError(
            "no rank can be started here: the process that imports torch for all of them has ended",
            where=f"host {socket.gethostname()}",
            fix=f"its last words are above; try there: {sys.executable} -c 'import torch'",
            id="start.failed",
        ) from error


def _run(
    entry: Callable[..., int], args: tuple[Any, ...], environ: dict[str, str], answer: Connection
) -> None:
    if sys.platform == "linux":
        # Were the fork server killed alone, nobody would know of this process any more.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
    os.environ.update(environ)
    try:
        code = entry(*args)
    except KeyboardInterrupt:  # before the rank has taken over the signals
        code = ExitCode.INTERRUPTED
    answer.send(int(code))


def _serve_store(listener: socket.socket) -> None:
    import torch.distributed  # noqa: F401  # the library that the next line is a part of
    from torch._C._distributed_c10d import TCPStore

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that save still need it
    die_with_agent()
    address, port = listener.getsockname()[:2]
    # torch would listen on every interface; a socket that is bound already it takes as it is.
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    threading.Event().wait()
    del store
