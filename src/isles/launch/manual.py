"""The launcher manual: prints the agent's command for each node, for a person to type there.

The first node's agent coordinates the run; each of the others needs nothing but its address and the
token: it gets the run's files from there.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import socket
import sys
from typing import Literal

import psutil

from isles.config.files import data_faults, deepspeed_faults, shape_faults
from isles.config.load import Loaded
from isles.config.resolve import Resolved, dump_resolved, resolve
from isles.config.sections.cluster import ClusterConfig, ManualLauncherConfig
from isles.errors import ConfigError, ConfigErrors, PreflightError
from isles.facts.units import format_duration
from isles.launch.base import Started, StartOptions
from isles.launch.ssh.environment import network_variables, quoted, setting_lines
from isles.launch.ssh.facts import free_port
from isles.launch.worker import require_train
from isles.run.begin import begin_run, choose_run, new_attempt, require_packages
from isles.run.env import hub_cache, inherited, rank_defaults
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir


def start_manual(
    loaded: Loaded, launcher: ManualLauncherConfig, options: StartOptions
) -> Started | str:
    """Make the run directory, and say what is to be typed; nothing runs before it is.

    Args:
        loaded: the run file.
        launcher: its section.
        options: how `isles train` was typed.

    Raises:
        ConfigErrors: every fault in the run file.
        UserError: this is not the first host, or the run cannot be begun.
    """
    cluster = loaded.config.clusters[0]
    addresses = [_address(loaded, index) for index in range(len(launcher.hosts))]
    _require_here(loaded, launcher.hosts[0], addresses[0])
    resolved = _resolve(loaded, cluster, len(addresses))
    if options.dry_run:
        begun = choose_run(resolved, options.resume)
        number, token = len(begun.run_dir.attempts()) + 1, "(made when it is started)"
    else:
        require_train()
        require_packages(resolved.config)
        begun = begin_run(resolved, loaded.text, options.resume, join=options.join)
        attempt = new_attempt(begun.run_dir, loaded.text, typed=options.typed)
        number = attempt.number
        token = attempt.token.read_text(encoding="utf-8").strip()
    asked = str(begun.resume_from.absolute()) if begun.resume_from else None
    fleet = _fleet(launcher, cluster, resolved, addresses, asked)
    text = "\n".join(
        [
            *([begun.note] if begun.note else []),
            *_commands(begun.run_dir, fleet, cluster, token),
        ]
    )
    if options.dry_run:
        return text
    fleet.write(begun.run_dir.attempt(number))
    return Started(begun.run_dir, begun.run_dir.attempt(number), None, text=text)


def node_environ(run_dir: RunDir, fleet: Fleet, node: int) -> dict[str, str]:
    """What the processes of a node that is started by hand have in their environment."""
    from isles.config.resolve import load_resolved

    text = run_dir.resolved.read_text(encoding="utf-8")
    cluster = load_resolved(text).config.clusters[0]
    place = fleet.nodes[node]
    interface = cluster.network.interface or interface_of(place.address)
    mine = inherited()
    added = rank_defaults(device=fleet.device, nproc=place.nproc, interface=None)
    added |= network_variables(cluster.network, interface, fleet.device)
    return {**added, **cluster.environment.variables, **mine}


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an address; None: there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def _address(loaded: Loaded, index: int) -> str:
    """A host's address in numbers, as all hosts understand it."""
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, ManualLauncherConfig)
    host = launcher.hosts[index]
    where = loaded.where(f"clusters.0.launcher.hosts.{index}")
    try:
        address = socket.gethostbyname(host)
    except OSError:
        raise ConfigError(
            f"no IPv4 address is known for {host}",
            where=where,
            fix="write it in numbers",
            id="net.names",
        ) from None
    if address.startswith("127.") and len(launcher.hosts) > 1:
        raise ConfigError(
            f"{host} is {address} on this machine, which no other host can reach",
            where=where,
            fix="write the address that the others know, such as 192.168.1.100",
            id="net.names",
        )
    return address


