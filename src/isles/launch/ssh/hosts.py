"""The hosts of an ssh launcher: reached at once, asked for their facts, compared, and addressed."""

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
"""Longest wait for a host's facts once ssh has connected; Python may come from a slow disk."""

_BETTER_SAME = ("transformers", "safetensors", "datasets", "peft", "deepspeed")


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """One host that has answered: its number, its entry in the run file, a channel to ask it more,
    and its facts (`node_facts`)."""

    node: int
    given: HostConfig
    channel: Channel
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """As the run file has it."""
        return self.given.ssh


def connect(
    cluster: ClusterConfig, workdir: str, stack: ExitStack, *, timeout_s: float
) -> list[Channel]:
    """A channel to every host, opened at once; `stack` closes them.

    Raises:
        PreflightError: there is no ssh on this machine.
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
    """The answers to questions to several hosts.

    Raises:
        PreflightError: what is wrong, of every host that has not answered well.
    """
    answers, failures = on_all(asked, lambda pair: pair[0].wait(pair[1], op, timeout_s))
    refuse([failure for _, failure in failures], len(asked))
    return [found for found in answers if found is not None]


def refuse(failures: Sequence[UserError], num_hosts: int) -> None:
    """Raise all failures as one; nothing where there are none."""
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
) -> list[Host]:
    """The facts of all hosts, compared.

    Args:
        warn: takes what is not as it should be, and no reason to stop.
        needed: packages without which nothing can run there.

    Raises:
        PreflightError: hosts that do not answer, lack what training needs, are one machine, or
            differ in what must be equal; all of them together.
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
    hosts = [Host(node, *place) for node, place in enumerate(places)]
    compare(hosts, needed, warn)
    return hosts


def compare(hosts: Sequence[Host], needed: Sequence[str], warn: Warn) -> None:
    """See whether the hosts are several machines, equal in what must be; errors as `ask_facts`."""
    refuse(list(_unfit(hosts, needed)), len(hosts))
    here = code_digest()
    for host in hosts:
        if host.facts["gpu_warning"]:
            warn(f"host {host.name}: {host.facts['gpu_warning']}")
        if host.facts["code"] != here:
            warn(f"host {host.name} has other code of isles {__version__} than this machine")
    for package in _BETTER_SAME:
        versions = {host.name: host.facts["packages"].get(package, "none") for host in hosts}
        if len(set(versions.values())) > 1:
            words = ", ".join(f"{version} on {name}" for name, version in versions.items())
            warn(f"the hosts differ in {package}: {words}; isles setup makes them equal")


def _unfit(hosts: Sequence[Host], needed: Sequence[str]) -> Iterator[PreflightError]:
    first: dict[str, Host] = {}
    for host in hosts:
        facts = host.facts
        other = first.setdefault(facts["machine_id"] or host.name, host)
        if other is not host:
            yield PreflightError(
                f"{other.name} and {host.name} are one machine, {facts['host']}",
                where=f"host {host.name}",
                fix="name it once; gpus says how many ranks it has",
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
                fix="isles setup run.yaml installs them; or name the right Python in "
                "clusters[0].environment",
                id="packages.missing",
            )
        if facts["isles"] != __version__:
            yield _odd(host, "isles", facts["isles"], f"{__version__} here")
    # Another Python or torch than most hosts have.
    torches = [host.facts["packages"].get("torch", "none") for host in hosts]
    pythons = [".".join(host.facts["python"].split(".")[:2]) for host in hosts]
    for what, values in (("torch", torches), ("Python", pythons)):
        usual, _ = Counter(values).most_common(1)[0]
        others = [host.name for host, value in zip(hosts, values, strict=True) if value == usual]
        for host, value in zip(hosts, values, strict=True):
            if value != usual and not host.facts["missing"]:
                yield _odd(host, what, value, f"{usual} on {', '.join(others)}")


