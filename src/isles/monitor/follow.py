"""Following a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from isles.facts.units import format_bytes, format_count, format_duration
from isles.monitor.table import steps_text
from isles.monitor.tail import LineTail
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from isles.run.restarts import read_restart
from isles.run.state import attempt_state, current_status, number_of

_POLL_S = 0.25
_CLOSING_S = 30.0
"""Longest wait for the process of a run that has written its outcome."""

# These come and go with every evaluation and save; their results have lines of their own.
_QUIET_PHASES = ("training", "evaluating", "saving", "stopped", "finished")
_ROWS = ("train", "eval", "outer")
_BAR_CHARS = 42
"""What the spinner, the phase and the bar take of a line."""


class Watch:
    """What is new in the records of an attempt since the last look."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, *, is_begun: bool = False) -> None:
        """Starts with what the attempt has recorded from its beginning; `is_begun`: from now on."""
        self.status: dict[str, Any] = {}
        self._run_dir = run_dir
        self._begun_at = number_of(read_record(attempt.launch), "begun_at") or 0.0
        self._rows = LineTail(run_dir.metrics)
        self._newest_row_at = self._begun_at
        self._phase = ""
        self._checkpoint_step: object = None
        self._is_first = True
        self._attempt = attempt
        self._num_restarts = 0
        self._num_notes = 0
        if is_begun:
            self.news()
            self._phase = ""  # what it does now is told all the same

    def queue_news(self, reason: str) -> list[tuple[str, str]]:
        """As `news`, while the run waits in a queue."""
        self.status = {"phase": "queued", "detail": reason}
        line = f"queued: {reason}" if reason else "queued"
        is_new, self._phase = line != self._phase, line
        return [("phase", line)] if is_new else []

    def news(self) -> list[tuple[str, str]]:
        """Pairs of kind (phase, train, eval, outer, save, restart or note) and line, in order."""
        self.status = current_status(self._run_dir, self._begun_at) or self.status
        found = [(str(row["kind"]), row_text(row, self.status)) for row in self._new_rows()]
        found += [("restart", line) for line in self._new_restarts()]
        found += [("note", line) for line in self._new_notes()]
        phase = str(self.status.get("phase") or "starting")
        line = f"{phase}: {self.status['detail']}" if self.status.get("detail") else phase
        if phase not in _QUIET_PHASES and line != self._phase:
            found.append(("phase", line))
        self._phase = line
        step = self.status.get("checkpoint_step")
        if step is not None and step != self._checkpoint_step:
            # The checkpoint that this attempt began from is no news.
            if (number_of(self.status, "checkpoint_at") or 0.0) >= self._begun_at:
                found.append(("save", f"checkpoint of step {step} saved"))
            self._checkpoint_step = step
        return found

    def _new_restarts(self) -> list[str]:
        """What was lost, and where the ranks go on; once they do."""
        lines = []
        while (restart := read_restart(self._attempt, self._num_restarts + 1)) is not None:
            if restart.decision != "restart" or not restart.nodes:
                break  # the run ends, or the nodes have not met yet
            self._num_restarts += 1
            lines.append(restart.text)
        return lines

    def _new_notes(self) -> list[str]:
        """What rank 0 has to tell the user; ranks that were started again begin anew."""
        notes = self.status.get("notes")
        notes = notes if isinstance(notes, list) else []
        new, self._num_notes = notes[self._num_notes :], len(notes)
        return [f"note: {text}" for text in new]

    def _new_rows(self) -> list[dict[str, Any]]:
        """Rows that this attempt added; resuming may have rewritten the ones before."""
        rows = []
        for line in self._rows.read():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # torn by a full disk or a kill
            at = number_of(row, "at") if isinstance(row, dict) else None
            if at is not None and at > self._newest_row_at and row.get("kind") in _ROWS:
                self._newest_row_at = at
                rows.append(row)
        return rows


def row_text(row: dict[str, Any], status: dict[str, Any]) -> str:
    """One row of metrics.jsonl as a line."""
    step, loss = row.get("step"), number_of(row, "loss")
    loss_text = f"{loss:.4f}" if loss is not None else "not finite" if "loss" in row else "-"
    if row.get("kind") == "eval":
        perplexity = number_of(row, "perplexity")
        end = f"  perplexity {perplexity:.2f}" if perplexity is not None else ""
        return f"step {step}  eval loss {loss_text}{end}{_preference_text(row)}"
    if row.get("kind") == "outer":
        return f"step {step}  {_outer_text(row)}"
    total = number_of(status, "total_steps")
    parts = [f"step {step}" + (f"/{total:.0f}" if total is not None else ""), f"loss {loss_text}"]
    for key, form in (("learning_rate", "lr {:.2e}"), ("grad_norm", "grad norm {:.3f}")):
        if (value := number_of(row, key)) is not None:
            parts.append(form.format(value))
    if (speed := number_of(row, "tokens_per_second")) is not None:
        parts.append(f"{format_count(speed)} tokens/s")
    if (eta_s := number_of(status, "eta_s")) is not None:
        parts.append(f"{format_duration(eta_s)} left")
    return "  ".join(parts) + _preference_text(row)


