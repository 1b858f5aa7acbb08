"""The launcher local: the run on this machine, in a separate session."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from isles.config.load import Loaded
from isles.config.resolve import Resolved
from isles.config.sections.outer import DiLoCoConfig
from isles.config.show import show
from isles.errors import ConfigErrors, UserError
from isles.launch.base import (
    Started,
    StartOptions,
    check_packages,
    make_fleet,
    next_attempt,
    ranks_text,
    resolve_here,
)
from isles.launch.container.enter import Container, container_record, entry
from isles.launch.container.image import require_image
from isles.launch.huggingface import huggingface_issues
from isles.launch.ssh.shell import start_detached
from isles.run.begin import begin_attempt, write_launch
from isles.run.choose import choose_run
from isles.run.claim import claimed
from isles.run.env import inherited, rank_defaults, visible_devices
from isles.run.find import own_runs
from isles.run.nodes import Fleet, FleetNode, read_own_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors, read_record, write_record
from isles.run.state import attempt_state


def start_local(loaded: Loaded, options: StartOptions) -> Started | str:
    """Start a run on this machine, or describe the start; see `isles.launch.start.start`.

    Raises:
        UserError: the run cannot be started, or the machine cannot start a process.
    """
    resolved = resolve_here(loaded, options.warn, needs_data=True)
    num_nodes = resolved.config.clusters[0].max_nodes
    ranks = ranks_text(resolved.world_size, resolved.device)
    ranks += f" on {num_nodes} nodes" if num_nodes > 1 else ""
    added = added_variables(resolved)
    container = container_record(resolved.config.clusters[0], resolved.config, resolved.device)
    if options.dry_run:
        begun = choose_run(resolved, options.resume)
        note = begun.note or f"this would be a new run: {begun.run_dir.name}"
        shown = dict(added)
        if options.cluster and (threads := inherited().get("OMP_NUM_THREADS")):
            shown["OMP_NUM_THREADS"] = (
                threads  # each cluster on this machine has a share of the cores
            )
        words = [*(["env"] if shown else []), *(f"{key}={value}" for key, value in shown.items())]
        words += agent_command(begun.run_dir, next_attempt(begun.run_dir))
        if container is not None:
            found = entry(
                Container.of(container), ["-m", "isles.agent", words[-3], *words[-2:]], [Path.cwd()]
            )
            note += f"\nthe agent enters its container:\n\n{shlex.join(found.words)}\n"
        note += f"\n{ranks} would be started by\n\n{shlex.join(words)}"
        if not options.cluster and (outer := resolved.config.diloco) is not None:
            note += f"\n\n{_meeting_text(outer, options)}"
        return f"{show(resolved).rstrip()}\n\n{note}"
    if container is None:
        check_packages(resolved)
    joined = _join_running(resolved, options)
    if joined is not None:
        return joined
    if container is not None:
        require_image(container, loaded)
    elif issues := huggingface_issues(loaded):
        raise ConfigErrors(issues)
    begun, attempt = begin_attempt(
        resolved, loaded.text, options.resume, join=options.join, typed=options.typed
    )
    if begun.note:
        options.print_line(begun.note)
    with explain_write_errors(attempt.path):
        local_fleet(resolved, begun.resume_from).write(attempt)
    child = start_agent(
        attempt,
        agent_command(begun.run_dir, attempt),
        added,
        world_size=resolved.world_size,
        device=resolved.device,
        resumed_from=begun.resume_from,
    )
    options.print_line(f"started {begun.run_dir.name}: {ranks}, in {begun.run_dir.path}")
    return Started(begun.run_dir, attempt, ProcessId.of(child.pid))


def _meeting_text(outer: DiLoCoConfig, options: StartOptions) -> str:
    # For a run file with outer steps and one cluster.
    if outer.url is not None:
        return f"the cluster would meet others at {outer.url}"
    if outer.engine == "hivemind":
        return "the cluster would find others by hivemind"
    if options.join or outer.hub is not None:
        return "the cluster would join its hub"
    return (
        "the cluster would average alone, because it has no hub. Start a hub with `isles hub` and "
        "this run file; other clusters join it with `isles join`"
    )


def local_fleet(resolved: Resolved, resume_from: Path | None) -> Fleet:
    """The nodes of a run on this machine, with an agent for each."""
    host, num_nodes = os.uname().nodename, resolved.config.clusters[0].max_nodes
    nproc = resolved.world_size // num_nodes
    nodes = [FleetNode(node, host, None, "127.0.0.1", nproc) for node in range(num_nodes)]
    return make_fleet(resolved, nodes, port=0, resume_from=resume_from)


def added_variables(resolved: Resolved, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables added to the environment of the agent; `environ`: this process' own."""
    variables = dict(resolved.config.clusters[0].environment.variables)
    # gloo and NCCL use the loopback interface, so no port is open to the network.
    interfaces = psutil.net_if_addrs().items()
    loopback = (n for n, found in interfaces if any(a.address == "127.0.0.1" for a in found))
    defaults = rank_defaults(
        device=resolved.device,
        nproc=resolved.world_size,
        interface=next(loopback, None),
        environ={**(inherited() if environ is None else environ), **variables},
    )
    return {**defaults, **variables}


