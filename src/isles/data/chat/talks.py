"""Rows with messages in them: conversations, instructions and preferences.

`TalkParser` has what the three have in common: a system message, tools, variables of the template,
and turns that the data excludes from training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from isles.data.chat.messages import (
    ROLE_NAMES,
    check_answers,
    excludes_row,
    listed_messages,
    read_messages,
    read_tools,
    read_variables,
    row_names,
    take_masks,
)
from isles.data.sources.names import Remark
from isles.data.sources.rows import (
    EMPTY,
    Chat,
    Continuation,
    FieldError,
    Item,
    Message,
    Pair,
    Parser,
    Row,
    checked_text,
    from_json_text,
    missing_column,
    show,
    wrong_type,
)
from isles.errors import DataError

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


class TalkParser(Parser):
    """Base of the types with messages. It reads the columns that all of these types may have.

    `columns.train` names a field of messages, not a column.
    """

    _BESIDE = ("system", "tools", "functions", "chat_template_kwargs")

    def __init__(
        self,
        columns: Mapping[str, str],
        keys: Sequence[str],
        ignored: Sequence[str],
        *,
        has_template: bool = True,
        trains_all: bool = False,
    ) -> None:
        super().__init__(columns, (*keys, *self._BESIDE), ignored)
        self._keys = {key: columns[key] for key in ("role", "content") if key in columns}
        self._train_key = columns.get("train")
        self._has_template = has_template
        self._trains_all = trains_all
        self._weights = row_names(self.wanted | self.ignored)
        self.wanted |= self._weights
        self._check_read(*ROLE_NAMES, self._keys.get("role", "role"))

    def check(self, names: Sequence[str], where: str) -> None:
        for key in ("tools", "system", "chat_template_kwargs"):
            if key in self._named:
                self._need(key, names, where)

    def read(self, row: Row) -> Item | None:
        """Parse a row as `Parser.read`; None also if a column excludes the row from training."""
        if why := excludes_row(row, self._weights):
            self.unread = {Remark(why)}
            return None
        return super().read(row)

    def _read_messages(self, value: object, name: str, row: Row) -> list[Message]:
        keys, where = self._keys, row.where
        return read_messages(value, name, where, keys, ignored=self.ignored, unread=self.unread)

    def _cell(self, key: str, row: Row) -> Any:
        # A text that is a JSON list of messages counts as that list.
        return listed_messages(row.columns.get(self._names[key]), self._keys, row.where)

    def _beside(self, row: Row) -> dict[str, Any]:
        # What else a `Chat` has of this row.
        columns, where = row.columns, row.where
        tools_name, functions = self._names["tools"], columns.get("functions")
        tools = read_tools(columns.get(tools_name), tools_name, where)
        has_functions = functions not in EMPTY and "functions" in self.wanted
        if has_functions:
            if tools is None:  # as before there were tools
                old = read_tools(functions, "functions", where) or []
                tools = [{"type": "function", "function": function} for function in old]
            else:
                self.unread.add("functions")
        name = self._names["chat_template_kwargs"]
        variables = read_variables(columns.get(name), name, where)
        if not self._has_template and (tools or variables):
            name = tools_name if tools else name
            raise _needs_template(f"column {name!r} is for a chat template", where, ignore=name)
        return {"tools": tools, "variables": variables}

    def _chat(self, messages: list[Message], name: str, row: Row, first: int = 0) -> Chat:
        # The whole conversation, without training on the turns that the data excludes.
        masked = take_masks(messages, name, row.where, self._train_key)
        if masked and self._trains_all:
            raise DataError(
                f"message {min(masked)} is excluded from training, but train_on: all trains every "
                "token",
                where=row.where,
                fix="set data.sources.train_on: assistant",
            )
        if not self._trains_all:
            check_answers(messages, name, row.where, first, masked)
        return Chat(messages, first=first, masked=masked, **self._beside(row))

    def _after(self, asked: list[Message], answer: list[Message], key: str, row: Row) -> int:
        # How many messages of the answer repeat the prompt: all of it, or none.
        if asked and len(answer) >= len(asked) and all(map(_is_same, asked, answer)):
            return len(asked)
        if asked and answer and asked[-1]["role"] == answer[0]["role"] == "user":
            names = self._names["prompt"], self._names[key]
            what = (
                f"{names[0]} ends with a question, and {names[1]} begins with a question: "
                f"{asked[-1]['content'][:40]!r} and {answer[0]['content'][:40]!r}"
            )
            fix = "repair or remove that row"
            if key == "completion" or "prompt" in self._named:
                raise DataError(what, where=row.where, fix=fix)
            fix += ", or train on the conversations without the prompt:"
            raise FieldError(what, where=row.where, fix=fix, ignore=["prompt"])
        return 0

    def _with_system(self, messages: list[Message], system: str) -> list[Message]:
        if not system.strip():
            return messages
        if messages and messages[0]["role"] == "system":
            if messages[0]["content"] != system:
                self.unread.add(self._names["system"])
            return messages
        return [{"role": "system", "content": system}, *messages]


class ChatParser(TalkParser):
    """Conversations: a column of messages, and perhaps columns of tools and a system message.

    Default column: `messages`, then `conversations` or `conversation`.
    """

    def __init__(
        self, columns: Mapping[str, str], ignored: Sequence[str], *, trains_all: bool
    ) -> None:
        super().__init__(columns, ("messages",), ignored, trains_all=trains_all)
        named = columns.get("messages")
        self._choice = (named,) if named else ("messages", "conversations", "conversation")
        self.wanted |= {*self._choice}

    def check(self, names: Sequence[str], where: str) -> None:
        self._column(names, where)
        super().check(names, where)

    def parse(self, row: Row) -> Chat:
        name = self._column(list(row.columns), row.where)
        others = (other for other in self._choice if other != name)
        self.unread |= {other for other in others if row.columns.get(other) not in EMPTY}
        messages = self._read_messages(row.columns[name], name, row)
        messages = self._with_system(messages, self._text("system", row, may_miss=True))
        return self._chat(messages, name, row)

    def _column(self, names: Sequence[str], where: str) -> str:
        for name in self._choice:
            if name in names and name not in self.ignored:
                return name
        self._check_read(*self._choice)
        raise self.with_fix(missing_column(self._choice[0], names, where, key="messages"))


class InstructParser(TalkParser):
    """Instruction (with input) and output, or prompt and completion, and perhaps a system message.

    Prompt and completion may be lists of messages, also as JSON text. `history` holds the
    turns before, as pairs of a question and its answer, which is trained too.
    """

    _FORMS = (("instruction", "output"), ("prompt", "completion"))

    def __init__(
        self,
        columns: Mapping[str, str],
        ignored: Sequence[str],
        *,
        has_template: bool,
        trains_all: bool,
    ) -> None:
        keys = ("instruction", "input", "output", "prompt", "completion", "history")
        how = {"has_template": has_template, "trains_all": trains_all}
        super().__init__(columns, keys, ignored, **how)

    def check(self, names: Sequence[str], where: str) -> None:
        for key in self._form(names, where):
            self._need(key, names, where)
        for key in ("input", "history"):
            if key in self._named:
                self._need(key, names, where)
        super().check(names, where)

    def parse(self, row: Row) -> Chat | Continuation:
        question, answer = self._form(list(row.columns), row.where)
        self._note_others((question, answer), row)
        system = self._text("system", row, may_miss=True)
        history = self._history(row)
        is_prompt = question == "prompt"
        if is_prompt:
            cells = asked, answered = self._cell("prompt", row), self._cell("completion", row)
            lists = isinstance(answered, list) and any(isinstance(m, Mapping) for m in answered)
            if lists or not isinstance(asked, str):
                return self._messages(*cells, row, system, history)
        asked, answered = self._text(question, row), self._text(answer, row)
        given = "" if is_prompt else self._text("input", row, may_miss=True)
        if self._has_template:
            content = f"{asked}\n\n{given}" if given.strip() else asked
            messages = self._with_system([], system)
            first = len(messages) + (0 if history else 1)
            messages += [*history, {"role": "user", "content": content}, _assistant(answered)]
            return self._chat(messages, self._names[answer], row, first)
        self._beside(row)
        if is_prompt:
            return Continuation(f"{system}\n\n{asked}" if system.strip() else asked, answered)
        parts = [system.strip()] if system.strip() else []
        parts.append(f"### Instruction:\n{asked.strip()}")
        parts += [f"### Input:\n{given.strip()}"] if given.strip() else []
        return Continuation("\n\n".join([*parts, "### Response:\n"]), answered)

    def _form(self, names: Sequence[str], where: str) -> tuple[str, str]:
        # The form of the columns, from the run file's names and the existing columns.
        for form in self._FORMS:
            if self._named & {*form, *(("input",) if form[0] == "instruction" else ())}:
                return form
        there = [form for form in self._FORMS if self._names[form[0]] in names]
        if len(there) == 2:
            there = [form for form in there if form[1] in names]
            if len(there) == 2:
                raise DataError(
                    "the columns fit both instruction and output, and prompt and completion",
                    where=where,
                    fix="choose one of them with data.sources.columns, such as {prompt: prompt} or "
                    "{instruction: instruction}",
                )
        if not there:
            raise self.with_fix(missing_column("instruction", names, where, key="instruction"))
        return there[0]

    def _note_others(self, form: tuple[str, str], row: Row) -> None:
        # Columns of the other form are not read.
        keys = {"instruction", "input", "output", "prompt", "completion"} - {*form}
        if form[0] == "instruction":
            keys.remove("input")
        names = {self._names[key] for key in keys} - {self._names[key] for key in form}
        self.unread |= {name for name in names if row.columns.get(name) not in EMPTY}

    def _history(self, row: Row) -> list[Message]:
        name = self._names["history"]
        turns = row.columns.get(name)
        if turns in EMPTY:
            return []
        turns = from_json_text(turns, f"column {name!r}", row.where)
        if not isinstance(turns, Sequence):
            raise wrong_type(turns, f"column {name!r}", "pairs of question and answer", row.where)
        if turns and not self._has_template:
            raise _needs_template(f"column {name!r} holds earlier turns", row.where)
        messages: list[Message] = []
        for index, turn in enumerate(turns):
            at = f"{name}[{index}]"
            if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
                raise wrong_type(turn, at, "a pair of question and answer", row.where)
            question, answer = (checked_text(text, at, row.where) for text in turn)
            if not answer.strip():
                what = f"{at}: the answer is empty"
                raise DataError(what, where=row.where, fix="remove that row")
            messages += [{"role": "user", "content": question}, _assistant(answer)]
        return messages

    def _messages(
        self, prompt: object, value: object, row: Row, system: str, history: list[Message]
    ) -> Chat:
        name = self._names["completion" if isinstance(prompt, str) else "prompt"]
        if not self._has_template:
            raise _needs_template(f"column {name!r} holds messages", row.where)
        if isinstance(prompt, str):
            asked: list[Message] = [{"role": "user", "content": self._text("prompt", row)}]
        else:
            asked = self._read_messages(prompt, name, row)
        asked = self._with_system(asked, system)
        start = 1 if asked and asked[0]["role"] == "system" else 0
        messages = [*asked[:start], *history, *asked[start:]]
        first = start if history else len(messages)
        answer = self._need("completion", list(row.columns), row.where)
        if isinstance(value, str):
            messages.append(_assistant(checked_text(value, f"column {answer!r}", row.where)))
        elif isinstance(value, Mapping | Sequence):
            value = [value] if isinstance(value, Mapping) else value
            read = self._read_messages(value, answer, row)
            messages += read[self._after(asked[start:], read, "completion", row) :]
        else:
            raise wrong_type(value, f"column {answer!r}", "text or messages", row.where)
        return self._chat(messages, answer, row, first)


class PreferenceParser(TalkParser):
    """A prompt with a chosen and a rejected answer.

    The answers may be text or lists of messages, also as JSON text. Conversations with the same
    beginning may replace prompt and answer. Text with turns of `Human:` and `Assistant:` is read as
    a conversation.
    """

    def __init__(
        self, columns: Mapping[str, str], ignored: Sequence[str], *, has_template: bool
    ) -> None:
        keys = ("prompt", "chosen", "rejected")
        super().__init__(columns, keys, ignored, has_template=has_template)

    def check(self, names: Sequence[str], where: str) -> None:
        for key in ("chosen", "rejected", *sorted(self._named & {"prompt"})):
            self._need(key, names, where)
        super().check(names, where)

    def parse(self, row: Row) -> Pair:
        self.check(list(row.columns), row.where)
        system = self._text("system", row, may_miss=True)
        prompt = self._cell("prompt", row)
        answers = [self._answer(key, row) for key in ("chosen", "rejected")]
        if not self._has_template:
            if not isinstance(prompt, str) or not all(isinstance(a, str) for a in answers):
                raise _needs_template("the answers are conversations", row.where)
            self._beside(row)
            asked = self._text("prompt", row)
            before = f"{system}\n\n{asked}" if system.strip() else asked
            self._check_different(answers[0], answers[1], row)
            return Pair(*(Continuation(before, str(answer)) for answer in answers))
        messages = self._before(prompt, system, row)
        one = self._conversation(messages, answers[0], "chosen", row)
        other = self._conversation(messages, answers[1], "rejected", row)
        self._check_different(one, other, row)
        first = self._num_common(one, other, row)
        chosen, rejected = self._names["chosen"], self._names["rejected"]
        return Pair(self._chat(one, chosen, row, first), self._chat(other, rejected, row, first))

    def _answer(self, key: str, row: Row) -> str | list[Message]:
        name = self._names[key]
        value = self._cell(key, row)
        if isinstance(value, str):
            text = self._text(key, row)
            return _turns(text, row.where) or text
        if isinstance(value, Mapping) and not all(isinstance(v, list) for v in value.values()):
            value = [value]  # one message
        return self._read_messages(value, name, row)

    def _before(self, prompt: object, system: str, row: Row) -> list[Message]:
        # The messages before the answers.
        messages: list[Message] = []
        if isinstance(prompt, str):
            text = self._text("prompt", row)
            messages = _turns(text, row.where) or [{"role": "user", "content": text}]
        elif prompt is not None:
            messages = self._read_messages(prompt, self._names["prompt"], row)
        return self._with_system(messages, system)

    def _conversation(
        self, before: list[Message], answer: str | list[Message], key: str, row: Row
    ) -> list[Message]:
        # The messages before, and the answer, which may begin with these messages itself.
        asked = [message for message in before if message["role"] != "system"]
        if isinstance(answer, str):
            if not asked:
                name = self._names["prompt"]
                raise missing_column(name, list(row.columns), row.where, key="prompt")
            return [*before, _assistant(answer)]
        system = before[: len(before) - len(asked)]
        if answer[0]["role"] == "system":
            if system and system[0]["content"] != answer[0]["content"]:
                self.unread.add(self._names["system"])
            system, answer = answer[:1], answer[1:]
        repeated = self._after(asked, answer, key, row)
        return [*system, *([] if repeated else asked), *answer]

    def _num_common(self, one: list[Message], other: list[Message], row: Row) -> int:
        # How many messages the two have in common: the prompt, and perhaps some answers.
        name, other_name = self._names["chosen"], self._names["rejected"]
        for index, (left, right) in enumerate(zip(one, other, strict=False)):
            roles = {left["role"], right["role"]}
            if left == right or ("assistant" not in roles and _is_same(left, right)):
                continue
            if roles == {"assistant"}:
                return index
            raise DataError(
                f"{name} and {other_name} answer different prompts: {name}[{index}] is "
                f"{show(left['content'])} ({left['role']}), {other_name}[{index}] is "
                f"{show(right['content'])} ({right['role']})",
                where=row.where,
                fix="repair or remove that row",
            )
        return min(len(one), len(other))

    def _check_different(self, chosen: object, rejected: object, row: Row) -> None:
        if chosen == rejected:
            names = f"{self._names['chosen']} and {self._names['rejected']}"
            raise DataError(f"{names} are the same", where=row.where, fix="remove that row")


def _needs_template(what: str, where: str, *, ignore: str = "") -> DataError:
    what += ", and the tokenizer has no chat template"
    if ignore:  # chatml does not write it
        fix = "set tokenizer.chat_template to a Jinja file that uses it, or train without it:"
        return FieldError(what, where=where, fix=fix, ignore=[ignore], id="data.template")
    fix = "set tokenizer.chat_template: chatml, or to a Jinja file"
    return DataError(what, where=where, fix=fix, id="data.template")


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _is_same(one: Message, other: Message) -> bool:
    # Equal role, calls and content, except for white space at the ends of the content.
    cells = (one["content"], other["content"])
    said = [cell.strip() if isinstance(cell, str) else cell for cell in cells]
    calls = one.get("tool_calls") == other.get("tool_calls")
    return one["role"] == other["role"] and said[0] == said[1] and calls


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
