"""The hub of clusters, where it was opened by itself: how it stands, its news, its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.text import printable
from isles.facts.units import format_bytes, format_duration
from isles.launch.hub import Meeting, end_rendezvous, local_line, rendezvous_process
from isles.monitor.follow import Follower
from isles.monitor.table import columns, print_lines
from isles.run.ask import ask_rendezvous
from isles.run.join_line import JoinLine

_ASK_S = 5.0
_ASK_EVERY_S = 1.0
_SAY_EVERY_S = 30.0
_LAST_LINES = 5


def find_hub(given: str | None, output_dir: Path) -> Path | None:
    """The state directory of the hub that a command means; None: it means a run."""
    for path in () if given is None else (Path(given).expanduser(), output_dir / given):
        if _is_hub(path):
            return path
    return None


def running_hubs(output_dir: Path) -> list[Path]:
    """The state directories of hubs that run."""
    if not output_dir.is_dir():
        return []
    found = sorted(path for path in output_dir.iterdir() if _is_hub(path))
    return [path for path in found if rendezvous_process(path) is not None]


def _is_hub(path: Path) -> bool:
    return (path / "process.json").is_file() and (path / "settings.json").is_file()


def hub_record(state: Path) -> dict[str, Any]:
    """How a hub stands, as JSON takes it."""
    record: dict[str, Any] = {"name": state.name, "state": "stopped", "rendezvous": None}
    if rendezvous_process(state) is None:
        return record
    try:
        answer = ask_rendezvous(local_line(state), "/v1/status", _ASK_S)
    except UserError as error:
        return {**record, "state": "silent", "fault": f"{error.what} ({error.where})"}
    word = "finished" if answer.get("is_over") else "running"
    return {**record, "state": word, "rendezvous": answer}


def hub_lines(state: Path, record: dict[str, Any]) -> list[str]:
    """The same in words."""
    lines = [state.name, f"  state      {record['state']}"]
    lines.append(f"  meeting    at {JoinLine.read(state / 'join').address}")
    if "fault" in record:
        lines.append(f"  fault      {record['fault']}")
    answer = record["rendezvous"]
    if answer is not None:
        lines[-1] += f", turn {answer['turn']}"
        lines += _members(answer["members"])
    if record["state"] == "stopped":
        lines.append("  `isles rendezvous` with its run file goes on with it")
    return [*lines, f"  join line  {state / 'join'}", f"  directory  {state}"]


def _members(members: list[dict[str, Any]]) -> list[str]:
    if not members:
        return ["  no cluster has joined yet"]
    rows = [("cluster", "state", "step", "tokens/s", "weight", "heard")]
    remarks = []
    for member in members:
        heard = f"{format_duration(member['heard_s'])} ago" if member["state"] == "living" else ""
        speed, weight = f"{member['tokens_per_s']:,.0f}", f"{member['weight']:.0%}"
        rows.append((member["name"], member["state"], str(member["step"]), speed, weight, heard))
        notes = [text for text in (member["slow"], member["refused"]) if text]
        remarks += [f"{member['name']}: {text}" for text in notes]
    return ["", *(f"  {printable(text)}" for text in (*columns(rows), *remarks)), ""]


def stop_hub(state: Path, *, say: Callable[[str], object]) -> int:
    """End a hub; its clusters train on, each alone, and it may be opened again."""
    begun = time.monotonic()
    if not end_rendezvous(state):
        say(f"{state.name} does not run")
        return ExitCode.OK
    say(
        f"{state.name} has ended after {format_duration(time.monotonic() - begun)}; its clusters "
        "train on by themselves until it is opened again"
    )
    return ExitCode.OK


class HubNews:
    """Events and averages of a hub that are new since the last look.

    Args:
        line: gives its join line; asked at each look.
        since: what was before is not shown, seconds since the epoch; None: its last start.
    """

    def __init__(self, line: Callable[[], JoinLine], since: float | None = None) -> None:
        self.is_over = False
        """Whether all clusters have finished."""
        self._line = line
        self._since = since
        self._event: int | None = None
        self._turn = -1

    def look(self) -> list[tuple[float, str, str]]:
        """The time, the kind (`turn`: an average) and the text of each, in order.

        Raises:
            UserError: it does not answer.
        """
        status = ask_rendezvous(self._line(), "/v1/status", _ASK_S)
        self.is_over = bool(status.get("is_over"))
        events, commits = status.get("events") or [], status.get("commits") or []
        if self._event is None:
            starts = [event["at"] for event in events if event["kind"] == "started"]
            since = max(starts, default=0.0) if self._since is None else self._since
            self._event = max([e["number"] for e in events if e["at"] < since], default=-1)
            self._turn = max([c["turn"] for c in commits if c["at"] < since], default=-1)
        found = []
        for event in events:
            if event["number"] > self._event:
                self._event = event["number"]
                who = f"{event['member']} " if event.get("member") else ""
                text = f"{who}{event['kind'].replace('_', ' ')}: {event['what']}".rstrip("; ")
                found.append((float(event["at"]), str(event["kind"]), printable(text)))
        for commit in reversed(commits):
            if commit["turn"] > self._turn:
                self._turn = commit["turn"]
                total = sum(commit["weights"].values()) or 1
                parts = [f"{name} {n / total:.0%}" for name, n in commit["weights"].items()]
                text = (
                    f"turn {commit['turn']} averaged: {', '.join(parts) or 'nobody'}; "
                    f"{format_bytes(commit['size_bytes'])} in {format_duration(commit['seconds'])}"
                )
                found.append((float(commit["at"]), "turn", printable(text)))
        return sorted(found, key=lambda news: news[0])


def opening_lines(meeting: Meeting, *, shows_line: bool) -> list[str]:
    """Where a hub is, and what is typed elsewhere.

    Args:
        meeting: the hub.
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


