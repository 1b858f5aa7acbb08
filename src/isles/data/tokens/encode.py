"""Documents of token ids from rows, each with a mask of its trained tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from isles.config.sections.data import SourceConfig
from isles.data.chat.dialogue import common_length
from isles.data.chat.template import ChatTemplate, RenderedConversation, no_template
from isles.data.sources.parse import make_parser
from isles.data.sources.rows import (
    Chat,
    Continuation,
    Ids,
    Item,
    Pair,
    Parser,
    Row,
    Rows,
    Tally,
    checked_text,
    size_of,
)
from isles.data.tokens.tokenizer import (
    affixes,
    encode,
    end_of_text_id,
    tokenizer_digest,
    vocabulary_size,
)
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["text", "chat", "instruct", "tokens", "preference"]

TEMPLATED = ("chat", "instruct", "preference")
"""Types of data that a chat template renders."""

MASKED = (*TEMPLATED, "tokens")
"""Types of data that may have untrained tokens."""

_BATCH_CHARS = 2**20
_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document; `trained` marks the tokens that are targets; None: all tokens."""

    ids: list[int]
    trained: npt.NDArray[np.bool_] | None


class Encoder:
    """Makes documents from the rows of one source.

    DataError: the tokenizer lacks an end-of-text token, or a chat template for messages.
    """

    def __init__(self, source: SourceConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        assert source.type != "fake"
        self.kind: Kind = source.type
        self.tokenizer = tokenizer
        self.end_of_text_id = end_of_text_id(tokenizer)
        self.vocab_size = vocabulary_size(tokenizer)
        has_template = source.type in TEMPLATED and tokenizer.chat_template is not None
        if source.type == "chat" and not has_template:
            raise no_template()
        self.template = ChatTemplate(tokenizer) if has_template else None
        self.unread: list[Sequence[str]] = []
        """For each item of the last call of `encode`, fields that the template did not write."""
        self.train_on: Literal["assistant", "last", "all"] = (
            "assistant" if source.type == "preference" else source.train_on
        )
        self.has_mask = source.type in MASKED and self.train_on != "all"
        self.parser = make_parser(source, has_template=has_template, vocab_size=self.vocab_size)
        self._source = source
        # A template writes all special tokens itself.
        is_text = self.template is None and source.type != "tokens"
        self._first_ids, self._last_ids = affixes(tokenizer) if is_text else ([], [])

    def identity(self) -> dict[str, Any]:
        """The values that determine the documents of given rows, for a key; plain JSON."""
        source = self._source
        identity: dict[str, Any] = {
            "kind": self.kind,
            "tokenizer": tokenizer_digest(self.tokenizer),
            "ignored": sorted(source.ignore_fields),
        }
        if self._last_ids or (self._first_ids and self.kind == "text"):
            identity["around"] = [self._first_ids, self._last_ids]
        if self.kind == "text":
            return {**identity, "text_column": source.text_column}
        identity |= {"columns": dict(source.columns), "vocab_size": self.vocab_size}
        if self.kind != "tokens":
            template = None if self.template is None else self.template.identity
            identity |= {"train_on": self.train_on, "template": template, "first": self._first_ids}
        return identity

    def encode(self, items: Sequence[tuple[str, Item]]) -> list[list[Encoded] | DataError]:
        """The documents of each item (a pair has two, the chosen one first), or the item's
        error."""
        self.unread = [()] * len(items)
        if self.kind == "text":
            ids = encode(self.tokenizer, [str(item) for _, item in items])
            return [[Encoded(self._around(document), None)] for document in ids]
        if self.kind == "tokens":
            parsed = [item for _, item in items if isinstance(item, Ids)]
            return [[Encoded(one.ids, np.array(one.trained, dtype=np.bool_))] for one in parsed]
        rendered = [self._render(item, where) for where, item in items]
        self.unread = [
            () if isinstance(one, DataError) else [name for text in one for name in text.unread]
            for one in rendered
        ]
        ready = self._tokenize([text for one in rendered if isinstance(one, list) for text in one])
        documents: list[list[Encoded] | DataError] = []
        for (where, _), one in zip(items, rendered, strict=True):
            if isinstance(one, DataError):
                documents.append(one)
                continue
            made = [next(ready) for _ in one]
            error = DataError(
                "no token of this row would be trained: the template does not write the "
                "assistant's answers",
                where=where,
                fix="repair or remove that row, or check the template's {% generation %} marks",
            )
            # The first token is predicted from nothing.
            is_trained = [
                len(d.ids) > 1 if d.trained is None else d.trained[1:].any() for d in made
            ]
            documents.append(made if all(is_trained) else error)
        return documents

    def _around(self, ids: list[int]) -> list[int]:
        # A text may begin with the token that begins one, written out.
        first = [] if ids[: len(self._first_ids)] == self._first_ids else self._first_ids
        return [*first, *ids, *self._last_ids, self.end_of_text_id]

    def _render(self, item: Item, where: str) -> list[RenderedConversation] | DataError:
        rendered = []
        try:
            for part in [item.chosen, item.rejected] if isinstance(item, Pair) else [item]:
                match part:
                    case Chat():
                        assert self.template is not None
                        text = self.template.render(part, where, train_on=self.train_on)
                    case Continuation():
                        whole = part.prompt + part.answer
                        start = 0 if self.train_on == "all" else len(part.prompt)
                        text = RenderedConversation(whole, [(start, len(whole))], ends_open=True)
                    case _:
                        raise AssertionError(part)
                checked_text(text.text, "the conversation", where)
                rendered.append(text)
        except DataError as error:
            return error
        return rendered

    def _tokenize(self, texts: Sequence[RenderedConversation]) -> Iterator[Encoded]:
        # Many texts at once; what a template wrote holds all special tokens that are to be.
        if not texts:
            return
        tokens = self.tokenizer(
            [rendered.text for rendered in texts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=self.tokenizer.is_fast,
            verbose=False,  # a conversation may be longer than the model's context
        )
        first = self._first_ids
        for number, rendered in enumerate(texts):
            ids: list[int] = list(tokens["input_ids"][number])
            trained = np.zeros(len(ids), dtype=np.bool_)
            if self.tokenizer.is_fast:
                # Of each token its first character, and the one after its last.
                # np.array of pairs takes three times as long.
                flat = chain.from_iterable(tokens["offset_mapping"][number])
                offsets = np.fromiter(flat, np.int64, 2 * len(ids)).reshape(-1, 2)
                for start, end in rendered.spans:
                    trained |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
            else:
                for span in rendered.spans:
                    # It does not say which characters a token stands for.
                    texts_before = [rendered.text[:place] for place in span]
                    before = self.tokenizer(texts_before, add_special_tokens=False)["input_ids"]
                    start, end = (common_length(one, ids) for one in before)
                    trained[start:end] = True
            if first and ids[: len(first)] != first:
                ids = [*first, *ids]
                trained = np.concatenate([np.zeros(len(first), dtype=np.bool_), trained])
            if rendered.ends_open:
                added = [*self._last_ids, self.end_of_text_id]
                ids += added
                trained = np.append(trained, [bool(rendered.spans)] * len(added))
            yield Encoded(ids, trained if self.has_mask else None)


def encode_rows(rows: Rows, encoder: Encoder, tally: Tally) -> Iterator[list[Encoded]]:
    """The documents of rows, batch by batch in order; the caller judges the tally at the end.

    DataError: the source cannot be read further, or no row may be bad and some are.
    """

    def encoded(batch: Sequence[Row | DataError]) -> list[Encoded]:
        made = encode_each(batch, encoder, tally)
        tally.judge(is_all=False)
        return [document for documents in made for document in documents]

    batch, size = list[Row | DataError](), 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_ROWS:
            yield encoded(batch)
            batch, size = [], 0
    if batch:
        yield encoded(batch)


def encode_each(
    rows: Sequence[Row | DataError], encoder: Encoder, tally: Tally
) -> list[list[Encoded]]:
    """The documents of each row. Empty and bad rows have none and are counted in the tally."""
    documents: list[list[Encoded]] = [[] for _ in rows]
    first = tally.num_rows + 1
    read = list(_items(rows, encoder.parser, tally))
    made = encoder.encode([(where, item) for _, where, item, _ in read]) if read else []
    left = encoder.unread if read else []
    for (number, _, _, unread), one, more in zip(read, made, left, strict=True):
        if isinstance(one, DataError):
            tally.bad(number, encoder.parser.with_fix(one))
        else:
            documents[number - first] = one
            tally.unread(unread.union(more), encoder.parser.ignored)
    return documents


def read_items(rows: Rows, source: SourceConfig, tally: Tally) -> Iterator[Item]:
    """The content of rows, before there is a tokenizer; bad rows are counted in the tally."""
    for _, _, item, _ in _items(rows, make_parser(source), tally):
        yield item
        tally.judge(is_all=False)


def _items(
    rows: Iterable[Row | DataError], parser: Parser, tally: Tally
) -> Iterator[tuple[int, str, Item, set[str]]]:
    # Number, place, content and unread fields of each row that is neither empty nor bad.
    for row in rows:
        tally.num_rows += 1
        try:
            if isinstance(row, DataError):
                raise row
            item = parser.read(row)
        except DataError as error:
            tally.bad(tally.num_rows, parser.with_fix(error))
            continue
        if item is None:
            tally.num_empty += 1
            tally.unread(parser.unread, parser.ignored)
        else:
            yield tally.num_rows, row.where, item, parser.unread
