"""Find the form of calls that a template accepts, and the fields that the template does not write.

Both use probes: isles replaces a value by a mark, and searches the rendered text for the mark.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import product
from typing import Any, Literal, NamedTuple

from isles.data.sources.names import FINITE_JSON, OddNumber, RepeatedKey
from isles.data.sources.rows import EMPTY, Chat, Message, show
from isles.errors import DataError

FIXED_DAY = datetime(2024, 7, 26)
"""The day that templates get. The tokens of a run must not change from day to day, so this is the
default day of Llama's templates."""

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names of a thought before an answer; transformers gives a template all of them."""


class TemplateRefusal(Exception):
    """The template does not render these messages; the text is the template's message.

    Args:
        ignore: the field that `data.sources.ignore_fields` can name to train the row without it. ""
            if that would not help; None if the template itself refuses.
    """

    def __init__(self, what: str, ignore: str | None = None) -> None:
        super().__init__(what)
        self.ignore = ignore


class ArgumentsRefusal(TemplateRefusal):
    """Arguments of a call are not a JSON object, whatever the template."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template accepts calls and results of tools.

    Args:
        arguments: an object, or JSON text.
        empty: the content of a message that has only calls; "missing" omits the key.
        results: whether a result that is not text stays an object or becomes JSON text.
        fills: whether a call without arguments gets empty arguments.
    """

    arguments: Literal["object", "text"] = "object"
    empty: Literal["", "missing"] | None = ""
    results: Literal["object", "text"] = "text"
    fills: bool = False


def kind_of(chat: Chat) -> object:
    """The kinds of calls and results in a conversation. One form suits all conversations of a kind.

    Returns:
        None if the conversation has neither calls nor results.
    """
    kinds = set()
    for message in chat.messages:
        if len(message) == 2 and type(message["content"]) is str:
            continue
        if calls := message.get("tool_calls"):
            has_arguments = any("arguments" in call["function"] for call in calls)
            kinds.add((message["role"], bool(message["content"]), has_arguments))
        elif not isinstance(message["content"], str):
            kinds.add((message["role"], True, False))
    return frozenset(kinds) or None


def in_form(chat: Chat, form: CallForm) -> Chat:
    """The conversation with its calls and results in this form."""
    return replace(chat, messages=[_in_form(message, form) for message in chat.messages])


def _in_form(message: Message, form: CallForm) -> Message:
    content = message["content"]
    if not isinstance(content, str) and form.results == "text":
        message = {**message, "content": _as_text(content)}
    if not (calls := message.get("tool_calls")):
        return message
    functions = [dict(call["function"]) for call in calls]
    for function in functions:
        if form.fills:
            function.setdefault("arguments", {})
        if "arguments" in function:
            arguments = function["arguments"]
            is_text = form.arguments == "text"
            function["arguments"] = _as_text(arguments) if is_text else _as_object(function)
    changed = [{**call, "function": f} for call, f in zip(calls, functions, strict=True)]
    message = {**message, "tool_calls": changed}
    if not content:
        message["content"] = form.empty
        if form.empty == "missing":
            del message["content"]
    return message


def named_call(function: Mapping[str, Any], call: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A call with another function and name, also in an id with the name: functions.weather:0."""
    changed = {**call, "function": {**function, "name": name}}
    if _id_names(call):
        changed["id"] = call["id"].replace(call["function"]["name"], name)
    return changed


def _id_names(call: Mapping[str, Any]) -> bool:
    own = call.get("id")
    return isinstance(own, str) and call["function"]["name"] in own


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_object(function: Mapping[str, Any]) -> Any:
    given = value = function["arguments"]
    try:
        value = FINITE_JSON.decode(given) if isinstance(given, str) else given
        what = "" if isinstance(value, Mapping) else f"are {show(value)}, not a JSON object"
        if isinstance(value, str):
            what += " (JSON text inside JSON text)"
    except (RepeatedKey, OddNumber) as error:
        what = f"are {show(given)}: {error}"
    except (ValueError, RecursionError):
        what = f"are {show(given)}, which is not JSON"
    if what:
        raise ArgumentsRefusal(f"the arguments of {function['name']} {what}", _CALLS)
    return value


