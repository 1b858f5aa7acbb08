"""Following a run on the machine that has its directory, for as long as ssh holds and again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from rich.console import Console

from isles.errors import ExitCode
from isles.facts.units import format_duration
from isles.launch.remote.passing import SSH_FAILED, remote_script
from isles.launch.ssh.shell import Shell, login_line
from isles.monitor.inbox import ORDERS, Inbox
from isles.run.remote import RemoteRun

_LOOK_S = 0.2
_AGAIN_S = 2.0
_GIVE_UP_S = 600.0
"""How long a lost connection is tried again."""

_STEADY_S = 20.0
"""A connection that has lasted so long is no longer a try."""

_WORDS = {number: word for word, number in ORDERS.items()}


class RemoteAttendant:
    """Follows a run through `isles attend` on its machine.

    On a terminal that one draws and hears Ctrl+C itself, as in any ssh session; elsewhere signals
    are passed on as words.

    Args:
        run: the run.
        attempt: number of its start.
        inbox: where signals to this process arrive.
        errors: for what is to be said here.
        is_begun: it has been followed before: only what is new is shown.
    """

    def __init__(
        self,
        run: RemoteRun,
        attempt: int,
        inbox: Inbox,
        errors: Console,
        *,
        is_begun: bool = False,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._inbox = inbox
        self._errors = errors
        self._is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._is_begun = is_begun
        self._unsaid: list[signal.Signals] = []
        """Signals that could not be passed on while the connection was lost."""
        self._old_words: set[str] = set()
        """What connections that were lost have said on stderr: each try would say it again."""

    def attend(self) -> int:
        """Follow it until it ends; the run's exit code, or 0 where this terminal was closed."""
        lost_at: float | None = None
        while True:
            since = time.monotonic()
            code = self._follow()
            if code is None:
                return ExitCode.OK
            if code != SSH_FAILED and code >= 0:
                return code
            if time.monotonic() - since > _STEADY_S:
                lost_at = None
            if lost_at is None:
                lost_at = time.monotonic()
                self._say(
                    f"the connection to {self._run.host} is lost; the run goes on there. Trying "
                    f"again for {format_duration(_GIVE_UP_S)}; Ctrl+C leaves it running"
                )
            code = self._wait(lost_at)
            if code is not None:
                return code

    def _follow(self) -> int | None:
        """One connection; its exit code, None where this terminal was closed."""
        process = self._connect()
        words: list[str] = []
        errors = threading.Thread(target=self._hear, args=(process, words), daemon=True)
        errors.start()
        self._is_begun = True
        for number in self._unsaid:
            self._pass_on(process, number)
        self._unsaid = []
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=_LOOK_S)
                    errors.join(timeout=1.0)
                    if code == SSH_FAILED:
                        self._old_words |= set(words)
                    return code
                for number in self._inbox.take():
                    if number == signal.SIGHUP:
                        return None
                    self._pass_on(process, number)
        finally:
            self._part(process)

    def _hear(self, process: subprocess.Popen[bytes], words: list[str]) -> None:
        """Pass on what comes on stderr, of isles there or of ssh itself."""
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            words.append(line)
            if line not in self._old_words:
                self._say(line)

    def _connect(self) -> subprocess.Popen[bytes]:
        words = ["attend", self._run.path, "--attempt", str(self._attempt)]
        words += ["--begun"] if self._is_begun else []
        words += [] if self._is_terminal else ["--orders"]
        return subprocess.Popen(
            self._argv(words, is_terminal=self._is_terminal),
            stdin=None if self._is_terminal else subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl+C is passed on in words there; it must not end the connection.
            start_new_session=not self._is_terminal,
        )

    def _argv(self, words: list[str], *, is_terminal: bool) -> list[str]:
        shell = Shell(self._run.ssh)
        options = shell.ssh_options()
        if any(word.startswith("ControlPath=") for word in options):
            # A connection of its own: the end of another command must not cut this one.
            options = ["-S", "none", *options]
        if is_terminal:
            options = ["-tt", "-e", "none", "-o", "LogLevel=ERROR", *options]
        command = ["bash", "-c", remote_script(self._run, words)]
        return ["ssh", *options, self._run.ssh, login_line(command)]

    def _pass_on(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        word = _WORDS.get(number)
        if word is None:
            return
        if process.stdin is not None:
            with suppress(OSError):  # the connection is lost: its end says so
                process.stdin.write(f"{word}\n".encode())
                process.stdin.flush()
            return
        # On a terminal Ctrl+C goes through it; what comes as a signal needs another connection.
        words = ["attend", self._run.path, "--attempt", str(self._attempt), "--begun", "--orders"]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                self._argv(words, is_terminal=False),
                input=f"{word}\n".encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=30,
                check=False,
            )

    def _wait(self, lost_at: float) -> int | None:
        """Wait before the next try; an exit code where there is none."""
        until = time.monotonic() + _AGAIN_S
        while time.monotonic() < until:
            for number in self._inbox.take():
                if number == signal.SIGHUP:
                    return ExitCode.OK
                if number == signal.SIGTERM:
                    self._unsaid.append(number)
                    continue
                self._leave("not followed any more")
                return ExitCode.COMMUNICATION
            time.sleep(_LOOK_S)
        if time.monotonic() - lost_at > _GIVE_UP_S:
            self._leave(f"{self._run.host} could not be reached again")
            return ExitCode.COMMUNICATION
        return None

    def _leave(self, what: str) -> None:
        label = self._run.typed
        self._say(f"{what}; {self._run.name} was left running:")
        self._say(f"  isles status {label} · isles logs -f {label} · isles stop {label}")

    def _part(self, process: subprocess.Popen[bytes]) -> None:
        """Whoever follows there ends with the connection."""
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2 if process.stdin is not None else 0)
        if process.poll() is None:
            process.kill()
            process.wait()

    def _say(self, line: str) -> None:
        self._errors.print(line, markup=False, highlight=False, soft_wrap=True)