def _odd(host: Host, what: str, value: str, usual: str) -> PreflightError:
    return PreflightError(
        f"it has {what} {value}, and there is {usual}",
        where=f"host {host.name}",
        fix="make the hosts equal: isles setup run.yaml",
        id=f"version.{what.lower()}",
    )


def resolve_ranks(
    cluster: ClusterConfig, hosts: Sequence[Host]
) -> tuple[tuple[int, ...], Literal["cuda", "cpu"]]:
    """Ranks of every host, and what they compute on.

    Raises:
        PreflightError: hosts with GPUs beside hosts without, or fewer GPUs than ranks.
    """
    without = [host.name for host in hosts if not host.facts["gpus"]]
    is_cpu = cluster.device == "cpu" or (cluster.device == "auto" and len(without) == len(hosts))
    if without and not is_cpu:
        raise PreflightError(
            f"there is no GPU on {', '.join(without)}"
            + (", and device is cuda" if cluster.device == "cuda" else ", and there are elsewhere"),
            where=f"host {without[0]}",
            fix="see nvidia-smi there; leave the host out of the list; or train on the CPUs of "
            "all: clusters.0.device=cpu",
            id="gpu.count",
        )
    ranks, failures = [], []
    for host in hosts:
        asked, there = host.given.gpus or cluster.gpus_per_node, int(host.facts["gpus"])
        ranks.append(asked if isinstance(asked, int) else 1 if is_cpu else there)
        if not is_cpu and ranks[-1] > there:
            failures.append(
                PreflightError(
                    f"{ranks[-1]} ranks are asked for, and there are {there} GPUs",
                    where=f"host {host.name}",
                    fix="give this host a number of its own in clusters[0].launcher.hosts: "
                    f"{{ssh: {host.name}, gpus: {there}}}",
                    id="gpu.count",
                )
            )
    refuse(failures, len(hosts))
    return tuple(ranks), "cpu" if is_cpu else "cuda"


Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reach:
    """The IPv4 address of one node, the interface that has it and its network; None: the node has
    no such address itself."""

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
        facts: of each host, of `isles.launch.ssh.facts.node_facts`.
        given: what the run file says of each: an address, a name, or None.

    Returns:
        What the run file says; else the address on the interface that it names; else on the one
        network that all have in common, the one over which ssh came if it is one of them; else
        where ssh came.

    Raises:
        PreflightError: a host has no such address, or none at all that others could reach.
    """
    # Docker and its like give every machine the same address, which no other machine reaches.
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
        what = f"there is no interface {network.interface} with an IPv4 address; there are: "
        seen, fix = _all(facts), "correct clusters[0].network.interface, or leave it out"
    else:
        found = [reach for reach in usable if common is not None and reach.network == common]
        came = _of(facts, facts["reached_at"] or "")
        found += [came] if came is not None else usable if len(usable) == 1 else []
        what = "it is not clear at which address the other hosts reach it; it has: "
        seen, fix = usable, "write it into clusters[0].launcher.hosts: "
        fix += f"{{ssh: {name}, address: 192.168.1.100}}"
    if found:
        return found[0]
    what += ", ".join(f"{r.interface} {r.address}" for r in seen) or "none but the loopback"
    raise PreflightError(what, where=f"host {name}", fix=fix, id="net.interface")


def _resolve(given: str, name: str) -> str:
    try:
        return socket.gethostbyname(given)
    except (OSError, UnicodeError):  # the latter: a..b
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


def _common(facts: Sequence[Facts], usable: Sequence[list[Reach]]) -> IPv4Network | None:
    # The network on which all hosts are; the one that ssh took to the most of them first.
    shared = set.intersection(*({r.network for r in own if r.network} for own in usable))
    came = Counter(
        reach.network
        for fact, own in zip(facts, usable, strict=True)
        for reach in own
        if reach.address == fact["reached_at"]
    )
    # A network of one address, such as that of a tunnel, is not shared.
    found = [network for network in shared if network.prefixlen < 32]
    return max(found, key=lambda n: (came[n], n.num_addresses, str(n)), default=None)
