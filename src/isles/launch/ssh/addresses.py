"""At which address the nodes of a run reach one another, of all that each of them has."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network
from typing import Any

from isles.config.sections.cluster import NetworkConfig
from isles.errors import PreflightError

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reach:
    """How one node is reached.

    Args:
        address: IPv4.
        interface: the node's interface that has it; None: the node has no such address itself.
        network: the network that it belongs to there.
    """

    address: str
    interface: str | None
    network: IPv4Network | None


def choose_addresses(
    names: Sequence[str],
    facts: Sequence[Facts],
    given: Sequence[str | None],
    network: NetworkConfig,
) -> list[Reach]:
    """An address for every node that the others can be expected to reach.

    Args:
        names: of the hosts, for messages.
        facts: of each, of `isles.launch.ssh.facts`.
        given: what the run file says: an address, a name, or None.
        network: the run file's section; an interface that it names decides.

    Returns:
        What the run file says; else the address on the interface that it names; else on the one
        network that all have in common, the one over which ssh came if it is one of them; else
        where ssh came.

    Raises:
        PreflightError: a host has no such address, or none at all that others could reach.
    """
    usable = _without_private_bridges(facts)
    common = _common(facts, usable)
    return [
        _reach(name, fact, own, address, network, common)
        for name, fact, own, address in zip(names, facts, usable, given, strict=True)
    ]


def _reach(
    name: str,
    facts: Facts,
    usable: list[Reach],
    given: str | None,
    network: NetworkConfig,
    common: IPv4Network | None,
) -> Reach:
    if given is not None:
        address = _resolve(given, name)
        return _of(facts, address) or Reach(address, network.interface, None)
    if network.interface is not None:
        for reach in _all(facts):
            if reach.interface == network.interface:
                return reach
        there = ", ".join(f"{r.interface} {r.address}" for r in _all(facts)) or "none"
        raise PreflightError(
            f"there is no interface {network.interface} with an IPv4 address; there are: {there}",
            where=f"host {name}",
            fix="correct clusters[0].network.interface, or leave it out",
            id="net.interface",
        )
    for reach in usable:
        if common is not None and reach.network == common:
            return reach
    came = _of(facts, facts["reached_at"] or "")
    if came is not None or len(usable) == 1:
        return came or usable[0]
    there = ", ".join(f"{r.interface} {r.address}" for r in usable) or "none but the loopback"
    raise PreflightError(
        f"it is not clear at which address the other hosts reach it; it has: {there}",
        where=f"host {name}",
        fix=f"write it into clusters[0].launcher.hosts: {{ssh: {name}, address: 192.168.1.100}}",
        id="net.interface",
    )


def _resolve(given: str, name: str) -> str:
    try:
        return str(IPv4Address(given))
    except AddressValueError:
        pass
    try:
        return socket.gethostbyname(given)
    except OSError:
        raise PreflightError(
            f"no IPv4 address is known for {given}",
            where=f"host {name}, clusters[0].launcher.hosts",
            fix="write its address in numbers, such as 192.168.1.100",
            id="net.names",
        ) from None


def _all(facts: Facts) -> list[Reach]:
    return [
        Reach(
            entry["address"],
            entry["interface"],
            IPv4Network(f"{entry['address']}/{entry['prefix']}", strict=False),
        )
        for entry in facts["networks"]
    ]


def _of(facts: Facts, address: str) -> Reach | None:
    return next((reach for reach in _all(facts) if reach.address == address), None)


def _without_private_bridges(facts: Sequence[Facts]) -> list[list[Reach]]:
    """Docker and its like give every machine the same address: no other machine reaches that."""
    count = Counter(reach.address for fact in facts for reach in set(_all(fact)))
    return [[reach for reach in _all(fact) if count[reach.address] == 1] for fact in facts]


def _common(facts: Sequence[Facts], usable: Sequence[list[Reach]]) -> IPv4Network | None:
    """The network on which all hosts are; the one that ssh took to the most of them first."""
    shared = set.intersection(*({r.network for r in own if r.network} for own in usable))
    came = Counter(
        reach.network
        for fact, own in zip(facts, usable, strict=True)
        for reach in own
        if reach.address == fact["reached_at"]
    )
    # A network of one address, such as that of a tunnel, is nobody's in common.
    found = [network for network in shared if network.prefixlen < 32]
    return max(found, key=lambda n: (came[n], n.num_addresses, str(n)), default=None)
