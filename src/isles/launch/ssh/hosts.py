"""The hosts of an ssh launcher: reached at once, asked for their facts, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from isles import __version__
from isles.config.sections.cluster import ClusterConfig, HostConfig, SshLauncherConfig
from isles.errors import PreflightError, UserError, ids_of
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.facts import code_digest
from isles.launch.ssh.hosts import Reach, choose_addresses
from isles.launch.ssh.shell import Shell, on_all

Warn = Callable[[str], object]

_ANSWER_S = 30.0
"""Longest wait for a host's facts once ssh has connected; Python may come from a slow disk."""

_BETTER_SAME = ("transformers", "safetensors", "datasets", "peft", "deepspeed")


@dataclass(frozen=True, slots=True, eq=False)
class Host:
    """One host that has answered.

    Args:
        node: its number.
        given: as in the run file.
        channel: to ask it more.
        facts: of `isles.launch.ssh.facts`.
    """

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
    """A conversation with every host, begun at once; `stack` ends them.

    Raises:
        PreflightError: there is no ssh on this machine.
    """
    lines, python = setting_lines(cluster, workdir), python_of(cluster.environment)

    def channel(host: HostConfig) -> Channel:
        shell = Shell(host.ssh, timeout_s)
        return open_channel(shell, lines=lines, python=python, name=host.ssh)

    answers, faults = on_all(cluster.hosts, channel)
    channels = [found for found in answers if found is not None]
    stack.callback(on_all, channels, Channel.close)
    for _, fault in faults:
        raise fault
    return channels


def ask_all(
    channels: Sequence[Channel], op: str, *, timeout_s: float, **args: Any
) -> list[dict[str, Any]]:
    """Ask all the same, at once.

    Raises:
        PreflightError: what is wrong, of every host that has not answered well.
    """
    return gather([(c, c.ask(op, **args)) for c in channels], op, timeout_s)


def gather(
    asked: Sequence[tuple[Channel, Future[dict[str, Any]]]], op: str, timeout_s: float
) -> list[dict[str, Any]]:
    """The answers to questions that were asked already; errors as in `ask_all`."""

    def answer(question: tuple[Channel, Future[dict[str, Any]]]) -> dict[str, Any]:
        channel, future = question
        try:
            return future.result(timeout=timeout_s)
        except NoAnswer:
            raise channel.no_answer(op, timeout_s) from None

    answers, faults = on_all(asked, answer)
    refuse([fault for _, fault in faults], len(asked))
    return [found for found in answers if found is not None]


def refuse(faults: Sequence[UserError], num_hosts: int) -> None:
    """Raise all faults as one; nothing where there are none."""
    if not faults:
        return
    if len(faults) == 1:
        raise faults[0]
    text = "\n".join(f"  {fault}".replace("\n", "\n  ") for fault in faults)
    error = PreflightError(f"{len(faults)} faults on {num_hosts} hosts:\n{text}")
    error.exit_code, error.ids = faults[0].exit_code, ids_of(faults)
    raise error


def meet(
    cluster: ClusterConfig, channels: Sequence[Channel], warn: Warn, needed: Sequence[str]
) -> list[Host]:
    """The facts of all hosts, compared.

    Args:
        cluster: the run file's section.
        channels: to its hosts, in their order.
        needed: packages without which nothing can run there.
        warn: takes what is not as it should be, and no reason to stop.

    Raises:
        PreflightError: hosts that do not answer, lack what training needs, are one machine, or
            differ in what must be equal; all of them together.
    """
    launcher = cluster.launcher
    assert isinstance(launcher, SshLauncherConfig)
    timeout_s = launcher.connect_timeout + _ANSWER_S
    facts = ask_all(channels, "facts", timeout_s=timeout_s, port=cluster.network.port)
    hosts = [
        Host(node, given, channel, fact)
        for node, (given, channel, fact) in enumerate(
            zip(cluster.hosts, channels, facts, strict=True)
        )
    ]
    compare(hosts, needed, warn)
    return hosts


def compare(hosts: Sequence[Host], needed: Sequence[str], warn: Warn) -> None:
    """See whether the hosts are several machines, equal in what must be.

    Raises:
        PreflightError: as in `meet`.
    """
    for host in hosts:
        if host.facts["gpu_warning"]:
            warn(f"host {host.name}: {host.facts['gpu_warning']}")
    refuse([*_duplicates(hosts), *_missing(hosts, needed), *_different(hosts)], len(hosts))
    here = code_digest()
    for host in hosts:
        if host.facts["code"] != here:
            warn(f"host {host.name} has other code of isles {__version__} than this machine")
    for package in _BETTER_SAME:
        _warn_different(hosts, package, warn)


