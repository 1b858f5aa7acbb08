"""Find the characters of each answer in the text that a chat template makes of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from isles.data.chat.dialogue import Dialogue, Span, SpecialTokens, common_length
from isles.data.chat.fields import THOUGHTS, TemplateRefusal, named_call, unused_mark
from isles.data.sources.rows import Chat
from isles.errors import DataError

_SHOWN = 40


class AnswerFinder:
    """Finds answers by rendering the conversation again with marks in their place.

    Args:
        render: makes the text of messages that the template can read; with `prompts`, the
            generation prompt follows.
        text_of: makes the text of any conversation.
        name: the name of the template, for error messages.
    """

    def __init__(
        self,
        render: Callable[..., str],
        text_of: Callable[[Chat], str],
        special: SpecialTokens,
        name: str,
    ) -> None:
        self._render, self._text_of = render, text_of
        self._special, self._name = special, name

    def choose_marked(
        self,
        chat: Chat,
        text: str,
        marked: Sequence[Span],
        answers: Sequence[int],
        wanted: Sequence[int],
    ) -> list[Span]:
        """Those spans that the template marks itself which belong to the wanted answers."""
        if len(marked) == len(answers):
            return [span for i, span in zip(answers, marked, strict=True) if i in wanted]
        if wanted == answers:
            return list(marked)
        # Several marks in a turn: those count that lie between what comes before a wanted turn and
        # what comes after it.
        chosen = list[Span]()
        for number in wanted:
            start = self._length_of_first(number, chat, text)
            is_last = number + 1 == len(chat.messages)
            end = len(text) if is_last else self._length_of_first(number + 1, chat, text)
            chosen += [(max(a, start), min(b, end)) for a, b in marked if a < end and b > start]
        return chosen

    def _length_of_first(self, count: int, chat: Chat, text: str) -> int:
        before = self._render(chat.messages[:count]) if count else ""
        return common_length(before, text)

    def find(self, number: int, chat: Chat, text: str, dialogue: Dialogue, where: str) -> Span:
        """The characters of the answer in this message, with the end of its turn.

        Raises:
            TemplateRefusal: the template does not write the answer, or not in one piece.
            DataError: the answer cannot be found in the text.
        """
        if chat.messages[number].get("tool_calls"):
            with suppress(_NoMark):
                return self._of_calls(number, chat, text, dialogue, where)
        mark = unused_mark(text)
        replaced = list(chat.messages)
        content = replaced[number].get("content")
        own: Any = [{"type": "text", "text": mark}] if isinstance(content, list) else mark
        replaced[number] = {"role": "assistant", "content": own}
        try:
            if dialogue.header is None:
                raise TemplateRefusal("no plain dialogue")
            before, _, behind = self._render(replaced).partition(mark)
            fits = text.endswith(behind)
            end = len(text) - len(behind) + dialogue.length_of_end(behind)
        except TemplateRefusal:  # such as of a tool's result, where nobody has called the tool
            before = self._render(chat.messages[:number], prompts=True) if number else ""
            so_far = self._render(chat.messages[: number + 1])
            fits = bool(before) and text.startswith(so_far)
            end = len(so_far.rstrip()) if dialogue.has_end else len(so_far)
        start = self._start(number, chat, before, dialogue)
        before = before[:start]
        if not (fits and text.startswith(before) and start <= end):
            header = dialogue.last_header(before)
            length = self._special.common_length(before, text)
            if fits and header is not None and header[0] < length:
                raise self._other_mode(number, chat, before[length:], text[length:])
            raise self._otherwise(number, where)
        answer = text[start:end].strip()
        if not answer[: len(answer) - dialogue.length_of_end(answer)]:
            raise TemplateRefusal(
                f"it does not write the content of message {number} (assistant)", ""
            )
        return start, end

    def _of_calls(self, number: int, chat: Chat, text: str, dialogue: Dialogue, where: str) -> Span:
        # The calls themselves are marked, not replaced by an answer: what follows them depends on
        # them, and a template may write their results into the same turn.
        mark = unused_mark(text)
        message = chat.messages[number]
        calls = list(message["tool_calls"])
        for place in {0, len(calls) - 1}:
            call, function = calls[place], dict(calls[place]["function"])
            if "arguments" in function:
                function["arguments"] = {mark: mark}
                calls[place] = {**call, "function": function}
            else:
                calls[place] = named_call(function, call, mark)
        # A thought may have a header of its own.
        kept = {key: value for key, value in message.items() if key not in THOUGHTS}
        messages = [*chat.messages[:number], {"content": "", **kept, "tool_calls": calls}]
        try:
            so_far = self._text_of(replace(chat, messages=messages))
            rest = chat.messages[number + 1 :]
            whole = self._text_of(replace(chat, messages=[*messages, *rest])) if rest else so_far
            before = whole[: max(0, whole.find(mark))]
            if dialogue.last_header(before) is None:
                start = self._behind_last_message(number, chat, before)
            else:
                start = self._start(number, chat, before, dialogue)
        except TemplateRefusal:
            raise _NoMark from None
        # A result may name its call once more.
        own, behind = (_behind(one, mark, so_far.count(mark)) for one in (so_far, whole))
        own = own[: self._special.common_length(own, behind)]
        closing = dialogue.closing.rstrip()
        if self._special.are_in(closing) and closing in own:
            own = own[: own.index(closing) + len(closing)]
        own = own.rstrip() if dialogue.has_end else own
        end = len(text) - len(behind) + len(own)
        fits = 0 <= start < end and text.startswith(before[:start])
        if not (fits and text.endswith(behind[len(own) :])):
            raise self._otherwise(number, where)
        said = message.get("content")
        said = said.strip() if isinstance(said, str) else ""
        if said and said not in text[start:end] and said in text[end:]:
            what = f"it writes the content of message {number} (assistant) apart from its calls"
            raise TemplateRefusal(what, "content")
        return start, end

    def _behind_last_message(self, number: int, chat: Chat, before: str) -> int:
        # Where the answer begins if answers have no header; -1: unknown.
        prompt = self._render(chat.messages[:number], prompts=True) if number else ""
        if before.startswith(prompt):
            return len(prompt)
        # The text before the last message may change with later ones, such as where the tools are.
        said = str(chat.messages[number - 1].get("content") or "").strip()
        end = prompt[max(0, prompt.rfind(said)) :]
        found = before.rfind(end)
        return found + len(end) if said and end.startswith(said) and found >= 0 else -1

    def _start(self, number: int, chat: Chat, before: str, dialogue: Dialogue) -> int:
        # Where the answer begins in the text before what the assistant says.
        found = dialogue.last_header(before)
        if found is None:
            return len(before.rstrip() if dialogue.header == "" else before)
        at, start = found
        if start == len(before) or not number:
            return start
        # Behind the header is more, such as a thought; or it is the header of an earlier answer, as
        # where a template writes an answer to a tool's result without one.
        said = str(chat.messages[number - 1].get("content") or "").strip()
        if said and before.find(said, 0, at) >= 0 and before.find(said, at) < 0:
            return start
        with suppress(TemplateRefusal):
            if self._special.common_length(self._render(chat.messages[:number]), before) > at:
                prompt = self._render(chat.messages[:number], prompts=True)
                return self._special.common_length(prompt, before)
        return start

    def _otherwise(self, number: int, where: str) -> DataError:
        return DataError(
            f"the chat template {self._name} renders message {number} otherwise when others "
            "follow it, so that what the assistant says there cannot be told",
            where=where,
            fix="put {% generation %} and {% endgeneration %} around what the assistant says, "
            "in a copy of the template that tokenizer.chat_template names",
        )

    def _other_mode(self, number: int, chat: Chat, prompt: str, own: str) -> TemplateRefusal:
        # The prompt of a mode may write more than this answer begins with, such as no thought
        # before an answer that has one.
        names = [name for name in THOUGHTS if chat.messages[number].get(name)]
        return TemplateRefusal(
            f"its generation prompt ends with {prompt!r}, and message {number} (assistant) begins "
            f"with {own[:_SHOWN]!r}",
            names[0] if names else "",
        )


class _NoMark(Exception):
    """The template does not take the calls with marks in them."""


def _behind(text: str, mark: str, count: int) -> str:
    # The text behind the first so many marks; "" if there are fewer.
    return text.split(mark, count)[-1] if text.count(mark) >= count else ""
