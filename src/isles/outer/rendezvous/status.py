"""What the rendezvous tells people: members, open turns, samples, events."""

from __future__ import annotations

from typing import Any

from isles.outer.rendezvous.core import Core

_EVENTS = 50
_MOST_EVENTS = 1000


def status(core: Core) -> dict[str, Any]:
    """What `isles status` shows."""
    members = []
    for row in core.book.rows("SELECT * FROM members ORDER BY number"):
        beat = core.roster.beats.get(row["number"])
        members.append(
            {
                "name": row["name"],
                "state": row["state"],
                "is_behind": bool(row["is_behind"]),
                "version": row["version"],
                "heard_s": round(core.roster.heard_s(row["number"]), 1),
                "beat": None if beat is None else beat.model_dump(exclude={"id"}),
            }
        )
    last = core.book.number("SELECT MAX(number) FROM events")
    return {
        "turn": core.turns.next,
        "fragments": len(core.pieces),
        "open": [turn.model_dump() for turn in core.turns.open_turns()],
        "epoch": core.epochs.status(),
        "members": members,
        "samples": core.samples.counts(),
        "settings": core.settings.model_dump(),
        "events": events(core, last - _EVENTS),
    }


def events(core: Core, after: int) -> list[dict[str, Any]]:
    """What has happened since an event, oldest first."""
    rows = core.book.rows(
        "SELECT * FROM events WHERE number > ? ORDER BY number LIMIT ?", after, _MOST_EVENTS
    )
    return [dict(row) for row in rows]
