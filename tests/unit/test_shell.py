"""Commands over ssh, by a small program named ssh; and conversations with a node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isles.errors import PreflightError, UserError
from isles.launch.ssh.channel import Channel, open_channel
from isles.launch.ssh.shell import Shell, on_all, python_failure
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.programs import write_program

CHANGED = "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed"


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], object]:
    """Puts a program ssh first on PATH; `$last` is the command that is to run on the host."""
    folder = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda lines: write_program(folder / "ssh", f'last="${{@: -1}}"\n{lines}')


@pytest.mark.parametrize(
    "login",
    # Those of the second line are installed with the test clusters.
    ["sh", "bash", *(pytest.param(name, marks=pytest.mark.lab) for name in ("csh", "fish"))],
)
def test_a_command_arrives_word_for_word_in_every_login_shell(fake_ssh, login: str):
    fake_ssh(f'exec {login} -c "$last"')
    words = ["two  words", "it's", "$HOME", "a\nb", '"', "*", "\\", "!!", "`id`", "ü", "\\x41"]
    words += ["\t", "a long word " * 700]
    done = Shell("me@host").run([sys.executable, "-c", "import sys; print(sys.argv[1:])", *words])
    assert done.stdout.strip() == str(words), done.stderr
    script = f"cd /\n[ $PWD = / ] && echo {'so many words ' * 700}"
    done = Shell("me@host").run(["bash", "-c", script])
    assert done.stdout.split() == ["so", "many", "words"] * 700, done.stderr
    done = Shell("me@host").run(["bash", "-c", "cat; echo no >&2; exit 3"], stdin="text")
    assert (done.returncode, done.stdout, done.stderr) == (3, "text", "no\n")


@each(
    ("me@host: Permission denied (publickey).", "refuses the key", "ssh-copy-id me@host"),
    ("Could not resolve hostname host: Name or service", "unknown host name", "~/.ssh/config"),
    ("connect to host host port 22: Connection refused", "no ssh server", "openssh-server"),
    ("connect to host host port 22: Connection timed out", "does not answer", "ping host"),
    ("connect to host host port 22: No route to host", "does not answer", "ping host"),
    ("Host key verification failed.", "key is unknown", "once, and compare"),
    (CHANGED, "key has changed", "ssh-keygen -R host"),
    ("kex_exchange_identification: read: reset", "cannot connect", "test with ssh me@host"),
)
def test_what_ssh_says_becomes_what_to_type(line: str, what: str, fix: str, *, fake_ssh):
    fake_ssh(f'echo "{line}" >&2; exit 255')
    with pytest.raises(PreflightError) as error:
        Shell("me@host").run(["true"])
    assert what in error.value.what and line.splitlines()[-1] in error.value.what
    assert fix in error.value.fix and error.value.where == "host me@host"


def test_a_host_that_goes_silent_is_named_and_so_is_a_missing_ssh(fake_ssh, monkeypatch):
    fake_ssh("exec sleep 60")
    with pytest.raises(PreflightError, match=r"no answer within 0 s to: uptime") as error:
        Shell("me@host").run(["uptime"], timeout_s=0.2)
    assert error.value.where == "host me@host"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PreflightError, match="ssh is not installed") as error:
        Shell("host").run(["true"])
    assert "apt install openssh-client" in error.value.fix


def test_a_command_that_cannot_be_run_here(tmp_path: Path) -> None:
    for place, what in (
        (tmp_path, "cannot run .*: Permission"),
        (tmp_path / "no", "is not installed"),
    ):
        with pytest.raises(PreflightError, match=what) as caught:
            Shell().run([str(place)])
        assert str(place) in caught.value.what


def test_all_places_are_tried_and_all_failures_kept() -> None:
    def work(number: int) -> int:
        if number % 2:
            raise UserError(f"odd: {number}")
        return number

    results, failures = on_all([0, 1, 2, 3], work)
    assert results == [0, None, 2, None]
    assert [(place, failure.what) for place, failure in failures] == [(1, "odd: 1"), (3, "odd: 3")]


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


def test_a_node_answers_and_ends_with_its_connection() -> None:
    command = [sys.executable, "-m", "isles.launch.ssh.node"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    lost: list[bool] = []

    def why(was_ready: bool) -> UserError:
        lost.append(was_ready)
        return UserError("it is over")

    end = process.stdin.close
    with Channel("here", process.stdout, process.stdin, lost=why, end=end) as channel:
        facts = channel.call("facts", timeout_s=DEADLINE_S, port=29500)
        assert facts["executable"] == sys.executable
        assert 29500 <= facts["port"] < 29600
        with pytest.raises(UserError, match="does not know 'fly'"):
            channel.call("fly", timeout_s=DEADLINE_S)
    assert process.wait(timeout=DEADLINE_S) == 0
    for _ in range(2):  # while it is found out, and afterwards
        with pytest.raises(UserError, match="it is over"):
            channel.call("facts", timeout_s=DEADLINE_S)
    assert lost == [True]


def test_what_a_login_prints_is_no_answer(fake_ssh) -> None:
    fake_ssh('echo "Welcome!"; echo "{}"; echo hush >&2; exec sh -c "$last"')
    with open_channel(Shell("host"), python=sys.executable, lines=["echo from .bashrc"]) as channel:
        facts = channel.call("facts", timeout_s=DEADLINE_S)
        assert facts["executable"] == sys.executable
        os.kill(facts["pid"], signal.SIGKILL)
        with pytest.raises(
            PreflightError, match="process there exited"
        ):  # a node that dies is no hang
            channel.call("facts", timeout_s=DEADLINE_S)


def refusal(what: str, **given: Any) -> PreflightError:
    """What is said of a host where isles cannot run."""
    refused = pytest.raises(PreflightError, match=what)
    with open_channel(Shell(), **given) as channel, refused as error:
        channel.call("facts", timeout_s=DEADLINE_S)
    return error.value


@each(
    ([], "/nowhere/python", "cannot run /nowhere/python there"),
    (["cd /nowhere || exit 1"], sys.executable, "folder not found: /nowhere"),
    (["export PYTHONPATH=", "cd /"], f"{sys.base_exec_prefix}/bin/python3", "not installed"),
)
def test_a_host_that_cannot_run_isles_says_why(lines: list[str], python: str, what: str) -> None:
    error = refusal(what, python=python, lines=lines, name="a2")
    assert error.where == "host a2" and "clusters.0." in error.fix


@each("isles.launch.ssh.node", "isles.later")
def test_an_older_isles_there_is_not_taken_for_none(module: str, *, tmp_path: Path) -> None:
    (tmp_path / "isles").mkdir()
    (tmp_path / "isles" / "__init__.py").touch()
    older = [f"export PYTHONPATH={tmp_path}", f"cd {tmp_path}"]
    what = r"another version of isles, .* isles\.la"
    error = refusal(what, python=sys.executable, lines=older, module=module)
    assert error.id == "version.isles" and "isles setup" in error.fix


def test_a_line_of_a_login_script_does_not_hide_the_error_of_isles():
    noise = "bash: module: command not found\n"
    assert python_failure("h", "python", 3, f"{noise}error: this run exists\n  fix: x") is None
    assert python_failure("h", "python", 3, noise) is not None
