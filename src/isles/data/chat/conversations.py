"""Conversations as text by a chat template, and which of its characters the assistant says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isles.data.chat.messages import Chat, Message
from isles.data.chat.template import (
    Span,
    Template,
    TemplateRefusal,
    common_length,
    no_template,
    unused_mark,
)
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HOW_TO_MARK = (
    "put {% generation %} and {% endgeneration %} around what the assistant says, in a copy of the "
    "template that tokenizer.chat_template names"
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Args:
        text: special tokens are written out in it.
        spans: the characters that are trained on, in order.
        ends_open: whether an end-of-text token must follow, because the template ends the
            assistant's last turn with no special token at which generation could stop.
    """

    text: str
    spans: Sequence[Span]
    ends_open: bool


class ChatTemplate:
    """A tokenizer's chat template, and where it lets the assistant speak.

    Templates with `{% generation %}` say themselves what the assistant says. For others it is found
    out: the conversation is rendered again with a mark in the place of each answer, so that what
    stands around the answers is known to the letter. An answer begins behind the template's
    generation prompt and ends with the special token that ends the turn. Where the two texts do
    not fit, each turn is found by rendering the conversation up to it.

    Args:
        tokenizer: with a chat template.
        name: of the template, for messages.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, name)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the rendered text depends on."""
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        return {"template": self._tokenizer.chat_template, "special_tokens": special}

    def render(self, chat: Chat, where: str, *, train_on: str) -> Rendered:
        """A conversation as text, with the spans that are trained on.

        Args:
            chat: the conversation.
            where: the row, for messages.
            train_on: `assistant`, `last` or `all`, as in the run file.

        Raises:
            DataError: the template does not take these messages, or it cannot be told what the
                assistant says.
        """
        try:
            if self._template.is_marked:
                text, marked = self._template.render_marked(chat)
            else:
                text, marked = self._template.render(chat.messages, chat), []
            if train_on == "all":
                spans = [(0, len(text))]
            elif self._template.is_marked:
                spans = self._marked_spans(chat, text, marked, train_on)
            else:
                spans = self._wanted(chat, self._turns(chat, text, where), train_on)
        except TemplateRefusal as error:
            raise DataError(
                f"the chat template does not take this conversation: {error}",
                where=where,
                fix="repair or remove that row, or use another template (tokenizer.chat_template) "
                f"than {self._template.name}",
            ) from error
        says_last = chat.messages[-1]["role"] == "assistant"
        return Rendered(text, spans, ends_open=says_last and not self._is_closed(text))

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages as text, behind which the assistant's answer begins.

        Raises:
            DataError: the template does not take them.
        """
        try:
            return self._template.render(messages, Chat(messages), prompts=True)
        except TemplateRefusal as error:
            raise DataError(
                f"the chat template does not take this conversation: {error}",
                where=self._template.name,
                fix="use another template (tokenizer.chat_template)",
            ) from error

    def _is_closed(self, text: str) -> bool:
        if self._template.has_end:
            return True
        return text.rstrip().endswith(self._template.special_tokens)

    def _wanted(self, chat: Chat, turns: Sequence[Span], train_on: str) -> list[Span]:
        """The turns that are trained on, of those of the assistant in order."""
        numbers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [turn for i, turn in zip(numbers, turns, strict=True) if i >= chat.first]
        return wanted[-1:] if train_on == "last" else wanted

    def _marked_spans(
        self, chat: Chat, text: str, marked: Sequence[Span], train_on: str
    ) -> list[Span]:
        num_answers = sum(message["role"] == "assistant" for message in chat.messages)
        if len(marked) == num_answers:
            return self._wanted(chat, marked, train_on)
        if train_on != "last" and chat.first == 0:
            return list(marked)
        # Several marks in a turn: those count that end behind what comes before the wanted turns.
        first = chat.first
        if train_on == "last":
            first = max(i for i, m in enumerate(chat.messages) if m["role"] == "assistant")
        before = self._template.render(chat.messages[:first], chat) if first else ""
        start = common_length(before, text)
        return [(max(a, start), b) for a, b in marked if b > start]

    def _turns(self, chat: Chat, text: str, where: str) -> list[Span]:
        """What the assistant says in each of its messages, with what ends the turn."""
        found = self._turns_by_marks(chat, text)
        if found is None:
            found = self._turns_by_prefixes(chat, text, where)
        numbers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        for number, (start, end) in zip(numbers, found, strict=True):
            said = text[start:end].strip()
            if not said[: len(said) - self._template.length_of_end(said)]:
                raise TemplateRefusal(f"it leaves out what the assistant says in message {number}")
        return found

    def _turns_by_marks(self, chat: Chat, text: str) -> list[Span] | None:
        """None where marked answers change what stands around them."""
        if self._template.header is None:
            return None
        mark = unused_mark(text)
        numbers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        marked = list(chat.messages)
        for i in numbers:
            marked[i] = {"role": "assistant", "content": mark}
        try:
            parts = self._template.render(marked, chat).split(mark)
        except TemplateRefusal:
            return None  # such as results of tools that nobody has called
        if len(parts) != len(numbers) + 1:
            return None
        return self._fit(parts, [str(chat.messages[i]["content"]) for i in numbers], text)

    def _fit(self, parts: Sequence[str], said: Sequence[str], text: str) -> list[Span] | None:
        """Lay what stands around the answers over the text.

        Args:
            parts: before the first answer, between answers, and behind the last.
            said: the answers as the data has them.
            text: the whole conversation.
        """
        spans: list[Span] = []
        position = start = 0
        for number, part in enumerate(parts[:-1]):
            cut = self._after_header(part)
            if cut is None:
                return None
            frame = part[:cut]
            if number == 0:
                if not text.startswith(frame):
                    return None
                start = len(frame)
                continue
            # An answer that holds what stands around answers would be cut in its middle.
            if not frame.strip() or frame in said[number - 1]:
                return None
            position = text.find(frame, start)
            if position < 0:
                return None
            spans.append((start, position + self._template.length_of_end(frame)))
            start = position + len(frame)
        frame = parts[-1]
        if not text.endswith(frame) or len(text) - len(frame) < start:
            return None
        spans.append((start, len(text) - len(frame) + self._template.length_of_end(frame)))
        return spans

    def _after_header(self, part: str) -> int | None:
        """Where the answer begins in what stands before its mark."""
        assert self._template.header is not None
        if not self._template.header:
            return len(part.rstrip())
        found = part.rfind(self._template.header)
        return found + len(self._template.header) if found >= 0 else None

    def _turns_by_prefixes(self, chat: Chat, text: str, where: str) -> list[Span]:
        spans: list[Span] = []
        for number, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            start = self._start_of(number, chat, text)
            so_far = self._template.render(chat.messages[: number + 1], chat)
            if start is None or not text.startswith(so_far):
                raise DataError(
                    f"the chat template {self._template.name} renders message {number} otherwise "
                    "when others follow it, so that what the assistant says there cannot be told",
                    where=where,
                    fix=_HOW_TO_MARK,
                )
            end = len(so_far.rstrip()) if self._template.has_end else len(so_far)
            spans.append((start, end))
        return spans

    def _start_of(self, number: int, chat: Chat, text: str) -> int | None:
        """Where an answer begins, by the messages before it."""
        if number == 0:
            return None
        before = chat.messages[:number]
        prompted = self._template.render(before, chat, prompts=True)
        if text.startswith(prompted):
            return len(prompted)
        # Generation may be prompted with more than answers begin with, such as a thought.
        headed = self._template.render(before, chat) + (self._template.header or "")
        return len(headed) if text.startswith(headed) else None


def chat_prompt(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """The text that the model is to continue to answer a message of the user.

    Raises:
        DataError: the tokenizer has no chat template, or it does not take the message.
    """
    if tokenizer.chat_template is None:
        raise no_template()
    template = ChatTemplate(tokenizer, "of the tokenizer")
    return template.prompt([{"role": "user", "content": message}])
