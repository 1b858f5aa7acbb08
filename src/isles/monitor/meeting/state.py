"""How a rendezvous stands that was started by itself, for `isles status` and `isles stop`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isles.errors import ExitCode, UserError
from isles.facts.text import printable
from isles.facts.units import format_duration
from isles.launch.meeting import end_rendezvous, local_line, rendezvous_process
from isles.run.ask import ask_rendezvous
from isles.run.join_line import JoinLine

_ASK_S = 5.0


def find_meeting(given: str | None, output_dir: Path) -> Path | None:
    """The state directory of the rendezvous that a command means; None: it means a run."""
    for path in () if given is None else (Path(given).expanduser(), output_dir / given):
        if _is_meeting(path):
            return path
    return None


def running_meetings(output_dir: Path) -> list[Path]:
    """The state directories of those that run."""
    if not output_dir.is_dir():
        return []
    found = sorted(path for path in output_dir.iterdir() if _is_meeting(path))
    return [path for path in found if rendezvous_process(path) is not None]


def meeting_record(state: Path) -> dict[str, Any]:
    """How it stands, as JSON takes it."""
    record: dict[str, Any] = {"name": state.name, "state": "stopped", "rendezvous": None}
    if rendezvous_process(state) is None:
        return record
    try:
        answer = ask_rendezvous(local_line(state), "/v1/status", _ASK_S)
    except UserError as error:
        return {**record, "state": "silent", "fault": f"{error.what} ({error.where})"}
    return {**record, "state": "finished" if answer.get("is_over") else "running"} | {
        "rendezvous": answer
    }


def meeting_lines(state: Path, record: dict[str, Any]) -> list[str]:
    """The same in words."""
    lines = [state.name, f"  state      {record['state']}"]
    lines.append(f"  meeting    at {JoinLine.read(state / 'join').address}")
    if "fault" in record:
        lines.append(f"  fault      {record['fault']}")
    answer = record["rendezvous"]
    if answer is not None:
        lines[-1] += f", turn {answer['turn']}"
        lines += _members(answer)
    if record["state"] == "stopped":
        lines.append("  `isles rendezvous` with its run file goes on with it")
    return [*lines, f"  join line  {state / 'join'}", f"  directory  {state}"]


def _members(answer: dict[str, Any]) -> list[str]:
    rows = [("cluster", "state", "step", "tokens/s", "weight", "heard")]
    remarks = []
    for member in answer["members"]:
        is_living = member["state"] == "living"
        rows.append(
            (
                member["name"],
                member["state"],
                str(member["step"]),
                f"{member['tokens_per_s']:,.0f}",
                f"{member['weight']:.0%}",
                f"{format_duration(member['heard_s'])} ago" if is_living else "",
            )
        )
        remarks += [
            f"{member['name']}: {text}" for text in (member["slow"], member["refused"]) if text
        ]
    if len(rows) == 1:
        return ["  no cluster has joined yet"]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return ["", *(f"  {printable(text)}" for text in (*table, *remarks)), ""]


def stop_meeting(state: Path, *, say: Callable[[str], object]) -> int:
    """End a rendezvous; its clusters train on, each alone, and it may be opened again."""
    begun = time.monotonic()
    if not end_rendezvous(state):
        say(f"{state.name} does not run")
        return ExitCode.OK
    say(
        f"{state.name} has ended after {format_duration(time.monotonic() - begun)}; its clusters "
        "train on by themselves until it is opened again"
    )
    return ExitCode.OK


def _is_meeting(path: Path) -> bool:
    return (path / "process.json").is_file() and (path / "settings.json").is_file()
