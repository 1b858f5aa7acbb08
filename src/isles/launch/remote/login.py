"""Starting from elsewhere: isles on the login node does the work, this machine passes text on."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import QueueSection
from isles.errors import PreflightError, UserError
from isles.launch.base import Started, StartOptions
from isles.launch.remote.login import SSH_FAILED, STARTED, lost_python, remember
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun

_START_S = 600.0
"""Longest wait for isles on the login node to have submitted the job."""


class LoginError(UserError):
    """What isles on the login node has said, word for word."""

    def __str__(self) -> str:
        return self.what


def start_on_login(loaded: Loaded, options: StartOptions) -> Started | str:
    """Start a run by isles on the login node of its launcher; called where `login` is given.

    Args:
        loaded: the run file.
        options: how `isles train` was typed here.

    Returns:
        The started run, whose directory is there; in a dry run the text to print.

    Raises:
        UserError: what isles there refuses, with the names of the files here.
        PreflightError: the login node cannot be reached, or has no isles.
    """
    launcher = loaded.config.clusters[0].launcher
    assert isinstance(launcher, QueueSection)
    assert launcher.login is not None
    there = place_there(loaded)
    lines, python = login_setting(loaded)
    said = _Said(Shell(launcher.login), there, str(loaded.path))
    script = _script(there, lines, python, options)
    # The secret travels as the first line, not in a command line that others there can see.
    text = f"{options.join}\n{loaded.text}" if options.join else loaded.text
    code = said.listen(["bash", "-c", script], text, options)
    if code:
        said.raise_for(code, python)
    if options.dry_run:
        return "\n".join(said.lines)
    begun = said.started
    if begun is None:
        raise PreflightError(
            "isles there ended well, and has not said which run it started",
            where=f"host {launcher.login}",
            fix=f"install the same isles there as here ({__version__})",
            id="host.login",
        )
    if begun["version"] != __version__:
        options.warn(f"isles is {begun['version']} on {launcher.login}, and {__version__} here")
    path = Path(begun["path"])
    remote = RemoteRun(
        name=path.name,
        ssh=launcher.login,
        path=str(path),
        lines=tuple(lines),
        python=python,
        launcher=loaded.config.clusters[0].launcher.kind,
        hosts=(launcher.login,),
        started_at=time.time(),
    )
    output_dir = Path(loaded.config.output_dir).expanduser()
    remote = remember(output_dir, remote, options.warn)
    run_dir = RunDir(path)
    return Started(run_dir, run_dir.attempt(int(begun["attempt"])), None, remote=remote)


def place_there(loaded: Loaded) -> str:
    """Where the run file lies on the login node for as long as isles there reads it."""
    return f"/tmp/isles-login-{secrets.token_hex(16)}/{loaded.path.name}"


def login_setting(loaded: Loaded) -> tuple[list[str], str]:
    """What comes before Python on the login node, and its Python."""
    cluster = loaded.config.clusters[0]
    lines = setting_lines(cluster, cluster.workdir or ".")
    if cluster.workdir is None:
        # The folder of this machine where the login node has it too; else its home.
        lines[0] = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || cd || exit 1"
    return lines, python_of(cluster.environment)


def _script(there: str, lines: list[str], python: str, options: StartOptions) -> str:
    words = ["train", there, *options.overrides, "clusters.0.launcher.login=null"]
    words += [f"--resume={options.resume}", "--dry-run" if options.dry_run else "--announce"]
    words += [f"--typed={options.typed}"] if options.typed else []
    secret = ""
    if options.join:
        secret = f"{there.rpartition('/')[0]}/join-line"
        words.append(f"--join-file={secret}")
    return copied_file_script(there, lines, python, words, secret=secret)


def copied_file_script(
    there: str, lines: list[str], python: str, words: list[str], *, secret: str = ""
) -> str:
    """The bash that takes the run file from stdin and calls isles with it.

    Args:
        there: as `place_there`.
        lines, python: as `login_setting`.
        words: the verb and what follows it.
        secret: the file that gets the first line of stdin; empty: there is none before the file.
    """
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


def started_line(started: Started) -> str:
    """The line by which isles says to isles elsewhere which run it has started."""
    record = {
        "version": __version__,
        "path": str(started.run_dir.path.absolute()),
        "attempt": started.attempt.number,
        "ssh": started.remote.ssh if started.remote is not None else "",
    }
    return STARTED + json.dumps(record)


class _Said:
    """What isles on the login node says, as it says it, with this machine's name of the file."""

    def __init__(self, shell: Shell, there: str, here: str) -> None:
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.started: dict[str, Any] | None = None
        self._shell = shell
        self._there, self._here = there, here

    def listen(self, command: list[str], text: str, options: StartOptions) -> int:
        """Run a command there to its end; its exit status.

        Raises:
            PreflightError: it has not ended in time, or the login node cannot be reached.
        """
        process = subprocess.Popen(
            self._shell.argv(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # Ctrl+C is for the run, once it is there: half a submission helps nobody.
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        alarm = threading.Timer(_START_S, process.kill)
        alarm.daemon = True
        alarm.start()
        reader = threading.Thread(target=self._read_errors, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            process.stdin.write(text)
            process.stdin.close()
        except BrokenPipeError:
            pass  # the end of the process says why
        for raw in process.stdout:
            line = raw.rstrip("\n").replace(self._there, self._here)
            if line.startswith(STARTED):
                self.started = json.loads(line.removeprefix(STARTED))
            elif options.dry_run:
                self.lines.append(line)
            else:
                options.say(line)
        code = process.wait()
        reader.join(timeout=5)
        if alarm.finished.is_set():
            raise PreflightError(
                f"isles there has not started the run within {_START_S:.0f} s",
                where=f"host {self._shell.name}",
                fix=f"try it by hand: ssh {self._shell.name}",
                id="host.login",
            )
        alarm.cancel()
        if not code:
            for line in self.errors:
                sys.stderr.write(f"{line}\n")
        return code

    def raise_for(self, code: int, python: str) -> None:
        """Say why it failed as isles there has said it."""
        text = "\n".join(self.errors)
        if code == SSH_FAILED:
            raise self._shell.fault(text)
        if (fault := lost_python(self._shell.name, python, text, code)) is not None:
            raise fault
        if not text.startswith(("error: ", "warning: ")):
            # Not isles has said this, but the shell: a folder that is not there, a module.
            words = self.errors[-1] if self.errors else f"exit status {code}"
            raise PreflightError(
                f"isles could not be started there: {words}",
                where=f"host {self._shell.name}",
                fix="correct workdir and environment in clusters[0]; by hand: "
                f"ssh {self._shell.name}",
                id="host.login",
            )
        error = LoginError(text.removeprefix("error: "))
        error.exit_code = code  # type: ignore[assignment]
        raise error

    def _read_errors(self, stream: IO[str]) -> None:
        for raw in stream:
            self.errors.append(raw.rstrip("\n").replace(self._there, self._here))
