"""The launcher manual: prints the agent's command for each node, for a person to run there.

The first node's agent coordinates the run. The other nodes need only its address and the token:
they get the run's files from there.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from typing import Literal

from isles.config.load import Loaded
from isles.config.resolve import load_resolved
from isles.config.sections.cluster import ClusterConfig, ManualLauncherConfig
from isles.errors import ConfigError, PreflightError
from isles.facts.units import format_duration
from isles.launch.base import (
    Started,
    StartOptions,
    check_packages,
    make_fleet,
    next_attempt,
    resolve_checked,
)
from isles.launch.container.enter import container_record
from isles.launch.container.image import require_image
from isles.launch.hub import own_addresses
from isles.launch.ssh.environment import network_variables, quoted, setting_lines
from isles.launch.ssh.facts import free_port, interface_of, port_taken
from isles.run.begin import begin_attempt
from isles.run.choose import choose_run
from isles.run.env import inherited, rank_defaults
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir


def start_manual(
    loaded: Loaded, launcher: ManualLauncherConfig, options: StartOptions
) -> Started | str:
    """Make the run directory, and print the commands; nothing runs until they are typed.

    Raises:
        ConfigErrors: every issue in the run file.
        UserError: this is not the first host, or the run cannot be started.
    """
    cluster = loaded.config.clusters[0]
    addresses = [_address(loaded, launcher, index) for index in range(len(launcher.hosts))]
    _require_here(loaded, launcher.hosts[0], addresses[0])
    assert cluster.gpus_per_node != "auto", "config/rules/cluster.py"
    device: Literal["cpu", "cuda"] = "cpu" if cluster.device == "cpu" else "cuda"
    nproc = (cluster.gpus_per_node,) * len(addresses)
    resolved = resolve_checked(loaded, nproc=nproc, device=device)
    if options.dry_run:
        begun = choose_run(resolved, options.resume)
        attempt, token = next_attempt(begun.run_dir), "(made when it is started)"
    else:
        container = container_record(cluster, resolved.config, device)
        if container is not None:
            require_image(container, loaded)
        else:
            check_packages(resolved)
        begun, attempt = begin_attempt(
            resolved, loaded.text, options.resume, join=options.join, typed=options.typed
        )
        token = attempt.token.read_text(encoding="utf-8").strip()
    nodes = [
        FleetNode(node, host, None, address, nproc[0])
        for node, (host, address) in enumerate(zip(launcher.hosts, addresses, strict=True))
    ]
    if (port := free_port(cluster.network.port)) is None:
        raise port_taken(cluster.network.port, launcher.hosts[0])
    fleet = make_fleet(resolved, nodes, port=port, resume_from=begun.resume_from)
    notes = [begun.note] if begun.note else []
    text = "\n".join([*notes, *_commands(begun.run_dir, fleet, cluster, token)])
    if options.dry_run:
        return text
    fleet.write(attempt)
    return Started(begun.run_dir, attempt, None, text=text)


def node_environ(run_dir: RunDir, fleet: Fleet, node: int) -> dict[str, str]:
    """The environment of the processes of a manually started node."""
    text = run_dir.resolved.read_text(encoding="utf-8")
    cluster = load_resolved(text).config.clusters[0]
    place = fleet.nodes[node]
    interface = cluster.network.interface or interface_of(place.address)
    added = rank_defaults(device=fleet.device, nproc=place.nproc, interface=None)
    added |= network_variables(cluster.network, interface, fleet.device)
    return {**added, **cluster.environment.variables, **inherited()}


def _address(loaded: Loaded, launcher: ManualLauncherConfig, index: int) -> str:
    host = launcher.hosts[index]
    where = loaded.where(f"clusters.0.launcher.hosts.{index}")
    try:
        address = socket.gethostbyname(host)
    except (OSError, UnicodeError):  # the latter: a..b
        raise ConfigError(
            f"no IPv4 address found for {host}",
            where=where,
            fix="write its IPv4 address instead of the name",
            id="net.names",
        ) from None
    if address.startswith("127.") and len(launcher.hosts) > 1:
        raise ConfigError(
            f"{host} has the address {address} on this machine, which other hosts cannot reach",
            where=where,
            fix="write an address that the other hosts can reach, such as 192.168.1.100",
            id="net.names",
        )
    return address


def _require_here(loaded: Loaded, host: str, address: str) -> None:
    own = own_addresses()
    if address in own:
        return
    here = sorted(place for place in own if "." in place and not place.startswith("127."))
    raise PreflightError(
        f"the first host is {host}, but this machine is {' or '.join(here) or 'not on a network'}",
        where=loaded.where("clusters.0.launcher.hosts"),
        fix=f"run the command on {host}, which keeps the run directory. Or put this machine first "
        "in the list, or use launcher: {kind: ssh}, which starts from any machine",
        id="start.first",
    )


def _commands(run_dir: RunDir, fleet: Fleet, cluster: ClusterConfig, token: str) -> list[str]:
    nodes = f"{len(fleet)} node{'s' if len(fleet) > 1 else ''}"
    ranks = f"{fleet.nodes[0].nproc} rank{'s' if fleet.nodes[0].nproc > 1 else ''}"
    python = quoted(cluster.environment.python or sys.executable)
    setting: list[str] = []
    if cluster.workdir is not None or cluster.environment.model_fields_set:
        setting = setting_lines(cluster, cluster.workdir or os.curdir)
        setting = [line for line in setting if not line.startswith(f"cd {os.curdir} ")]
    lines = [
        f"{run_dir.name}: {nodes} with {ranks} each. Run one command on each "
        f"node; they wait {format_duration(fleet.start_timeout_s)} for each other.",
    ]
    for node in fleet.nodes:
        here = " (this machine)" if node.node == 0 else ""
        target = shlex.quote(str(run_dir.path.absolute()))
        if node.node:
            target = f"{fleet.first.address}:{fleet.port} --node {node.node}"
        lines += ["", f"node {node.node}, {node.label.partition('(')[2].rstrip(')')}{here}:"]
        lines += [f"    {line}" for line in setting]
        lines += [f"    {python} -m isles.agent {target}"]
    if len(fleet.nodes) > 1:
        lines += ["", f"The other nodes ask for the token of this attempt: {token}"]
    return lines
