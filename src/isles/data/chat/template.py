"""A tokenizer's chat template: choosing and rendering it, and what it writes around an answer."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from isles.config.files import CHATML, how_to_find
from isles.data.chat.messages import Chat, Message
from isles.data.sources.read import decode, opened
from isles.data.tokens.tokenizer import TURN_ENDS, TURN_STARTS
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

Span = tuple[int, int]

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ASKED = "Hello there"
_VARIABLES = {"date_string": "26 Jul 2024"}
"""What templates may read besides messages. Some write today's date: the tokens of a run must not
change overnight, so they are given the one that Llama's templates fall back on."""


class TemplateRefusal(Exception):
    """The template does not render these messages; the text is its own."""


class Template:
    """Renders messages, and knows what it writes around an answer.

    Args:
        tokenizer: with a chat template.
        name: of the template, for messages.

    Raises:
        DataError: the tokenizer has none, or it is no Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        try:
            self.text: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise no_template() from error
        check_template(self.text, name)
        self.is_marked = _MARKER.search(self.text) is not None
        added = tokenizer.added_tokens_decoder.values()
        tokens = {*tokenizer.all_special_tokens, *(str(token) for token in added)}
        self.special_tokens = tuple(sorted(tokens))
        self._asks: str | None = None
        """The special token that begins what the user says."""
        self.header, self._closing, self._last = self._frame()

    def render(self, messages: Sequence[Message], chat: Chat, *, prompts: bool = False) -> str:
        """Messages as text.

        Args:
            messages: all of the chat's, or other ones.
            chat: whose tools are given to the template.
            prompts: whether the text ends where the assistant is to go on.

        Raises:
            TemplateRefusal: the template does not take them.
        """
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=chat.tools,
                tokenize=False,
                add_generation_prompt=prompts,
                **_VARIABLES,
            )
        # Templates let whatever the messages provoke in them pass through.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefusal(str(error)[:500] or type(error).__name__) from error
        return text

    def render_marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """A conversation as text, and the characters that the template marks as generated.

        Raises:
            TemplateRefusal: the template does not take it.
        """
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[list(chat.messages)],
                tools=chat.tools,
                chat_template=self._tokenizer.get_chat_template(tools=chat.tools),
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **_VARIABLES},
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TemplateRefusal(str(error)[:500] or type(error).__name__) from error
        return texts[0], [(start, end) for start, end in spans[0] if end > start]

    @property
    def stop_token(self) -> str | None:
        """The special token that ends the assistant's turn; None where the template has none."""
        return self._leading(self._last)

    @property
    def has_end(self) -> bool:
        """Whether a special token ends every answer."""
        return self._leading(self._last) is not None or self._has_special(self._closing)

    def length_of_end(self, behind: str) -> int:
        """How much of what stands behind an answer belongs to it: what ends the turn.

        White space behind a special token does not: generation has stopped by then. Where letters
        end a turn, the model must write all of them before its text ends.
        """
        if self._has_special(self._closing):
            end = self._closing.rstrip()
            return len(end) if behind.startswith(end) else 0
        token = self._leading(behind)
        if self.stop_token is not None and token is not None and token != self._asks:
            # The last answer ends with another token than those before it.
            return behind.index(token) + len(token)
        return len(self._closing) if behind.startswith(self._closing) else 0

    def _has_special(self, text: str) -> bool:
        return any(token in text for token in self.special_tokens)

    def _leading(self, text: str) -> str | None:
        """The special token that a text begins with."""
        found = [token for token in self.special_tokens if text.lstrip().startswith(token)]
        return max(found, key=len, default=None)

    def _frame(self) -> tuple[str | None, str, str]:
        """What the template writes around an answer in a plain dialogue.

        Before it, as far as generation is prompted with the same (None where the template renders
        no dialogue); behind every answer; behind the last one.
        """
        asked: Message = {"role": "user", "content": _ASKED}
        mark = unused_mark("")
        said: Message = {"role": "assistant", "content": mark}
        chat = Chat([asked, said])
        try:
            without = self.render([asked], chat)
            prompted = self.render([asked], chat, prompts=True)
            before, found, short = self.render([asked, said], chat).partition(mark)
        except TemplateRefusal:
            return None, "", ""
        self._asks = self._trailing(without.partition(_ASKED)[0])
        start = self._common_tokens(prompted, without)
        if not found or not before.startswith(prompted[:start]):
            return None, "", ""
        prompted, before = prompted[start:], before[start:]
        header = prompted[: self._common_tokens(prompted, before)]
        try:
            _, _, long = self.render([asked, said, asked], chat).partition(mark)
        except TemplateRefusal:
            long = short
        return header, short[: self._common_tokens(short, long)], short

    def _trailing(self, text: str) -> str | None:
        """The special token that a text ends with."""
        found = [token for token in self.special_tokens if text.rstrip().endswith(token)]
        return max(found, key=len, default=None)

    def _common_tokens(self, one: str, other: str) -> int:
        """How many characters two texts begin with in common, special tokens kept whole."""
        length = common_length(one, other)
        for token in self.special_tokens:
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


