"""How a run, its nodes and its newest attempt stand, gathered from their records."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from isles.errors import UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import JobReport
from isles.launch.queue.status import refresh
from isles.run.find import typed_command, typed_name
from isles.run.fleet import read_fleet
from isles.run.manifest import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.restarts import list_restarts
from isles.run.state import (
    NEVER_STARTED,
    AttemptState,
    Clock,
    State,
    attempt_state,
    current_status,
    number_of,
    script_of,
)

QUIET_S = 180.0
"""A running run that has reported nothing for so long is pointed out."""

_LISTED = 3
_RANK_RECORD = re.compile(r"rank-(\d+)\.json")
_STALL_RECORD = re.compile(r"(?:step|silence)-\d+\.json")
_NODE_STATES = {"missing": "has not come yet", "lost": "is lost", "ended": "has ended"}

ReportState = State | Literal["unreachable", "gone"]
"""unreachable: its machine cannot be asked. gone: its directory is no longer there."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One node of a run.

    Args:
        node: its number.
        host: its name.
        address: where the others reach it; empty: not known.
        ranks: the first and the last of its ranks; None: not known.
        pid: its agent, or the process of its first rank; None: it has not come yet.
        is_there: whether it runs, as far as the first node knows.
        heard_s: seconds since its last sign of life; None: not known.
        note: a remark for the user.
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


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run at one moment, as `isles status --json` gives it.

    Times are seconds since the epoch, `_s` seconds; None where nothing is known.
    """

    name: str = ""
    path: str = ""
    state: ReportState = "unknown"
    attempt: int | None = None
    host: str | None = None
    pid: int | None = None
    world_size: int | None = None
    device: str | None = None
    phase: str | None = None
    detail: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_second: float | None = None
    eta_s: float | None = None
    begun_at: float | None = None
    updated_at: float | None = None
    silent_s: float | None = None
    checkpoint_step: int | None = None
    checkpoint_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    error: dict[str, Any] | None = None
    restarts: int = 0
    last_restart: str = ""
    nodes: int | None = None
    max_nodes: int | None = None
    hint: str = ""
    launcher: str = "local"
    job: str = ""
    """Of a queue: the number of the job."""
    queue: str = ""
    """Of a queue: what it reports of the job, in words."""
    heard_at: float | None = None
    """The last sign of life."""
    on: str = ""
    """The machine that has the run directory, as ssh takes it; empty: it is seen here."""
    fleet: tuple[NodeReport, ...] = ()
    """Its nodes, where it has several."""
    stalls: tuple[str, ...] = ()
    """Steps that took far too long."""
    checked: str = ""
    """What was found wrong with the machines before the start."""
    outer: dict[str, Any] | None = None
    """Of one of several clusters: its rounds, as its status.json has them."""

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any], **changes: Any) -> RunReport:
        """From `record`, of this version of isles or another."""
        known = {f.name: record[f.name] for f in fields(cls) if record.get(f.name) is not None}
        known["fleet"] = tuple(NodeReport.of(node) for node in known.get("fleet", ()))
        known["stalls"] = tuple(known.get("stalls", ()))
        return cls(**{**known, **changes})


def collect(
    run_dir: RunDir, now: Clock = time.time, *, jobs: Mapping[Path, JobReport] | None = None
) -> RunReport:
    """How the newest attempt of a run stands now.

    `jobs`: what queues have reported, by folders of attempts; None: its own is asked.
    """
    attempt = run_dir.last_attempt()
    job = None
    if attempt is not None and jobs is not None:
        job = jobs.get(attempt.path)
    elif attempt is not None:
        with suppress(OSError):  # its answer cannot be kept in somebody else's directory
            job = refresh(run_dir, attempt)
    launch = (read_record(attempt.launch) if attempt else None) or {}
    state = attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED
    status = current_status(run_dir, state.begun_at)
    outcome = state.outcome or {}
    checkpoints = list_checkpoints(run_dir)
    newest = checkpoints[-1] if checkpoints else None
    silent_s = None
    if state.state in ("running", "unknown"):
        progress_at = number_of(status, "progress_at") or number_of(status, "updated_at")
        silent_s = max(0.0, now() - (progress_at or state.begun_at or now()))
    restarts = [r for r in list_restarts(attempt) if r.decision == "restart"] if attempt else []
    nodes = node_reports(attempt, now()) if attempt else ()
    return RunReport(
        name=run_dir.name,
        path=str(run_dir.path.absolute()),
        state=state.state,
        attempt=attempt.number if attempt else None,
        host=state.process.host if state.process else None,
        pid=state.process.pid if state.process else None,
        world_size=_whole(status if _whole(status, "world_size") else launch, "world_size"),
        device=launch.get("device"),
        phase=str(status.get("phase") or "starting") if state.state == "running" else None,
        detail=str(status.get("detail") or ""),
        step=_whole(status if _whole(outcome, "step") is None else outcome, "step"),
        total_steps=_whole(status, "total_steps"),
        loss=number_of(status, "loss"),
        eval_loss=number_of(status, "eval_loss"),
        tokens_per_second=number_of(status, "tokens_per_second"),
        eta_s=number_of(status, "eta_s") if state.state == "running" else None,
        begun_at=state.begun_at,
        updated_at=number_of(status, "updated_at"),
        silent_s=silent_s,
        checkpoint_step=newest.step if newest else None,
        checkpoint_at=newest.created_at if newest else None,
        exit_code=_whole(outcome, "exit_code"),
        reason=str(outcome.get("reason") or ""),
        error=error if isinstance(error := outcome.get("error"), dict) else None,
        restarts=len(restarts),
        last_restart=restarts[-1].text if restarts else "",
        nodes=sum(node.is_there for node in nodes) if nodes else None,
        max_nodes=len(nodes) or None,
        hint=_hint(run_dir, state, newest.step if newest else None, silent_s, now()),
        launcher=state.launcher,
        job=job.job_id if job else "",
        queue=(job.reason or job.state) if job and state.is_alive else "",
        heard_at=state.heard_at,
        fleet=nodes,
        stalls=stall_texts(attempt) if attempt else (),
        checked=_checked_text(attempt) if attempt else "",
        outer=outer if isinstance(outer := status.get("outer"), dict) else None,
    )


def _whole(record: dict[str, Any], key: str) -> int | None:
    value = number_of(record, key)
    return None if value is None else int(value)


def generate_command(run_dir: RunDir, prompt: str) -> str:
    """The command that asks a finished run for text: for an answer, where it has a template."""
    has_template = (run_dir.tokenizer / "chat_template.jinja").is_file()
    chat = "--chat " if has_template else ""
    return f'isles generate {typed_name(run_dir)} {chat}--prompt "{prompt}"'


def _hint(
    run_dir: RunDir,
    state: AttemptState,
    step: int | None,
    silent_s: float | None,
    now_s: float,
) -> str:
    """What the user may want to do next."""
    host = state.process.host if state.process else "another host"
    place = f"from step {step}" if step is not None else "from the start, as nothing was saved"
    match state.state:
        case "finished" | "stopped" | "failed" | "killed" if script_of(run_dir) is not None:
            return f"what it printed: `isles logs {typed_name(run_dir)}`"
        case "finished":
            return f"try it: `{generate_command(run_dir, '…')}`"
        case "stopped" | "failed" | "killed":
            typed = typed_command(run_dir)
            command = f"`{typed}`" if typed else "`isles train` with its run file"
            return f"{command} goes on {place}"
        case "unknown":
            return _unknown_hint(run_dir, state, host, now_s)
        case "running" if silent_s is not None and silent_s > QUIET_S:
            return (
                f"it has said nothing for {format_duration(silent_s)}: "
                f"`isles logs {typed_name(run_dir)}` shows what it was doing"
            )
        case _:
            return "it was never started" if state.state == "new" else ""


def _unknown_hint(run_dir: RunDir, state: AttemptState, host: str, now_s: float) -> str:
    if (mark := read_record(run_dir.node_of)) is not None:
        head = mark.get("head")
        return f"it has ended here; {head}, its first host, knows how: `isles status` there"
    if state.is_queue:
        return "its queue cannot be asked from here: look where it was submitted"
    silent_s = now_s - (state.heard_at or state.begun_at or now_s)
    return (
        f"it runs on {host}, and was last heard {format_duration(silent_s)} ago: "
        f"is {host} up? look there"
    )


def node_reports(attempt: Attempt, now_s: float) -> tuple[NodeReport, ...]:
    """The nodes of an attempt by their numbers; none where it has only one."""
    fleet = None
    with suppress(UserError):  # of another version: what else is known of it is shown
        fleet = read_fleet(attempt)
    met = (read_record(attempt.nodes) or {}).get("nodes")
    if isinstance(met, list) and met:
        found = [_recorded_node(node, now_s) for node in met]
    elif fleet is not None:
        firsts = accumulate((node.nproc for node in fleet.nodes), initial=0)
        found = [
            NodeReport(
                node=node.node,
                host=node.name,
                address=node.address,
                ranks=(first, first + node.nproc - 1),
                note=_NODE_STATES["missing"],
            )
            for node, first in zip(fleet.nodes, firsts, strict=False)
        ]
    else:
        found = _nodes_by_ranks(attempt)
    return tuple(found) if len(found) > 1 else ()


def _recorded_node(record: dict[str, Any], now_s: float) -> NodeReport:
    state, first = str(record.get("state")), record.get("first_rank")
    process = ProcessId.from_record(record)
    heard_at = number_of(record, "heard_at")
    parts = [_NODE_STATES.get(state, ""), str(record.get("why") or "")]
    return NodeReport(
        node=int(record["node"]),
        host=str(record.get("name")),
        address=str(record.get("address") or ""),
        ranks=(first, first + int(record["ranks"]) - 1) if first is not None else None,
        pid=process.pid if process else None,
        is_there=state == "there"
        and not (process and process.is_here() and not process.is_alive()),
        heard_s=max(0.0, now_s - heard_at) if heard_at is not None else None,
        note=": ".join(parts if all(parts) else parts[:1]),
    )


def _nodes_by_ranks(attempt: Attempt) -> list[NodeReport]:
    """Of a run in a queue, whose nodes nobody knew before: the hosts of its ranks."""
    places: dict[str, list[tuple[int, ProcessId]]] = defaultdict(list)
    for path in attempt.path.glob("rank-*.json"):
        match = _RANK_RECORD.fullmatch(path.name)
        process = ProcessId.from_record(read_record(path) or {}) if match else None
        if match and process:
            places[process.host].append((int(match[1]), process))
    found: list[NodeReport] = []
    for ranks in sorted(sorted(ranks, key=lambda r: r[0]) for ranks in places.values()):
        number, first = ranks[0]
        is_there = not first.is_here() or first.is_alive()
        span = (number, ranks[-1][0])
        found.append(
            NodeReport(len(found), first.host, ranks=span, pid=first.pid, is_there=is_there)
        )
    return found


def stall_texts(attempt: Attempt) -> tuple[str, ...]:
    """The last hangs of an attempt, oldest first: which rank held up the step, and where."""
    names = [path for path in attempt.stalls.glob("*.json") if _STALL_RECORD.fullmatch(path.name)]
    records = [record for path in names if (record := read_record(path)) is not None]
    records.sort(key=lambda r: (number_of(r, "at") or 0.0, number_of(r, "step") or 0.0))
    texts = []
    for record in records[-_LISTED:]:
        took_s = number_of(record, "went_on_after_s")
        end = f"stacks of the ranks: {attempt.stalls}"
        if took_s is not None:
            end = f"it went on after {format_duration(took_s)}"
        texts.append(f"{record.get('text')}; {end}")
    return tuple(texts)


def _checked_text(attempt: Attempt) -> str:
    """What `isles check` found wrong before this start; empty where nothing or not asked."""
    found = (read_record(attempt.findings) or {}).get("findings")
    texts: dict[str, list[str]] = {"error": [], "warning": []}
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, dict) and entry.get("level") in texts:
            where = f" ({entry['where']})" if entry.get("where") else ""
            text = f"{entry['level']}: {entry.get('text') or entry.get('id')}{where}"
            texts[entry["level"]].append(text)
    both = [*texts["error"], *texts["warning"]]
    more = f" and {len(both) - _LISTED} more" if len(both) > _LISTED else ""
    return "; ".join(both[:_LISTED]) + more
