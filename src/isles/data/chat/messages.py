"""Messages with roles, from the forms that occur in data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

from isles.config.sections.model import OWN_VARIABLES
from isles.data.chat.fields import TemplateRefusal
from isles.data.sources.rows import (
    EMPTY,
    Chat,
    FieldError,
    Message,
    Row,
    checked_text,
    from_json_text,
    show,
    wrong_type,
)
from isles.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")

_CALLS = ("function_call", "tool_call", "tool-call")
"""Roles of messages whose content is a call of the assistant as JSON."""

_SAME_ROLE = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    **dict.fromkeys(_CALLS, "assistant"),
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "tool-response": "tool",
}

_FORM = 'write each message as {"role": "user", "content": "TEXT"}, answers with "assistant"'
_ARGUMENTS = ("arguments", "parameters")
_MASK = "mask"
_VARIABLES = "chat_template_kwargs"
_NOT_ARGUMENTS = frozenset(("id", "type", "index", "function", "name"))
ROLE_NAMES = ("role", "from")
_CONTENT_NAMES = ("content", "value")
_MASKED = ("masked",)
_ROW_NAMES = (*_MASKED, "train", "training", "trainable", "weight")
"""The names that also exclude a row. A row's `loss` is often the loss of another model."""
_TRAIN_NAMES = (*_ROW_NAMES, "train_on", "train_on_turn", "loss", "loss_mask")
"""Fields of OpenAI and of other trainers that exclude a message from training: `_MASKED` with 1 or
true, the others with 0 or false."""
_NUMBERS = {"0": 0, "0.0": 0, "false": 0, "1": 1, "1.0": 1, "true": 1}


def read_messages(
    value: object,
    name: str,
    where: str,
    keys: Mapping[str, str] | None = None,
    *,
    ignored: frozenset[str] = frozenset(),
    unread: set[str] | None = None,
) -> list[Message]:
    """A list of messages, with the roles and keys that chat templates know.

    A message is {role, content}, or {from, value} with the roles human and gpt, or as `keys` has
    it. Content may be text or a list of parts of the type text; the result of a tool may be any
    value. The whole list may be JSON written as text. Arguments of calls stay as the data has them,
    an object or JSON text, for the template to choose. DataError: something is missing or of the
    wrong type.

    Args:
        ignored: names of fields to omit. `content` is omitted only from messages with calls.
        unread: this function adds the names of fields that it drops.
    """
    fix = f"repair that row. If no row has a list, set type: text with text_column {name}"
    value = from_json_text(value, f"column {name!r}", where, fix)
    if isinstance(value, Mapping) and all(isinstance(v, list) for v in value.values()):
        # The datasets library keeps a list of messages as lists.
        cells = zip(*value.values(), strict=False)
        value = [dict(zip(value, row, strict=False)) for row in cells]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise wrong_type(value, f"column {name!r}", "a list of messages", where)
    if not value:
        raise DataError(
            f"column {name!r} does not contain a message", where=where, fix="remove that row"
        )
    lost: set[str] = set() if unread is None else unread
    if ignored:
        value = [_without(message, ignored, lost, "messages") for message in value]
    messages = [
        _read_message(message, f"{name}[{index}]", where, keys or {}, ignored, lost)
        for index, message in enumerate(value)
    ]
    for one in messages if ignored else ():
        for key in ignored & one.keys() - {"role", "content"}:
            del one[key]  # such as tool_calls that were in function_call
            lost.add(f"messages.{key}")
        if "content" in ignored and "tool_calls" in one:
            one["content"] = ""
            lost.add("messages.content")
    return messages


def listed_messages(value: object, keys: Mapping[str, str], where: str) -> object:
    """The messages of a cell that lists them as JSON text, as CSV files do; other cells unchanged.

    DataError: a message has a field twice.

    Args:
        keys: the names of role and content in the data, if they are not the known names.
    """
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    roles = (keys["role"],) if "role" in keys else ROLE_NAMES
    contents = (keys["content"],) if "content" in keys else _CONTENT_NAMES
    others = {*contents, "tool_calls", "function_call"}
    for one in found:
        if not isinstance(one, Mapping) or not others & one.keys():
            return value
        if not any(isinstance(one.get(role), str) for role in roles):
            return value
    return from_json_text(value, "the cell", where) if found else value


