"""Text that a chat template writes around answers, found in a plain dialogue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Self

from isles.data.chat.fields import TemplateRefusal, unused_mark
from isles.data.sources.rows import Message

Span = tuple[int, int]
"""The first character, and the one after the last."""

_QUESTION = "Hello there"


class SpecialTokens:
    """The special tokens of a tokenizer, as they are written out in texts."""

    def __init__(self, tokens: Collection[str]) -> None:
        self.all = tuple(sorted(tokens))

    def are_in(self, text: str) -> bool:
        """True if a text has a special token."""
        return any(token in text for token in self.all)

    def leading(self, text: str) -> str | None:
        """The special token that a text begins with."""
        found = [token for token in self.all if text.lstrip().startswith(token)]
        return max(found, key=len, default=None)

    def trailing(self, text: str) -> str | None:
        """The special token that a text ends with."""
        found = [token for token in self.all if text.rstrip().endswith(token)]
        return max(found, key=len, default=None)

    def common_length(self, one: str, other: str) -> int:
        """How many characters two texts begin with in common, special tokens kept whole."""
        length = common_length(one, other)
        for token in self.all:
            for text in (one, other):
                at = text.find(token, max(0, length - len(token) + 1))
                if 0 <= at < length < at + len(token):
                    return at
        return length


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Text that a template writes around the answers of a plain dialogue.

    Args:
        user_token: special token that begins a message of the user.
        header: text before the last answer, as far as the generation prompt is the same; None: the
            template renders no plain dialogue.
        early: the part of the header that an answer has too if messages follow.
        closing: text behind every answer.
        last: text behind the last answer.
        prompt_end: the end of the generation prompt that a plain answer does not begin with.
    """

    special: SpecialTokens
    user_token: str | None = None
    header: str | None = None
    early: str = ""
    closing: str = ""
    last: str = ""
    prompt_end: str = ""

    @classmethod
    def find(
        cls,
        give: Callable[[Sequence[Message]], Sequence[Message]],
        render: Callable[..., str],
        special: SpecialTokens,
    ) -> Self:
        """Render a question and an answer in several ways.

        Args:
            give: changes messages into the form that `render` accepts.
            render: returns the text of messages; with `prompts`, the generation prompt follows.
        """
        mark = unused_mark("")
        asked: Message = {"role": "user", "content": _QUESTION}
        answer: Message = {"role": "assistant", "content": mark}
        try:
            asked, answer = give([asked, answer])
            without = render([asked])
            prompted = render([asked], prompts=True)
            before, found, short = render([asked, answer]).partition(mark)
        except TemplateRefusal:
            return cls(special)
        user_token = special.trailing(without.partition(_QUESTION)[0])
        start = special.common_length(prompted, without)
        if not found or not before.startswith(prompted[:start]):
            return cls(special, user_token)
        prompted, before = prompted[start:], before[start:]
        header = early = prompted[: special.common_length(prompted, before)]
        try:
            follows, _, long = render([asked, answer, asked]).partition(mark)
            early = header[: special.common_length(header, follows[start:])]
            if not special.are_in(early):
                early = header  # a few letters may be anywhere
        except TemplateRefusal:
            long = short
        closing = short[: special.common_length(short, long)]
        prompt_end = prompted[len(header) :]
        return cls(special, user_token, header, early, closing, short, prompt_end)

    @property
    def stop_token(self) -> str | None:
        """The special token that ends the last answer; None: the template has none."""
        return self.special.leading(self.last)

    @property
    def has_end(self) -> bool:
        """True if a special token ends every answer."""
        return self.stop_token is not None or self.special.are_in(self.closing)

    def length_of_end(self, behind: str) -> int:
        """How much of the text behind an answer belongs to it, and ends the turn.

        White space behind a special token does not: generation has stopped by then. Where letters
        end a turn, the model must write all of them before its text ends.
        """
        if self.special.are_in(self.closing):
            end = self.closing.rstrip()
            return len(end) if behind.startswith(end) else 0
        token = self.special.leading(behind)
        if self.stop_token is not None and token is not None and token != self.user_token:
            # The last answer ends with another token than those before it.
            return behind.index(token) + len(token)
        return len(self.closing) if behind.startswith(self.closing) else 0

    def last_header(self, before: str) -> Span | None:
        """The last header in a text before an answer; the answer begins behind it.

        Generation may be prompted with more than answers begin with, such as a thought, and with
        more than answers begin with that others follow.
        """
        if not (self.header and self.early and self.early in before):
            return None
        start = before.rfind(self.early)
        is_whole = before.startswith(self.header, start)
        return start, start + len(self.header if is_whole else self.early)


def common_length(one: Sequence[object], other: Sequence[object]) -> int:
    """How many characters, or tokens, two sequences begin with in common."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = min(len(one), len(other))
    return next((place for place, (left, right) in pairs if left != right), shorter)
