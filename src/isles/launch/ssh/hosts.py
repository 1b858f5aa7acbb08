"""The hosts of an ssh launcher: connected in parallel, queried for facts, compared, and
addressed."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any, Literal

from isles import __version__
from isles.config.sections.cluster import (
    ClusterConfig,
    HostConfig,
    NetworkConfig,
    SshLauncherConfig,
)
from isles.config.sections.run import RunConfig
from isles.errors import PreflightError, UserError, ids_of
from isles.launch.container.enter import container_record
from isles.launch.container.image import ANSWER_S, image_failure
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.facts import code_digest
from isles.launch.ssh.shell import Shell, on_all

Warn = Callable[[str], object]

_ANSWER_S = 30.0
"""Longest wait for a host's facts after ssh has connected; Python may be on a slow disk."""

_BETTER_SAME = ("transformers", "safetensors", "datasets", "peft", "deepspeed")


@dataclass(frozen=True, slots=True, eq=False)
class SshHost:
    """A connected host: its number, its entry in the run file, its channel, and its facts
    (`node_facts`)."""

    node: int
    given: HostConfig
    channel: Channel
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the host in the run file."""
        return self.given.ssh


def connect(
    cluster: ClusterConfig, workdir: str, stack: ExitStack, *, timeout_s: float
) -> list[Channel]:
    """Channels to all hosts, opened in parallel; `stack` closes them.

    Raises:
        PreflightError: this machine has no ssh.
    """
    lines, python = setting_lines(cluster, workdir), python_of(cluster.environment)

    def channel(host: HostConfig) -> Channel:
        return open_channel(Shell(host.ssh, timeout_s), lines=lines, python=python)

    answers, failures = on_all(cluster.hosts, channel)
    channels = [found for found in answers if found is not None]
    stack.callback(on_all, channels, Channel.close)
    for _, failure in failures:
        raise failure
    return channels


def gather(
    asked: Sequence[tuple[Channel, Future[dict[str, Any]]]], op: str, timeout_s: float
) -> list[dict[str, Any]]:
    """The answers to requests to several hosts.

    Raises:
        PreflightError: the errors of all hosts that failed.
    """
    answers, failures = on_all(asked, lambda pair: pair[0].wait(pair[1], op, timeout_s))
    refuse([failure for _, failure in failures], len(asked))
    return [found for found in answers if found is not None]


def refuse(failures: Sequence[UserError], num_hosts: int) -> None:
    """Raise all failures as one error; does nothing if there are no failures."""
    if not failures:
        return
    if len(failures) == 1:
        raise failures[0]
    text = "\n".join(f"  {failure}".replace("\n", "\n  ") for failure in failures)
    error = PreflightError(f"{len(failures)} failures on {num_hosts} hosts:\n{text}")
    error.exit_code, error.ids = failures[0].exit_code, ids_of(failures)
    raise error


def ask_facts(
    config: RunConfig, channels: Sequence[Channel], warn: Warn, needed: Sequence[str]
) -> list[SshHost]:
    """The facts of all hosts, compared.

    Args:
        warn: prints a warning about differences that need not stop the start.
        needed: packages that must be installed.

    Raises:
        PreflightError: hosts that do not answer, lack packages for training, are the same machine,
            or
            differ in versions that must be equal; all errors together.
    """
    cluster = config.clusters[0]
    launcher = cluster.launcher
    assert isinstance(launcher, SshLauncherConfig)
    container = container_record(cluster, config)
    question = {"port": cluster.network.port, "container": container}
    asked = [(channel, channel.ask("facts", **question)) for channel in channels]
    limit_s = _ANSWER_S if container is None else ANSWER_S
    facts = gather(asked, "facts", launcher.connect_timeout + limit_s)
    places = zip(cluster.hosts, channels, facts, strict=True)
    hosts = [SshHost(node, *place) for node, place in enumerate(places)]
    compare(hosts, needed, warn)
    return hosts


def compare(hosts: Sequence[SshHost], needed: Sequence[str], warn: Warn) -> None:
    """Check that the hosts are different machines with equal versions; errors as in `ask_facts`."""
    refuse(list(_unfit(hosts, needed)), len(hosts))
    here = code_digest()
    for host in hosts:
        if host.facts["gpu_warning"]:
            warn(f"host {host.name}: {host.facts['gpu_warning']}")
        if host.facts["code"] != here:
            warn(f"the code of isles {__version__} on host {host.name} differs from this machine's")
    for package in _BETTER_SAME:
        versions = {host.name: host.facts["packages"].get(package, "none") for host in hosts}
        if len(set(versions.values())) > 1:
            words = ", ".join(f"{version} on {name}" for name, version in versions.items())
            warn(f"the hosts differ in {package}: {words} (isles setup makes them equal)")


def _unfit(hosts: Sequence[SshHost], needed: Sequence[str]) -> Iterator[PreflightError]:
    first: dict[str, SshHost] = {}
    for host in hosts:
        facts = host.facts
        other = first.setdefault(facts["machine_id"] or host.name, host)
        if other is not host:
            yield PreflightError(
                f"{other.name} and {host.name} are the same machine, {facts['host']}",
                where=f"host {host.name}",
                fix="list it once, and set its number of ranks with gpus",
                id="host.duplicate",
            )
        if (image := facts.get("image")) is not None:
            if (failure := image_failure(facts, image, needed)) is not None:
                failure.where = f"host {host.name}"
                yield failure
            continue
        if missing := [name for name in facts["missing"] if name in needed]:
            yield PreflightError(
                f"packages are not installed for {facts['executable']}: {', '.join(missing)}",
                where=f"host {host.name}",
                fix="run isles setup run.yaml, which installs them; or set the right Python in "
                "clusters.0.environment",
                id="packages.missing",
            )
        if facts["isles"] != __version__:
            yield _odd(host, "isles", facts["isles"], f"{__version__}, as on this machine")
    # A version of Python or torch that differs from most hosts.
    torches = [host.facts["packages"].get("torch", "none") for host in hosts]
    pythons = [".".join(host.facts["python"].split(".")[:2]) for host in hosts]
    for what, values in (("torch", torches), ("Python", pythons)):
        usual, _ = Counter(values).most_common(1)[0]
        others = [host.name for host, value in zip(hosts, values, strict=True) if value == usual]
        for host, value in zip(hosts, values, strict=True):
            if value != usual and not host.facts["missing"]:
                yield _odd(host, what, value, f"{usual} on {', '.join(others)}")


def _odd(host: SshHost, what: str, value: str, usual: str) -> PreflightError:
    return PreflightError(
        f"it has {what} {value} instead of {usual}",
        where=f"host {host.name}",
        fix="make the hosts equal with isles setup run.yaml",
        id=f"version.{what.lower()}",
    )


def resolve_ranks(
    cluster: ClusterConfig, hosts: Sequence[SshHost]
) -> tuple[tuple[int, ...], Literal["cuda", "cpu"]]:
    """Number of ranks of every host, and their device.

    Raises:
        PreflightError: some hosts have GPUs and others do not, or a host has fewer GPUs than ranks.
    """
    without = [host.name for host in hosts if not host.facts["gpus"]]
    is_cpu = cluster.device == "cpu" or (cluster.device == "auto" and len(without) == len(hosts))
    if without and not is_cpu:
        raise PreflightError(
            f"no GPU found on {', '.join(without)}"
            + (
                ", but device is cuda"
                if cluster.device == "cuda"
                else ", but other hosts have GPUs"
            ),
            where=f"host {without[0]}",
            fix="check nvidia-smi there. To train without these hosts, remove them from the list; "
            "to train on all CPUs, set clusters.0.device=cpu",
            id="gpu.count",
        )
    ranks, failures = [], []
    for host in hosts:
        asked, there = host.given.gpus or cluster.gpus_per_node, int(host.facts["gpus"])
        ranks.append(asked if isinstance(asked, int) else 1 if is_cpu else there)
        if not is_cpu and ranks[-1] > there:
            failures.append(
                PreflightError(
                    f"the run file requests {ranks[-1]} ranks, but the host has {there} GPUs",
                    where=f"host {host.name}",
                    fix="set the number of this host in clusters.0.launcher.hosts to "
                    f"{{ssh: {host.name}, gpus: {there}}}",
                    id="gpu.count",
                )
            )
    refuse(failures, len(hosts))
    return tuple(ranks), "cpu" if is_cpu else "cuda"


Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reach:
    """The IPv4 address of a node, its interface and its network; None: the node itself does not
    have this address."""

    address: str
    interface: str | None
    network: IPv4Network | None


def choose_addresses(
    names: Sequence[str],
    facts: Sequence[Facts],
    given: Sequence[str | None],
    network: NetworkConfig,
) -> list[Reach]:
    """An address for every node that the other nodes can probably reach.

    Args:
        facts: of each host, from `isles.launch.ssh.facts.node_facts`.
        given: entry of the run file for each host: an address, a name, or None.

    Returns:
        The entry of the run file; else the address on the interface of the run file; else the
        address
        on the network that all hosts share, preferably the network of the ssh connection; else the
        address of the ssh connection.

    Raises:
        PreflightError: a host has no such address, or no address that others could reach.
    """
    # Docker and similar tools give every machine the same address, unreachable for the others.
    count = Counter(reach.address for fact in facts for reach in set(_all(fact)))
    usable = [[reach for reach in _all(fact) if count[reach.address] == 1] for fact in facts]
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
        found = [reach for reach in _all(facts) if reach.interface == network.interface]
        what = f"no interface {network.interface} with an IPv4 address; the host has: "
        seen, fix = _all(facts), "correct clusters.0.network.interface, or delete it"
    else:
        found = [reach for reach in usable if common is not None and reach.network == common]
        came = _of(facts, facts["reached_at"] or "")
        found += [came] if came is not None else usable if len(usable) == 1 else []
        what = "it is unclear which address the other hosts can reach; the host has: "
        seen, fix = usable, "set the address in clusters.0.launcher.hosts, such as "
        fix += f"{{ssh: {name}, address: 192.168.1.100}}"
    if found:
        return found[0]
    what += ", ".join(f"{r.interface} {r.address}" for r in seen) or "only the loopback"
    raise PreflightError(what, where=f"host {name}", fix=fix, id="net.interface")


def _resolve(given: str, name: str) -> str:
    try:
        return socket.gethostbyname(given)
    except (OSError, UnicodeError):  # the latter: a..b
        raise PreflightError(
            f"no IPv4 address found for {given}",
            where=f"host {name}, clusters.0.launcher.hosts",
            fix="write its IPv4 address, such as 192.168.1.100",
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


def _common(facts: Sequence[Facts], usable: Sequence[list[Reach]]) -> IPv4Network | None:
    # The network that all hosts share; preferably the network of most ssh connections.
    shared = set.intersection(*({r.network for r in own if r.network} for own in usable))
    came = Counter(
        reach.network
        for fact, own in zip(facts, usable, strict=True)
        for reach in own
        if reach.address == fact["reached_at"]
    )
    # A network with one address, such as a tunnel's, is not shared.
    found = [network for network in shared if network.prefixlen < 32]
    return max(found, key=lambda n: (came[n], n.num_addresses, str(n)), default=None)
