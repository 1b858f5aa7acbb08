"""Builders for tests of data: files of rows, and the tokens that are made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from isles.config.sections.data import SourceConfig
from isles.data.sources.find import open_source
from isles.data.sources.names import unread_message
from isles.data.sources.rows import Row, Tally
from isles.data.tokens.encode import Encoder, encode_each
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore

END = 9999
"""End of text in stores that are numbered; all their other ids count up from 0."""


class Numbered(TokenStore):
    """Tokens are their places, so that each is known again."""

    digest = "numbered"


def numbered(
    lengths: Sequence[int], kind: str = "text", *, seed: int = 0, share: float = 0.5
) -> TokenStore:
    """Documents of these lengths, of which, unless they are text, a share of tokens is trained."""
    ends = np.cumsum(lengths)
    size = int(ends[-1])
    trained = None if kind == "text" else np.random.default_rng(seed).random(size) < share
    tokens = np.arange(size, dtype=np.uint32)
    return Numbered(Path("nowhere"), "counted", tokens, ends, END, size - 1, trained, kind)


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_rows(answers: Mapping[str, str]) -> list[dict[str, Any]]:
    """Conversations of one question and its answer each."""
    return [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in answers.items()
    ]


def write_parquet(path: Path, columns: Mapping[str, Any], **options: Any) -> Path:
    """A Parquet file with these columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(dict(columns)), path, **options)
    return path


def prepare_file(
    tokenizer: Any, path: Path, cache: Path, *, max_bad_fraction: float = 0.0, **source: Any
) -> TokenStore:
    """The tokens of one source, prepared in this cache."""
    config = SourceConfig(path=str(path), **source)
    opened, encoder = open_source(config), Encoder(config, tokenizer)
    options = {"progress": quiet, "max_bad_fraction": max_bad_fraction}
    return TokenStore.open(prepare(opened, encoder, cache, **options))


def quiet(_: str) -> None:
    """Nobody listens."""


def trained_text(encoder: Encoder, row: Mapping[str, Any]) -> tuple[list[str], str]:
    """Each document of a row, trained stretches in [[ ]], and the report of unread fields."""
    tokenizer: Any = encoder.tokenizer
    tally = Tally("any", 0.0)
    (documents,) = encode_each([Row("f:1", row)], encoder, tally)
    tally.judge()
    texts = []
    for document in documents:
        pairs = zip(document.ids, document.trained.tolist(), strict=True)
        stretches = groupby(pairs, key=lambda pair: pair[1])
        parts = [
            (is_trained, tokenizer.decode([t for t, _ in part])) for is_trained, part in stretches
        ]
        texts.append("".join(f"[[{part}]]" if is_trained else part for is_trained, part in parts))
    return texts, unread_message(tally.record())
