"""Builds the `Snapshot` of a run on this machine."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isles import __version__
from isles.errors import UserError
from isles.facts.units import format_duration, printable
from isles.monitor.live.history import MetricsReader, goodput, spans_of
from isles.monitor.live.model import (
    ClusterRow,
    Head,
    HostRow,
    LinkRow,
    Mark,
    Point,
    RankRow,
    Snapshot,
)
from isles.monitor.live.rows import (
    MOST_HOSTS,
    MOST_RANKS,
    Records,
    host_rows,
    link_rows,
    part_of,
    rank_rows,
    unshown,
    whole_of,
)
from isles.monitor.live.waits import Waits
from isles.monitor.status import RunReport, collect
from isles.run.links import read_links
from isles.run.owner import shown_only
from isles.run.paths import RunDir
from isles.run.records import MAX_SHOWN_BYTES, read_record
from isles.run.resolved import read_resolved
from isles.run.restarts import Restart, last_restart
from isles.run.state import FRESH_S, QUEUES, number_of

_SILENT_S = 6.0
"""A coordinator writes live.json every two seconds."""

_RECENT_S = 300.0
"""Seconds that a restart stays in the notes."""

_LISTED = 5
_MOST_VALUES, _LONGEST_VALUE = 200, 80
_RATE_S = 15.0
"""Seconds over which the byte rate to and from a hub is averaged."""


class RunReader:
    """Looks at one run directory of this machine, again and again.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, run_dir: RunDir, clock: Callable[[], float] = time.time) -> None:
        self.run_dir, self._clock = run_dir, clock
        self.cluster = _cluster_name(run_dir)
        """Name of its cluster, or of the run if the cluster is unknown."""
        self._history = MetricsReader(run_dir.metrics)
        self._values = _run_values(run_dir)
        self._view = ClusterView(self.cluster)

    def look(self) -> Snapshot:
        run_dir, now = self.run_dir, self._clock()
        report = collect(run_dir, self._clock)
        attempt = run_dir.last_attempt()
        self._history.read()
        is_alive = report.state == "running"
        share = goodput(self._history.step_s, spans_of(run_dir, now, is_alive=is_alive))
        return self._view.snapshot(
            report,
            now,
            live=(read_record(attempt.live, MAX_SHOWN_BYTES) if attempt else None) or {},
            restart=last_restart(attempt) if attempt else None,
            pairs=read_links(run_dir.path.parent),
            row=self._history.newest,
            curve=self._history.curve(),
            goodput=share,
            recorded_age_s=self._history.age_s(now),
            values=self._values,
        )


