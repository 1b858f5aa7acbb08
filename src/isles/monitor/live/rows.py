"""Rows of hosts, ranks and links of one cluster, from attempts/N/live.json and other records."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from isles.errors import ExitCode
from isles.facts.units import format_duration, printable
from isles.monitor.live.model import HostRow, LinkRow, RankRow, StepSeconds
from isles.monitor.live.waits import Stage, Step, Waits, late
from isles.monitor.status import RunReport
from isles.run.cards import POWER_LIMIT
from isles.run.manifest import number_of as name_number
from isles.run.restarts import Restart
from isles.run.state import number_of

NODE_SILENT_S = 4.0
"""A node sends a message every second."""

_STARTS_S = 30.0
RANK_SILENT_S = 8.0
"""A rank reports its stage to its agent every second, and a sample may be three seconds old."""

SAMPLE_OLD_S = 15.0
"""An agent samples its node every two seconds, unless a driver or a disk does not answer."""

_SLOW_CLOCK = 0.85
"""Any busy GPU is at its power limit. Such a GPU counts as throttled if its clock is below this
part of the clocks of equal GPUs."""

_MOST, _LONGEST = 1024, 200
"""Limits for a record of another site: ranks per node, and letters per text."""

MOST_RANKS, MOST_HOSTS = 16_384, 4096
"""Rows of a snapshot, also of all clusters together; notes count the ranks and hosts above."""

_PAIRS = 8
"""Up to this number of hosts, each link has a row. With more hosts, each host's slowest link."""

_WELL = (0, int(ExitCode.REQUEUE), int(ExitCode.INTERRUPTED), int(ExitCode.HANDOVER))
_STATES = {"missing": "has not come yet", "lost": "is lost", "ended": "has ended"}


@dataclass(frozen=True)
class Records:
    """Records of one cluster at one moment.

    Args:
        live: attempts/N/live.json, or empty, as for a run of an earlier version.
        age_s: age of that record, or None if unknown.
        silent_s: if the record is older, the coordinator counts as silent.
        restart: the last restart of the newest attempt.
        pairs: links that `isles check` has measured, by the names of the two hosts.
        most_hosts, most_ranks: rows that are made. The records may name any number.
    """

    cluster: str
    report: RunReport
    at: float
    live: dict[str, Any] = field(default_factory=dict)
    age_s: float | None = None
    silent_s: float = 6.0
    restart: Restart | None = None
    pairs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most_hosts: int = MOST_HOSTS
    most_ranks: int = MOST_RANKS

    @property
    def is_on(self) -> bool:
        return self.report.state == "running"

    @property
    def is_silent(self) -> bool:
        """True if the coordinator no longer writes."""
        return self.is_on and self.age_s is not None and self.age_s > self.silent_s

    @cached_property
    def nodes(self) -> dict[int, dict[str, Any]]:
        found = self.live.get("nodes")
        nodes = found.items() if isinstance(found, dict) else ()
        numbered = ((name_number(name), node) for name, node in nodes if isinstance(node, dict))
        return {number: node for number, node in numbered if number is not None}

    def sample_age_s(self, node: dict[str, Any]) -> float:
        """Seconds from a node's sample to the writing of live.json, which may hold an old one."""
        written_at, sampled_at = number_of(self.live, "at"), number_of(node, "at")
        if written_at is None or sampled_at is None or not self.is_on:
            return 0.0
        return max(0.0, written_at - sampled_at + (number_of(node, "skew_s") or 0.0))

    def quiet_s(self, node: dict[str, Any]) -> float | None:
        """Seconds between a node's last heartbeat and the time when live.json was written."""
        written_at, heard_at = number_of(self.live, "at"), number_of(node, "heard_at")
        if written_at is None or heard_at is None or not self.is_on:
            return None
        return max(0.0, written_at - heard_at)


def _address(text: str) -> str:
    # The loopback is every machine's own, and tells nothing.
    return "" if text.startswith("127.") or text == "::1" else text


