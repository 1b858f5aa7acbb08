"""One snapshot of a multi-cluster run, from the snapshots of its clusters and the hub's answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isles import __version__
from isles.errors import UserError
from isles.facts.units import format_count, format_duration, printable
from isles.monitor.clusters import heavy_notes, worst_state
from isles.monitor.live.model import (
    ClusterRow,
    Head,
    HostRow,
    HubRow,
    LinkRow,
    Mark,
    RankRow,
    Snapshot,
)
from isles.monitor.live.rows import MOST_HOSTS, MOST_RANKS
from isles.monitor.live.snapshot import ClusterView, row_notes
from isles.monitor.outer import ask_status, known_answer
from isles.monitor.status import ReportState, RunReport
from isles.run.join_line import JoinLine, ask_hub
from isles.run.relay import unpack
from isles.run.restarts import Restart, restart_from
from isles.run.state import number_of

HUB_SILENT_S = 6.0
"""A cluster sends the hub a heartbeat every two seconds."""

_ANSWER_S = 3.0
_SLOW = 0.8
"""A cluster is called slow below this part of the fastest one's speed."""

_STATES: dict[str, ReportState] = {
    "living": "running",
    "finished": "finished",
    "left": "stopped",
    "dropped": "running",  # its ranks ran when it was heard of last; its row says the rest
}


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """Answer of a hub to a status question, or the reason why the hub gave no answer.

    Args:
        status: its answer to /v1/status. If None, `error` has the reason.
        shown: snapshots that clusters send through the hub (`isles.run.relay`), by name: age in
            seconds, and text.
    """

    address: str = ""
    status: dict[str, Any] | None = None
    error: str = ""
    shown: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.status is not None:
            object.__setattr__(self, "status", known_answer(self.status))

    @property
    def members(self) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in (self.status or {}).get("members") or ()}


def ask(line: JoinLine) -> HubAnswer:
    """Ask a hub how it stands, and what clusters show of themselves through it."""
    try:
        status = ask_status(line, _ANSWER_S)
    except UserError as error:
        return HubAnswer(line.address, error=f"{error.what} ({error.where})")
    shown: dict[str, tuple[float, str]] = {}
    try:
        entries = ask_hub(line, "/v1/live", _ANSWER_S).get("members")
    except UserError:  # it is of an earlier version, or has just gone
        entries = None
    for name, entry in entries.items() if isinstance(entries, dict) else ():
        known = entry if isinstance(entry, dict) else {}
        text, heard_s = known.get("record"), number_of(known, "heard_s")
        if isinstance(text, str) and heard_s is not None:
            shown[name] = heard_s, text
    return HubAnswer(line.address, status, shown=shown)