def reach(cluster: ClusterConfig, hosts: Sequence[Host]) -> list[Reach]:
    """The address of every host, as the others take it.

    Raises:
        PreflightError: see `choose_addresses`.
    """
    return choose_addresses(
        [host.name for host in hosts],
        [host.facts for host in hosts],
        [host.given.address for host in hosts],
        cluster.network,
    )


def settle_ranks(
    cluster: ClusterConfig, hosts: Sequence[Host]
) -> tuple[tuple[int, ...], Literal["cuda", "cpu"]]:
    """Ranks of every host, and what they compute on.

    Raises:
        PreflightError: hosts with GPUs beside hosts without, or fewer GPUs than ranks.
    """
    without = [host for host in hosts if not host.facts["gpus"]]
    is_cpu = cluster.device == "cpu" or (cluster.device == "auto" and len(without) == len(hosts))
    if without and not is_cpu:
        names = ", ".join(host.name for host in without)
        raise PreflightError(
            f"there is no GPU on {names}"
            + (", and device is cuda" if cluster.device == "cuda" else ", and there are elsewhere"),
            where=f"host {without[0].name}",
            fix="see nvidia-smi there; leave the host out of the list; or train on the CPUs of "
            "all: clusters.0.device=cpu",
            id="gpu.count",
        )
    ranks, faults = [], []
    for host in hosts:
        asked = host.given.gpus or cluster.gpus_per_node
        num = asked if isinstance(asked, int) else (1 if is_cpu else int(host.facts["gpus"]))
        ranks.append(num)
        if not is_cpu and num > host.facts["gpus"]:
            faults.append(
                PreflightError(
                    f"{num} ranks are asked for, and there are {host.facts['gpus']} GPUs",
                    where=f"host {host.name}",
                    fix="give this host a number of its own in clusters[0].launcher.hosts: "
                    f"{{ssh: {host.name}, gpus: {host.facts['gpus']}}}",
                    id="gpu.count",
                )
            )
    refuse(faults, len(hosts))
    return tuple(ranks), "cpu" if is_cpu else "cuda"


def _duplicates(hosts: Sequence[Host]) -> list[PreflightError]:
    first: dict[str, Host] = {}
    faults = []
    for host in hosts:
        other = first.setdefault(host.facts["machine_id"] or host.name, host)
        if other is not host:
            faults.append(
                PreflightError(
                    f"{other.name} and {host.name} are one machine, {host.facts['host']}",
                    where=f"host {host.name}",
                    fix="name it once; gpus says how many ranks it has",
                    id="host.duplicate",
                )
            )
    return faults


def _missing(hosts: Sequence[Host], needed: Sequence[str]) -> list[PreflightError]:
    faults = []
    for host in hosts:
        missing = [name for name in host.facts["missing"] if name in needed]
        if missing:
            faults.append(
                PreflightError(
                    f"packages are not installed for {host.facts['executable']}: "
                    + ", ".join(missing),
                    where=f"host {host.name}",
                    fix="isles setup run.yaml installs them; or name the right Python in "
                    "clusters[0].environment",
                    id="packages.missing",
                )
            )
    return faults


def _different(hosts: Sequence[Host]) -> list[PreflightError]:
    """Whoever has another isles than this machine, or another Python or torch than most."""
    faults = []
    for host in hosts:
        if host.facts["isles"] != __version__:
            faults.append(_odd(host, "isles", host.facts["isles"], f"{__version__} here"))
    torches = [_version(host, "torch") for host in hosts]
    pythons = [".".join(host.facts["python"].split(".")[:2]) for host in hosts]
    for what, values in (("torch", torches), ("Python", pythons)):
        usual, _ = Counter(values).most_common(1)[0]
        others = [host.name for host, value in zip(hosts, values, strict=True) if value == usual]
        faults += [
            _odd(host, what, value, f"{usual} on {', '.join(others)}")
            for host, value in zip(hosts, values, strict=True)
            if value != usual and not host.facts["missing"]
        ]
    return faults


def _odd(host: Host, what: str, value: str, usual: str) -> PreflightError:
    return PreflightError(
        f"it has {what} {value}, and there is {usual}",
        where=f"host {host.name}",
        fix="make the hosts equal: isles setup run.yaml",
        id=f"version.{what.lower()}",
    )


def _warn_different(hosts: Sequence[Host], package: str, warn: Warn) -> None:
    versions = {host.name: _version(host, package) for host in hosts}
    if len(set(versions.values())) > 1:
        words = ", ".join(f"{version} on {name}" for name, version in versions.items())
        warn(f"the hosts differ in {package}: {words}; isles setup makes them equal")


def _version(host: Host, package: str) -> str:
    return str(host.facts["packages"].get(package, "none"))
