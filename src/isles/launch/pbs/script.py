"""The job script of OpenPBS and Torque: one task a node, torchrun inside."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from isles import __version__
from isles.config.sections.cluster import ClusterConfig, PbsLauncherConfig
from isles.config.sections.run import RunConfig
from isles.errors import ExitCode
from isles.launch.pbs.job import Dialect
from isles.launch.pbs.request import cpus_of, request_lines
from isles.launch.rank_command import rank_command
from isles.launch.script_template import fill_template
from isles.launch.ssh.setting import python_of
from isles.launch.torchrun import MOST_TIMES, node_lines, runs_pattern

_END_S = 45
"""How long a node may take to end its ranks: torchrun gives them 30 s."""

_SUBMIT_S = 60
"""Longest wait for qsub when a job submits itself again."""


@dataclass(frozen=True, slots=True)
class InRunDir:
    """A script for a run directory, which isles follows.

    Args:
        path: the run directory, absolute.
        attempt: the number of this start.
        resume_from: a checkpoint that was asked for by name.
        only_check_s: the job only looks at its nodes, and waits so long for one answer.
    """

    path: str
    attempt: int
    resume_from: str | None = None
    only_check_s: float | None = None


@dataclass(frozen=True, slots=True)
class Alone:
    """A script that needs nothing of isles but its trainer, or not even that.

    Args:
        command: what follows torchrun's own options.
        path: where the script will be, absolute; None: not known.
    """

    command: list[str]
    path: str | None


def pbs_script(
    config: RunConfig,
    launcher: PbsLauncherConfig,
    dialect: Dialect,
    place: InRunDir | Alone,
    *,
    workdir: str,
    num_ranks: int,
    device: str,
    notes: tuple[str, ...] = (),
) -> str:
    """The text of a job script.

    Args:
        config: the run file.
        launcher: its launcher, or one like it.
        dialect: openpbs or torque.
        place: what it starts.
        workdir: the folder in which the ranks run, absolute.
        num_ranks: ranks on each node.
        device: cpu or cuda.
        notes: what its reader should know, one line each.
    """
    cluster = config.clusters[0]
    in_run_dir = isinstance(place, InRunDir)
    folder = f"{place.path}/attempts/{place.attempt:03d}" if isinstance(place, InRunDir) else None
    requests = request_lines(
        cluster,
        launcher,
        dialect,
        name=config.name,
        num_ranks=num_ranks,
        device=device,
        output=f"{folder}/pbs.out" if folder else None,
    )
    timed = launcher.time is not None
    save_after = int(launcher.time - launcher.save_before) if launcher.time is not None else None
    bin_path = launcher.bin_path.rstrip("/") + "/" if launcher.bin_path else ""
    pbsdsh = [f"{bin_path}pbsdsh"] + ["-u"] * (dialect == "torque")
    return fill_template(
        "pbs.sh.jinja",
        title=f"{config.name}: {cluster.max_nodes} x {num_ranks} ranks under torchrun",
        head=_head(place, launcher, timed=timed, notes=notes),
        requests=requests,
        **_node_values(config.clusters[0], launcher, workdir, num_ranks, device),
        name=config.name,
        run_dir=place.path if in_run_dir else None,
        attempt=place.attempt if isinstance(place, InRunDir) else 0,
        path=None if in_run_dir else place.path,
        command=_command(config, place),
        pbsdsh=pbsdsh,
        qsub=f"{bin_path}qsub",
        save_after=save_after,
        requeue=launcher.requeue,
        runs=runs_pattern(config, workdir),
        most_times=MOST_TIMES,
        submit_s=_SUBMIT_S,
        **_check_values(place, launcher),
    )


def _check_values(place: InRunDir | Alone, launcher: PbsLauncherConfig) -> dict[str, object]:
    """What the template says of step 0, which needs a run directory."""
    only_s = place.only_check_s if isinstance(place, InRunDir) else None
    return {
        "check": isinstance(place, InRunDir) and (launcher.check or only_s is not None),
        "check_only": only_s is not None,
        "check_options": f" --timeout {only_s:.0f}" if only_s is not None else "",
    }


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
        "python": python_of(cluster.environment),
    }


def _head(
    place: InRunDir | Alone, launcher: PbsLauncherConfig, *, timed: bool, notes: tuple[str, ...]
) -> list[str]:
    if isinstance(place, InRunDir):
        return [f"written by isles {__version__} for start {place.attempt} of {place.path}", *notes]
    lines = [f"written by isles {__version__}; it does not need the command isles to run", *notes]
    if timed and launcher.requeue and place.path is None:
        lines.append("submit it again to go on after its time limit; written by --output it does")
        lines.append("that by itself")
    return lines


def _command(config: RunConfig, place: InRunDir | Alone) -> str:
    if isinstance(place, Alone):
        return shlex.join(place.command)
    return shlex.join(
        rank_command(config, place.path, place.attempt, resume_from=place.resume_from)
    )