class MultiClusterView:
    """Makes snapshots of a run on several clusters; keeps what a snapshot needs of the last.

    Args:
        name, path, begun_at: of the run.
        clusters: the clusters of this run file, with their launchers. Others may have joined.
    """

    def __init__(
        self,
        name: str,
        path: str,
        clusters: Mapping[str, str],
        *,
        begun_at: float | None = None,
    ) -> None:
        self.name, self.path, self.clusters = name, path, clusters
        self._begun_at = begun_at
        self._views: dict[str, ClusterView] = {}

    def snapshot(
        self,
        parts: Mapping[str, Snapshot],
        errors: Mapping[str, str],
        hub: HubAnswer | None,
        asked: Collection[str] = (),
    ) -> Snapshot:
        """All clusters as they are now.

        Args:
            parts: snapshots by cluster.
            errors: why the snapshot of a cluster is old or missing.
            hub: the hub's answers, or None for an engine without a hub, such as hivemind.
            asked: clusters whose machines have not answered yet.
        """
        at = time.time()
        known = {name: self._own(name, part) for name, part in parts.items()}
        left_hosts = MOST_HOSTS - sum(len(part.hosts) for part in known.values())
        left_ranks = MOST_RANKS - sum(len(part.ranks) for part in known.values())
        for name, member in (hub.members if hub else {}).items():
            shown = hub.shown.get(name) if hub else None
            if name not in known or (shown is not None and errors.get(name)):
                room = max(0, left_hosts), max(0, left_ranks)
                part = known[name] = self._shown(name, member, shown, at, *room)
                left_hosts, left_ranks = left_hosts - len(part.hosts), left_ranks - len(part.ranks)
        # A hub may show other names each time.
        self._views = {name: view for name, view in self._views.items() if name in known}
        rows = [self._row(n, known.get(n), errors.get(n, ""), hub) for n in self._names(known)]
        rows = [r.model_copy(update={"state": "asked"}) if r.name in asked else r for r in rows]
        rows = _with_slow(rows)
        hosts = [row for part in known.values() for row in part.hosts]
        ranks = [row for part in known.values() for row in part.ranks]
        marked = {row.name: row for row in rows if row.mark == "silent"}
        cut = {name: row.note for name, row in marked.items()}
        if hub is not None and hub.error:
            cut = {row.name: "the hub does not answer" for row in rows if row.state == "running"}
        links = [
            link.model_copy(update={"state": f"down: {cut[link.cluster]}"})
            if link.cluster in cut and {"hub", "bucket"} & {link.source, link.target}
            else link
            for part in known.values()
            for link in part.links
        ]
        states = {"never started": "new", "dropped": "unknown"}
        state = worst_state([states.get(row.state, row.state) for row in rows])
        notes = [f"the hub does not answer: {hub.error}"] if hub and hub.error else []
        notes = [] if state not in ("running", "queued") else notes
        notes += row_notes(hosts, ranks, rows)
        for name, part in known.items():
            own = set(row_notes(part.hosts, part.ranks, part.clusters))
            notes += [f"{name}: {note}" for note in part.notes if note not in own]
        notes += _waiting(hub)
        notes += heavy_notes(hub.status or {}) if hub else []
        return Snapshot(
            version=__version__,
            at=at,
            run=self._head(list(known.values()), state),
            curve=next((part.curve for part in known.values() if part.curve), ()),
            clusters=tuple(rows),
            hub=_hub_row(hub) if hub is not None else None,
            hosts=tuple(hosts),
            ranks=tuple(ranks),
            links=tuple(links),
            notes=tuple(printable(note) for note in dict.fromkeys(notes)),
        )

    def _names(self, known: Mapping[str, Snapshot]) -> list[str]:
        return [*self.clusters, *(name for name in known if name not in self.clusters)]

    def _own(self, name: str, part: Snapshot) -> Snapshot:
        # The rows of a cluster under the name that the run of all gives it.
        def own(row: HostRow | RankRow | LinkRow) -> HostRow | RankRow | LinkRow:
            if row.cluster == name:
                return row
            changes = {"cluster": name}
            if isinstance(row, LinkRow):
                ends = {"source": row.source, "target": row.target}
                changes |= {end: name for end, was in ends.items() if was == row.cluster}
            return row.model_copy(update=changes)

        renamed: dict[str, Any] = {
            kind: tuple(own(row) for row in getattr(part, kind))
            for kind in ("hosts", "ranks", "links")
        }
        return part.model_copy(update=renamed)

    def _shown(
        self,
        name: str,
        member: Mapping[str, Any],
        shown: tuple[float, str] | None,
        at: float,
        most_hosts: int,
        most_ranks: int,
    ) -> Snapshot:
        # A cluster that only the hub knows: from what it shows through it.
        heard_s, records = (shown[0], unpack(shown[1])) if shown else (0.0, {})
        status, live = records.get("status", {}), records.get("live", {})
        restart = restart_from(records.get("restart"))
        state = _STATES.get(str(member.get("state")), "unknown")
        report = _report_of(name, state, {**member, **status}, restart, at)
        view = self._views.setdefault(name, ClusterView(name))
        found = view.snapshot(
            report,
            at,
            live=live,
            age_s=heard_s,
            restart=restart,
            most_hosts=most_hosts,
            most_ranks=most_ranks,
        )
        if member.get("state") == "dropped":
            found = found.model_copy(
                update={"run": found.run.model_copy(update={"state": "unknown"})}
            )
        return self._own(name, found)

    def _row(
        self, name: str, part: Snapshot | None, error: str, hub: HubAnswer | None
    ) -> ClusterRow:
        launcher = self.clusters.get(name, "")
        if part is None:
            mark: Mark = "silent" if error else ""
            state = "unreachable" if error else "never started"
            return ClusterRow(name=name, launcher=launcher, state=state, mark=mark, note=error)
        row = part.clusters[0] if part.clusters else _bare_row(part)
        changes: dict[str, Any] = {"name": name, "launcher": launcher or row.launcher}
        if hub is None and row.note:
            changes["note"] = row.note.replace("the hub", "the others")
        if row.state in ("failed", "killed"):
            changes |= {"mark": "dead", "note": f"{row.state}: {part.run.reason}".rstrip(": ")}
        member = hub.members.get(name) if hub else None
        if member is not None and hub is not None:
            changes |= _of_member(row, member, hub)
        if error:
            changes |= {"mark": "silent", "note": error}
        return row.model_copy(update=changes)

    def _head(self, parts: Sequence[Snapshot], state: ReportState) -> Head:
        heads = [part.run for part in parts]
        ahead = max(heads, key=lambda head: head.step or 0, default=Head())
        saved = [head for head in heads if head.saved_age_s is not None]
        newest = min(saved, key=lambda head: head.saved_age_s or 0.0, default=Head())
        running = [head for head in heads if head.state == "running"]
        speeds = [head.tokens_per_second for head in running if head.tokens_per_second]
        shares = [head.goodput for head in heads if head.goodput is not None]
        used = [head.mfu for head in running if head.mfu is not None]
        tokens = [head.tokens for head in heads if head.tokens is not None]
        begun = [head.begun_at for head in heads if head.begun_at is not None]
        ages = [head.recorded_age_s for head in running if head.recorded_age_s is not None]
        restarts = [f"{head.name}: {head.last_restart}" for head in heads if head.last_restart]
        return Head(
            name=self.name,
            path=self.path,
            state=state,
            phase=f"{len(self.clusters)} clusters" if self.clusters else "",
            step=ahead.step,
            total_steps=ahead.total_steps,
            left_s=max((h.left_s for h in heads if h.left_s is not None), default=None),
            loss=ahead.loss,
            tokens=sum(tokens) if tokens else None,
            tokens_per_second=sum(speeds) if speeds else None,
            mfu=sum(used) / len(used) if used else None,
            goodput=sum(shares) / len(shares) if shares else None,
            begun_at=self._begun_at or min(begun, default=None),
            recorded_age_s=max(ages, default=None),
            saved_step=newest.saved_step,
            saved_age_s=newest.saved_age_s,
            restarts=sum(head.restarts for head in heads),
            last_restart="; ".join(restarts),
        )


