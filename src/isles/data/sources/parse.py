"""Rows by the type of the data: text, conversations, instructions, token ids, preferences.

Each parser knows the columns of its type, by the names that the run file gives them, and makes an
`Item` of a row or says what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

import numpy as np

from isles.config.sections.data import SourceConfig
from isles.data.chat.messages import check_answers, read_messages, read_tools
from isles.data.sources.rows import (
    PLAIN,
    Chat,
    Continuation,
    Ids,
    Message,
    Pair,
    Parser,
    Row,
    checked_text,
    from_json_text,
    missing_column,
    wrong_type,
)
from isles.errors import DataError

_UNTRAINED = -100  # what labels hold where nothing is trained, by torch's and transformers' custom
_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def make_parser(
    source: SourceConfig, *, has_template: bool = True, vocab_size: int | None = None
) -> Parser:
    """The parser for the rows of a source.

    Args:
        has_template: whether a chat template will render questions and answers.
        vocab_size: one more than the largest token id that may stand in the data; None: any.
    """
    columns = source.columns
    match source.type:
        case "text":
            return TextParser(source.text_column)
        case "chat":
            return ChatParser(columns, needs_answer=source.train_on != "all")
        case "instruct":
            return InstructParser(columns, has_template=has_template)
        case "tokens":
            return TokensParser(columns, vocab_size)
        case "preference":
            return PreferenceParser(columns, has_template=has_template)
        case "fake":
            raise AssertionError("a fake source has no rows")
        case _:
            assert_never(source.type)


class TextParser(Parser):
    """Plain text, or one column of text."""

    def __init__(self, column: str) -> None:
        super().__init__({"text_column": column}, ["text_column"])

    def check(self, names: Sequence[str], where: str) -> None:
        if PLAIN not in names:
            self._need("text_column", names, where)

    def parse(self, row: Row) -> str | None:
        text = row.columns.get(PLAIN)
        if text is None:
            name = self._need("text_column", list(row.columns), row.where)
            text = checked_text(
                row.columns[name],
                f"column {name!r}",
                row.where,
                "repair or remove that row, or set data.sources.text_column to a column of strings",
            )
        return text if text and not text.isspace() else None


class ChatParser(Parser):
    """Conversations: a column of messages, and perhaps columns of tools and a system message.

    Without a column that was named, `messages` is read, else `conversations` (or `conversation`).
    """

    def __init__(self, columns: Mapping[str, str], *, needs_answer: bool) -> None:
        super().__init__(columns, ("messages", "tools", "system"))
        named = columns.get("messages")
        self._choice = (named,) if named else ("messages", "conversations", "conversation")
        self._keys = {key: columns[key] for key in ("role", "content") if key in columns}
        self._needs_answer = needs_answer
        self.wanted |= {*self._choice}

    def check(self, names: Sequence[str], where: str) -> None:
        self._column(names, where)
        for key in ("tools", "system"):
            if key in self._named:
                self._need(key, names, where)

    def parse(self, row: Row) -> Chat:
        where, columns = row
        name = self._column(list(columns), where)
        messages = read_messages(columns[name], name, where, self._keys)
        system = columns.get(self._names["system"])
        if system not in (None, "") and messages[0]["role"] != "system":
            text = checked_text(system, f"column {self._names['system']!r}", where)
            messages.insert(0, {"role": "system", "content": text})
        if self._needs_answer:
            check_answers(messages, name, where)
        tools = self._names["tools"]
        return Chat(messages, read_tools(columns.get(tools), tools, where))

    def _column(self, names: Sequence[str], where: str) -> str:
        for name in self._choice:
            if name in names:
                return name
        raise missing_column(self._choice[0], names, where, key="messages")


class InstructParser(Parser):
    """instruction (with input) and output, or prompt and completion; perhaps a system message.

    A prompt may be a list of messages; then the completion may be one as well.
    """

    _FORMS = (("instruction", "output"), ("prompt", "completion"))

    def __init__(self, columns: Mapping[str, str], *, has_template: bool) -> None:
        keys = ("instruction", "input", "output", "prompt", "completion", "system")
        super().__init__(columns, keys)
        self._has_template = has_template

    def check(self, names: Sequence[str], where: str) -> None:
        for key in self._form(names, where):
            self._need(key, names, where)
        for key in ("input", "system"):
            if key in self._named:
                self._need(key, names, where)

    def parse(self, row: Row) -> Chat | Continuation:
        question, answer = self._form(list(row.columns), row.where)
        system = self._text("system", row, may_miss=True)
        is_prompt = question == "prompt"
        if is_prompt and not isinstance(row.columns[self._names["prompt"]], str):
            return self._messages(row, system)
        asked, answered = self._text(question, row), self._text(answer, row)
        given = "" if is_prompt else self._text("input", row, may_miss=True)
        if self._has_template:
            content = f"{asked}\n\n{given}" if given.strip() else asked
            messages = _with_system([{"role": "user", "content": content}], system)
            return Chat([*messages, _assistant(answered)], first=len(messages))
        if is_prompt:
            return Continuation(f"{system}\n\n{asked}" if system.strip() else asked, answered)
        parts = [system.strip()] if system.strip() else []
        parts.append(f"### Instruction:\n{asked.strip()}")
        parts += [f"### Input:\n{given.strip()}"] if given.strip() else []
        return Continuation("\n\n".join([*parts, "### Response:\n"]), answered)

    def _form(self, names: Sequence[str], where: str) -> tuple[str, str]:
        # Which of the two forms the columns have, by what was named and what is there.
        for form in self._FORMS:
            if self._named & {*form, *(("input",) if form[0] == "instruction" else ())}:
                return form
        there = [form for form in self._FORMS if self._names[form[0]] in names]
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
        name = self._names["prompt"]
        if not self._has_template:
            raise _needs_template(f"column {name!r} holds messages", row.where)
        messages = _with_system(read_messages(row.columns[name], name, row.where), system)
        first = len(messages)
        answer = self._need("completion", list(row.columns), row.where)
        value = row.columns[answer]
        if isinstance(value, str):
            messages.append(_assistant(checked_text(value, f"column {answer!r}", row.where)))
        elif isinstance(value, Mapping | Sequence):
            value = [value] if isinstance(value, Mapping) else value
            messages += read_messages(value, answer, row.where)
        else:
            raise wrong_type(value, f"column {answer!r}", "text or messages", row.where)
        check_answers(messages, answer, row.where, first)
        return Chat(messages, first=first)


class PreferenceParser(Parser):
    """A prompt with a chosen and a rejected answer.

    The answers may be text or lists of messages; conversations that begin alike may stand in for
    prompt and answer; text with turns of `Human:` and `Assistant:` is read as a conversation.
    """

    def __init__(self, columns: Mapping[str, str], *, has_template: bool) -> None:
        super().__init__(columns, ("prompt", "chosen", "rejected", "system"))
        self._keys = {key: columns[key] for key in ("role", "content") if key in columns}
        self._has_template = has_template

    def check(self, names: Sequence[str], where: str) -> None:
        for key in ("chosen", "rejected", *sorted(self._named & {"prompt", "system"})):
            self._need(key, names, where)

    def parse(self, row: Row) -> Pair:
        self.check(list(row.columns), row.where)
        system = self._text("system", row, may_miss=True)
        prompt = row.columns.get(self._names["prompt"])
        answers = [self._answer(key, row) for key in ("chosen", "rejected")]
        if not self._has_template:
            if not isinstance(prompt, str) or not all(isinstance(a, str) for a in answers):
                raise _needs_template("the answers are conversations", row.where)
            asked = self._text("prompt", row)
            before = f"{system}\n\n{asked}" if system.strip() else asked
            self._check_different(answers[0], answers[1], row)
            return Pair(*(Continuation(before, str(answer)) for answer in answers))
        messages = self._before(prompt, system, row)
        one, other = (self._conversation(messages, answer, row) for answer in answers)
        self._check_different(one, other, row)
        first = 0  # messages that both have in common
        while first < min(len(one), len(other)) and one[first] == other[first]:
            first += 1
        for key, conversation in (("chosen", one), ("rejected", other)):
            check_answers(conversation, self._names[key], row.where, first)
        return Pair(Chat(one, first=first), Chat(other, first=first))

    def _answer(self, key: str, row: Row) -> str | list[Message]:
        name = self._names[key]
        value = row.columns[name]
        if isinstance(value, str):
            text = self._text(key, row)
            return _turns(text, row.where) or text
        if isinstance(value, Mapping) and not all(isinstance(v, list) for v in value.values()):
            value = [value]  # one message
        return read_messages(value, name, row.where, self._keys)

    def _before(self, prompt: object, system: str, row: Row) -> list[Message]:
        # The messages before the answers.
        messages: list[Message] = []
        if isinstance(prompt, str):
            text = self._text("prompt", row)
            messages = _turns(text, row.where) or [{"role": "user", "content": text}]
        elif prompt is not None:
            messages = read_messages(prompt, self._names["prompt"], row.where, self._keys)
        return _with_system(messages, system)

    def _conversation(
        self, before: list[Message], answer: str | list[Message], row: Row
    ) -> list[Message]:
        # The messages before, and the answer, which may begin with these messages itself.
        asked = [message for message in before if message["role"] != "system"]
        if isinstance(answer, str):
            if not asked:
                name = self._names["prompt"]
                raise missing_column(name, list(row.columns), row.where, key="prompt")
            return [*before, _assistant(answer)]
        if answer[0]["role"] == "system":
            return answer
        system = before[: len(before) - len(asked)]
        return [*system, *answer] if answer[: len(asked)] == asked else [*before, *answer]

    def _check_different(self, chosen: object, rejected: object, row: Row) -> None:
        if chosen == rejected:
            names = f"{self._names['chosen']} and {self._names['rejected']}"
            raise DataError(f"{names} are the same", where=row.where, fix="remove that row")


class TokensParser(Parser):
    """Token ids, with labels (-100: not trained) or an attention mask (0: padding), if any."""

    def __init__(self, columns: Mapping[str, str], vocab_size: int | None) -> None:
        super().__init__(columns, ("input_ids", "labels", "attention_mask"))
        self._vocab_size = vocab_size

    def check(self, names: Sequence[str], where: str) -> None:
        for key in ("input_ids", *sorted(self._named)):
            self._need(key, names, where)

    def parse(self, row: Row) -> Ids:
        where, columns = row
        self.check(list(columns), where)
        ids_name, labels_name, mask_name = self._names.values()
        ids = _integers(columns[ids_name], ids_name, where)
        trained = np.ones(len(ids), dtype=np.bool_)
        if columns.get(labels_name) is not None:
            labels = _integers(columns[labels_name], labels_name, where, len(ids))
            trained = self._trained(ids, labels, where)
        if columns.get(mask_name) is not None:
            mask = _integers(columns[mask_name], mask_name, where, len(ids))
            kept = _kept(mask, mask_name, where)
            ids, trained = ids[kept], trained[kept]
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if wrong.size:
            raise DataError(
                f"{ids_name} holds {ids[wrong[0]]}, and the tokenizer knows 0 to {limit - 1}",
                where=where,
                fix="name the tokenizer that the data was made with in tokenizer.name_or_path",
            )
        if not trained[1:].any():
            what = "tokens of which none is trained: the first has nothing before it"
            raise DataError(f"{len(ids)} {what}", where=where, fix="remove that row")
        return Ids(ids.tolist(), trained.tolist())

    def _trained(self, ids: Any, labels: Any, where: str) -> Any:
        ids_name, labels_name, _ = self._names.values()
        wrong = np.flatnonzero((labels != _UNTRAINED) & (labels != ids))
        if wrong.size:
            at = int(wrong[0])
            raise DataError(
                f"{labels_name}[{at}] is {labels[at]}, and {ids_name}[{at}] is {ids[at]}",
                where=where,
                fix=f"each label is the id at its own place, or {_UNTRAINED} where nothing is "
                "trained; they are shifted by one in training",
            )
        return labels != _UNTRAINED


def _kept(mask: Any, name: str, where: str) -> slice:
    kept = np.flatnonzero(mask)
    if not (kept.size and len(kept) == np.ptp(kept) + 1 and set(mask.tolist()) <= {0, 1}):
        raise DataError(
            f"{name} is not a run of 1 with 0 before and behind it",
            where=where,
            fix=f"it marks padding alone; what is not trained has the label {_UNTRAINED}",
        )
    return slice(int(kept[0]), int(kept[-1]) + 1)


def _integers(value: object, name: str, where: str, length: int | None = None) -> Any:
    # A list of whole numbers, perhaps as JSON text, as int64; `length`: of the token ids.
    value = from_json_text(value, f"column {name!r}", where)
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise wrong_type(value, f"column {name!r}", "a list of token ids", where)
    if not value:
        raise DataError(f"column {name!r} is empty", where=where, fix="remove that row")
    for index, number in enumerate(value):
        if type(number) is not int:
            raise wrong_type(number, f"{name}[{index}]", "a token id", where)
        if not -(2**31) <= number < 2**31:
            what = f"{name}[{index}] is {number}, no token id"
            raise DataError(what, where=where, fix="repair or remove that row")
    if length not in (None, len(value)):
        what = f"{name} has {len(value)} numbers, and there are {length} token ids"
        raise DataError(what, where=where, fix="repair or remove that row")
    return np.array(value, dtype=np.int64)


def _needs_template(what: str, where: str) -> DataError:
    return DataError(
        f"{what}, and the tokenizer has no chat template",
        where=where,
        fix="set tokenizer.chat_template: chatml, or to a Jinja file",
        id="data.template",
    )


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _with_system(messages: list[Message], system: str) -> list[Message]:
    if system.strip() and (not messages or messages[0]["role"] != "system"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _turns(text: str, where: str) -> list[Message] | None:
    # The messages of a text with `Human:` and `Assistant:`; None for other text.
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
    if messages[-1] == _assistant(""):
        messages.pop()  # a prompt that ends where the answer begins
    return messages
