"""A hub of clusters that was opened by `isles hub`: its status, its news, its end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError, ExitCode, UserError
from isles.facts.console import Console
from isles.facts.units import format_bytes, format_duration
from isles.launch.hub import OpenHub, end_hub, hub_process, local_line
from isles.monitor.clusters import heavy_notes
from isles.monitor.follow import Follower
from isles.monitor.logs import LineTail
from isles.monitor.outer import ask_status
from isles.monitor.table import columns
from isles.run.join_line import ENDED, JoinLine
from isles.run.paths import is_file
from isles.run.process import ProcessId
from isles.run.records import read_record
from isles.run.repeats import Repeats
from isles.run.state import text_of

_ANSWER_S = 5.0
_POLL_S = 1.0
_LOG_LINES = 5
_EVENT_LINES = 60
"""A minute, of each kind: clusters that come and go fill no terminal."""


def find_hub(given: str | None, output_dir: Path) -> Path | None:
    """The state directory of the hub that a command means; None: it means a run."""
    for path in () if given is None else (Path(given).expanduser(), output_dir / given):
        if _is_hub(path):
            return path
    return None


def list_hubs(output_dir: Path) -> list[Path]:
    """The state directories of hubs, whether they run or not."""
    if not output_dir.is_dir():
        return []
    return sorted(path for path in output_dir.iterdir() if _is_hub(path))


def resting_state(state: Path) -> str:
    """How a hub that does not run has ended: finished, stopped or killed; `unknown`: it may run on
    another host."""
    ended = text_of(read_record(state / ENDED), "state")
    if ended in ("finished", "stopped"):
        return ended
    process = ProcessId.from_record(read_record(state / "process.json") or {})
    return "killed" if process is not None and process.is_here() else "unknown"


def _is_hub(path: Path) -> bool:
    return is_file(path / "process.json") and is_file(path / "settings.json")


def hub_record(state: Path) -> dict[str, Any]:
    """The status of a hub, as JSON takes it."""
    record: dict[str, Any] = {"name": state.name, "state": resting_state(state), "hub": None}
    if hub_process(state) is None:
        return record
    try:
        answer = ask_status(local_line(state), _ANSWER_S)
    except UserError as error:
        return {**record, "state": "silent", "error": f"{error.what} ({error.where})"}
    return {**record, "state": "finished" if answer.get("is_over") else "running", "hub": answer}


def hub_lines(state: Path, record: dict[str, Any]) -> list[str]:
    lines = [state.name, f"  state      {record['state']}"]
    lines.append(f"  address    {JoinLine.read(state / 'join').address}")
    if "error" in record:
        lines.append(f"  error      {record['error']}")
    answer = record["hub"]
    if answer is not None:
        lines[-1] += f", round {answer['round']:.0f}"
        lines += [f"  weight     {note}" for note in heavy_notes(answer)]
        lines += _member_lines(answer["members"])
    if record["state"] in ("stopped", "killed"):
        lines.append("  `isles hub` with its run file resumes it")
    return [*lines, f"  join line  {state / 'join'}", f"  directory  {state}"]


_SILENT = ("living", "dropped")
"""States of a member whose heartbeat matters."""


def _member_lines(members: list[dict[str, Any]]) -> list[str]:
    if not members:
        return ["  no cluster has joined yet"]
    rows = [("cluster", "state", "step", "tokens/s", "weight", "last seen")]
    remarks = []
    for member in members:
        seen = f"{format_duration(member['heard_s'])} ago" if member["state"] in _SILENT else ""
        speed, weight = member.get("tokens_per_s") or 0.0, member.get("weight") or 0.0
        figures = f"{member['step']:.0f}", f"{speed:,.0f}", f"{weight:.0%}"
        rows.append((member["name"], member["state"], *figures, seen))
        notes = [text for text in (member["slow"], member.get("refused")) if text]
        remarks += [f"{member['name']}: {text}" for text in notes]
    return ["", *(f"  {text}" for text in (*columns(rows), *remarks)), ""]


def stop_hub(state: Path, *, print_line: Callable[[str], object]) -> int:
    """End a hub; its clusters train on, each alone, and it may be opened again."""
    begun, record = time.monotonic(), hub_record(state)
    if not end_hub(state):
        print_line(f"{state.name} does not run")
        return ExitCode.OK
    then = "its clusters train on by themselves until it is opened again"
    if record["state"] == "finished":
        then = "all its clusters have finished"
    print_line(f"{state.name} has ended after {format_duration(time.monotonic() - begun)}; {then}")
    return ExitCode.OK


class HubNews:
    """Events and averages of a hub that are new since the last look.

    Args:
        line: returns the join line. Called for each query.
        since: seconds since the epoch. Older events are not shown. Default: the hub's last start.
    """

    def __init__(self, line: Callable[[], JoinLine], since: float | None = None) -> None:
        self.is_over = False
        """True if all clusters have finished."""
        self._line = line
        self._since = since
        self._event: int | None = None
        self._round = -1
        self._silent_at: float | None = None
        self._repeats = Repeats()

    def look(self) -> list[tuple[float, str, str]]:
        """The time, the kind and the text of each, in order.

        The kind is the kind of an event, `round` for an average, `silent` when the hub stops
        answering, or `again` when the hub answers again.
        """
        now = time.time()
        try:
            status = ask_status(self._line(), _ANSWER_S)
        except UserError as error:
            if self._silent_at is not None:
                return []
            self._silent_at = now
            return [(now, "silent", f"it does not answer: {error.what}")]
        found = []
        if self._silent_at is not None:
            text = f"it answers again after {now - self._silent_at:.0f}s"
            found.append((self._silent_at, "again", text))
            self._silent_at = None
        self.is_over = bool(status.get("is_over"))
        events, commits = status.get("events") or [], status.get("commits") or []
        if self._event is None:
            starts = [event["at"] for event in events if event["kind"] == "started"]
            since = max(starts, default=0.0) if self._since is None else self._since
            self._event = max([e["number"] for e in events if e["at"] < since], default=-1)
            self._round = max([c["round"] for c in commits if c["at"] < since], default=-1)
        for event in events:
            if event["number"] > self._event:
                self._event = event["number"]
                who = f"{event['member']} " if event.get("member") else ""
                text = f"{who}{event['kind'].replace('_', ' ')}: {event['what']}".rstrip("; ")
                if (number := self._repeats.count(event["kind"])) > _EVENT_LINES:
                    continue
                if number == _EVENT_LINES:
                    text += " (more events like this in this minute are only in its log)"
                found.append((float(event["at"]), str(event["kind"]), text))
        for commit in reversed(commits):
            if commit["round"] > self._round:
                self._round = commit["round"]
                total = sum(commit["weights"].values()) or 1
                parts = [f"{name} {n / total:.0%}" for name, n in commit["weights"].items()]
                text = (
                    f"round {commit['round']:.0f} averaged: {', '.join(parts) or 'nobody'}; "
                    f"{format_bytes(commit['size_bytes'])} in {format_duration(commit['seconds'])}"
                )
                found.append((float(commit["at"]), "round", text))
        return sorted(found, key=lambda news: news[0])


def opening_lines(hub: OpenHub, *, shows_line: bool) -> list[str]:
    """Lines with the address of a hub and the command that joins it.

    Args:
        shows_line: print the join line. It is a secret, so not if the output is a file.
    """
    line = hub.line
    paste = line.secret_text() if shows_line else f"cat {hub.join_file}"
    word = "goes on" if hub.has_past else "is open"
    if not hub.is_new:
        word = "runs already"
    lines = [f"the hub of {line.run} {word} at {line.address}, in {hub.state}", ""]
    if line.host.startswith("127.") or line.host in ("::1", "localhost"):
        lines += [
            "It listens on this machine only. For clusters elsewhere stop it, and add",
            "    --public HOST:PORT",
            "with an address of this machine that they reach, such as a VPN's.",
            "",
        ]
    return [
        *lines,
        "The join line is a secret, because it lets anyone join. It is in the file",
        f"    {hub.join_file}",
        "Copy that file to the other sites, and run on each site, for example",
        "    isles join FILE",
        "    isles join FILE --on slurm launcher.partition=gpu nodes=4 gpus_per_node=8",
        "or run `isles join -` on the site, and paste the line:",
        f"    {paste}",
        "",
    ]


class HubFollower(Follower):
    """Shows which clusters join and leave a hub, and its averages, until the hub ends."""

    def __init__(self, hub: OpenHub, console: Console, errors: Console) -> None:
        super().__init__(hub.state.name, hub.state.name, console, errors)
        self._hub = hub
        self._news = HubNews(lambda: local_line(hub.state))
        self._ask_at = 0.0

    def look(self) -> int | None:
        """See `Follower.look`.

        Raises:
            CommunicationError: the hub has ended by itself.
        """
        if hub_process(self._hub.state) is None:
            log = self._hub.state / "hub.log"
            lines = LineTail(log, last=_LOG_LINES).read(final=True)
            raise CommunicationError(
                "\n    ".join(["the hub has ended; the end of its log:", *lines]),
                where=str(log),
                fix="run the same command again: the hub resumes, and the clusters reconnect",
            )
        if time.monotonic() >= self._ask_at:
            for at, _, text in self._news.look():
                clock = datetime.fromtimestamp(at).strftime("%H:%M:%S")
                self.console.print_lines([f"{clock}  {text}"])
            self._ask_at = time.monotonic() + _POLL_S
        return None

    def handle(self, number: signal.Signals) -> int | None:
        """End it, if this command has opened it."""
        if not self._hub.is_new:
            return ExitCode.OK
        end_hub(self._hub.state)
        text = "the hub has ended; clusters train on by themselves, and come back to it when the "
        self.console.print_lines([text + "same command is typed again"])
        return ExitCode.INTERRUPTED
