"""How an attempt ended, as it is printed: results, or the root cause of a failure."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from isles.errors import ExitCode, more_lines
from isles.facts.console import Console
from isles.facts.units import format_bytes, format_count, format_duration, plural
from isles.monitor.logs import LineTail
from isles.monitor.status import generate_command, next_start
from isles.run.env import IN_POD, machine_elsewhere, shown_place
from isles.run.exported import export_failure
from isles.run.find import typed_name
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.restarts import current_restart
from isles.run.state import attempt_state, number_of, script_of, text_of

_TRACEBACK_LINES = 15
_LOG_LINES = 15
_ERRORS_BYTES = 64 * 2**20
"""So much is read of the errors that ranks have left: thousands of ranks leave less."""
_NO_ROOM_BYTES = 64 * 1024
"""With less free space the outcome could not be written."""


def report_outcome(run_dir: RunDir, attempt: Attempt, console: Console, errors: Console) -> int:
    """Print how an attempt ended, and give its exit code."""
    state = attempt_state(run_dir, attempt)
    status = f"`isles status {typed_name(run_dir)}`"
    match state.state:
        case "finished":
            console.print_lines(finished_lines(run_dir))
        case "stopped":
            outcome = state.outcome or {}
            step = number_of(outcome, "step")
            place = f" at step {step:.0f}" if step is not None else ""
            reason = f" ({why})" if (why := text_of(outcome, "reason")) else ""
            lines = [f"{run_dir.name} stopped{place}{reason}", f"  {next_start(run_dir)}"]
            console.print_lines(lines)
        case "failed" | "killed" | "new":
            errors.print_lines(failure_lines(attempt, [f"  {next_start(run_dir)}"]))
        case "running":
            errors.print_lines([f"{run_dir.name} is still closing; {status} says when it is done"])
        case "queued":
            errors.print_lines([f"{run_dir.name} waits in the queue. Its state: {status}"])
        case "unknown":
            what = f"is {state.process.host if state.process else 'its host'} up?"
            if state.last_seen_at is not None:
                at = datetime.fromtimestamp(state.last_seen_at).strftime("%H:%M:%S")
                what = f"its last heartbeat was at {at}. {what}"
            errors.print_lines([f"error: {run_dir.name} sends no heartbeat any more. {what}"])
    recorded = number_of(state.outcome, "exit_code")
    if state.state == "finished" and export_failure(run_dir):
        return ExitCode.TRAINING
    if recorded is not None:
        return int(recorded)
    return ExitCode.OK if state.state == "finished" else ExitCode.TRAINING


def finished_lines(run_dir: RunDir) -> list[str]:
    """Lines for a finished run: its metrics, the place of its results and the next commands."""
    summary = read_record(run_dir.summary) or {}
    head = f"{run_dir.name} is finished"
    if (steps := number_of(summary, "steps")) is not None:
        head += f": {steps:.0f} steps"
    if (took_s := number_of(summary, "elapsed_s")) is not None:
        head += f" in {format_duration(took_s)}"
        if (all_s := _from_first_start_s(run_dir)) > 1.2 * took_s + 20.0:
            head += f" of training, {format_duration(all_s)} after the first start"
    lines = [head]
    first, last = number_of(summary, "first_loss"), number_of(summary, "last_loss")
    if first is not None and last is not None:
        lines.append(f"  {'loss':<12} {first:.4f} -> {last:.4f}")
    eval_loss, perplexity = number_of(summary, "eval_loss"), number_of(summary, "perplexity")
    if eval_loss is not None:
        end = f" (perplexity {perplexity:.2f})" if perplexity is not None else ""
        lines.append(f"  {'eval loss':<12} {eval_loss:.4f}{end}")
    tokens, speed = number_of(summary, "tokens"), number_of(summary, "tokens_per_second")
    if tokens is not None:
        end = f", {format_count(speed)} a second" if speed is not None else ""
        lines.append(f"  {'tokens':<12} {format_count(tokens)}{end}")
    failed = export_failure(run_dir)
    if failed:
        lines.append(f"  {'export':<12} failed: {failed}")
    places = [
        *([] if failed else [("model", run_dir.model)]),
        ("loss curve", run_dir.loss_plot),
        ("metrics", run_dir.metrics),
        ("tensorboard", run_dir.tensorboard),
    ]
    lines += [f"  {name:<12} {shown_place(path)}" for name, path in places if path.exists()]
    if script_of(run_dir) is not None:
        return [*lines, f"  its output: isles logs {typed_name(run_dir)}"]
    again = [f"  isles checkpoint export {typed_name(run_dir)}"] if failed else []
    return [
        *lines,
        "next:",
        *again,
        *_bring_lines(run_dir),
        f"  {generate_command(run_dir, 'Once')}",
        f"  isles eval {typed_name(run_dir)}",
        f"  isles checkpoint list {typed_name(run_dir)}",
    ]


def _from_first_start_s(run_dir: RunDir) -> float:
    # To the end of the last start: with restarts, waits in a queue and pauses.
    attempts = run_dir.attempts()
    if not attempts:
        return 0.0
    begun_at = number_of(read_record(attempts[0].launch), "begun_at")
    ended_at = number_of(read_record(attempts[-1].outcome), "at")
    return ended_at - begun_at if begun_at is not None and ended_at is not None else 0.0


def _bring_lines(run_dir: RunDir) -> list[str]:
    # The model is where the run was.
    machine = machine_elsewhere()
    has_model = run_dir.model.exists() and not export_failure(run_dir)
    if not machine or machine.startswith(IN_POD) or not has_model:
        return []
    return [f"  scp -r {shlex.quote(shown_place(run_dir.model))} {run_dir.name}   brings the model"]


def root_cause(attempt: Attempt) -> dict[str, Any] | None:
    """The error that ended an attempt, from an error record or the outcome, or None.

    A rank's own error comes before the agent's decision, and that before the errors of ranks
    that only lost the connection to others. Among equals the earliest is the cause.
    """
    own, lost = _earliest_errors(attempt)
    if own is not None:
        return own
    decision = (read_record(attempt.outcome) or {}).get("error")
    if isinstance(decision, dict):
        return decision
    process = ProcessId.from_record(read_record(attempt.launch) or {})
    is_gone = process is not None and process.is_here() and not process.is_alive()
    if process is not None and is_gone and attempt.nodes.exists() and not attempt.outcome.exists():
        return {
            "rank": None,
            "what": f"the coordinator of this run (pid {process.pid}) is gone; its nodes ended "
            "with it",
            "where": f"host {process.host}",
            "fix": "somebody killed it, or the machine ran out of memory: see `dmesg | tail`",
            "id": "run.coordinator",
        }
    return lost


def _earliest_errors(attempt: Attempt) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    # The earliest error with its cause in a rank, and the earliest that is a loss of other ranks.
    first: dict[bool, tuple[float, dict[str, Any]]] = {}
    left_bytes = _ERRORS_BYTES
    for path in attempt.rank_errors(current_restart(attempt)):
        with suppress(OSError):
            left_bytes -= path.stat().st_size
        if left_bytes < 0:
            break
        if record := read_record(path):
            at, is_own = number_of(record, "at") or 0.0, not record.get("is_communication")
            if is_own not in first or at < first[is_own][0]:
                first[is_own] = at, record
    own, lost = first.get(True), first.get(False)
    return own[1] if own else None, lost[1] if lost else None


def failure_lines(attempt: Attempt, then: Sequence[str] = ()) -> list[str]:
    """The failure of an attempt as it is printed; the first line begins with `error: `.

    Args:
        then: lines before the lines about `isles explain`.
    """
    outcome = read_record(attempt.outcome) or {}
    full_disk = ""
    with suppress(OSError):
        free = shutil.disk_usage(attempt.path).free
        if free < _NO_ROOM_BYTES:
            full_disk = f"the disk of {attempt.path} is full, {format_bytes(free)} are left"
    cause = root_cause(attempt)
    if cause is None:
        what = "the processes of this run are gone and have left no word"
        if full_disk:
            what += f": {full_disk}\n  fix: free some of it, and start the run again"
        else:
            what += ": killed, perhaps"
        tail = LineTail(attempt.agent_log, last=_LOG_LINES).read(final=True)
        end = [f"  the end of {attempt.agent_log}:", *(f"    {line}" for line in tail)]
        return [f"error: {text_of(outcome, 'reason') or what}", *(end if tail else []), *then]
    rank = number_of(cause, "rank")
    what = (text_of(cause, "what") or text_of(cause, "kind") or "unknown error").rstrip()
    fix = text_of(cause, "fix")
    if full_disk and "disk" not in what:
        # A rank's error is only the consequence.
        what, fix = f"{full_disk}; {what}", f"free some of it first; {fix}".removesuffix("; ")
    lines = [f"error: {what}"]
    who = f"rank {rank:.0f} on {text_of(cause, 'host') or 'this host'}" if rank is not None else ""
    where = text_of(cause, "where")
    places = [who, where] if who not in where else [where]
    if any(places):
        lines.append(f"  where: {', '.join(place for place in places if place)}")
    trace = text_of(cause, "traceback").rstrip().splitlines()
    if fix:
        lines.append(f"  fix: {fix}")
    elif trace:
        # An error without a fix is unforeseen: its origin is all that can be shown.
        is_trace = any("Traceback (most recent call last)" in line for line in trace)
        head = "traceback (its end):" if is_trace else "the end of its log:"
        lines += [f"  {head}", *(f"    {line}" for line in trace[-_TRACEBACK_LINES:])]
    decision = outcome.get("error")
    if isinstance(decision, dict) and (note := text_of(decision, "note")):
        lines.insert(1, f"  {note}")  # why the ranks were not started once more
    log = attempt.rank_log(int(rank)) if rank is not None else attempt.agent_log
    if log.is_file():
        lines.append(f"  log: {log}")
    others = int(number_of(read_record(attempt.launch), "world_size") or 1) - 1
    if others > 0 and (rank is not None or any(attempt.path.glob("rank-*.json"))):
        lines.append(f"  {plural(others, 'other rank')} stopped because of it")
    return [*lines, *then, *more_lines([text_of(cause, "id") or None])]
