"""What the hosts of an ssh launcher say of themselves, compared; and a run's place on them."""

from __future__ import annotations

import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.sections.cluster import ClusterConfig, NetworkConfig
from isles.errors import ConfigError, PreflightError, UserError
from isles.launch.remote.setup import difference_lines, wheel_bytes, wheel_name
from isles.launch.ssh.environment import network_line, network_variables
from isles.launch.ssh.facts import code_digest, digest_of
from isles.launch.ssh.hosts import Host, choose_addresses, compare, resolve_ranks
from isles.launch.ssh.node import make_place
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from tests.each import each


def facts(name: str, *networks: str, reached: str | None = None, **more: Any) -> dict[str, Any]:
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


def addresses(
    *hosts: dict[str, Any], given: tuple[str | None, ...] = (), interface: str | None = None
) -> list[str]:
    names = [host["host"] for host in hosts]
    network = NetworkConfig(interface=interface)
    reaches = choose_addresses(names, hosts, given or (None,) * len(hosts), network)
    return [f"{reach.interface} {reach.address}" for reach in reaches]


def test_the_network_in_common_over_which_ssh_came() -> None:
    one = facts("one", "ib0 10.9.0.1/24", "eth0 10.0.0.1/24", reached="10.0.0.1")
    two = facts("two", "ib0 10.9.0.2/24", "eno1 10.0.0.2/24", reached="10.0.0.2")
    assert addresses(one, two) == ["eth0 10.0.0.1", "eno1 10.0.0.2"]
    assert addresses(one, two, given=(None, "10.9.0.2")) == ["eth0 10.0.0.1", "ib0 10.9.0.2"]
    names = (one | {"networks": one["networks"]}, two)
    assert addresses(*names, interface="ib0") == ["ib0 10.9.0.1", "ib0 10.9.0.2"]


def test_this_machine_as_a_host_is_no_loopback_for_the_others() -> None:
    here = facts("here", "wlan0 192.168.1.7/24", "docker0 172.17.0.1/16", reached="127.0.0.1")
    two = facts("two", "eth0 192.168.1.8/24", "docker0 172.17.0.1/16", reached="192.168.1.8")
    assert addresses(here, two) == ["wlan0 192.168.1.7", "eth0 192.168.1.8"]
    bridged = here | {"networks": [*here["networks"], facts("", "br0 10.5.0.1/24")["networks"][0]]}
    given = (None, "192.168.1.8")
    assert addresses(bridged, two, given=given) == ["wlan0 192.168.1.7", "eth0 192.168.1.8"]


def test_another_way_than_that_of_the_laptop_if_only_that_is_common() -> None:
    """The laptop reaches each over a tunnel of its own."""
    one = facts("one", "tun0 10.8.0.1/32", "eth0 10.0.0.1/24", reached="10.8.0.1")
    two = facts("two", "tun0 10.8.0.2/32", "eth0 10.0.0.2/24", reached="10.8.0.2")
    assert addresses(one, two) == ["eth0 10.0.0.1", "eth0 10.0.0.2"]


def test_networks_that_are_joined_by_a_router() -> None:
    one = facts("one", "eth0 10.1.0.1/24", reached="10.1.0.1")
    two = facts("two", "eth0 10.2.0.1/24", reached="10.2.0.1")
    assert addresses(one, two) == ["eth0 10.1.0.1", "eth0 10.2.0.1"]


