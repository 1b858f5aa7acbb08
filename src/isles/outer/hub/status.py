"""What the hub reports to people: members, open rounds, the last commits, events."""

from __future__ import annotations

import sqlite3
from typing import Any

from isles.facts.units import format_duration
from isles.outer.hub.core import Core
from isles.outer.messages import Heartbeat, RoundAnswer

_EVENTS, _COMMITS = 50, 20
_QUIET_S = 6.0
"""Three heartbeats."""


def status(core: Core) -> dict[str, Any]:
    """The answer to GET /v1/status, which `isles status` shows."""
    newest = "SELECT * FROM rounds WHERE state = 'committed' ORDER BY round DESC LIMIT ?"
    commits = [_commit(core, row) for row in core.journal.rows(newest, _COMMITS)]
    open_rounds = core.rounds.open_rounds()
    weights = commits[0]["weights"] if commits else {}
    return {
        "round": core.rounds.next,
        "fragments": core.rounds.fragments,
        "is_over": core.membership.end_kind() == "over",
        "members": [_member(core, row, weights, open_rounds) for row in core.membership.latest()],
        "open": [_open(core, answer) for answer in open_rounds],
        "commits": commits,
        "events": events(core),
    }


def events(core: Core) -> list[dict[str, Any]]:
    """What has happened last, oldest first."""
    rows = core.journal.rows("SELECT * FROM events ORDER BY number DESC LIMIT ?", _EVENTS)
    return [dict(row) for row in reversed(rows)]


def _member(
    core: Core, row: sqlite3.Row, weights: dict[str, int], open_rounds: list[RoundAnswer]
) -> dict[str, Any]:
    name, number = row["name"], row["number"]
    nothing = Heartbeat(id="0" * 32, step=0, version=row["version"])
    heartbeat = core.membership.heartbeats.get(number, nothing)
    late = [answer.outer_step for answer in open_rounds if name in answer.waits_for]
    return {
        **heartbeat.model_dump(exclude={"id", "has", "ends"}),
        "name": name,
        "state": "finished" if row["has_finished"] and row["state"] == "left" else row["state"],
        "is_behind": bool(row["is_behind"]),
        "heard_s": round(core.membership.last_seen_s(number), 1),
        "weight": weights[name] / sum(weights.values()) if name in weights else 0.0,
        "refused": row["refusal"],
        "slow": _why(core, row, min(late)) if late else "",
    }


def _open(core: Core, answer: RoundAnswer) -> dict[str, Any]:
    missing = [row for row in core.membership.latest() if row["name"] in answer.waits_for]
    return {
        "round": answer.outer_step,
        "since_s": round(core.rounds.open_for_s(answer.outer_step), 1),
        "due_in_s": answer.due_in_s,
        "contributed": answer.contributed,
        "waits_for": answer.waits_for,
        "missing": {row["name"]: _why(core, row, answer.outer_step) for row in missing},
    }


def _commit(core: Core, row: sqlite3.Row) -> dict[str, Any]:
    answer = core.rounds.answer(row["round"])
    return {
        "round": row["round"],
        "at": row["committed_at"],
        "seconds": round(row["seconds"], 3),
        "weights": answer.weights,
        "refused": answer.refused,
        "size_bytes": row["size"],
    }


def _why(core: Core, row: sqlite3.Row, outer_step: int) -> str:
    # Why a round still waits for a cluster.
    number = row["number"]
    silent_s, still_s = core.membership.last_seen_s(number), core.membership.still_s(number)
    heartbeat = core.membership.heartbeats.get(number)
    if row["is_behind"]:
        return f"takes the state of another: {row['command_reason']}"
    if silent_s > _QUIET_S:
        return f"not heard for {format_duration(silent_s)}"
    if share := _arrived(core, outer_step, number):
        return f"its contribution is on its way: {share:.0%} is here"
    if heartbeat is None:
        return ""
    phase = heartbeat.phase
    if still_s > max(_QUIET_S, core.settings.still_after_s / 10):
        return f"no inner step for {format_duration(still_s)}; it says: {phase or 'nothing'}"
    speed = f", {heartbeat.tokens_per_s:,.0f} tokens/s" if heartbeat.tokens_per_s else ""
    return f"{phase or 'training'}: {heartbeat.since} inner steps since its last round{speed}"


def _arrived(core: Core, outer_step: int, number: int) -> float:
    # Which part of a contribution is here.
    try:
        found = core.rounds.part_path(outer_step, number).stat()
    except OSError:
        return 0.0
    return min(1.0, 512 * found.st_blocks / max(1, found.st_size))