def _bare_row(part: Snapshot) -> ClusterRow:
    head = part.run
    return ClusterRow(
        state=head.state,
        step=head.step,
        total_steps=head.total_steps,
        loss=head.loss,
        tokens_per_second=head.tokens_per_second,
    )


def _report_of(
    name: str, state: ReportState, status: Mapping[str, Any], restart: Restart | None, at: float
) -> RunReport:
    # By the records that a cluster has sent, and what the hub knows of it.
    found = dict(status)

    def whole(key: str) -> int | None:
        value = number_of(found, key)
        return int(value) if value is not None and abs(value) < 2**62 else None

    outer = found.get("outer")
    counted: dict[str, Any] = {
        key: found[key] for key in ("sent_bytes", "received_bytes") if key in found
    }
    return RunReport(
        name=name,
        state=state,
        step=whole("step"),
        total_steps=whole("total_steps"),
        loss=number_of(found, "loss"),
        tokens_per_second=number_of(found, "tokens_per_second") or number_of(found, "tokens_per_s"),
        eta_s=number_of(found, "eta_s"),
        phase=printable(str(found.get("phase") or ""), longest=80),
        detail=printable(str(found.get("detail") or ""), longest=200),
        world_size=whole("world_size"),
        checkpoint_step=whole("checkpoint_step"),
        checkpoint_at=number_of(found, "checkpoint_at"),
        updated_at=at,
        restarts=restart.count if restart else 0,
        last_restart=restart.text if restart else "",
        outer=outer if isinstance(outer, dict) else counted,
    )


