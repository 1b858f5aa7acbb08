"""The status of a run, its nodes and its newest attempt, read from their records."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from heapq import nlargest
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, field_validator

from isles.errors import ExitCode, UserError
from isles.facts.units import format_duration
from isles.launch.queue.job import JobReport
from isles.launch.queue.status import refresh
from isles.monitor.outer import aged, known_outer
from isles.run.checkpoints import newest_checkpoint
from isles.run.exported import export_failure
from isles.run.find import NUMBERED, own_runs, typed_command, typed_name
from isles.run.join_line import NOTHING_LEFT
from isles.run.nodes import read_fleet
from isles.run.paths import Attempt, RunDir
from isles.run.process import ProcessId
from isles.run.records import MAX_SHOWN_BYTES, read_record, refuse_long
from isles.run.restarts import current_restart, last_restart
from isles.run.state import (
    NEVER_STARTED,
    AttemptState,
    Clock,
    State,
    attempt_state,
    current_status,
    number_of,
    script_of,
    text_of,
)

SILENT_S = 180.0
"""A running run that has reported nothing for longer gets a hint."""

_LISTED = 3
_HANGS_READ = 32
"""The newest records of hangs are read, to show the last `_LISTED`."""

_MOST_NODES = 4096
_HANG_RECORD = re.compile(r"(?:step|silence)-\d+\.json")
_NODE_STATES = {"missing": "has not come yet", "lost": "is lost", "ended": "has ended"}

ReportState = State | Literal["unreachable", "gone"]
"""unreachable: its machine cannot be asked. gone: its directory is no longer there."""


class NodeReport(BaseModel, frozen=True):
    """One node of a run.

    Args:
        address: address for the other nodes, or empty if unknown.
        ranks: its first and its last rank, or None if unknown.
        pid: PID of its agent or of its first rank. None until the node has connected.
        is_running: as far as the first node knows.
        last_seen_s: seconds since its last heartbeat, or None if unknown.
    """

    node: int
    host: str
    address: str = ""
    ranks: tuple[int, int] | None = None
    pid: int | None = None
    is_running: bool = False
    last_seen_s: float | None = None
    note: str = ""


class RunReport(BaseModel, frozen=True):
    """A run at one moment, as `isles status --json` gives it; of another version, as far as known.

    Times are seconds since the epoch. Names with `_s` are seconds. None means unknown.
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
    num_nodes: int | None = None
    """Nodes that run now."""
    max_nodes: int | None = None
    hint: str = ""
    launcher: str = "local"
    job: str = ""
    """Number of its job in a queue."""
    queue: str = ""
    """State of that job, in the queue's words."""
    last_seen_at: float | None = None
    on: str = ""
    """ssh name of the machine with the run directory. Empty if this machine sees the directory."""
    nodes: tuple[NodeReport, ...] = ()
    """Empty for a run on one node."""
    hangs: tuple[str, ...] = ()
    """Steps that took far too long."""
    checked: str = ""
    """Findings of `isles check` before the start."""
    outer: dict[str, Any] | None = None
    """Outer steps of this cluster, as its status.json has them."""
    owner: str = ""
    """The other user who owns the run, so that only its files were read; empty: this user."""

    @field_validator("outer", mode="before")
    @classmethod
    def _known(cls, value: object) -> dict[str, Any] | None:
        return known_outer(value)


