"""Runs commands on this machine or over the user's own ssh, and explains failures."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from isles.errors import PreflightError, UserError
from isles.facts.units import printable
from isles.run.env import IN_POD

T = TypeVar("T")
R = TypeVar("R")

SSH_FAILED = 255
"""Exit status of ssh itself if it cannot connect."""

_POD_S = 180.0
"""Longest time for a new pod to start, if no pod of the run is running."""
_MOST_BYTES = 64 * 2**20
"""Longest answer. An answer of `isles report` has up to 26 MB."""
_CANNOT_RUN, _NOT_FOUND = 126, 127
_WORD_CHARS = 1000
_NO_FOLDER = re.compile(r"cd: (?P<folder>.*): No such file or directory")
_OWN_ERROR = re.compile(r"^error: ", re.M)
"""Pattern of isles' own errors, which are better than a line of a login script."""
_NO_MODULE = re.compile(r"No module named '?(?P<name>isles[\w.]*)")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command; an exit status of 255 may be ssh's own."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands in one place: `destination`, an ssh destination, or IN_POD and the name of a
    record; None: this machine."""

    destination: str | None = None
    connect_timeout_s: float = 10.0

    @property
    def name(self) -> str:
        return self.destination or "this machine"

    @property
    def is_pod(self) -> bool:
        return self.destination is not None and self.destination.startswith(IN_POD)

    @property
    def by_hand(self) -> str:
        """Command with which a user can test the connection; empty on this machine."""
        by_kubectl = "kubectl get pods -l app.kubernetes.io/managed-by=isles"
        return by_kubectl if self.is_pod else f"ssh {self.destination}" if self.destination else ""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The local command line that runs `command` there."""
        if self.destination is None:
            return list(command)
        if self.is_pod:
            words = [sys.executable, "-m", "isles.launch.kubernetes.reach"]
            return [*words, self.destination, *command]
        return ["ssh", *self.ssh_options(), "--", self.destination, login_line(command)]

    def ssh_options(self) -> list[str]:
        """Options for ssh, and for rsync -e, in addition to the user's own files."""
        connect_s = max(1, round(self.connect_timeout_s))
        options = ["BatchMode=yes", f"ConnectTimeout={connect_s}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
        return [word for option in options for word in ("-o", option)]

    def run(
        self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0
    ) -> CommandResult:
        """Run a command until it ends.

        Raises:
            PreflightError: the host cannot be reached, did not answer in time, or its answer is too
                long.
        """
        timeout_s += _POD_S if self.is_pod else 0.0
        with ExitStack() as opened:
            given: int | IO[bytes] = subprocess.DEVNULL
            if stdin is not None:
                given = opened.enter_context(tempfile.TemporaryFile())
                given.write(stdin.encode(errors="replace"))
                given.seek(0)
            with self.popen(command, stdin=given, stderr=subprocess.PIPE) as process:
                try:
                    output, errors = _read_all(process, timeout_s)
                except (TimeoutError, OverflowError) as error:
                    raise PreflightError(
                        f"{error} to: {shlex.join(command)[:200]}",
                        where=f"host {self.name}",
                        fix=f"test the connection with {self.by_hand}" if self.destination else "",
                        id="host.answers",
                    ) from error
                finally:
                    process.kill()  # else the end of `with` waits for it
        if self.destination is not None and process.returncode == SSH_FAILED:
            raise self.failure(errors)
        return CommandResult(process.returncode, output, errors)

    def popen(
        self,
        command: Sequence[str],
        *,
        stderr: int | IO[bytes],
        stdin: int | IO[bytes] = subprocess.PIPE,
        own_group: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a command whose output is read from a pipe. `failure` explains ssh's 255.

        Args:
            own_group: whether Ctrl+C on this terminal must not reach it.

        Raises:
            PreflightError: the command does not exist on this machine.
        """
        argv, group, pipe = self.argv(command), 0 if own_group else None, subprocess.PIPE
        try:
            return subprocess.Popen(
                argv, stdin=stdin, stdout=pipe, stderr=stderr, process_group=group
            )
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise not_started(error) from error

    def stream(
        self,
        command: Sequence[str],
        take: Callable[[str], object],
        *,
        stdin: str,
        timeout_s: float,
        own_group: bool = False,
    ) -> tuple[int | None, str]:
        """Run a command until it ends, and pass on each line of its output immediately.

        Returns:
            Its exit status, None if it was killed after its timeout; and its error output.

        Raises:
            PreflightError: the command does not exist on this machine.
        """
        # Unnamed files: they need no reader that keeps up, and other users cannot open them.
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
            given.write(stdin.encode())
            given.seek(0)
            process = self.popen(command, stdin=given, stderr=errors, own_group=own_group)
            assert process.stdout is not None
            alarm = threading.Timer(timeout_s, process.kill)
            alarm.daemon = True
            alarm.start()
            try:
                for raw in process.stdout:
                    take(raw.decode(errors="replace").rstrip("\r\n"))
                code = process.wait()
                is_late = alarm.finished.is_set()
            finally:
                alarm.cancel()
            errors.seek(0)
            return None if is_late else code, errors.read().decode(errors="replace")

    def failure(self, stderr: str) -> PreflightError:
        """Explanation of an error of ssh itself, with a fix."""
        lines = [line for line in stderr.strip().splitlines() if line.strip()]
        text = lines[-1].strip() if lines else "ssh failed without output"
        if self.is_pod:
            what, _, fix = stderr.strip().partition("\n  fix: ")
            fix = fix or f"test the connection with {self.by_hand}"
            what = what or "the pod is gone"
            return PreflightError(what, where=f"host {self.name}", fix=fix, id="host.answers")
        what, fix = f"ssh cannot connect: {text}", f"test with ssh {self.destination}"
        for sign, meaning, cure in _FAILURES:
            if sign in stderr:
                what = f"{meaning} ({text})"
                fix = cure.format(destination=self.destination, host=self.name.rpartition("@")[2])
                break
        return PreflightError(what, where=f"host {self.name}", fix=fix, id="ssh.connect")


def _read_all(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, str]:
    # Output, error output and exit of a process. OverflowError: it writes too much.
    assert process.stdout is not None and process.stderr is not None
    end, pieces = time.monotonic() + timeout_s, (bytearray(), bytearray())
    with selectors.DefaultSelector() as selector:
        for stream, piece in zip((process.stdout, process.stderr), pieces, strict=True):
            selector.register(stream, selectors.EVENT_READ, piece)
        while selector.get_map():
            ready = selector.select(max(0.0, end - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                key.data.extend(data)
                if not data:
                    selector.unregister(key.fileobj)
            if sum(map(len, pieces)) > _MOST_BYTES:
                raise OverflowError(f"an answer of more than {_MOST_BYTES >> 20} MiB")
        try:
            if selector.get_map():
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
    output, errors = (piece.decode(errors="replace").replace("\r\n", "\n") for piece in pieces)
    return output, errors


def not_started(error: OSError) -> PreflightError:
    """The error for a local program that cannot be started."""
    program = str(error.filename)
    what = f"{program} is not installed"
    if isinstance(error, PermissionError):
        what = f"cannot run {program}: {error.strerror}"
    fix = f"install {program}" + (": apt install openssh-client" * (program == "ssh"))
    return PreflightError(what, where="this machine", fix=fix)


_FAILURES = (
    ("Permission denied", "the host refuses the key", "run ssh-copy-id {destination}"),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host's key has changed",
        "if the change is expected, run ssh-keygen -R {host}, then once ssh {destination}",
    ),
    (
        "Host key verification failed",
        "the host's key is unknown on this machine",
        "run ssh {destination} once, and compare the key",
    ),
    ("Could not resolve", "unknown host name", "correct the name, or add it to ~/.ssh/config"),
    (
        "Connection refused",
        "the host is up but runs no ssh server",
        "on {host}, run sudo apt install openssh-server, or set Port in ~/.ssh/config",
    ),
    (
        "timed out",
        "the host does not answer",
        "check that it is switched on and in this network: ping {host}",
    ),
    ("No route to host", "the host does not answer", "check that it is switched on: ping {host}"),
    (
        "Network is unreachable",
        "there is no route to the host",
        "check that this machine is in its network",
    ),
)


_ENVIRONMENTS = (
    (
        r"/bin/activate: No such file",
        "make the venv with `isles setup run.yaml` (over ssh) or `python3 -m venv`, or set "
        "clusters.0.environment.venv to another venv",
    ),
    (
        r"\bmodule: (command )?not found",
        "define the command module first, such as with clusters.0.environment.setup: [source "
        "/etc/profile.d/modules.sh], or delete clusters.0.environment.modules",
    ),
    (
        r"Unable to locate a modulefile|module(s|\(s\))? (is|are) unknown|ModuleCmd_Load",
        "correct clusters.0.environment.modules; `module avail` shows the names",
    ),
    (
        r"\bconda: (command )?not found|EnvironmentNameNotFound|Failed to activate conda",
        "correct clusters.0.environment.conda; `conda env list` shows the names. "
        "clusters.0.environment.setup may load conda first",
    ),
)


def environment_failure(output: str) -> tuple[str, str] | None:
    """The line with the reason of a failed environment setup, and the fix.

    Returns:
        None if the output has no such line.
    """
    for line in output.splitlines():
        for pattern, fix in _ENVIRONMENTS:
            if re.search(pattern, line):
                return printable(line.strip(), longest=300), fix
    return None


def python_failure(host: str, python: str, code: int, stderr: str) -> PreflightError | None:
    """Why an isles command could not run on a host, by its exit status and its error output; None
    if isles itself failed."""
    module, folder = _NO_MODULE.search(stderr), _NO_FOLDER.search(stderr)
    fix = "set the right Python in clusters.0.environment (venv, conda or python)"
    if module and module["name"] == "isles":
        id, what = "isles.installed", f"isles is not installed for {python}"
        fix = f"install it with isles setup run.yaml, or {fix}"
    elif module:
        id = "version.isles"
        what = f"{python} has another version of isles, which lacks {module['name']}"
        fix = "install the same isles on all hosts with isles setup"
    elif folder:
        id = "files.workdir"
        what = f"folder not found: {folder['folder']}, the working folder of the ranks"
        fix = "create it there, set clusters.0.workdir to another folder, or let isles copy this "
        fix += "folder with clusters.0.sync"
    elif not _OWN_ERROR.search(stderr) and (found := environment_failure(stderr)) is not None:
        id, what, fix = (
            "python.runs",
            f"cannot set up the environment there: {found[0]}",
            found[1],
        )
    elif code in (_CANNOT_RUN, _NOT_FOUND):
        words = stderr.strip().splitlines() or [f"exit status {code}"]
        id, what = "python.runs", f"cannot run {python} there: {words[-1]}"
    else:
        return None
    return PreflightError(what, where=f"host {host}", fix=fix, id=id)


def start_detached(
    command: Sequence[str], environ: Mapping[str, str], log: IO[bytes], where: Path
) -> subprocess.Popen[bytes]:
    """Start a process of this machine in a separate session, which outlives this process.

    Args:
        environ: its whole environment.
        log: file for its output.

    Raises:
        UserError: the machine cannot start a process.
    """
    try:
        return subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UserError(
            f"cannot start the run: {error.strerror or error}",
            where=str(error.filename or where),
            fix="free resources for a new process or file on this machine, then start again",
        ) from error


def login_line(command: Sequence[str]) -> str:
    r"""A command as one line with the same meaning in every login shell: sh, bash, zsh, csh, fish.

    Their quoting rules agree on one thing: between single quotes, every character stands for
    itself, except quotes, backslashes, exclamation marks and newlines. These characters, and all
    non-ASCII characters, are written as \xHH. The words are short enough for an old csh, and bash
    joins them.
    """
    is_script = len(command) == 3 and list(command[:2]) == ["bash", "-c"]
    script = command[2] if is_script else f"exec {shlex.join(command)}"
    words = [""]
    for char in script:
        is_plain = " " <= char <= "~" and char not in "'\\!"
        part = char if is_plain else "".join(f"\\x{byte:02x}" for byte in char.encode())
        if len(words[-1]) + len(part) > _WORD_CHARS:
            words.append("")
        words[-1] += part
    quoted = " ".join(f"'{word}'" for word in words)
    return f'exec bash -c \'printf -v REPLY %b "$@"; set --; eval "$REPLY"\' bash {quoted}'


def on_all(
    places: Sequence[T], work: Callable[[T], R]
) -> tuple[list[R | None], list[tuple[T, UserError]]]:
    """Do the same work at all places in parallel, in threads.

    Returns:
        The results in the order of the places, None for each user error; and the errors.
    """
    futures: list[Future[R]] = [Future() for _ in places]

    def do(future: Future[R], place: T) -> None:
        try:
            future.set_result(work(place))
        except BaseException as error:  # raised again when the result is read
            future.set_exception(error)

    # Not an executor, because Python waits for its threads at exit, even after Ctrl+C.
    for pair in zip(futures, places, strict=True):
        threading.Thread(target=do, args=pair, daemon=True).start()
    results: list[R | None] = []
    failures: list[tuple[T, UserError]] = []
    for place, future in zip(places, futures, strict=True):
        try:
            results.append(future.result())
        except UserError as error:
            results.append(None)
            failures.append((place, error))
    return results, failures


def ssh_config(destination: str) -> dict[str, str]:
    """The user's own configuration for a destination, from `ssh -G`; empty if ssh is not
    installed."""
    try:
        done = Shell().run(["ssh", "-G", "--", destination], timeout_s=10)
    except PreflightError:
        return {}
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
