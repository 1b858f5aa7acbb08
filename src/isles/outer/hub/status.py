"""What the hub reports to people: members, open rounds, the last commits, samples, events."""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from isles.facts.units import format_duration
from isles.outer.hub.core import Core
from isles.outer.messages import OpenRound, num_chunks

_EVENTS = 50
_MOST_EVENTS = 1000
_COMMITS = 20
_QUIET_S = 6.0
"""Three heartbeats."""


def status(core: Core) -> dict[str, Any]:
    """The answer to GET /v1/status, which `isles status` shows."""
    commits = _commits(core)
    open_rounds = core.rounds.open_rounds()
    last = core.journal.number("SELECT MAX(number) FROM events")
    return {
        "round": core.rounds.next,
        "fragments": len(core.pieces),
        "is_over": core.is_over(),
        "members": [_member(core, row, commits, open_rounds) for row in core.membership.latest()],
        "open": [_open(core, each) for each in open_rounds],
        "commits": commits,
        "samples": core.samples.counts(),
        "settings": core.settings.model_dump(),
        "events": events(core, last - _EVENTS),
    }


def events(core: Core, after: int) -> list[dict[str, Any]]:
    """What has happened since an event, oldest first."""
    rows = core.journal.rows(
        "SELECT * FROM events WHERE number > ? ORDER BY number LIMIT ?", after, _MOST_EVENTS
    )
    return [dict(row) for row in rows]


_REPORTED = {
    "step": 0,
    "since": 0,
    "loss": None,
    "tokens_per_s": 0.0,
    "phase": "",
    "sent_bytes": 0,
    "received_bytes": 0,
    "exposed_s": 0.0,
    "hidden_s": 0.0,
}


def _member(
    core: Core, row: sqlite3.Row, commits: list[dict[str, Any]], open_rounds: list[OpenRound]
) -> dict[str, Any]:
    name, number = row["name"], row["number"]
    heartbeat = core.membership.heartbeats.get(number)
    reported = {} if heartbeat is None else heartbeat.model_dump(exclude={"id", "version"})
    weights = commits[0]["weights"] if commits else {}
    tokens = weights.get(name, 0)
    late = [each.outer_step for each in open_rounds if name in each.waits_for]
    return {
        **{key: reported.get(key, nothing) for key, nothing in _REPORTED.items()},
        "name": name,
        "state": "finished" if row["has_finished"] and row["state"] == "left" else row["state"],
        "is_behind": bool(row["is_behind"]),
        "order": row["order_reason"],
        "version": row["version"],
        "from_round": row["from_round"],
        "heard_s": round(core.membership.last_seen_s(number), 1),
        "tokens": tokens,
        "weight": tokens / sum(weights.values()) if tokens else 0.0,
        "refused": row["refusal"],
        "slow": _why(core, row, min(late)) if late else "",
        "beat": reported or None,
    }


def _open(core: Core, each: OpenRound) -> dict[str, Any]:
    rows = {row["name"]: row for row in core.membership.latest()}
    missing = [rows[name] for name in each.waits_for if name in rows]
    return {
        "round": each.outer_step,
        **each.model_dump(exclude={"outer_step"}),
        "since_s": round(core.rounds.open_for_s(each.outer_step), 1),
        "missing": {row["name"]: _why(core, row, each.outer_step) for row in missing},
    }


def _why(core: Core, row: sqlite3.Row, outer_step: int) -> str:
    # Why a round still waits for a cluster.
    number = row["number"]
    silent_s, still_s = core.membership.last_seen_s(number), core.membership.still_s(number)
    heartbeat = core.membership.heartbeats.get(number)
    if row["is_behind"]:
        return f"takes the state of another: {row['order_reason']}"
    if silent_s > _QUIET_S:
        return f"not heard for {format_duration(silent_s)}"
    if share := _arrived(core, outer_step, number):
        return f"its contribution is on its way: {share:.0%} is here"
    if heartbeat is None or core.rounds.is_counted(outer_step, number):
        return ""
    phase = heartbeat.phase
    if still_s > max(_QUIET_S, core.settings.still_after_s / 10):
        return f"no inner step for {format_duration(still_s)}; it says: {phase or 'nothing'}"
    speed = f", {heartbeat.tokens_per_s:,.0f} tokens/s" if heartbeat.tokens_per_s else ""
    return f"{phase or 'training'}: {heartbeat.since} inner steps since its last round{speed}"


def _arrived(core: Core, outer_step: int, number: int) -> float:
    # Which part of a contribution is here.
    path = core.rounds.part_path(outer_step, number)
    try:
        with path.with_name(f"{path.name}.chunks").open("rb") as stream:
            chunks = sum(1 for _ in stream)
    except OSError:
        return 0.0
    return min(1.0, chunks / max(1, num_chunks(core.sizes[outer_step % len(core.pieces)])))


def _commits(core: Core) -> list[dict[str, Any]]:
    # The last rounds that are decided, the newest first.
    found = []
    for row in core.journal.rows(
        "SELECT * FROM rounds WHERE state = 'committed' ORDER BY round DESC LIMIT ?", _COMMITS
    ):
        answer = core.answer(row["round"])
        found.append(
            {
                "round": row["round"],
                "fragment": row["round"] % len(core.pieces),
                "at": row["committed_at"],
                "seconds": round(row["seconds"], 3),
                "participants": core.membership.names(frozenset(json.loads(row["participants"]))),
                "weights": answer.weights,
                "refused": answer.refused,
                "size_bytes": row["size"],
                "digest": row["digest"],
            }
        )
    return found
