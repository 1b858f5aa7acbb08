"""A start over ssh: what hosts say of themselves, a run's place there, and this machine's side."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isles import __version__
from isles.config.load import Loaded, load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.cluster import ClusterConfig, NetworkConfig, SyncConfig
from isles.errors import ConfigError, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.remote import setup as launch_setup
from isles.launch.remote.login import remember
from isles.launch.remote.sync import rsync_argv
from isles.launch.ssh import environment
from isles.launch.ssh import start as launch_ssh
from isles.launch.ssh.channel import READY
from isles.launch.ssh.facts import code_digest
from isles.launch.ssh.hosts import SshHost, choose_addresses, compare, resolve_ranks
from isles.launch.ssh.node import make_place
from isles.launch.ssh.shell import Shell
from isles.run.nodes import Fleet, FleetNode, read_fleet
from isles.run.paths import RunDir
from isles.run.records import read_record, write_record
from isles.run.remote import RemoteRun, list_remotes
from tests.deadline import DEADLINE_S, at_once, run_program
from tests.each import each
from tests.programs import write_program

Facts = dict[str, Any]


def facts(name: str, *networks: str, reached: str | None = None, **more: Any) -> Facts:
    """A host with these networks, each `eth0 10.0.0.1/24`."""
    keys = ("interface", "address", "prefix")
    entries = [dict(zip(keys, re.split("[ /]", text), strict=True)) for text in networks]
    own = {"host": name, "machine_id": name, "networks": entries, "reached_at": reached}
    own |= {"isles": __version__, "code": code_digest(), "gpus": 0, "gpu_warning": ""}
    own |= {"python": "3.12.1", "executable": "/usr/bin/python3"}
    return {**own, "packages": {"torch": "2.13.0"}, "missing": [], **more}


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
    hosts: tuple[Facts, Facts], second: str | None = None, interface: str | None = None
) -> str:
    """Interface and address of each; `second`: what the run file says of the second host."""
    names, network = [host["host"] for host in hosts], NetworkConfig(interface=interface)
    reaches = choose_addresses(names, hosts, [None, second], network)
    return ", ".join(f"{reach.interface} {reach.address}" for reach in reaches)


@each(
    (FAST, None, None, "eth0 10.0.0.1, eno1 10.0.0.2"),  # of those in common, the one of ssh
    (FAST, "10.9.0.2", None, "eth0 10.0.0.1, ib0 10.9.0.2"),
    (FAST, None, "ib0", "ib0 10.9.0.1, ib0 10.9.0.2"),
    (LAPTOP, None, None, "wlan0 192.168.1.7, eth0 192.168.1.8"),  # no loopback, no docker
    (LAPTOP, "192.168.1.8", None, "wlan0 192.168.1.7, eth0 192.168.1.8"),
    (TUNNELS, None, None, "eth0 10.0.0.1, eth0 10.0.0.2"),  # ssh's tunnels end at the laptop
    (ROUTED, None, None, "eth0 10.1.0.1, eth0 10.2.0.1"),
)
def test_the_address_at_which_the_others_reach_a_host(hosts, second, interface, expected):
    assert addresses(hosts, second, interface) == expected


def test_no_address_that_could_be_meant_is_no_guess() -> None:
    one = facts("one", "eth0 10.0.0.1/24", "eth1 10.1.0.1/24", reached="127.0.0.1")
    with pytest.raises(PreflightError, match=r"unclear .* eth0 10\.0\.0\.1, eth1") as error:
        addresses((one, facts("two", "eth0 10.2.0.2/24", reached="10.2.0.2")))
    assert error.value.where == "host one" and "address: " in error.value.fix
    with pytest.raises(
        PreflightError, match=r"no interface ib1 .* the host has: ib0 10\.9\.0\.1, "
    ):
        addresses(FAST, interface="ib1")


def cluster(*hosts: Any, **more: Any) -> ClusterConfig:
    launcher = {"kind": "ssh", "hosts": list(hosts)}
    return ClusterConfig.model_validate({"launcher": launcher, **more})


def answered(section: ClusterConfig, *given: Facts) -> list[SshHost]:
    """The hosts of a cluster with their facts; nothing more is asked of them."""
    nobody: Any = None
    pairs = zip(section.hosts, given, strict=True)
    return [SshHost(node, host, nobody, fact) for node, (host, fact) in enumerate(pairs)]


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
        "host b: it has torch 2.12.0 instead of 2.13.0 on a, c, d, e, f",
        "host c: it has Python 3.11 instead of 3.12 on a, b, d, e, f",
        f"host d: it has isles 0.0.1 instead of {__version__}, as on this machine",
        "host e: packages are not installed for /usr/bin/python3: transformers",
        "host f: a and f are the same machine, f",
    ):
        assert text in error.value.what
    assert error.value.what.count("fix: ") == 5


def test_what_may_differ_is_a_warning() -> None:
    assert compared(facts("a"), facts("b")) == []
    other = {"torch": "2.13.0", "transformers": "5.11"}
    (code, package) = compared(facts("a", code="x"), facts("b", packages=other, python="3.12.9"))
    assert "on host a differs" in code
    assert "the hosts differ in transformers: none on a, 5.11 on b" in package


ONE_AND_ALL = ({"ssh": "a", "gpus": 1}, "b")


@each(
    (cluster("a", "b"), (2, 1), ((2, 1), "cuda")),
    (cluster(*ONE_AND_ALL), (2, 4), ((1, 4), "cuda")),
    (cluster(*ONE_AND_ALL, gpus_per_node=2), (2, 4), ((1, 2), "cuda")),
    (cluster("a", "b"), (0, 0), ((1, 1), "cpu")),
    (cluster(*ONE_AND_ALL, gpus_per_node=3, device="cpu"), (4, 0), ((1, 3), "cpu")),
    (cluster("a", "b"), (2, 0), "no GPU found on b, but other hosts have GPUs"),
    (cluster("a", "b", device="cuda"), (0, 0), "no GPU found on a, b, but device is cuda"),
    (cluster("a", "b", gpus_per_node=2), (2, 1), "requests 2 ranks, but the host has 1"),
)
def test_ranks_by_the_gpus_of_each_host(section, gpus, expected):
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
    with pytest.raises(ConfigError, match="the run has 3"):
        resolve(loaded, nproc=(2, 2, 3), device="cpu")
    fixed = load_run_file(run_file, [hosts, tp, "clusters.0.nodes=3"])
    assert resolve(fixed, nproc=(2, 1, 5), device="cpu").world_size == 8


IFNAMES = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
IB = {"NCCL_IB_DISABLE": "0"}


@each(
    ({"profile": "infiniband"}, "eth0", "cpu", {"GLOO_SOCKET_IFNAME": "eth0"}),
    ({}, "eth0", "cuda", IFNAMES),
    ({"profile": "ethernet"}, "eth0", "cuda", {**IFNAMES, "NCCL_IB_DISABLE": "1"}),
    ({"profile": "infiniband"}, "eth0", "cuda", {**IFNAMES, **IB}),
    ({"profile": "roce"}, "eth0", "cuda", {**IFNAMES, **IB, "NCCL_IB_GID_INDEX": "3"}),
    ({"interface": "ib0"}, "eth0", "cpu", {"GLOO_SOCKET_IFNAME": "ib0"}),
    ({}, None, "cuda", {}),
)
def test_variables_of_the_network(network, interface, device, variables):
    section = NetworkConfig.model_validate(network)
    assert environment.network_variables(section, interface, device) == variables
    assert f"network {section.profile}: " in environment.network_line(section, interface, device)


FLEET = Fleet("ssh", (FleetNode(0, "a1", "a1", "10.0.0.1", 1),), 29500, 1, "cpu", 10.0, "digest")
OLD = f".old.{os.geteuid()}"


@pytest.fixture
def host_run(tmp_path: Path) -> RunDir:
    """The folder of a run on a node other than the first."""
    return RunDir(tmp_path / "host" / "run-1")


def place(host_run: RunDir, born_at: float = 1.0, begun_at: float = 1.0) -> bool:
    """Make the place of its attempt 1."""
    args = {"fleet": FLEET.record(), "resolved": "a: 1\n", "text": "b: 2\n", "token": "t"}
    args |= {"born_at": born_at, "begun_at": begun_at}
    return make_place(host_run, host_run.attempt(1), args)


def test_a_folder_that_is_the_host_s_own_is_left_as_it_is(host_run: RunDir) -> None:
    attempt = host_run.attempt(1)
    attempt.path.mkdir(parents=True)
    host_run.resolved.write_text("its own")
    with pytest.raises(UserError, match="belongs to another run") as error:
        place(host_run)
    assert error.value.where == str(host_run.path)
    launch = {"attempt": 1, "begun_at": 1.0, "pid": 7}
    write_record(attempt.launch, launch)
    assert place(host_run), "the first node's own"
    assert read_record(attempt.launch) == launch
    assert host_run.resolved.read_text() == "its own" and not attempt.fleet.exists()


def test_a_place_for_a_run_of_another_host_is_made_once_by_many_at_once(host_run: RunDir) -> None:
    # Nodes that share a disk which the first does not see, or a command that is typed twice.
    attempt, found = host_run.attempt(1), list[bool]()

    def make() -> None:
        found.append(place(host_run, begun_at=begun_at))

    for begun_at in range(5):
        at_once(6, make)
        assert len(found) == 6 * (begun_at + 1), "none has failed"
        assert found.count(False) == begun_at + 1, "one has made it, which the others share"
        assert (read_record(attempt.launch) or {})["begun_at"] == begun_at
        fleet = read_fleet(attempt)
        assert fleet is not None and fleet.first.address == "10.0.0.1"
        texts = host_run.resolved.read_text(), host_run.run_file.read_text()
        assert texts == ("a: 1\n", "b: 2\n")
        assert {entry.name for entry in attempt.path.parent.iterdir()} - {OLD} == {"001"}
    # What an older run has left goes aside.
    attempt.agent_log.write_text("old")
    assert not place(host_run, born_at=2.0, begun_at=9.0)
    assert not attempt.agent_log.exists()
    (old,) = host_run.path.with_name(OLD).iterdir()
    assert (old / "attempts" / "001" / "agent.log").read_text() == "old"


def test_differences_between_hosts() -> None:
    a = {"python": "3.12.1", "torch": "2.13.0", "datasets": "4.4"}
    assert launch_setup.difference_lines({"a": a, "b": a}) == ([], False)
    other = a | {"datasets": "4.5", "python": "3.12.4"}
    lines, is_bad = launch_setup.difference_lines({"a": a, "b": other})
    assert not is_bad and len(lines) == 2 and all("(this is allowed)" in line for line in lines)
    lines, is_bad = launch_setup.difference_lines({"a": a, "b": a | {"torch": "2.12.0"}})
    assert is_bad and lines == ["torch differs: 2.13.0 on a, 2.12.0 on b"]
    assert launch_setup.difference_lines({"a": a, "b": a | {"python": "3.11.1"}})[1]


OVER_SSH = "clusters.0.launcher={kind: ssh, hosts: [a1]}"


def test_signals_are_the_run_s_once_it_is_there() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: arrived.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), launch_ssh.interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert not arrived
        with launch_ssh.interruptible() as hand_back:
            hand_back()
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def bash(*lines: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_program(["bash", "-c", "\n".join(lines)], env={**os.environ, **environ})


def test_a_home_is_that_of_the_user_there(tmp_path: Path) -> None:
    work, activate = tmp_path / "it's my work", tmp_path / "my venv" / "bin" / "activate"
    work.mkdir()
    activate.parent.mkdir(parents=True)
    activate.write_text("echo activated\n")
    section = cluster("a1", environment={"venv": "~/my venv"})
    lines = environment.setting_lines(section, "~/it's my work")
    done = bash(*lines, "pwd", HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"activated\n{work}\n", "")
    for given, path in (("~/my work", "my work/"), ("/x", "/x/"), ("~", "./"), ("~/", "./")):
        assert rsync_argv(Shell("a1"), SyncConfig(paths=(".",)), given)[-1] == f"a1:{path}"
    for home in ("~", "~/"):
        done = bash(f"cd {environment.quoted(home)}; pwd", HOME=str(tmp_path))
        assert done.stdout == f"{tmp_path}\n"


@each(
    ("~/work", "runs", "~/work/runs/a-1"),
    ("/data", "~/work/runs", "~/work/runs/a-1"),
    ("/home/ann/work", "runs", "/home/ann/work/runs/a-1"),
    ("~/work", "/home/ann/work/runs", "/home/ann/work/runs/a-1"),
)
def test_a_run_in_a_home_is_in_that_of_each_user(
    workdir, output_dir, path, *, run_file, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/ann")
    values = [f"output_dir={output_dir}", f"clusters.0.workdir={workdir}", OVER_SSH]
    config = load_run_file(run_file, values).config
    assert environment.path_elsewhere(Path("/home/ann/work/runs/a-1"), config) == path


def test_module_and_conda_are_found_without_a_login(tmp_path: Path) -> None:
    # A shell that ssh starts for a command has read no profile, and no interactive .bashrc.
    conda = tmp_path / "miniconda3" / "condabin" / "conda"
    write_program(conda, "echo 'conda() { echo conda $*; }'")
    profile = tmp_path / "profile"
    profile.write_text("module() { echo module $*; }\n")
    given = {"setup": ["module use here"], "modules": ["gcc/12"], "conda": "train"}
    setting = environment.setting_lines(cluster("a1", environment=given), "/")
    lines = [line.replace("/etc/profile", str(profile)) for line in setting]
    done = bash(*lines, HOME=str(tmp_path), PATH="/usr/bin:/bin")
    calls = ["module use here", "module load gcc/12", "conda activate train"]
    assert (done.stdout.splitlines(), done.stderr) == (calls, "")


def test_pip_that_never_ends_is_reported(run_file, tmp_path, monkeypatch):
    ssh = write_program(tmp_path / "bin" / "ssh", "exec tail -f /dev/null")
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launch_setup, "_INSTALL_S", 0.5)
    loaded = load_run_file(run_file, [OVER_SSH])
    with pytest.raises(PreflightError, match="it was not set up within 0s") as caught:
        launch_setup.setup(loaded, check=False, print_line=str)
    assert caught.value.where == "host a1" and "grep pip" in caught.value.fix


OUTER = ("outer={kind: diloco, engine: hivemind}", "training.max_steps=1000")
HERE = "{name: here}"
ATTIC = "{name: attic, launcher: {kind: ssh, hosts: [me@a, me@b]}, workdir: /w}"
CAMPUS = (
    "{name: campus, launcher: {kind: slurm, login: me@campus, time: 1h}, workdir: /w, "
    "gpus_per_node: 4, strategy: {kind: deepspeed}}"
)


def test_every_cluster_elsewhere_is_set_up(run_file, monkeypatch) -> None:
    """Also where an earlier one is not equal; with the packages that its strategy needs."""
    found: dict[str, list[str]] = {}

    def set_up(loaded: Loaded, cluster: ClusterConfig, **_: object) -> bool:
        found[cluster.name] = launch_setup.extras_of(loaded.config, cluster)
        return cluster.name != "attic"

    monkeypatch.setattr(launch_setup, "_setup_cluster", set_up)
    lines: list[str] = []
    loaded = load_run_file(run_file, [*OUTER, f"clusters=[{HERE}, {ATTIC}, {CAMPUS}]"])
    assert not launch_setup.setup(loaded, check=True, print_line=lines.append)
    assert found == {"attic": ["train", "hivemind"], "campus": ["train", "deepspeed", "hivemind"]}
    assert lines == ["cluster attic", "cluster campus"]
    loaded = load_run_file(run_file, [*OUTER, f"clusters=[{HERE}]"])
    with pytest.raises(ConfigError, match="no other machine to set up"):
        launch_setup.setup(loaded, check=False, print_line=lines.append)


def test_half_a_venv_is_made_again(tmp_path: Path) -> None:
    # Without Debian's python3-venv there is a bin/python after the failure, and no pip.
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    python = tools / "python{}.{}".format(*sys.version_info[:2])
    half = f'[ "$2" = venv ] || exit 0; mkdir -p {venv}/bin; cp $0 {venv}/bin/python; exit 1'
    write_program(python, half)
    given = cluster("a1", environment={"venv": str(venv)}).environment
    lines = [*launch_setup.make_lines(given, str(tmp_path)), "echo goes on"]
    for _ in range(2):
        assert bash(*lines, PATH=f"{tools}:{os.environ['PATH']}").returncode == 1


@each(
    ("m", "m", "runs", False),
    ("m", "m", "other/runs", True),
    ("m", "another", "runs", True),
    ("", "", "runs", True),  # macOS has no number of the boot: they may be two machines
)
def test_a_run_that_is_not_in_the_own_folder_is_remembered(row, *, run_file, monkeypatch):
    """By the number of this machine, that of the first host, and the folder there."""
    here, first, folder, is_remembered = row
    monkeypatch.setattr(launch_ssh, "machine_id", lambda: here)
    launcher = "clusters.0.launcher={kind: ssh, hosts: [{ssh: a1, address: 10.0.0.1}]}"
    loaded = load_run_file(run_file, [launcher])
    cluster, run_dir = loaded.config.clusters[0], run_file.parent / folder / "tiny-1"
    facts = {"machine_id": first, "host": "a1", "gpus": 0, "port": 29500, "reached_at": None}
    host = SshHost(0, cluster.hosts[0], None, {**facts, "networks": []})
    options = StartOptions(run_file, (), "auto", False, str, str)
    start = launch_ssh._SshStart(loaded, options, cluster, [host], "/")
    started = start._started({"run_dir": str(run_dir), "elsewhere": str(run_dir), "attempt": 1})
    assert (started.remote is not None) == is_remembered
    remembered = [run.path for run in list_remotes(run_file.parent / "runs")]
    assert (str(run_dir) in remembered) == is_remembered


def test_a_run_that_cannot_be_remembered_goes_on_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    path = "/data/runs/tiny-1"
    remote = RemoteRun("tiny-1", "me@a1", path, (), "python3", "ssh", ("me@a1",), 1.0)
    remember(tmp_path / "file" / "runs", remote, warnings.append)
    (warning,) = warnings
    assert "tiny-1 has started, but this machine cannot record it" in warning
    assert f"on me@a1, with {path}" in warning


_FORGETFUL = """
import isles.launch.ssh.node as start
from isles.launch.ssh.node import main
start.FORGOTTEN_AFTER_S = 2.0
main()
"""


@each(False, True)
def test_a_start_that_is_not_heard_of_after_begin_ends(is_given_up: bool, *, run_file, tmp_path):
    # The launching machine lost its power: the connection stands, and nobody says a word. Also
    # after it has given the start up: nobody is left to close the connection.
    loaded = load_run_file(run_file, [f"output_dir={tmp_path}"])
    args: dict[str, Any] = {"resume": "auto", "dry_run": False, "join": "", "typed": ""}
    args |= {"resolved": dump_resolved(resolve(loaded, num_gpus=0)), "text": loaded.text}
    fleet = Fleet("ssh", (FleetNode(0, "a1", "a1", "10.0.0.1", 1),), 29500, 1, "cpu", 10.0, "d")
    asked = [{"id": 1, "op": "begin", "args": {**args, "fleet": fleet.record()}}]
    if is_given_up:
        asked.append({"id": 2, "op": "end", "args": {"what": "another host is down"}})
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _FORGETFUL], stdin=pipe, stdout=pipe) as node:
        try:
            assert node.stdout.readline().startswith(READY.encode())
            for ask in asked:
                node.stdin.write(json.dumps(ask).encode() + b"\n")
                node.stdin.flush()
                assert b"result" in node.stdout.readline()
            assert node.wait(DEADLINE_S) == 2
        finally:
            node.kill()
    outcome = read_record(RunDir(tmp_path / "tiny-1").attempt(1).outcome) or {}
    assert ("another host" if is_given_up else "no message from the machine") in outcome["reason"]
