"""Why ranks have failed, and what follows: a restart, the end of the run, or a stop."""

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
    """Find the error that the others are consequences of.

    Args:
        errors: the error records that these ranks have left.
        failures: exit codes of the ranks that the agent saw end first.
        are_all: whether there are no other ranks: then the cause is among these.

    Returns:
        An error record: the earliest error that is not the loss of another rank; else that of a
        rank that died without leaving one; else the earliest error there is. None where the ranks
        of this node have only lost one of another node.
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
    # A rank that has lost another ends with a code of its own; a full disk may hold no error of it.
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
    """Decide what follows from the loss of a rank, and record it, with the outcome at an end.

    `restart`: how often the ranks were started again before; `stop`: the exit code of a stop that
    was asked for meanwhile.
    """
    counted = [entry for entry in list_restarts(attempt) if entry.is_counted]
    reached, saved = read_last_step(attempt, restart), newest_step(run_dir)
    last = counted[-1] if counted else None
    note = ""
    decision: Decision = "restart" if stop is None else "stop"
    # A script on another host cannot see there that it has reported steps.
    is_new = root_cause.get("kind") == "ScriptFailed" and reached is not None
    if root_cause.get("will_recur") and not is_new:
        decision = "fail"  # a wrong run file, a loss that is not finite: it would come again
    elif (
        last is not None
        and _furthest(reached, saved) <= _furthest(last.reached, last.saved)
        and not (root_cause.get("is_script") and reached is None)  # it tells nobody how far it is
    ):
        decision = "fail"
        note = (
            f"it is the second loss of a rank without progress: {_at(last.reached)} before, "
            f"{_at(reached)} now; starting once more would change nothing"
        )
    elif decision == "restart" and (last.count if last else 0) >= max_restarts:
        decision = "fail"
        note = f"all {max_restarts} restarts of this start are used up" if max_restarts else ""
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
    """The part of an agent's report that says why ranks have failed.

    Args:
        failures: exit codes of the ranks that were seen to end first.
        has_no_memory: whether the kernel has killed processes here for it; see `oom_kills`.

    Returns:
        errors: the records that these ranks have left. root_cause: the one that the others may be
        consequences of; None where these ranks have only lost one of another node. tail: the end
        of its log.
    """
    paths = (attempt.rank_error(rank, restart) for rank in ranks)
    errors = [error for path in paths if (error := read_record(path))]
    root_cause = find_root_cause(errors, failures, ranks, are_all=len(ranks) == world_size)
    if has_no_memory and root_cause is not None and root_cause.get("id") == "memory.killed":
        root_cause |= {
            "kind": "OutOfMemoryError",
            "what": f"{root_cause['what']}: this host, or the job's share of it, has no memory "
            "left",
            "fix": "lower training.micro_batch_size or data.workers, or give it more memory: "
            "clusters[0].launcher.memory_per_node where a queue has set the limit",
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
    """How many processes of this one's cgroup the kernel has killed for their memory, ever.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.events) and
    cgroup-v1/memory.rst (memory.oom_control). 0 where neither can be read.
    """
    for folder, is_v2 in cgroup_folders("memory"):
        words = read_words(folder / ("memory.events" if is_v2 else "memory.oom_control"))
        if words:
            return words.get("oom_kill", 0)
    return 0


def keep_errors(attempt: Attempt, restart: int, reports: Iterable[dict[str, Any]]) -> None:
    """Record here the errors, and the end of the log, of ranks of other hosts."""
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
    # The error record of a rank that could not write one.
    how, fix, id = (
        "died without a word",
        "the end of its log may say why: `isles logs`",
        "rank.died",
    )
    if exit_code > 0:
        how = f"ended with exit code {exit_code}"
    elif exit_code < 0:
        name = signal_name(-exit_code)
        how = f"was killed by {name}"
        if name == "SIGKILL":
            fix = "somebody killed it, or the machine ran out of memory: see `dmesg | tail`"
            id = "memory.killed"
        if name == "SIGABRT":
            fix = (
                "on GPUs NCCL ends so the ranks that waited longer than comm_timeout for another: "
                "the end of its log says for what, and the rank that has no such line is the one "
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
