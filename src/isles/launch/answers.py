"""Answers of other programs and machines: parsed, and checked before isles uses them.

Each answer has a dataclass with the keys that isles reads. `parse_answer` and `read_answer` drop
all other keys, so that a newer program may print more.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from isles.errors import PreflightError
from isles.run.nodes import Host
from isles.run.records import MAX_LIST_BYTES, as_kind, parse_record

T = TypeVar("T")

STARTED = "ISLES-STARTED "
"""Prefix of the line that announces a run to the isles process that requested the start."""

_Folder = Annotated[str, Field(pattern=r"^/\P{Cc}+$")]
"""An absolute path without control characters."""

_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class Announced:
    """A run started by isles on another machine, or by another isles process.

    Args:
        version: version of that isles.
        path: the run directory on that machine.
        ssh: the machine that has the run directory, if it is a third machine; else empty.
        elsewhere: the run directory on the other hosts; empty: `path`.
        home: HOME of the process that started the run; only SkyPilot needs it.
    """

    version: str
    path: _Folder
    attempt: Annotated[int, Field(strict=True, ge=1, lt=2**31)]
    ssh: Host = ""
    elsewhere: Annotated[str, Field(pattern=r"^([/~]\P{Cc}*)?$")] = ""
    home: Annotated[str, Field(pattern=r"^/\P{Cc}*$")] | None = None

    def line(self) -> str:
        """The line to print, which `read_started` parses."""
        return STARTED + json.dumps(asdict(self))


def read_started(line: str, *, where: str, fix: str) -> Announced:
    """Parse a line with `STARTED`. PreflightError: isles cannot use it."""
    text, by = line.partition(STARTED)[2], "isles there"
    return read_answer(Announced, text, by=by, where=where, fix=fix, id="start.failed")


def parse_answer(kind: type[T], text: str) -> T:
    """Parse JSON from another program or machine.

    Args:
        kind: a dataclass, or another type that pydantic checks.
        text: the JSON.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or a key has an invalid value.
    """
    try:
        return as_kind(kind, parse_record(text, MAX_LIST_BYTES))
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))[:_SHOWN_CHARS]
        if first["type"] == "missing":
            raise ValueError(f"the key {key} is missing") from None
        if not key:
            raise ValueError("its structure is different") from None
        raise ValueError(f"its {key} is {_short(first['input'])}, which is not valid") from None


def read_answer(kind: type[T], text: str, *, by: str, where: str, fix: str, id: str) -> T:
    """Parse an answer as `parse_answer` does.

    Args:
        by: the program that answered, for the message.
        where, fix, id: of the error.

    Raises:
        PreflightError: isles cannot use the answer.
    """
    try:
        return parse_answer(kind, text)
    except ValueError as error:
        raise PreflightError(
            f"isles cannot use the answer of {by}, {_short(text.strip())}: {error}",
            where=where,
            fix=fix,
            id=id,
        ) from None


def _short(value: object) -> str:
    # The `repr` of a list may be as long and as deep as the answer.
    if isinstance(value, dict | list):
        return "{…}" if isinstance(value, dict) else "[…]"
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
