"""Rows to documents of token ids, each with the mask of what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from isles.config.sections.data import SourceConfig
from isles.data.chat.messages import Chat, Continuation, Ids, Item, Pair, size_of
from isles.data.chat.template import ChatTemplate, Rendered, common_length, no_template
from isles.data.sources.parse import Parser, make_parser
from isles.data.sources.rows import Row, Rows, Tally, checked_text
from isles.data.tokens.tokenizer import encode, end_of_text_id, tokenizer_digest, vocabulary_size
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["text", "chat", "instruct", "tokens", "preference"]

TEMPLATED = ("chat", "instruct", "preference")
"""Types of data that a chat template makes text of."""

MASKED = (*TEMPLATED, "tokens")
"""Types of data of which not every token may be trained."""

_BATCH_CHARS = 2**20
_BATCH_ROWS = 1024
_ROWS_LOOKED_AT = 2**16


@dataclass(frozen=True, slots=True)
class Encoded:
    """One document.

    Args:
        trained: for each whether it is a target, predicted from those before it; None: all are.
    """

    ids: list[int]
    trained: npt.NDArray[np.bool_] | None


class Encoder:
    """Makes documents of the rows of one source.

    Args:
        tokenizer: with an end-of-text token; for messages, with a chat template.

    Raises:
        DataError: the tokenizer lacks one of them.
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
        name = str(tokenizer.name_or_path or "of the tokenizer")
        self.template = ChatTemplate(tokenizer, name) if has_template else None
        self.train_on: Literal["assistant", "last", "all"] = (
            "assistant" if source.type == "preference" else source.train_on
        )
        self.has_mask = source.type in MASKED and self.train_on != "all"
        self.columns = make_parser(source, has_template=has_template, vocab_size=self.vocab_size)
        self._source = source
        # What the tokenizer itself puts before a text: the id that begins one, or nothing.
        self._first_ids: list[int] = []
        if source.type in MASKED:
            begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
            self._first_ids = [tokenizer.bos_token_id] if begins else []

    def identity(self) -> dict[str, Any]:
        """All that the documents of given rows depend on, for a key; plain JSON."""
        source = self._source
        identity: dict[str, Any] = {
            "kind": self.kind,
            "tokenizer": tokenizer_digest(self.tokenizer),
        }
        if self.kind == "text":
            return {**identity, "text_column": source.text_column}
        identity |= {"columns": dict(source.columns), "vocab_size": self.vocab_size}
        if self.kind != "tokens":
            template = None if self.template is None else self.template.identity
            identity |= {"train_on": self.train_on, "template": template, "first": self._first_ids}
        return identity

    def encode(self, items: Sequence[tuple[str, Item]]) -> list[list[Encoded] | DataError]:
        """The documents of each item, or what is wrong with it.

        Args:
            items: each with its row's place.

        Returns:
            One document for each item; two for a preference: the chosen one first.
        """
        if self.kind == "text":
            ids = encode(self.tokenizer, [str(item) for _, item in items])
            for document in ids:
                document.append(self.end_of_text_id)
            return [[Encoded(document, None)] for document in ids]
        if self.kind == "tokens":
            parsed = [item for _, item in items if isinstance(item, Ids)]
            return [[Encoded(one.ids, np.array(one.trained, dtype=np.bool_))] for one in parsed]
        rendered = [self._render(item, where) for where, item in items]
        texts = [text for one in rendered if isinstance(one, list) for text in one]
        ready = iter(self._tokenize(texts))
        documents: list[list[Encoded] | DataError] = []
        for (where, _), one in zip(items, rendered, strict=True):
            if isinstance(one, DataError):
                documents.append(one)
                continue
            made = [next(ready) for _ in one]
            error = DataError(
                "no token of this row would be trained: the template leaves out what the "
                "assistant says",
                where=where,
                fix="repair or remove that row, or look at the template's {% generation %} marks",
            )
            # The first token is predicted from nothing.
            masks = [np.ones(len(d.ids), bool) if d.trained is None else d.trained for d in made]
            documents.append(made if all(mask[1:].any() for mask in masks) else error)
        return documents

    def _render(self, item: Item, where: str) -> list[Rendered] | DataError:
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
                        text = Rendered(whole, [(start, len(whole))], ends_open=True)
                    case _:
                        raise AssertionError(part)
                checked_text(text.text, "the conversation", where)
                rendered.append(text)
        except DataError as error:
            return error
        return rendered

    def _tokenize(self, texts: Sequence[Rendered]) -> Iterator[Encoded]:
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
        first = [] if self.template is not None else self._first_ids
        for number, rendered in enumerate(texts):
            ids: list[int] = list(tokens["input_ids"][number])
            trained = np.zeros(len(ids), dtype=np.bool_)
            if self.tokenizer.is_fast:
                # Of each token its first character, and the one after its last.
                offsets = np.array(tokens["offset_mapping"][number], dtype=np.int64).reshape(-1, 2)
                for start, end in rendered.spans:
                    trained |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
            else:
                for span in rendered.spans:
                    # It does not say which characters a token stands for.
                    texts_before = [rendered.text[:place] for place in span]
                    before = self.tokenizer(texts_before, add_special_tokens=False)["input_ids"]
                    start, end = (common_length(one, ids) for one in before)
                    trained[start:end] = True
            if first:
                ids = [*first, *ids]
                trained = np.concatenate([np.zeros(len(first), dtype=np.bool_), trained])
            if rendered.ends_open:
                ids.append(self.end_of_text_id)
                trained = np.append(trained, bool(rendered.spans))
            yield Encoded(ids, trained if self.has_mask else None)