def _of_member(row: ClusterRow, member: Mapping[str, Any], hub: HubAnswer) -> dict[str, Any]:
    # What the hub knows of a cluster.
    found = dict(member)
    heard_s, since = number_of(found, "heard_s"), number_of(found, "since")
    decided, weight = number_of(dict(hub.status or {}), "round"), number_of(found, "weight")
    changes: dict[str, Any] = {"heard_s": heard_s}
    if weight:
        changes["weight"] = weight
    if since is not None:
        changes["inner_steps"] = int(since)
    if decided is not None and row.outer_step is not None:
        changes["lag"] = max(0, int(decided) - row.outer_step)
    if member.get("state") == "dropped":
        heard = "" if heard_s is None else f", no heartbeat for {format_duration(heard_s)}"
        state = "dropped" if row.state == "running" else row.state
        return {**changes, "state": state, "mark": "silent", "note": f"dropped by the hub{heard}"}
    if row.state == "running" and heard_s is not None and heard_s > HUB_SILENT_S:
        heard = format_duration(heard_s)
        note = row.note or f"the hub gets no heartbeat from it for {heard}"
        changes |= {"mark": "silent", "note": note}
    elif row.state == "running" and not row.note and member.get("is_behind"):
        changes["note"] = "it is behind, and copies the weights of another cluster"
    elif row.state == "running" and not row.note and member.get("refused"):
        changes["note"] = str(member["refused"])
    return changes


def _with_slow(rows: list[ClusterRow]) -> list[ClusterRow]:
    # A cluster that computes far less than the fastest.
    speeds = [row.tokens_per_second or 0.0 for row in rows if row.state == "running"]
    fastest = max(speeds, default=0.0)
    found = []
    for row in rows:
        speed = row.tokens_per_second
        if row.state == "running" and speed and speed < _SLOW * fastest and not row.note:
            own, best = format_count(speed), format_count(fastest)
            note = f"it computes {own} tokens/s, the fastest {best}"
            found.append(row.model_copy(update={"note": note}))
        else:
            found.append(row)
    return found


def _hub_row(hub: HubAnswer) -> HubRow:
    status = hub.status or {}
    entry = _open_round(hub) or {}
    decided = number_of(status, "round")
    names = entry.get("waits_for") or ()
    return HubRow(
        address=hub.address,
        round=None if decided is None else int(decided),
        waits_for=tuple(names),
        due_s=number_of(entry, "due_in_s"),
        error=hub.error,
    )


def _open_round(hub: HubAnswer) -> dict[str, Any] | None:
    # The first that has a contribution and lacks another.
    entries = (hub.status or {}).get("open") or ()
    return next((e for e in entries if e.get("waits_for") and e.get("contributed")), None)


def _waiting(hub: HubAnswer | None) -> list[str]:
    entry = _open_round(hub) if hub is not None else None
    if entry is None:
        return []
    missing = entry.get("missing") or {}
    names = [f"{n} ({missing[n]})" if missing.get(n) else n for n in entry["waits_for"]]
    due_s = number_of(entry, "due_in_s")
    by = f", for {format_duration(due_s)} more" if due_s is not None else ""
    return [f"round {entry.get('round')} waits for {', '.join(names)}{by}"]
