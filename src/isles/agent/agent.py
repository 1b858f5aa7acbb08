"""The agent of one node of several: does what the supervisor says, and ends when it is cut off."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isles.errors import ExitCode
from isles.agent.connection import Contact, say
from isles.agent.hang import StallsHere
from isles.agent.relay import SignalRelay
from isles.agent.workers import Part, WorkerGroup

_LOOK_S = 0.05


@dataclass(slots=True)
class Member:
    """One node's part in a run.

    Args:
        contact: the line to the supervisor.
        worker_group: the ranks of this node.
        relay: signals that have come, and the way to hand one to the ranks.
        stalls: stacks of the ranks here, for the head.
    """

    contact: Contact
    worker_group: WorkerGroup
    relay: SignalRelay
    stalls: StallsHere
    signalled: int = 0

    def run(self) -> int:
        """Until the run is over; returns its exit code."""
        while True:
            self._report()
            match self.contact.state:
                case "refused":
                    self.worker_group.end(at_once=True)
                    assert self.contact.fault is not None
                    raise self.contact.fault
                case "cut off":
                    self._cut_off()
                    if not self.contact.may_return or self.relay.stop_signal:
                        self.contact.leave()
                        return int(ExitCode.COMMUNICATION)
                    self.contact.come_anew()
                case "seeking" if self.relay.stop_signal:
                    return int(self.relay.stop_code)
                case "there":
                    code = self._obey(self.contact.order)
                    if code is not None:
                        return code
            time.sleep(_LOOK_S)

    def _report(self) -> None:
        self.worker_group.look()
        report = {**self.worker_group.report, **self.stalls.report(self.relay.ranks)}
        stop = {"stop": self.relay.stop_signal} if self.relay.stop_signal else {}
        self.contact.report({**report, **stop})

    def _obey(self, order: dict[str, Any]) -> int | None:
        """Do what the supervisor says; the exit code where the run is over."""
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
            part = _part(order)
            self.stalls.is_script = part.is_script
            self.worker_group.begin(part)
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
        self.contact.leave()
        return code

    def _cut_off(self) -> None:
        say(f"{self.contact.why}; ending the ranks of this node")
        self.worker_group.end(at_once=True)
        self._report()


def _part(order: dict[str, Any]) -> Part:
    asked = order["resume_from"]
    host, port = order["store"]
    return Part(
        restart=order["restart"],
        first=order["ranks"][0],
        world_size=order["world_size"],
        group=(order["group"][0], order["group"][1]),
        master=(order["master"][0], order["master"][1]),
        store=None,
        meeting=(str(host), int(port)),
        resume_from=Path(asked) if asked else None,
        is_script=bool(order["script"]),
    )
