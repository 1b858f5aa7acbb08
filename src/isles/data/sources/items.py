"""What rows hold once they are read: text, conversations, token ids, pairs of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from isles.data.chat.messages import Message
from isles.data.sources.rows import Row


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that the chat template renders.

    Args:
        messages: with the roles and keys of chat templates.
        tools: JSON schemas of the tools that may be called; None: none.
        first: number of the first message whose answers may be trained on.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """A text and how it goes on, for tokenizers without a chat template."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids as the data has them.

    Args:
        ids: of one document.
        trained: for each whether it is a target.
    """

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same, of which one is preferred."""

    chosen: Chat | Continuation
    rejected: Chat | Continuation


Item = str | Chat | Continuation | Ids | Pair


class Parser(Protocol):
    """Reads the rows of one type of data."""

    @property
    def wanted(self) -> frozenset[str]:
        """Names of all columns that may be read."""
        ...

    def check(self, names: Sequence[str], where: str) -> None:
        """Look at the names of the columns of a whole file.

        Raises:
            DataError: one that is needed is not among them.
        """
        ...

    def parse(self, row: Row) -> Item | None:
        """What one row holds; None where it is empty text, which is left out.

        Raises:
            DataError: the row is bad.
        """
        ...


def texts_of(item: Item) -> list[str]:
    """All that is said in an item, for training a tokenizer."""
    match item:
        case str():
            return [item]
        case Chat():
            return [text for message in item.messages if (text := message["content"])]
        case Continuation():
            return [item.prompt, item.answer]
        case Pair():
            return texts_of(item.chosen) + texts_of(item.rejected)
        case Ids():
            return []


def size_of(item: Item) -> int:
    """About how many characters an item has, for batches of even size."""
    return len(item.ids) if isinstance(item, Ids) else sum(map(len, texts_of(item)))