def test_no_address_that_could_be_meant_is_no_guess() -> None:
    one = facts("one", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", reached="127.0.0.1")
    two = facts("two", "eth0 10.2.0.2/24", reached="10.2.0.2")
    with pytest.raises(PreflightError, match=r"not clear .* eth0 10\.0\.0\.1, eth1") as error:
        addresses(one, two)
    assert error.value.where == "host one" and "address: " in error.value.fix


def test_an_interface_that_is_not_there() -> None:
    one = facts("one", "eth0 10.0.0.1/24", reached="10.0.0.1")
    with pytest.raises(PreflightError, match=r"no interface ib0 .* there are: eth0 10\.0\.0\.1"):
        addresses(one, interface="ib0")


def cluster(*hosts: Any, **more: Any) -> ClusterConfig:
    launcher = {"kind": "ssh", "hosts": list(hosts)}
    return ClusterConfig.model_validate({"launcher": launcher, **more})


def answered(section: ClusterConfig, *said: dict[str, Any]) -> list[Host]:
    """The hosts of a cluster with their facts; nothing more is asked of them."""
    nobody: Any = None
    pairs = zip(section.hosts, said, strict=True)
    return [Host(node, given, nobody, fact) for node, (given, fact) in enumerate(pairs)]


def compared(*hosts: dict[str, Any]) -> list[str]:
    """The warnings about these hosts."""
    warnings: list[str] = []
    section = cluster(*(host["host"] for host in hosts))
    compare(answered(section, *hosts), ("torch", "transformers"), warnings.append)
    return warnings


@each(
    ("odd", "what"),
    [
        ({"packages": {"torch": "2.12.0"}}, "it has torch 2.12.0, and there is 2.13.0 on a, c"),
        ({"python": "3.11.9"}, "it has Python 3.11, and there is 3.12 on a, c"),
        ({"isles": "0.0.1"}, f"it has isles 0.0.1, and there is {__version__} here"),
        ({"missing": ["transformers"]}, "packages are not installed for /usr/bin/python3: transf"),
        ({"machine_id": "a"}, "a and b are one machine"),
    ],
)
def test_the_odd_host_out_is_named(odd: dict[str, Any], what: str) -> None:
    with pytest.raises(PreflightError) as error:
        compared(facts("a"), facts("b") | odd, facts("c"))
    assert what in error.value.what
    assert error.value.where == "host b" and error.value.fix


def test_all_faults_at_once() -> None:
    with pytest.raises(PreflightError) as error:
        compared(facts("a"), facts("b", isles="0.0.1"), facts("c", missing=["torch"]))
    assert "2 failures on 3 hosts:" in error.value.what
    assert "host b: it has isles" in error.value.what and "host c: packages" in error.value.what


def test_what_may_differ_is_a_warning() -> None:
    assert compared(facts("a"), facts("b")) == []
    other = {"torch": "2.13.0", "transformers": "5.11"}
    (code, package) = compared(facts("a", code="x"), facts("b", packages=other, python="3.12.9"))
    assert "host a has other code of isles" in code
    assert "the hosts differ in transformers: none on a, 5.11 on b" in package


def ranks(section: ClusterConfig, *gpus: int) -> tuple[tuple[int, ...], str]:
    return resolve_ranks(section, answered(section, *(facts("host", gpus=num) for num in gpus)))


def test_ranks_by_the_gpus_of_each_host() -> None:
    two = ({"ssh": "a", "gpus": 1}, "b")
    assert ranks(cluster("a", "b"), 2, 1) == ((2, 1), "cuda")
    assert ranks(cluster(*two), 2, 4) == ((1, 4), "cuda")
    assert ranks(cluster(*two, gpus_per_node=2), 2, 4) == ((1, 2), "cuda")
    assert ranks(cluster("a", "b"), 0, 0) == ((1, 1), "cpu")
    assert ranks(cluster(*two, gpus_per_node=3, device="cpu"), 4, 0) == ((1, 3), "cpu")


@pytest.mark.parametrize(
    ("section", "gpus", "what"),
    [
        (cluster("a", "b"), (2, 0), "there is no GPU on b, and there are elsewhere"),
        (cluster("a", "b", device="cuda"), (0, 0), "there is no GPU on a, b, and device is cuda"),
        (cluster("a", "b", gpus_per_node=2), (2, 1), "2 ranks are asked for, and there are 1"),
    ],
)
def test_gpus_that_are_not_there(section: ClusterConfig, gpus: tuple[int, ...], what: str) -> None:
    with pytest.raises(PreflightError, match=what):
        ranks(section, *gpus)


def test_unequal_nodes_are_resolved(run_file: Path) -> None:
    loaded = load_run_file(run_file)
    resolved = resolve(loaded, nproc=(2, 1, 1), device="cpu")
    assert (resolved.world_size, resolved.device, resolved.rows_per_rank) == (4, "cpu", 3)
    origin = resolved.origins["derived.world_size"]
    assert origin == "derived: CPU processes of 3 nodes: 2 + 1 + 1"


def test_every_number_of_nodes_that_may_be_left_must_fit(run_file: Path) -> None:
    hosts = "clusters.0.launcher={kind: ssh, hosts: [a, b, c]}"
    tp = "strategy={kind: fsdp, tp_size: 2}"
    loaded = load_run_file(run_file, [hosts, tp, "clusters.0.nodes=1:3"])
    assert resolve(loaded, nproc=(2, 2, 4), device="cpu").world_size == 8
    with pytest.raises(ConfigError, match="there are 3"):
        resolve(loaded, nproc=(2, 2, 3), device="cpu")
    fixed = load_run_file(run_file, [hosts, tp, "clusters.0.nodes=3"])
    assert resolve(fixed, nproc=(2, 1, 5), device="cpu").world_size == 8


@each(
    ("profile", "device", "variables"),
    [
        ("auto", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}),
        ("auto", "cuda", {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}),
        ("ethernet", "cuda", {"NCCL_IB_DISABLE": "1"}),
        ("infiniband", "cuda", {"NCCL_IB_DISABLE": "0"}),
        ("roce", "cuda", {"NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"}),
    ],
)
def test_variables_of_the_network(profile: Any, device: str, variables: dict[str, str]) -> None:
    found = network_variables(NetworkConfig(profile=profile), "eth0", device)
    assert found.items() >= variables.items()
    assert all(name.startswith("GLOO") for name in found) or device == "cuda"
    assert f"network {profile}: " in network_line(NetworkConfig(profile=profile), "eth0", device)


def test_the_named_interface_wins_and_none_is_left_out() -> None:
    named = NetworkConfig(interface="ib0")
    assert network_variables(named, "eth0", "cpu") == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert network_variables(NetworkConfig(), None, "cuda") == {}


