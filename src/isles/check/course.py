"""One check on its way: what is known so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from isles.check.panel import Answers, Panel
from isles.check.subject import Subject
from isles.launch.ssh.addresses import Reach

Say = Callable[[str], object]

QUICK_S = 15.0
"""Longest wait for an answer that needs no work."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is checked.

    Args:
        net: the links between hosts, and the all-reduce.
        smoke: train a small model on each machine.
        timeout_s: longest wait for one answer.
        contact_s: longest wait for the first.
        compare_here: whether isles must be the same as on this machine.
    """

    net: bool = True
    smoke: bool = False
    timeout_s: float = 60.0
    contact_s: float = 40.0
    compare_here: bool = True


@dataclass(slots=True)
class Course:
    """One check on its way.

    Args:
        subject: what is checked.
        panel: the hosts that still answer, and what was found.
        extent: how much is checked.
        say: takes a line about what is done now.
        facts, machines: what the hosts have said.
        nproc: ranks of each that take part.
        device: what they compute on.
        reach: the address of each that the others use.
    """

    subject: Subject
    panel: Panel
    extent: Extent
    say: Say
    facts: Answers = field(default_factory=dict)
    machines: Answers = field(default_factory=dict)
    nproc: dict[str, int] = field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"
    reach: dict[str, Reach] = field(default_factory=dict)
