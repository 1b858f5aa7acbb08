"""How a run stands, gathered from its records."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from isles.facts.units import format_duration
from isles.rundir.manifest import list_checkpoints
from isles.rundir.nodes import living_nodes, read_meeting
from isles.rundir.paths import RunDir
from isles.rundir.records import read_record
from isles.rundir.restarts import list_restarts
from isles.rundir.state import (
    NEVER_STARTED,
    AttemptState,
    Clock,
    State,
    attempt_state,
    current_status,
    number_of,
)

QUIET_S = 180.0
"""A running run that has said nothing for so long is pointed out."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """A run at one moment, as `isles status --json` gives it.

    Times are seconds since the epoch, `_s` seconds; None where nothing is known.
    """

    name: str
    path: str
    state: State
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

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


def collect(run_dir: RunDir, now: Clock = time.time) -> RunReport:
    """How the newest attempt of a run stands now."""
    attempt = run_dir.last_attempt()
    launch = (read_record(attempt.launch) if attempt else None) or {}
    state = attempt_state(run_dir, attempt, now) if attempt else NEVER_STARTED
    status = current_status(run_dir, state.begun_at)
    outcome = state.outcome or {}
    checkpoints = list_checkpoints(run_dir)
    newest = checkpoints[-1] if checkpoints else None
    updated_at = number_of(status, "updated_at")
    silent_s = None
    if state.state in ("running", "unknown"):
        silent_s = max(0.0, now() - (updated_at or state.begun_at or now()))
    error = outcome.get("error")
    found = list_restarts(attempt) if attempt else []
    restarts = [restart for restart in found if restart.verdict == "restart"]
    meeting = read_meeting(attempt) if attempt else None
    return RunReport(
        name=run_dir.name,
        path=str(run_dir.path),
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
        updated_at=updated_at,
        silent_s=silent_s,
        checkpoint_step=newest.step if newest else None,
        checkpoint_at=newest.created_at if newest else None,
        exit_code=_whole(outcome, "exit_code"),
        reason=str(outcome.get("reason") or ""),
        error=error if isinstance(error, dict) else None,
        restarts=len(restarts),
        last_restart=restarts[-1].text if restarts else "",
        nodes=len(living_nodes(attempt, meeting.max_nodes)) if attempt and meeting else None,
        max_nodes=meeting.max_nodes if meeting else None,
        hint=_hint(run_dir, state, newest.step if newest else None, silent_s),
    )


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
    return f'isles generate {run_dir.name} {"--chat " if has_template else ""}--prompt "{prompt}"'


def _hint(run_dir: RunDir, state: AttemptState, step: int | None, silent_s: float | None) -> str:
    """What the user may want to do next."""
    host = state.process.host if state.process else "another host"
    place = f"from step {step}" if step is not None else "from the start, as nothing was saved"
    match state.state:
        case "new":
            return "it was never started"
        case "finished":
            return f"try it: `{generate_command(run_dir, '…')}`"
        case "stopped" | "failed" | "killed":
            return f"`isles train` with its run file goes on {place}"
        case "unknown":
            return f"started on {host}, which has said nothing lately: look there"
        case "running" if silent_s is not None and silent_s > QUIET_S:
            return (
                f"it has said nothing for {format_duration(silent_s)}: "
                f"`isles logs {run_dir.name}` shows what it was doing"
            )
        case _:
            return ""
