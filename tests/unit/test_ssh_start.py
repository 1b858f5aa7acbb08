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
from isles.launch.remote.setup import _make_lines
from isles.launch.remote.sync import rsync_argv
from isles.launch.ssh import start as launch_ssh
from isles.launch.ssh.channel import READY
from isles.launch.ssh.environment import path_elsewhere, quoted, setting_lines
from isles.launch.ssh.facts import machine_id
from isles.launch.ssh.hosts import Host
from isles.launch.ssh.shell import Shell, on_all
from isles.launch.ssh.start import interruptible
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.run.remote import RemoteRun, list_remotes
from tests.deadline import DEADLINE_S

FLEET = Fleet("ssh", (FleetNode(0, "a1", "a1", "10.0.0.1", 1),), 29500, 1, "cpu", 10.0, "digest")


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


def section(**more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"launcher": {"kind": "ssh", "hosts": ["a1"]}, **more})


def bash(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_home_is_that_of_the_user_there(tmp_path: Path) -> None:
    work, venv = tmp_path / "it's my work", tmp_path / "my venv" / "bin"
    work.mkdir()
    venv.mkdir(parents=True)
    (venv / "activate").write_text("echo activated\n")
    cluster = section(environment={"venv": "~/my venv"})
    lines = setting_lines(cluster, "~/it's my work")
    done = bash("\n".join([*lines, "pwd"]), HOME=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"activated\n{work}\n", "")
    shell = Shell("a1")
    assert rsync_argv(shell, SyncConfig(paths=(".",)), "~/my work")[-1] == "a1:my work/"
    assert rsync_argv(shell, SyncConfig(paths=(".",)), "/x")[-1] == "a1:/x/"
    for home in ("~", "~/"):
        assert rsync_argv(shell, SyncConfig(paths=(".",)), home)[-1] == "a1:./"
        assert bash(f"cd {quoted(home)}; pwd", HOME=str(tmp_path)).stdout == f"{tmp_path}\n"


def test_module_and_conda_are_found_without_a_login(tmp_path: Path) -> None:
    """A shell that ssh starts for a command has read no profile, and no interactive .bashrc."""
    conda = tmp_path / "miniconda3" / "condabin" / "conda"
    conda.parent.mkdir(parents=True)
    conda.write_text("#!/bin/sh\necho 'conda() { echo conda $*; }'\n")
    conda.chmod(0o755)
    profile = tmp_path / "profile"
    profile.write_text("module() { echo module $*; }\n")
    given = {"setup": ["module use here"], "modules": ["gcc/12"], "conda": "train"}
    script = "\n".join(setting_lines(section(environment=given), "/"))
    script = script.replace("/etc/profile", str(profile))
    done = bash(script, HOME=str(tmp_path), PATH="/usr/bin:/bin")
    said = ["module use here", "module load gcc/12", "conda activate train"]
    assert (done.stdout.splitlines(), done.stderr) == (said, "")


def test_a_run_in_a_home_is_in_the_home_of_each_user(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    run_dir = Path("/home/ann/work/runs/a-1")
    for workdir, output_dir, path in (
        ("~/work", "runs", "~/work/runs/a-1"),
        ("/data", "~/work/runs", "~/work/runs/a-1"),
        ("/home/ann/work", "runs", str(run_dir)),
        ("~/work", "/home/ann/work/runs", str(run_dir)),
    ):
        values = [f"output_dir={output_dir}", f"clusters.0.workdir={workdir}"]
        values.append("clusters.0.launcher={kind: ssh, hosts: [a1]}")
        config = load_run_file(run_file, values).config
        assert path_elsewhere(run_dir, config) == path


def test_pip_that_never_ends_is_said(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$1" = -G ] || exec tail -f /dev/null\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(launch_setup, "_INSTALL_S", 0.5)
    loaded = load_run_file(run_file, ["clusters.0.launcher={kind: ssh, hosts: [a1]}"])
    with pytest.raises(PreflightError, match="it has not been set up within 0s") as caught:
        launch_setup.setup(loaded, check=False, print_line=str)
    assert caught.value.where == "host a1" and "grep pip" in caught.value.fix


def test_half_a_venv_is_made_again(tmp_path: Path) -> None:
    """Without Debian's python3-venv there is a bin/python after the fault, and no pip."""
    tools, venv = tmp_path / "tools", tmp_path / "venv"
    tools.mkdir()
    python = tools / "python{}.{}".format(*sys.version_info[:2])
    half = f'[ "$2" = venv ] || exit 0; mkdir -p {venv}/bin; cp $0 {venv}/bin/python; exit 1'
    python.write_text(f"#!/bin/bash\n{half}\n")
    python.chmod(0o755)
    environment = section(environment={"venv": str(venv)}).environment
    script = "\n".join([*_make_lines(environment, str(tmp_path)), "echo goes on"])
    for _ in range(2):
        assert bash(script, PATH=f"{tools}:{os.environ['PATH']}").returncode == 1


def remote(path: str) -> RemoteRun:
    return RemoteRun("tiny-1", "me@a1", path, (), "python3", "ssh", ("me@a1",), 1.0)


def test_a_run_that_cannot_be_remembered_goes_on_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    remember(tmp_path / "file" / "runs", remote("/data/runs/tiny-1"), warnings.append)
    (warning,) = warnings
    assert "tiny-1 has started, and cannot be remembered here" in warning
    assert "on me@a1: /data/runs/tiny-1" in warning


def started_on(run_file: Path, run_dir: Path, machine: str) -> Started:
    """What `isles train` has in hand once a run has started with a head that says so of itself."""
    loaded = load_run_file(run_file, ["clusters.0.launcher={kind: ssh, hosts: [a1]}"])
    options = StartOptions(run_file, (), "auto", False, str, str)
    cluster = loaded.config.clusters[0]
    nobody: Any = None
    facts: dict[str, Any] = {"machine_id": machine, "host": "a1", "gpus": 0, "port": 29500}
    facts |= {"reached_at": None}
    facts["networks"] = [{"interface": "eth0", "address": "10.0.0.1", "prefix": 24}]
    first = Host(0, cluster.hosts[0], nobody, facts)
    start = launch_ssh._SshStart(loaded, options, cluster, [first], "/")
    return start._started({"run_dir": str(run_dir), "elsewhere": str(run_dir), "attempt": 1})


@pytest.mark.parametrize(
    ("is_here", "folder", "is_remembered"),
    [(True, "runs", False), (True, "other/runs", True), (False, "runs", True)],
)
def test_a_run_that_is_not_in_the_own_folder_is_remembered(
    run_file: Path, tmp_path: Path, is_here: bool, folder: str, is_remembered: bool
) -> None:
    run_dir = tmp_path / folder / "tiny-1"
    started = started_on(run_file, run_dir, machine_id() if is_here else "another")
    remembered = list_remotes(tmp_path / "runs")
    assert [run.path for run in remembered] == ([str(run_dir)] if is_remembered else [])
    assert (started.remote is not None) == is_remembered


def test_two_machines_that_cannot_be_told_apart_are_two(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On macOS there is no number of the boot."""
    monkeypatch.setattr(launch_ssh, "machine_id", str)
    assert started_on(run_file, tmp_path / "runs" / "tiny-1", "").remote is not None


_FORGETFUL = """
import isles.launch.ssh.node as start
from isles.launch.ssh.node import main
start.FORGOTTEN_AFTER_S = 2.0
main()
"""


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_start_that_is_not_heard_of_after_begin_ends(
    run_file: Path, tmp_path: Path, is_given_up: bool
) -> None:
    """The launching machine lost its power: the connection stands, and nobody says a word.

    Also after it has given the start up: nobody is left to close the connection.
    """
    loaded = load_run_file(run_file)
    text = dump_resolved(resolve(loaded, num_gpus=0))
    args = {"resolved": text, "text": loaded.text, "resume": "auto", "dry_run": False}
    args |= {"join": "", "typed": ""}
    asked = [{"id": 1, "op": "begin", "args": {**args, "fleet": FLEET.record()}}]
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
    attempt = RunDir(tmp_path / "runs" / "tiny-1").attempt(1)
    outcome = read_record(attempt.outcome) or {}
    assert ("another host" if is_given_up else "was not heard of any more") in outcome["reason"]