def _without(value: Any, ignored: frozenset[str], dropped: set[str], name: str) -> Any:
    # A message, or a part of a call, without these fields.
    if not isinstance(value, Mapping):
        return value
    kept = {k: cell for k, cell in value.items() if k not in ignored or k == "content"}
    dropped |= {f"{name}.{key}" for key in value.keys() - kept.keys()}
    return kept


def _read_message(
    value: object,
    at: str,
    where: str,
    keys: Mapping[str, str],
    ignored: frozenset[str],
    unread: set[str],
) -> Message:
    if not isinstance(value, Mapping):
        raise wrong_type(value, at, "a message with role and content", where, _FORM)
    role_key = _key(value, keys.get("role"), ROLE_NAMES, "role", at, where)
    role = _role(value[role_key], f"{at}.{role_key}", where)
    # Columnar files fill what a message lacks with null.
    message = {k: v for k, v in value.items() if v is not None and k != role_key}
    message["role"] = role
    calls, calls_key = message.pop("tool_calls", None), "tool_calls"
    if not calls and role == "assistant" and message.get("function_call"):
        calls, calls_key = [message.pop("function_call")], "function_call"
    content_key = keys.get("content") or next((k for k in _CONTENT_NAMES if k in value), None)
    if value[role_key] in _CALLS and not calls:
        content_key = _key(value, keys.get("content"), _CONTENT_NAMES, "content", at, where)
        calls, calls_key = message.pop(content_key, None), content_key
        message["content"] = ""
    elif not (role == "assistant" and calls) or message.get(content_key) is not None:
        content_key = _key(value, keys.get("content"), _CONTENT_NAMES, "content", at, where)
        message.pop(content_key, None)
        content_at = f"{at}.{content_key}"
        others = [key for key, cell in message.items() if key != "role" and cell not in EMPTY]
        if value[content_key] is None and others:
            raise DataError(
                f"{content_at} is null, and the message also has {', '.join(others)}",
                where=where,
                fix=f"write the text of the message into {content_key}, or set "
                f"data.sources.columns: {{content: {others[0]}}} if all messages have it there, or "
                "remove that row",
            )
        message["content"] = _content(value[content_key], content_at, where, role, unread)
    else:
        message["content"] = ""
    if calls:
        read = _tool_calls(calls, f"{at}.{calls_key}", where)
        if ignored:
            read = [_call_without(call, ignored - {"name"}, unread) for call in read]
        for number, call in enumerate(read):
            _take_arguments(call, f"{at}.{calls_key}[{number}]", where)
        message["tool_calls"] = read
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
    raise FieldError(
        f"{at} lacks {named or what}; it has: {', '.join(map(str, message)) or 'nothing'}",
        where=where,
        fix="set",
        columns={what: near[0] if near else "ITS_NAME"},
        rest="" if near else f"; or {_FORM}",
    )


def _role(value: object, at: str, where: str) -> str:
    if not isinstance(value, str):
        raise wrong_type(value, at, "the name of a role", where)
    role = _SAME_ROLE.get(value, value)
    if role not in ROLES:
        # Only a typing error: another role would change what is trained.
        near = get_close_matches(value.lower(), [*ROLES, *_SAME_ROLE], n=1, cutoff=0.8)
        raise DataError(
            f"{at} is {value[:40]!r}, which is not the name of a role",
            where=where,
            fix=f"write {near[0]}" if near else f"use one of: {', '.join(ROLES)}",
        )
    return role


def _content(value: object, at: str, where: str, role: str, unread: set[str]) -> Any:
    if isinstance(value, str | bytes) or value is None:
        return checked_text(value, at, where)
    if role == "tool":
        parts = value if isinstance(value, Sequence) else ()
        if not parts or not all(isinstance(p, Mapping) and p.get("type") == "text" for p in parts):
            return value  # a result as the tool gave it
    if not isinstance(value, Sequence):
        return checked_text(value, at, where)
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, Mapping) and part.get("type") == "text":
            texts.append(checked_text(part.get("text"), f"{at}[{index}].text", where))
            others = (key for key, cell in part.items() if key not in ("type", "text"))
            unread |= {f"messages.content.{key}" for key in others if part[key] is not None}
        else:
            kind = f"a part of type {part.get('type')!r}" if isinstance(part, Mapping) else ""
            raise DataError(
                f"{at}[{index}] holds {kind or show(part)}, but only parts of type 'text' can be "
                "trained on",
                where=where,
                fix="repair or remove that row",
            )
    return "".join(texts)


