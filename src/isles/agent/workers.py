"""Ranks of one node: forked from a server that has imported torch, watched, ended.

This process itself never imports torch. What ranks run is named as a string, and imported in the
forked process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from isles.agent.failure import failure_report, oom_kills
from isles.agent.rank import RankStart
from isles.agent.relay import SignalRelay
from isles.errors import ExitCode, UserError
from isles.run.pace import END_GRACE_S
from isles.run.paths import Attempt, RunDir
from isles.run.process import die_with_parent

_END_OTHERS_S = 30.0
"""How long ranks may take to end after another one of this node has failed."""

_RANK_PROCESS = "isles.agent.rank:rank_process"
_SERVE_STORE = "isles.dist.world:serve_store"


@dataclass(frozen=True, slots=True)
class Node:
    """What the ranks of one node need at every start of them.

    Args:
        run_dir, attempt: as this host sees them.
        nproc: ranks here.
        scratch: a folder for files of this attempt on this host.
        in_job: whether the coordinator may queue the job of the run again after a stop.
    """

    run_dir: RunDir
    attempt: Attempt
    nproc: int
    scratch: Path
    in_job: bool = False


class WorkerGroup:
    """Ranks of one node.

    Which ranks they are and with whom, and whether they are started again, the coordinator says.

    Args:
        node: what they need to start.
        relay: of signals, which is told whom to hand them to.
        place: the store where the ranks of several nodes meet, where this node may have it.
    """

    def __init__(self, node: Node, relay: SignalRelay, place: MeetingPlace | None = None) -> None:
        self._node = node
        self._relay = relay
        self._place = place
        self._ranks: Ranks | None = None
        self._order: dict[str, Any] = {}
        self._failed: dict[int, int] = {}
        self._oom_kills = 0
        self._end_by = 0.0
        self._is_handing_over = False
        self.report: dict[str, Any] = {}
        self._rest()

    @property
    def is_running(self) -> bool:
        """Whether ranks have been started and not been seen to end."""
        return bool(self.report["state"] == "running")

    @property
    def restart(self) -> int:
        """The restart to which the ranks belong, running or not; -1 before the first."""
        return int(self._order.get("restart", -1))

    def begin(self, order: dict[str, Any]) -> None:
        """Start the ranks.

        Args:
            order: of the coordinator: `restart`; `ranks`, the first one here and how many;
                `world_size`; `group`, the number of this node among those that train, and how many
                they are; `master`, host and port for torchrun's variables; `store`, where the ranks
                of several nodes meet; `script`; `resume_from`.
        """
        node = self._node
        self._order, self._failed, self._is_handing_over = order, {}, False
        self._oom_kills = oom_kills()
        restart, is_alone = int(order["restart"]), order["group"][1] == 1
        if self._place is not None and order["group"][0] == 0 and not order["script"]:
            self._place.open()
        host, port = order["store"]
        start = RankStart(
            restart=restart,
            store=node.scratch / f"store-{restart}" if is_alone else None,  # no port is opened
            meeting=None if is_alone else (str(host), int(port)),
            in_job=node.in_job,
        )
        asked = Path(order["resume_from"]) if order["resume_from"] else None
        args = (node.run_dir.path, node.attempt.number, asked, start)
        self._relay.expect(restart, self._numbers)
        environs = {rank: self._environ(rank) for rank in self._numbers}
        what = "isles.agent.script.run:script_process" if order["script"] else _RANK_PROCESS
        self._ranks = Ranks(what, args, environs)
        self.report = {"restart": restart, "state": "running"}

    @property
    def _numbers(self) -> range:
        first, count = self._order["ranks"]
        return range(first, first + count)

    def look(self) -> None:
        """See whether ranks have ended; `report` says so."""
        if not self.is_running:
            return
        assert self._ranks is not None
        done, failed = self._ranks.look()
        if failed:
            self._fail(failed)
        elif self._ranks.are_all(done):
            codes = {str(rank): code for rank, code in done.items()}
            self.report = {"restart": self.restart, "state": "succeeded", "codes": codes}

    def _fail(self, failed: dict[int, int]) -> None:
        """Some have failed, and the others cannot go on: report why, as soon as it is known."""
        assert self._ranks is not None
        now = time.monotonic()
        if not self._failed:
            self._failed, self._end_by = failed, now + _END_OTHERS_S
            self._ranks.signal(signal.SIGTERM)
        found = failure_report(
            self._node.attempt,
            self.restart,
            list(self._numbers),
            int(self._order["world_size"]),
            self._failed,
            has_no_memory=oom_kills() > self._oom_kills,
        )
        has_cause = any(not error["is_communication"] for error in found["errors"])
        has_cause = has_cause or any(code < 0 for code in self._failed.values())
        if not has_cause and self._ranks.are_any_left() and now < self._end_by:
            return  # whom they have lost may be one that takes longer to end
        self.report = {"restart": self.restart, "state": "failed", **found}
        self.report["codes"] = {str(rank): code for rank, code in self._failed.items()}

    def hand_over(self) -> bool:
        """Let the ranks save and end, to go on with other nodes; False where they do already."""
        if self._is_handing_over or not self.is_running:
            return False
        self._is_handing_over = True
        assert self._ranks is not None
        self._ranks.signal(signal.SIGUSR2)
        return True

    def end(self, *, at_once: bool) -> None:
        """End the ranks; what is left of them after a moment is killed."""
        if self._ranks is not None:
            if self._failed and not at_once:  # told already: once more may mean at once
                self._ranks.end(0, max(END_GRACE_S, self._end_by - time.monotonic()))
            else:
                self._ranks.end(signal.SIGKILL if at_once else signal.SIGTERM, END_GRACE_S)
            self._ranks = None
        self._rest()

    def _rest(self) -> None:
        """No rank is here."""
        self.report = {"restart": self.restart, "state": "idle"}

    def _environ(self, rank: int) -> dict[str, str]:
        """What torchrun sets for a rank."""
        node, order = self._node, self._order
        local_rank = rank - self._numbers.start
        error = node.scratch / f"error-{self.restart}-{local_rank}.json"
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(order["group"][0]),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "default",
            "LOCAL_WORLD_SIZE": str(node.nproc),
            "WORLD_SIZE": str(order["world_size"]),
            "GROUP_WORLD_SIZE": str(order["group"][1]),
            "ROLE_WORLD_SIZE": str(order["world_size"]),
            "MASTER_ADDR": str(order["master"][0]),
            "MASTER_PORT": str(order["master"][1]),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart),
            "TORCHELASTIC_RUN_ID": f"{node.run_dir.name}.{node.attempt.number}",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": str(error),
        }


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
        what: MODULE:FUNCTION that each of them runs; it returns an exit code, or ends the process
            itself.
        args: its arguments.
        environs: for each rank, by its number, the variables of its own.
    """

    def __init__(
        self,
        what: str,
        args: tuple[Any, ...],
        environs: Mapping[int, Mapping[str, str]],
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._ranks: dict[int, _Rank] = {}
        for rank, environ in environs.items():
            answer, end = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(what, args, dict(environ), end))
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
        self._process = context.Process(target=_call, args=(_SERVE_STORE, (self._listener,)))
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


def _run(what: str, args: tuple[Any, ...], environ: dict[str, str], answer: Connection) -> None:
    # Were the fork server killed alone, nobody would know of this process any more.
    die_with_parent(signal.SIGINT)
    os.environ.update(environ)
    try:
        code = _call(what, args)
    except KeyboardInterrupt:  # before the rank has taken over the signals
        code = ExitCode.INTERRUPTED
    answer.send(int(code))


def _call(what: str, args: tuple[Any, ...]) -> int:
    """Import a function in the forked process, and call it."""
    module, _, name = what.partition(":")
    entry: Callable[..., int] = getattr(importlib.import_module(module), name)
    return entry(*args)
