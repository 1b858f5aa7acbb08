"""Holds a run of several nodes together: `python -m isles.train.supervisor RUN_DIR …`.

It is the process that `isles status` and `isles stop` know. It keeps the store through which the
nodes meet, so that no node is the one that must not die; starts their agents on this machine;
hands signals to them; and ends when they have ended. Were it killed, the agents would end too.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from isles.errors import ExitCode
from isles.rundir.nodes import Meeting, living_nodes, node_process, start_node
from isles.rundir.paths import Attempt, RunDir
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record
from isles.rundir.signals import kill_now, send_signal

_LOOK_S = 0.1
_CLOSING_S = 60.0
"""How long agents may take to end once the run has its outcome."""


def main() -> int:
    """Supervise a run to its end; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m isles.train.supervisor")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--nodes", required=True, help="MIN:MAX")
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume-from", type=Path)
    options = parser.parse_args()
    run_dir = RunDir(options.run_dir.absolute())
    attempt = run_dir.attempt(options.attempt)
    least, _, most = options.nodes.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = Meeting(
        address="127.0.0.1",
        port=int(listener.getsockname()[1]),
        min_nodes=int(least),
        max_nodes=int(most),
        nproc_per_node=options.nproc_per_node,
        device=options.device,
        resume_from=str(options.resume_from) if options.resume_from else None,
        supervisor=ProcessId.of(os.getpid()).record(),
    )
    return Supervisor(run_dir, attempt, meeting).run(listener)


class Supervisor:
    """One run's store, agents and signals."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, meeting: Meeting) -> None:
        self._run_dir = run_dir
        self._attempt = attempt
        self._meeting = meeting
        self._children: list[subprocess.Popen[bytes]] = []
        self._signal = 0
        self._told: set[ProcessId] = set()

    def run(self, listener: socket.socket) -> int:
        """Start the nodes, and wait for their end; returns the run's exit code."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._handle)
        self._meeting.write(self._attempt)
        for node in range(self._meeting.max_nodes):
            self._children.append(start_node(self._run_dir, self._attempt, node))
        # The agents knock already: what they say waits until the store is there.
        store = _serve(listener)
        self._wait()
        del store
        outcome = read_record(self._attempt.outcome) or {}
        return int(outcome.get("exit_code", ExitCode.TRAINING))

    def _wait(self) -> None:
        over_since: float | None = None
        while True:
            for child in self._children:
                child.poll()
            living = self._living()
            for process in living:
                self._hand_on(process)
            starting = any(child.returncode is None for child in self._children)
            if not living and not starting:
                break
            if self._attempt.outcome.exists():
                over_since = over_since or time.monotonic()
                if time.monotonic() - over_since > _CLOSING_S:
                    self._kill(living)
                    break
            time.sleep(_LOOK_S)
        self._conclude()

    def _living(self) -> list[ProcessId]:
        nodes = living_nodes(self._attempt, self._meeting.max_nodes)
        return [process for node in nodes if (process := node_process(self._attempt, node))]

    def _hand_on(self, process: ProcessId) -> None:
        """An agent writes its record once it can take a signal; each is told once."""
        if self._signal and process not in self._told:
            self._told.add(process)
            send_signal(process, signal.Signals(self._signal))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number

    def _kill(self, living: list[ProcessId]) -> None:
        for process in living:
            sys.stderr.write(f"supervisor: agent {process.pid} has not ended; it is killed\n")
            kill_now(process)

    def _conclude(self) -> None:
        """All agents are gone; if none has said how the run ended, this is how."""
        if self._attempt.outcome.exists():
            return
        from isles.train.verdict import trouble, write_failure

        ended = [f"node {n} ended with {c.returncode}" for n, c in enumerate(self._children)]
        culprit = trouble(
            f"all {self._meeting.max_nodes} nodes of this run are gone: {', '.join(ended)}",
            f"their last words are in {self._attempt.path}/node-*.log",
            ExitCode.TRAINING,
        )
        write_failure(self._attempt, culprit)


def _serve(listener: socket.socket) -> Any:
    """The store through which the nodes meet, on a socket of this machine only."""
    import torch.distributed  # noqa: F401  # the library that the next line is a part of
    from torch._C._distributed_c10d import TCPStore

    # torch would listen on every interface; a socket that is bound already it takes as it is.
    return TCPStore(
        "127.0.0.1",
        int(listener.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )


if __name__ == "__main__":
    sys.exit(main())
