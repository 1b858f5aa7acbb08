"""What a job asks OpenPBS or Torque for: the `#PBS` lines of its script."""

from __future__ import annotations

import re
import shlex

from isles.config.sections.cluster import ClusterConfig, PbsLauncherConfig
from isles.errors import ConfigError
from isles.launch.queue.pbs import Dialect

_TORQUE_NAME = 15
"""The longest name of a job that every Torque takes."""


def request_lines(
    cluster: ClusterConfig,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    *,
    name: str,
    num_ranks: int,
    device: str,
    output: str | None,
) -> list[str]:
    """The options of qsub, one line each, as they stand behind `#PBS`.

    Args:
        cluster: the run file's section.
        launcher: its launcher.
        dialect: openpbs or torque.
        name: of the run.
        num_ranks: ranks on each node.
        device: cpu or cuda.
        output: where PBS puts what the script prints; None: where it likes.

    Raises:
        ConfigError: a memory size that cannot be multiplied, for Torque; an output that PBS would
            take for that of another host.
    """
    lines = [f"-N {name[:_TORQUE_NAME] if dialect == 'torque' else name}"]
    lines += [
        f"-l {request}" for request in _resources(cluster, launcher, dialect, num_ranks, device)
    ]
    if launcher.time is not None:
        lines.append(f"-l walltime={clock(launcher.time)}")
    if launcher.queue is not None:
        lines.append(f"-q {shlex.quote(launcher.queue)}")
    if launcher.account is not None:
        lines.append(f"-A {shlex.quote(launcher.account)}")
    lines.append(f"-r {'y' if launcher.requeue else 'n'}")
    lines.append("-j oe")
    if output is not None and ":" in output:
        raise ConfigError(
            f"PBS takes what stands before the colon for a host: {output}",
            where="output_dir",
            fix="set output_dir to a folder without a colon",
        )
    if output is not None:
        lines.append(f"-o {shlex.quote(output)}")
    return [*lines, *launcher.extra]


def clock(seconds: float) -> str:
    """A length of time as PBS writes it."""
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def cpus_of(launcher: PbsLauncherConfig, num_ranks: int) -> int:
    """CPU cores of each node: one for each rank where the run file does not say."""
    return launcher.cpus_per_node or num_ranks


def _resources(
    cluster: ClusterConfig,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    num_ranks: int,
    device: str,
) -> list[str]:
    """What stands behind -l, but for the time."""
    if launcher.resources is not None:
        return [launcher.resources]
    nodes, cpus = cluster.max_nodes, cpus_of(launcher, num_ranks)
    gpus = num_ranks if device == "cuda" else 0
    if dialect == "torque":
        request = f"nodes={nodes}:ppn={cpus}" + (f":gpus={gpus}" if gpus else "")
        if launcher.memory_per_node is None:
            return [request]
        return [request, f"mem={_times(launcher.memory_per_node, nodes)}"]
    request = f"select={nodes}:ncpus={cpus}" + (f":ngpus={gpus}" if gpus else "")
    if launcher.memory_per_node is not None:
        request += f":mem={launcher.memory_per_node}"
    # One line of the node file for each node, and each node another host.
    return [f"{request}:mpiprocs=1", "place=scatter"]


def _times(memory: str, nodes: int) -> str:
    """Torque's mem is that of the whole job."""
    found = re.fullmatch(r"(\d+)([kmgtKMGT]?[bBwW]?)", memory)
    if found is None:
        raise ConfigError(
            f"memory_per_node {memory} is no size of Torque",
            where="clusters.0.launcher.memory_per_node",
            fix="write a whole number and kb, mb, gb or tb, such as 200gb",
        )
    return f"{int(found[1]) * nodes}{found[2]}"
