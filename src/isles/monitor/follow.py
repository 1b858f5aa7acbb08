"""The loop that follows a run, and the follower of a run whose directory is seen here.

`Follower.follow` is the only loop; followers of a remote run, of several clusters and of a hub are
in `remote.py`, `multi_cluster.py` and `hub.py`.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from isles.errors import ExitCode, UserError
from isles.facts.console import Console
from isles.facts.units import format_bytes, format_count, format_duration
from isles.launch.queue.status import queue_job, refresh
from isles.monitor.logs import LineTail
from isles.monitor.outcome import report_outcome
from isles.monitor.stop import Signals, Stopping, wait_for_end
from isles.monitor.table import steps_text
from isles.run.find import typed_name
from isles.run.paths import Attempt, RunDir
from isles.run.records import error_if_deleted, read_record
from isles.run.restarts import read_restart
from isles.run.state import attempt_state, current_status, number_of, script_of

_POLL_S = 0.25
_CLOSING_S = 30.0
"""Longest wait for the process of a run that has written its outcome."""

_QUEUE_POLL_S = 5.0
_DELETED_S = 60.0
"""Longest wait for the processes of a run whose directory was deleted."""

# These come and go with every evaluation and save; their results have lines of their own.
_QUIET_PHASES = ("training", "evaluating", "saving", "stopped", "finished")
_ROWS = ("train", "eval", "outer")
_MOST_NEWS = 1000
"""Rows, restarts and notes of one look. If there are more rows, only the newest are shown."""
_BAR_CHARS = 42
"""Width of the spinner, the phase and the bar."""


class Follower:
    """Base class: something that is followed to its end.

    Args:
        typed: argument that names the run on the command line.
        console: gets progress and results.
        errors: gets failures and remarks.
    """

    def __init__(self, name: str, typed: str, console: Console, errors: Console) -> None:
        self.name = name
        self.typed = typed
        self.console = console
        self.errors = errors

    def look(self) -> int | None:
        """Show new output. Returns the exit code once the run has ended."""
        raise NotImplementedError

    def handle(self, number: signal.Signals) -> int | None:
        """Handle SIGINT or SIGTERM. Returns the exit code if the signal ends the follower."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what following holds; may be called more than once."""

    def print_line(self, line: str) -> None:
        """Print a line next to the progress bar."""
        self.errors.print_lines([line])

    def follow(self, signals: Signals, pause: Callable[[float], object] = time.sleep) -> int:
        """Follow to the end. Returns the exit code, or 0 if the terminal closes."""
        try:
            while True:
                code = self.look()
                for number in signals.take() if code is None else ():
                    code = ExitCode.OK if number == signal.SIGHUP else self.handle(number)
                    if code is not None:
                        break
                if code is not None:
                    return code
                pause(_POLL_S)
        except BrokenPipeError:
            self.print_line(
                f"the reader has closed this output, and {self.name} continues: "
                f"isles status {self.typed}"
            )
            raise
        finally:
            self.close()


