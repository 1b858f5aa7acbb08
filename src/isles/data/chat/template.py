"""A tokenizer's chat template: choosing it, rendering with it, and finding answers in the text."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.config.files import CHATML, how_to_find
from isles.data.sources.files import decode, opened
from isles.data.sources.rows import Chat, Message
from isles.data.tokens.tokenizer import TURN_ENDS, TURN_STARTS
from isles.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Span = tuple[int, int]
"""The first character, and the one after the last."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTION = "Hello there"

# What templates may read besides messages. Some write today's date: the tokens of a run must not
# change overnight, so they are given the one that Llama's templates fall back on.
_VARIABLES = {"date_string": "26 Jul 2024"}


class TemplateRefusal(Exception):
    """The template does not render these messages; the text is its own."""


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


@contextmanager
def _refusing() -> Iterator[None]:
    # A template is a program from elsewhere, and what goes wrong in it is its own.
    try:
        yield
    except Exception as error:
        raise TemplateRefusal(str(error)[:500] or type(error).__name__) from error


class ChatTemplate:
    """The chat template of a tokenizer that has one.

    A template with `{% generation %}` marks itself what the assistant says. With any other, the
    conversation is rendered once more for each answer, with a mark in the place of the answer:
    what stands before and behind the mark is the same in both texts. An answer begins behind the
    template's generation prompt and ends with the special token that ends the turn.

    Raises:
        DataError: the tokenizer has no template, or it is no Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        try:
            self.text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise no_template() from error
        self._compiled: dict[str, Template] = {}
        _compiled(self.text, name)
        self._is_marked = _GENERATION.search(self.text) is not None
        added = tokenizer.added_tokens_decoder.values()
        tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added)}
        self._special_tokens = tuple(sorted(tokens))
        self._user_token: str | None = None
        """Special token that begins a message of the user."""
        self._header: str | None = None
        """Text before an answer, as far as the generation prompt is the same; None: the template
        renders no plain dialogue."""
        self._closing = ""
        """Text behind every answer."""
        self._last = ""
        """Text behind the last answer."""
        self._render_dialogue()

    @property
    def identity(self) -> dict[str, Any]:
        """All that the rendered text depends on."""
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        return {"template": self._tokenizer.chat_template, "special_tokens": special}

    @property
    def stop_token(self) -> str | None:
        """The special token that ends the assistant's turn; None where the template has none."""
        return self._leading(self._last)

    def render(self, chat: Chat, where: str, *, train_on: str) -> Rendered:
        """A conversation as text, with the spans that are trained on.

        DataError: the template does not take these messages, or it cannot be told what the
        assistant says.
        """
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [number for number in answers if number >= chat.first]
        if train_on == "last":
            wanted = wanted[-1:]
        try:
            chat = self._prepare(chat)
            text, marked = self._render_marked(chat.messages)
            if train_on == "all":
                spans = [(0, len(text))]
            elif self._is_marked:
                spans = self._choose_marked(chat, text, marked, answers, wanted)
            else:
                # Each is looked for, as a template that leaves one out does not fit the data.
                found = {i: self._find_answer(i, chat, text, where) for i in answers}
                spans = [found[number] for number in wanted]
        except TemplateRefusal as error:
            raise self._refused(error, where) from error
        is_closed = self._has_end or text.rstrip().endswith(self._special_tokens)
        return Rendered(
            text, spans, ends_open=chat.messages[-1]["role"] == "assistant" and not is_closed
        )

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages as text, behind which the assistant's answer begins."""
        try:
            return self._render(self._prepare(Chat(messages)).messages, prompts=True)
        except TemplateRefusal as error:
            raise self._refused(error, self._name) from error

    def _refused(self, error: TemplateRefusal, where: str) -> DataError:
        return DataError(
            f"the chat template does not take this conversation: {error}",
            where=where,
            fix="repair or remove that row, or use another template (tokenizer.chat_template) "
            f"than {self._name}",
        )

    def _prepare(self, chat: Chat) -> Chat:
        # What transformers gives to a template, once for all texts of a conversation.
        from isles.data.chat.sandbox import variables

        text = self._tokenizer.get_chat_template(tools=chat.tools)
        if text not in self._compiled:
            self._compiled[text] = _compiled(text, self._name)
        self._template = self._compiled[text]
        special = self._tokenizer.special_tokens_map
        with _refusing():
            self._given = variables(chat.messages, tools=chat.tools, **{**special, **_VARIABLES})
        return replace(chat, messages=self._given["messages"])

    def _render(self, messages: Sequence[Message], *, prompts: bool = False) -> str:
        return self._render_marked(messages, prompts=prompts)[0]

    def _render_marked(
        self, messages: Sequence[Message], *, prompts: bool = False
    ) -> tuple[str, list[Span]]:
        # Not `apply_chat_template`: it gives tokens, and those are made of many rows at once.
        from isles.data.chat.sandbox import render

        given = {**self._given, "messages": messages, "add_generation_prompt": prompts}
        with _refusing():
            text, marked = render(self._template, given, marked=self._is_marked)
        return text, [(start, end) for start, end in marked if end > start]

    def _choose_marked(
        self,
        chat: Chat,
        text: str,
        marked: Sequence[Span],
        answers: Sequence[int],
        wanted: Sequence[int],
    ) -> list[Span]:
        if len(marked) == len(answers):
            return [span for i, span in zip(answers, marked, strict=True) if i in wanted]
        if wanted == answers:
            return list(marked)
        # Several marks in a turn: those count that end behind what comes before the wanted turns.
        first = wanted[0]
        before = self._render(chat.messages[:first]) if first else ""
        start = common_length(before, text)
        return [(max(a, start), b) for a, b in marked if b > start]

    def _find_answer(self, number: int, chat: Chat, text: str, where: str) -> Span:
        mark = _unused_mark(text)
        replaced = list(chat.messages)
        replaced[number] = {"role": "assistant", "content": mark}
        try:
            if self._header is None:
                raise TemplateRefusal
            before, _, behind = self._render(replaced).partition(mark)
            fits = text.endswith(behind)
            end = len(text) - len(behind) + self._length_of_end(behind)
        except TemplateRefusal:  # such as of a tool's result, where nobody has called the tool
            before = self._render(chat.messages[:number], prompts=True) if number else ""
            so_far = self._render(chat.messages[: number + 1])
            fits = bool(before) and text.startswith(so_far)
            end = len(so_far.rstrip()) if self._has_end else len(so_far)
        # Generation may be prompted with more than answers begin with, such as a thought.
        if self._header and self._header in before:
            before = before[: before.rfind(self._header) + len(self._header)]
        elif self._header == "":
            before = before.rstrip()
        start = len(before)
        if not (fits and text.startswith(before) and start <= end):
            raise DataError(
                f"the chat template {self._name} renders message {number} otherwise when others "
                "follow it, so that what the assistant says there cannot be told",
                where=where,
                fix="put {% generation %} and {% endgeneration %} around what the assistant says, "
                "in a copy of the template that tokenizer.chat_template names",
            )
        answer = text[start:end].strip()
        if not answer[: len(answer) - self._length_of_end(answer)]:
            raise TemplateRefusal(f"it leaves out what the assistant says in message {number}")
        return start, end

    @property
    def _has_end(self) -> bool:
        # Whether a special token ends every answer.
        return self.stop_token is not None or self._has_special(self._closing)

    def _length_of_end(self, behind: str) -> int:
        # How much of what stands behind an answer belongs to it: what ends the turn. White space
        # behind a special token does not: generation has stopped by then. Where letters end a turn,
        # the model must write all of them before its text ends.
        if self._has_special(self._closing):
            end = self._closing.rstrip()
            return len(end) if behind.startswith(end) else 0
        token = self._leading(behind)
        if self.stop_token is not None and token is not None and token != self._user_token:
            # The last answer ends with another token than those before it.
            return behind.index(token) + len(token)
        return len(self._closing) if behind.startswith(self._closing) else 0

    def _render_dialogue(self) -> None:
        # Find out what the template writes around an answer in a plain dialogue.
        mark = _unused_mark("")
        asked: Message = {"role": "user", "content": _QUESTION}
        answer: Message = {"role": "assistant", "content": mark}
        try:
            self._prepare(Chat([asked, answer]))
            without = self._render([asked])
            prompted = self._render([asked], prompts=True)
            before, found, short = self._render([asked, answer]).partition(mark)
        except TemplateRefusal:
            return
        front = without.partition(_QUESTION)[0].rstrip()
        self._user_token = max(
            (token for token in self._special_tokens if front.endswith(token)),
            key=len,
            default=None,
        )
        start = self._common_tokens(prompted, without)
        if not found or not before.startswith(prompted[:start]):
            return
        prompted, before = prompted[start:], before[start:]
        self._header = prompted[: self._common_tokens(prompted, before)]
        try:
            _, _, long = self._render([asked, answer, asked]).partition(mark)
        except TemplateRefusal:
            long = short
        self._closing = short[: self._common_tokens(short, long)]
        self._last = short

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self._special_tokens)

    def _leading(self, text: str) -> str | None:
        # The special token that a text begins with.
        found = [token for token in self._special_tokens if text.lstrip().startswith(token)]
        return max(found, key=len, default=None)

    def _common_tokens(self, one: str, other: str) -> int:
        # How many characters two texts begin with in common, special tokens kept whole.
        length = common_length(one, other)
        for token in self._special_tokens:
            for text in (one, other):
                at = text.find(token, max(0, length - len(token) + 1))
                if 0 <= at < length < at + len(token):
                    return at
        return length


