"""Following a run on several clusters: one stream, each line with its cluster's name."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from isles.errors import ExitCode, UserError
from isles.launch.meeting import end_rendezvous, reopen_rendezvous
from isles.monitor.inbox import ORDERS, Inbox
from isles.monitor.multi_cluster.child import Child, Said, Word
from isles.monitor.multi_cluster.end import end_lines
from isles.monitor.multi_cluster.state import cluster_reports, line_of, place_of
from isles.run.ask import ask_rendezvous
from isles.run.find import typed_name
from isles.run.several import ClusterRun, SeveralRun

_LOOK_S = 0.25
_ASK_S = 1.0
_ANSWER_S = 5.0
_WORDS = {number: word for word, number in ORDERS.items()}
_SILENT = ("started",)
"""Events that are no news for who follows."""


class SeveralAttendant:
    """Follows all clusters of a run until they end, and passes Ctrl+C on in two steps.

    Args:
        run: the run.
        running: clusters that ran before: only what is new of them is shown.
        inbox: where signals to this process arrive.
        console: for progress and results.
        errors: for what went wrong.
    """

    def __init__(
        self,
        run: SeveralRun,
        running: Iterable[str],
        inbox: Inbox,
        console: Console,
        errors: Console,
    ) -> None:
        self._run, self._inbox = run, inbox
        self._console, self._errors = console, errors
        self._said: Said = queue.Queue()
        self._codes: dict[str, int] = {}
        self._asked = 0
        self._is_over = threading.Event()
        self._width = max(len(name) for name in [*(c.name for c in run.clusters), "turns"])
        followed = [c for c in run.clusters if c.path and c.launcher != "manual"]
        self._children = {
            c.name: Child(
                c.name,
                self._words(c, c.name in set(running)),
                self._said,
                given=None,
                index=run.clusters.index(c),
            )
            for c in followed
        }

    def attend(self) -> int:
        """Follow to the end; the worst exit code, or 0 where the terminal was closed."""
        if self._run.meets:
            threading.Thread(target=self._ask, daemon=True).start()
        left = set(self._children)
        try:
            while left:
                word = self._next()
                if word is not None and word.kind == "end" and word.cluster in left:
                    left.discard(word.cluster)
                    self._codes[word.cluster] = word.code
                elif word is not None:
                    self._show(word)
                if not self._hear_signals():
                    return ExitCode.OK
        except BrokenPipeError:
            self._complain(
                f"nobody reads this any more; {self._run.name} goes on: "
                f"isles status {typed_name(self._run)}"
            )
            raise
        finally:
            self._is_over.set()
            for child in self._children.values():
                child.hang_up()
        return self._conclude()

    def _words(self, cluster: ClusterRun, is_begun: bool) -> list[str]:
        words = ["attend", place_of(cluster), "--attempt", str(cluster.attempt), "--orders"]
        words += [f"--output-dir={self._run.path.parent}"]
        return words + (["--begun"] if is_begun else [])

    def _next(self) -> Word | None:
        try:
            return self._said.get(timeout=_LOOK_S)
        except queue.Empty:
            return None

    def _show(self, word: Word) -> None:
        console = self._errors if word.kind == "err" else self._console
        line = f"{word.cluster.ljust(self._width)} | {word.text}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _complain(self, line: str) -> None:
        self._errors.print(line, markup=False, highlight=False, soft_wrap=True)

    def _hear_signals(self) -> bool:
        """Pass on what has arrived; False: the terminal is closed, and the run goes on."""
        for number in self._inbox.take():
            if number == signal.SIGHUP:
                return False
            if number == signal.SIGINT:
                self._asked += 1
                if self._asked == 1:
                    self._complain("stopping all clusters; Ctrl+C again stops them now")
            for child in self._children.values():
                child.tell(_WORDS[number])
        return True

    def _conclude(self) -> int:
        is_alive = [
            name
            for name, report in cluster_reports(self._run).items()
            if report.state in ("running", "queued")
        ]
        if not is_alive and self._run.meets and not self._run.rendezvous:
            end_rendezvous(self._run.state)
        lines, code = end_lines(self._run, self._codes)
        for line in lines:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        return code

    # What the rendezvous tells.

    def _ask(self) -> None:
        """Put what happens between the clusters into the stream, as the rendezvous has it."""
        seen: int | None = None
        silent_since: float | None = None
        is_over = False
        while not self._is_over.wait(_ASK_S):
            try:
                answer = ask_rendezvous(line_of(self._run), "/v1/status", _ANSWER_S)
            except UserError as error:
                if is_over or self._is_over.is_set():
                    continue  # it ends when all have finished
                if silent_since is None:
                    silent_since = time.monotonic()
                    self._tell(f"the rendezvous does not answer: {error.what}", "err")
                    self._reopen()
                continue
            if silent_since is not None:
                self._tell(f"the rendezvous is back after {time.monotonic() - silent_since:.0f}s")
                silent_since = None
            is_over = bool(answer.get("is_over"))
            events = answer.get("events") or []
            if seen is None:
                seen = self._first(events)
            for event in events:
                if event["number"] > seen and event["kind"] not in _SILENT:
                    self._tell(event_text(event))
            seen = max([seen, *(event["number"] for event in events)])

    def _reopen(self) -> None:
        """Start the run's own rendezvous again, once for each time that it has died."""
        if self._run.rendezvous:
            self._tell(f"open it again at {self._run.rendezvous}: isles rendezvous", "err")
            return
        try:
            if reopen_rendezvous(self._run.state):
                self._tell("it had died, and is started again")
        except UserError as error:
            self._tell(f"it does not start again: {error}", "err")

    def _first(self, events: list[dict[str, Any]]) -> int:
        """The last event before this start."""
        old = [e["number"] for e in events if e["at"] < self._run.started_at]
        return max(old, default=0)

    def _tell(self, text: str, kind: Any = "out") -> None:
        self._said.put(Word("turns", kind, text))


def event_text(event: dict[str, Any]) -> str:
    """An event of the rendezvous as a line."""
    who = f"{event['member']} " if event.get("member") else ""
    kind = str(event["kind"]).replace("_", " ")
    return f"{who}{kind}: {event['what']}".rstrip("; ")
