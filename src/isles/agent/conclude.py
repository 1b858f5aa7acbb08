"""What follows when the ranks of a job have ended: `python -m isles.agent.conclude RUN_DIR …`.

The script of a Slurm or PBS job calls it before its ranks are started (`--begin`) and after they
have ended, and does what it prints: `start` the ranks (again), `requeue` the job, or end with the
exit code that is printed. It needs no torch.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

from isles.config.resolve import load_resolved
from isles.errors import ExitCode
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record, write_record
from isles.run.restarts import (
    newest_step,
)
from isles.run.stop_request import read_stop_request
from isles.agent.failure import find_culprit, judge, trouble, write_failure
from isles.agent.requeue import (
    IN_VAIN_LIMIT,
    IN_VAIN_TAKEN,
    REQUEUE,
    Gang,
    record_nodes,
    requeue,
)

START = "start"

_SUMMARY = re.compile(r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+)", re.MULTILINE)
"""How torchrun names a rank that has failed."""

_NO_MEMORY = re.compile(r"^.*(?:oom[-_]kill|out of memory handler|exceeded memory limit).*$", re.M)
"""How Slurm and PBS say that a task was killed for its memory."""

_JOINS = " joins the others at "
"""What a node's log says as soon as its torchrun is started."""

_TAIL_BYTES = 1 << 18
_SIGTERM = 15


