"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.section import Section


class SourceConfig(Section):
    """One source of training text."""

    path: Annotated[str, Field(min_length=1)] | None = None
    """A file, a glob (**/*.txt), a folder saved by datasets, a hub id, python-docs or
    python-stdlib. Files: .jsonl, .parquet, anything else is read as UTF-8 text."""

    type: Literal["text", "fake"] = "text"
    """text: documents. fake: random token ids, to try machines without data."""

    text_column: Annotated[str, Field(min_length=1)] = "text"
    """The column that holds the text, in JSONL, Parquet and datasets."""

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
    """One or more sources of text."""

    seq_length: Annotated[int, Field(ge=2, le=16_777_216)] = 1024
    """Tokens in one sample."""

    packing: bool = True
    """true: documents one after another, cut into full samples. false: one document a sample,
    long ones cut, short ones padded (padding is never trained on)."""

    validation_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    """Share of the documents held out for evaluation, by document. 0: no evaluation."""

    cache_dir: Annotated[str, Field(min_length=1)] | None = None
    """Where prepared tokens are kept. null: ~/.cache/isles (or $XDG_CACHE_HOME/isles)."""
