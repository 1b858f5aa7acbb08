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
"""By type: what a source may have columns for."""


class SourceConfig(Section):
    """One source of training data."""

    path: Text | None = None
    """A file, a glob (**/*.txt), a folder saved by datasets, a hub id, python-docs or
    python-stdlib. Files: .jsonl, .json (objects, one a line or in an array), .csv, .tsv, .parquet,
    .arrow and text, each also packed (.gz, .bz2, .xz, .zst); docs/data.md has all endings."""

    type: Literal["text", "chat", "instruct", "tokens", "preference", "fake"] = "text"
    """text: documents. chat: messages with roles, also with from and value (human, gpt). instruct:
    instruction (with input) and output, or prompt and completion. tokens: token ids. preference: a
    prompt with a chosen and a rejected answer, for training.method: dpo. fake: random token ids, to
    try machines without data."""

    text_column: Text = "text"
    """text only: the column that holds the text, in files with columns and datasets."""

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
    """chat and instruct: which tokens are trained. assistant: what the assistant says, with the end
    of its turn. last: its last answer only. all: every token."""

    split: Text = "train"
    """The split of a Hugging Face dataset, or of a saved folder with several splits."""

    subset: Text | None = None
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
    another, cut where a sample is full; other types: whole ones that fill a sample best, the same
    ones in every epoch. false: one document a sample, short ones padded (padding is never trained
    on). Pairs of preferences are never packed."""

    isolate_documents: bool | None = None
    """Whether packed documents attend to themselves alone, as if each were a row of its own: then
    nothing that is trained depends on what else is in the sample. null: yes, save for text."""

    too_long: Literal["truncate", "drop"] = "truncate"
    """What becomes of a conversation (or other row that is not text) of more than seq_length
    tokens. Long text is cut into several samples."""

    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of a source's rows that isles may skip because they are broken. The log names the first
    ten. With more, the run stops: before its first step, or with streaming when it reads them. 0:
    isles skips none."""

    streaming: bool = False
    """Prepare the tokens piece by piece while training, and forget them after use: for data that is
    larger than the disk. Samples are shuffled within pieces of some 16 million tokens. The run
    needs max_steps or max_time, and several sources need weights."""

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the documents held out for evaluation, at least one. isles holds out the end of a
    single text. Without evaluation: 0."""

    cache_dir: Text | None = None
    """Folder for prepared tokens. Default: data in $XDG_CACHE_HOME/isles, or in ~/.cache/isles,
    which isles closes to other users. `isles data prune` deletes old tokens."""


def isolates(data: DataConfig, source: SourceConfig) -> bool:
    """Whether documents of a source that share a sample are kept apart.

    Pairs of preferences and fake samples are never packed.
    """
    if not data.packing or source.type in ("fake", "preference"):
        return False
    if data.isolate_documents is not None:
        return data.isolate_documents
    return source.type != "text"


def isolates_any(data: DataConfig) -> bool:
    """Whether packed documents of any source are kept apart."""
    return any(isolates(data, source) for source in data.sources)
