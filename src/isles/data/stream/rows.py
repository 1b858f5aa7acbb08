"""Rows of a source from any place on: what a stream reads, without what came before.

A `ChunkStart` is plain JSON that says where in a source a chunk of rows begins; only the kind of
source that made it understands it.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from isles.config.files import BUILT_IN, may_be_hub_id
from isles.config.sections.data import SourceConfig
from isles.data.sources.builtin import PythonDocs, PythonStdlib
from isles.data.sources.find import Files, open_source
from isles.data.sources.hub import DatasetSource
from isles.data.sources.opening import unreadable
from isles.data.sources.rows import Columns, Row
from isles.data.stream.files import CHUNK_ROWS, file_pieces
from isles.errors import DataError

ChunkStart = dict[str, Any]
_SAMPLED_FILES = 256
_SAMPLED_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows, one after another.

    Args:
        begin: where the first of them is.
        end: where the one after the last of them is; there may be none.
        rows: in their order; one that is bad as its error.
    """

    begin: ChunkStart
    end: ChunkStart
    rows: list[Row | DataError]


class RowStream(Protocol):
    """Rows in an order that does not change, read from any chunk on."""

    def describe(self) -> str:
        """A short name for messages."""
        ...

    def identity(self) -> dict[str, Any]:
        """What the rows depend on, alike on every machine that has the same; plain JSON."""
        ...

    def stamp(self) -> object:
        """Differs once the source has changed on this machine; cheap."""
        ...

    def chunks(self, begin: ChunkStart | None) -> Iterator[Chunk]:
        """The chunks from this one to the last; None: from the first.

        Raises:
            DataError: something cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of files, one file after another."""

    source: Files
    columns: Columns

    def describe(self) -> str:
        """The path as the run file has it."""
        return self.source.describe()

    def identity(self) -> dict[str, Any]:
        """Names below their common folder, sizes, and the beginnings and ends of some of them.

        Not their times: the same files may have been copied to each machine by itself.
        """
        files = self.source.identity()["files"]
        root = os.path.commonpath([Path(file).parent for file, _, _ in files])
        every = -(-len(files) // _SAMPLED_FILES)
        return {
            "files": {
                os.path.relpath(file, root): [
                    size,
                    None if i % every else _sampled(Path(file), size),
                ]
                for i, (file, size, _) in enumerate(files)
            }
        }

    def stamp(self) -> object:
        """Sizes and times of change."""
        return self.source.identity()

    def chunks(self, begin: ChunkStart | None) -> Iterator[Chunk]:
        """The chunks of each file in turn."""
        first, place = (begin["file"], tuple(begin["place"])) if begin else (0, (0, 0))
        for index in range(first, len(self.source.files)):
            file = self.source.files[index]
            for piece, end, rows in file_pieces(file, self.columns, place):
                # As lists: a `ChunkStart` must not differ once it was written down as JSON.
                yield Chunk(
                    {"file": index, "place": list(piece)}, {"file": index, "place": list(end)}, rows
                )
            place = (0, 0)


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of a dataset that lies on this machine, by their number."""

    source: DatasetSource
    columns: Columns

    def describe(self) -> str:
        """Path and split."""
        return self.source.describe()

    def identity(self) -> dict[str, Any]:
        """The library's fingerprint of the rows."""
        known = self.source.identity()
        return {name: known[name] for name in ("fingerprint", "rows", "files")}

    def stamp(self) -> object:
        """The files' sizes."""
        return self.source.identity()

    def chunks(self, begin: ChunkStart | None) -> Iterator[Chunk]:
        """So many rows at a time."""
        dataset = self.source.dataset
        first = begin["row"] if begin else 0
        if first >= len(dataset):
            return
        rest = replace(self.source, dataset=dataset.select(range(first, len(dataset))))
        rows = rest.rows(self.columns, first)
        while piece := list(islice(rows, CHUNK_ROWS)):
            yield Chunk({"row": first}, {"row": first + len(piece)}, piece)
            first += len(piece)


@dataclass(frozen=True, slots=True)
class HubRows:
    """The rows of a dataset that is read over the network as they are needed.

    Args:
        name: hub id, subset and split, for messages.
        builder: of the `datasets` library.
        split: one split, not a slice of one.
        columns: which columns are read.
    """

    name: str
    builder: Any  # the datasets library ships no types that mypy can follow
    split: str
    columns: Columns

    def describe(self) -> str:
        """Hub id, subset and split."""
        return self.name

    def identity(self) -> dict[str, Any]:
        """The files; on the hub their names hold the commit."""
        files = (self.builder.config.data_files or {}).get(self.split, [])
        return {"dataset": self.name, "files": [str(file) for file in files]}

    def stamp(self) -> object:
        """The commit was chosen when it was opened: it cannot change."""
        return self.name

    def chunks(self, begin: ChunkStart | None) -> Iterator[Chunk]:
        """So many rows at a time, from the library's own state on."""
        dataset = self.builder.as_streaming_dataset(self.split)
        if dataset.column_names is not None:
            self.columns.check(dataset.column_names, self.name)
        state, number = (begin["state"], begin["number"]) if begin else (None, 0)
        if state is not None:
            dataset.load_state_dict(state)
        rows = iter(dataset)
        while chunk := self._next(rows, number):
            begin = {"state": state, "number": number}
            state, number = dataset.state_dict(), number + len(chunk)
            first = number - len(chunk)
            named = [Row(f"{self.name} row {first + i}", row) for i, row in enumerate(chunk)]
            yield Chunk(begin, {"state": state, "number": number}, list(named))

    def _next(self, rows: Iterator[Any], number: int) -> list[Any]:
        import pyarrow as pa
        from datasets.exceptions import DatasetsError

        try:
            return list(islice(rows, CHUNK_ROWS))
        except (OSError, ValueError, DatasetsError, pa.ArrowException) as error:
            raise DataError(
                f"cannot be read further: {type(error).__name__}: {str(error)[:300]}",
                where=f"{self.name} row {number}",
                fix="look at the network and start again: the run goes on from its last checkpoint",
            ) from error


@dataclass(frozen=True, slots=True)
class CountedRows:
    """A small source that is read from its beginning each time."""

    source: PythonDocs | PythonStdlib
    columns: Columns

    def describe(self) -> str:
        """The built-in name."""
        return self.source.describe()

    def identity(self) -> dict[str, Any]:
        """The Python version."""
        return self.source.identity()

    def stamp(self) -> object:
        """The Python version."""
        return self.source.identity()

    def chunks(self, begin: ChunkStart | None) -> Iterator[Chunk]:
        """So many documents at a time."""
        start = begin["row"] if begin else 0
        rows = islice(self.source.rows(self.columns), start, None)
        while piece := list(islice(rows, CHUNK_ROWS)):
            yield Chunk({"row": start}, {"row": start + len(piece)}, piece)
            start += len(piece)


def row_stream(source: SourceConfig, columns: Columns) -> RowStream:
    """The rows of a source of the run file; of a hub id, no data is downloaded now.

    Args:
        source: in the run file.
        columns: which columns are read.

    Raises:
        DataError: there is no such thing.
    """
    if is_on_hub(source):
        assert source.path is not None
        builder = open_builder(source.path, source.subset, source.split)
        name = f"{source.path} ({source.subset})" if source.subset else source.path
        return HubRows(f"{name} {source.split}", builder, source.split, columns)
    opened = open_source(source)
    match opened:
        case Files():
            return FileRows(opened, columns)
        case DatasetSource():
            return SavedRows(opened, columns)
        case PythonDocs() | PythonStdlib():
            return CountedRows(opened, columns)
        case _:
            raise AssertionError(f"a source of kind {type(opened).__name__} cannot be streamed")


def is_on_hub(source: SourceConfig) -> bool:
    """Whether a source is none of this machine's, by the order in which sources are looked up."""
    name = source.path or ""
    here = name in BUILT_IN or Path(name).expanduser().exists() or glob.has_magic(name)
    return not here and may_be_hub_id(name)


def open_builder(path: str, subset: str | None, split: str) -> Any:
    """What the `datasets` library knows of a dataset without its data.

    Raises:
        DataError: there is no such dataset, subset or split, or it cannot be reached.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        builder = datasets.load_dataset_builder(path, name=subset)
        builder.as_streaming_dataset(split)
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"cannot be streamed: {type(error).__name__}: {str(error)[:500]}",
            where=f"{path} {split}",
            fix=f"look at https://huggingface.co/datasets/{path} for its name, subsets and splits "
            "(a slice of a split cannot be streamed); log in with `hf auth login` if it is gated",
        ) from error
    return builder


def _sampled(file: Path, size: int) -> str:
    """A hash of a file's beginning and end."""
    try:
        with file.open("rb") as stream:
            digest = hashlib.sha256(stream.read(_SAMPLED_BYTES))
            stream.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(stream.read(_SAMPLED_BYTES))
    except OSError as error:
        raise unreadable(file, error) from error
    return digest.hexdigest()
