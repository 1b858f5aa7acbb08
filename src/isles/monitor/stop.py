"""Ways to stop a run: signals to the command that follows it, and `isles stop`."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import psutil

from isles.errors import ExitCode, UserError
from isles.facts.units import format_duration
from isles.launch.queue.status import queue_job, refresh
from isles.monitor.status import collect
from isles.run.find import typed_name
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId, handled
from isles.run.state import attempt_state, current_status, script_of
from isles.run.stop import StopKind, kill_now, request_stop, send_signal

WORDS = {signal.SIGINT: "interrupt", signal.SIGTERM: "requeue"}
"""Words on the stdin of `isles follow`, by the signal that each replaces."""

_POLL_S = 0.5
_KILL_S = 10.0
_GLANCE_S, _SILENT_S = 5.0, 15.0
"""Longest wait for an answer of a scheduler, and the largest age of its last answer."""
_COORDINATOR_S = 15.0
"""How long a coordinator may take to end the ranks of all nodes, before it is killed itself."""

_BY_FILES_S = 60.0
"""The same for a run that is seen only by its files."""

PrintLine = Callable[[str], object]


class Signals:
    """Signals that have arrived and were not handled yet."""

    def __init__(self) -> None:
        self._arrived: list[signal.Signals] = []

    def put(self, signum: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        self._arrived.append(signal.Signals(signum))

    def take(self) -> list[signal.Signals]:
        """Remove and return all that have arrived."""
        taken = []
        while self._arrived:
            taken.append(self._arrived.pop(0))
        return taken

    def read_stdin(self) -> None:
        """Read `WORDS` from stdin in a thread; the end of stdin counts as SIGHUP."""

        def read() -> None:
            for line in sys.stdin:
                for number, word in WORDS.items():
                    if line.strip() == word:
                        self.put(number)
            self.put(signal.SIGHUP)

        threading.Thread(target=read, daemon=True).start()


@contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catch Ctrl+C, SIGTERM and SIGHUP; to be entered before the run is started.

    A signal that is ignored stays ignored, so that nohup works.
    """
    signals = Signals()
    with handled(signals.put, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield signals


def stop_run(run_dir: RunDir, *, now: bool, timeout_s: float, print_line: PrintLine) -> int:
    """Stop a run and wait for its end. Returns 0, also if the run has already ended.

    Raises:
        UserError: it belongs to another user, is silent, or did not end in time.
    """
    attempt = run_dir.last_attempt()
    if attempt is not None:
        refresh(run_dir, attempt, max_age_s=0.0, ask_s=_GLANCE_S)
    stopping = Stopping(run_dir, attempt, print_line) if attempt is not None else None
    if stopping is None or not (stopping.state.is_alive or stopping.state.state == "unknown"):
        print_line(f"{run_dir.name} is not running: {_state_text(run_dir)}")
        return ExitCode.OK
    if not stopping.ask("now" if now else "save"):
        print_line(f"{run_dir.name} has just ended: {_state_text(run_dir)}")
        return ExitCode.OK
    if owner := stopping.owner:
        print_line(
            f"{run_dir.name} belongs to {owner}, so isles only left a request in its directory"
        )
    is_script = script_of(run_dir) is not None
    if now:
        stopping.wait_now(timeout_s)
        how = "at once" if is_script else "without saving"
        print_line(f"{run_dir.name} was ended {how}: {_state_text(run_dir)}")
        return ExitCode.OK
    what, now_it = "save and stop", "ends it without saving"
    if is_script:
        what, now_it = "stop: its script gets SIGTERM", "kills it"
    print_line(
        f"asked {run_dir.name} ({stopping.place}) to {what}; "
        f"`isles stop {typed_name(run_dir)} --now` {now_it}"
    )
    if not stopping.wait(timeout_s):
        raise UserError(
            f"{run_dir.name} has not ended within {format_duration(timeout_s)}",
            where=stopping.place,
            fix=f"wait longer (--timeout), look at `isles logs {typed_name(run_dir)}`, or give "
            "--now",
            id="stop.late",
        )
    print_line(f"{run_dir.name} has ended: {_state_text(run_dir)}")
    return ExitCode.OK


def _named(attempt: Attempt) -> str:
    return f", {attempt.owner}" if attempt.owner else ""


def _state_text(run_dir: RunDir) -> str:
    report = collect(run_dir)
    if report.state == "new":
        return report.hint
    step = f" at step {report.step}" if report.step is not None else ""
    reason = f" ({report.reason})" if report.reason else ""
    return f"{report.state}{step}{reason}; {report.hint}"


class Stopping:
    """Stops one attempt: by its job, by its process on this host, or by its files alone."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, print_line: PrintLine) -> None:
        self.state = attempt_state(run_dir, attempt)
        self.owner = attempt.owner
        self._run_dir = run_dir
        self._attempt = attempt
        self._job = queue_job(run_dir, attempt)
        self._print_line = print_line
        # Another user's record may name any process, so isles sends no signal to it.
        is_sent = self.state.is_here and not attempt.owner
        self._process = self.state.process if is_sent else None

    @property
    def place(self) -> str:
        """Where it runs, for messages."""
        if self._job is not None:
            return self._job.text
        process = self.state.process
        if process is None:
            return str(self._attempt.path)
        return f"pid {process.pid}" if process.is_here() else f"{process.host}, pid {process.pid}"

    def ask(self, kind: StopKind) -> bool:
        """Request the stop in every possible way. Returns False if the run has just ended.

        Raises:
            UserError: there is no way, or it is silent.
        """
        is_written = True
        try:
            request_stop(self._attempt, kind)
        except OSError as error:
            is_written = False
            if self._process is None and self._job is None:
                raise UserError(
                    f"the request to stop cannot be left: {error.strerror}",
                    where=str(self._attempt.stop_request),
                    fix=f"ask as the user who started the run{_named(self._attempt)}, or on its "
                    "own machine",
                    id="stop.late",
                ) from error
        if self._job is not None:
            try:
                self._job.cancel(now=kind == "now")
            except UserError as error:
                if not is_written or self.state.state == "queued":
                    raise
                self._print_line(f"only asked by its directory: {error.what}")
            return True
        if self._process is not None:
            if kind == "now":
                # A coordinator ends the ranks of all nodes itself.
                return self._attempt.fleet.exists() or kill_now(self._process)
            number = signal.SIGINT if kind == "interrupt" else signal.SIGTERM
            return send_signal(self._process, number)
        self._refuse_silent()
        return True

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end, and report what the run is doing; False: it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        shown = ""
        while not self._has_ended(min(_POLL_S, max(0.0, deadline - time.monotonic()))):
            status = current_status(self._run_dir, self.state.begun_at)
            doing = ", ".join(str(status[key]) for key in ("phase", "detail") if status.get(key))
            if doing and doing != shown and status.get("phase") not in ("stopped", "finished"):
                self._print_line(f"  waiting: {doing}")
                shown = doing
            if time.monotonic() >= deadline:
                return False
        return True

    def wait_now(self, timeout_s: float = _BY_FILES_S) -> None:
        """Wait for the end of a run without a save, then kill the remaining processes.

        Args:
            timeout_s: longest wait for a run without a process of this user here.

        Raises:
            UserError: it has not ended.
        """
        limit_s = min(timeout_s, _BY_FILES_S) if self._process is None else _COORDINATOR_S
        if self.wait(limit_s):
            return
        if self._process is not None:
            kill_now(self._process)
            if wait_for_end(self._process, _KILL_S):
                return
        raise UserError(
            f"{self._run_dir.name} has not ended within {format_duration(limit_s)}",
            where=self.place,
            fix=f"look at `isles status {typed_name(self._run_dir)}`, and stop it there; a process "
            "that was killed and stays waits for a disk or a driver",
            id="stop.late",
        )

    def _has_ended(self, pause_s: float) -> bool:
        if self._process is not None:
            return wait_for_end(self._process, pause_s)
        time.sleep(pause_s)
        answers = False
        if self._job is not None:
            report = refresh(self._run_dir, self._attempt, ask_s=_GLANCE_S)
            if report is not None and report.state != "unknown":
                answers = time.time() - report.at < _SILENT_S
        self.state = attempt_state(self._run_dir, self._attempt)
        if not self.state.is_queue:
            self._refuse_silent()  # silent since the request: that is no end
        # Of a run that is only seen by its files the outcome is the last word; so it is where the
        # scheduler does not say whether the job has ended with it.
        is_over = self.state.outcome is not None and not answers
        return not self.state.is_alive or is_over

    def _refuse_silent(self) -> None:
        if self.state.state != "unknown":
            return
        process = self.state.process
        silent_s = time.time() - (self.state.last_seen_at or self.state.begun_at or time.time())
        host = process.host if process else "another host"
        path = shlex.quote(str(self._run_dir.path.absolute()))
        raise UserError(
            f"{self._run_dir.name} runs on {host}, but has sent no heartbeat for "
            f"{format_duration(silent_s)}. Its directory has a request to stop",
            where=f"host {host}" + (f", pid {process.pid}" if process else ""),
            fix=f"if {host} is up, run `isles stop {path}` on {host}",
            id="stop.late",
        )


def wait_for_end(process: ProcessId, timeout_s: float) -> bool:
    """Wait until a process of this host has ended. Returns False after the timeout."""
    deadline = time.monotonic() + timeout_s
    while process.is_alive():
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return False
        try:
            psutil.Process(process.pid).wait(timeout=left_s)
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            continue
    return True
