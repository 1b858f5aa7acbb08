"""Files in the manner of public datasets: what writes them, and what training makes of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from isles.config.sections.data import SourceConfig
from isles.data.chat.template import describe_template
from isles.data.show import shown_documents
from isles.data.sources.find import open_source
from isles.data.sources.names import unread_message
from isles.data.tokens.encode import Encoder
from isles.data.tokens.prepare import prepare
from isles.data.tokens.store import TokenStore
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import DataError
from tests.data import quiet

Write = Callable[[Path, list[Any]], None]
START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = """\
{%- if tools -%}{{- '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') -}}
{%- for call in m.tool_calls or [] -%}{{- '<call>' + (call.function | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Given:
    """A file as a public dataset has it, and what is to become of it.

    Args:
        name: its path below a folder.
        rows: what `write` writes.
        source: the keys of the run file, without the path.
        want: its documents, trained stretches in [[ ]]; or parts of the error and of its fix.
        unread: the report of fields that nothing reads.
        path: the path in the run file, if it is not `name`.
        beside: other files of the dataset.
    """

    name: str
    write: Write
    rows: Any
    source: dict[str, Any]
    want: Sequence[str] | tuple[str, str]
    unread: str = ""
    path: str = ""
    beside: dict[str, bytes] = field(default_factory=dict)


@cache
def tokenizer() -> Any:
    """A tokenizer whose chat template knows tools, for all files."""
    made: Any = train_tokenizer(["The quick brown fox says hello, and asks: why?"], 300)
    made.add_special_tokens({"additional_special_tokens": [START, END]})
    made.chat_template = TEMPLATE
    describe_template(made, "given.jinja", {})
    return made


def outcome(given: Given, folder: Path) -> tuple[Sequence[str] | tuple[str, str], str]:
    """Write a file and prepare it: its documents, or an error and its fix; and unread fields."""
    file = folder / given.name
    file.parent.mkdir(parents=True)
    for name, data in given.beside.items():
        (folder / name).write_bytes(data)
    given.write(file, given.rows)
    path = str(folder / (given.path or given.name))
    config = SourceConfig.model_validate({**given.source, "path": path})
    try:
        source, encoder = open_source(config), Encoder(config, tokenizer())
        store = TokenStore.open(prepare(source, encoder, folder / ".cache", progress=quiet))
    except DataError as error:
        assert error.where.startswith(str(folder)), error.where
        return (error.what, error.fix), ""
    decode = partial(tokenizer().decode, skip_special_tokens=False)
    documents = [
        "".join(f"[[{part.text}]]" if part.is_trained else part.text for part in shown.stretches)
        for shown in shown_documents(store, decode, 4096, 99)
    ]
    return documents, unread_message(store.manifest)


def check(table: Sequence[Given], folder: Path) -> None:
    """Fail with all files of a table that do not become what they are to become."""
    wrong = list[str]()
    for number, given in enumerate(table):
        got, unread = outcome(given, folder / f"{number}")
        if isinstance(given.want, tuple):
            is_right = isinstance(got, tuple) and all(
                part in text for part, text in zip(given.want, got, strict=True)
            )
        else:
            is_right = got == list(given.want) and unread == given.unread
        if not is_right:
            found = f"{got} {unread!r}\n  not {given.want} {given.unread!r}"
            wrong.append(f"{given.name} {given.source}:\n  {found}")
    assert not wrong, "\n".join(wrong)


def chat(*turns: str) -> str:
    """The document of a conversation. A turn is `user: Hi`; the assistant's are trained."""
    return "".join(map(_turn, turns))


def _turn(turn: str) -> str:
    role, _, text = turn.partition(": ")
    if role == "assistant":
        return f"{START}assistant\n[[{text}{END}]]\n"
    return f"{START}{role.replace('masked', 'assistant')}\n{text}{END}\n"


def text(said: str) -> str:
    """The document of a text."""
    return f"[[{said}{STOP}]]"


# ---- What writes them. ----


def lines(path: Path, rows: list[Any], end: str = "\n") -> None:
    _pack(path, "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode())


def array(path: Path, rows: list[Any]) -> None:
    _pack(path, json.dumps(rows, indent=2).encode())


def plain(path: Path, said: str) -> None:
    _pack(path, said.encode())


def raw(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def table(path: Path, rows: list[Any], **options: Any) -> None:
    """CSV, or with a dialect of it."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    _pack(path, out.getvalue().encode("utf-8-sig" if options.get("delimiter") == ";" else "utf-8"))


def parquet(path: Path, rows: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
    pq.write_table(made, path, compression="zstd", row_group_size=2)


def saved(path: Path, rows: list[Any]) -> None:
    """A folder of the datasets library with two splits."""
    import datasets

    data = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(path)


def _pack(path: Path, data: bytes) -> None:
    import pyarrow as pa

    match path.suffix:
        case ".gz":
            data = gzip.compress(data)
        case ".xz":
            data = lzma.compress(data)
        case ".zst":
            data = pa.Codec("zstd").compress(data, asbytes=True)
    path.write_bytes(data)
