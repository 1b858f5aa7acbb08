"""A tokenizer's chat template: choosing it, rendering with it, and finding answers in the text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.config.files import CHATML, how_to_find
from isles.config.sections.model import OWN_VARIABLES
from isles.data.chat.answers import AnswerFinder
from isles.data.chat.dialogue import Dialogue, Span, SpecialTokens
from isles.data.chat.fields import (
    FIXED_DAY,
    ArgumentsRefusal,
    CallForm,
    FieldProbe,
    TemplateRefusal,
    fields_to_ignore,
    find_form,
    in_form,
    kind_of,
)
from isles.data.chat.messages import check_values
from isles.data.sources.files import decode, opened
from isles.data.sources.names import Remark
from isles.data.sources.rows import Chat, FieldError, Message
from isles.data.tokens.tokenizer import TURN_ENDS, TURN_STARTS
from isles.errors import DataError

if TYPE_CHECKING:
    from jinja2 import Template
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# Variables of templates other than messages. Some templates write today's date, but the tokens of
# a run must not change from day to day. They get the default date of Llama's templates.
_VARIABLES = {"date_string": f"{FIXED_DAY:%d %b %Y}"}

_SETTINGS = "_isles_template"
_MOST_DIALOGUES = 1000


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A conversation as text.

    Args:
        text: with special tokens written out.
        spans: the trained characters, in order.
        ends_open: whether an end-of-text token must follow, because the template does not end the
            assistant's last turn with a special token at which generation could stop.
        unread: fields of the conversation that do not affect the text, and remarks.
    """

    text: str
    spans: Sequence[Span]
    ends_open: bool
    unread: Sequence[str] = ()


@contextmanager
def _refusing() -> Iterator[None]:
    # A template is a third-party program, and may raise anything.
    try:
        yield
    except Exception as error:
        raise TemplateRefusal(str(error)[:500] or type(error).__name__) from error


