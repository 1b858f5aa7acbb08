"""After a rank was lost: who caused it, and whether the ranks are started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import (
    Decision,
    Restart,
    list_restarts,
    newest_step,
    read_last_step,
    write_restart,
)
from isles.run.state import script_of

_END = "`isles train` again goes on from the last checkpoint"


def find_culprit(
    errors: list[dict[str, Any]],
    failures: Mapping[int, int],
    ranks: Sequence[int],
    *,
    are_all: bool = True,
) -> dict[str, Any] | None:
    """The error that the others are consequences of.

    Args:
        errors: the error records that these ranks have left.
        failures: exit codes of the ranks that the agent saw end first.
        ranks: the ranks of this node.
        are_all: whether there are no others: then one of these is to blame.

    Returns:
        An error record: a rank's own earliest error that is not the loss of another rank; else the
        rank that died without a word; else the earliest error there is. None where the ranks of
        this node have only lost one of another node.
    """
    own = [error for error in errors if not error["is_communication"]]
    if own:
        return min(own, key=lambda error: float(error["at"]))
    silent = {rank: code for rank, code in failures.items() if code < 0}
    left_word = {int(error["rank"]) for error in errors}
    if not silent and are_all:
        gone = [rank for rank in ranks if rank not in left_word]
        silent = dict.fromkeys(gone[:1], 0) if errors else {}
    if silent:
        rank, exit_code = min(silent.items())
        return _death(rank, exit_code)
    if errors:
        return min(errors, key=lambda error: float(error["at"])) if are_all else None
    if not failures:
        return _death(ranks[0], 0)
    # Who has lost another one ends with a code of its own; a full disk may hold no record of it.
    causes = {rank: code for rank, code in failures.items() if code != ExitCode.COMMUNICATION}
    if not causes and not are_all:
        return None
    return _death(*next(iter((causes or failures).items())))


def judge(
    run_dir: RunDir,
    attempt: Attempt,
    restart: int,
    culprit: dict[str, Any],
    *,
    max_restarts: int,
    stop: ExitCode | None = None,
) -> Restart:
    """Decide what follows from a death, and put it on record; the first of several nodes decides.

    Args:
        run_dir: the run.
        attempt: this start of it.
        restart: how often its ranks were started again before.
        culprit: the error of whoever caused it.
        max_restarts: how often that may be.
        stop: the exit code of a stop that was asked for meanwhile.
    """
    before = [entry for entry in list_restarts(attempt) if entry.is_counted]
    reached, saved = read_last_step(attempt, restart), newest_step(run_dir)
    last = before[-1] if before else None
    note, decision = "", _first_decision(stop)
    # A script on another host cannot see there that it has reported steps.
    is_new = culprit.get("kind") == "ScriptFailed" and reached is not None
    if culprit.get("will_recur") and not is_new:
        decision = "fail"  # a wrong run file, a loss that is not finite: it would come again
    elif (
        last is not None
        and _furthest(reached, saved) <= _furthest(last.reached, last.saved)
        and not (culprit.get("is_script") and reached is None)  # it tells nobody how far it is
    ):
        decision = "fail"
        note = (
            f"it is the second loss of a rank without progress: {_at(last.reached)} before, "
            f"{_at(reached)} now; starting once more would change nothing"
        )
    elif decision == "restart" and len(before) >= max_restarts:
        decision = "fail"
        note = f"all {max_restarts} restarts of this start are used up" if max_restarts else ""
    found = Restart(
        number=restart + 1,
        at=time.time(),
        decision=decision,
        culprit={**culprit, "note": note},
        why=_why(culprit),
        reached=reached,
        saved=saved,
        count=len(before) + 1,
        max_restarts=max_restarts,
        is_counted=True,
    )
    settled = write_restart(attempt, found)
    if settled.decision == "fail" and settled.culprit is not None:
        write_failure(attempt, settled.culprit, step=reached)
    elif settled.decision == "stop" and stop is not None:
        lost = f"; {settled.why} before it could save" if settled.reached != saved else ""
        write_stop(attempt, stop, saved, lost)
    return settled


def write_failure(attempt: Attempt, culprit: dict[str, Any], *, step: int | None = None) -> None:
    """The run has failed because of this."""
    _write_outcome(
        attempt, "failed", int(culprit["exit_code"]), step, str(culprit["what"]), culprit
    )


def write_stop(attempt: Attempt, code: ExitCode, saved: int | None, lost: str = "") -> None:
    """The run was stopped while no rank could save; unless it has ended otherwise before."""
    if read_record(attempt.outcome) is None:
        kept = "nothing" if saved is None else f"everything up to step {saved}"
        is_script = script_of(RunDir(attempt.path.parent.parent)) is not None
        reason = f"asked to stop{lost}" + ("" if is_script else f"; {kept} is saved")
        # A script of the user's own saves by itself; its starter says how it took the stop.
        reason = str((read_record(attempt.rank_record(0)) or {}).get("stop_reason") or reason)
        _write_outcome(attempt, "stopped", int(code), saved, reason, None)


def trouble(
    what: str, fix: str, code: ExitCode = ExitCode.COMMUNICATION, *, id: str
) -> dict[str, Any]:
    """An error record of this node's agent itself."""
    host = os.uname().nodename
    return {
        "rank": None,
        "host": host,
        "at": time.time(),
        "kind": "CommunicationError",
        "what": what,
        "where": f"host {host}",
        "fix": f"{fix}; {_END}",
        "id": id,
        "exit_code": int(code),
        "is_communication": code is ExitCode.COMMUNICATION,
        "traceback": None,
    }


