"""A request to stop a run, left in its directory by whoever can see it, on whatever machine."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import Literal

from isles.run.paths import Attempt
from isles.run.records import read_record, write_record

StopKind = Literal["save", "interrupt", "now"]
"""save: save, and end with 85. interrupt: save, and end with 130. now: end without saving."""


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Who wants what."""

    kind: StopKind
    by: str
    at: float


def request_stop(attempt: Attempt, kind: StopKind) -> None:
    """Ask an attempt to stop; a stronger request (now) replaces a weaker one, never the reverse."""
    there = read_stop_request(attempt)
    if there is not None and there.kind == "now":
        return
    by = f"process {os.getpid()} on {socket.gethostname()}"
    write_record(attempt.stop_request, {"kind": kind, "by": by, "at": time.time()})


def read_stop_request(attempt: Attempt) -> StopRequest | None:
    """What has been asked for; None while nobody has."""
    record = read_record(attempt.stop_request)
    if record is None or record.get("kind") not in ("save", "interrupt", "now"):
        return None
    return StopRequest(record["kind"], str(record.get("by", "")), float(record.get("at", 0.0)))
