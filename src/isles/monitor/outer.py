"""Reports of a run or its hub about outer steps, with only the types of values that isles writes.

Another user, another site or another version of isles may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Any

from isles.errors import PreflightError
from isles.facts.units import printable
from isles.run.join_line import JoinLine, ask_hub
from isles.run.state import number_of

_MOST = 1000
"""Members, rounds, events and names in an answer; a hub admits fewer members."""

_LONGEST = 500
_LATEST = 1e11
"""Seconds since the epoch, a time that Python shows as a date."""

_ANSWER_AT_LEAST = ("round", "members")

_Read = Callable[[object], Any]
"""Returns a value as isles uses it, or None if it is of another kind."""


def _number(value: object) -> float | None:
    return number_of({"": value}, "")


def _time(value: object) -> float | None:
    found = _number(value)
    return found if found is not None and 0 <= found < _LATEST else None


def _text(value: object) -> str | None:
    return printable(value, longest=_LONGEST) if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _texts(value: object) -> list[str] | None:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        return None
    return [printable(each, longest=_LONGEST) for each in value[:_MOST]]


def _by_name(read: _Read) -> _Read:
    # A record of values of one kind by names. Values of another kind are dropped.
    def read_all(value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        found = ((key, read(each)) for key, each in islice(value.items(), _MOST))
        return {str(_text(key)): each for key, each in found if each is not None}

    return read_all


def _record(kinds: Mapping[str, _Read], needed: Collection[str] = ()) -> _Read:
    # A record with these keys; None if a needed key has no value of its kind. Other keys stay.
    def read(value: object) -> dict[str, Any] | None:
        if not isinstance(value, dict):
            return None
        found = {key: kinds[key](each) if key in kinds else each for key, each in value.items()}
        found = {key: each for key, each in found.items() if each is not None or value[key] is None}
        return None if any(found.get(key) is None for key in needed) else found

    return read


def _list(read: _Read, *, keeps_end: bool = False) -> _Read:
    def read_all(value: object) -> list[Any] | None:
        if not isinstance(value, list):
            return None
        part = value[-_MOST:] if keeps_end else value[:_MOST]
        return [found for each in part if (found := read(each)) is not None]

    return read_all


_MEMBER: dict[str, _Read] = {
    **dict.fromkeys(("name", "state", "slow"), _text),
    **dict.fromkeys(("step", "heard_s"), _number),
    "is_behind": _flag,
    **dict.fromkeys(("refused", "phase", "detail"), _text),
    **dict.fromkeys(("weight", "tokens_per_s", "loss", "since", "version"), _number),
    **dict.fromkeys(("sent_bytes", "received_bytes", "total_steps"), _number),
}
_UNKNOWN = {"step": 0, "heard_s": 0.0, "slow": "", "is_behind": False}


def _member(value: object) -> dict[str, Any] | None:
    # Another version of a hub may lack some of it.
    found = _record(_MEMBER, ("name", "state"))(value)
    if found is None:
        return None
    return {**found, **{k: v for k, v in _UNKNOWN.items() if found.get(k) is None}}


_OPEN: dict[str, _Read] = {
    **dict.fromkeys(("due_in_s", "round"), _number),
    **dict.fromkeys(("waits_for", "contributed"), _texts),
    "missing": _by_name(_text),
}
_EVENT: dict[str, _Read] = {
    "number": _number,
    "at": _time,
    **dict.fromkeys(("kind", "what", "member"), _text),
}
_COMMIT: dict[str, _Read] = {
    **dict.fromkeys(("round", "size_bytes", "seconds"), _number),
    "at": _time,
    "weights": _by_name(_number),
}
_ANSWER: dict[str, _Read] = {
    **dict.fromkeys(("round", "fragments", "age_s"), _number),
    "is_over": _flag,
    "at": _time,
    "heavy": _record({"name": _text, "share": _number}),
    "members": _list(_member),
    "open": _list(_record(_OPEN, ("round",))),
    "events": _list(_record(_EVENT, ("number", "at", "kind", "what")), keeps_end=True),
    "commits": _list(_record(_COMMIT, tuple(_COMMIT))),
}
_LAST: dict[str, _Read] = {"outer_step": _number, "weights": _by_name(_number)}
_OUTER: dict[str, _Read] = {
    **dict.fromkeys(("outer_step", "exposed_s", "hidden_s", "hidden_share"), _number),
    **dict.fromkeys(("sent_bytes", "received_bytes", "bytes_per_s"), _number),
    "meeting": _record(_ANSWER),
    "last_outer_step": _record(_LAST),
}


def known_outer(found: object) -> dict[str, Any] | None:
    """The part `outer` of a status record; None if the record has none."""
    outer: dict[str, Any] | None = _record(_OUTER)(found)
    return outer


def aged(outer: dict[str, Any] | None, now_s: float) -> dict[str, Any] | None:
    """The part `outer` as of now: what its record says of clusters in a bucket is of then."""
    meeting = (outer or {}).get("meeting")
    if not meeting or (at := meeting.get("at")) is None:
        return outer
    age_s = max(0.0, now_s - at)
    members = [{**m, "heard_s": m["heard_s"] + age_s} for m in meeting.get("members") or []]
    return {**(outer or {}), "meeting": {**meeting, "members": members, "age_s": age_s}}


def known_answer(found: Mapping[str, Any]) -> dict[str, Any]:
    """A hub's answer to `/v1/status`: only values of the kinds and sizes that isles uses."""
    answer: dict[str, Any] = _record(_ANSWER)(dict(found))
    return answer


def ask_status(line: JoinLine, timeout_s: float) -> dict[str, Any]:
    """Ask a hub for its status, as `known_answer` has it.

    Raises:
        CommunicationError, PreflightError: as `ask_hub`; or the answer cannot be read.
    """
    answer = known_answer(ask_hub(line, "/v1/status", timeout_s))
    if missing := [key for key in _ANSWER_AT_LEAST if answer.get(key) is None]:
        raise PreflightError(
            f"the hub's answer cannot be read: it has no {' and no '.join(missing)}",
            where=line.address,
            fix="install the same version of isles there and here",
        )
    return answer