class RunFollower(Follower):
    """Follows a run whose directory is seen here: a bar on a terminal, plain lines elsewhere.

    Args:
        is_begun: show only new output.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        console: Console,
        errors: Console,
        *,
        is_begun: bool = False,
    ) -> None:
        super().__init__(run_dir.name, typed_name(run_dir), console, errors)
        self._run_dir, self._attempt = run_dir, attempt
        self._process = attempt_state(run_dir, attempt).process
        self._watch = _Watch(run_dir, attempt, is_begun=is_begun)
        self._bar = _Bar(console) if console.is_terminal else None
        self._was_interrupted = self._was_killed = False
        self._closing_since: float | None = None
        self._is_over = threading.Event()
        if queue_job(run_dir, attempt) is not None:
            # In a thread: a scheduler may take long to answer.
            threading.Thread(target=self._ask_queue, daemon=True).start()

    def look(self) -> int | None:
        # The state before the records: what is written before the end is then read after it.
        state = attempt_state(self._run_dir, self._attempt)
        is_queued = state.state == "queued"
        news = self._watch.queue_news(state.reason) if is_queued else self._watch.news()
        if self._bar is None:
            self.console.print_lines([line for _, line in news])
        else:
            self._bar.show(self._watch.status, news)
        is_late = False
        if is_queued or state.outcome is None:
            self._closing_since = None
        else:
            now = time.monotonic()
            self._closing_since = self._closing_since or now
            is_late = now - self._closing_since > _CLOSING_S
        if state.is_alive and not is_late:
            return None
        self.close()
        if self._was_killed:
            return ExitCode.INTERRUPTED
        if (error := error_if_deleted(self._attempt)) is not None:
            if self._process is not None and self._process.is_here():
                wait_for_end(self._process, _DELETED_S)
            raise error
        return report_outcome(self._run_dir, self._attempt, self.console, self.errors)

    def handle(self, number: signal.Signals) -> int | None:
        """The first Ctrl+C saves and stops, the second stops now; SIGTERM saves."""
        try:
            stopping = Stopping(self._run_dir, self._attempt, self.print_line)
            if number == signal.SIGTERM:
                stopping.ask("save")
            elif not self._was_interrupted:
                if stopping.state.state == "queued":
                    self.print_line(f"taking {stopping.place} out of the queue")
                elif script_of(self._run_dir) is not None:
                    self.print_line(
                        "the script gets SIGTERM, to save and end; Ctrl+C again kills it"
                    )
                else:
                    self.print_line(
                        "saving a checkpoint and stopping; Ctrl+C again stops now, without it"
                    )
                stopping.ask("interrupt")
                self._was_interrupted = True
            else:
                stopping.ask("now")
                self._was_killed = True
                stopping.wait_now()
                self.print_line("stopped now; the last saved checkpoint is as it was")
                return ExitCode.INTERRUPTED
        except UserError as error:
            self.print_line(f"error: {error}")
        return None

    def close(self) -> None:
        self._is_over.set()
        if self._bar is not None:
            self._bar.progress.stop()

    def _ask_queue(self) -> None:
        while not self._is_over.is_set():
            try:
                refresh(self._run_dir, self._attempt, hasten=True)
            except OSError:
                return  # its answer cannot be kept: what the ranks write is followed all the same
            self._is_over.wait(_QUEUE_POLL_S)


class _Bar:
    def __init__(self, console: Console) -> None:
        self._console = console
        self.progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self.progress.add_task("starting", total=None, text="")
        self.progress.start()

    def show(self, status: dict[str, Any], news: list[tuple[str, str]]) -> None:
        console = self._console
        kinds = ("eval", "save", "restart", "note")
        console.print_lines([line for kind, line in news if kind in kinds])
        self.progress.update(
            self._task,
            description=str(status.get("phase") or "starting"),
            completed=number_of(status, "step") or 0,
            total=number_of(status, "total_steps"),
            text=progress_text(status, max(10, console.width - _BAR_CHARS)),
        )


class _Watch:
    """Reads the new entries in the records of an attempt."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, *, is_begun: bool) -> None:
        self.status: dict[str, Any] = {}
        self._run_dir = run_dir
        self._attempt = attempt
        self._begun_at = number_of(read_record(attempt.launch), "begun_at") or 0.0
        self._rows = LineTail(run_dir.metrics)
        self._newest_row_at = self._begun_at
        self._phase = ""
        self._checkpoint_step: object = None
        self._num_restarts = 0
        self._num_notes = 0
        if is_begun:
            self.news()
            self._phase = ""  # the present phase is shown all the same

    def queue_news(self, reason: str) -> list[tuple[str, str]]:
        """News of a run that waits in a queue, in the form of `news`."""
        self.status = {"phase": "queued", "detail": reason}
        line = f"queued: {reason}" if reason else "queued"
        is_new, self._phase = line != self._phase, line
        return [("phase", line)] if is_new else []

    def news(self) -> list[tuple[str, str]]:
        """Pairs of kind (phase, train, eval, outer, save, restart or note) and line, in order."""
        self.status = current_status(self._run_dir, self._begun_at) or self.status
        rows = deque[tuple[str, str]](maxlen=_MOST_NEWS)
        num_rows = 0
        for row in self._new_rows():
            rows.append((str(row["kind"]), row_text(row, self.status)))
            num_rows += 1
        skipped = num_rows - len(rows)
        found = [("note", f"{skipped:,} earlier rows are not shown")] if skipped else []
        found += rows
        for _ in range(_MOST_NEWS):  # the next look shows the others
            restart = read_restart(self._attempt, self._num_restarts + 1)
            if restart is None or restart.decision != "restart" or not restart.world_size:
                break  # the run ends, or the nodes have not met yet
            self._num_restarts += 1
            found.append(("restart", restart.text))
        notes = self.status.get("notes")
        notes = notes if isinstance(notes, list) else []
        num_notes = int(number_of(self.status, "num_notes") or len(notes))
        if (num_new := min(num_notes - self._num_notes, _MOST_NEWS)) > 0:
            found += [("note", f"note: {text}") for text in notes[-num_new:]]
        self._num_notes = num_notes  # ranks that were started again begin anew
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

    def _new_rows(self) -> Iterator[dict[str, Any]]:
        for line in self._rows.lines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue  # torn by a full disk or a kill
            at = number_of(row, "at") if isinstance(row, dict) else None
            # Resuming may have rewritten the rows of earlier attempts.
            if at is not None and at > self._newest_row_at and row.get("kind") in _ROWS:
                self._newest_row_at = at
                yield row


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
    given = row.get("weights")
    names = given if isinstance(given, dict) else {}
    tokens = {n: count for n in names if (count := number_of(names, n)) is not None}
    whole = sum(tokens.values())
    shares = [f"{name} {count / whole:.0%}" for name, count in tokens.items() if whole]
    parts = [f"averaged outer step {row.get('outer_step')} of {', '.join(shares) or 'nobody'}"]
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
    accuracy, margin = number_of(row, "reward_accuracy"), number_of(row, "reward_margin")
    if accuracy is None or margin is None:
        return ""
    return f"  chosen preferred {accuracy:.0%}  margin {margin:.3f}"


def progress_text(status: dict[str, Any], width: int) -> str:
    """The text right of the bar: the most important first, as much as fits."""
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
