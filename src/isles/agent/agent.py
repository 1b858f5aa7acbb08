"""The agent of one node: applies the commands of the coordinator, and ends when it is cut off.

Beside it: the signals to this process, and the log of this node.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Any

from isles.agent.connection import Connection
from isles.agent.hang import HangReports
from isles.agent.protocol import log_line
from isles.agent.server import LocalLink
from isles.agent.workers import WorkerGroup
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.stop import send_signal

_LOOK_S = 0.05
_LOG_EVERY_S = 0.5


class Agent:
    """One node of a run.

    Args:
        connection: to the coordinator.
        workers: the ranks of this node.
        signals: to this process, which it forwards to the ranks on command.
        hangs: stacks of the ranks here, for the coordinator.
    """

    def __init__(
        self,
        connection: Connection | LocalLink,
        workers: WorkerGroup,
        signals: Signals,
        hangs: HangReports,
    ) -> None:
        self._connection = connection
        self._workers = workers
        self._signals = signals
        self._hangs = hangs
        self._forwarded = 0

    def run(self) -> int:
        """Run until the run is over; returns its exit code."""
        connection = self._connection
        while True:
            self._report()
            match connection.state:
                case "refused":
                    self._workers.end(at_once=True)
                    assert connection.failure is not None
                    raise connection.failure
                case "cut off":
                    log_line(f"{connection.why}; ending the ranks of this node", "agent")
                    self._workers.end(at_once=True)
                    self._report()
                    if not connection.may_return or self._signals.received:
                        connection.leave()
                        return int(ExitCode.COMMUNICATION)
                    connection.reconnect()
                case "seeking" if self._signals.received:
                    is_interrupt = self._signals.received == signal.SIGINT
                    return int(ExitCode.INTERRUPTED if is_interrupt else ExitCode.REQUEUE)
                case "connected":
                    code = self._apply(connection.command)
                    if code is not None:
                        return code
            time.sleep(_LOOK_S)

    def _report(self) -> None:
        self._workers.look()
        stop = {"stop": self._signals.received} if self._signals.received else {}
        hangs = self._hangs.report(self._signals.ranks)
        self._connection.report({**self._workers.report, **hangs, **stop})

    def _apply(self, command: dict[str, Any]) -> int | None:
        # Returns the exit code where the run is over.
        match command.get("phase"):
            case "run":
                self._run(command)
            case "halt" if self._workers.report["state"] != "idle":
                log_line("a rank was lost: the ranks of this node end with it", "agent")
                self._workers.end(at_once=False)
            case "over":
                self._workers.end(at_once=bool(command["now"]))
                self._report()
                code, reason = int(command["exit_code"]), command["reason"]
                log_line(
                    f"the run has ended with {code}" + (f": {reason}" if reason else ""), "agent"
                )
                self._connection.leave()
                return code
        return None

    def _run(self, command: dict[str, Any]) -> None:
        workers = self._workers
        if command["restart"] > workers.restart:
            if workers.report["state"] == "failed" or workers.is_running:
                workers.end(at_once=True)
            first, count = command["ranks"]
            ranks = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
            restart = f"restart {command['restart']}"
            log_line(f"starting {ranks} of {command['world_size']}, {restart}", "agent")
            self._hangs.is_script = bool(command["script"])
            self._signals.expect(command["restart"], range(first, first + count))
            workers.begin(command)
        if command.get("stacks"):
            self._hangs.ask(command["stacks"])
        if command["signal"] and command["signal"] != self._forwarded:
            self._forwarded = command["signal"]
            name = signal.Signals(self._forwarded).name
            log_line(f"asked to save and stop ({name})", "agent")
            self._signals.forward(self._forwarded)
        if command["handover"] and workers.hand_over():
            log_line("other nodes are waiting to join: the ranks save and meet again", "agent")


class Signals:
    """The last signal to this agent; and the way to forward one to its ranks."""

    def __init__(self, attempt: Attempt) -> None:
        self.received = 0
        """SIGINT, SIGTERM or SIGUSR1; SIGKILL: stop at once. 0: none."""
        self.ranks: tuple[int, ...] = ()
        """The ranks of this node now, or those that it had last."""
        self._attempt = attempt
        self._restart = 0
        self._waiting: set[int] = set()
        self._forwarded = 0

    def install(self) -> None:
        """Take over the signals: each is a request, which the coordinator brings to all nodes.

        Main thread only. The second SIGINT means at once. The end of a terminal means nothing.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def expect(self, restart: int, ranks: Iterable[int]) -> None:
        """These ranks are being started; records from before this restart are not theirs."""
        # The set last: the thread below looks at the records only for what it holds.
        self.ranks = tuple(ranks)
        self._waiting = set()
        self._restart = restart
        self._waiting = set(self.ranks)

    def forward(self, number: int) -> None:
        """Send this signal to every rank, also to one that is still starting."""
        is_first = self._forwarded == 0
        self._forwarded = number
        if is_first:
            threading.Thread(target=self._forward, daemon=True).start()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.received == signal.SIGINT
        self.received = int(signal.SIGKILL) if again else number

    def _forward(self) -> None:
        # A rank writes its record once it can take a signal; until then the signal waits here.
        while True:
            waiting, restart = self._waiting, self._restart
            for rank in sorted(waiting):
                record = read_record(self._attempt.rank_record(rank)) or {}
                process = ProcessId.from_record(record)
                if process is not None and record.get("restart") == restart:
                    send_signal(process, signal.Signals(self._forwarded))
                    waiting.discard(rank)
            time.sleep(_LOOK_S)


