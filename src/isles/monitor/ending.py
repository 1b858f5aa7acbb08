"""How a run ended: a summary, or what went wrong."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from rich.console import Console

from isles.errors import ExitCode
from isles.facts.units import format_count, format_duration
from isles.monitor.collect import generate_command
from isles.monitor.errors import failure_lines
from isles.run.find import typed_command, typed_name
from isles.run.manifest import list_checkpoints
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.state import AttemptState, attempt_state, number_of, script_of


def conclude(run_dir: RunDir, attempt: Attempt, console: Console, errors: Console) -> int:
    """Print how an attempt ended, and give its exit code."""
    state = attempt_state(run_dir, attempt)
    match state.state:
        case "finished":
            _print(console, finished_lines(run_dir))
        case "stopped":
            _print(console, _stopped_lines(run_dir, state))
        case "failed":
            _print(errors, failure_lines(attempt, _next_start(run_dir)))
        case "running":
            ask = f"`isles status {typed_name(run_dir)}` says when it is done"
            _print(errors, [f"{run_dir.name} is still closing; {ask}"])
        case "queued":
            ask = f"`isles status {typed_name(run_dir)}` says how it is"
            _print(errors, [f"{run_dir.name} waits in the queue; {ask}"])
        case "unknown":
            _print(errors, [f"error: {run_dir.name} is not heard of any more: {_silence(state)}"])
        case _:
            _print(errors, _killed_lines(run_dir, attempt))
    return exit_code(state)


def _silence(state: AttemptState) -> str:
    host = state.process.host if state.process else "its host"
    if state.heard_at is None:
        return f"is {host} up?"
    at = datetime.fromtimestamp(state.heard_at).strftime("%H:%M:%S")
    return f"its last sign of life was at {at}; is {host} up?"


def exit_code(state: AttemptState) -> int:
    """The exit code that an attempt stands for."""
    recorded = number_of(state.outcome, "exit_code")
    if recorded is not None:
        return int(recorded)
    return ExitCode.OK if state.state == "finished" else ExitCode.TRAINING


def finished_lines(run_dir: RunDir) -> list[str]:
    """Figures of a finished run, where its results lie, and what can be done next."""
    summary = read_record(run_dir.summary) or {}
    steps = number_of(summary, "steps")
    took_s = number_of(summary, "elapsed_s")
    head = f"{run_dir.name} is finished"
    if steps is not None:
        head += f": {steps:.0f} steps"
    if took_s is not None:
        head += f" in {format_duration(took_s)}"
    lines = [head, *_figures(summary)]
    places = [
        ("model", run_dir.model),
        ("loss curve", run_dir.loss_plot),
        ("metrics", run_dir.metrics),
        ("tensorboard", run_dir.tensorboard),
    ]
    lines += [f"  {name:<12} {path}" for name, path in places if path.exists()]
    if script_of(run_dir) is not None:
        return [*lines, f"  what it printed: isles logs {typed_name(run_dir)}"]
    lines += [
        "next:",
        f"  {generate_command(run_dir, 'Once')}",
        f"  isles eval {typed_name(run_dir)}",
        f"  isles checkpoint list {typed_name(run_dir)}",
    ]
    return lines


def _figures(summary: dict[str, Any]) -> list[str]:
    lines = []
    first, last = number_of(summary, "first_loss"), number_of(summary, "last_loss")
    if first is not None and last is not None:
        lines.append(f"  {'loss':<12} {first:.4f} -> {last:.4f}")
    eval_loss, perplexity = number_of(summary, "eval_loss"), number_of(summary, "perplexity")
    if eval_loss is not None:
        end = f" (perplexity {perplexity:.2f})" if perplexity is not None else ""
        lines.append(f"  {'eval loss':<12} {eval_loss:.4f}{end}")
    tokens, speed = number_of(summary, "tokens"), number_of(summary, "tokens_per_second")
    if tokens is not None:
        end = f", {format_count(speed)} a second" if speed is not None else ""
        lines.append(f"  {'tokens':<12} {format_count(tokens)}{end}")
    return lines


def _stopped_lines(run_dir: RunDir, state: AttemptState) -> list[str]:
    outcome = state.outcome or {}
    step = number_of(outcome, "step")
    place = f" at step {step:.0f}" if step is not None else ""
    reason = f" ({outcome['reason']})" if outcome.get("reason") else ""
    return [f"{run_dir.name} stopped{place}{reason}", *_next_start(run_dir)]


def _killed_lines(run_dir: RunDir, attempt: Attempt) -> list[str]:
    return failure_lines(attempt, _next_start(run_dir))


def _next_start(run_dir: RunDir) -> list[str]:
    checkpoints = list_checkpoints(run_dir)
    typed = typed_command(run_dir)
    command = f"`{typed}`" if typed else "the same `isles train` command"
    if script_of(run_dir) is not None:
        return [f"  {command} starts the script again"]
    if not checkpoints:
        return [f"  nothing was saved; {command} starts from the beginning"]
    return [f"  {command} goes on from step {checkpoints[-1].step}"]


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
