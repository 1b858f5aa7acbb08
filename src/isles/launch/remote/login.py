"""isles on another machine, over ssh: starts a run there, or queries a run there.

A run started on a login node or on other hosts has its directory there. This machine keeps a record
of it (`RemoteRun`), so that every command runs isles there and passes on its output.
"""

from __future__ import annotations

import errno
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import LoginSection
from isles.errors import PreflightError, UserError
from isles.facts.terminal import copy_drawn
from isles.launch.answers import STARTED, Announced, read_started
from isles.launch.base import Started, StartOptions
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import SSH_FAILED, CommandResult, Shell, not_started, python_failure
from isles.run.env import MACHINE, NAMED
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun, write_remote

_START_S = 600.0
"""Longest wait for isles on the login node to submit the job."""

_CONNECT_S = 5.0
"""Longest wait for a host that the user waits for."""

_PROXY_S = 20.0
"""Additional wait for nodes of SkyPilot, which are often behind a proxy command that must start."""


class LoginError(UserError):
    """An error printed by isles on the login node, unchanged."""

    def __str__(self) -> str:
        return self.what


def start_on_login(loaded: Loaded, options: StartOptions) -> Started | str:
    """Start a run by isles on the login node of its launcher; in a dry run, the text to print.

    Raises:
        UserError: isles there refuses the start; with the names of the files on this machine.
        PreflightError: the login node cannot be reached, or has no isles.
    """
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, LoginSection) and launcher.login is not None
    login, there = launcher.login, place_there(loaded)
    lines, python = login_setting(loaded)
    words = ["train", there, *options.overrides, "clusters.0.launcher.login=null"]
    words += [f"--resume={options.resume}", "--dry-run" if options.dry_run else "--announce"]
    words += [f"--typed={options.typed}"] if options.typed else []
    secret = f"{there.rpartition('/')[0]}/join-line" if options.join else ""
    words += [f"--join-file={secret}"] if secret else []
    script = copied_file_script(there, lines, python, words, secret=secret)
    # The secret is sent as the first line, not in a command line that other users there can see.
    text = f"{options.join}\n{loaded.text}" if options.join else loaded.text
    printed: list[str] = []
    announced: list[str] = []

    def take(raw: str) -> None:
        line = raw.replace(there, str(loaded.path))
        if line.startswith(STARTED):
            announced.append(line)
        elif options.dry_run:
            printed.append(line)
        else:
            options.print_line(line)

    shell = Shell(login)
    command = ["bash", "-c", script]
    # A submission is not interrupted halfway; Ctrl+C applies to the run, after it has started.
    code, noise = shell.stream(command, take, stdin=text, timeout_s=_START_S, own_group=True)
    errors = noise.replace(there, str(loaded.path))
    if code:
        raise _refused(shell, code, errors.rstrip("\n"), python)
    if code is None or not (announced or options.dry_run):
        late = f"did not start the run within {_START_S:.0f} s"
        silent = f"did not announce its run; it may have a version other than {__version__}"
        raise PreflightError(
            f"isles there {late if code is None else silent}",
            where=f"host {login}",
            fix=f"test the login with ssh {login}",
            id="host.login",
        )
    sys.stderr.write(errors)
    if options.dry_run:
        return "\n".join(printed)
    begun = read_started(
        announced[-1],
        where=f"host {login}",
        fix=f"run ssh {login} isles status, because the run may have started; then install the "
        "same isles on both machines with isles setup",
    )
    if begun.version != __version__:
        options.warn(
            f"isles is version {begun.version} on {login}, but {__version__} on this machine"
        )
    return started_elsewhere(loaded, options, begun, [login], lines, python)


def started_elsewhere(
    loaded: Loaded,
    options: StartOptions,
    begun: Announced,
    hosts: Sequence[str],
    lines: Sequence[str],
    python: str,
    *,
    folder: Path | None = None,
) -> Started:
    """A run whose directory is on another machine; this machine keeps a record of it.

    Args:
        hosts: destinations for ssh; the first one has the run directory.
        folder: folder of the record on this machine; None: the output folder of the run file.
    """
    run_dir = RunDir(Path(begun.path))
    remote = RemoteRun(
        name=run_dir.name,
        ssh=hosts[0],
        path=begun.path,
        elsewhere=begun.elsewhere,
        lines=tuple(lines),
        python=python,
        launcher=loaded.config.clusters[0].launcher.kind,
        hosts=tuple(hosts),
        started_at=time.time(),
    )
    folder = folder or Path(loaded.config.output_dir).expanduser()
    remote = remember(folder, remote, options.warn)
    return Started(run_dir, run_dir.attempt(begun.attempt), None, remote=remote)


def started_line(started: Started) -> str:
    """The line that announces a started run to isles on another machine."""
    ssh = started.remote.ssh if started.remote is not None else ""
    path = str(started.run_dir.path.absolute())
    return Announced(__version__, path, started.attempt.number, ssh).line()