def host_rows(records: Records) -> list[HostRow]:
    """A row per node; without live.json what `isles status` knows of them."""
    nodes = records.nodes
    if not nodes:
        return _reported_hosts(records)
    rows, first_node = list[HostRow](), min(nodes)
    for number, node in sorted(nodes.items())[: records.most_hosts]:
        host, state = part_of(node, "host"), _text(node, "state")
        quiet_s, name = records.quiet_s(node), _text(node, "name")
        heard_s = None if quiet_s is None else quiet_s + (records.age_s or 0.0)
        first, count = whole_of(node, "first_rank"), min(whole_of(node, "num_ranks") or 0, _MOST)
        note = ""
        if records.is_on and state == "lost":
            note = f"{name} is lost: {_text(node, 'why') or 'nothing has come from it'}"
        elif records.is_silent:
            age = format_duration(records.age_s or 0.0)
            note = f"nothing is recorded for {age}: the process that leads the run does not answer"
            note = f"{name}: {note}" if number == first_node else ""
        elif quiet_s is not None and quiet_s > NODE_SILENT_S and state == "there":
            heard = format_duration(heard_s or quiet_s)
            note = f"no heartbeat from {name} for {heard}: its machine or its link is down"
        elif state == "there" and records.sample_age_s(node) > SAMPLE_OLD_S:
            old = format_duration(records.sample_age_s(node))
            note = f"the values of {name} are {old} old: its agent takes no new sample"
        rows.append(
            HostRow(
                cluster=records.cluster,
                node=number,
                host=name,
                address=_address(_text(node, "address")),
                ranks=(first, first + count - 1) if first is not None and count > 0 else None,
                state=_STATES.get(state, state),
                cpu=number_of(host, "cpu"),
                memory_bytes=whole_of(host, "memory_bytes"),
                memory_total_bytes=whole_of(host, "memory_total_bytes"),
                disk_free_bytes=whole_of(host, "disk_free_bytes"),
                net_in=number_of(host, "net_in"),
                net_out=number_of(host, "net_out"),
                skew_s=number_of(node, "skew_s"),
                heard_s=heard_s,
                mark="silent" if note or records.is_silent else "",
                note=note,
            )
        )
    return rows


def _reported_hosts(records: Records) -> list[HostRow]:
    report = records.report
    if not report.nodes:
        count = report.world_size or 0
        last = (0, count - 1) if count > 0 else None
        return [HostRow(cluster=records.cluster, host=report.host or "", ranks=last)]
    rows = []
    for node in report.nodes[: records.most_hosts]:
        is_lost = records.is_on and not node.is_running and node.pid is not None
        heard_s = node.last_seen_s if records.is_on else None
        note = f"{node.host} {node.note or 'is not running'}" if is_lost else ""
        rows.append(
            HostRow(
                cluster=records.cluster,
                node=node.node,
                host=node.host,
                address=node.address,
                ranks=node.ranks,
                state=node.note or ("there" if node.is_running else ""),
                heard_s=heard_s,
                mark="silent" if is_lost else "",
                note=note,
            )
        )
    return rows


def rank_rows(records: Records, hosts: Sequence[HostRow], waits: Waits) -> list[RankRow]:
    """One row per rank with its mark. Without live.json, only its node."""
    rows: list[RankRow] = []
    for host in hosts:
        rows += _ranks_of(records, host, records.most_ranks - len(rows))
    rows.sort(key=lambda row: row.rank)
    held = _held_up(records, rows, waits)
    slow = _slow_cards(rows)
    lost = _lost_in_restart(records)
    places = {host.node: host for host in hosts}
    return [_marked(records, row, places[row.node], held, slow, lost) for row in rows]