def _write_outcome(
    attempt: Attempt,
    state: str,
    exit_code: int,
    step: int | None,
    reason: str,
    error: dict[str, Any] | None,
) -> None:
    record = {"state": state, "exit_code": exit_code, "step": step, "reason": reason}
    write_record(attempt.outcome, {**record, "at": time.time(), "error": error})


def _first_decision(stop: ExitCode | None) -> Decision:
    return "restart" if stop is None else "stop"


def _furthest(*steps: int | None) -> int:
    return max(-1 if step is None else step for step in steps)


def _at(step: int | None) -> str:
    return "before the first step" if step is None else f"at step {step}"


def _why(culprit: dict[str, Any]) -> str:
    rank, what = culprit["rank"], str(culprit["what"]).splitlines()[0]
    who = f"rank {rank}"
    if rank is None:
        return f"{culprit['host']}: {what}"
    if what.startswith(f"{who} "):
        return what.replace(who, f"{who} on {culprit['host']}", 1)
    return f"{who} on {culprit['host']} failed: {what}"


def _death(rank: int, exit_code: int) -> dict[str, Any]:
    """A record for a rank that could not write one."""
    name, how, fix = (
        "",
        f"ended with exit code {exit_code}",
        "the end of its log may say why: `isles logs`",
    )
    if exit_code == 0:
        how = "died without a word"
    elif exit_code < 0:
        name = signal.Signals(-exit_code).name
        how = f"was killed by {name}"
        if name == "SIGKILL":
            fix = "somebody killed it, or the machine ran out of memory: see `dmesg | tail`"
        if name == "SIGABRT":
            fix = (
                "on GPUs NCCL ends so the ranks that waited longer than comm_timeout for another: "
                "the end of its log says for what, and the rank that has no such line is the one "
                "that hung"
            )
    return {
        "rank": rank,
        "host": os.uname().nodename,
        "at": time.time(),
        "kind": "ProcessDied",
        "what": f"rank {rank} {how}",
        "where": f"rank {rank} on {os.uname().nodename}",
        "fix": f"{fix}; {_END}",
        "id": "memory.killed" if name == "SIGKILL" else "rank.died",
        "exit_code": int(ExitCode.TRAINING),
        "is_communication": False,
        "traceback": None,
    }
