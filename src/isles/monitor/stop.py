"""`isles stop`: ends a run by its recorded process, never by a name."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil

from isles.errors import ExitCode, UserError
from isles.facts.units import format_duration
from isles.monitor.collect import collect
from isles.rundir.paths import RunDir
from isles.rundir.process import ProcessId
from isles.rundir.signals import kill_now, send_signal
from isles.rundir.state import AttemptState, current_status, run_state

_LOOK_S = 0.5
_KILL_S = 10.0


def stop_run(run_dir: RunDir, *, now: bool, timeout_s: float, say: Callable[[str], object]) -> int:
    """Stop a run and wait until its process has ended.

    Args:
        run_dir: the run.
        now: kill it instead of letting it save.
        timeout_s: longest wait for the save.
        say: takes each line for the user.

    Returns:
        The exit code of the command: 0 as soon as the run is not running.

    Raises:
        UserError: it runs on another host, belongs to another user, or did not end in time.
    """
    state = run_state(run_dir)
    if not state.is_alive and state.state != "unknown":
        say(f"{run_dir.name} is not running: {_ended_text(run_dir)}")
        return ExitCode.OK
    process = state.process
    assert process is not None
    if not process.is_here():
        raise UserError(
            f"{run_dir.name} was started on another host",
            where=f"host {process.host}, pid {process.pid}",
            fix=f"run `isles stop {run_dir.name}` there",
        )
    if now:
        return _stop_now(run_dir, process, say)
    if not send_signal(process, signal.SIGTERM):
        say(f"{run_dir.name} has just ended: {_ended_text(run_dir)}")
        return ExitCode.OK
    say(
        f"asked {run_dir.name} (pid {process.pid}) to save and stop; "
        f"`isles stop {run_dir.name} --now` ends it without saving"
    )
    if not _wait(run_dir, process, state, timeout_s, say):
        raise UserError(
            f"{run_dir.name} has not ended within {format_duration(timeout_s)}",
            where=f"host {process.host}, pid {process.pid}",
            fix=f"wait longer (--timeout), look at `isles logs {run_dir.name}`, or give --now",
        )
    say(f"{run_dir.name} has ended: {_ended_text(run_dir)}")
    return ExitCode.OK


def wait_for_end(process: ProcessId, timeout_s: float) -> bool:
    """Wait until a process of this host has ended; False where it has not in time."""
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


def _stop_now(run_dir: RunDir, process: ProcessId, say: Callable[[str], object]) -> int:
    kill_now(process)
    if not wait_for_end(process, _KILL_S):
        raise UserError(
            f"{run_dir.name} has been killed, and the kernel has not let go of it yet",
            where=f"host {process.host}, pid {process.pid}",
            fix="it is waiting for a disk or a driver; look again with `isles status`",
        )
    say(f"{run_dir.name} was ended without saving: {_ended_text(run_dir)}")
    return ExitCode.OK


def _wait(
    run_dir: RunDir,
    process: ProcessId,
    state: AttemptState,
    timeout_s: float,
    say: Callable[[str], object],
) -> bool:
    """Wait for the end, telling what the run is doing meanwhile."""
    deadline = time.monotonic() + timeout_s
    told = ""
    while not wait_for_end(process, min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
        status = current_status(run_dir, state.begun_at)
        doing = ", ".join(str(status[key]) for key in ("phase", "detail") if status.get(key))
        if doing and doing != told and status.get("phase") not in ("stopped", "finished"):
            say(f"  waiting: {doing}")
            told = doing
        if time.monotonic() >= deadline:
            return False
    return True


def _ended_text(run_dir: RunDir) -> str:
    report = collect(run_dir)
    if report.state == "new":
        return report.hint
    step = f" at step {report.step}" if report.step is not None else ""
    reason = f" ({report.reason})" if report.reason else ""
    return f"{report.state}{step}{reason}; {report.hint}"
