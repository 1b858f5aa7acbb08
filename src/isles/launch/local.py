"""The launcher local: the run on this machine, in a session of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from isles.config.sections.cluster import ClusterConfig
from isles.errors import UserError
from isles.launch.base import Job
from isles.launch.detached import start_detached
from isles.run.begin import write_launch
from isles.run.env import inherited, rank_defaults, visible_devices
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import clear_errors


def local_job(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    world_size: int,
    device: str,
    resumed_from: Path | None = None,
    cluster: ClusterConfig | None = None,
) -> Job:
    """The job that trains a run on this machine.

    Args:
        run_dir: the run.
        attempt: this start of it.
        world_size: ranks on all nodes.
        device: cpu or cuda.
        resumed_from: a checkpoint that was asked for by name.
        cluster: the run file's section; several nodes are as many agents. None: one node.
    """
    cluster = cluster or ClusterConfig()
    fleet = Fleet(
        launcher="local",
        nodes=tuple(
            FleetNode(node, os.uname().nodename, None, "127.0.0.1", world_size // cluster.max_nodes)
            for node in range(cluster.max_nodes)
        ),
        port=0,
        min_nodes=cluster.min_nodes,
        device=device,
        start_timeout_s=cluster.start_timeout,
        digest="",
        resume_from=str(resumed_from.absolute()) if resumed_from else None,
    )
    words = [sys.executable, "-m", "isles.agent", str(run_dir.path.absolute())]
    command = (*words, "--attempt", str(attempt.number))
    variables = dict(cluster.environment.variables)
    return Job(run_dir, attempt, world_size, device, command, resumed_from, variables, fleet)


class LocalLauncher:
    """Starts the agent in a session of its own, so that the run outlives the terminal."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: what the job inherits; None: all that this process has."""
        self._environ = inherited() if environ is None else environ
        self._children: list[subprocess.Popen[bytes]] = []

    def render(self, job: Job) -> str:
        """The command line, with the variables that are added to the environment."""
        added = [f"{key}={value}" for key, value in self._added(job).items()]
        return shlex.join([*(["env", *added] if added else []), *job.command])

    def submit(self, job: Job) -> ProcessId:
        """Start the agent and record it; its output goes to the attempt's agent.log.

        Raises:
            UserError: the machine cannot start a process.
        """
        with clear_errors(job.attempt.path), job.attempt.agent_log.open("ab") as log:
            if job.fleet is not None:
                job.fleet.write(job.attempt)
            environ = {**self._environ, **self._added(job)}
            child = start_detached(job.command, environ, log, job.attempt.path)
        # Even a child that has ended keeps its pid and start time until it is waited for.
        self._children.append(child)
        process = ProcessId.of(child.pid)
        write_launch(
            job.attempt,
            process,
            world_size=job.world_size,
            device=job.device,
            command=job.command,
            resumed_from=job.resumed_from,
        )
        return process

    def _added(self, job: Job) -> dict[str, str]:
        """Variables of the run file, and those that make a good start on one machine."""
        defaults = rank_defaults(
            device=job.device,
            nproc=job.world_size,
            interface=_loopback(),
            environ={**self._environ, **job.variables},
        )
        return {**defaults, **job.variables}


def place_here(
    run_dir: RunDir, attempt: Attempt, fleet: Fleet, node: int
) -> subprocess.Popen[bytes]:
    """Start the agent of a node that is a process of this machine, in a session of its own.

    Raises:
        UserError: there are not enough GPUs for one more node.
    """
    environ = inherited()
    if fleet.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(fleet, node))
    command = [sys.executable, "-m", "isles.agent", str(run_dir.path.absolute())]
    command += ["--attempt", str(attempt.number), "--node", str(node)]
    with attempt.node_log(node).open("ab") as log:
        return subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _own_gpus(fleet: Fleet, node: int) -> list[str]:
    """Each node of one machine has GPUs of its own."""
    nproc = fleet.nodes[node].nproc
    last = (node + 1) * nproc
    visible = visible_devices() or [str(gpu) for gpu in range(last)]
    mine = visible[last - nproc : last]
    if len(mine) < nproc:
        raise UserError(
            f"node {node} needs {nproc} GPUs of its own, {len(mine)} are left",
            where=f"host {os.uname().nodename}, CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="make all GPUs of the run visible, or lower clusters[0].nodes",
            id="gpu.count",
        )
    return mine


def _loopback() -> str | None:
    """The interface that reaches this machine only, so that no port is open to the network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None
