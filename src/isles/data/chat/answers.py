"""Rows of questions with an answer, or with a preferred and a rejected one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from isles.data.chat.messages import (
    Chat,
    Continuation,
    Message,
    Pair,
    check_answers,
    read_messages,
)
from isles.data.sources.rows import Row, checked_text, missing_column, show
from isles.errors import DataError

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


class _Named:
    """Columns by the names that the run file uses, whatever the data calls them."""

    def __init__(self, columns: Mapping[str, str], keys: Sequence[str]) -> None:
        self._names = {key: columns.get(key, key) for key in keys}
        self.wanted = frozenset(self._names.values())

    def name(self, key: str) -> str:
        """What the data calls it."""
        return self._names[key]

    def need(self, key: str, names: Sequence[str], where: str) -> str:
        """The same, if it is there.

        Raises:
            DataError: it is not.
        """
        name = self._names[key]
        if name not in names:
            raise missing_column(name, names, where, key=key)
        return name

    def text(self, key: str, row: Row, *, may_miss: bool = False) -> str:
        """The text of a column; empty where it is missing or null and may be.

        Raises:
            DataError: it is not there, no text, or blank.
        """
        value = row.columns.get(self._names[key])
        if may_miss and value is None:
            return ""
        name = self.need(key, list(row.columns), row.where)
        text = checked_text(value, f"column {name!r}", row.where)
        if not may_miss and not text.strip():
            raise DataError(f"column {name!r} is empty", where=row.where, fix="remove that row")
        return text


class InstructParser:
    """instruction (with input) and output, or prompt and completion; perhaps a system message.

    A prompt may be a list of messages; then the completion may be one as well.

    Args:
        columns: how the data names them.
        has_template: whether a chat template renders them; otherwise plain_prompt does.
    """

    _FORMS = (("instruction", "output"), ("prompt", "completion"))

    def __init__(self, columns: Mapping[str, str], *, has_template: bool) -> None:
        keys = ("instruction", "input", "output", "prompt", "completion", "system")
        self._columns = _Named(columns, keys)
        self._named = set(columns)
        self._has_template = has_template
        self.wanted = self._columns.wanted

    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file without a question and an answer."""
        for key in self._form(names, where):
            self._columns.need(key, names, where)
        for key in ("input", "system"):
            if key in self._named:
                self._columns.need(key, names, where)

    def parse(self, row: Row) -> Chat | Continuation:
        """One question with its answer."""
        names = list(row.columns)
        question, answer = self._form(names, row.where)
        system = self._columns.text("system", row, may_miss=True)
        if question == "prompt" and not isinstance(row.columns[self._columns.name("prompt")], str):
            return self._messages(row, system)
        asked, said = self._columns.text(question, row), self._columns.text(answer, row)
        given = self._columns.text("input", row, may_miss=True) if question != "prompt" else ""
        if self._has_template:
            content = f"{asked}\n\n{given}" if given.strip() else asked
            return dialogue(system, content, said)
        if question == "prompt":
            return Continuation(f"{system}\n\n{asked}" if system.strip() else asked, said)
        return Continuation(plain_prompt(system, asked, given), said)

    def _form(self, names: Sequence[str], where: str) -> tuple[str, str]:
        """Which of the two forms the columns have, by what was named and what is there."""
        for form in self._FORMS:
            if self._named & {*form, *(("input",) if form[0] == "instruction" else ())}:
                return form
        there = [form for form in self._FORMS if self._columns.name(form[0]) in names]
        if len(there) == 2:
            there = [form for form in there if form[1] in names]
            if len(there) == 2:
                raise DataError(
                    "there are columns for both instruction and output, and prompt and completion",
                    where=where,
                    fix="say which to read: data.sources.columns: {prompt: prompt}, or "
                    "{instruction: instruction}",
                )
        if not there:
            raise missing_column("instruction", names, where, key="instruction")
        return there[0]

    def _messages(self, row: Row, system: str) -> Chat:
        name = self._columns.name("prompt")
        if not self._has_template:
            raise DataError(
                f"column {name!r} holds messages, and the tokenizer has no chat template",
                where=row.where,
                fix="set tokenizer.chat_template: chatml, or to a Jinja file",
                id="data.template",
            )
        messages = read_messages(row.columns[name], name, row.where)
        if system.strip() and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        first = len(messages)
        answer = self._columns.need("completion", list(row.columns), row.where)
        messages += _answer(row.columns[answer], answer, row.where)
        check_answers(messages, answer, row.where, first)
        return Chat(messages, first=first)


