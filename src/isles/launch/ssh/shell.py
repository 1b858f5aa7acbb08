"""Runs commands on this machine or over the user's own ssh, and explains why one failed."""

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
"""Exit status of ssh itself where it cannot connect."""

_POD_S = 180.0
"""How long a pod may take to be there, where none of a run runs."""
_MOST_BYTES = 64 * 2**20
"""The longest answer that is read. An answer of `isles report` has up to 26 MB."""
_CANNOT_RUN, _NOT_FOUND = 126, 127
_WORD_CHARS = 1000
_NO_FOLDER = re.compile(r"cd: (?P<folder>.*): No such file or directory")
_OWN_ERROR = re.compile(r"^error: ", re.M)
"""isles' own error says more than a line of a login script."""
_NO_MODULE = re.compile(r"No module named '?(?P<name>isles[\w.]*)")


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended; an exit status of 255 may be ssh's own."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Shell:
    """Runs commands in one place: `destination`, as ssh takes it, or IN_POD and the name of a
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
        """What a user types to try it; empty on this machine."""
        by_kubectl = "kubectl get pods -l app.kubernetes.io/managed-by=isles"
        return by_kubectl if self.is_pod else f"ssh {self.destination}" if self.destination else ""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` there, to be run here."""
        if self.destination is None:
            return list(command)
        if self.is_pod:
            words = [sys.executable, "-m", "isles.launch.kubernetes.reach"]
            return [*words, self.destination, *command]
        return ["ssh", *self.ssh_options(), "--", self.destination, login_line(command)]

    def ssh_options(self) -> list[str]:
        """Options for ssh, and for rsync -e, besides those of the user's own files."""
        connect_s = max(1, round(self.connect_timeout_s))
        options = ["BatchMode=yes", f"ConnectTimeout={connect_s}"]
        options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
        return [word for option in options for word in ("-o", option)]

    def run(
        self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 60.0
    ) -> Result:
        """Run a command to its end.

        Raises:
            PreflightError: the host cannot be reached, has not answered in time, or its answer has
                no end.
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
                        fix=f"try it by hand: {self.by_hand}" if self.destination else "",
                        id="host.answers",
                    ) from error
                finally:
                    process.kill()  # else the end of `with` waits for it
        if self.destination is not None and process.returncode == SSH_FAILED:
            raise self.failure(errors)
        return Result(process.returncode, output, errors)

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
            own_group: whether a Ctrl+C on this terminal is kept from it.

        Raises:
            PreflightError: there is no such command here.
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
        """Run a command to its end, and hand on each line of its output at once.

        Returns:
            Its exit status, None where it was killed for its time; and its error output.

        Raises:
            PreflightError: there is no such command here.
        """
        # Files have no reader that must keep up, nor names by which others could open them.
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
        """What ssh's own error means, and the line to type against it."""
        lines = [line for line in stderr.strip().splitlines() if line.strip()]
        text = lines[-1].strip() if lines else "ssh ended without a word"
        if self.is_pod:
            what, _, fix = stderr.strip().partition("\n  fix: ")
            fix = fix or f"try it by hand: {self.by_hand}"
            what = what or "the pod has gone"
            return PreflightError(what, where=f"host {self.name}", fix=fix, id="host.answers")
        what, fix = f"ssh cannot connect: {text}", f"try it by hand: ssh {self.destination}"
        for sign, meaning, cure in _FAILURES:
            if sign in stderr:
                what = f"{meaning} ({text})"
                fix = cure.format(destination=self.destination, host=self.name.rpartition("@")[2])
                break
        return PreflightError(what, where=f"host {self.name}", fix=fix, id="ssh.connect")


def _read_all(process: subprocess.Popen[bytes], timeout_s: float) -> tuple[str, str]:
    # Output and error output of a process, and its end. OverflowError: it writes too much.
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
    """What is said of a program of this machine that cannot be started."""
    program = str(error.filename)
    what = f"there is no program {program}"
    if isinstance(error, PermissionError):
        what = f"{program} cannot be run: {error.strerror}"
    fix = f"install {program}" + (": apt install openssh-client" * (program == "ssh"))
    return PreflightError(what, where="this machine", fix=fix)


_FAILURES = (
    ("Permission denied", "the host refuses the key", "ssh-copy-id {destination}"),
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host has another key than it had before",
        "if that is right: ssh-keygen -R {host}, then once by hand: ssh {destination}",
    ),
    (
        "Host key verification failed",
        "the host's key is not known here",
        "once by hand, and compare the key: ssh {destination}",
    ),
    ("Could not resolve", "no such host is known", "correct the name, or add it to ~/.ssh/config"),
    (
        "Connection refused",
        "the host is up and has no ssh server",
        "on {host}: sudo apt install openssh-server, or set Port in ~/.ssh/config",
    ),
    ("timed out", "the host does not answer", "is it switched on and on this network? ping {host}"),
    ("No route to host", "the host does not answer", "is it switched on? ping {host}"),
    ("Network is unreachable", "there is no way to the host", "is this machine on its network?"),
)