def main() -> int:
    """Print what the job's script is to do next."""
    parser = argparse.ArgumentParser(prog="python -m isles.agent.conclude")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--job", default="the job")
    parser.add_argument("--output", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--begin", action="store_true", help="the script has just begun")
    what.add_argument("--status", type=int, help="exit status of the ranks' launcher")
    what.add_argument("--stranded", action="store_true", help="it could not be queued again")
    what.add_argument("--unfit", action="store_true", help="its nodes did not pass the check")
    parser.add_argument("--terminated", action="store_true", help="the job was told to end")
    parser.add_argument("--preempted", action="store_true", help="its ranks were, for another job")
    options = parser.parse_args()
    run_dir = RunDir(options.run_dir.absolute())
    attempt = run_dir.attempt(options.attempt)
    config = load_resolved(run_dir.resolved.read_text(encoding="utf-8")).config
    gang = Gang(run_dir, attempt, config, options.job, options.output)
    if options.begin:
        answer = begin(gang)
    elif options.stranded:
        answer = strand(gang)
    elif options.unfit:
        answer = refuse(gang)
    else:
        answer = conclude(
            gang, options.status, terminated=options.terminated, preempted=options.preempted
        )
    sys.stdout.write(f"{answer}\n")
    return 0


def begin(gang: Gang) -> str:
    """Whether the ranks are started, when the script of a job begins, perhaps not for the first
    time."""
    attempt = gang.attempt
    outcome = read_record(attempt.outcome)
    if outcome is not None and not outcome.get("may_go_on"):
        return str(int(outcome["exit_code"]))
    request = read_record(attempt.stop_request) or {}
    if request and not request.get("requeue"):
        return _stop(gang, {"exit_code": _code_of(attempt), "step": newest_step(gang.run_dir)})
    last = read_record(attempt.rank_record(0)) or {}
    if outcome is not None or int(last.get("restart", -1)) == gang.restart:
        answer = requeue(gang, f"{gang.job} was taken off its nodes", IN_VAIN_TAKEN)
        return START if answer == REQUEUE else answer
    return START


def conclude(gang: Gang, status: int, *, terminated: bool, preempted: bool = False) -> str:
    """What follows once the ranks have ended.

    Args:
        gang: the ranks.
        status: exit status of what has started them.
        terminated: whether the job was told to end: by scancel, or for a job that comes first.
        preempted: whether only its ranks were told so, to save within a time of grace. The job is
            then not queued again by itself.
    """
    attempt = gang.attempt
    outcome = read_record(attempt.outcome)
    if outcome is not None:
        return str(int(outcome["exit_code"]))
    stopped = read_record(attempt.stopped)
    request = read_record(attempt.stop_request) or {}
    later = None if terminated else _goes_on_later(gang, stopped, request, preempted=preempted)
    if later is not None:
        return requeue(gang, *later)
    if stopped is not None:
        return _stop(gang, stopped, may_go_on=terminated)
    if terminated:
        step = newest_step(gang.run_dir)
        return _stop(gang, {"exit_code": int(ExitCode.REQUEUE), "step": step}, may_go_on=True)
    if status == 0:  # the ranks of a script of the user's own leave no word at a good end
        _write_end(attempt, "finished", ExitCode.OK, "finished", newest_step(gang.run_dir))
        return str(int(ExitCode.OK))
    return _after_failure(gang, status)


def strand(gang: Gang) -> str:
    """The job could not be queued again: the run is stopped, and its user must start it again."""
    saved = "everything is saved; " if gang.config.training.script is None else ""
    reason = f"{saved}{gang.job} could not be queued again: the end of {gang.output} says why"
    _write_end(gang.attempt, "stopped", ExitCode.REQUEUE, reason, newest_step(gang.run_dir))
    return str(int(ExitCode.REQUEUE))


def refuse(gang: Gang) -> str:
    """The check of the job's nodes has found errors: the ranks are not started."""
    found = read_record(gang.attempt.findings) or {}
    errors = [entry for entry in found.get("findings", ()) if entry.get("level") == "error"]
    first = errors[0] if errors else {}
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    culprit = trouble(
        f"the nodes of {gang.job} are not fit: {first.get('text') or 'see the check'}{more}",
        str(first.get("fix") or f"look at {gang.output}, or leave out launcher.check"),
        ExitCode.PREFLIGHT,
        id=str(first.get("id") or "machine"),
    )
    if first:
        culprit["where"] = f"{first.get('where')}: {first.get('id')}"
    write_failure(gang.attempt, culprit)
    return str(int(ExitCode.PREFLIGHT))


def _stop(gang: Gang, stopped: dict[str, Any], *, may_go_on: bool = False) -> str:
    """The run is stopped. With `may_go_on` it goes on if the queue starts its job again."""
    code = int(stopped["exit_code"])
    saved = newest_step(gang.run_dir)
    kept = "nothing is saved" if saved is None else f"everything up to step {saved} is saved"
    by = f"{gang.job} was told to end" if may_go_on else "asked to stop"
    if gang.config.training.script is not None:  # which saves by itself, and has said how it ended
        kept = str(stopped.get("reason") or "").removeprefix("asked to stop; ")
    step = stopped.get("step")
    by += f"; {kept}" if kept else ""
    _write_end(gang.attempt, "stopped", code, by, step, may_go_on=may_go_on)
    gang.attempt.stopped.unlink(missing_ok=True)
    return str(code)


def _goes_on_later(
    gang: Gang, stopped: dict[str, Any] | None, request: dict[str, Any], *, preempted: bool
) -> tuple[str, int] | None:
    """Why the job is to be queued again, and how often that may be in vain; None: it is not."""
    if stopped is not None and request.get("requeue"):
        return f"the time limit of {gang.job} was near", IN_VAIN_LIMIT
    if not getattr(gang.config.clusters[0].launcher, "requeue", False):
        return None
    if preempted and (not request or request.get("requeue")):
        return f"another job took the nodes of {gang.job}", IN_VAIN_TAKEN
    asks = (
        gang.config.training.script is not None
        and (stopped or {}).get("exit_code") == ExitCode.REQUEUE
    )
    if not asks or request:
        return None
    return "the script asked to be started again", IN_VAIN_LIMIT


def _after_failure(gang: Gang, status: int) -> str:
    """Some rank has failed: find out which, and whether they are started again."""
    attempt, restart = gang.attempt, gang.restart
    world_size = int((read_record(attempt.launch) or {}).get("world_size", 1))
    ranks = range(world_size)
    errors = [error for path in attempt.rank_errors(restart) if (error := read_record(path))]
    failures = _failures(gang)
    has_begun = _has_begun(attempt, restart)
    culprit = find_culprit(errors, failures, ranks) if errors or failures or has_begun else None
    if culprit is None:
        culprit = _no_start(gang, status)
    elif culprit["rank"] is not None and culprit.get("kind") == "ProcessDied":
        culprit = _placed(gang, culprit)
    if (line := _memory_line(gang)) is not None:
        culprit = _no_memory(gang, culprit, line)
    request = read_stop_request(attempt)
    decision = judge(
        gang.run_dir,
        attempt,
        restart,
        culprit,
        max_restarts=gang.config.clusters[0].max_restarts,
        stop=ExitCode(_code_of(attempt)) if request is not None else None,
    )
    if decision.decision != "restart":
        outcome = read_record(attempt.outcome) or {}
        return str(int(outcome.get("exit_code", ExitCode.TRAINING)))
    record_nodes(gang, decision)
    sys.stderr.write(f"{time.strftime('%F %T')} {decision.text}\n")
    return START


def _write_end(
    attempt: Attempt,
    state: str,
    code: int,
    reason: str,
    step: int | None,
    *,
    may_go_on: bool = False,
) -> None:
    """How the run has ended. With `may_go_on` it is not over if the queue starts its job again."""
    record = {"state": state, "exit_code": int(code), "step": step, "reason": reason}
    record |= {"at": time.time(), "error": None}
    write_record(attempt.outcome, record | ({"may_go_on": True} if may_go_on else {}))


def _code_of(attempt: Attempt) -> int:
    """The exit code that a stop request stands for."""
    request = read_stop_request(attempt)
    is_save = request is None or request.kind == "save"
    return int(ExitCode.REQUEUE if is_save else ExitCode.INTERRUPTED)


def _failures(gang: Gang) -> dict[int, int]:
    """Exit codes of the ranks that torchrun saw fail, on all nodes, since their last start.

    Those that it has ended itself for the sake of another are none.
    """
    found: dict[int, int] = {}
    for log in gang.attempt.path.glob("node-*.log"):
        for rank, code in _SUMMARY.findall(_since(log, gang.restart)):
            found[int(rank)] = int(code)
    return {rank: code for rank, code in found.items() if code != -_SIGTERM} or found


def _has_begun(attempt: Attempt, restart: int) -> bool:
    """Whether any rank has come so far as to leave a record."""
    records = (read_record(path) or {} for path in attempt.path.glob("rank-*.json"))
    return any(record.get("restart") == restart for record in records if "pid" in record)


def _placed(gang: Gang, culprit: dict[str, Any]) -> dict[str, Any]:
    """A rank that died without a word, with the host that it ran on."""
    place = read_record(gang.attempt.rank_record(int(culprit["rank"]))) or {}
    host = str(place.get("host") or culprit["host"])
    return {**culprit, "host": host, "where": f"rank {culprit['rank']} on {host}"}


def _no_start(gang: Gang, status: int) -> dict[str, Any]:
    """No rank has come so far as to leave a record."""
    if missing := _missing(gang):
        culprit = trouble(
            f"not started within start_timeout ({gang.config.clusters[0].start_timeout:.0f} s): "
            + ", ".join(missing),
            f"the end of {gang.output} may say why; clusters[0].launcher.exclude leaves a node out",
            id="start.timeout",
        )
        return {**culprit, "kind": "NodeMissing"}
    words = [line for log in sorted(gang.attempt.path.glob("node-*.log")) for line in _errors(log)]
    words = words or _errors(gang.output)
    said = f": {words[-1]}" if words else ""
    logs = f"{gang.attempt.path}/node-*.log and {gang.output}"
    culprit = trouble(
        f"the ranks could not be started (exit status {status}){said}",
        f"the ends of {logs} say why",
        ExitCode.TRAINING,
        id="start.failed",
    )
    return {**culprit, "kind": "NotStarted", "will_recur": True}


def _missing(gang: Gang) -> list[str]:
    """The nodes that have not come so far as to join the others, where some have."""
    hosts = _tail(gang.attempt.path / "hosts").split()
    logs = [_since(gang.attempt.node_log(node), gang.restart) for node in range(len(hosts))]
    if not any(_JOINS in text for text in logs):
        return []
    return [f"node {k} ({hosts[k]})" for k, text in enumerate(logs) if _JOINS not in text]


def _no_memory(gang: Gang, culprit: dict[str, Any], line: str) -> dict[str, Any]:
    return {
        **culprit,
        "kind": "OutOfMemoryError",
        "what": f"{culprit['what']}; the queue says: {line.strip()}",
        "fix": "raise clusters[0].launcher.memory_per_node, or lower training.micro_batch_size",
        "id": "memory.killed",
        "exit_code": int(ExitCode.OUT_OF_MEMORY),
        "is_communication": False,
        "will_recur": True,
    }


def _memory_line(gang: Gang) -> str | None:
    """What the queue has said of a task that used too much memory."""
    logs = sorted(gang.attempt.path.glob("node-*.log"))
    for text in (*(_since(log, gang.restart) for log in logs), _tail(gang.output)):
        found = _NO_MEMORY.search(text)
        if found is not None:
            return found.group(0)
    return None


def _errors(log: Path) -> list[str]:
    signs = ("error", "not found", "no such", "isles: ")
    lines = (line.strip() for line in _tail(log).splitlines())
    return [line for line in lines if any(sign in line.lower() for sign in signs)]


def _since(log: Path, restart: int) -> str:
    """What a node's log says of the newest start of the ranks; empty where that has not come."""
    text = _tail(log)
    _, mark, rest = text.rpartition(f"---- restart {restart} ----\n")
    if not restart or mark:
        return rest
    # The mark may be further back than the tail.
    return text if len(text) >= _TAIL_BYTES // 2 else ""


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
