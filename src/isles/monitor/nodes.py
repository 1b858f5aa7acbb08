"""The nodes of a run, and what was noticed of them: as their records on the head tell it."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from isles.errors import UserError
from isles.run.fleet import read_fleet
from isles.run.paths import Attempt
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.state import number_of

_RANK_RECORD = re.compile(r"rank-(\d+)\.json")
_LISTED = 3


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node of a run.

    Args:
        node: its number.
        host: its name.
        address: where the others reach it; empty: not known.
        ranks: the first and the last of its ranks; None: not known.
        pid: its agent, or the process of its first rank; None: it has not come yet.
        is_there: whether it runs, as far as the head knows.
        heard_s: seconds since its last sign of life; None: not known.
        note: what is to be said of it.
    """

    node: int
    host: str
    address: str = ""
    ranks: tuple[int, int] | None = None
    pid: int | None = None
    is_there: bool = False
    heard_s: float | None = None
    note: str = ""

    @classmethod
    def of(cls, record: dict[str, Any]) -> NodeReport:
        """From JSON, of this version of isles or another."""
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        if known.get("ranks") is not None:
            known["ranks"] = tuple(known["ranks"])
        return cls(**known)


def node_reports(attempt: Attempt, now_s: float) -> tuple[NodeReport, ...]:
    """The nodes of an attempt by their numbers; none where it has only one."""
    fleet = None
    with suppress(UserError):  # of another version: what else is known of it is shown
        fleet = read_fleet(attempt)
    met = (read_record(attempt.nodes) or {}).get("nodes")
    if isinstance(met, list) and met:
        found = [_met(node, now_s) for node in met]
    elif fleet is not None:
        firsts = accumulate((node.nproc for node in fleet.nodes), initial=0)
        found = [
            NodeReport(
                node=node.node,
                host=node.name,
                address=node.address,
                ranks=(first, first + node.nproc - 1),
                note="has not come yet",
            )
            for node, first in zip(fleet.nodes, firsts, strict=False)
        ]
    else:
        found = _by_ranks(attempt)
    return tuple(found) if len(found) > 1 else ()


_STATES = {"missing": "has not come yet", "lost": "is lost", "ended": "has ended"}


def _met(record: dict[str, Any], now_s: float) -> NodeReport:
    """A node, as the coordinator has put it on record."""
    state, first = str(record.get("state")), record.get("first_rank")
    process = ProcessId.from_record(record)
    is_there = state == "there" and not (process and process.is_here() and not process.is_alive())
    heard_at = number_of(record, "heard_at")
    why = str(record.get("why") or "")
    note = _STATES.get(state, "")
    return NodeReport(
        node=int(record["node"]),
        host=str(record.get("name")),
        address=str(record.get("address") or ""),
        ranks=(first, first + int(record["ranks"]) - 1) if first is not None else None,
        pid=process.pid if process else None,
        is_there=is_there,
        heard_s=max(0.0, now_s - heard_at) if heard_at is not None else None,
        note=f"{note}: {why}" if note and why else note,
    )


def _by_ranks(attempt: Attempt) -> list[NodeReport]:
    """Where no fleet was settled beforehand, the hosts of the ranks."""
    places: dict[str, list[tuple[int, ProcessId]]] = defaultdict(list)
    names = sorted(attempt.path.glob("rank-*.json")) if attempt.path.is_dir() else []
    for path in names:
        match = _RANK_RECORD.fullmatch(path.name)
        record = read_record(path) if match else None
        process = ProcessId.from_record(record) if record else None
        if match and process:
            places[process.host].append((int(match[1]), process))
    found = []
    ordered = sorted(places.items(), key=lambda place: min(rank for rank, _ in place[1]))
    for node, (host, ranks) in enumerate(ordered):
        numbers = [rank for rank, _ in ranks]
        first = min(ranks)[1]
        is_there = not first.is_here() or first.is_alive()
        place = (min(numbers), max(numbers))
        found.append(NodeReport(node, host, ranks=place, pid=first.pid, is_there=is_there))
    return found


def checked_text(attempt: Attempt) -> str:
    """What `isles check` found wrong before this start; empty where nothing or not asked."""
    record = read_record(attempt.findings) or {}
    found = record.get("findings")
    wrong = [
        entry
        for entry in (found if isinstance(found, list) else [])
        if isinstance(entry, dict) and entry.get("level") in ("warning", "error")
    ]
    texts = [
        f"{entry.get('level')}: {entry.get('text') or entry.get('id')}"
        + (f" ({entry['where']})" if entry.get("where") else "")
        for entry in sorted(wrong, key=lambda entry: entry["level"] != "error")
    ]
    more = f" and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more
