"""Connections of hosts: addresses and interfaces, and the hub or the bucket of clusters."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from isles.check.finding import Finding
from isles.check.plan import Hosts
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import MissingDependencyError, PreflightError
from isles.facts.buckets import FIXES
from isles.launch.answers import parse_answer
from isles.launch.hub import own_addresses, split_address
from isles.launch.ssh.hosts import Reach, choose_addresses
from isles.run.objects import StoreError, call_with_timeout, open_store, probe

_CONNECT_S, _BUCKET_S = 5.0, 12.0
_FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SBIN = os.pathsep.join((os.defpath, "/usr/sbin", "/sbin", "/usr/local/sbin"))


@dataclass(frozen=True, slots=True)
class Interface:
    """An IPv4 address of a node, and its interface.

    Args:
        mtu: largest packet, bytes. 0: unknown.
        is_leased: whether the address is from DHCP.
    """

    name: str
    address: str
    netmask: str
    mtu: int
    is_leased: bool
    is_wireless: bool


@dataclass(frozen=True, slots=True)
class _Address:
    local: str = ""
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class _Link:
    # A link in the output of `ip -j`.
    addr_info: tuple[_Address, ...] = ()


def interfaces() -> list[Interface]:
    leased, stats = _leased(), psutil.net_if_stats()
    return [
        Interface(
            name,
            own.address,
            own.netmask or "255.255.255.255",
            stats[name].mtu if name in stats else 0,
            own.address in leased,
            Path(f"/sys/class/net/{name}/wireless").exists(),
        )
        for name, addresses in psutil.net_if_addrs().items()
        for own in addresses
        if own.family == socket.AF_INET
    ]


def _leased() -> set[str]:
    command = shutil.which("ip", path=_SBIN)
    if command is None:
        return set()
    try:
        answer = subprocess.run(
            [command, "-j", "-4", "addr"], capture_output=True, text=True, timeout=3, check=True
        ).stdout
        links = parse_answer(tuple[_Link, ...], answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return set()
    return {
        address.local
        for link in links
        for address in link.addr_info
        if address.dynamic and address.local
    }


def firewalls() -> list[str]:
    """Installed firewall programs of this node, the usual one first."""
    return [name for name in _FIREWALLS if shutil.which(name, path=_SBIN)]


def interface_of(hosts: Hosts, name: str) -> Interface | None:
    """The interface with the address of a host for ranks. None: no interface has it."""
    address = hosts.reach[name].address
    known = (Interface(**own) for own in hosts.facts[name]["interfaces"])
    return next((own for own in known if own.address == address), None)


def choose_reach(hosts: Hosts) -> Iterator[Finding]:
    """Choose the addresses for the ranks, and yield findings on their interfaces."""
    names, cluster = hosts.names, hosts.run.cluster
    if len(hosts.facts) == 1:
        hosts.reach = {name: Reach("127.0.0.1", None, None) for name in names}
        return
    given = {host.ssh: host.address for host in cluster.hosts}
    facts = [hosts.facts[name] for name in names]
    try:
        found = choose_addresses(names, facts, [given.get(name) for name in names], cluster.network)
    except PreflightError as error:
        yield Finding("net.interface", "error", error.where, error.what, fix=error.fix)
        return
    hosts.reach = dict(zip(names, found, strict=True))
    own = {name: interface_of(hosts, name) for name in names}
    for name in names:
        yield _carrier(name, hosts.reach[name], own[name], cluster.network.interface)
    mtus = {name: carrier.mtu for name, carrier in own.items() if carrier and carrier.mtu}
    usual = max(mtus.values(), default=0)
    for name, mtu in mtus.items():
        if mtu == usual:
            continue
        text = f"its largest packet is {mtu} bytes, and {usual} on other hosts"
        fix = f"on {name}: sudo ip link set {hosts.reach[name].interface} mtu {usual}, if the "
        fix += "switch supports it; otherwise use the smaller value on all hosts"
        yield Finding("net.mtu", "warning", name, text, str(mtu), str(usual), fix)


def _carrier(name: str, reach: Reach, own: Interface | None, wanted: str | None) -> Finding:
    address = reach.address
    if own is None:
        text = f"none of its interfaces has the address {address}: a router may be in between"
        fix = "allow every port through the router, or set an address of the host: "
        fix += f"{{ssh: {name}, address: …}}"
        return Finding("net.interface", "warning", name, text, address, fix=fix)
    text, measured = f"{address} on {wanted or reach.interface}", f"{address} on {own.name}"
    if not own.is_wireless:
        return Finding("net.interface", "ok", name, text, measured)
    text += ", which is wireless, and so slow and lossy"
    fix = "use a cable, or expect few steps per minute"
    return Finding("net.interface", "warning", name, text, measured, fix=fix)


def connect(address: str, port: int, timeout_s: float) -> socket.socket | str:
    """Connect. Returns the socket or a reason: refused, dropped, or an error of the system."""
    try:
        return socket.create_connection((address, port), timeout=timeout_s)
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "dropped"
    except OSError as error:
        # A firewall that rejects connections may cause either error.
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
            return f"refused: {error.strerror}"
        return error.strerror or str(error)


def dial(address: str, port: int, timeout_s: float) -> dict[str, Any]:
    """Connect and close. Returns `state`, which is ok or an error of `connect`, and `seconds`."""
    begin = time.perf_counter()
    found = connect(address, port, timeout_s)
    seconds = time.perf_counter() - begin
    if isinstance(found, str):
        return {"state": found, "seconds": seconds}
    found.close()
    return {"state": "ok", "seconds": seconds}


def try_hub(hosts: Hosts) -> None:
    """Connect to the hub, or write to the bucket, from the first host, as its rank 0 will do."""
    config = hosts.run.config
    outer = config.diloco if config is not None else None
    if outer is None or not hosts.names:
        return
    try_bucket(hosts)
    if outer.hub is None:
        return
    first = hosts.names[0]
    host, port = split_address(outer.hub, "outer.hub")
    args = {"address": host, "port": port, "timeout_s": _CONNECT_S}
    asked = hosts.ask("dial", args, only=[first], finding_id="net.hub")
    if (answer := asked().get(first)) is not None:
        hosts.findings.append(hub_finding(first, outer, answer))


def dial_bucket(url: str) -> dict[str, Any]:
    """Write a test object to the bucket of the clusters, as clusters do when they start.

    Returns:
        `state` (ok, or the kind of a `StoreError`), `what` (its message) and `seconds`.
    """
    begin = time.perf_counter()

    def write() -> bool:
        store = open_store(url, f"outer.url {url}")
        probe(store)
        return bool(store.names("journal/"))

    try:
        has_run = call_with_timeout(_BUCKET_S, write, "its answer")
    except StoreError as error:
        return {"state": error.kind, "what": error.what}
    except MissingDependencyError as error:
        return {"state": "package", "what": error.what, "fix": error.fix}
    except TimeoutError as error:
        return {"state": "away", "what": f"no response ({error})"}
    return {"state": "ok", "seconds": time.perf_counter() - begin, "has_run": has_run}


def try_bucket(hosts: Hosts) -> None:
    """Write to the bucket of the clusters, from the first host or the login node."""
    config = hosts.run.config
    outer = config.diloco if config is not None else None
    if config is None or outer is None or outer.engine != "bucket" or outer.url is None:
        return
    url = outer.url
    first, name = hosts.names[0], config.name.removesuffix(f"-{config.clusters[0].name}")
    place = f"{url.rstrip('/')}/{name}"
    asked = hosts.ask("dial_bucket", {"url": place}, only=[first], finding_id="net.hub")
    if (answer := asked().get(first)) is not None:
        hosts.findings.append(bucket_finding(first, place, answer))


def bucket_finding(first: str, place: str, answer: Mapping[str, Any]) -> Finding:
    """Finding for the answer of `dial_bucket` on the first host."""
    state = str(answer["state"])
    if state == "ok":
        taken = f"{answer['seconds'] * 1e3:.0f} ms"
        text = f"can read and write {place}"
        if answer.get("has_run"):
            text += ", which already has a run: clusters with this name join that run"
        return Finding("net.hub", "ok", first, text, measured=taken)
    fix = str(answer.get("fix") or FIXES.get(state, ""))
    text = f"cannot use {place} to meet other clusters: {answer.get('what')}"
    return Finding("net.hub", "error", first, text, measured=state, fix=fix)


def hub_finding(first: str, outer: DiLoCoConfig, answer: Mapping[str, Any]) -> Finding:
    """Finding for the answer of `dial` on the first host."""
    address, state = outer.hub or "", str(answer["state"])
    if state == "ok":
        taken = f"{answer['seconds'] * 1e3:.0f} ms"
        text = f"can connect to the hub at {address}"
        return Finding("net.hub", "ok", first, text, measured=taken)
    host, _, port = address.rpartition(":")
    place = "this machine" if host.strip("[]") in own_addresses() else host
    open_it = f"open port {port} on {place}, for example with sudo ufw allow {port}/tcp"
    if state == "refused":
        why = "the hub is not running, or a firewall refuses"
        fix = f"check that `isles hub` is running; {open_it}"
    elif state == "dropped":
        why = f"no answer within {_CONNECT_S:.0f} s, as if a firewall drops packets"
        fix = open_it
    else:
        why, fix = state, f"check the address {host}, and that the network reaches it"
    if outer.engine == "hub":
        fix += "; or set outer.public to an address that the host reaches, or run the hub elsewhere"
    text = f"cannot connect to the hub at {address}: {why}"
    return Finding("net.hub", "error", first, text, measured=state, fix=fix)