def start_agent(
    attempt: Attempt,
    command: Sequence[str],
    added: Mapping[str, str],
    *,
    world_size: int,
    device: str,
    resumed_from: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start the agent of an attempt in a separate session, so that the run outlives the terminal,
    and record it. Its output goes to the attempt's agent.log.

    Args:
        added: variables added to the environment.
        resumed_from: the checkpoint that the user chose.

    Raises:
        UserError: the machine cannot start a process.
    """
    with explain_write_errors(attempt.path), attempt.agent_log.open("ab") as log:
        child = start_detached(command, {**inherited(), **added}, log, attempt.path)
    write_launch(
        attempt,
        ProcessId.of(child.pid),
        world_size=world_size,
        device=device,
        command=tuple(command),
        resumed_from=resumed_from,
    )
    return child


def place_here(
    run_dir: RunDir, attempt: Attempt, fleet: Fleet, node: int
) -> subprocess.Popen[bytes]:
    """Start the agent of a node that is a process of this machine, in a separate session.

    Raises:
        UserError: there are not enough GPUs for another node.
    """
    environ = inherited()
    if fleet.device == "cuda":
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(_own_gpus(fleet, node))
    command = (*agent_command(run_dir, attempt), "--node", str(node))
    with attempt.node_log(node).open("ab") as log:
        child = start_detached(command, environ, log, attempt.path)
    # Until the agent has connected, searches for missing nodes find it through this record.
    write_record(attempt.node_record(node), ProcessId.of(child.pid).record(), durable=False)
    return child


def agent_command(run_dir: RunDir, attempt: Attempt) -> tuple[str, ...]:
    """The command line of the agent of the first node."""
    words = (sys.executable, "-m", "isles.agent", str(run_dir.path.absolute()))
    return (*words, "--attempt", str(attempt.number))


def _own_gpus(fleet: Fleet, node: int) -> list[str]:
    nproc = fleet.nodes[node].nproc
    last = (node + 1) * nproc
    visible = visible_devices() or [str(gpu) for gpu in range(last)]
    mine = visible[last - nproc : last]
    if len(mine) < nproc:
        raise UserError(
            f"node {node} needs {nproc} GPUs, but only {len(mine)} are left",
            where=f"host {os.uname().nodename}, CUDA_VISIBLE_DEVICES={','.join(visible)}",
            fix="make all GPUs of the run visible, or lower clusters.0.nodes",
            id="gpu.count",
        )
    return mine


def _join_running(resolved: Resolved, options: StartOptions) -> Started | None:
    # Start the missing nodes of a run that continues with fewer nodes than its maximum.
    if options.resume != "auto" or resolved.config.clusters[0].max_nodes == 1:
        return None
    folder, name = Path(resolved.config.output_dir).expanduser(), resolved.config.name
    if not own_runs(folder, name):
        return None
    # Two starts at the same time would start the same node twice.
    with claimed(folder, name):
        return _bring_missing(own_runs(folder, name), options)


def _bring_missing(runs: Sequence[RunDir], options: StartOptions) -> Started | None:
    run_dir = runs[-1] if runs else None
    attempt = run_dir.last_attempt() if run_dir is not None else None
    if run_dir is None or attempt is None:
        return None
    fleet, state = read_own_fleet(attempt), attempt_state(run_dir, attempt)
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
        f"{run_dir.name} is running with {num_nodes - len(missing)} of {num_nodes} nodes; "
        f"starting node {', '.join(map(str, missing))} again"
    )
    return Started(run_dir, attempt, state.process)
