"""Nodes of a queue, whatever scheduler names them: how many can be had, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isles.check.finding import Finding, Level

_NAMED = 6


@dataclass(frozen=True, slots=True)
class QueueNode:
    """One node, as its scheduler tells it.

    Args:
        name: of the node.
        state: the scheduler's word.
        is_up: whether it can have jobs, now or later.
        reason: why not.
        gpus: that it has; None: not said.
    """

    name: str
    state: str
    is_up: bool
    reason: str = ""
    gpus: int | None = None


def judge_nodes(
    where: str, what: str, nodes: Sequence[QueueNode], wanted: int, mend: str
) -> Finding:
    """Whether as many nodes are up as a run needs.

    Args:
        where: the machine that was asked.
        what: the partition or queue, in words.
        nodes: all of it.
        wanted: nodes of the run.
        mend: what an administrator types for nodes that are out, with {nodes}.
    """
    bad = [node for node in nodes if not node.is_up]
    num_up = len(nodes) - len(bad)
    level: Level = "ok" if not bad else "warning" if num_up >= wanted else "error"
    if num_up < wanted:
        level = "error"
    named = ", ".join(
        f"{node.name} is {node.state}" + (f" ({node.reason})" if node.reason else "")
        for node in bad[:_NAMED]
    )
    more = f", and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    text = f"{num_up} of {len(nodes)} nodes of {what} can be had" + (
        f", and the run needs {wanted}" if level == "error" else ""
    )
    return Finding(
        "queue.nodes",
        level,
        where,
        text + (f": {named}{more}" if bad else ""),
        measured=f"{num_up} up",
        limit=str(wanted),
        fix=""
        if level == "ok"
        else "if they should be up, ask the administrator: "
        + mend.format(nodes=",".join(node.name for node in bad[:_NAMED]))
        if bad
        else "use fewer nodes, or another partition",
    )


def judge_gres(
    where: str, what: str, nodes: Sequence[QueueNode], wanted_nodes: int, gpus: int
) -> Finding:
    """Whether enough nodes that are up have as many GPUs as a run wants of each."""
    up = [node for node in nodes if node.is_up]
    fit = [node for node in up if (node.gpus or 0) >= gpus]
    most = max((node.gpus or 0 for node in up), default=0)
    if len(fit) >= wanted_nodes:
        text = f"{len(fit)} nodes of {what} have {gpus} GPUs or more"
        return Finding("queue.gres", "ok", where, text, str(most), str(gpus))
    return Finding(
        "queue.gres",
        "error",
        where,
        f"{len(fit)} nodes of {what} have the {gpus} GPUs that the run wants of each of its "
        f"{wanted_nodes} nodes; the most that one has is {most}",
        measured=str(most),
        limit=str(gpus),
        fix=f"use gpus_per_node: {most} and more nodes, or another partition"
        if most
        else "name a partition that has GPUs; or train on CPUs: clusters[0].device: cpu",
    )


def judge_time(where: str, what: str, wanted_s: float | None, most_s: float | None) -> Finding:
    """Whether the time limit of the job is allowed."""
    from isles.facts.units import format_duration

    most = format_duration(most_s) if most_s is not None else "no limit"
    if wanted_s is None:
        text = f"no time is asked for; {what} allows {most}"
        return Finding("queue.time", "ok", where, text, "default", most)
    if most_s is None or wanted_s <= most_s:
        asked = format_duration(wanted_s)
        return Finding("queue.time", "ok", where, f"{asked} of {most}", asked, most)
    return Finding(
        "queue.time",
        "error",
        where,
        f"the run asks for {format_duration(wanted_s)}, and {what} allows {most}",
        measured=format_duration(wanted_s),
        limit=most,
        fix=f"set clusters[0].launcher.time to {most.replace(' ', '')} or less; with requeue the "
        "run goes on in the next job",
    )
