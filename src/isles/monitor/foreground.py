"""`isles train` in the foreground: follows the run, and passes Ctrl+C on in two steps."""

from __future__ import annotations

import signal

from rich.console import Console

from isles.errors import ExitCode
from isles.launch.start import Started
from isles.monitor.ending import conclude
from isles.monitor.follow import follow
from isles.monitor.inbox import Inbox
from isles.monitor.stop import wait_for_end
from isles.rundir.process import ProcessId
from isles.rundir.signals import kill_now, send_signal

_KILL_S = 10.0


class _Attendant:
    """Turns arriving signals into what they mean for the run."""

    def __init__(self, process: ProcessId, inbox: Inbox, errors: Console) -> None:
        self.was_killed = False
        self.has_left = False
        self._process = process
        self._inbox = inbox
        self._errors = errors
        self._is_asked = False

    def go_on(self) -> bool:
        """Deal with what has arrived; False when there is nothing left to follow."""
        for signum in self._inbox.take():
            if signum == signal.SIGHUP:
                self.has_left = True
                return False
            if signum == signal.SIGTERM:
                send_signal(self._process, signal.SIGTERM)
            elif not self._is_asked:
                self._is_asked = True
                send_signal(self._process, signal.SIGINT)
                self._say("saving a checkpoint and stopping; Ctrl+C again stops now, without it")
            else:
                kill_now(self._process)
                self.was_killed = True
                wait_for_end(self._process, _KILL_S)
                self._say("stopped now; the last saved checkpoint is as it was")
                return False
        return True

    def _say(self, line: str) -> None:
        self._errors.print(line, markup=False, highlight=False, soft_wrap=True)


def attend(started: Started, *, inbox: Inbox, console: Console, errors: Console) -> int:
    """Follow a run that was just started until it ends, and say how it ended.

    Args:
        started: the run.
        inbox: where signals to this process arrive.
        console: for progress and results.
        errors: for what went wrong.

    Returns:
        The run's exit code; 0 where the terminal was closed and the run goes on.
    """
    run_dir, attempt = started.run_dir, started.attempt
    assert started.process is not None
    attendant = _Attendant(started.process, inbox, errors)
    follow(run_dir, attempt, console, go_on=attendant.go_on)
    if attendant.has_left:
        return ExitCode.OK
    if attendant.was_killed:
        return ExitCode.INTERRUPTED
    return conclude(run_dir, attempt, console, errors)
