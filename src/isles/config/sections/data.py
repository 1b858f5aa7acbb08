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
    python-stdlib. Files: .jsonl, .json (objects, one per line or in an array), .csv, .tsv,
    .parquet, .arrow and text, each also compressed (.gz, .bz2, .xz, .zst). docs/data.md lists all
    endings."""

    type: Literal["text", "chat", "instruct", "tokens", "preference", "fake"] = "text"
    """text: documents. chat: messages with roles, also with from and value (human, gpt). instruct:
    instruction (with input) and output, or prompt and completion. tokens: token ids. preference: a
    prompt with a chosen and a rejected answer, for training.method: dpo. fake: random token ids, to
    test machines without data."""

    text_column: Text = "text"
    """text only: the column with the text, in datasets and files with columns."""

    columns: dict[Annotated[str, Field(min_length=1)], Text] = {}  # noqa: RUF012 (pydantic copies defaults)
    """Names of the data's columns, if they differ, such as {instruction: question, output: answer}.
    chat: messages. instruct: instruction, input, output, history, or prompt and completion.
    preference: prompt, chosen, rejected. All three: tools, system, chat_template_kwargs, and role,
    content and train of messages. isles does not train an assistant's message whose train is 0 or
    false. Default for train: weight, train, loss and similar names. tokens: input_ids, labels,
    attention_mask."""

    ignore_fields: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Fields that training does not need, such as [tools, reasoning_content]. isles omits columns
    and fields of messages and tool calls with these names, and does not list them. tools also means
    functions, tool_calls also means function_call, and content means the text of a message with a
    tool call. Without this key isles refuses calls, tools and thoughts that the chat template does
    not write."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """chat and instruct: the tokens to train. assistant: all assistant messages, with the end of
    each turn. last: only the last assistant message. all: every token."""

    split: Text = "train"
    """The split of a Hugging Face dataset, or of a saved folder with several splits."""

    subset: Text | None = None
    """The configuration of a Hugging Face dataset, such as wikitext-2-raw-v1."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the samples that come from this source, relative to the other weights. If no source
    has a weight, each epoch uses every sample of every source once."""


class DataConfig(Section):
    """The training data."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)]
    """One or more sources of training data."""

    seq_length: Annotated[int, Field(ge=2, le=16_777_216)] = 1024
    """Tokens in one sample."""

    packing: bool = True
    """true: put several documents into a sample, so that nearly no token is padding. isles cuts
    text at the end of a sample; for other types isles combines whole documents, the same ones in
    every epoch. false: one document per sample, with padding that is never trained. isles never
    packs preference pairs."""

    isolate_documents: bool | None = None
    """Whether each packed document attends only to itself, so that the other documents in the
    sample do not affect it. Default: true, except for text."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What isles does with a conversation, or another row that is not text, of more than seq_length
    tokens. isles always splits long text into several samples."""

    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a source's rows that isles may skip because they are broken. The log names the first
    ten. With more, the run stops: before its first step, or with streaming when it reads them. 0:
    isles skips none."""

    streaming: bool = False
    """Prepare the tokens in pieces during training, and discard them after use, for data that does
    not fit the disk. isles shuffles samples within pieces of about 16 million tokens. The run needs
    max_steps or max_time, and several sources need weights."""

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the documents held out for evaluation, at least one document. isles holds out the
    end of a single text. 0 disables evaluation."""

    cache_dir: Text | None = None
    """Folder for prepared tokens. Default: data in $XDG_CACHE_HOME/isles, or in ~/.cache/isles,
    which isles closes to other users. `isles data prune` deletes old tokens."""


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