class ClusterView:
    """Makes snapshots of one cluster from its records; keeps what a snapshot needs of the last.

    Args:
        name: of the cluster.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._waits = Waits()
        self._rates = Rates()
        self._written: tuple[float, float] | None = None

    def snapshot(
        self,
        report: RunReport,
        at: float,
        *,
        live: dict[str, Any],
        restart: Restart | None = None,
        pairs: Mapping[str, Mapping[str, Any]] | None = None,
        row: Mapping[str, Any] | None = None,
        curve: tuple[Point, ...] = (),
        goodput: float | None = None,
        age_s: float | None = None,
        recorded_age_s: float | None = None,
        values: dict[str, str] | None = None,
        most_hosts: int = MOST_HOSTS,
        most_ranks: int = MOST_RANKS,
    ) -> Snapshot:
        """A snapshot of the run as it is now.

        Args:
            report: report of `isles status`.
            at: now.
            live: attempts/N/live.json, perhaps empty.
            row: the newest row of metrics.jsonl.
            age_s: age of live.json, if this machine's clock does not give it.
            recorded_age_s: of the newest row.
            values: of its run file; see `Head`.
            most_hosts, most_ranks: rows that the snapshot may have.
        """
        # A network file system may show a record half a minute late.
        is_far = report.launcher in QUEUES or report.host not in (None, socket.gethostname())
        records = Records(
            cluster=self.name if report.outer is not None else "",
            report=report,
            at=at,
            live=live,
            age_s=self._age_s(live, at) if age_s is None else age_s,
            silent_s=FRESH_S if is_far else _SILENT_S,
            restart=restart,
            pairs=pairs or {},
            most_hosts=most_hosts,
            most_ranks=most_ranks,
        )
        hosts = host_rows(records)
        ranks = rank_rows(records, hosts, self._waits)
        links = link_rows(records, hosts)
        clusters: tuple[ClusterRow, ...] = ()
        if report.outer is not None:
            clusters = (_cluster_row(self.name, report),)
            links += self._rates.links(self.name, report, at)
        return Snapshot(
            version=__version__,
            at=at,
            run=_head(report, records, row or {}, goodput).model_copy(
                update={"recorded_age_s": recorded_age_s, "values": values or {}}
            ),
            curve=curve,
            clusters=clusters,
            hosts=tuple(hosts),
            ranks=tuple(ranks),
            links=tuple(links),
            notes=_notes(records, hosts, ranks, clusters),
        )

    def _age_s(self, live: dict[str, Any], at: float) -> float | None:
        # By this machine's clock; where it is not that of the coordinator, by how long the record
        # has not changed.
        written_at, now = number_of(live, "at"), time.monotonic()
        if written_at is None:
            return None
        before, self._written = self._written, (written_at, now)
        if before is not None and before[0] == written_at:
            self._written = before
        unchanged_s, age_s = now - self._written[1], at - written_at
        if age_s < 0:
            return unchanged_s
        return age_s if before is None else min(age_s, unchanged_s + _SILENT_S / 2)


def _cluster_name(run_dir: RunDir) -> str:
    try:
        config = read_resolved(run_dir).config
    except (OSError, UserError, ValueError):
        return run_dir.name
    return config.clusters[0].name


def _run_values(run_dir: RunDir) -> dict[str, str]:
    # What makes the model: places, names and machines do not.
    try:
        config = read_resolved(run_dir).config
    except (OSError, UserError, ValueError):
        return {}
    found: dict[str, str] = {}

    def add(key: str, value: object) -> None:
        if isinstance(value, dict):
            for name, each in value.items():
                add(f"{key}.{name}", each)
        elif len(found) < _MOST_VALUES:
            found[key] = printable(str(value), longest=_LONGEST_VALUE)

    for section in ("model", "tokenizer", "adapter", "data", "training", "strategy", "outer"):
        part = getattr(config, section, None)
        add(section, part.model_dump(mode="json") if part is not None else None)
    add("seed", config.seed)
    return found


def _head(
    report: RunReport, records: Records, row: Mapping[str, Any], goodput: float | None
) -> Head:
    saved_age_s = None
    if report.checkpoint_at is not None:
        saved_age_s = max(0.0, records.at - report.checkpoint_at)
    tokens = number_of(dict(row), "tokens")
    return Head(
        name=report.name,
        path=f"{report.on}:{report.path}" if report.on else report.path,
        state=report.state,
        phase=", ".join(part for part in (report.phase or "", report.detail) if part),
        reason=report.reason,
        step=report.step,
        total_steps=report.total_steps,
        left_s=report.eta_s,
        loss=report.loss,
        tokens=None if tokens is None else int(tokens),
        tokens_per_second=report.tokens_per_second,
        mfu=number_of(dict(row), "mfu"),
        goodput=goodput,
        begun_at=report.begun_at,
        saved_step=report.checkpoint_step,
        saved_age_s=saved_age_s,
        restarts=report.restarts,
        last_restart=report.last_restart,
        eval_loss=report.eval_loss,
    )


def _cluster_row(name: str, report: RunReport) -> ClusterRow:
    outer = report.outer or {}
    last = part_of(outer, "last_outer_step")
    given = part_of(last, "weights")
    weights = {key: found for key in given if (found := number_of(given, key)) is not None}
    whole = sum(weights.values()) or 1
    sync_s = (number_of(outer, "exposed_s") or 0.0) + (number_of(outer, "hidden_s") or 0.0)
    version, since = whole_of(outer, "outer_step"), whole_of(last, "step")
    mark: Mark = ""
    note = ""
    if report.state == "running" and not outer.get("is_connected", True):
        mark, note = "silent", "it does not reach the hub, and trains on alone"
    elif report.state == "running" and outer.get("is_behind"):
        note = "it is behind, and takes the weights of another"
    return ClusterRow(
        name=name,
        launcher=report.launcher,
        state=report.state,
        step=report.step,
        total_steps=report.total_steps,
        loss=report.loss,
        tokens_per_second=report.tokens_per_second,
        outer_step=version,
        inner_steps=None if report.step is None or since is None else max(0, report.step - since),
        weight=weights[name] / whole if name in weights else None,
        up_bytes=whole_of(outer, "sent_bytes"),
        down_bytes=whole_of(outer, "received_bytes"),
        sync_s=sync_s or None,
        hidden_share=number_of(outer, "hidden_share"),
        mark=mark,
        note=note,
    )


class Rates:
    """Bytes per second to and from the hub, from the counters of a cluster."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def links(self, cluster: str, report: RunReport, at: float) -> list[LinkRow]:
        """The two ways between a cluster and its hub."""
        outer = report.outer or {}
        up, down = self._used(whole_of(outer, "sent_bytes"), whole_of(outer, "received_bytes"), at)
        state = "ok"
        if report.state != "running":
            state = report.state
        elif not outer.get("is_connected", True):
            state = f"down: {cluster} does not reach the hub"
        rate = number_of(outer, "bytes_per_s") or None
        by = "averages" if rate else ""
        place = "bucket" if "meeting" in outer else "hub"
        if not outer.get("is_connected", True):
            state = state.replace("the hub", f"the {place}")
        ends = ((cluster, place, up), (place, cluster, down))
        return [
            LinkRow(
                cluster=cluster,
                source=source,
                target=target,
                measured=rate,
                measured_by=by,
                used=used,
                state=state,
            )
            for source, target, used in ends
        ]

    def _used(
        self, sent: int | None, received: int | None, at: float
    ) -> tuple[float | None, float | None]:
        if sent is None or received is None:
            return None, None
        seen = self._seen
        if seen and (sent < seen[-1][1] or received < seen[-1][2] or at < seen[-1][0]):
            seen.clear()  # another start of the run
        seen.append((at, sent, received))
        while len(seen) > 2 and at - seen[1][0] >= _RATE_S:
            seen.popleft()
        took_s = at - seen[0][0]
        if took_s <= 0:
            return None, None
        return (sent - seen[0][1]) / took_s, (received - seen[0][2]) / took_s


