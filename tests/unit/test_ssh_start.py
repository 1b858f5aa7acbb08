"""A start over ssh on this machine's side: signals, paths, what is remembered; and a lost start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.sections.cluster import ClusterConfig, SyncConfig
from isles.errors import PreflightError
from isles.launch.base import Started, StartOptions
from isles.launch.remote import setup as launch_setup
from isles.launch.remote.login import remember
from isles.launch.remote.setup import make_lines
from isles.launch.remote.sync import rsync_argv
from isles.launch.ssh import start as launch_ssh
from isles.launch.ssh.channel import READY
from isles.launch.ssh.environment import path_elsewhere, quoted, setting_lines
from isles.launch.ssh.hosts import Host
from isles.launch.ssh.shell import Shell, on_all
from isles.launch.ssh.start import interruptible
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.remote import RemoteRun, list_remotes
from tests.deadline import DEADLINE_S, run_program
from tests.each import each
from tests.programs import write_program

OVER_SSH = "clusters.0.launcher={kind: ssh, hosts: [a1]}"


def test_ctrl_c_does_not_wait_for_the_slowest_host() -> None:
    gate, ended = threading.Event(), []

    def work(place: int) -> None:
        if place == 0:
            raise KeyboardInterrupt
        gate.wait(DEADLINE_S)
        ended.append(place)

    with pytest.raises(KeyboardInterrupt):
        on_all([0, 1], work)
    assert not ended
    gate.set()


def test_signals_are_the_run_s_once_it_is_there() -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: arrived.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
        assert not arrived
        with interruptible() as hand_back:
            hand_back()
            os.kill(os.getpid(), signal.SIGTERM)
        assert arrived == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def section(**environment: Any) -> ClusterConfig:
    launcher = {"kind": "ssh", "hosts": ["a1"]}
    return ClusterConfig.model_validate({"launcher": launcher, "environment": environment})


def bash(*lines: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_program(["bash", "-c", "\n".join(lines)], env={**os.environ, **environ})


def test_a_home_is_that_of_the_user_there(tmp_path: Path) -> None:
    work, activate = tmp_path / "it's my work", tmp_path / "my venv" / "bin" / "activate"
    work.mkdir()
    activate.parent.mkdir(parents=True)
    activate.write_text("echo activated\n")
    lines = setting_lines(section(venv="~/my venv"), "~/it's my work")
    done = bash(*lines, "pwd", HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"activated\n{work}\n", "")
    for given, path in (("~/my work", "my work/"), ("/x", "/x/"), ("~", "./"), ("~/", "./")):
        assert rsync_argv(Shell("a1"), SyncConfig(paths=(".",)), given)[-1] == f"a1:{path}"
    for home in ("~", "~/"):
        assert bash(f"cd {quoted(home)}; pwd", HOME=str(tmp_path)).stdout == f"{tmp_path}\n"


@each(
    ("workdir", "output_dir", "path"),
    [
        ("~/work", "runs", "~/work/runs/a-1"),
        ("/data", "~/work/runs", "~/work/runs/a-1"),
        ("/home/ann/work", "runs", "/home/ann/work/runs/a-1"),
        ("~/work", "/home/ann/work/runs", "/home/ann/work/runs/a-1"),
    ],
)
def test_a_run_in_a_home_is_in_the_home_of_each_user(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, workdir: str, output_dir: str, path: str
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    values = [f"output_dir={output_dir}", f"clusters.0.workdir={workdir}", OVER_SSH]
    config = load_run_file(run_file, values).config
    assert path_elsewhere(Path("/home/ann/work/runs/a-1"), config) == path


def test_module_and_conda_are_found_without_a_login(tmp_path: Path) -> None:
    # A shell that ssh starts for a command has read no profile, and no interactive .bashrc.
    conda = tmp_path / "miniconda3" / "condabin" / "conda"
    write_program(conda, "echo 'conda() { echo conda $*; }'")
    profile = tmp_path / "profile"
    profile.write_text("module() { echo module $*; }\n")
    given = section(setup=["module use here"], modules=["gcc/12"], conda="train")
    lines = [line.replace("/etc/profile", str(profile)) for line in setting_lines(given, "/")]
    done = bash(*lines, HOME=str(tmp_path), PATH="/usr/bin:/bin")
    calls = ["module use here", "module load gcc/12", "conda activate train"]
    assert (done.stdout.splitlines(), done.stderr) == (calls, "")


def test_pip_that_never_ends_is_reported(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = write_program(tmp_path / "bin" / "ssh", "exec tail -f /dev/null")
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launch_setup, "_INSTALL_S", 0.5)
    loaded = load_run_file(run_file, [OVER_SSH])
    with pytest.raises(PreflightError, match="it has not been set up within 0s") as caught:
        launch_setup.setup(loaded, check=False, print_line=str)
    assert caught.value.where == "host a1" and "grep pip" in caught.value.fix


def test_half_a_venv_is_made_again(tmp_path: Path) -> None:
    # Without Debian's python3-venv there is a bin/python after the failure, and no pip.
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    python = tools / "python{}.{}".format(*sys.version_info[:2])
    half = f'[ "$2" = venv ] || exit 0; mkdir -p {venv}/bin; cp $0 {venv}/bin/python; exit 1'
    write_program(python, half)
    lines = [*make_lines(section(venv=str(venv)).environment, str(tmp_path)), "echo goes on"]
    for _ in range(2):
        assert bash(*lines, PATH=f"{tools}:{os.environ['PATH']}").returncode == 1


def started_on(run_file: Path, run_dir: Path, machine: str) -> Started:
    """What `isles train` has in hand once a run has started on the machine with this number."""
    loaded = load_run_file(run_file, [OVER_SSH])
    options = StartOptions(run_file, (), "auto", False, str, str)
    cluster = loaded.config.clusters[0]
    nobody: Any = None
    facts: dict[str, Any] = {"machine_id": machine, "host": "a1", "gpus": 0, "port": 29500}
    facts |= {"reached_at": None}
    facts["networks"] = [{"interface": "eth0", "address": "10.0.0.1", "prefix": 24}]
    first = Host(0, cluster.hosts[0], nobody, facts)
    start = launch_ssh._SshStart(loaded, options, cluster, [first], "/")
    return start._started({"run_dir": str(run_dir), "elsewhere": str(run_dir), "attempt": 1})


@each(
    ("here", "first_host", "folder", "is_remembered"),
    [
        ("m", "m", "runs", False),
        ("m", "m", "other/runs", True),
        ("m", "another", "runs", True),
        ("", "", "runs", True),  # macOS has no number of the boot: they may be two machines
    ],
)
def test_a_run_that_is_not_in_the_own_folder_is_remembered(
    run_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: str,
    first_host: str,
    folder: str,
    is_remembered: bool,
) -> None:
    monkeypatch.setattr(launch_ssh, "machine_id", lambda: here)
    run_dir = run_file.parent / folder / "tiny-1"
    assert (started_on(run_file, run_dir, first_host).remote is not None) == is_remembered
    remembered = [run.path for run in list_remotes(run_file.parent / "runs")]
    assert (str(run_dir) in remembered) == is_remembered


def test_a_run_that_cannot_be_remembered_goes_on_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    path = "/data/runs/tiny-1"
    remote = RemoteRun("tiny-1", "me@a1", path, (), "python3", "ssh", ("me@a1",), 1.0)
    remember(tmp_path / "file" / "runs", remote, warnings.append)
    (warning,) = warnings
    assert "tiny-1 has started, and cannot be remembered here" in warning
    assert f"on me@a1: {path}" in warning


_FORGETFUL = """
import isles.launch.ssh.node as start
from isles.launch.ssh.node import main
start.FORGOTTEN_AFTER_S = 2.0
main()
"""


@each("is_given_up", [False, True])
def test_a_start_that_is_not_heard_of_after_begin_ends(
    run_file: Path, tmp_path: Path, is_given_up: bool
) -> None:
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
        assert node.stdin is not None and node.stdout is not None
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
    assert ("another host" if is_given_up else "was not heard of any more") in outcome["reason"]