def find_form(chat: Chat, render: Callable[[Chat], str]) -> CallForm:
    """The first form that lets the template write the calls and results of a conversation.

    TemplateRefusal: no form works, because the template refuses it, omits a call or writes Python.

    Args:
        render: makes the text of a conversation; raises TemplateRefusal.
    """
    mark = unused_mark(str(chat.messages))
    name, key, value, at, result = (f"{mark}{part}" for part in "nkvrs")
    messages, wanted = list(chat.messages), list[tuple[str, str]]()
    for index, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            changed = []
            for number, call in enumerate(calls):
                one = f"{name}{index}q{number}q"
                function = dict(call["function"])
                wanted.append((one, f"the call of {call['function']['name']} in message {index}"))
                if "arguments" in function:
                    function["arguments"] = {f"{key}{one}": f"{value}{one}"}
                    what = f"arguments of {call['function']['name']} in message {index}"
                    wanted += [(f"{key}{one}", what), (f"{value}{one}", what)]
                changed.append(named_call(function, call, one))
            messages[index] = {**message, "tool_calls": changed}
        elif not isinstance(message["content"], str):
            messages[index] = {**message, "content": {at: f"{result}{index}q"}}
            wanted.append((f"{result}{index}q", f"the result in message {index}"))
    probe = replace(chat, messages=messages)
    refusals = list[TemplateRefusal]()
    choices = product((False, True), _FORMS, ("", None, "missing"), _FORMS)
    for fills, results, empty, arguments in choices:
        form = CallForm(arguments, empty, results, fills)  # type: ignore[arg-type]
        try:
            text = render(in_form(probe, form))
        except TemplateRefusal as error:
            refusals.append(error)
            continue
        lost = [what for part, what in wanted if part not in text]
        is_odd = f"'name': '{name}" in text or any(
            quote + part in text for part in (key, at) for quote in ("'", '\\"')
        )
        if not lost and not is_odd:
            return form
        if lost:
            refusals.append(TemplateRefusal(f"it does not write {lost[0]}", _CALLS))
        else:
            refusals.append(
                TemplateRefusal(
                    "it does not write the arguments of calls, or results, as JSON", _CALLS
                )
            )
    # What it does not write says more than an error, which may be that of another form.
    own = [error for error in refusals if error.ignore] or refusals
    raise own[0]


def fields_to_ignore(
    error: TemplateRefusal, chat: Chat, render: Callable[[Chat], object]
) -> Sequence[str]:
    """List fields to ignore, so that the template renders a conversation; () if nothing helps.

    Args:
        error: why the template refuses the conversation.
        render: renders a conversation as for training; raises TemplateRefusal or DataError.
    """
    names = list[str]()
    given = {name for message in chat.messages for name in message}
    given |= {"tools"} if chat.tools else set()
    given |= {"chat_template_kwargs"} if chat.variables else set()
    with suppress(DataError):
        while True:
            # A template that refuses in its own words may know no tools, and then no calls.
            wanted = ("tools", _CALLS) if error.ignore is None else (error.ignore,)
            more = [name for name in wanted if name in given and name not in names]
            if not more:
                break
            names.append(more[0])
            try:
                render(_without(chat, names))
            except TemplateRefusal as next_error:
                error = next_error
                continue
            return sorted(names, reverse=True)
    return ()


def _without(chat: Chat, names: Sequence[str]) -> Chat:
    # The conversation as if `data.sources.ignore_fields` named these fields.
    messages = []
    for message in chat.messages:
        kept = {k: cell for k, cell in message.items() if k not in names or k == "content"}
        if "content" in names and "tool_calls" in kept:
            kept["content"] = ""
        if message["role"] == "assistant" and not (kept["content"] or "tool_calls" in kept):
            raise TemplateRefusal("the assistant says nothing", "")
        messages.append(kept)
    tools = None if "tools" in names else chat.tools
    variables = {} if "chat_template_kwargs" in names else chat.variables
    return replace(chat, messages=messages, tools=tools, variables=variables)


_FORMS = ("object", "text")
_CALLS = "tool_calls"


class _Field(NamedTuple):
    # A value of a conversation: its place, and the name that a report gives it.
    place: tuple[Any, ...]
    name: str
    role: str
    value: Any


