"""The local launcher: the ranks of this machine, under an agent, or several as its nodes."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil

from isles.config.sections.cluster import ClusterConfig
from isles.launch.base import Job
from isles.launch.detached import start_detached
from isles.run.begin import write_launch
from isles.run.env import inherited, rank_defaults
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.refusals import clear_errors
from isles.run.signals import kill_now


def local_job(
    run_dir: RunDir,
    attempt: Attempt,
    *,
    world_size: int,
    device: str,
    resumed_from: Path | None = None,
    cluster: ClusterConfig | None = None,
) -> Job:
    """The job that trains a run on this machine: one agent, or a supervisor of several.

    Args:
        run_dir: the run.
        attempt: this start of it.
        world_size: ranks on all nodes.
        device: cpu or cuda.
        resumed_from: a checkpoint that was asked for by name.
        cluster: the run file's section; None: one node.
    """
    asked = ("--resume-from", str(resumed_from.absolute())) if resumed_from else ()
    nodes = cluster.max_nodes if cluster is not None else 1
    several: tuple[str, ...] = ()
    if cluster is not None and nodes > 1:
        several = ("--nodes", f"{cluster.min_nodes}:{nodes}", "--device", device)
    command = (
        sys.executable,
        "-m",
        "isles.agent.supervisor" if several else "isles.agent",
        str(run_dir.path.absolute()),
        "--attempt",
        str(attempt.number),
        *several,
        "--nproc-per-node",
        str(world_size // nodes),
        *asked,
    )
    variables = cluster.environment.variables if cluster is not None else {}
    return Job(run_dir, attempt, world_size, device, command, resumed_from, dict(variables))


class LocalLauncher:
    """Starts the agent in a session of its own, so that the run outlives the terminal."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: what the job inherits; None: all that this process has."""
        self._environ = inherited() if environ is None else environ
        self._children: dict[int, subprocess.Popen[bytes]] = {}

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
            environ = {**self._environ, **self._added(job)}
            child = start_detached(job.command, environ, log, job.attempt.path)
        self._children[child.pid] = child
        # Even a child that has ended keeps its pid and start time until it is waited for.
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

    def state(self, job_id: ProcessId) -> Literal["running", "ended"]:
        """Whether the agent still runs."""
        child = self._children.get(job_id.pid)
        if child is not None:
            child.poll()
        return "running" if job_id.is_alive() else "ended"

    def cancel(self, job_id: ProcessId) -> None:
        """Kill the agent; its ranks end with it."""
        kill_now(job_id)

    def _added(self, job: Job) -> dict[str, str]:
        """Variables of the run file, and those that make a good start on one machine."""
        defaults = rank_defaults(
            device=job.device,
            nproc=job.world_size,
            interface=_loopback(),
            environ={**self._environ, **job.variables},
        )
        return {**defaults, **job.variables}


def _loopback() -> str | None:
    """The interface that reaches this machine only, so that no port is open to the network."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return None