def _notes(
    records: Records,
    hosts: Sequence[HostRow],
    ranks: Sequence[RankRow],
    clusters: Sequence[ClusterRow],
) -> tuple[str, ...]:
    found = row_notes(hosts, ranks, clusters)
    if records.report.state in ("failed", "killed"):
        reason = records.report.reason or "its processes are gone and have left no outcome"
        found.insert(0, f"the run is {records.report.state}: {reason}")
    last = records.restart
    # A restart that was planned, as for another node or at a time limit, is in the head alone.
    if (
        records.is_on
        and last is not None
        and not last.is_planned
        and 0 <= (ago_s := records.at - last.at) < _RECENT_S
    ):
        found.append(f"{format_duration(ago_s)} ago: {last.text}")
    for more, what in zip(unshown(records, hosts, ranks), ("hosts", "ranks"), strict=True):
        found += [f"and {more:,} more {what}, which are not shown"] if more else []
    if records.report.owner:
        found.append(shown_only(records.report.owner))
    return tuple(printable(text) for text in found)


def row_notes(
    hosts: Sequence[HostRow], ranks: Sequence[RankRow], clusters: Sequence[ClusterRow]
) -> list[str]:
    """Notes on hosts and ranks, in the order dead, silent, straggler, throttled, then the rest.

    A note on a silent host replaces the notes on its ranks.
    """
    away = {(row.cluster, row.node) for row in hosts if row.mark == "silent"}
    found: list[str] = []
    marks: tuple[Mark, ...] = ("dead", "silent", "straggler", "throttled")
    for mark in marks:
        named = [f"{row.name}: {row.note}" for row in clusters if row.mark == mark]
        named += [_named(row.cluster, row.note) for row in hosts if row.mark == mark and row.note]
        named += [
            _named(row.cluster, _rank_note(row))
            for row in ranks
            if row.mark == mark and (mark != "silent" or (row.cluster, row.node) not in away)
        ]
        more = len(named) - _LISTED
        found += named if more <= 0 else [*named[:_LISTED], f"and {more} more: {mark}"]
    return found + [f"{row.name}: {row.note}" for row in clusters if row.note and not row.mark]


def _named(cluster: str, text: str) -> str:
    return f"{cluster}: {text}" if cluster else text


def _rank_note(row: RankRow) -> str:
    name = f"rank {row.rank} on {row.host}"
    return row.note if row.note.startswith(name) else f"{name}: {row.note}"