class FieldProbe:
    """Finds the fields of conversations that one template does not write.

    A field that was read once, in a message of the same role, is looked up in the text later; only
    if its value is not there is the conversation rendered again.
    """

    def __init__(self) -> None:
        self._read = set[tuple[str, str]]()
        self._never = set[tuple[str, str]]()
        self._missed = Counter[tuple[str, str]]()
        self._writes_thoughts: dict[str, bool] = {}

    def check(
        self,
        chat: Chat,
        text: str,
        render: Callable[[Chat], str],
        is_named: Callable[[str], bool],
        trained: Container[int] = (),
    ) -> Sequence[str]:
        """The fields of a conversation that its text does not depend on.

        TemplateRefusal: one of them is a message's content, a part of a trained answer, a call, a
        thought or the tools.

        Args:
            text: the text that the template has made of it.
            render: makes the text of a changed conversation; raises TemplateRefusal.
            is_named: whether a name is anywhere in the template.
            trained: numbers of the trained messages.
        """
        unread, doubtful, place = set[str](), list[_Field](), 0
        for index, message in enumerate(chat.messages):
            content, role = message["content"], message["role"]
            if type(content) is str and (said := content.strip()):
                found = text.find(said, place)
                if found >= 0:
                    place = found + len(said)
                if (role, _CONTENT) not in self._read or (found < 0 and said not in text):
                    doubtful.append(_Field(("messages", index, "content"), _CONTENT, role, said))
            if len(message) > 2:
                for field in _more_fields(index, message):
                    self._sort(field, text, unread, doubtful)
        if chat.tools:
            for field in _fields_of_tools(chat.tools):
                self._sort(field, text, unread, doubtful)
        if doubtful:
            unread |= self._probe(doubtful, chat, text, render, is_named, trained)
        return sorted(unread) if unread else ()

    def _sort(self, field: _Field, text: str, unread: set[str], doubtful: list[_Field]) -> None:
        key = field.role, field.name
        if key in self._never:
            unread.add(field.name)
        elif key not in self._read or (
            isinstance(field.value, str) and field.value.strip() not in text
        ):
            doubtful.append(field)

    def _probe(
        self,
        doubtful: Sequence[_Field],
        chat: Chat,
        text: str,
        render: Callable[[Chat], str],
        is_named: Callable[[str], bool],
        trained: Container[int],
    ) -> set[str]:
        mark = unused_mark(text)
        marks = [f"{mark}f{number}q" for number in range(len(doubtful))]
        pairs = list(zip(doubtful, marks, strict=True))
        together = _try(render, _replaced(chat, [(field.place, one) for field, one in pairs]))
        unread, lost = set[str](), list[_Field]()
        for field, one in pairs:
            key = field.role, field.name
            alone = together
            if alone is None and not (key in self._read and str(field.value).strip() in text):
                alone = _try(render, _replaced(chat, [(field.place, one)]))
            if alone is not None and one not in alone:
                lost.append(field)
                continue
            self._read.add(key)
            is_answer = field.name == _CONTENT and field.role == "assistant"
            if is_answer and not _is_in(field.value, text):
                if field.place[1] in trained:
                    self._judge_part(field, chat, render)
                unread.add(f"parts of {_CONTENT}")
        for field in lost:
            # Another mark may be the reason.
            if field.name in _TOLD and mark not in (
                _try(render, _replaced(chat, [(field.place, mark)])) or mark
            ):
                self._judge_lost(field, chat, render)
                unread.add(field.name)
        silent = [field for field in lost if field.name not in _TOLD]
        return unread | self._silent(silent, chat, text, render, is_named) if silent else unread

    def _silent(
        self,
        silent: Sequence[_Field],
        chat: Chat,
        text: str,
        render: Callable[[Chat], str],
        is_named: Callable[[str], bool],
    ) -> set[str]:
        # Those that are not written and decide on no other text either.
        unread = set[str]()
        if _try(render, _replaced(chat, [(f.place, None) for f in silent])) == text:
            unread |= {field.name for field in silent}
            for field in silent:
                key = field.role, field.name
                self._missed[key] += 1
                if not is_named(field.name.rpartition(".")[2]) or self._missed[key] > _MOST_TRIES:
                    self._never.add(key)
        else:
            for field in silent:
                if _try(render, _replaced(chat, [(field.place, None)])) == text:
                    unread.add(field.name)
                else:
                    self._read.add((field.role, field.name))
        return unread

    def _judge_part(self, field: _Field, chat: Chat, render: Callable[[Chat], str]) -> None:
        # Refuse, unless the template writes the whole of it in the last answer.
        asked = {"role": "user", "content": "Why?"}
        answer = {"role": "assistant", "content": field.value}
        text = _try(render, replace(chat, messages=[asked, answer], tools=None))
        if text is None or _is_in(field.value, text):
            return
        lost = Counter(_WORD.findall(field.value)) - Counter(_WORD.findall(text))
        if lost:  # else the template writes it in other characters
            raise TemplateRefusal(
                f"it does not write a part of the content of message {field.place[1]} (assistant), "
                f"such as the word {next(iter(lost))!r} of {field.value[:40]!r}",
                "",
            )

    def _judge_lost(self, field: _Field, chat: Chat, render: Callable[[Chat], str]) -> None:
        # Refuse, unless it is a thought of a template that leaves out all but the last.
        at = field.place[1]
        if field.name == _CONTENT:
            ignore = "content" if "tool_calls" in chat.messages[at] else ""
            what = f"it does not write the content of message {at} ({field.role})"
            raise TemplateRefusal(what + (", which also has a call" if ignore else ""), ignore)
        if field.name in _NAMES_OF_TOOLS:
            raise TemplateRefusal(f"it does not write the tools, such as {field.value}", "tools")
        if field.name == _NAME_OF_CALL:
            what = f"it does not write the call of {field.value} in message {at}"
            raise TemplateRefusal(what, _CALLS)
        key = field.place[2]
        if key not in self._writes_thoughts:
            mark = unused_mark("")
            asked = {"role": "user", "content": "Why?"}
            answer = {"role": "assistant", "content": "So.", key: mark}
            with suppress(TemplateRefusal):
                text = render(replace(chat, messages=[asked, answer], tools=None))
                self._writes_thoughts[key] = mark in text
        if not self._writes_thoughts.get(key):
            raise TemplateRefusal(f"it does not write the {key} of message {at}", key)