class ChatTemplate:
    """The chat template of a tokenizer that has one.

    A template with `{% generation %}` marks the assistant's text itself. For other templates, isles
    renders the conversation once more for each answer, with a mark in place of the answer. The text
    before and after the mark is equal in both renderings. An answer starts after the template's
    generation prompt and ends with the special token that ends the turn.

    Raises:
        DataError: the tokenizer has no template, or its template is not valid Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._name, self._variables = template_settings(tokenizer)
        try:
            self.text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise no_template() from error
        self._compiled = {self.text: _compiled(self.text, self._name)}
        self._is_marked = _GENERATION.search(self.text) is not None
        added = tokenizer.added_tokens_decoder.values()
        tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added)}
        self._special = SpecialTokens(tokens)
        self._dialogues: dict[str, Dialogue] = {}
        """Renderers by the variables of a row, as JSON."""
        self._forms: dict[object, CallForm] = {}
        self._wants_parts = False
        """True if contents are lists of parts, which templates of vision models may require."""
        self._fields = FieldProbe()
        self._answers = AnswerFinder(self._render, self._text_of, self._special, self._name)
        self._words: dict[str, frozenset[str]] = {}
        for name in sorted(self._variables):
            if name in self._known:
                continue
            raise DataError(
                f"the chat template {self._name} has no variable {name}; it has: "
                + (", ".join(self._own_variables) or "none"),
                where=f"tokenizer.chat_template_kwargs.{name}",
                fix=f"delete {name}, or use a variable of the template",
            )
        self._plain = self._find_dialogue({})
        if self._plain.header is None:
            self._wants_parts = True
            self._plain = self._find_dialogue({})
            self._wants_parts = self._plain.header is not None
        self._dialogue = self._plain

    @property
    def identity(self) -> dict[str, Any]:
        """The values that determine the rendered text."""
        special = {name: str(token) for name, token in self._tokenizer.special_tokens_map.items()}
        return {
            "template": self._tokenizer.chat_template,
            "special_tokens": special,
            "variables": dict(self._variables),
        }

    @property
    def stop_token(self) -> str | None:
        """The special token that ends the assistant's turn; None if the template has none."""
        return self._plain.stop_token

    @cached_property
    def _known(self) -> frozenset[str]:
        # The variables that the template reads.
        found = self._tokenizer.chat_template
        texts = [str(text) for text in found.values()] if isinstance(found, dict) else [self.text]
        return frozenset[str]().union(*(_variables_of(text, self._name) for text in texts))

    @property
    def _own_variables(self) -> Sequence[str]:
        # The variables that only a run file or a row can set.
        return sorted(self._known - OWN_VARIABLES - self._tokenizer.special_tokens_map.keys())

    def render(self, chat: Chat, where: str, *, train_on: str) -> RenderedConversation:
        """A conversation as text, with the trained spans.

        DataError: the template refuses these messages or does not write a part of them, or isles
        cannot find the assistant's answers in the text.
        """
        try:
            return self._render_chat(chat, where, train_on)
        except TemplateRefusal as error:

            def render(changed: Chat) -> RenderedConversation:
                return self._render_chat(changed, where, train_on)

            ignored = fields_to_ignore(error, chat, render)
            raise self._refused(error, where, ignored) from error

    def _render_chat(self, chat: Chat, where: str, train_on: str) -> RenderedConversation:
        answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        wanted = [i for i in answers if i >= chat.first and i not in chat.masked]
        if train_on == "last":
            wanted = wanted[-1:]
        others = sorted(chat.variables.keys() - self._known) if chat.variables else []
        for name in others:
            if near := get_close_matches(name, self._own_variables, n=1):  # a typing error
                what = f"chat_template_kwargs has {name}, not a variable; did you mean {near[0]}?"
                raise TemplateRefusal(what, "chat_template_kwargs")
        check_values(chat)
        self._use(chat.variables)
        given = self._prepare(chat)
        text, marked = self._render_marked(given.messages)
        trained = range(len(chat.messages)) if train_on == "all" else wanted
        unread = [
            *self._fields.check(chat, text, self._text_of, self._is_named, trained),
            *(f"chat_template_kwargs.{name}" for name in others),
        ]
        if train_on == "all":
            spans = [(0, len(text))]
        elif self._is_marked:
            spans = self._answers.choose_marked(given, text, marked, answers, wanted)
        else:
            find = self._answers.find
            spans = [find(number, given, text, self._dialogue, where) for number in wanted]
            if self._dialogue.prompt_end.strip():
                for place, number in enumerate(wanted):
                    spans[place], remarks = self._behind_prompt(number, given, text, spans[place])
                    unread += [remark for remark in remarks if remark not in unread]
        is_closed = self._dialogue.has_end or text.rstrip().endswith(self._special.all)
        ends_open = chat.messages[-1]["role"] == "assistant" and not is_closed
        return RenderedConversation(text, spans, ends_open=ends_open, unread=unread)

    def _behind_prompt(
        self, number: int, chat: Chat, text: str, span: Span
    ) -> tuple[Span, Sequence[Remark]]:
        # The answer without what the generation prompt supplies, or a remark that it begins
        # otherwise.
        try:
            prompt = self._render(chat.messages[:number], prompts=True) if number else ""
        except TemplateRefusal:
            return span, ()
        start, end = span
        if text.startswith(prompt) and len(prompt) < end:
            return (max(start, len(prompt)), end), ()
        tail = prompt[self._special.common_length(prompt, text) :]
        if not tail.strip() or text[:start].rstrip().endswith(tail.strip()):
            return span, ()
        what = f"the generation prompt ends with {tail!r}, but trained answers begin otherwise"
        return span, (Remark(what),)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Messages as text, up to the start of the assistant's answer."""
        try:
            self._use({})
            return self._render(self._prepare(Chat(messages)).messages, prompts=True)
        except TemplateRefusal as error:
            raise self._refused(error, self._name) from error

    def _refused(
        self, error: TemplateRefusal, where: str, ignored: Sequence[str] = ()
    ) -> DataError:
        fix = (
            "use a template that accepts it (tokenizer.chat_template), or repair or remove the row"
        )
        what = f"the chat template {self._name} refuses this conversation: {error}"
        if isinstance(error, ArgumentsRefusal):
            what, fix = (
                str(error),
                "repair the arguments so that they are one JSON object, or remove the row",
            )
        if not ignored:
            return DataError(what, where=where, fix=fix)
        fix += f", or train without {'these fields' if len(ignored) > 1 else 'this field'}:"
        return FieldError(what, where=where, fix=fix, ignore=ignored)

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


