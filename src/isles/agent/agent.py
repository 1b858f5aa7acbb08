"""The agent of one node: does what the coordinator orders, and ends when it is cut off."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from typing import Any

from isles.agent.connection import Connection, OwnConnection, say
from isles.agent.hang import StallsHere
from isles.agent.relay import SignalRelay
from isles.agent.workers import WorkerGroup
from isles.errors import ExitCode

_LOOK_S = 0.05


@dataclass(slots=True)
class Agent:
    """One node's part in a run.

    Args:
        connection: to the coordinator.
        worker_group: the ranks of this node.
        relay: signals that have come, and the way to hand one to the ranks.
        stalls: stacks of the ranks here, for the coordinator.
    """

    connection: Connection | OwnConnection
    worker_group: WorkerGroup
    relay: SignalRelay
    stalls: StallsHere
    signalled: int = 0

    def run(self) -> int:
        """Until the run is over; returns its exit code."""
        while True:
            self._report()
            match self.connection.state:
                case "refused":
                    self.worker_group.end(at_once=True)
                    assert self.connection.fault is not None
                    raise self.connection.fault
                case "cut off":
                    self._cut_off()
                    if not self.connection.may_return or self.relay.stop_signal:
                        self.connection.leave()
                        return int(ExitCode.COMMUNICATION)
                    self.connection.come_anew()
                case "seeking" if self.relay.stop_signal:
                    return int(self.relay.stop_code)
                case "there":
                    code = self._apply(self.connection.order)
                    if code is not None:
                        return code
            time.sleep(_LOOK_S)

    def _report(self) -> None:
        self.worker_group.look()
        report = {**self.worker_group.report, **self.stalls.report(self.relay.ranks)}
        stop = {"stop": self.relay.stop_signal} if self.relay.stop_signal else {}
        self.connection.report({**report, **stop})

    def _apply(self, order: dict[str, Any]) -> int | None:
        """Carry out an order; the exit code where the run is over."""
        match order.get("phase"):
            case "run":
                self._run(order)
            case "halt" if self.worker_group.report["state"] != "idle":
                say("a rank was lost: the ranks of this node end with it")
                self.worker_group.end(at_once=False)
            case "over":
                return self._close(order)
        return None

    def _run(self, order: dict[str, Any]) -> None:
        if order["restart"] > self.worker_group.restart:
            if self.worker_group.report["state"] == "failed" or self.worker_group.is_running:
                self.worker_group.end(at_once=True)
            first, count = order["ranks"]
            ranks = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
            say(f"starting {ranks} of {order['world_size']}, restart {order['restart']}")
            self.stalls.is_script = bool(order["script"])
            self.worker_group.begin(order)
        if order.get("stacks"):
            self.stalls.ask(order["stacks"])
        if order["signal"] and order["signal"] != self.signalled:
            self.signalled = order["signal"]
            say(f"asked to save and stop ({signal.Signals(self.signalled).name})")
            self.relay.hand_on(self.signalled)
        if order["handover"] and self.worker_group.hand_over():
            say("other nodes are waiting to join: the ranks save and meet again")

    def _close(self, order: dict[str, Any]) -> int:
        self.worker_group.end(at_once=bool(order["now"]))
        self._report()
        code = int(order["exit_code"])
        say(f"the run has ended with {code}" + (f": {order['reason']}" if order["reason"] else ""))
        self.connection.leave()
        return code

    def _cut_off(self) -> None:
        say(f"{self.connection.why}; ending the ranks of this node")
        self.worker_group.end(at_once=True)
        self._report()
