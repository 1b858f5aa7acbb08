"""`isles train` in the foreground: follows the run, and passes Ctrl+C on in two steps."""

from __future__ import annotations

import signal
import sys
import threading

from rich.console import Console

from isles.errors import ExitCode, UserError, more_lines
from isles.launch.base import Started
from isles.launch.queue.jobs import queue_job, refresh
from isles.monitor.ending import conclude
from isles.monitor.follow import follow
from isles.monitor.follow_remote import RemoteAttendant
from isles.monitor.inbox import ORDERS, Inbox
from isles.monitor.stop import Stopping, wait_for_end
from isles.run.find import typed_name
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.refusals import deleted
from isles.run.remote import RemoteRun
from isles.run.state import attempt_state, script_of

_QUEUE_S = 5.0
"""How often the queue is asked."""

_GONE_S = 60.0
"""How long the processes of a run may take to end once its directory is gone."""


class _Attendant:
    """Turns arriving signals into what they mean for the run."""

    def __init__(self, started: Started, inbox: Inbox, errors: Console) -> None:
        self.was_killed = False
        self.has_left = False
        self._run_dir, self._attempt = started.run_dir, started.attempt
        self._inbox = inbox
        self._errors = errors
        self._is_asked = False

    def go_on(self) -> bool:
        """Deal with what has arrived; False when there is nothing left to follow."""
        for signum in self._inbox.take():
            if signum == signal.SIGHUP:
                self.has_left = True
                return False
            try:
                if signum == signal.SIGTERM:
                    self._stopping().ask("save")
                elif not self._is_asked:
                    self._ask()
                else:
                    stopping = self._stopping()
                    stopping.ask("now")
                    self.was_killed = True
                    stopping.wait_now()
                    self._say("stopped now; the last saved checkpoint is as it was")
                    return False
            except UserError as error:
                self._say(f"error: {error}")
        return True

    def _ask(self) -> None:
        stopping = self._stopping()
        if attempt_state(self._run_dir, self._attempt).state == "queued":
            self._say(f"taking {stopping.place} out of the queue")
        elif script_of(self._run_dir) is not None:
            self._say("the script gets SIGTERM, to save and end; Ctrl+C again kills it")
        else:
            self._say("saving a checkpoint and stopping; Ctrl+C again stops now, without it")
        stopping.ask("interrupt")
        self._is_asked = True

    def _stopping(self) -> Stopping:
        run_dir, attempt = self._run_dir, self._attempt
        state, job = attempt_state(run_dir, attempt), queue_job(run_dir, attempt)
        return Stopping(run_dir, attempt, state, job, lambda line: self._say(str(line)))

    def _say(self, line: str) -> None:
        self._errors.print(line, markup=False, highlight=False, soft_wrap=True)


def attend(
    started: Started,
    *,
    inbox: Inbox,
    console: Console,
    errors: Console,
    is_begun: bool = False,
) -> int:
    """Follow a run that was just started until it ends, and say how it ended.

    Args:
        started: the run.
        inbox: where signals to this process arrive.
        console: for progress and results.
        errors: for what went wrong.
        is_begun: it has been followed before: only what is new is shown.

    Returns:
        The run's exit code; 0 where the terminal was closed and the run goes on.
    """
    run_dir, attempt = started.run_dir, started.attempt
    if started.remote is not None:
        return RemoteAttendant(started.remote, attempt.number, inbox, errors).attend()
    attendant = _Attendant(started, inbox, errors)
    process = started.process or attempt_state(run_dir, attempt).process
    is_over = threading.Event()
    if queue_job(run_dir, attempt) is not None:
        threading.Thread(target=_ask_queue, args=(run_dir, attempt, is_over), daemon=True).start()
    try:
        follow(run_dir, attempt, console, go_on=attendant.go_on, is_begun=is_begun)
        if attendant.has_left:
            return ExitCode.OK
        if attendant.was_killed:
            return ExitCode.INTERRUPTED
        if (gone := deleted(attempt)) is not None:
            return _conclude_gone(gone, process, errors)
        return conclude(run_dir, attempt, console, errors)
    except BrokenPipeError:
        name = typed_name(run_dir)
        attendant._say(f"nobody reads this any more; {run_dir.name} goes on: isles status {name}")
        raise
    finally:
        is_over.set()


def _conclude_gone(gone: UserError, process: ProcessId | None, errors: Console) -> int:
    """The run directory is not there any more: say so once the processes of the run have ended."""
    place = gone.where
    if process is not None and process.is_here():
        has_ended = wait_for_end(process, _GONE_S)
        still = f"where pid {process.pid} has not ended yet"
        place += f", {'where its processes have ended' if has_ended else still}"
    lines = [f"error: {gone.what}", f"  where: {place}", f"  fix: {gone.fix}"]
    for line in (*lines, *more_lines(gone.ids)):
        errors.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(gone.exit_code)


def attend_here(run_dir: RunDir, number: int | None, *, takes_orders: bool, is_begun: bool) -> int:
    """Follow a run for isles on another machine.

    Args:
        run_dir: the run.
        number: of the attempt; None: the last.
        takes_orders: signals come as words on stdin, and its end means that nobody follows.
        is_begun: only what is new is shown.

    Returns:
        As `attend`.
    """
    from isles.monitor.consoles import console
    from isles.monitor.inbox import caught_signals
    from isles.monitor.logs import choose_attempt

    attempt = choose_attempt(run_dir, number)
    with caught_signals() as inbox:
        if takes_orders:
            threading.Thread(target=_take_orders, args=(inbox,), daemon=True).start()
        started = Started(run_dir, attempt, None)
        return attend(
            started,
            inbox=inbox,
            console=console(),
            errors=console(stderr=True),
            is_begun=is_begun,
        )


def attend_there(run: RemoteRun, number: int, *, is_begun: bool) -> int:
    """Follow a run of another machine; signals come as words on stdin.

    Args:
        run: the run.
        number: of the attempt.
        is_begun: only what is new is shown.

    Returns:
        As `attend`.
    """
    from isles.monitor.consoles import console
    from isles.monitor.inbox import caught_signals

    with caught_signals() as inbox:
        threading.Thread(target=_take_orders, args=(inbox,), daemon=True).start()
        errors = console(stderr=True)
        return RemoteAttendant(run, number, inbox, errors, is_begun=is_begun).attend()


def _take_orders(inbox: Inbox) -> None:
    for line in sys.stdin:
        number = ORDERS.get(line.strip())
        if number is not None:
            inbox.put(number)
    inbox.put(signal.SIGHUP)


def _ask_queue(run_dir: RunDir, attempt: Attempt, is_over: threading.Event) -> None:
    """Keep what the queue says of the job fresh, beside the following."""
    while not is_over.is_set():
        try:
            refresh(run_dir, attempt, hasten=True)
        except OSError:
            return  # its answer cannot be kept: what the ranks write is followed all the same
        is_over.wait(_QUEUE_S)