_ENVIRONMENTS = (
    (
        r"/bin/activate: No such file",
        "make the venv with `isles setup run.yaml` (over ssh) or `python3 -m venv`, or set "
        "clusters[0].environment.venv to another one",
    ),
    (
        r"\bmodule: (command )?not found",
        "clusters[0].environment.modules needs the command module, which this host does not have: "
        "delete it, or define the command first, such as clusters[0].environment.setup: [source "
        "/etc/profile.d/modules.sh]",
    ),
    (
        r"Unable to locate a modulefile|module(s|\(s\))? (is|are) unknown|ModuleCmd_Load",
        "correct clusters[0].environment.modules: `module avail` shows the names",
    ),
    (
        r"\bconda: (command )?not found|EnvironmentNameNotFound|Failed to activate conda",
        "correct clusters[0].environment.conda: `conda env list` shows the names; "
        "clusters[0].environment.setup may load conda first",
    ),
)


def environment_failure(output: str) -> tuple[str, str] | None:
    """The line with the reason why an environment could not be set up, and the fix.

    Returns:
        None if the output has no such line.
    """
    for line in output.splitlines():
        for pattern, fix in _ENVIRONMENTS:
            if re.search(pattern, line):
                return printable(line.strip(), longest=300), fix
    return None


def python_failure(host: str, python: str, code: int, stderr: str) -> PreflightError | None:
    """Why a command of isles could not be run on a host, by its exit status and its error output;
    None where isles itself has failed."""
    module, folder = _NO_MODULE.search(stderr), _NO_FOLDER.search(stderr)
    fix = "name the right Python in clusters[0].environment (venv, conda or python)"
    if module and module["name"] == "isles":
        id, what = "isles.installed", f"isles is not installed for {python}"
        fix = f"isles setup run.yaml installs it; or {fix}"
    elif module:
        id = "version.isles"
        what = f"{python} has another version of isles, which lacks {module['name']}"
        fix = "install the same isles on all hosts: isles setup"
    elif folder:
        id = "files.workdir"
        what = f"there is no folder {folder['folder']}, in which the ranks are to run"
        fix = "make it there, name another in clusters[0].workdir, or let isles copy this one: "
        fix += "clusters[0].sync"
    elif not _OWN_ERROR.search(stderr) and (found := environment_failure(stderr)) is not None:
        id, what, fix = (
            "python.runs",
            f"the environment cannot be set up there: {found[0]}",
            found[1],
        )
    elif code in (_CANNOT_RUN, _NOT_FOUND):
        words = stderr.strip().splitlines() or [f"exit status {code}"]
        id, what = "python.runs", f"{python} cannot be run there: {words[-1]}"
    else:
        return None
    return PreflightError(what, where=f"host {host}", fix=fix, id=id)


def start_detached(
    command: Sequence[str], environ: Mapping[str, str], log: IO[bytes], where: Path
) -> subprocess.Popen[bytes]:
    """Start a process of this machine in a session of its own, which outlives this one.

    Args:
        environ: all of its environment.
        log: takes what it prints.

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
            f"the run cannot be started: {error.strerror or error}",
            where=str(error.filename or where),
            fix="make room for a new process or file on this machine, then start again",
        ) from error


def login_line(command: Sequence[str]) -> str:
    """A command as one line that every login shell takes alike: sh, bash, zsh, csh, fish.

    Their rules of quoting have this in common: between single quotes, everything stands for
    itself but quotes, backslashes, exclamation marks and new lines. Those, and what is not ASCII,
    go as \\xHH; the words are as short as an old csh takes them, and bash puts them together.
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
    """Do the same at all places at once, in threads.

    Returns:
        The results in the order of the places, None where there was a user error; and the errors.
    """
    futures: list[Future[R]] = [Future() for _ in places]

    def do(future: Future[R], place: T) -> None:
        try:
            future.set_result(work(place))
        except BaseException as error:  # raised again where the result is wanted
            future.set_exception(error)

    # Not an executor, whose threads are waited for at the end, as after a Ctrl+C.
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
    """The user's own configuration for a destination, as `ssh -G` prints it; empty: no ssh."""
    try:
        done = Shell().run(["ssh", "-G", "--", destination], timeout_s=10)
    except PreflightError:
        return {}
    return dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
