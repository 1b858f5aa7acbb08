"""The hosts of a check: asked at once, each with a deadline. Who fails is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from typing import Any, Protocol

from isles.check.finding import Finding
from isles.errors import UserError

Answers = dict[str, dict[str, Any]]
"""By the host's name."""

_FIX = "`isles check` on that host itself may say more"
_SSH_SIGNS = (
    ("isles is not installed", "isles.installed"),
    ("does not know", "version.isles"),
    ("cannot be run there", "python.runs"),
    ("there is no folder", "files.workdir"),
    ("no answer to", "host.answers"),
)


class Place(Protocol):
    """One end of a conversation with a node: `isles.launch.ssh.channel.Channel`, or the like."""

    name: str

    def ask(self, op: str, **args: Any) -> Future[dict[str, Any]]:
        """Ask without waiting."""
        ...


@dataclass(slots=True)
class Panel:
    """The hosts that still answer, and what was found so far.

    Args:
        places: every host.
        findings: all that was found; the check adds to it.
    """

    places: list[Place]
    findings: list[Finding]

    @property
    def names(self) -> list[str]:
        """Hosts that have answered all questions so far, in their order."""
        return [place.name for place in self.places]

    def ask(
        self,
        op: str,
        args: Callable[[str], Mapping[str, Any]] | None = None,
        *,
        timeout_s: float,
        only: Sequence[str] | None = None,
    ) -> Asked:
        """Ask all hosts at once, and go on.

        Args:
            op: the operation.
            args: for each host.
            timeout_s: longest wait for an answer, from now.
            only: these hosts.
        """
        asked = {
            place.name: place.ask(op, **(args(place.name) if args is not None else {}))
            for place in self.places
            if only is None or place.name in only
        }
        return Asked(self, op, asked, time.monotonic() + timeout_s, timeout_s)

    def drop(self, name: str, finding: Finding) -> None:
        """This host answers no more."""
        self.findings.append(finding)
        self.places = [place for place in self.places if place.name != name]


@dataclass(frozen=True, slots=True)
class Asked:
    """A question on its way.

    Args:
        panel: whom it was asked.
        op: the operation.
        futures: by host.
        deadline: by the monotonic clock.
        timeout_s: as it was when it was asked, for messages.
    """

    panel: Panel
    op: str
    futures: dict[str, Future[dict[str, Any]]]
    deadline: float
    timeout_s: float

    def answers(self, finding_id: str | None = None) -> Answers:
        """Wait for all; whoever does not answer is dropped from the panel, with a finding.

        Args:
            finding_id: of the finding where the node refuses; None: by what it says.
        """
        found: Answers = {}
        for name, future in self.futures.items():
            try:
                found[name] = future.result(timeout=max(0.0, self.deadline - time.monotonic()))
            except NoAnswer:
                self.panel.drop(name, _silent(name, self.op, self.timeout_s))
            except UserError as error:
                finding = fault_finding(name, error, finding_id)
                if finding_id is None:
                    self.panel.drop(name, finding)
                else:
                    self.panel.findings.append(finding)
        return found


def fault_finding(name: str, error: UserError, finding_id: str | None = None) -> Finding:
    """The finding for an error of a host: what it is called by what it says."""
    sign = next((id_ for sign, id_ in _SSH_SIGNS if sign in error.what), "ssh.connect")
    return Finding(finding_id or sign, "error", name, error.what, fix=error.fix or _FIX)


def _silent(name: str, op: str, timeout_s: float) -> Finding:
    return Finding(
        "host.answers",
        "error",
        name,
        f"no answer to the question `{op}` in {timeout_s:.0f} s",
        measured=f"more than {timeout_s:.0f} s",
        fix="look at that host: is it overloaded, is a disk or driver stuck (dmesg), or is the "
        "connection cut?",
    )