def _outer_text(row: dict[str, Any]) -> str:
    """One averaging of several clusters."""
    tokens = row.get("weights") or {}
    whole = sum(tokens.values())
    shares = [f"{name} {count / whole:.0%}" for name, count in tokens.items() if whole]
    parts = [f"averaged turn {row.get('turn')} of {', '.join(shares) or 'nobody'}"]
    if row.get("mode") == "late":
        parts.append("without this cluster")
    for key, word in (("sent_bytes", "up"), ("received_bytes", "down")):
        if size := number_of(row, key):
            parts.append(f"{format_bytes(size)} {word}")
    if (exposed_s := number_of(row, "exposed_s")) is not None:
        parts.append(f"waited {exposed_s:.1f}s")
    if hidden_s := number_of(row, "hidden_s"):
        parts.append(f"hidden {hidden_s:.1f}s")
    return "  ".join(parts)


def _preference_text(row: dict[str, Any]) -> str:
    """How often the chosen answer is preferred, in a run that learns from preferences."""
    accuracy, margin = number_of(row, "reward_accuracy"), number_of(row, "reward_margin")
    if accuracy is None or margin is None:
        return ""
    return f"  chosen preferred {accuracy:.0%}  margin {margin:.3f}"


def progress_text(status: dict[str, Any], width: int) -> str:
    """What stands right of the bar, the most important first, as much as fits."""
    step = number_of(status, "step")
    if step is None or number_of(status, "loss") is None:
        return str(status.get("detail") or "")[:width]
    total = number_of(status, "total_steps")
    parts = [
        steps_text(int(step), int(total) if total is not None else None),
        f"loss {status['loss']:.4f}",
    ]
    if (eta_s := number_of(status, "eta_s")) is not None:
        parts.append(f"{format_duration(eta_s)} left")
    if (speed := number_of(status, "tokens_per_second")) is not None:
        parts.append(f"{format_count(speed)} tok/s")
    if (saved := number_of(status, "checkpoint_step")) is not None:
        parts.append(f"saved {saved:.0f}")
    while len(parts) > 1 and len("  ".join(parts)) > width:
        parts.pop()
    return "  ".join(parts)


def follow(
    run_dir: RunDir,
    attempt: Attempt,
    console: Console,
    *,
    go_on: Callable[[], bool] = lambda: True,
    is_begun: bool = False,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Show an attempt until it ends.

    Args:
        run_dir: the run.
        attempt: which start of it.
        console: where it is shown; a terminal gets a progress bar.
        go_on: asked at each look; False stops following, not the run.
        is_begun: show only what is new.
        pause: waits between two looks.
    """
    watch = Watch(run_dir, attempt, is_begun=is_begun)
    closing_since: float | None = None
    with _display(console) as show:
        while True:
            # The state before the records: what is written before the end is then read after it.
            state = attempt_state(run_dir, attempt)
            is_queued = state.state == "queued"
            news = watch.queue_news(state.reason) if is_queued else watch.news()
            show(watch.status, news)
            if not state.is_alive or not go_on():
                return
            if is_queued:
                closing_since = None
            elif state.outcome is not None:
                closing_since = closing_since or time.monotonic()
                if time.monotonic() - closing_since > _CLOSING_S:
                    return
            pause(_POLL_S)


Show = Callable[[dict[str, Any], list[tuple[str, str]]], None]


@contextmanager
def _display(console: Console) -> Iterator[Show]:
    if console.is_terminal:
        with _bar(console) as show:
            yield show
    else:
        yield lambda _, news: _print_all(console, [line for _, line in news])


def _print_all(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _bar(console: Console) -> Iterator[Show]:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        refresh_per_second=4,
        transient=True,
    )
    with progress:
        task: TaskID = progress.add_task("starting", total=None, text="")

        def show(status: dict[str, Any], news: list[tuple[str, str]]) -> None:
            _print_all(
                console,
                [line for kind, line in news if kind in ("eval", "save", "restart", "note")],
            )
            progress.update(
                task,
                description=str(status.get("phase") or "starting"),
                completed=number_of(status, "step") or 0,
                total=number_of(status, "total_steps"),
                text=progress_text(status, max(10, console.width - _BAR_CHARS)),
            )

        yield show