_WORD = re.compile(r"\w+")
_MOST_TRIES = 16
"""Number of rows to probe for a template's field before the field counts as unread."""

_CONTENT = "messages.content"
_NAME_OF_CALL = "messages.tool_calls.function.name"
_NAMES_OF_TOOLS = ("tools.name", "tools.function.name")
_TOLD = frozenset(
    (_CONTENT, _NAME_OF_CALL, *_NAMES_OF_TOOLS, *(f"messages.{name}" for name in THOUGHTS))
)
"""Fields that a row cannot be trained without."""


def _more_fields(index: int, message: Message) -> Iterator[_Field]:
    # Those beside role and content; of calls, those whose form was not probed.
    role = message["role"]
    for key, value in message.items():
        if key in ("role", "content") or value in EMPTY:
            continue
        if key != "tool_calls":
            yield _Field(("messages", index, key), f"messages.{key}", role, value)
            continue
        for number, call in enumerate(value):
            place = ("messages", index, key, number)
            for name, cell in call.items():
                if name not in ("function", "type") and cell not in EMPTY:
                    yield _Field((*place, name), f"messages.{key}.{name}", role, cell)
            for name, cell in call["function"].items():
                # `find_form` has looked for a name that the id repeats.
                is_known = name == "arguments" or (name == "name" and _id_names(call))
                if not is_known and cell not in EMPTY:
                    what = f"messages.{key}.function.{name}"
                    yield _Field((*place, "function", name), what, role, cell)


def _fields_of_tools(tools: Sequence[Mapping[str, Any]]) -> Iterator[_Field]:
    for number, tool in enumerate(tools):
        for name, value in tool.items():
            if name == "function" and isinstance(value, Mapping):
                for key, cell in value.items():
                    if cell not in EMPTY:
                        place = ("tools", number, name, key)
                        yield _Field(place, f"tools.function.{key}", "tools", cell)
            elif name != "type" and value not in EMPTY:
                yield _Field(("tools", number, name), f"tools.{name}", "tools", value)


def _is_in(value: str, text: str) -> bool:
    # Templates may change white space.
    return value in text or "".join(value.split()) in "".join(text.split())


def _try(render: Callable[[Chat], str], chat: Chat) -> str | None:
    # None: the template refuses.
    with suppress(TemplateRefusal):
        return render(chat)
    return None


def _replaced(chat: Chat, changes: Sequence[tuple[tuple[Any, ...], object]]) -> Chat:
    # The conversation with other values at these places; None: without them.
    parts: dict[str, Any] = {"messages": chat.messages, "tools": chat.tools}
    for (part, *rest), value in changes:
        parts[part] = _with(parts[part], rest, value)
    return replace(chat, **parts)


def _with(parent: Any, place: Sequence[Any], value: object) -> Any:
    key, *rest = place
    if not rest and value is None:
        return {name: cell for name, cell in parent.items() if name != key}
    new = _with(parent[key], rest, value) if rest else value
    if isinstance(parent, Mapping):
        return {**parent, key: new}
    return [*parent[:key], new, *parent[key + 1 :]]


def unused_mark(text: str) -> str:
    """Letters and digits that a text does not contain."""
    number = 0
    while (mark := f"Zq{number}xJ7answerK4v") in text:
        number += 1
    return mark