def encode_rows(rows: Rows, encoder: Encoder, tally: Tally) -> Iterator[list[Encoded]]:
    """The documents of rows, batch by batch in order; bad rows go to the tally.

    The caller judges the tally at the end. Where many rows hold nothing, a batch may be empty: it
    is a sign of life.

    Raises:
        DataError: the source cannot be read further, or too many rows are bad.
    """
    batch: list[tuple[int, str, Item]] = []
    size = looked_at = 0
    for row in rows:
        looked_at += 1
        read = _read_row(row, encoder.columns, tally)
        if read is not None:
            batch.append(read)
            size += size_of(read[2])
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_ROWS or looked_at >= _ROWS_LOOKED_AT:
            yield [document for one in _encode_batch(batch, encoder, tally) for document in one]
            batch, size, looked_at = [], 0, 0
    if batch:
        yield [document for one in _encode_batch(batch, encoder, tally) for document in one]


def encode_each(
    rows: Sequence[Row | DataError], encoder: Encoder, tally: Tally
) -> list[list[Encoded]]:
    """The documents of each of some rows: none where it is empty or bad, which goes to the tally.

    Raises:
        DataError: too many rows are bad.
    """
    read = [_read_row(row, encoder.columns, tally) for row in rows]
    made = iter(_encode_batch([one for one in read if one is not None], encoder, tally))
    return [[] if one is None else next(made) for one in read]


def read_items(rows: Rows, source: SourceConfig, tally: Tally) -> Iterator[Item]:
    """The content of rows, before there is a tokenizer; bad rows go to the tally."""
    parser = make_parser(source, has_template=source.type in TEMPLATED, vocab_size=None)
    for row in rows:
        read = _read_row(row, parser, tally)
        if read is not None:
            yield read[2]


def _read_row(row: Row | DataError, parser: Parser, tally: Tally) -> tuple[int, str, Item] | None:
    # Number, place and content of a row; None where it is empty or bad.
    number = tally.count()
    if isinstance(row, DataError):
        tally.bad(number, row)
        return None
    try:
        item = parser.parse(row)
    except DataError as error:
        tally.bad(number, error)
        return None
    if item is None:
        tally.num_empty += 1
        return None
    return number, row.where, item


def _encode_batch(
    batch: Sequence[tuple[int, str, Item]], encoder: Encoder, tally: Tally
) -> list[list[Encoded]]:
    if not batch:
        return []
    documents: list[list[Encoded]] = []
    made = encoder.encode([(where, item) for _, where, item in batch])
    for (number, _, _), one in zip(batch, made, strict=True):
        if isinstance(one, DataError):
            tally.bad(number, one)
        documents.append([] if isinstance(one, DataError) else one)
    return documents
