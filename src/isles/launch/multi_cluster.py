"""Several clusters started from one machine: their GPUs, and the address of their hub."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence

from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig, QueueSection
from isles.config.sections.outer import HivemindConfig
from isles.errors import ConfigError
from isles.launch.gpus import find_gpus
from isles.launch.hub import listen_address
from isles.launch.ssh.shell import ssh_config
from isles.run.env import rank_defaults, visible_devices

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOPBACK = re.compile(r"/ip4/127\.|/ip6/::1/|/dns[46]?/localhost/")
_NOWHERE = "192.0.2.1"
"""A documentation address (RFC 5737): a UDP socket connected to it sends nothing."""


def local_environs(loaded: Loaded) -> dict[str, dict[str, str]]:
    """Environment variables of the clusters on this machine, by name: each cluster gets separate
    GPUs, and on the CPU no more threads than its share of the cores.

    Raises:
        ConfigError: the clusters need more GPUs than this machine has.
    """
    clusters = [c for c in loaded.config.clusters if c.is_here]
    if len(clusters) < 2:
        return {}
    found: dict[str, dict[str, str]] = {}
    gpus = visible_devices()
    if gpus is None:
        gpus = [str(index) for index in range(len(find_gpus().gpus))]
    for cluster in clusters:
        if (own := cluster.environment.variables.get(_VISIBLE)) is not None:
            found[cluster.name] = {_VISIBLE: own}  # the user has assigned them
    rest = [c for c in clusters if c.device != "cpu" and c.name not in found]
    if gpus and rest:
        for name, devices in _deal(loaded, rest, gpus).items():
            found[name] = {_VISIBLE: ",".join(devices)}
    on_cpu = [c for c in clusters if c.name not in found]
    ranks = sum(c.max_nodes * (1 if c.gpus_per_node == "auto" else c.gpus_per_node) for c in on_cpu)
    for cluster in on_cpu:
        found[cluster.name] = rank_defaults(device="cpu", nproc=ranks, interface=None)
    return found


def _deal(
    loaded: Loaded, clusters: Sequence[ClusterConfig], gpus: list[str]
) -> dict[str, list[str]]:
    # Clusters with auto share the remaining GPUs.
    fixed = {
        c.name: c.gpus_per_node * c.max_nodes for c in clusters if isinstance(c.gpus_per_node, int)
    }
    auto = [c.name for c in clusters if c.name not in fixed]
    left = len(gpus) - sum(fixed.values())
    if left < len(auto):
        needs = [f"{name} {count}" for name, count in fixed.items()]
        needs += [f"{name} at least 1" for name in auto]
        raise ConfigError(
            f"the clusters on this machine need more GPUs than the {len(gpus)} visible ones: "
            + ", ".join(needs),
            where=loaded.where("clusters"),
            fix="lower gpus_per_node, or set device: cpu for a cluster",
            id="gpu.count",
        )
    share, more = divmod(left, len(auto)) if auto else (0, 0)
    counts = fixed | {name: share + (i < more) for i, name in enumerate(auto)}
    found, begin = {}, 0
    for cluster in clusters:
        end = begin + counts[cluster.name]
        found[cluster.name] = gpus[begin:end]
        begin = end
    return found


def refuse_peers(loaded: Loaded) -> None:
    """Refuse addresses that would prevent clusters of engine hivemind from finding each other.

    Raises:
        ConfigError: there is such an address.
    """
    outer = loaded.config.diloco
    if outer is None or outer.engine != "hivemind":
        return
    found = outer.hivemind or HivemindConfig()
    here = [c.name for c in loaded.config.clusters if c.is_here]
    elsewhere = [c.name for c in loaded.config.clusters if not c.is_here]
    if not found.initial_peers:
        raise ConfigError(
            "clusters with engine hivemind need an address to find each other, but none is set",
            where=loaded.where("outer.hivemind.initial_peers", "outer.engine"),
            fix="start `hivemind-dht` on a machine that all clusters can reach, and write the "
            "address that it prints into outer.hivemind.initial_peers; or use engine: hub",
            id="hivemind.peers",
        )
    if elsewhere and all(_LOOPBACK.match(address) for address in found.host_maddrs):
        raise ConfigError(
            f"{', '.join(found.host_maddrs)} is only reachable from its own machine, but "
            f"other machines run {', '.join(elsewhere)}",
            where=loaded.where("outer.hivemind.host_maddrs", "outer.engine"),
            fix="set host_maddrs: [/ip4/0.0.0.0/tcp/0], or a port that firewalls allow",
            id="hivemind.peers",
        )
    fixed = [address for address in found.host_maddrs if not address.endswith("/0")]
    if found.identity_path is not None:
        fixed.append(f"identity_path {found.identity_path}")
    if len(here) > 1 and fixed:
        raise ConfigError(
            f"{', '.join(here)} are on the same machine and would share {', '.join(fixed)}",
            where=loaded.where("outer.hivemind.host_maddrs", "outer.hivemind"),
            fix="delete identity_path, and use port 0, so that each cluster gets a free port",
            id="hivemind.peers",
        )


def hub_place(loaded: Loaded) -> tuple[str, str]:
    """Address on which a hub on this machine listens, and the address for the clusters if it
    differs.

    Raises:
        ConfigError: the address of this machine for the clusters cannot be determined.
    """
    outer = loaded.config.diloco
    assert outer is not None
    public = outer.public or f"{_meeting_address(loaded)}:0"
    return listen_address(public, ""), outer.public or ""


def _meeting_address(loaded: Loaded) -> str:
    clusters = [c for c in loaded.config.clusters if not c.is_here]
    if not clusters:
        return "127.0.0.1"
    for cluster in clusters:
        destinations = [host.address or host.ssh for host in cluster.hosts]
        if isinstance(cluster.launcher, QueueSection) and cluster.launcher.login is not None:
            destinations.append(cluster.launcher.login)
        for destination in destinations:
            name = ssh_config(destination).get("hostname", destination.rpartition("@")[2])
            if (address := _own_address(name)) is not None:
                return address
    if (address := _own_address(_NOWHERE)) is not None:
        return address
    raise ConfigError(
        "cannot determine the address of this machine for the clusters",
        where=loaded.where("outer.public", "outer"),
        fix="set outer.public: HOST:PORT",
        id="hub.address",
    )


def _own_address(host: str) -> str | None:
    # This machine's address on the route to another; None: no route, or the same machine.
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            found = str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the latter: a..b
        return None
    return None if found.startswith("127.") or found == "::1" else found