class NodeLog:
    """One log of a node: the lines of its agent and its ranks, copied by a thread as they come.

    RUN_DIR/logs/distributed_training/cluster_train_<time>_node<K>.log; latest_node<K>.log is a link
    to the newest.

    Args:
        run_dir, attempt: the run.
        node: this node's number.
        signals: names the ranks of this node.
        agent_log: output of the node's agent.
    """

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, node: int, signals: Signals, agent_log: Path
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._node = node
        self._signals = signals
        self._sources = {"agent": agent_log}
        self._offsets: dict[Path, int] = {}
        # What earlier starts have printed is in their own log.
        for path in (agent_log, *attempt.path.glob("rank-*.log")):
            with suppress(OSError):
                self._offsets[path] = path.stat().st_size
        self._rest: dict[Path, bytes] = {}
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        try:
            out = self._open().open("ab", buffering=0)
        except OSError as error:
            # The same lines are in the logs of the agent and the ranks.
            sys.stderr.write(f"agent: this node has no log of its own: {error}\n")
            return
        self._thread = threading.Thread(
            target=self._write, args=(out,), name="node-log", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _open(self) -> Path:
        folder, link = self._run_dir.node_logs, self._run_dir.latest_node_log(self._node)
        folder.parent.mkdir(exist_ok=True)
        folder.mkdir(exist_ok=True)
        path = folder / f"cluster_train_{time.strftime('%Y%m%d_%H%M%S')}_node{self._node}.log"
        path.touch()
        staged = folder / f".{link.stem}.{os.getpid()}"
        staged.unlink(missing_ok=True)
        staged.symlink_to(path.name)
        staged.replace(link)
        return path

    def _write(self, out: IO[bytes]) -> None:
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(_LOG_EVERY_S)
            for rank in self._signals.ranks:
                self._sources.setdefault(f"rank {rank}", self._attempt.rank_log(rank))
            try:
                for name, path in self._sources.items():
                    out.write(self._new_lines(name, path, is_last=is_over))
            except OSError:
                return  # a full disk: the lines are where they came from
        out.close()

    def _new_lines(self, name: str, path: Path, *, is_last: bool) -> bytes:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read()
        except FileNotFoundError:
            return b""
        self._offsets[path] = offset + len(data)
        *lines, rest = (self._rest.pop(path, b"") + data).split(b"\n")
        if rest and is_last:
            lines.append(rest)
        elif rest:
            self._rest[path] = rest
        prefix = f"[{name}] ".encode()
        return b"".join(prefix + line + b"\n" for line in lines)