def unshown(
    records: Records, hosts: Sequence[HostRow], ranks: Sequence[RankRow]
) -> tuple[int, int]:
    """How many hosts and ranks of the records have no row."""
    num_hosts = max(len(records.nodes) or len(records.report.nodes), len(hosts))
    spans = (host.ranks for host in hosts if host.ranks is not None)
    num_ranks = sum(max(0, last - first + 1) for first, last in spans)
    return num_hosts - len(hosts), max(0, num_ranks - len(ranks))


def _ranks_of(records: Records, host: HostRow, most: int) -> list[RankRow]:
    node = records.nodes.get(host.node, {})
    ranks, listed = part_of(node, "ranks"), node.get("gpus")
    gpus = [gpu for gpu in listed if isinstance(gpu, dict)] if isinstance(listed, list) else []
    by_index = {
        index: gpu for gpu in reversed(gpus) if isinstance(index := gpu.get("index"), int | str)
    }
    if host.ranks is None:
        return []
    first, last = host.ranks
    rows = []
    for rank in range(first, min(last, first + most - 1) + 1):
        own = part_of(ranks, str(rank))
        index = own.get("gpu")
        if index is None and len(gpus) == last - first + 1:
            index = gpus[rank - first].get("index")
        gpu: dict[str, Any] = by_index.get(index, {}) if isinstance(index, int | str) else {}
        sampled_at, said_at = number_of(node, "at"), number_of(own, "at")
        quiet_s = None
        if sampled_at is not None and said_at is not None and host.heard_s is not None:
            age_s = records.sample_age_s(node) + (records.age_s or 0.0)
            quiet_s = max(0.0, sampled_at - said_at) + max(host.heard_s, age_s)
        stage_s = number_of(own, "stage_s")
        if stage_s is not None and quiet_s is not None:
            stage_s += quiet_s
        rows.append(
            RankRow(
                cluster=records.cluster,
                rank=rank,
                node=host.node,
                host=host.host,
                device=_text(own, "device")
                or _text(gpu, "name")
                or _text(part_of(node, "host"), "cpu_name"),
                rows=whole_of(own, "rows"),
                micro_batch=whole_of(own, "micro_batch"),
                step=whole_of(own, "step"),
                stage=(_text(own, "stage") or _text(own, "phase")) if records.is_on else "",
                stage_s=stage_s if records.is_on else None,
                use=number_of(gpu or own, "use" if gpu else "cpu"),
                memory_bytes=_first(own, "memory_bytes", gpu)
                if gpu
                else _first(own, "memory_bytes") or whole_of(own, "resident_bytes"),
                peak_bytes=whole_of(own, "peak_bytes"),
                limit_bytes=whole_of(own, "limit_bytes") or whole_of(gpu, "memory_total_bytes"),
                temperature_c=number_of(gpu, "temperature_c"),
                power_w=number_of(gpu, "power_w"),
                clock_mhz=number_of(gpu, "clock_mhz"),
                throttle=_text(gpu, "throttle"),
                parts=_parts(own),
                heard_s=quiet_s if quiet_s is not None else host.heard_s,
                pid=whole_of(own, "pid"),
            )
        )
    return rows


def _parts(own: dict[str, Any]) -> StepSeconds | None:
    parts = part_of(own, "parts")
    if not parts:
        return None
    compute = (number_of(parts, "forward_backward"), number_of(parts, "optimizer"))
    return StepSeconds(
        data_s=number_of(parts, "data") or 0.0,
        compute_s=sum(part or 0.0 for part in compute),
        communication_s=number_of(parts, "communication") or 0.0,
    )


def _step_s(own: dict[str, Any], row: RankRow) -> float:
    parts = row.parts or StepSeconds()
    # What its parts make; `step_s` may be that of a later step.
    summed_s = parts.data_s + parts.compute_s + parts.communication_s
    return summed_s or number_of(own, "step_s") or 0.0


