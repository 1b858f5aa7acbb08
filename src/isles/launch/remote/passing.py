"""Verbs on a run whose directory is on another machine: passed on to isles there, over ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from isles.errors import PreflightError, UserError
from isles.launch.ssh.shell import Result, Shell
from isles.run.env import NAMED
from isles.run.remote import RemoteRun, write_remote

STARTED = "ISLES-STARTED "
"""Begins the line by which `isles train --announce` says which run it has started."""

SSH_FAILED = 255
_CONNECT_S = 5.0
"""Longest wait for a host that the user waits for."""


def remote_script(run: RemoteRun, words: Sequence[str]) -> str:
    """The bash that runs one isles command where the run directory is."""
    command = shlex.join([run.python, "-m", "isles", *words])
    return "\n".join([*run.lines, f"export {NAMED}={shlex.quote(run.behind)}", f"exec {command}"])


def remote_isles(
    run: RemoteRun, words: Sequence[str], *, host: str = "", connect_timeout_s: float = 10.0
) -> list[str]:
    """The command line, to be run here, that runs an isles command on a host of a run.

    Args:
        run: the run.
        words: the verb and what follows it.
        host: one of `run.hosts`; empty: the one that has the run directory.
        connect_timeout_s: longest wait for ssh to connect.
    """
    shell = Shell(host or run.ssh, connect_timeout_s)
    return shell.argv(["bash", "-c", remote_script(run, words)])


def ask_isles(
    run: RemoteRun, words: Sequence[str], *, host: str = "", timeout_s: float = 15.0
) -> Result:
    """Run an isles command on a host of a run, and take what it prints.

    Args:
        run, words, host: as for `remote_isles`.
        timeout_s: longest wait for its end.

    Raises:
        PreflightError: the host cannot be reached, or has not answered in time.
    """
    shell = Shell(host or run.ssh, _CONNECT_S)
    return shell.run(["bash", "-c", remote_script(run, words)], timeout_s=timeout_s)


def pass_on(run: RemoteRun, words: Sequence[str]) -> int:
    """Run an isles command where the run directory is, on this terminal; its exit code.

    Raises:
        PreflightError: the host cannot be reached, or has no isles.
    """
    try:
        done = subprocess.run(remote_isles(run, words), stdin=subprocess.DEVNULL, check=False)
    except FileNotFoundError as error:
        raise PreflightError(
            "there is no program ssh",
            where="this machine",
            fix="apt install openssh-client",
            id="ssh.connect",
        ) from error
    if done.returncode == SSH_FAILED:
        raise PreflightError(
            f"{run.ssh}, which has the directory of {run.name}, cannot be reached",
            where=f"host {run.ssh}",
            fix=f"try it by hand: ssh {run.ssh}",
            id="host.answers",
        )
    return done.returncode


def remember(output_dir: Path, run: RemoteRun, warn: Callable[[str], object]) -> RemoteRun:
    """Remember a run that was started elsewhere; it goes on also where that cannot be done here.

    Returns:
        The run, as it is found again.
    """
    try:
        return write_remote(output_dir, run)
    except UserError as error:
        warn(
            f"{run.name} has started, and cannot be remembered here: {error.what} ({error.where}); "
            f"isles status, logs and stop find it on {run.ssh}: {run.path}"
        )
        return run


def lost_python(host: str, python: str, noise: str, code: int) -> PreflightError | None:
    """What it means that isles could not be run there; None where isles itself has failed."""
    what = ""
    if "No module named" in noise and "isles" in noise:
        what = f"isles is not installed for {python}"
    elif code in (126, 127):
        words = noise.strip().splitlines()
        what = f"{python} cannot be run: {words[-1] if words else f'exit status {code}'}"
    if not what:
        return None
    return PreflightError(
        what,
        where=f"host {host}",
        fix="name the right Python in clusters[0].environment (venv, conda or python); "
        "isles setup installs isles on the hosts of a list",
        id="python.runs",
    )