class HubFollower(Follower):
    """Shows who comes and goes at a hub and what is averaged, until it ends."""

    def __init__(self, meeting: Meeting, console: Console, errors: Console) -> None:
        super().__init__(meeting.state.name, meeting.state.name, console, errors)
        self._meeting = meeting
        self._news = HubNews(lambda: local_line(meeting.state))
        self._ask_at = 0.0
        self._complained_at: float | None = None

    def look(self) -> int | None:
        """See `Follower.look`.

        Raises:
            CommunicationError: it has ended by itself.
        """
        if rendezvous_process(self._meeting.state) is None:
            log = self._meeting.state / "rendezvous.log"
            words = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
            raise CommunicationError(
                "\n".join(
                    ["the rendezvous has ended; its last words:", *(f"    {w}" for w in words)]
                ),
                where=str(log),
                fix="type the command again: it goes on where it was, and the clusters come back",
            )
        now = time.monotonic()
        if now < self._ask_at:
            return None
        try:
            for at, _, text in self._news.look():
                self._print(at, text)
            self._complained_at = None
        except UserError as error:
            if self._complained_at is None or now - self._complained_at > _SAY_EVERY_S:
                self._complained_at = now
                self._print(time.time(), f"no answer: {error.what}")
        self._ask_at = time.monotonic() + _ASK_EVERY_S
        return None

    def handle(self, number: signal.Signals) -> int | None:
        """End it, if this command has opened it."""
        if not self._meeting.is_new:
            return ExitCode.OK
        end_rendezvous(self._meeting.state)
        print_lines(
            self.console,
            [
                "the rendezvous has ended; clusters train on by themselves, and come back to it "
                "when the same command is typed again"
            ],
        )
        return ExitCode.INTERRUPTED

    def _print(self, at: float, text: str) -> None:
        clock = datetime.fromtimestamp(at).strftime("%H:%M:%S")
        print_lines(self.console, [f"{clock}  {text}"])