def collect(
    run_dir: RunDir, now: Clock = time.time, *, jobs: Mapping[Path, JobReport] | None = None
) -> RunReport:
    """The status of the newest attempt of a run.

    Args:
        jobs: reports of queues, by folders of attempts; None: the queue of this run is asked.

    Raises:
        UserError: a record of the run is too long to be read.
    """
    attempt = run_dir.last_attempt()
    refuse_long(run_dir, attempt)
    job = None
    if attempt is not None and jobs is not None:
        job = jobs.get(attempt.path)
    elif attempt is not None:
        with suppress(OSError):  # the run belongs to another user: the answer cannot be kept
            job = refresh(run_dir, attempt)
    launch = (read_record(attempt.launch) if attempt else None) or {}
    state = attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED
    status = current_status(run_dir, state.begun_at)
    outcome = state.outcome or {}
    newest = newest_checkpoint(run_dir)
    silent_s = None
    if state.state in ("running", "unknown"):
        progress_at = number_of(status, "progress_at") or number_of(status, "updated_at")
        silent_s = max(0.0, now() - (progress_at or state.begun_at or now()))
    restarts = current_restart(attempt) if attempt else 0
    last = last_restart(attempt) if attempt and restarts else None
    nodes = node_reports(attempt, now()) if attempt else ()
    failed = export_failure(run_dir) if state.state == "finished" else ""
    return RunReport(
        name=run_dir.name,
        path=str(run_dir.path.absolute()),
        state=state.state,
        attempt=attempt.number if attempt else None,
        host=state.process.host if state.process else None,
        pid=state.process.pid if state.process else None,
        world_size=_whole(status if _whole(status, "world_size") else launch, "world_size"),
        device=text_of(launch, "device") or None,
        phase=(text_of(status, "phase") or "starting") if state.state == "running" else None,
        detail=text_of(status, "detail"),
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
        exit_code=ExitCode.TRAINING if failed else _whole(outcome, "exit_code"),
        reason=f"the export failed: {failed}" if failed else text_of(outcome, "reason"),
        error=error if isinstance(error := outcome.get("error"), dict) else None,
        restarts=restarts,
        last_restart=last.text if last else "",
        num_nodes=sum(node.is_running for node in nodes) if nodes else None,
        max_nodes=len(nodes) or None,
        hint=_hint(run_dir, state, silent_s, now()),
        launcher=state.launcher,
        job=job.job_id if job else "",
        queue=(job.reason or job.state) if job and state.is_alive else "",
        last_seen_at=state.last_seen_at,
        nodes=nodes,
        hangs=hang_texts(attempt) if attempt else (),
        checked=_checked_text(attempt) if attempt else "",
        outer=aged(known_outer(status.get("outer")), now()),
        owner=run_dir.owner,
    )


def _whole(record: dict[str, Any], key: str) -> int | None:
    value = number_of(record, key)
    return None if value is None else int(value)


def generate_command(run_dir: RunDir, prompt: str) -> str:
    """The command that generates text with a finished run, with --chat if it has a template."""
    has_template = (run_dir.tokenizer / "chat_template.jinja").is_file()
    chat = "--chat " if has_template else ""
    return f'isles generate {typed_name(run_dir)} {chat}--prompt "{prompt}"'


def next_start(run_dir: RunDir) -> str:
    """The command that resumes an ended run, and its step."""
    typed, newest = typed_command(run_dir), newest_checkpoint(run_dir)
    resume = _resume_of(run_dir)
    attempt = run_dir.last_attempt()
    error = (read_record(attempt.outcome) or {}).get("error") if attempt else None
    if isinstance(error, dict) and error.get("id") == NOTHING_LEFT:
        return "this cluster has no step of the run left to train"
    command = f"`{typed}{resume}`" if typed else f"the same `isles train` command{resume}"
    if script_of(run_dir) is not None:
        return f"{command} starts the script again"
    start = f"step {newest.step}" if newest else "step 0, as nothing was saved"
    return f"{command} resumes from {start}"


def _resume_of(run_dir: RunDir) -> str:
    # `isles train` alone resumes the newest run of the name.
    match = NUMBERED.fullmatch(run_dir.name)
    runs = own_runs(run_dir.path.parent, match["name"]) if match else []
    if not runs or runs[-1].path == run_dir.path or run_dir.owner:
        return ""
    return f" --resume {shlex.quote(str(run_dir.path))}"


