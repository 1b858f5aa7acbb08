"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.section import Section


Name = Annotated[str, Field(min_length=1)]


class SourceConfig(Section):
    """One source of training data."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """A file, a glob (**/*.txt), a folder saved by datasets, a hub id, python-docs or
    python-stdlib. Files: .jsonl, .parquet, anything else is read as UTF-8 text."""

    type: Literal["text", "chat", "instruct", "tokens", "preference", "fake"] = "text"
    """text: documents. chat: messages with roles. instruct: instruction (with input) and output, or
    prompt and completion. tokens: token ids. preference: a prompt with a chosen and a rejected
    answer, for training.method: dpo. fake: random token ids, to try machines without data."""

    text_column: Name = "text"
    """text only: the column that holds the text, in JSONL, Parquet and datasets."""

    columns: dict[Name, Name] = {}
    """Where the data names its columns otherwise: {messages: conversations, role: from, content:
    value} for chat; instruction, input, output, prompt, completion, system for instruct; input_ids
    and labels for tokens; prompt, chosen and rejected for preference."""

    train_on: Literal["assistant", "last", "all"] = "assistant"
    """chat and instruct: which tokens are trained. assistant: what the assistant says. last: its
    last answer only. all: every token."""

    split: Annotated[str, Field(min_length=1)] = "train"
    """The split of a Hugging Face dataset."""

    subset: Annotated[str, Field(min_length=1)] | None = None
    """The configuration of a Hugging Face dataset, such as wikitext-2-raw-v1."""

    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the samples that come from this source, relative to the other weights.
    Left out everywhere: every sample of every source once per epoch."""


class DataConfig(Section):
    """What the model reads."""

    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1, strict=False)]
    """One or more sources of training data."""

    seq_length: Annotated[int, Field(ge=2, le=16_777_216)] = 1024
    """Tokens in one sample."""

    packing: bool = True
    """true: several documents in a sample, so that nearly nothing is padding. text: one after
    another, cut where a sample is full; other types: whole ones that fill a sample best.
    false: one document a sample, short ones padded (padding is never trained on)."""

    isolate_documents: bool | None = None
    """Whether packed documents attend to themselves alone, as if each were a row of its own.
    null: yes, save for text."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What becomes of a conversation (or other row that is not text) of more than seq_length
    tokens. Long text is cut into several samples."""

    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a source's rows that may be left out because they are broken; the log names them.
    With more the run stops before it starts. 0: with any."""

    streaming: bool = False
    """Prepare the tokens piece by piece while training, and forget them after use: for data that
    is larger than the disk."""

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the documents held out for evaluation, by document. 0: no evaluation."""

    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    """Where prepared tokens are kept. null: ~/.cache/isles (or $XDG_CACHE_HOME/isles)."""
