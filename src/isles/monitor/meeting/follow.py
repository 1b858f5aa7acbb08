"""What happens at a rendezvous, as lines: who comes and goes, which turns are averaged."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.text import printable
from isles.facts.units import format_bytes, format_duration
from isles.launch.meeting import end_rendezvous, local_line, rendezvous_process
from isles.launch.meeting_run import Meeting
from isles.monitor.inbox import Inbox
from isles.run.ask import ask_rendezvous

_ASK_S = 5.0
_ASK_EVERY_S = 1.0
_LOOK_S = 0.1
_SAY_EVERY_S = 30.0
_LAST_LINES = 5


def opening(meeting: Meeting, *, shows_line: bool) -> list[str]:
    """Where a rendezvous is, and what is typed elsewhere.

    Args:
        meeting: the rendezvous.
        shows_line: show the join line itself, a secret: not where a file takes what is printed.
    """
    line = meeting.line
    paste = [f"    {line.secret_text()}"] if shows_line else [f"    cat {meeting.join_file}"]
    word = "goes on" if meeting.has_past else "is open"
    if not meeting.is_new:
        word = "runs already"
    lines = [f"the rendezvous of {line.run} {word} at {line.address}, in {meeting.state}", ""]
    if line.host.startswith("127.") or line.host in ("::1", "localhost"):
        lines += [
            "It listens on this machine only. For clusters elsewhere stop it, and add",
            "    --public HOST:PORT",
            "with an address of this machine that they reach, such as a VPN's.",
            "",
        ]
    return [
        *lines,
        "The join line is a secret: who has it takes part. It stands in the file",
        f"    {meeting.join_file}",
        "Copy that file to the other sites, and type at each of them, for example",
        "    isles join FILE",
        "    isles join FILE --on slurm launcher.partition=gpu nodes=4 gpus_per_node=8",
        "or type `isles join -` there, and paste the line:",
        *paste,
        "",
    ]


class Follower:
    """Shows what a rendezvous says of itself, until it ends.

    Args:
        meeting: the rendezvous.
        inbox: the user's signals.
        say: takes lines for him.
    """

    def __init__(self, meeting: Meeting, inbox: Inbox, say: Callable[[str], object]) -> None:
        self._meeting = meeting
        self._inbox = inbox
        self._say = say
        self._event = -1
        self._turn = -1
        self._told_at: float | None = None
        self._since: float | None = None

    def follow(self) -> int:
        """Until it has ended, or Ctrl+C; the exit code.

        Raises:
            CommunicationError: it has ended by itself.
        """
        ask_at = 0.0
        while rendezvous_process(self._meeting.state) is not None:
            for signum in self._inbox.take():
                return self._leave(signum)
            if time.monotonic() >= ask_at:
                self._look()
                ask_at = time.monotonic() + _ASK_EVERY_S
            time.sleep(_LOOK_S)
        log = self._meeting.state / "rendezvous.log"
        words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        raise CommunicationError(
            "the rendezvous has ended; its last words:\n" + "\n".join(f"    {w}" for w in words),
            where=str(log),
            fix="type the command again: it goes on where it was, and the clusters come back",
        )

    def _leave(self, signum: signal.Signals) -> int:
        if signum == signal.SIGHUP or not self._meeting.is_new:
            return ExitCode.OK
        end_rendezvous(self._meeting.state)
        self._say(
            "the rendezvous has ended; clusters train on by themselves, and come back to it when "
            "the same command is typed again"
        )
        return ExitCode.INTERRUPTED

    def _look(self) -> None:
        try:
            status = ask_rendezvous(local_line(self._meeting.state), "/v1/status", _ASK_S)
        except UserError as error:
            now = time.monotonic()
            if self._told_at is None or now - self._told_at > _SAY_EVERY_S:
                self._told_at = now
                self._say(f"{_clock(time.time())}  no answer: {error.what}")
            return
        self._told_at = None
        if self._since is None:  # what was before its last start has been shown then
            starts = [e["at"] for e in status.get("events", []) if e["kind"] == "started"]
            self._since = max(starts, default=0.0)
        rows = [*self._events(status), *self._commits(status)]
        for at, text in sorted(rows, key=lambda row: row[0]):
            if at >= self._since:
                self._say(text)

    def _events(self, status: dict[str, Any]) -> list[tuple[float, str]]:
        found = []
        for event in status.get("events", []):
            if event["number"] > self._event:
                self._event = event["number"]
                who = f"{event['member']} " if event["member"] else ""
                text = f"{_clock(event['at'])}  {who}{event['kind']}: {event['what']}"
                found.append((float(event["at"]), printable(text)))
        return found

    def _commits(self, status: dict[str, Any]) -> list[tuple[float, str]]:
        found = []
        for commit in reversed(status.get("commits", [])):
            if commit["turn"] > self._turn:
                self._turn = commit["turn"]
                total = sum(commit["weights"].values()) or 1
                parts = [
                    f"{name} {tokens / total:.0%}" for name, tokens in commit["weights"].items()
                ]
                text = (
                    f"{_clock(commit['at'])}  turn {commit['turn']} averaged: "
                    f"{', '.join(parts) or 'nobody'}; {format_bytes(commit['size_bytes'])} in "
                    f"{format_duration(commit['seconds'])}"
                )
                found.append((float(commit["at"]), printable(text)))
        return found


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%H:%M:%S")
