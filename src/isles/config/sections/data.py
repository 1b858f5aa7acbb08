"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section, Text

_OF_MESSAGES = ("tools", "system", "train", "chat_template_kwargs")

COLUMNS: dict[str, tuple[str, ...]] = {
    "chat": ("messages", "role", "content", *_OF_MESSAGES),
    "instruct": (
        *("instruction", "input", "output", "prompt", "completion", "history"),
        *("role", "content", *_OF_MESSAGES),
    ),
    "tokens": ("input_ids", "labels", "attention_mask"),
    "preference": ("prompt", "chosen", "rejected", "role", "content", *_OF_MESSAGES),
}
"""Columns that a source may have, by type."""


class SourceConfig(Section):
    """One source of training data."""

    path: Text | None = None
    """A file, a glob (**/*.txt), a folder saved by datasets, a Hugging Face id, python-docs or
    python-stdlib. docs/data.md lists the file formats."""

    type: Literal["text", "chat", "instruct", "tokens", "preference", "fake"] = "text"
    """text: documents. chat: messages with roles. instruct: instruction and output, or prompt and
    completion. tokens: token ids. preference: a prompt with a chosen and a rejected answer, for
    training.method: dpo. fake: random token ids, for tests."""

    text_column: Text = "text"
    """With type text: the column with the text."""

    columns: dict[Annotated[str, Field(min_length=1)], Text] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Names of columns that differ from the expected names, such as {instruction: question, output:
    answer}. Expected names for chat: messages. For instruct: instruction, input, output, history,
    or prompt and completion. For preference: prompt, chosen, rejected. For these three types also:
    tools, system, chat_template_kwargs, and in messages role, content, train. For tokens:
    input_ids, labels, attention_mask."""

    ignore_fields: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Columns, and fields of messages and tool calls, that isles ignores, such as [tools,
    reasoning_content], see docs/data.md. content in this list removes only text next to
    a tool call. isles refuses rows with calls, tools or thoughts that the chat template omits,
    unless this list has the field."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Tokens to train, with chat and instruct. assistant: all assistant messages, with the end of
    each turn. last: only the last assistant message. all: every token."""

    split: Text = "train"
    """Split of a Hugging Face dataset, or of a saved folder with several splits."""

    subset: Text | None = None
    """Configuration of a Hugging Face dataset, such as wikitext-2-raw-v1."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the samples that come from this source, relative to the weights of other sources.
    Without weights, each epoch uses every sample once."""


class DataConfig(Section):
    """The training data."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)]
    """One or more sources of training data."""

    seq_length: Annotated[int, Field(ge=2, le=16_777_216)] = 1024
    """Tokens in one sample."""

    packing: bool = True
    """Put several documents into a sample. At the end of a sample, isles cuts only documents of
    type text. It never packs preference pairs. false: one document per sample, with untrained
    padding."""

    isolate_documents: bool | None = None
    """Let each packed document attend only to itself. Default: true, except for text."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """Cut or skip a row of more than seq_length tokens, such as a conversation. isles always splits
    long text into several samples."""

    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Largest share of broken rows in a source. isles skips these rows, and logs the first ten. If
    a source has a larger share, the run stops."""

    streaming: bool = False
    """For data that does not fit on the disk: prepare tokens in pieces during training, then delete
    them. isles shuffles within pieces of about 16 million tokens. The run needs max_steps or
    max_time, and several sources need weights."""

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the documents that are only for evaluation: at least one document, or the end of a
    single text. With streaming, they are among the first documents of a source. 0 disables
    evaluation."""

    cache_dir: Text | None = None
    """Folder for prepared tokens. Default: data in $XDG_CACHE_HOME/isles, or in ~/.cache/isles.
    `isles data prune` deletes old tokens."""


def isolates(data: DataConfig, source: SourceConfig) -> bool:
    """True if documents of a source are isolated if they share a sample.

    Pairs of preferences and fake samples are never packed.
    """
    if not data.packing or source.type in ("fake", "preference"):
        return False
    if data.isolate_documents is not None:
        return data.isolate_documents
    return source.type != "text"


def isolates_any(data: DataConfig) -> bool:
    """True if packed documents of any source are isolated."""
    return any(isolates(data, source) for source in data.sources)
