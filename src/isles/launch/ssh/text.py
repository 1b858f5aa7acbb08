"""What is said about a start over ssh: one line when it happens, all of it in a dry run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from isles.config.resolve import Resolved
from isles.config.show import show
from isles.run.nodes import Fleet, FleetNode


def fleet_text(name: str, fleet: Fleet, run_dir: str) -> str:
    """The line of a start: ranks, hosts, and where the run directory is."""
    kind = "GPU" if fleet.device == "cuda" else "CPU process"
    plural = ("" if fleet.world_size == 1 else "s") if kind == "GPU" else ""
    plural = "es" if kind != "GPU" and fleet.world_size != 1 else plural
    hosts = f"{len(fleet.nodes)} host{'' if len(fleet.nodes) == 1 else 's'}"
    places = ", ".join(_place(node) for node in fleet.nodes)
    return (
        f"starting {name}: {fleet.world_size} {kind}{plural} on {hosts} "
        f"({places}), in {fleet.head.ssh}:{run_dir}"
    )


def dry_run_text(
    resolved: Resolved,
    fleet: Fleet,
    begun: Mapping[str, Any],
    lines: Sequence[str],
    python: str,
    variables: Sequence[Mapping[str, str]],
) -> str:
    """Every resolved value, and the commands of each host.

    Args:
        resolved: the run.
        fleet: its nodes.
        begun: what the head said that `begin` would do.
        lines: bash that comes first on every host.
        python: Python there.
        variables: of the environment, of each node.
    """
    run_dir, attempt = begun["run_dir"], begun["attempt"]
    name = run_dir.rpartition("/")[2]
    parts = [
        show(resolved).rstrip(),
        begun["note"] or f"this would be a new run: {name}",
        fleet_text(name, fleet, run_dir).replace("starting", "this would start", 1),
        f"meeting at {fleet.head.address} port {fleet.port}",
        "on every host, in bash:\n" + "\n".join(f"    {line}" for line in lines),
    ]
    for node, added in zip(fleet.nodes, variables, strict=True):
        there = run_dir if node.node == 0 else str(begun["elsewhere"])
        words = ["-m", "isles.agent", there, "--attempt", str(attempt)]
        # The first one coordinates the run as well.
        words += ["--node", str(node.node)] if node.node else []
        env = ["env", *(f"{k}={v}" for k, v in added.items())] if added else []
        text = f"    {shlex.join([*env, python, *words])}"
        parts.append(f"then on {_place(node)}:\n{text}")
    return "\n\n".join(parts)


def _place(node: FleetNode) -> str:
    return f"{node.ssh}: {node.address}, {node.nproc} rank{'s' if node.nproc > 1 else ''}"