def _held_up(records: Records, rows: list[RankRow], waits: Waits) -> dict[int, str]:
    # Which ranks hold up the others, in words; and what each waits goes into its row's parts.
    own = {
        row.rank: part_of(part_of(records.nodes.get(row.node, {}), "ranks"), str(row.rank))
        for row in rows
    }
    timed: dict[int, Step] = {}
    for row in rows:
        seconds = number_of(part_of(own[row.rank], "parts"), "communication")
        if seconds is not None:
            timed[row.rank] = Step(seconds, _step_s(own[row.rank], row))
    least_s = min((step.communication_s for step in timed.values()), default=0.0)
    for index, row in enumerate(rows):
        if row.parts is not None and row.rank in timed:
            waited = {"waiting_s": timed[row.rank].communication_s - least_s}
            parts = row.parts.model_copy(update=waited)
            rows[index] = row.model_copy(update={"parts": parts})
    if not records.is_on or records.is_silent:
        return {}
    found = {}
    for rank, waited_s in waits.look(timed).items():
        step_s = _seconds(waits.step_s[rank])
        found[rank] = f"the others wait for it: {_seconds(waited_s)} of each {step_s} step"
    stages = {
        row.rank: Stage(row.step, row.stage, row.stage_s)
        for row in rows
        if row.step is not None and row.stage_s is not None
    }
    usual_s = statistics.median(step.step_s for step in timed.values()) if timed else None
    for rank, stage in late(stages, usual_s).items() if len(stages) == len(rows) else ():
        since = format_duration(stage.since_s)
        found[rank] = f"the others wait for it: in {stage.stage} of step {stage.step} for {since}"
    return found


def _slow_cards(rows: Sequence[RankRow]) -> dict[int, str]:
    # Throttled cards, in words.
    clocks: dict[str, list[float]] = {}
    for row in rows:
        if row.clock_mhz:
            clocks.setdefault(row.device, []).append(row.clock_mhz)
    found = {}
    for row in rows:
        if not row.throttle:
            continue
        usual = statistics.median(clocks.get(row.device) or [0.0])
        if row.throttle == POWER_LIMIT and (row.clock_mhz or usual) >= _SLOW_CLOCK * usual:
            continue
        figures = [f"{row.temperature_c:.0f} °C"] if row.temperature_c is not None else []
        figures += [f"{row.power_w:.0f} W"] if row.power_w is not None else []
        figures += [f"{row.clock_mhz:.0f} MHz"] if row.clock_mhz is not None else []
        found[row.rank] = f"its GPU is throttled by {row.throttle}: {', '.join(figures)}"
    return found


def _lost_in_restart(records: Records) -> dict[int, str]:
    # The rank for which all were started again, until its successor says something.
    last = records.restart
    if last is None or not (records.is_on or records.report.state == "failed"):
        return {}
    cause = last.root_cause or {}
    rank = cause.get("rank")
    if not isinstance(rank, int):
        return {}
    for node in records.nodes.values():
        own = part_of(part_of(node, "ranks"), str(rank))
        is_old = records.at - last.at > _STARTS_S  # one of a user's own script says nothing
        begun = (
            whole_of(own, "restart") or (whole_of(records.live, "restart") if is_old else None) or 0
        )
        if own.get("alive") and begun >= last.number:
            return {}
    return {rank: str(cause.get("what") or last.why)}


def _marked(
    records: Records,
    row: RankRow,
    host: HostRow,
    held: Mapping[int, str],
    slow: Mapping[int, str],
    lost: Mapping[int, str],
) -> RankRow:
    own = part_of(part_of(records.nodes.get(row.node, {}), "ranks"), str(row.rank))
    error, mark, notes = records.report.error or {}, "", list[str]()
    exit_code, is_over = own.get("exit"), not records.is_on
    if own.get("alive") is False and (not is_over or exit_code not in (None, *_WELL)):
        mark, notes = "dead", [_end_words(exit_code)]
    elif row.rank in lost:
        mark, notes = "dead", [lost[row.rank]]
    elif is_over and records.report.state == "failed" and error.get("rank") == row.rank:
        mark, notes = "dead", [str(error.get("what") or "it has failed")]
    elif is_over:
        pass
    elif host.mark == "silent" or records.is_silent:
        mark, notes = "silent", [host.note or "nothing is recorded any more"]
    elif "step" in own and (row.heard_s or 0.0) - (host.heard_s or 0.0) > RANK_SILENT_S:
        heard = format_duration(row.heard_s or 0.0)
        mark, notes = "silent", [f"its process exists, but sends no heartbeat for {heard}"]
    else:
        mark = "straggler" if row.rank in held else "throttled" if row.rank in slow else ""
        notes = [words for words in (held.get(row.rank), slow.get(row.rank)) if words]
    return row.model_copy(update={"mark": mark, "note": "; ".join(notes)})