class PreferenceParser:
    """A prompt with a chosen and a rejected answer.

    The answers may be text or lists of messages; conversations that begin alike may stand in for
    prompt and answer; text with turns of `Human:` and `Assistant:` is read as a conversation.

    Args:
        columns: how the data names them.
        has_template: whether a chat template renders them.
    """

    def __init__(self, columns: Mapping[str, str], *, has_template: bool) -> None:
        self._columns = _Named(columns, ("prompt", "chosen", "rejected", "system"))
        self._keys = {key: columns[key] for key in ("role", "content") if key in columns}
        self._named = set(columns) & {"prompt", "system"}
        self._has_template = has_template
        self.wanted = self._columns.wanted

    def check(self, names: Sequence[str], where: str) -> None:
        """Refuse a file without the two answers."""
        for key in ("chosen", "rejected", *sorted(self._named)):
            self._columns.need(key, names, where)

    def parse(self, row: Row) -> Pair:
        """One pair."""
        names = list(row.columns)
        self.check(names, row.where)
        system = self._columns.text("system", row, may_miss=True)
        prompt = row.columns.get(self._columns.name("prompt"))
        answers = [self._said(key, row) for key in ("chosen", "rejected")]
        if not self._has_template:
            if isinstance(prompt, str) and all(isinstance(said, str) for said in answers):
                asked = self._columns.text("prompt", row)
                before = f"{system}\n\n{asked}" if system.strip() else asked
                self._check_different(answers[0], answers[1], row)
                return Pair(*(Continuation(before, str(said)) for said in answers))
            raise DataError(
                "the answers are conversations, and the tokenizer has no chat template",
                where=row.where,
                fix="set tokenizer.chat_template: chatml, or to a Jinja file",
                id="data.template",
            )
        before_messages = self._before(prompt, system, row)
        one, other = (self._conversation(before_messages, said, row) for said in answers)
        self._check_different(one, other, row)
        first = _shared(one, other)
        for key, messages in (("chosen", one), ("rejected", other)):
            check_answers(messages, self._columns.name(key), row.where, first)
        return Pair(Chat(one, first=first), Chat(other, first=first))

    def _said(self, key: str, row: Row) -> str | list[Message]:
        name = self._columns.name(key)
        value = row.columns[name]
        if isinstance(value, str):
            text = self._columns.text(key, row)
            return _turns(text, row.where) or text
        if isinstance(value, Mapping) and not all(isinstance(v, list) for v in value.values()):
            value = [value]  # one message
        return read_messages(value, name, row.where, self._keys)

    def _before(self, prompt: object, system: str, row: Row) -> list[Message]:
        """The messages before the answers."""
        name = self._columns.name("prompt")
        messages: list[Message] = []
        if isinstance(prompt, str):
            text = self._columns.text("prompt", row)
            messages = _turns(text, row.where) or [{"role": "user", "content": text}]
        elif prompt is not None:
            messages = read_messages(prompt, name, row.where, self._keys)
        if system.strip() and (not messages or messages[0]["role"] != "system"):
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _conversation(
        self, before: list[Message], said: str | list[Message], row: Row
    ) -> list[Message]:
        """What is said before, and the answer; which may have the former in it already."""
        asked = [message for message in before if message["role"] != "system"]
        if isinstance(said, str):
            if not asked:
                name = self._columns.name("prompt")
                raise missing_column(name, list(row.columns), row.where, key="prompt")
            return [*before, {"role": "assistant", "content": said}]
        if said[0]["role"] == "system":
            return said
        system = before[: len(before) - len(asked)]
        return [*system, *said] if said[: len(asked)] == asked else [*before, *said]

    def _check_different(self, chosen: object, rejected: object, row: Row) -> None:
        if chosen == rejected:
            names = f"{self._columns.name('chosen')} and {self._columns.name('rejected')}"
            raise DataError(f"{names} are the same", where=row.where, fix="remove that row")


def plain_prompt(system: str, instruction: str, given: str) -> str:
    """An instruction as text, for a tokenizer that has no chat template."""
    parts = [system.strip(), f"### Instruction:\n{instruction.strip()}"]
    parts += [f"### Input:\n{given.strip()}"] if given.strip() else []
    return "\n\n".join([part for part in parts if part] + ["### Response:\n"])


def dialogue(system: str, asked: str, said: str) -> Chat:
    """A question and its answer as messages."""
    messages: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return Chat(messages, first=len(messages) - 1)


def _answer(value: object, name: str, where: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": checked_text(value, f"column {name!r}", where)}]
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence):
        raise DataError(
            f"column {name!r} holds {show(value)}, neither text nor messages",
            where=where,
            fix="repair or remove that row",
        )
    return read_messages(value, name, where)


def _turns(text: str, where: str) -> list[Message] | None:
    """The messages of a text with `Human:` and `Assistant:`; None for other text."""
    found = list(_TURN.finditer(text))
    if not found or text[: found[0].start()].strip() or found[0].group(1) != "Human":
        return None
    ends = [*(turn.start() for turn in found[1:]), len(text)]
    messages: list[Message] = [
        {
            "role": "user" if turn.group(1) == "Human" else "assistant",
            "content": checked_text(text[turn.end() : end].strip(), "the text", where),
        }
        for turn, end in zip(found, ends, strict=True)
    ]
    if messages and messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()  # a prompt that ends where the answer begins
    return messages


def _shared(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages the two have in common before they differ."""
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
