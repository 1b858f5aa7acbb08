"""The job scripts of OpenPBS and Torque: one that isles follows, one that runs without it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from isles import __version__
from isles.config.sections.cluster import ClusterConfig, PbsLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode
from isles.launch.queue.pbs import Dialect
from isles.launch.queue.script import cpus_of, request_lines
from isles.launch.render import MOST_TIMES, node_lines, runs_pattern
from isles.launch.script_template import fill_template
from isles.launch.ssh.environment import python_of, quoted

_END_S = 45
"""How long a node may take to end its ranks: torchrun gives them 30 s."""


@dataclass(frozen=True, slots=True)
class InRunDir:
    """A run directory in which isles follows the run of a script.

    Args:
        path: the run directory, absolute.
        attempt: the number of this start.
        only_check_s: the job only looks at its nodes, and waits so long for one answer.
    """

    path: str
    attempt: int
    only_check_s: float | None = None


def pbs_job_script(
    config: RunConfig,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    place: InRunDir,
    *,
    workdir: str,
    num_ranks: int,
    device: str,
) -> str:
    """The script of a run that isles follows: what the agents run in, and the coordinator.

    The coordinator starts the same script on each node, with the agent's arguments: a task of
    pbsdsh begins in $HOME, with a bare environment.

    Args:
        config: the run file.
        launcher: its launcher.
        dialect: openpbs or torque.
        place: where the run is.
        workdir: the folder in which the ranks run, absolute.
        num_ranks: ranks on each node.
        device: cpu or cuda.
    """
    cluster = config.clusters[0]
    folder = f"{place.path}/attempts/{place.attempt:03d}"
    setting = node_lines(cluster, workdir, nodes=cluster.max_nodes, device=device)
    if "OMP_NUM_THREADS" not in cluster.environment.variables:
        threads = max(1, cpus_of(launcher, num_ranks) // num_ranks)
        setting.append(f"export OMP_NUM_THREADS={threads} # of a rank; PBS has set all cores")
    only_s = place.only_check_s
    return fill_template(
        "job.sh.jinja",
        shebang="#!/bin/bash",
        title=f"{config.name}: {cluster.max_nodes} x {num_ranks} ranks",
        head=[f"written by isles {__version__} for start {place.attempt} of {place.path}"],
        sign="#PBS",
        options=request_lines(
            cluster,
            launcher,
            dialect,
            name=config.name,
            num_ranks=num_ranks,
            device=device,
            output=f"{folder}/pbs.out",
        ),
        setting=setting,
        log=f"{folder}/pbs.log",
        python=quoted(python_of(cluster.environment)),
        run_dir=place.path,
        attempt=place.attempt,
        more=f" --only-check {only_s:.0f}" if only_s is not None else "",
    )


def pbs_script(
    config: RunConfig,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    command: list[str],
    path: str | None,
    *,
    workdir: str,
    num_ranks: int,
    device: str,
    notes: tuple[str, ...] = (),
) -> str:
    """A script that runs without isles' control wing: torchrun on each node.

    Args:
        config: the run file.
        launcher: its launcher, or one like it.
        dialect: openpbs or torque.
        command: what follows torchrun's own options.
        path: where the script will be, absolute; None: not known.
        workdir: the folder in which the ranks run, absolute.
        num_ranks: ranks on each node.
        device: cpu or cuda.
        notes: what its reader should know, one line each.
    """
    cluster = config.clusters[0]
    requests = request_lines(
        cluster,
        launcher,
        dialect,
        name=config.name,
        num_ranks=num_ranks,
        device=device,
        output=None,
    )
    timed = launcher.time is not None
    save_after = int(launcher.time - launcher.save_before) if launcher.time is not None else None
    bin_path = launcher.bin_path.rstrip("/") + "/" if launcher.bin_path else ""
    pbsdsh = [f"{bin_path}pbsdsh"] + ["-u"] * (dialect == "torque")
    return fill_template(
        "pbs.sh.jinja",
        title=f"{config.name}: {cluster.max_nodes} x {num_ranks} ranks under torchrun",
        head=_head(path, launcher, timed=timed, notes=notes),
        requests=requests,
        **_node_values(config.clusters[0], launcher, workdir, num_ranks, device),
        name=config.name,
        path=path,
        command=shlex.join(command),
        pbsdsh=pbsdsh,
        qsub=f"{bin_path}qsub",
        save_after=save_after,
        requeue=launcher.requeue,
        runs=runs_pattern(config, workdir),
        most_times=MOST_TIMES,
    )


def _node_values(
    cluster: ClusterConfig, launcher: PbsLauncherConfig, workdir: str, num_ranks: int, device: str
) -> dict[str, object]:
    """What the template says of the nodes."""
    threads = max(1, cpus_of(launcher, num_ranks) // num_ranks)
    return {
        "setting": node_lines(cluster, workdir, nodes=cluster.max_nodes, device=device),
        "nodes": cluster.max_nodes,
        "nproc": num_ranks,
        "interface": cluster.network.interface,
        "port": cluster.network.port,
        "start_timeout": int(cluster.start_timeout),
        "end_s": _END_S,
        "lost": int(ExitCode.COMMUNICATION),
        "threads": None if "OMP_NUM_THREADS" in cluster.environment.variables else threads,
    }


def _head(
    path: str | None, launcher: PbsLauncherConfig, *, timed: bool, notes: tuple[str, ...]
) -> list[str]:
    lines = [f"written by isles {__version__}; it does not need the command isles to run", *notes]
    if timed and launcher.requeue and path is None:
        lines.append("submit it again to go on after its time limit; written by --output it does")
        lines.append("that by itself")
    return lines
