"""What an agent reports of its ranks, and what the head keeps of it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from isles.run.paths import Attempt
from isles.run.records import read_record, write_record, write_text_atomic
from isles.agent.failure import find_culprit
from isles.agent.server import NodeConnection

_TAIL_BYTES = 16_384


def failure_report(
    attempt: Attempt, restart: int, ranks: list[int], world_size: int, failures: dict[int, int]
) -> dict[str, Any]:
    """The part of a report that says why ranks have failed.

    Args:
        attempt: this start, as this host sees it.
        restart: how often the ranks were started again before.
        ranks: those of this node.
        world_size: those of all nodes.
        failures: exit codes of those that were seen to end first.

    Returns:
        errors: the records that these ranks have left. culprit: the one that the others may be
        consequences of; None where these ranks have only lost one of another node. tail: the end
        of its log.
    """
    paths = [attempt.rank_error(rank, restart) for rank in ranks]
    errors = [error for path in paths if (error := read_record(path))]
    culprit = find_culprit(errors, failures, ranks, are_all=len(ranks) == world_size)
    tail = ""
    if culprit is not None and culprit.get("rank") is not None:
        tail = _end_of(attempt, int(culprit["rank"]))
    return {"errors": errors, "culprit": culprit, "tail": tail}


def own_time(error: dict[str, Any], peer: NodeConnection) -> dict[str, Any]:
    """An error of another host by the clock of this one."""
    return {**error, "at": float(error["at"]) + peer.skew_s}


def keep_errors(
    attempt: Attempt, restart: int, said: list[tuple[dict[str, Any], NodeConnection]]
) -> None:
    """Put on record here what ranks of other hosts have left there."""
    for report, peer in said:
        for error in report.get("errors", ()):
            path = attempt.rank_error(int(error["rank"]), restart)
            if not path.exists():
                write_record(path, own_time(error, peer))
        culprit = report.get("culprit") or {}
        if culprit.get("rank") is None or not report.get("tail"):
            continue
        log = attempt.rank_log(int(culprit["rank"]))
        if not log.exists():
            head = f"---- the end of this log on {culprit['host']} ----\n"
            with suppress(OSError):
                write_text_atomic(log, head + report["tail"], durable=False)


def _end_of(attempt: Attempt, rank: int) -> str:
    try:
        with attempt.rank_log(rank).open("rb") as log:
            log.seek(0, 2)
            log.seek(max(0, log.tell() - _TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""
