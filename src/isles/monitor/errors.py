"""Why a run failed: the rank that caused it first, the others as one line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.errors import more_lines
from isles.facts.units import format_bytes
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.restarts import current_restart
from isles.run.state import number_of

_TRACEBACK_LINES = 15
_LOG_LINES = 15
_NO_ROOM_BYTES = 64 * 1024
"""With less there was none for the record of an end."""


def find_culprit(attempt: Attempt) -> dict[str, Any] | None:
    """The error that ended an attempt: an error record, or the outcome's; None if there is none.

    A rank's own error comes before the agent's decision, and that before the errors of ranks
    that only lost touch with the others. Among equals the earliest is the cause.
    """
    records = [record for path in _error_files(attempt) if (record := read_record(path))]
    records.sort(key=lambda record: number_of(record, "at") or 0.0)
    own = [record for record in records if not record.get("is_communication")]
    if own:
        return own[0]
    decision = (read_record(attempt.outcome) or {}).get("error")
    if isinstance(decision, dict):
        return decision
    process = ProcessId.from_record(read_record(attempt.launch) or {})
    is_gone = process is not None and process.is_here() and not process.is_alive()
    if process is not None and is_gone and attempt.nodes.exists() and not attempt.outcome.exists():
        return _lost_coordinator(process)
    return records[0] if records else None


def _lost_coordinator(process: ProcessId) -> dict[str, Any]:
    return {
        "rank": None,
        "what": f"the coordinator of this run (pid {process.pid}) is gone; its nodes ended with it",
        "where": f"host {process.host}",
        "fix": "somebody killed it, or the machine ran out of memory: see `dmesg | tail`",
        "id": "run.coordinator",
    }


def failure_lines(attempt: Attempt, then: Sequence[str] = ()) -> list[str]:
    """The failure as it is shown to the user; the first line begins with `error: `.

    Args:
        attempt: a start that has failed.
        then: lines for the end, before the one that says where to read more.
    """
    outcome = read_record(attempt.outcome) or {}
    culprit = find_culprit(attempt)
    if culprit is None:
        return [
            f"error: {outcome.get('reason') or _no_word(attempt)}",
            *_agent_tail(attempt),
            *then,
        ]
    rank = number_of(culprit, "rank")
    what = str(culprit.get("what") or culprit.get("kind") or "unknown error").rstrip()
    fix = str(culprit.get("fix") or "")
    if (full := _full_disk(attempt)) and "disk" not in what:
        # What a rank met there is only the consequence.
        what, fix = f"{full}; {what}", f"free some of it first; {fix}".removesuffix("; ")
    lines = [f"error: {what}"]
    who = f"rank {rank:.0f} on {culprit.get('host', 'this host')}" if rank is not None else ""
    where = str(culprit.get("where") or "")
    places = [who, where] if who not in where else [where]
    if any(places):
        lines.append(f"  where: {', '.join(place for place in places if place)}")
    trace = str(culprit.get("traceback") or "").rstrip().splitlines()
    if fix:
        lines.append(f"  fix: {fix}")
    elif trace:
        # No fix: nobody foresaw this error, and where it came from is all there is.
        is_trace = any("Traceback (most recent call last)" in line for line in trace)
        head = "traceback (its end):" if is_trace else "the end of its log:"
        lines += [f"  {head}", *(f"    {line}" for line in trace[-_TRACEBACK_LINES:])]
    if note := _note(attempt):
        lines.insert(1, f"  {note}")
    log = attempt.rank_log(int(rank)) if rank is not None else attempt.agent_log
    if log.is_file():
        lines.append(f"  log: {log}")
    return [*lines, *_others(attempt), *then, *more_lines([culprit.get("id")])]


def _no_word(attempt: Attempt) -> str:
    what = "the processes of this run are gone and have left no word"
    if full := _full_disk(attempt):
        return f"{what}: {full}\n  fix: free some of it, and start the run again"
    return f"{what}: killed, perhaps"


def _full_disk(attempt: Attempt) -> str:
    """That nothing can be written any more, if so: whoever failed could not say why."""
    with suppress(OSError):
        free = shutil.disk_usage(attempt.path).free
        if free < _NO_ROOM_BYTES:
            return f"the disk of {attempt.path} is full, {format_bytes(free)} are left"
    return ""


def _error_files(attempt: Attempt) -> list[Path]:
    return attempt.rank_errors(current_restart(attempt))


def _note(attempt: Attempt) -> str:
    """Why the ranks were not started once more, where that needs a word."""
    decision = (read_record(attempt.outcome) or {}).get("error")
    return str(decision.get("note") or "") if isinstance(decision, dict) else ""


def _others(attempt: Attempt) -> list[str]:
    count = int(number_of(read_record(attempt.launch), "world_size") or 1) - 1
    if count < 1:
        return []
    return [f"  {count} other rank{'s' if count > 1 else ''} stopped because of it"]


def _agent_tail(attempt: Attempt) -> list[str]:
    """The end of what the agent printed, for an end that left no record."""
    try:
        text = attempt.agent_log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    tail = [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    if not tail:
        return []
    return [f"  the end of {attempt.agent_log}:", *(f"    {line}" for line in tail)]