def _require_here(loaded: Loaded, host: str, address: str) -> None:
    if interface_of(address) is not None:
        return
    here = sorted(
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    )
    raise PreflightError(
        f"the first host is {host}, and this machine is {' or '.join(here) or 'not on a network'}",
        where=loaded.where("clusters.0.launcher.hosts"),
        fix=f"type it on {host}, which keeps the run directory; or begin the list with this "
        "machine; or use launcher: {kind: ssh}, which starts from anywhere",
        id="start.first",
    )


def _resolve(loaded: Loaded, cluster: ClusterConfig, num_nodes: int) -> Resolved:
    faults = [
        *shape_faults(loaded, hub_cache()),
        *deepspeed_faults(loaded),
        *data_faults(loaded),
    ]
    assert cluster.gpus_per_node != "auto", "config/rules/cluster.py"
    device: Literal["cpu", "cuda"] = "cpu" if cluster.device == "cpu" else "cuda"
    try:
        resolved = resolve(loaded, nproc=(cluster.gpus_per_node,) * num_nodes, device=device)
    except ConfigError as error:
        raise ConfigErrors([*faults, error]) from None
    if faults:
        raise ConfigErrors(faults)
    return resolved


def _fleet(
    launcher: ManualLauncherConfig,
    cluster: ClusterConfig,
    resolved: Resolved,
    addresses: list[str],
    resume_from: str | None,
) -> Fleet:
    port = free_port(cluster.network.port)
    if port is None:
        raise PreflightError(
            f"all ports from {cluster.network.port} to {cluster.network.port + 99} are taken",
            where=f"host {launcher.hosts[0]}",
            fix="set clusters[0].network.port to the first of a hundred others",
            id="port.taken",
        )
    nproc = cluster.gpus_per_node
    assert nproc != "auto"
    return Fleet(
        launcher="manual",
        nodes=tuple(
            FleetNode(node, host, None, address, nproc)
            for node, (host, address) in enumerate(zip(launcher.hosts, addresses, strict=True))
        ),
        port=port,
        min_nodes=cluster.min_nodes,
        device=resolved.device,
        start_timeout_s=cluster.start_timeout,
        digest=hashlib.sha256(dump_resolved(resolved).encode()).hexdigest(),
        resume_from=resume_from,
    )


def _commands(run_dir: RunDir, fleet: Fleet, cluster: ClusterConfig, token: str) -> list[str]:
    """What is to be typed, node by node."""
    ranks = f"{fleet.nodes[0].nproc} rank{'s' if fleet.nodes[0].nproc > 1 else ''}"
    python = quoted(cluster.environment.python or sys.executable)
    at = f"{fleet.head.address}:{fleet.port}"
    lines = [
        f"{run_dir.name}: {len(fleet.nodes)} nodes with {ranks} each. Type one command on each "
        f"node; they wait {format_duration(fleet.start_timeout_s)} for one another.",
    ]
    for node in fleet.nodes:
        here = " (this machine)" if node.node == 0 else ""
        target = shlex.quote(str(run_dir.path.absolute()))
        if node.node:
            target = f"{at} --node {node.node}"
        lines += ["", f"node {node.node}, {node.label.partition('(')[2].rstrip(')')}{here}:"]
        lines += [f"    {line}" for line in _setting(cluster)]
        lines += [f"    {python} -m isles.agent {target}"]
    if len(fleet.nodes) > 1:
        lines += ["", f"The other nodes ask for the token of this start: {token}"]
    return lines


def _setting(cluster: ClusterConfig) -> list[str]:
    """What comes before the command, where the run file says so."""
    if cluster.workdir is None and not cluster.environment.model_fields_set:
        return []
    lines = setting_lines(cluster, cluster.workdir or os.curdir)
    return [line for line in lines if not line.startswith(f"cd {os.curdir} ")]
