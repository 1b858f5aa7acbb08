"""The launcher local: the run on this machine, in a session of its own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.cluster import ClusterConfig
from isles.config.show import show
from isles.errors import ConfigErrors, UserError
from isles.launch.base import Started, StartOptions, check_packages, next_attempt, resolve_here
from isles.launch.huggingface import huggingface_issues
from isles.launch.ssh.shell import start_detached
from isles.run.begin import begin_run, choose_run, new_attempt, write_launch
from isles.run.env import inherited, rank_defaults, visible_devices
from isles.run.find import numbered_runs
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import clear_errors, read_record
from isles.run.state import attempt_state


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a run on this machine.

    Args:
        command: the command line that runs until the ranks have ended.
        resumed_from: the checkpoint that was asked for by name.
        variables: of the environment, that the run file sets.
        fleet: its nodes, for the agents; None: the command needs none.
    """

    run_dir: RunDir
    attempt: Attempt
    world_size: int
    device: str
    command: tuple[str, ...]
    resumed_from: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    fleet: Fleet | None = None


def start_local(loaded: Loaded, options: StartOptions) -> Started | str:
    """Start a run on this machine, or say what would be done; see `isles.launch.start.start`.

    Raises:
        UserError: the run cannot be begun, or the machine cannot start it.
    """
    resolved = resolve_here(loaded, options.warn, needs_data=True)
    cluster = resolved.config.clusters[0]
    if options.dry_run:
        begun = choose_run(resolved, options.resume)
        attempt = next_attempt(begun.run_dir)
    else:
        check_packages(resolved)
        joined = _join_running(resolved, options)
        if joined is not None:
            return joined
        if issues := huggingface_issues(loaded):
            raise ConfigErrors(issues)
        begun = begin_run(resolved, loaded.text, options.resume, join=options.join)
        if begun.note:
            options.print_line(begun.note)
        attempt = new_attempt(begun.run_dir, loaded.text, typed=options.typed)
    job = local_job(
        begun.run_dir,
        attempt,
        world_size=resolved.world_size,
        device=resolved.device,
        resumed_from=begun.resume_from,
        cluster=cluster,
    )
    ranks = _ranks_text(resolved)
    if options.dry_run:
        note = begun.note or f"this would be a new run: {begun.run_dir.name}"
        head = f"{ranks}; the command that would start them:"
        return f"{show(resolved).rstrip()}\n\n{note}\n{head}\n\n{LocalLauncher().render(job)}"
    process = LocalLauncher().submit(job)
    options.print_line(f"started {begun.run_dir.name}: {ranks}, in {begun.run_dir.path}")
    return Started(begun.run_dir, attempt, process)


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
    command = _agent_command(run_dir, attempt)
    variables = dict(cluster.environment.variables)
    return Job(run_dir, attempt, world_size, device, command, resumed_from, variables, fleet)


class LocalLauncher:
    """Starts the agent in a session of its own, so that the run outlives the terminal.

    Args:
        environ: what the job inherits; None: all that this process has.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
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
        # gloo and NCCL on the loopback: no port is open to the network.
        interfaces = psutil.net_if_addrs().items()
        loopback = (n for n, found in interfaces if any(a.address == "127.0.0.1" for a in found))
        defaults = rank_defaults(
            device=job.device,
            nproc=job.world_size,
            interface=next(loopback, None),
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
    command = (*_agent_command(run_dir, attempt), "--node", str(node))
    with attempt.node_log(node).open("ab") as log:
        return start_detached(command, environ, log, attempt.path)


def _agent_command(run_dir: RunDir, attempt: Attempt) -> tuple[str, ...]:
    words = (sys.executable, "-m", "isles.agent", str(run_dir.path.absolute()))
    return (*words, "--attempt", str(attempt.number))


def _own_gpus(fleet: Fleet, node: int) -> list[str]:
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


def _join_running(resolved: Resolved, options: StartOptions) -> Started | None:
    # Bring the missing nodes back to a run that goes on with fewer than it may have.
    if options.resume != "auto" or resolved.config.clusters[0].max_nodes == 1:
        return None
    runs = numbered_runs(Path(resolved.config.output_dir).expanduser(), resolved.config.name)
    run_dir = next((run for _, run in reversed(runs) if run.attempts()), None)
    attempt = run_dir.last_attempt() if run_dir is not None else None
    if run_dir is None or attempt is None:
        return None
    fleet, state = read_fleet(attempt), attempt_state(run_dir, attempt)
    if fleet is None or state.state != "running" or state.process is None or not state.is_here:
        return None
    records = {n.node: read_record(attempt.node_record(n.node)) or {} for n in fleet.nodes}
    agents = {node: ProcessId.from_record(record) for node, record in records.items()}
    missing = [n for n, agent in agents.items() if agent is None or not agent.is_alive()]
    if not missing or fleet.launcher != "local":
        return None
    for node in missing:
        place_here(run_dir, attempt, fleet, node)
    num_nodes = len(fleet.nodes)
    options.print_line(
        f"{run_dir.name} is running with {num_nodes - len(missing)} of {num_nodes} nodes: "
        f"bringing back node {', '.join(map(str, missing))}"
    )
    return Started(run_dir, attempt, state.process)


def _ranks_text(resolved: Resolved) -> str:
    kind, plural = (
        ("GPU", "GPUs") if resolved.device == "cuda" else ("CPU process", "CPU processes")
    )
    nodes = resolved.config.clusters[0].max_nodes
    end = f" on {nodes} nodes" if nodes > 1 else ""
    return f"{resolved.world_size} {kind if resolved.world_size == 1 else plural}{end}"
