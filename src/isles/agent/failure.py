"""Root causes of failed ranks, and the decision after them: a restart, the end of the run, or a
stop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from isles.errors import ExitCode
from isles.run.limits import cgroup_folders, read_words
from isles.run.outcome import AGAIN, ErrorRecord, end_failed, end_stopped, error_record
from isles.run.paths import Attempt, RunDir
from isles.run.process import signal_name
from isles.run.records import read_record, write_record, write_text_atomic
from isles.run.restarts import (
    Decision,
    Restart,
    list_restarts,
    newest_step,
    read_last_step,
    record_restart,
)

_TAIL_BYTES = 16_384


def find_root_cause(
    errors: list[dict[str, Any]],
    failures: Mapping[int, int],
    ranks: Sequence[int],
    *,
    are_all: bool = True,
) -> dict[str, Any] | None:
    """Find the error that caused the other errors.

    Args:
        errors: error records of these ranks.
        failures: exit codes of the ranks that ended first, as seen by the agent.
        ranks: the ranks of this node, or of all nodes.
        are_all: whether there are no other ranks; then the cause is among these.

    Returns:
        An error record: the earliest error other than the loss of another rank; else the error of a
        rank that died without a record; else the earliest error. None if the ranks of this node
        only
        lost a rank of another node.
    """
    own = [error for error in errors if not error["is_communication"]]
    if own:
        return min(own, key=lambda error: float(error["at"]))
    killed = {rank: code for rank, code in failures.items() if code < 0}
    if not killed and are_all and errors:
        with_error = {int(error["rank"]) for error in errors}
        killed = dict.fromkeys([rank for rank in ranks if rank not in with_error][:1], 0)
    if killed:
        rank, exit_code = min(killed.items())
        return _death(rank, exit_code)
    if errors:
        return min(errors, key=lambda error: float(error["at"])) if are_all else None
    if not failures:
        return _death(ranks[0], 0)
    # A rank that lost another rank exits with a specific code; on a full disk it has no record.
    causes = {rank: code for rank, code in failures.items() if code != ExitCode.COMMUNICATION}
    if not causes and not are_all:
        return None
    return _death(*next(iter((causes or failures).items())))


def decide(
    run_dir: RunDir,
    attempt: Attempt,
    restart: int,
    root_cause: dict[str, Any],
    *,
    max_restarts: int,
    stop: ExitCode | None = None,
) -> Restart:
    """Decide between restart and end after a failure, and record the decision. Record the outcome
    if the run ends.

    `restart`: number of restarts before; `stop`: exit code of a stop that was requested in the
    meantime.
    """
    counted = [entry for entry in list_restarts(attempt) if entry.is_counted]
    reached, saved = read_last_step(attempt, restart), newest_step(run_dir)
    last = counted[-1] if counted else None
    note = ""
    decision: Decision = "restart" if stop is None else "stop"
    # A script on another host has no record of its reported steps there.
    is_new = root_cause.get("kind") == "ScriptFailed" and reached is not None
    if root_cause.get("will_recur") and not is_new:
        decision = (
            "fail"  # such as a wrong run file or a loss that is not finite: it would fail again
        )
    elif (
        last is not None
        and _furthest(reached, saved) <= _furthest(last.reached, last.saved)
        and not (root_cause.get("is_script") and reached is None)  # it does not report its progress
    ):
        decision = "fail"
        note = (
            f"it is the second failure without progress ({_at(last.reached)} before, "
            f"{_at(reached)} now), so another restart would not help"
        )
    elif decision == "restart" and (last.count if last else 0) >= max_restarts:
        decision = "fail"
        note = f"all {max_restarts} restarts of this attempt are used up" if max_restarts else ""
    recorded = record_restart(
        run_dir,
        attempt,
        restart + 1,
        _why(root_cause),
        max_restarts=max_restarts,
        decision=decision,
        root_cause={**root_cause, "note": note},
        is_counted=True,
    )
    if recorded.decision == "fail" and recorded.root_cause is not None:
        end_failed(attempt, recorded.root_cause, step=reached)
    elif recorded.decision == "stop" and stop is not None:
        lost = f"; {recorded.why} before it could save" if recorded.reached != saved else ""
        end_stopped(attempt, stop, saved, lost)
    return recorded


def failure_report(
    attempt: Attempt,
    restart: int,
    ranks: list[int],
    world_size: int,
    failures: dict[int, int],
    *,
    has_no_memory: bool = False,
) -> dict[str, Any]:
    """The part of an agent's report that explains why ranks have failed.

    Args:
        failures: exit codes of the ranks that ended first.
        has_no_memory: whether the kernel has killed processes of this node for lack of memory; see
            `oom_kills`.

    Returns:
        errors: error records of these ranks. root_cause: the record that may explain the others;
            None
        if these ranks only lost a rank of another node. tail: the end of its log.
    """
    paths = (attempt.rank_error(rank, restart) for rank in ranks)
    errors = [error for path in paths if (error := read_record(path))]
    root_cause = find_root_cause(errors, failures, ranks, are_all=len(ranks) == world_size)
    if has_no_memory and root_cause is not None and root_cause.get("id") == "memory.killed":
        root_cause |= {
            "kind": "OutOfMemoryError",
            "what": f"{root_cause['what']}: this host, or the job's share of it, is out of memory",
            "fix": "lower training.micro_batch_size or data.workers, or provide more memory; if a "
            "queue has set the limit, raise clusters.0.launcher.memory_per_node",
            "exit_code": int(ExitCode.OUT_OF_MEMORY),
            "will_recur": True,
        }
    tail = ""
    if root_cause is not None and root_cause.get("rank") is not None:
        with suppress(OSError), attempt.rank_log(int(root_cause["rank"])).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode(errors="replace")
    return {"errors": errors, "root_cause": root_cause, "tail": tail}


def oom_kills() -> int:
    """Number of processes of this cgroup that the kernel has killed for lack of memory, ever.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.events) and cgroup-v1/memory.rst
    (memory.oom_control). 0 if neither can be read.
    """
    for folder, is_v2 in cgroup_folders("memory"):
        words = read_words(folder / ("memory.events" if is_v2 else "memory.oom_control"))
        if words:
            return words.get("oom_kill", 0)
    return 0


def keep_errors(attempt: Attempt, restart: int, reports: Iterable[dict[str, Any]]) -> None:
    """Record on this host the errors, and the end of the log, of ranks of other hosts."""
    for report in reports:
        for error in report.get("errors", ()):
            path = attempt.rank_error(int(error["rank"]), restart)
            if not path.exists():
                write_record(path, error)
        root_cause = report.get("root_cause") or {}
        if root_cause.get("rank") is None or not report.get("tail"):
            continue
        log = attempt.rank_log(int(root_cause["rank"]))
        if not log.exists():
            first = f"---- the end of this log on {root_cause['host']} ----\n"
            with suppress(OSError):
                write_text_atomic(log, first + report["tail"], durable=False)


def _furthest(*steps: int | None) -> int:
    return max(-1 if step is None else step for step in steps)


def _at(step: int | None) -> str:
    return "before the first step" if step is None else f"at step {step}"


def _why(root_cause: dict[str, Any]) -> str:
    rank, what = root_cause["rank"], str(root_cause["what"]).splitlines()[0]
    who = f"rank {rank}"
    if rank is None:
        return f"{root_cause['host']}: {what}"
    if what.startswith(f"{who} "):
        return what.replace(who, f"{who} on {root_cause['host']}", 1)
    return f"{who} on {root_cause['host']} failed: {what}"


def _death(rank: int, exit_code: int) -> ErrorRecord:
    # Error record for a rank that could not write one.
    how, fix, id = (
        "exited without an error message",
        "check the end of its log with `isles logs`",
        "rank.died",
    )
    if exit_code > 0:
        how = f"ended with exit code {exit_code}"
    elif exit_code < 0:
        name = signal_name(-exit_code)
        how = f"was killed by {name}"
        if name == "SIGKILL":
            fix = "it was killed, or the machine ran out of memory; run `dmesg | tail` there"
            id = "memory.killed"
        if name == "SIGABRT":
            fix = (
                "on GPUs, NCCL aborts a rank that waits for another rank longer than comm_timeout. "
                "The end of its log shows the operation; the rank without such a line is the rank "
                "that hung"
            )
    return error_record(
        f"rank {rank} {how}",
        id=id,
        kind="ProcessDied",
        code=ExitCode.TRAINING,
        fix=f"{fix}; {AGAIN}",
        rank=rank,
    )