def describe_template(
    tokenizer: PreTrainedTokenizerBase, name: str, variables: Mapping[str, Any]
) -> None:
    """Record the run file's settings of the chat template in a tokenizer.

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
        "the tokenizer has no chat template, which messages need",
        where="tokenizer.chat_template",
        fix="set tokenizer.chat_template: chatml, or to a Jinja file",
        id="data.template",
    )


def chat_prompt(tokenizer: PreTrainedTokenizerBase, message: str) -> str:
    """The prompt for the model's answer to a message of the user."""
    if tokenizer.chat_template is None:
        raise no_template()
    template = ChatTemplate(tokenizer)
    return template.prompt([{"role": "user", "content": message}])


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the run file's chat template in a tokenizer: `chatml`, or a Jinja file.

    `chatml` works with any tokenizer. A tokenizer without tokens for turns spells them in ordinary
    tokens, and the end-of-text token ends the assistant's message, so that generation stops there.
    DataError: the file does not exist, or is not a template.
    """
    if name != CHATML:
        tokenizer.chat_template = _read_template(Path(name).expanduser())
        return
    known = tokenizer.get_added_vocab()
    has_tokens = TURN_STARTS in known and TURN_ENDS in known
    if not has_tokens and tokenizer.eos_token is None:
        raise DataError(
            "the tokenizer has neither tokens for chatml nor an eos_token, so generation would "
            "never stop",
            where="tokenizer.chat_template",
            fix="set eos_token in its tokenizer_config.json",
            id="data.template",
        )
    file = "chatml.jinja" if has_tokens else "chatml-text.jinja"
    entry = resources.files("isles.data") / "templates" / file
    tokenizer.chat_template = entry.read_text(encoding="utf-8")


def stop_at_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make the token that ends a turn of the chat template the tokenizer's end of text.

    The template of a base model's tokenizer often ends turns with a token other than eos_token.
    Generation would not stop there, although the model has learned to end a turn. If the template
    itself writes eos_token, nothing changes.
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
            f"chat template not found: {path}",
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
            fix="choose a Jinja file, or use tokenizer.chat_template: chatml",
            id="data.template",
        )
    text = decode(block, path, 0, 1)
    if not text.strip():
        raise DataError(
            "the chat template is empty", where=str(path), fix="use chatml", id="data.template"
        )
    _compiled(text, str(path))
    return text


def _variables_of(text: str, name: str) -> set[str]:
    # What a template reads and does not set itself, except as a default.
    from jinja2 import nodes
    from jinja2.meta import find_undeclared_variables

    environment = _compiled(text, name).environment
    tree = environment.parse(text)
    is_set = {one.name for one in tree.find_all(nodes.Name) if one.ctx != "load"}
    tests = (*tree.find_all(nodes.Test), *tree.find_all(nodes.Filter))
    asked = {
        one.node.name
        for one in tests
        if one.name in ("defined", "undefined", "default", "d") and isinstance(one.node, nodes.Name)
    }
    return find_undeclared_variables(tree) - (is_set - asked) - environment.globals.keys()


def _compiled(text: str, name: str) -> Template:
    from jinja2.exceptions import TemplateSyntaxError

    from isles.data.chat.sandbox import compile_template

    try:
        return compile_template(text)
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid Jinja: {error.message}",
            where=f"{name}:{error.lineno}",
            fix="repair the template, or use tokenizer.chat_template: chatml",
            id="data.template",
        ) from error
