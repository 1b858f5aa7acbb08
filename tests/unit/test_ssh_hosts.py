"""What the hosts of an ssh launcher say of themselves, compared; and a run's place on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.sections.cluster import ClusterConfig, NetworkConfig
from isles.errors import ConfigError, PreflightError, UserError
from isles.launch.remote.setup import difference_lines
from isles.launch.ssh.environment import network_line, network_variables
from isles.launch.ssh.facts import code_digest
from isles.launch.ssh.hosts import Host, choose_addresses, compare, resolve_ranks
from isles.launch.ssh.node import make_place
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from tests.deadline import at_once
from tests.each import each

Facts = dict[str, Any]


def facts(name: str, *networks: str, reached: str | None = None, **more: Any) -> Facts:
    """A host with these networks, each `eth0 10.0.0.1/24`."""
    entries = []
    for text in networks:
        interface, _, rest = text.partition(" ")
        address, _, prefix = rest.partition("/")
        entries.append({"interface": interface, "address": address, "prefix": int(prefix)})
    return {
        "host": name,
        "machine_id": name,
        "isles": __version__,
        "code": code_digest(),
        "python": "3.12.1",
        "packages": {"torch": "2.13.0"},
        "missing": [],
        "executable": "/usr/bin/python3",
        "gpus": 0,
        "gpu_warning": "",
        "networks": entries,
        "reached_at": reached,
        **more,
    }


FAST = (
    facts("one", "ib0 10.9.0.1/24", "eth0 10.0.0.1/24", reached="10.0.0.1"),
    facts("two", "ib0 10.9.0.2/24", "eno1 10.0.0.2/24", reached="10.0.0.2"),
)
DOCKER = "docker0 172.17.0.1/16"
LAPTOP = (
    facts("here", "wlan0 192.168.1.7/24", DOCKER, "br0 10.5.0.1/24", reached="127.0.0.1"),
    facts("two", "eth0 192.168.1.8/24", DOCKER, reached="192.168.1.8"),
)
TUNNELS = (
    facts("one", "tun0 10.8.0.1/32", "eth0 10.0.0.1/24", reached="10.8.0.1"),
    facts("two", "tun0 10.8.0.2/32", "eth0 10.0.0.2/24", reached="10.8.0.2"),
)
ROUTED = (
    facts("one", DOCKER, "eth0 10.1.0.1/24", reached="10.1.0.1"),
    facts("two", DOCKER, "eth0 10.2.0.1/24", reached="10.2.0.1"),
)


def addresses(
    hosts: tuple[Facts, ...], second: str | None = None, interface: str | None = None
) -> list[str]:
    """Interface and address of each; `second`: what the run file says of the second host."""
    names, network = [host["host"] for host in hosts], NetworkConfig(interface=interface)
    given = [None, second][: len(hosts)]
    reaches = choose_addresses(names, hosts, given, network)
    return [f"{reach.interface} {reach.address}" for reach in reaches]


@each(
    ("hosts", "second", "interface", "expected"),
    [
        (FAST, None, None, "eth0 10.0.0.1, eno1 10.0.0.2"),  # of those in common, the one of ssh
        (FAST, "10.9.0.2", None, "eth0 10.0.0.1, ib0 10.9.0.2"),
        (FAST, None, "ib0", "ib0 10.9.0.1, ib0 10.9.0.2"),
        (LAPTOP, None, None, "wlan0 192.168.1.7, eth0 192.168.1.8"),  # no loopback, no docker
        (LAPTOP, "192.168.1.8", None, "wlan0 192.168.1.7, eth0 192.168.1.8"),
        (TUNNELS, None, None, "eth0 10.0.0.1, eth0 10.0.0.2"),  # ssh's tunnels end at the laptop
        (ROUTED, None, None, "eth0 10.1.0.1, eth0 10.2.0.1"),
    ],
)
def test_the_address_at_which_the_others_reach_a_host(
    hosts: tuple[Facts, ...], second: str | None, interface: str | None, expected: str
) -> None:
    assert addresses(hosts, second, interface) == expected.split(", ")


def test_no_address_that_could_be_meant_is_no_guess() -> None:
    one = facts("one", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", reached="127.0.0.1")
    with pytest.raises(PreflightError, match=r"not clear .* eth0 10\.0\.0\.1, eth1") as error:
        addresses((one, facts("two", "eth0 10.2.0.2/24", reached="10.2.0.2")))
    assert error.value.where == "host one" and "address: " in error.value.fix
    with pytest.raises(PreflightError, match=r"no interface ib1 .* there are: ib0 10\.9\.0\.1, "):
        addresses(FAST, interface="ib1")


def cluster(*hosts: Any, **more: Any) -> ClusterConfig:
    launcher = {"kind": "ssh", "hosts": list(hosts)}
    return ClusterConfig.model_validate({"launcher": launcher, **more})


def answered(section: ClusterConfig, *given: Facts) -> list[Host]:
    """The hosts of a cluster with their facts; nothing more is asked of them."""
    nobody: Any = None
    pairs = zip(section.hosts, given, strict=True)
    return [Host(node, host, nobody, fact) for node, (host, fact) in enumerate(pairs)]


def compared(*hosts: Facts) -> list[str]:
    """The warnings about these hosts."""
    warnings: list[str] = []
    section = cluster(*(host["host"] for host in hosts))
    compare(answered(section, *hosts), ("torch", "transformers"), warnings.append)
    return warnings


def test_every_odd_host_out_is_named_with_all_its_failures() -> None:
    with pytest.raises(PreflightError) as error:
        compared(
            facts("a"),
            facts("b", packages={"torch": "2.12.0"}),
            facts("c", python="3.11.9"),
            facts("d", isles="0.0.1"),
            facts("e", missing=["transformers"]),
            facts("f", machine_id="a"),
        )
    assert error.value.what.startswith("5 failures on 6 hosts:")
    for text in (
        "host b: it has torch 2.12.0, and there is 2.13.0 on a, c, d, e, f",
        "host c: it has Python 3.11, and there is 3.12 on a, b, d, e, f",
        f"host d: it has isles 0.0.1, and there is {__version__} here",
        "host e: packages are not installed for /usr/bin/python3: transformers",
        "host f: a and f are one machine, f",
    ):
        assert text in error.value.what
    assert error.value.what.count("fix: ") == 5


def test_what_may_differ_is_a_warning() -> None:
    assert compared(facts("a"), facts("b")) == []
    other = {"torch": "2.13.0", "transformers": "5.11"}
    (code, package) = compared(facts("a", code="x"), facts("b", packages=other, python="3.12.9"))
    assert "host a has other code of isles" in code
    assert "the hosts differ in transformers: none on a, 5.11 on b" in package


ONE_AND_ALL = ({"ssh": "a", "gpus": 1}, "b")


@each(
    ("section", "gpus", "expected"),
    [
        (cluster("a", "b"), (2, 1), ((2, 1), "cuda")),
        (cluster(*ONE_AND_ALL), (2, 4), ((1, 4), "cuda")),
        (cluster(*ONE_AND_ALL, gpus_per_node=2), (2, 4), ((1, 2), "cuda")),
        (cluster("a", "b"), (0, 0), ((1, 1), "cpu")),
        (cluster(*ONE_AND_ALL, gpus_per_node=3, device="cpu"), (4, 0), ((1, 3), "cpu")),
        (cluster("a", "b"), (2, 0), "there is no GPU on b, and there are elsewhere"),
        (cluster("a", "b", device="cuda"), (0, 0), "there is no GPU on a, b, and device is cuda"),
        (cluster("a", "b", gpus_per_node=2), (2, 1), "2 ranks are asked for, and there are 1"),
    ],
)
def test_ranks_by_the_gpus_of_each_host(
    section: ClusterConfig, gpus: tuple[int, ...], expected: tuple[tuple[int, ...], str] | str
) -> None:
    hosts = answered(section, *(facts("host", gpus=num) for num in gpus))
    if isinstance(expected, tuple):
        assert resolve_ranks(section, hosts) == expected
        return
    with pytest.raises(PreflightError, match=expected):
        resolve_ranks(section, hosts)


def test_every_number_of_nodes_that_may_be_left_must_fit(run_file: Path) -> None:
    hosts = "clusters.0.launcher={kind: ssh, hosts: [a, b, c]}"
    tp = "strategy={kind: fsdp, tp_size: 2}"
    loaded = load_run_file(run_file, [hosts, tp, "clusters.0.nodes=1:3"])
    assert resolve(loaded, nproc=(2, 2, 4), device="cpu").world_size == 8
    with pytest.raises(ConfigError, match="there are 3"):
        resolve(loaded, nproc=(2, 2, 3), device="cpu")
    fixed = load_run_file(run_file, [hosts, tp, "clusters.0.nodes=3"])
    assert resolve(fixed, nproc=(2, 1, 5), device="cpu").world_size == 8


IFNAMES = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}


@each(
    ("network", "interface", "device", "variables"),
    [
        ({}, "eth0", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({"profile": "infiniband"}, "eth0", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}),
        ({}, "eth0", "cuda", IFNAMES),
        ({"profile": "ethernet"}, "eth0", "cuda", {**IFNAMES, "NCCL_IB_DISABLE": "1"}),
        ({"profile": "infiniband"}, "eth0", "cuda", {**IFNAMES, "NCCL_IB_DISABLE": "0"}),
        (
            {"profile": "roce"},
            "eth0",
            "cuda",
            {**IFNAMES, "NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"},
        ),
        ({"interface": "ib0"}, "eth0", "cpu", {"GLOO_SOCKET_IFNAME": "ib0"}),
        ({}, None, "cuda", {}),
    ],
)
def test_variables_of_the_network(
    network: dict[str, str], interface: str | None, device: str, variables: dict[str, str]
) -> None:
    section = NetworkConfig.model_validate(network)
    assert network_variables(section, interface, device) == variables
    assert f"network {section.profile}: " in network_line(section, interface, device)


Place = Callable[..., bool]


@pytest.fixture
def host_run(tmp_path: Path) -> RunDir:
    """The folder of a run on a node other than the first."""
    return RunDir(tmp_path / "host" / "run-1")


@pytest.fixture
def place(host_run: RunDir) -> Place:
    """Makes the place of its attempt 1."""
    node = FleetNode(node=0, name="a1", ssh="a1", address="10.0.0.1", nproc=1)
    fleet = Fleet("ssh", (node,), 29500, 1, "cpu", 10.0, "digest")

    def make(*, born_at: float = 1.0, begun_at: float = 1.0) -> bool:
        args: dict[str, Any] = {
            "fleet": fleet.record(),
            "resolved": "a: 1\n",
            "text": "b: 2\n",
            "token": "t",
        }
        args |= {"born_at": born_at, "begun_at": begun_at}
        return make_place(host_run, host_run.attempt(1), args)

    return make


def test_a_place_for_a_run_of_another_host(place: Place, host_run: RunDir) -> None:
    attempt = host_run.attempt(1)
    assert not place(), "it is not shared"
    assert host_run.resolved.read_text() == "a: 1\n" and host_run.run_file.read_text() == "b: 2\n"
    fleet = read_fleet(attempt)
    assert fleet is not None and fleet.first.address == "10.0.0.1"
    # What an older run has left goes aside.
    attempt.agent_log.write_text("old")
    assert not place(born_at=2.0, begun_at=2.0)
    assert not attempt.agent_log.exists()
    (old,) = host_run.path.with_name(".old").iterdir()
    assert (old / "attempts" / "001" / "agent.log").read_text() == "old"


def test_the_first_node_s_own_folder_is_left_as_it_is(place: Place, host_run: RunDir) -> None:
    attempt = host_run.attempt(1)
    attempt.path.mkdir(parents=True)
    launch = {"attempt": 1, "begun_at": 1.0, "pid": 7}
    write_record(attempt.launch, launch)
    assert place(begun_at=1.0)
    assert read_record(attempt.launch) == launch
    assert not attempt.fleet.exists()


def test_a_run_of_the_host_itself_is_never_written_into(place: Place, host_run: RunDir) -> None:
    host_run.attempt(1).path.mkdir(parents=True)
    host_run.resolved.write_text("its own")
    with pytest.raises(UserError, match="a run of its own") as error:
        place()
    assert error.value.where == str(host_run.path)
    assert host_run.resolved.read_text() == "its own"


def test_a_place_that_many_make_at_once_is_made_once(place: Place, host_run: RunDir) -> None:
    # Nodes that share a disk which the first does not see, or a command that is typed twice.
    attempt = host_run.attempt(1)
    found: list[bool | Exception] = []

    def make() -> None:
        try:
            found.append(place(begun_at=begun_at))
        except Exception as error:
            found.append(error)

    for begun_at in range(5):
        at_once(6, make)
        assert set(map(type, found)) == {bool}, found
        assert (read_record(attempt.launch) or {})["begun_at"] == begun_at
        assert read_fleet(attempt) is not None
        assert {entry.name for entry in attempt.path.parent.iterdir()} - {".old"} == {"001"}


def test_differences_between_hosts() -> None:
    a = {"python": "3.12.1", "torch": "2.13.0", "datasets": "4.4"}
    assert difference_lines({"a": a, "b": a}) == ([], False)
    lines, is_bad = difference_lines({"a": a, "b": a | {"datasets": "4.5", "python": "3.12.4"}})
    assert not is_bad and len(lines) == 2 and all("(this may be)" in line for line in lines)
    lines, is_bad = difference_lines({"a": a, "b": a | {"torch": "2.12.0"}})
    assert is_bad and lines == ["torch differs: 2.13.0 on a, 2.12.0 on b"]
    assert difference_lines({"a": a, "b": a | {"python": "3.11.1"}})[1]