def _hint(run_dir: RunDir, state: AttemptState, silent_s: float | None, now_s: float) -> str:
    hint = ""
    match state.state:
        case "new" if state.launcher == "manual":
            hint = "it begins when its commands are typed; `isles train` makes new ones"
        case "new":
            hint = "it was never started"
        case "finished" | "stopped" | "failed" | "killed" if script_of(run_dir) is not None:
            hint = f"its output: `isles logs {typed_name(run_dir)}`"
        case "finished" if export_failure(run_dir):
            hint = f"try the export again: `isles checkpoint export {typed_name(run_dir)}`"
        case "finished":
            hint = f"try it: `{generate_command(run_dir, '…')}`"
        case "stopped" | "failed" | "killed":
            hint = next_start(run_dir)
        case "unknown" if (mark := read_record(run_dir.node_of)) is not None:
            first = f"{text_of(mark, 'first_node')}, its first host"
            hint = f"it has ended on this host. Run `isles status` on {first}, for the reason"
        case "unknown" if state.is_queue:
            hint = "this machine cannot query its queue: look where you submitted it"
        case "unknown":
            host = state.process.host if state.process else "another host"
            seen_s = now_s - (state.last_seen_at or state.begun_at or now_s)
            seen = f"last seen {format_duration(seen_s)} ago"
            hint = f"it runs on {host}, and was {seen}: is {host} up? look there"
        case "running" if silent_s is not None and silent_s > SILENT_S:
            silent = f"it has reported nothing for {format_duration(silent_s)}"
            hint = f"{silent}: `isles logs {typed_name(run_dir)}` shows its last output"
        case _:
            pass
    return hint


def node_reports(attempt: Attempt, now_s: float) -> tuple[NodeReport, ...]:
    """The nodes of an attempt, by number. Empty for a run on one node."""
    fleet = None
    with suppress(UserError):  # of another version: what else is known of it is shown
        fleet = read_fleet(attempt)
    recorded = (read_record(attempt.nodes, MAX_SHOWN_BYTES) or {}).get("nodes")
    if isinstance(recorded, list) and recorded:
        found = []
        for record in recorded[:_MOST_NODES]:
            # Another version of isles, or another user, may have written it.
            with suppress(AttributeError, LookupError, TypeError, ValueError, OverflowError):
                found.append(_recorded_node(record, now_s))
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
            for node, first in zip(fleet.nodes[:_MOST_NODES], firsts, strict=False)
        ]
    else:
        found = []
    return tuple(found) if len(found) > 1 else ()


def _recorded_node(record: dict[str, Any], now_s: float) -> NodeReport:
    state, first = text_of(record, "state"), record.get("first_rank")
    process = ProcessId.from_record(record)
    last_seen_at = number_of(record, "last_seen_at")
    parts = [_NODE_STATES.get(state, ""), text_of(record, "why")]
    return NodeReport(
        node=int(record["node"]),
        host=text_of(record, "name"),
        address=text_of(record, "address"),
        ranks=(first, first + int(record["ranks"]) - 1) if first is not None else None,
        pid=process.pid if process else None,
        is_running=state == "there"
        and not (process and process.is_here() and not process.is_alive()),
        last_seen_s=max(0.0, now_s - last_seen_at) if last_seen_at is not None else None,
        note=": ".join(parts if all(parts) else parts[:1]),
    )


def hang_texts(attempt: Attempt) -> tuple[str, ...]:
    """The last hangs of an attempt, oldest first: which rank held up the step, and where."""
    paths = [path for path in attempt.hangs.glob("*.json") if _HANG_RECORD.fullmatch(path.name)]
    texts: list[tuple[float, float, str]] = []
    for path in nlargest(_HANGS_READ, paths, key=lambda path: path.lstat().st_mtime):
        if (record := read_record(path)) is None:
            continue
        took_s = number_of(record, "went_on_after_s")
        end = f"stacks of the ranks: {attempt.hangs}"
        if took_s is not None:
            end = f"it continued after {format_duration(took_s)}"
        at, step = number_of(record, "at") or 0.0, number_of(record, "step") or 0.0
        texts.append((at, step, f"{text_of(record, 'text')}; {end}"))
    return tuple(text for _, _, text in sorted(texts)[-_LISTED:])


def _checked_text(attempt: Attempt) -> str:
    found = (read_record(attempt.findings, MAX_SHOWN_BYTES) or {}).get("findings")
    texts: dict[str, list[str]] = {"error": [], "warning": []}
    for entry in found if isinstance(found, list) else []:
        if isinstance(entry, dict) and (level := text_of(entry, "level")) in texts:
            where = f" ({place})" if (place := text_of(entry, "where")) else ""
            what = text_of(entry, "text") or text_of(entry, "id")
            texts[level].append(f"{level}: {what}{where}")
    both = [*texts["error"], *texts["warning"]]
    more = f" and {len(both) - _LISTED} more" if len(both) > _LISTED else ""
    return "; ".join(both[:_LISTED]) + more