def _tool_calls(value: object, at: str, where: str) -> list[dict[str, Any]]:
    value = from_json_text(value, at, where)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise wrong_type(value, at, "a list of tool calls", where)
    calls: list[dict[str, Any]] = []
    for index, given in enumerate(value):
        found = from_json_text(given, f"{at}[{index}]", where)
        if not isinstance(found, Mapping):
            raise wrong_type(found, f"{at}[{index}]", "a tool call", where)
        call = {key: cell for key, cell in found.items() if cell is not None}
        function = call.get("function")
        if isinstance(function, Mapping):
            del call["function"]
        else:
            # The function itself, as in old data: templates expect it within a call.
            outer = {key: call.pop(key) for key in ("id", "type", "index") if key in call}
            call, function = {"type": "function", **outer}, call
        function = {key: cell for key, cell in function.items() if cell is not None}
        if not isinstance(function.get("name"), str):
            raise wrong_type(function.get("name"), f"{at}[{index}]", "a call with a name", where)
        calls.append({**call, "function": function})
    return calls


def _call_without(call: Mapping[str, Any], ignored: frozenset[str], dropped: set[str]) -> Any:
    at = "messages.tool_calls"
    function = _without(call["function"], ignored, dropped, f"{at}.function")
    return {**_without(call, ignored - {"function"}, dropped, at), "function": function}


def _take_arguments(call: dict[str, Any], at: str, where: str) -> None:
    # Put the arguments of a call into its function, whatever their name. Blank text is none.
    function = call["function"]
    places = [(part, key) for part in (function, call) for key in _ARGUMENTS if key in part]
    if places:
        part, key = places[0]
        arguments = part.pop(key)
        if not isinstance(arguments, str) or arguments.strip():
            function["arguments"] = arguments
            return
    others = {*call, *function} - _NOT_ARGUMENTS
    names = sorted(key for key in others if {**call, **function}[key] not in EMPTY)
    if names:
        raise FieldError(
            f"{at} calls {function['name']} without arguments, but has {', '.join(names)}",
            where=where,
            fix="write the arguments of calls into arguments, or train without "
            f"{'this field' if len(names) == 1 else 'these fields'}:",
            ignore=names,
        )


def take_masks(
    messages: Sequence[Message], name: str, where: str, train_key: str | None = None
) -> frozenset[int]:
    """The numbers of the assistant's messages that a field excludes from training.

    The field leaves the messages: `train_key`, or else any of the known names. DataError: its value
    is neither 0 nor 1, or fields contradict one another.
    """
    masked = set()
    for index, message in enumerate(messages):
        if len(message) == 2:
            continue  # most have a role and content alone
        if message["role"] == "assistant" and _MASK in message and not train_key:
            raise FieldError(
                f"{name}[{index}].{_MASK} is {show(message[_MASK])}, which may include or exclude "
                "the message",
                where=where,
                fix=f"set data.sources.columns: {{train: {_MASK}}} if 0 excludes it from training, "
                "write train: false instead, or train these messages like all others:",
                ignore=[_MASK],
            )
        given, is_trained = dict[str, int](), set[bool]()
        for key in (train_key,) if train_key else _TRAIN_NAMES:
            if key not in message:
                continue
            value, speaks = message[key], message["role"] == "assistant"
            if speaks and value not in (0, 1):
                raise FieldError(
                    f"{name}[{index}].{key} is {show(value)}, not 0, 1, false or true",
                    where=where,
                    fix="write 0 or 1, or train these messages like all others:",
                    ignore=[key],
                )
            if speaks or value == (key in _MASKED):
                del message[key]
            if speaks:
                given[key] = int(value)
                is_trained.add(bool(value) != (key in _MASKED))
        if len(is_trained) > 1:
            what = " and ".join(f"{key}: {value}" for key, value in given.items())
            raise DataError(
                f"{name}[{index}] has {what}: only one of them excludes the message from training",
                where=where,
                fix="choose the field that counts, such as "
                f"data.sources.columns: {{train: {next(iter(given))}}}",
            )
        if False in is_trained:
            masked.add(index)
    return frozenset(masked)


def row_names(others: Set[str]) -> frozenset[str]:
    """The columns that exclude rows from training, without these others."""
    return frozenset(_ROW_NAMES) - others