def _refused(shell: Shell, code: int, text: str, python: str) -> UserError:
    if code == SSH_FAILED:
        return shell.failure(text)
    if (failure := python_failure(shell.name, python, code, text)) is not None:
        return failure
    if not text.startswith(("error: ", "warning: ")):
        # This output is not from isles, but from the shell.
        words = text.splitlines()[-1] if text else f"exit status {code}"
        return PreflightError(
            f"could not start isles there: {words}",
            where=f"host {shell.name}",
            fix="correct clusters.0.workdir and clusters.0.environment, and test with ssh "
            f"{shell.name}",
            id="host.login",
        )
    error = LoginError(text.removeprefix("error: "))
    error.exit_code = code  # type: ignore[assignment]
    return error


def place_there(loaded: Loaded) -> str:
    """Temporary path of the run file on the login node, while isles there reads it."""
    return f"/tmp/isles-login-{secrets.token_hex(16)}/{loaded.path.name}"


def login_setting(loaded: Loaded) -> tuple[list[str], str]:
    """The lines of bash before Python on the login node, and its Python."""
    cluster = loaded.config.clusters[0]
    lines = setting_lines(cluster, cluster.workdir or ".")
    if cluster.workdir is None:
        # The same folder as on this machine, if the login node has it; else its home.
        lines[0] = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || cd || exit 1"
    return lines, python_of(cluster.environment)


def copied_file_script(
    there: str, lines: list[str], python: str, words: list[str], *, secret: str = ""
) -> str:
    """Bash that reads the run file from stdin and calls isles with it; `secret`: the file for the
    first line of stdin; empty: stdin has only the run file."""
    folder, file = there.rpartition("/")[0], shlex.quote(there)
    # read and printf are the shell's own: no process has the line among its arguments.
    first = f'IFS= read -r line && printf "%s\\n" "$line" >{secret} && ' if secret else ""
    return "\n".join(
        [
            f"mkdir -m 700 {folder} && trap 'rm -rf {folder}' EXIT && {first}cat >{file} || exit 1",
            *lines,
            f"{shlex.quote(python)} -m isles {shlex.join(words)} </dev/null",
        ]
    )


def remote_script(run: RemoteRun, words: Sequence[str]) -> str:
    """Bash that runs one isles command on the machine of the run directory.

    Raises:
        PreflightError: the record of the run belongs to another user.
    """
    run.require_own()
    command = shlex.join([run.python, "-m", "isles", *words])
    told = f"export {NAMED}={shlex.quote(run.behind)} {MACHINE}={shlex.quote(run.ssh)}"
    return "\n".join([*run.lines, told, f"exec {command}"])


def remote_isles(
    run: RemoteRun, words: Sequence[str], *, host: str = "", connect_timeout_s: float = 10.0
) -> list[str]:
    """The local command line that runs an isles command on a host of a run; empty `host`: the
    machine of the run directory.

    Raises:
        PreflightError: this machine has no ssh, or no kubectl; or as in `remote_script`.
    """
    shell = Shell(host or run.ssh, connect_timeout_s + _more_s(run))
    argv = shell.argv(["bash", "-c", remote_script(run, words)])
    if shutil.which(argv[0]) is None:
        raise not_started(FileNotFoundError(errno.ENOENT, "", argv[0]))
    return argv


def ask_isles(
    run: RemoteRun, words: Sequence[str], *, host: str = "", timeout_s: float = 15.0
) -> CommandResult:
    """Run an isles command on a host of a run, as `remote_isles` does, and return its output.

    Raises:
        PreflightError: the host cannot be reached, or did not answer in time.
    """
    shell = Shell(host or run.ssh, _CONNECT_S + _more_s(run))
    command = ["bash", "-c", remote_script(run, words)]
    return shell.run(command, timeout_s=timeout_s + _more_s(run))


def _more_s(run: RemoteRun) -> float:
    return _PROXY_S if run.launcher == "skypilot" else 0.0


def pass_on(run: RemoteRun, words: Sequence[str]) -> int:
    """Run an isles command on the machine of the run directory, on this terminal; its exit code.

    Raises:
        PreflightError: the host cannot be reached, or has no isles.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        remote_isles(run, words), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        errors = threading.Thread(target=copy_drawn, args=(process.stderr.fileno(), sys.stderr))
        errors.start()
        try:
            copy_drawn(process.stdout.fileno(), sys.stdout)
        except BaseException:
            process.terminate()
            raise
        finally:
            errors.join()
    if process.returncode == SSH_FAILED:
        raise PreflightError(
            f"cannot reach {run.ssh}, which has the directory of {run.name}",
            where=f"host {run.ssh}",
            fix=f"test the connection with {Shell(run.ssh).by_hand}",
            id="host.answers",
        )
    return process.returncode


def remember(output_dir: Path, run: RemoteRun, warn: Callable[[str], object]) -> RemoteRun:
    """Record a run that was started on another machine; a failure to do so only warns."""
    try:
        return write_remote(output_dir, run)
    except UserError as error:
        warn(
            f"{run.name} has started, but this machine cannot record it: {error.what} "
            f"({error.where}). Use isles status, logs and stop on {run.ssh}, with {run.path}"
        )
        return run
