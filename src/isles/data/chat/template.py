"""A tokenizer's chat template: choosing it, rendering with it, and finding answers in the text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.config.files import CHATML, how_to_find
from isles.data.chat.dialogue import Dialogue, Span, SpecialTokens, common_length
from isles.data.chat.fields import (
    FIXED_DAY,
    CallForm,
    FieldProbe,
    TemplateRefusal,
    find_form,
    in_form,
    kind_of,
    unused_mark,
)
from isles.data.sources.files import decode, opened
from isles.data.sources.rows import Chat, FieldError, Message
from isles.data.tokens.tokenizer import TURN_ENDS, TURN_STARTS
from isles.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# What templates may read besides messages. Some write today's date: the tokens of a run must not
# change overnight, so they are given the one that Llama's templates fall back on.
_VARIABLES = {"date_string": f"{FIXED_DAY:%d %b %Y}"}

_SETTINGS = "_isles_template"
_MOST_DIALOGUES = 1000


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Args:
        text: special tokens are written out in it.
        spans: the characters that are trained on, in order.
        ends_open: whether an end-of-text token must follow, because the template ends the
            assistant's last turn with no special token at which generation could stop.
        unread: fields of the conversation that the text does not depend on.
    """

    text: str
    spans: Sequence[Span]
    ends_open: bool
    unread: Sequence[str] = ()


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._name, self._variables = template_settings(tokenizer)
        try:
            self.text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise no_template() from error
        self._compiled: dict[str, Template] = {}
        _compiled(self.text, self._name)
        self._is_marked = _GENERATION.search(self.text) is not None
        added = tokenizer.added_tokens_decoder.values()
        tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added)}
        self._special = SpecialTokens(tokens)
        self._dialogues: dict[str, Dialogue] = {}
        """By the variables of a row, as JSON."""
        self._forms: dict[object, CallForm] = {}
        self._wants_parts = False
        """Whether contents are lists of parts, as templates of vision models may want them."""
        self._fields = FieldProbe()
        self._words: dict[str, frozenset[str]] = {}
        self._plain = self._find_dialogue({})
        if self._plain.header is None:
            self._wants_parts = True
            self._plain = self._find_dialogue({})
            self._wants_parts = self._plain.header is not None
        self._dialogue = self._plain

    @property
    def identity(self) -> dict[str, Any]:
        """All that the rendered text depends on."""
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        return {
            "template": self._tokenizer.chat_template,
            "special_tokens": special,
            "variables": dict(self._variables),
        }

    @property
    def stop_token(self) -> str | None:
        """The special token that ends the assistant's turn; None where the template has none."""
        return self._plain.stop_token

    def render(self, chat: Chat, where: str, *, train_on: str) -> Rendered:
        """A conversation as text, with the spans that are trained on.

        DataError: the template refuses these messages or does not write a part of them, or isles
        cannot find the assistant's answers in the text.
        """
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [i for i in answers if i >= chat.first and i not in chat.masked]
        if train_on == "last":
            wanted = wanted[-1:]
        try:
            self._use(chat.variables)
            given = self._prepare(chat)
            text, marked = self._render_marked(given.messages)
            unread = self._fields.check(chat, text, self._text_of, self._is_named)
            if train_on == "all":
                spans = [(0, len(text))]
            elif self._is_marked:
                spans = self._choose_marked(given, text, marked, answers, wanted)
            else:
                spans = [self._find_answer(number, given, text, where) for number in wanted]
        except TemplateRefusal as error:
            raise self._refused(error, where, chat) from error
        is_closed = self._dialogue.has_end or text.rstrip().endswith(self._special.all)
        ends_open = chat.messages[-1]["role"] == "assistant" and not is_closed
        return Rendered(text, spans, ends_open=ends_open, unread=unread)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages as text, behind which the assistant's answer begins."""
        try:
            self._use({})
            return self._render(self._prepare(Chat(messages)).messages, prompts=True)
        except TemplateRefusal as error:
            raise self._refused(error, self._name) from error

    def _refused(self, error: TemplateRefusal, where: str, chat: Chat | None = None) -> DataError:
        ignore = error.ignore
        if ignore is None and chat is not None and chat.tools:
            ignore = "tools"
        fix = "use a template that takes it (tokenizer.chat_template), or repair or remove that row"
        what = f"the chat template {self._name} does not take this conversation: {error}"
        if not ignore:
            return DataError(what, where=where, fix=fix)
        fix += ", or train without this field:"
        return FieldError(what, where=where, fix=fix, ignore=ignore.split(", "))

    def _use(self, variables: Mapping[str, Any]) -> None:
        # Take the variables of a row: they may change what stands around answers.
        self._dialogue = self._plain
        if variables:
            key = json.dumps(variables, sort_keys=True, default=str)
            if key not in self._dialogues:
                if len(self._dialogues) > _MOST_DIALOGUES:
                    self._dialogues.clear()
                self._dialogues[key] = self._find_dialogue(variables)
            self._dialogue = self._dialogues[key]

    def _prepare(self, chat: Chat) -> Chat:
        # What transformers gives to a template, once for all texts of a conversation, with calls
        # and results in the form that the template wants.
        kind = kind_of(chat)
        if kind is None:
            return self._open(chat)
        key = (chat.tools is None, kind)
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = find_form(chat, self._open_text)
        return self._open(in_form(chat, form))

    def _open(self, chat: Chat) -> Chat:
        from isles.data.chat.sandbox import variables

        self._text = self._tokenizer.get_chat_template(tools=chat.tools)
        if self._text not in self._compiled:
            self._compiled[self._text] = _compiled(self._text, self._name)
        self._template = self._compiled[self._text]
        messages = chat.messages
        if self._wants_parts:
            messages = [{**one, "content": self._content(one["content"])} for one in messages]
        given = {**self._tokenizer.special_tokens_map, **_VARIABLES, **self._variables}
        with _refusing():
            self._given = variables(messages, tools=chat.tools, **{**given, **chat.variables})
        return replace(chat, messages=self._given["messages"])

    def _content(self, content: Any) -> Any:
        is_part = self._wants_parts and isinstance(content, str)
        return [{"type": "text", "text": content}] if is_part else content

    def _open_text(self, chat: Chat) -> str:
        return self._render(self._open(chat).messages)

    def _text_of(self, chat: Chat) -> str:
        # The text of a changed conversation, for a look at what the template makes of the change.
        before = self._text, self._template, self._given
        try:
            return self._render(self._prepare(chat).messages)
        finally:
            self._text, self._template, self._given = before

    def _find_dialogue(self, variables: Mapping[str, Any]) -> Dialogue:
        return Dialogue.find(
            lambda messages: self._open(Chat(messages, variables=variables)).messages,
            self._render,
            self._special,
        )

    def _is_named(self, field: str) -> bool:
        if self._text not in self._words:
            self._words[self._text] = frozenset(re.findall(r"\w+", self._text))
        return field in self._words[self._text]

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

    def _find_answer(self, number: int, chat: Chat, text: str, where: str) -> Span:
        mark = unused_mark(text)
        replaced = list(chat.messages)
        replaced[number] = {"role": "assistant", "content": self._content(mark)}
        try:
            if self._dialogue.header is None:
                raise TemplateRefusal("no plain dialogue")
            before, _, behind = self._render(replaced).partition(mark)
            fits = text.endswith(behind)
            end = len(text) - len(behind) + self._dialogue.length_of_end(behind)
        except TemplateRefusal:  # such as of a tool's result, where nobody has called the tool
            before = self._render(chat.messages[:number], prompts=True) if number else ""
            so_far = self._render(chat.messages[: number + 1])
            fits = bool(before) and text.startswith(so_far)
            end = len(so_far.rstrip()) if self._dialogue.has_end else len(so_far)
        start = self._answer_start(number, chat, before)
        before = before[:start]
        if not (fits and text.startswith(before) and start <= end):
            raise DataError(
                f"the chat template {self._name} renders message {number} otherwise when others "
                "follow it, so that what the assistant says there cannot be told",
                where=where,
                fix="put {% generation %} and {% endgeneration %} around what the assistant says, "
                "in a copy of the template that tokenizer.chat_template names",
            )
        answer = text[start:end].strip()
        if not answer[: len(answer) - self._dialogue.length_of_end(answer)]:
            raise TemplateRefusal(
                f"it does not write the content of message {number} (assistant)", ""
            )
        return start, end

    def _answer_start(self, number: int, chat: Chat, before: str) -> int:
        # Where the answer begins in the text before what the assistant says.
        found = self._dialogue.last_header(before)
        if found is None:
            return len(before.rstrip() if self._dialogue.header == "" else before)
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


def describe_template(
    tokenizer: PreTrainedTokenizerBase, name: str, variables: Mapping[str, Any]
) -> None:
    """Note at a tokenizer what the run file says of its chat template.

    Args:
        name: the name of the template, for error messages.
        variables: variables of the template for all conversations.
    """
    setattr(tokenizer, _SETTINGS, (name, dict(variables)))


def template_settings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, dict[str, Any]]:
    """Name and variables of `describe_template`."""
    unknown = str(tokenizer.name_or_path or "of the tokenizer"), dict[str, Any]()
    found: tuple[str, dict[str, Any]] = getattr(tokenizer, _SETTINGS, unknown)
    return found


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
    template = ChatTemplate(tokenizer)
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
    template = ChatTemplate(tokenizer)
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