def excludes_row(row: Row, names: Set[str]) -> str:
    """Which of these columns excludes a row from training, as a remark; "": none.

    FieldError: a value is neither 0 nor 1, or columns contradict one another.
    """
    said = dict[str, int]()
    for name in _ROW_NAMES:
        value = row.columns.get(name)
        if name not in names or value in EMPTY:
            continue
        number = _NUMBERS.get(value.strip().lower()) if isinstance(value, str) else value
        if number not in (0, 1):
            raise FieldError(
                f"column {name!r} is {show(value)}, not 0, 1, false or true",
                where=row.where,
                fix="write 0 or 1, or train these rows like all others:",
                ignore=[name],
            )
        said[name] = int(number)
    out = [name for name, number in said.items() if number == (name in _MASKED)]
    if out and len(out) < len(said):
        what = " and ".join(f"{name}: {number}" for name, number in said.items())
        raise FieldError(
            f"the row has {what}: only one of them excludes the row from training",
            where=row.where,
            fix="delete the wrong column, or train these rows like all others:",
            ignore=out,
        )
    if not out:
        return ""
    value = "1 or true" if out[0] in _MASKED else "0 or false"
    return f"{out[0]}: {value} excludes rows from training"


def read_tools(value: object, name: str, where: str) -> list[dict[str, Any]] | None:
    """The tools that a conversation may call, as the template takes them: JSON schemas."""
    value = from_json_text(value, f"column {name!r}", where) if value != "" else None
    if value is None:
        return None
    if isinstance(value, Mapping) and {"name", "function"} & value.keys():
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        value = [from_json_text(one, f"{name}[{i}]", where) for i, one in enumerate(value)]
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise wrong_type(value, f"column {name!r}", "a list of tools (JSON schemas)", where)
    return [dict(tool) for tool in value] or None


def read_variables(value: object, name: str, where: str) -> dict[str, Any]:
    """Variables of the chat template that a row has for itself, such as enable_thinking."""
    value = from_json_text(value, f"column {name!r}", where) if value not in (None, "") else {}
    if not isinstance(value, Mapping):
        raise wrong_type(value, f"column {name!r}", "variables of the chat template", where)
    for taken in OWN_VARIABLES & value.keys():
        raise DataError(
            f"column {name!r} sets {taken}, which isles gives to the template itself",
            where=where,
            fix=f"remove {taken} from it",
        )
    return {key: cell for key, cell in value.items() if cell is not None}


def check_values(chat: Chat) -> None:
    """Refuse values that JSON does not have, such as bytes or NaN. TemplateRefusal: with it."""
    parts: list[tuple[str, object, str]] = [
        (f"messages[{index}].{key}", value, key)
        for index, message in enumerate(chat.messages)
        for key, value in message.items()
        if type(value) is not str
    ]
    parts += [("tools", chat.tools, "tools"), (_VARIABLES, chat.variables, _VARIABLES)]
    for at, value, ignore in parts:
        for place, odd in _not_json(value, at):
            raise TemplateRefusal(f"{place} holds {show(odd)}, which JSON does not have", ignore)


def _not_json(value: object, at: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, cell in value.items():
            if not isinstance(key, str | int):
                yield f"{at}, as a name,", key
            yield from _not_json(cell, f"{at}.{key}")
    elif isinstance(value, list | tuple):
        for number, cell in enumerate(value):
            yield from _not_json(cell, f"{at}[{number}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield at, value
    elif not isinstance(value, str | int | None):
        yield at, value


def check_answers(
    messages: Sequence[Message],
    name: str,
    where: str,
    first: int = 0,
    masked: frozenset[int] = frozenset(),
) -> None:
    """Refuse a conversation without an assistant's message from message `first` on."""
    answers = [(i, m) for i, m in enumerate(messages) if i >= first and m["role"] == "assistant"]
    if not answers:
        roles = ", ".join(message["role"] for message in messages[first:]) or "none"
        raise DataError(
            f"column {name!r} has no assistant message to train on (roles: {roles})",
            where=where,
            fix="remove that row",
        )
    if masked.issuperset(index for index, _ in answers):
        raise DataError(
            f"column {name!r} excludes every assistant message from training",
            where=where,
            fix="remove that row",
        )
    for index, message in answers:
        if not (message["content"].strip() or message.get("tool_calls")):
            raise DataError(
                f"{name}[{index}]: the assistant's message is empty",
                where=where,
                fix="remove that row",
            )
