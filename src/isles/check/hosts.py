"""The hosts of a check: all are asked at once, each with a deadline. Who fails is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import asdict
from typing import Any

from isles.check.finding import IDS, Finding
from isles.check.plan import Device, Extent, RunFacts, Say
from isles.errors import UserError
from isles.launch.ssh.channel import Channel
from isles.launch.ssh.hosts import Reach

Answers = dict[str, dict[str, Any]]
"""By the host's name."""

QUICK_S = 15.0
"""Longest wait for an answer that needs no work."""

_FIX = "`isles check` on that host itself may say more"


class Hosts:
    """The hosts that still answer, what they are, and what was found so far.

    Args:
        channels: to every host, in their order; the caller closes them.
        run: what is checked.
        extent: how much of it.
        say: takes a line about what is done now.
    """

    def __init__(
        self, channels: Sequence[Channel], run: RunFacts, extent: Extent, say: Say
    ) -> None:
        self.run, self.extent, self.say = run, extent, say
        self.findings: list[Finding] = []
        self.facts: Answers = {}
        self.nproc: dict[str, int] = {}
        self.device: Device = "cpu"
        self.reach: dict[str, Reach] = {}
        self._channels = list(channels)

    @property
    def names(self) -> list[str]:
        """Hosts that have answered all questions so far, in their order."""
        return [channel.name for channel in self._channels]

    def ask(
        self,
        op: str,
        args: Mapping[str, Any] | Callable[[str], Mapping[str, Any]] | None = None,
        *,
        timeout_s: float = QUICK_S,
        only: Sequence[str] | None = None,
        finding_id: str | None = None,
    ) -> Callable[[], Answers]:
        """Ask all hosts at once, and go on.

        Args:
            op: the operation, of `isles.check.node`.
            args: for all, or for each by its name.
            timeout_s: longest wait for an answer, from now.
            only: these hosts.
            finding_id: of the finding where the node refuses. None: it is named by what the node
                says, and the host is asked no more.

        Returns:
            Waits for all answers. Whoever is silent is asked no more, with a finding.
        """
        futures = {}
        for channel in self._channels:
            if only is None or channel.name in only:
                own = args(channel.name) if callable(args) else args or {}
                futures[channel.name] = channel.ask(op, **own)
        deadline = time.monotonic() + timeout_s

        def wait() -> Answers:
            found: Answers = {}
            for name, future in futures.items():
                try:
                    found[name] = future.result(timeout=max(0.0, deadline - time.monotonic()))
                except NoAnswer:
                    self._drop(name)
                    self.findings.append(_silent(name, op, timeout_s))
                except UserError as error:
                    if finding_id is None:
                        self._drop(name)
                    self.findings.append(fault_finding(name, error, finding_id))
            return found

        return wait

    def check(
        self, name: str, *, timeout_s: float | None = None, finding_id: str | None = None
    ) -> Callable[[], list[Finding]]:
        """Have every host run one of `isles.check.node.CHECKS`; see `ask`."""
        answers = self.ask(
            name,
            self.plan,
            timeout_s=self.extent.timeout_s if timeout_s is None else timeout_s,
            finding_id=finding_id,
        )
        return lambda: findings_of(answers())

    def plan(self, name: str) -> dict[str, Any]:
        """What a host is told, as the arguments of a question."""
        return {"plan": asdict(self.run.plan(name, self.nproc, self.device))}

    def _drop(self, name: str) -> None:
        self._channels = [channel for channel in self._channels if channel.name != name]


def findings_of(answers: Answers) -> list[Finding]:
    """What the hosts have found, in their order."""
    return [Finding(**own) for answer in answers.values() for own in answer["findings"]]


def fault_finding(name: str, error: UserError, finding_id: str | None = None) -> Finding:
    """The finding for an error of a host: its own id, where that is a finding's."""
    own = error.id if error.id in IDS else "ssh.connect"
    return Finding(finding_id or own, "error", name, error.what, fix=error.fix or _FIX)


def _silent(name: str, op: str, timeout_s: float) -> Finding:
    text = f"no answer to the question `{op}` in {timeout_s:.0f} s"
    fix = "look at that host: is it overloaded, is a disk or driver stuck (dmesg), or is the "
    fix += "connection cut?"
    measured = f"more than {timeout_s:.0f} s"
    return Finding("host.answers", "error", name, text, measured, fix=fix)
