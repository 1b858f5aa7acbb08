"""The agent of one node: applies the coordinator's commands, and exits when the connection is lost.

Also in this module: handling of signals to this process, and the log of this node.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from isles.agent.connection import Connection
from isles.agent.hang import new_hang_files
from isles.agent.protocol import log_line
from isles.agent.script.stacks import read_stacks
from isles.agent.server import LocalLink
from isles.agent.telemetry import Telemetry
from isles.agent.workers import WorkerGroup
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.stop import send_signal

_LOOK_S = 0.05
_HANGS_EVERY_S = 0.5
_LOG_EVERY_S = 0.5
_PRINTED_EVERY_S = 2


class Agent:
    """Agent of one node.

    Args:
        signals: signals to this process, which the agent forwards to the ranks on command.
        telemetry: samples this node; None: no samples.
        is_shared: whether the coordinator is known to see the same attempt folder.
    """

    def __init__(
        self,
        attempt: Attempt,
        connection: Connection | LocalLink,
        workers: WorkerGroup,
        signals: AgentSignals,
        telemetry: Telemetry | None,
        *,
        is_shared: bool,
    ) -> None:
        self._attempt = attempt
        self._connection = connection
        self._workers = workers
        self._signals = signals
        self._telemetry = telemetry
        self._is_shared = is_shared
        self._forwarded = 0
        self._hangs: dict[str, Any] = {}
        self._hangs_at = 0.0
        self._stacks: dict[str, Any] = {}

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
        now_s = time.monotonic()
        if not self._is_shared and now_s - self._hangs_at > _HANGS_EVERY_S:
            self._hangs_at, self._hangs = now_s, new_hang_files(self._attempt)
        more = {"hangs": self._hangs, "stacks": self._stacks, "stop": self._signals.received}
        more["printed"] = self._printed() if self._workers.is_script else 0
        more["telemetry"] = self._telemetry.last if self._telemetry is not None else {}
        self._connection.report(
            {**self._workers.report, **{key: value for key, value in more.items() if value}}
        )

    def _printed(self) -> int:
        # Increases when a local rank has printed, but not with every line.
        newest = 0.0
        for rank in self._signals.ranks:
            with suppress(OSError):
                newest = max(newest, self._attempt.rank_log(rank).stat().st_mtime)
        return int(newest) // _PRINTED_EVERY_S

    def _apply(self, command: dict[str, Any]) -> int | None:
        # Returns the exit code if the run is over.
        match command.get("phase"):
            case "run":
                self._run(command)
            case "halt" if self._workers.report["state"] != "idle":
                log_line("a rank failed; ending the ranks of this node", "agent")
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
            self._signals.expect(command["restart"], range(first, first + count))
            workers.begin(command)
        if command["stacks"] != self._stacks.get("number", 0):
            self._answer(command["stacks"])
        if command["signal"]:
            if command["signal"] != self._forwarded:
                self._forwarded = command["signal"]
                name = signal.Signals(self._forwarded).name
                log_line(f"asked to save and stop ({name})", "agent")
            self._signals.forward(self._forwarded)
        if command["handover"] and workers.hand_over():
            log_line("other nodes are waiting to join; the ranks save and restart", "agent")

    def _answer(self, question: int) -> None:
        # Answers with the stacks of the local scripts; 0: the coordinator needs no answer.
        self._stacks = {}
        if question:
            records = {r: read_record(self._attempt.rank_record(r)) for r in self._signals.ranks}
            scripts = {
                rank: (int(record["script_pid"]), int(record["stacks"]))
                for rank, record in records.items()
                if record is not None and record.get("restart") == self._workers.restart
            }
            self._stacks = {"number": question, "ranks": read_stacks(scripts)}


class AgentSignals:
    """The last signal to this process, and a way to forward signals to the ranks of this node."""

    def __init__(self, attempt: Attempt) -> None:
        self.received = 0
        """SIGINT, SIGTERM or SIGUSR1; SIGKILL: stop immediately; 0: no signal."""
        self.ranks: tuple[int, ...] = ()
        """The ranks of this node, running or ended."""
        self._attempt = attempt
        self._restart = 0
        self._waiting: set[int] = set()

    def install(self) -> None:
        """Install handlers. A signal is a request, which the coordinator forwards to all nodes.

        Main thread only. A second SIGINT stops immediately. SIGHUP is ignored.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def expect(self, restart: int, ranks: Iterable[int]) -> None:
        """Note the ranks that are being started; records from before this restart are not
        theirs."""
        self.ranks = tuple(ranks)
        self._restart = restart
        self._waiting = set(self.ranks)

    def forward(self, number: int) -> None:
        """Send this signal once to each rank; call it repeatedly, for ranks that are still
        starting.

        A rank writes its record when it can handle a signal.
        """
        for rank in sorted(self._waiting):
            record = read_record(self._attempt.rank_record(rank)) or {}
            process = ProcessId.from_record(record)
            if process is not None and record.get("restart") == self._restart:
                # These processes are the agent's own children, whatever owner the disk shows.
                send_signal(replace(process, is_own=True), signal.Signals(number))
                self._waiting.discard(rank)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = number == signal.SIGINT and self.received == signal.SIGINT
        self.received = int(signal.SIGKILL) if again else number


class NodeLog:
    """Log of one node: the lines of its agent and its ranks, copied continuously by a thread.

    RUN_DIR/logs/distributed_training/cluster_train_<time>_node<K>.log; latest_node<K>.log is a link
    to the newest.

    Args:
        agent_log: output of the node's agent.
    """

    def __init__(
        self, run_dir: RunDir, attempt: Attempt, node: int, signals: AgentSignals, agent_log: Path
    ) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._node = node
        self._signals = signals
        self._agent_log = agent_log
        self._offsets: dict[Path, int] = {}
        # Earlier attempts have separate logs.
        for path in (agent_log, *attempt.path.glob("rank-*.log")):
            with suppress(OSError):
                self._offsets[path] = path.stat().st_size
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._write, name="node-log", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=5)

    def _open(self) -> IO[bytes]:
        folder, link = self._run_dir.node_logs, self._run_dir.latest_node_log(self._node)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"cluster_train_{time.strftime('%Y%m%d_%H%M%S')}_node{self._node}.log"
        out = path.open("ab", buffering=0)
        staged = folder / f".{link.stem}.{os.getpid()}"
        staged.unlink(missing_ok=True)
        staged.symlink_to(path.name)
        staged.replace(link)
        return out

    def _write(self) -> None:
        is_over, ranks = False, dict[int, None]()
        try:
            with self._open() as out:
                while not is_over:
                    is_over = self._is_over.wait(_LOG_EVERY_S)
                    self._copy("agent", self._agent_log, out, is_last=is_over)
                    ranks |= dict.fromkeys(self._signals.ranks)
                    for rank in ranks:
                        path = self._attempt.rank_log(rank)
                        self._copy(f"rank {rank}", path, out, is_last=is_over)
        except OSError as error:
            # The same lines are in the logs of the agent and the ranks.
            sys.stderr.write(f"agent: cannot write the log of this node ({error})\n")

    def _copy(self, name: str, path: Path, out: IO[bytes], *, is_last: bool) -> None:
        # Lines since the last call; an incomplete line only if no more output will come.
        with suppress(FileNotFoundError), path.open("rb") as stream:
            stream.seek(self._offsets.get(path, 0))
            lines = stream.readlines()
            if lines and not lines[-1].endswith(b"\n") and not is_last:
                lines.pop()
            self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, lines))
            for line in lines:
                end = b"" if line.endswith(b"\n") else b"\n"
                out.write(f"[{name}] ".encode() + line + end)
