"""Messages with roles out of the forms that data has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from isles.data.sources.rows import Message, checked_text, from_json_text, show, wrong_type
from isles.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")

_SAME_ROLE = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}

_ROLE_NAMES = ("role", "from")
_CONTENT_NAMES = ("content", "value")


def read_messages(
    value: object, name: str, where: str, keys: Mapping[str, str] | None = None
) -> list[Message]:
    """A list of messages, with the roles and keys that chat templates know.

    A message is {role, content}, or {from, value} with the roles human and gpt, or as `keys` has
    it. Content may be text or a list of parts of the type text. The whole list may be JSON written
    as text. DataError: something is missing or of the wrong type.
    """
    value = from_json_text(value, f"column {name!r}", where)
    if isinstance(value, Mapping) and all(isinstance(v, list) for v in value.values()):
        # The datasets library keeps a list of messages as lists.
        cells = zip(*value.values(), strict=False)
        value = [dict(zip(value, row, strict=False)) for row in cells]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong_type(value, f"column {name!r}", "a list of messages", where)
    if not value:
        raise DataError(f"column {name!r} holds no message", where=where, fix="remove that row")
    return [
        _read_message(message, f"{name}[{index}]", where, keys or {})
        for index, message in enumerate(value)
    ]


def _read_message(value: object, at: str, where: str, keys: Mapping[str, str]) -> Message:
    if not isinstance(value, Mapping):
        raise wrong_type(value, at, "a message with role and content", where)
    role_key = _key(value, keys.get("role"), _ROLE_NAMES, "role", at, where)
    calls = value.get("tool_calls")
    # Columnar files fill what a message lacks with null.
    message = {k: v for k, v in value.items() if v is not None and k != role_key}
    message["role"] = _role(value[role_key], f"{at}.{role_key}", where)
    speaks = not (message["role"] == "assistant" and calls)
    content_key = keys.get("content") or next((k for k in _CONTENT_NAMES if k in value), None)
    if speaks or (content_key is not None and value.get(content_key) is not None):
        content_key = _key(value, keys.get("content"), _CONTENT_NAMES, "content", at, where)
        message.pop(content_key, None)
        message["content"] = _content(value[content_key], f"{at}.{content_key}", where)
    else:
        message["content"] = ""
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{at}.tool_calls", where)
    return message


def _key(
    message: Mapping[str, Any],
    named: str | None,
    known: Sequence[str],
    what: str,
    at: str,
    where: str,
) -> str:
    found = [key for key in ((named,) if named else known) if key in message]
    if found:
        return found[0]
    near = get_close_matches(named or what, list(message), n=1)
    raise DataError(
        f"{at} has no {named or what}; it has: {', '.join(map(str, message)) or 'nothing'}",
        where=where,
        fix=f"set data.sources.columns: {{{what}: {near[0] if near else 'its name in the data'}}}",
    )


def _role(value: object, at: str, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, at, "the name of a role", where)
    role = _SAME_ROLE.get(value, value)
    if role not in ROLES:
        near = get_close_matches(value.lower(), [*ROLES, *_SAME_ROLE], n=1)
        raise DataError(
            f"{at} is {value[:40]!r}, which is no role",
            where=where,
            fix=f"write {near[0]}" if near else f"use one of: {', '.join(ROLES)}",
        )
    return role


def _content(value: object, at: str, where: str) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return checked_text(value, at, where)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(checked_text(part, f"{at}[{index}]", where))
        elif isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(checked_text(part.get("text"), f"{at}[{index}].text", where))
        else:
            kind = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else ""
            raise DataError(
                f"{at}[{index}] holds {kind or show(part)}, and only parts of type 'text' can be "
                "trained on",
                where=where,
                fix="repair or remove that row",
            )
    return "".join(texts)


def _tool_calls(value: object, at: str, where: str) -> list[Any]:
    # With their arguments as objects: templates write them as JSON themselves.
    value = from_json_text(value, at, where)
    if not isinstance(value, Sequence):
        raise wrong_type(value, at, "a list of tool calls", where)
    calls: list[Any] = []
    for index, call in enumerate(value):
        if not isinstance(call, Mapping):
            raise wrong_type(call, f"{at}[{index}]", "a tool call", where)
        function = call.get("function")
        if isinstance(function, Mapping):
            calls.append({**call, "function": _with_object(function)})
        else:
            calls.append(_with_object(call))
    return calls


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else the template is given the text as it is
            arguments = json.loads(arguments)
    kept = {key: value for key, value in call.items() if value is not None}
    return {**kept, "arguments": arguments} if "arguments" in call else kept


def read_tools(value: object, name: str, where: str) -> list[dict[str, Any]] | None:
    """The tools that a conversation may call, as the template takes them: JSON schemas."""
    value = from_json_text(value, f"column {name!r}", where) if value != "" else None
    if value is None:
        return None
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise wrong_type(value, f"column {name!r}", "a list of tools (JSON schemas)", where)
    # Columnar files fill what one tool lacks and others have with null.
    return [_without_null(tool) for tool in value] or None


def _without_null(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def check_answers(messages: Sequence[Message], name: str, where: str, first: int = 0) -> None:
    """Refuse a conversation in which the assistant says nothing from message `first` on."""
    answers = [(i, m) for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
    if not answers:
        roles = ", ".join(message["role"] for message in messages[first:]) or "none"
        raise DataError(
            f"column {name!r} has no message of the assistant to train on (roles: {roles})",
            where=where,
            fix="remove that row",
        )
    for index, message in answers:
        if not (message["content"].strip() or message.get("tool_calls")):
            raise DataError(
                f"{name}[{index}]: the assistant says nothing", where=where, fix="remove that row"
            )