Place = Callable[..., bool]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Makes the place of attempt 1 of a run in `tmp_path/host/run-1`."""
    node = FleetNode(node=0, name="a1", ssh="a1", address="10.0.0.1", nproc=1)
    fleet = Fleet("ssh", (node,), 29500, 1, "cpu", 10.0, "digest")
    run_dir = RunDir(tmp_path / "host" / "run-1")

    def make(*, born_at: float = 1.0, begun_at: float = 1.0) -> bool:
        args = {"fleet": fleet.record(), "resolved": "a: 1\n", "text": "b: 2\n", "token": "t"}
        args |= {"born_at": born_at, "begun_at": begun_at}
        return make_place(run_dir, run_dir.attempt(1), args)

    return make


def test_a_place_for_a_run_of_another_host(place: Place, tmp_path: Path) -> None:
    assert not place(), "it is not shared"
    run_dir = RunDir(tmp_path / "host" / "run-1")
    assert run_dir.resolved.read_text() == "a: 1\n" and run_dir.run_file.read_text() == "b: 2\n"
    fleet = read_fleet(run_dir.attempt(1))
    assert fleet is not None and fleet.first.address == "10.0.0.1"


def test_the_head_s_own_folder_is_left_as_it_is(place: Place, tmp_path: Path) -> None:
    attempt = RunDir(tmp_path / "host" / "run-1").attempt(1)
    attempt.path.mkdir(parents=True)
    write_record(attempt.launch, {"attempt": 1, "begun_at": 1.0, "pid": 7})
    assert place(begun_at=1.0)
    assert read_record(attempt.launch) == {"attempt": 1, "begun_at": 1.0, "pid": 7}
    assert not attempt.fleet.exists()


def test_a_run_of_the_host_itself_is_never_written_into(place: Place, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "host" / "run-1")
    run_dir.attempt(1).path.mkdir(parents=True)
    run_dir.resolved.write_text("its own")
    with pytest.raises(UserError, match="a run of its own") as error:
        place()
    assert error.value.where == str(run_dir.path)
    assert run_dir.resolved.read_text() == "its own"


def test_what_an_older_run_has_left_goes_aside(place: Place, tmp_path: Path) -> None:
    place(born_at=1.0)
    run_dir = RunDir(tmp_path / "host" / "run-1")
    run_dir.attempt(1).agent_log.write_text("old")
    assert not place(born_at=2.0, begun_at=2.0)
    assert not run_dir.attempt(1).agent_log.exists()
    (old,) = (tmp_path / "host" / ".old").iterdir()
    assert (old / "attempts" / "001" / "agent.log").read_text() == "old"


def test_a_place_that_many_make_at_once_is_made_once(place: Place, tmp_path: Path) -> None:
    """Nodes that share a disk which the head does not see, or a command that is typed twice."""
    run_dir = RunDir(tmp_path / "host" / "run-1")
    for turn in range(5):
        found: list[bool | Exception] = []
        meet = threading.Barrier(6)

        def make(begun_at: float, found: list[bool | Exception], meet: threading.Barrier) -> None:
            meet.wait()
            try:
                found.append(place(begun_at=begun_at))
            except Exception as error:
                found.append(error)

        threads = [threading.Thread(target=make, args=(turn, found, meet)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(map(type, found)) == {bool}, found
        attempt = run_dir.attempt(1)
        assert (read_record(attempt.launch) or {})["begun_at"] == turn
        assert read_fleet(attempt) is not None
        names = {entry.name for entry in attempt.path.parent.iterdir()} - {".old"}
        assert names == {"001"}


def test_differences_between_hosts() -> None:
    a = {"python": "3.12.1", "torch": "2.13.0", "datasets": "4.4"}
    assert difference_lines({"a": a, "b": a}) == ([], False)
    lines, is_bad = difference_lines({"a": a, "b": a | {"datasets": "4.5", "python": "3.12.4"}})
    assert not is_bad and len(lines) == 2 and all("(this may be)" in line for line in lines)
    lines, is_bad = difference_lines({"a": a, "b": a | {"torch": "2.12.0"}})
    assert is_bad and lines == ["torch differs: 2.13.0 on a, 2.12.0 on b"]
    assert difference_lines({"a": a, "b": a | {"python": "3.11.1"}})[1]


def test_isles_as_a_wheel_is_isles(tmp_path: Path) -> None:
    path = tmp_path / wheel_name()
    path.write_bytes(wheel_bytes())
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(tmp_path)
        files = [(name, wheel.read(name)) for name in wheel.namelist()]
    code = [(name.removeprefix("isles/"), data) for name, data in files if name[:6] == "isles/"]
    look = "from isles.launch.ssh.facts import code_digest as d; import isles; "
    look += "print(d(), isles.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", look],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [digest_of(code), str(tmp_path / "isles" / "__init__.py")]
    info = {name.rpartition("/")[2]: data.decode() for name, data in files if "dist-info" in name}
    assert "isles = isles.cli:main" in info["entry_points.txt"]
    assert "Provides-Extra: train" in info["METADATA"]
    assert len(info["RECORD"].splitlines()) == len(files)