def no_template() -> DataError:
    """The error for messages and a tokenizer that cannot render them."""
    return DataError(
        "the tokenizer has no chat template, which makes text of messages",
        where="tokenizer.chat_template",
        fix="set tokenizer.chat_template: chatml, or to a Jinja file",
        id="data.template",
    )


def chat_prompt(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """The text that the model is to continue to answer a message of the user."""
    if tokenizer.chat_template is None:
        raise no_template()
    template = ChatTemplate(tokenizer, "of the tokenizer")
    return template.prompt([{"role": "user", "content": message}])


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template that the run file names: `chatml`, or a Jinja file.

    `chatml` works with any tokenizer: where it has no tokens of its own for the turns, they are
    written in letters, and the end-of-text token ends what the assistant says, so that generation
    stops there. DataError: there is no such file, or it is no template.
    """
    if name != CHATML:
        tokenizer.chat_template = _read_template(Path(name).expanduser())
        return
    known = tokenizer.get_added_vocab()
    has_tokens = TURN_STARTS in known and TURN_ENDS in known
    if not has_tokens and tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer has neither tokens for chatml nor an eos_token, so that generation "
            "would never stop",
            where="tokenizer.chat_template",
            fix="set eos_token in its tokenizer_config.json",
            id="data.template",
        )
    file = "chatml.jinja" if has_tokens else "chatml-text.jinja"
    entry = resources.files("isles.data") / "templates" / file
    tokenizer.chat_template = entry.read_text(encoding="utf-8")


def stop_at_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the token that ends a turn of the chat template be the tokenizer's end of text.

    A base model's tokenizer often has a template whose turns end with another token than its
    eos_token. Generation would not stop there, however well the model has learnt to end a turn.
    Where the template itself writes eos_token, nothing is changed.
    """
    template = ChatTemplate(tokenizer, "of the tokenizer")
    stop = template.stop_token
    if stop is None or stop == tokenizer.eos_token or "eos_token" in template.text:
        return
    log.info("tokenizer eos_token=%s was=%s: it ends a turn", stop, tokenizer.eos_token)
    tokenizer.eos_token = stop


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise DataError(
            f"there is no chat template {path}",
            where="tokenizer.chat_template",
            fix=f"{how_to_find(path)}; or use chatml",
            id="data.template",
        )
    from isles.data.chat.sandbox import MAX_TEMPLATE_CHARS

    with opened(path) as stream:
        block = stream.read(4 * MAX_TEMPLATE_CHARS + 1)  # a character has four bytes at most
    if len(block) > 4 * MAX_TEMPLATE_CHARS:
        raise DataError(
            f"the chat template has more than {MAX_TEMPLATE_CHARS:,} characters",
            where=str(path),
            fix="name a Jinja file, or use tokenizer.chat_template: chatml",
            id="data.template",
        )
    text = decode(block, path, 0, 1)
    if not text.strip():
        raise DataError(
            "the chat template is empty", where=str(path), fix="use chatml", id="data.template"
        )
    _compiled(text, str(path))
    return text


def _compiled(text: str, name: str) -> Template:
    from jinja2.exceptions import TemplateSyntaxError

    from isles.data.chat.sandbox import compile_template

    try:
        return compile_template(text)
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is no Jinja: {error.message}",
            where=f"{name}:{error.lineno}",
            fix="repair it there, or use tokenizer.chat_template: chatml",
            id="data.template",
        ) from error


def _unused_mark(text: str) -> str:
    # Letters and digits that do not stand in a text.
    number = 0
    while (mark := f"Zq{number}xJ7answerK4v") in text:
        number += 1
    return mark


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many characters, or tokens, two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((place for place, (left, right) in pairs if left != right), shorter)
