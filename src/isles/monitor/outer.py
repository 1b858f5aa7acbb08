"""What a run, or its hub, reports of outer steps: only values of the kind that isles writes.

Another user, another site or another version of isles may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isles.run.state import number_of

_Kind = Callable[[object], bool]


def _is_number(value: object) -> bool:
    return number_of({"": value}, "") is not None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_record(value: object) -> bool:
    return isinstance(value, dict)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_list_of_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


_OUTER: dict[str, _Kind] = {
    **dict.fromkeys(("outer_step", "exposed_s", "hidden_s", "hidden_share"), _is_number),
    **dict.fromkeys(("sent_bytes", "received_bytes", "bytes_per_s"), _is_number),
    **dict.fromkeys(("meeting", "last_outer_step"), _is_record),
}
_LAST: dict[str, _Kind] = {"outer_step": _is_number, "weights": _is_record}
_ANSWER: dict[str, _Kind] = {
    **dict.fromkeys(("round", "fragments"), _is_number),
    **dict.fromkeys(("members", "open"), _is_list),
}
_MEMBER: dict[str, _Kind] = {
    **dict.fromkeys(("name", "state", "slow"), _is_text),
    **dict.fromkeys(("step", "heard_s"), _is_number),
    "is_behind": lambda value: isinstance(value, bool),
}
_OPEN: dict[str, _Kind] = {
    **dict.fromkeys(("due_in_s", "round"), _is_number),
    "waits_for": _is_list_of_texts,
    "missing": _is_record,
}


def known_outer(found: object) -> dict[str, Any] | None:
    """The part `outer` of a status record; None if the record has none."""
    if not isinstance(found, dict):
        return None
    outer = _kept(found, _OUTER)
    if (last := outer.get("last_outer_step")) is not None:
        last = outer["last_outer_step"] = _kept(last, _LAST)
        if (weights := last.get("weights")) is not None:
            last["weights"] = {name: count for name, count in weights.items() if _is_number(count)}
    if (meeting := outer.get("meeting")) is not None:
        outer["meeting"] = known_answer(meeting)
    return outer


def known_answer(found: Mapping[str, Any]) -> dict[str, Any]:
    """A hub's answer to `/v1/status`, or what a cluster knows of the others in a bucket."""
    answer = _kept(found, _ANSWER)
    for key, kinds in (("members", _MEMBER), ("open", _OPEN)):
        if (entries := answer.get(key)) is not None:
            records = [_kept(entry, kinds) for entry in entries if isinstance(entry, dict)]
            needed = _MEMBER if key == "members" else ("round",)
            answer[key] = [r for r in records if all(r.get(name) is not None for name in needed)]
    return answer


def _kept(record: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> dict[str, Any]:
    # Leave out each value that is neither None nor of its kind.
    return {
        key: value
        for key, value in record.items()
        if value is None or key not in kinds or kinds[key](value)
    }
