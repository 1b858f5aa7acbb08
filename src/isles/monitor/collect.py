"""How a run stands, gathered from its records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from isles.facts.units import format_duration
from isles.launch.queue.job import JobReport
from isles.launch.queue.jobs import refresh
from isles.monitor.nodes import NodeReport, checked_text, node_reports
from isles.monitor.stalls import stall_texts
from isles.run.find import typed_command, typed_name
from isles.run.manifest import list_checkpoints
from isles.run.paths import Attempt, RunDir
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
"""A running run that has said nothing for so long is pointed out."""

ReportState = State | Literal["unreachable", "gone"]
"""unreachable: its machine cannot be asked. gone: its directory is no longer there."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run at one moment, as `isles status --json` gives it.

    Times are seconds since the epoch, `_s` seconds; None where nothing is known.
    """

    name: str
    path: str
    state: ReportState
    attempt: int | None
    host: str | None
    pid: int | None
    world_size: int | None
    device: str | None
    phase: str | None
    detail: str
    step: int | None
    total_steps: int | None
    loss: float | None
    eval_loss: float | None
    tokens_per_second: float | None
    eta_s: float | None
    begun_at: float | None
    updated_at: float | None
    silent_s: float | None
    checkpoint_step: int | None
    checkpoint_at: float | None
    exit_code: int | None
    reason: str
    error: dict[str, Any] | None
    restarts: int
    last_restart: str
    nodes: int | None
    max_nodes: int | None
    hint: str
    launcher: str = "local"
    job: str = ""
    """Of a queue: the number of the job."""
    queue: str = ""
    """Of a queue: what it says of the job, in words."""
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
    """Of one of several clusters: its turns, as its status.json has them."""

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any], **changes: Any) -> RunReport:
        """From `record`, of this version of isles or another."""
        known: dict[str, Any] = {field.name: record.get(field.name) for field in fields(cls)}
        known |= {name: value for name, value in _WITHOUT.items() if known[name] is None}
        known["fleet"] = tuple(NodeReport.of(node) for node in known["fleet"])
        known["stalls"] = tuple(known["stalls"])
        return cls(**{**known, **changes})


_WITHOUT: dict[str, Any] = {
    **dict.fromkeys(("name", "path", "detail", "reason", "last_restart", "hint", "job"), ""),
    **dict.fromkeys(("queue", "on", "checked"), ""),
    **dict.fromkeys(("fleet", "stalls"), ()),
    "state": "unknown",
    "restarts": 0,
    "launcher": "local",
}
"""What stands for a field that another version of isles does not know."""


def collect(
    run_dir: RunDir, now: Clock = time.time, *, jobs: Mapping[Path, JobReport] | None = None
) -> RunReport:
    """How the newest attempt of a run stands now.

    Args:
        run_dir: the run.
        now: the clock.
        jobs: what queues have said, by folders of attempts; None: its own is asked.
    """
    attempt = run_dir.last_attempt()
    job = _job_of(run_dir, attempt, jobs)
    launch = (read_record(attempt.launch) if attempt else None) or {}
    state = attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED
    status = current_status(run_dir, state.begun_at)
    outcome = state.outcome or {}
    checkpoints = list_checkpoints(run_dir)
    newest = checkpoints[-1] if checkpoints else None
    silent_s = _silent_s(state, status, now())
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
        phase=_phase(state, status),
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
        checked=checked_text(attempt) if attempt else "",
        outer=outer if isinstance(outer := status.get("outer"), dict) else None,
    )


def _job_of(
    run_dir: RunDir, attempt: Attempt | None, jobs: Mapping[Path, JobReport] | None
) -> JobReport | None:
    """What its queue says of a start, or has just said."""
    if attempt is None:
        return None
    if jobs is not None:
        return jobs.get(attempt.path)
    with suppress(OSError):  # its answer cannot be kept in somebody else's directory
        return refresh(run_dir, attempt)
    return None


def _silent_s(state: AttemptState, status: dict[str, Any], now_s: float) -> float | None:
    """How long nothing has advanced; None where nothing should."""
    if state.state not in ("running", "unknown"):
        return None
    progress_at = number_of(status, "progress_at") or number_of(status, "updated_at")
    return max(0.0, now_s - (progress_at or state.begun_at or now_s))


def _phase(state: AttemptState, status: dict[str, Any]) -> str | None:
    if state.state != "running":
        return None
    return str(status.get("phase") or "starting")


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