def check_template(text: str, name: str) -> None:
    """Refuse a template that is no Jinja.

    Raises:
        DataError: with the line.
    """
    from jinja2.exceptions import TemplateSyntaxError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        _compile_jinja_template(text)
    except TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is no Jinja: {error.message}",
            where=f"{name}:{error.lineno}",
            fix="repair it there, or use tokenizer.chat_template: chatml",
            id="data.template",
        ) from error


def unused_mark(text: str) -> str:
    """Letters and digits that do not stand in a text."""
    number = 0
    while (mark := f"Zq{number}xJ7answerK4v") in text:
        number += 1
    return mark


def common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template that the run file names.

    `chatml` works with any tokenizer: where it has no tokens of its own for the turns, they are
    written in letters, and the end-of-text token ends what the assistant says, so that generation
    stops there.

    Args:
        tokenizer: changed.
        name: `chatml`, or the path of a Jinja file.

    Raises:
        DataError: there is no such file, or it is no template.
    """
    if name == CHATML:
        known = tokenizer.get_added_vocab()
        has_tokens = TURN_STARTS in known and TURN_ENDS in known
        file = "chatml.jinja" if has_tokens else "chatml-text.jinja"
        if not has_tokens and tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has neither tokens for chatml nor an eos_token, so that generation "
                "would never stop",
                where="tokenizer.chat_template",
                fix="set eos_token in its tokenizer_config.json",
                id="data.template",
            )
        entry = resources.files("isles.data") / "templates" / file
        tokenizer.chat_template = entry.read_text(encoding="utf-8")
        return
    tokenizer.chat_template = _read_template(Path(name).expanduser())


def stop_at_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the token that ends a turn of the chat template be the tokenizer's end of text.

    A base model's tokenizer often has a template whose turns end with another token than its
    eos_token. Generation would not stop there, however well the model has learnt to end a turn.
    Where the template itself writes eos_token, nothing is changed.

    Args:
        tokenizer: with a chat template; changed.
    """
    template = Template(tokenizer, "of the tokenizer")
    stop = template.stop_token
    if stop is None or stop == tokenizer.eos_token or "eos_token" in template.text:
        return
    log.info("tokenizer eos_token=%s was=%s: it ends a turn", stop, tokenizer.eos_token)
    tokenizer.eos_token = stop


def _read_template(path: Path) -> str:
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [CHATML], n=1, cutoff=0.5)
        raise DataError(
            f"there is no chat template {path}",
            where="tokenizer.chat_template",
            fix="did you mean chatml?" if near else f"{how_to_find(path)}; or use chatml",
            id="data.template",
        )
    with opened(path) as stream:
        text = decode(stream.read(), path, 0, 1)
    if not text.strip():
        raise DataError(
            "the chat template is empty", where=str(path), fix="use chatml", id="data.template"
        )
    check_template(text, str(path))
    return text