def _end_words(code: object) -> str:
    if not isinstance(code, int):
        return "its process is gone"
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        return f"its process was ended by signal {number}" + (" (SIGKILL)" if number == 9 else "")
    return f"its process has ended with exit code {code}"


def link_rows(records: Records, hosts: Sequence[HostRow]) -> list[LinkRow]:
    """Links between the hosts of a cluster: from host to host where `isles check` has measured
    them, else each host's interface. What one of several pairs uses is not known."""
    if len(hosts) < 2:
        return []
    by_name = {row.host: row for row in hosts}
    measured = [
        (a, b, found)
        for a, others in records.pairs.items()
        for b, found in (others.items() if isinstance(others, Mapping) else ())
        if a in by_name and b in by_name and a != b and isinstance(found, dict)
    ]
    if len(hosts) > _PAIRS:
        slowest: dict[str, tuple[str, str, dict[str, Any]]] = {}
        for entry in measured:
            rate = number_of(entry[2], "bytes_per_s")
            known = slowest.get(entry[0])
            if known is None or (rate or 0.0) < (number_of(known[2], "bytes_per_s") or 0.0):
                slowest[entry[0]] = entry
        measured = list(slowest.values())
    rows = []
    for a, b, found in sorted(measured, key=lambda entry: entry[:2]):
        ends = by_name[a], by_name[b]
        rows.append(
            LinkRow(
                cluster=records.cluster,
                source=a,
                target=b,
                measured=number_of(found, "bytes_per_s"),
                measured_by="check",
                rtt_s=number_of(found, "rtt_s"),
                used=ends[0].net_out if len(hosts) == 2 else None,
                state=_link_state(ends),
            )
        )
    seen = {row.source for row in rows}
    for host in hosts:
        node = part_of(records.nodes.get(host.node, {}), "host")
        if host.host in seen or host.net_out is None:
            continue
        rate, interface = number_of(node, "interface_rate"), _text(node, "interface")
        rows.append(
            LinkRow(
                cluster=records.cluster,
                source=host.host,
                target=f"the others, by {interface}" if interface else "the others",
                measured=rate,
                measured_by="interface" if rate else "",
                used=host.net_out,
                state=_link_state((host,)),
            )
        )
    return rows


def _link_state(ends: Sequence[HostRow]) -> str:
    silent = [row for row in ends if row.mark == "silent"]
    if not silent:
        return "ok"
    heard_s = silent[0].heard_s
    since = f" for {format_duration(heard_s)}" if heard_s is not None else ""
    return f"down: no heartbeat from {silent[0].host}{since}"


def part_of(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = record.get(key)
    return found if isinstance(found, dict) else {}


def _text(record: Mapping[str, Any], key: str) -> str:
    found = record.get(key)
    # It may come from another site.
    return printable(found, longest=_LONGEST) if isinstance(found, str) else ""


def whole_of(record: dict[str, Any], key: str) -> int | None:
    found = number_of(record, key)
    return int(found) if found is not None and abs(found) < 2**62 else None


def _first(record: dict[str, Any], key: str, *others: dict[str, Any]) -> int | None:
    return next((v for r in (record, *others) if (v := whole_of(r, key)) is not None), None)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
