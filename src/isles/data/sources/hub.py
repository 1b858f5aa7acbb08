"""Rows out of Hugging Face datasets: saved to a folder, downloaded, or read over the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from isles.data.sources.read import CHUNK_ROWS, near_names
from isles.data.sources.rows import Chunk, ChunkStart, Columns, Row, Source
from isles.errors import DataError


@dataclass(frozen=True, slots=True)
class DatasetSource(Source):
    """One split of a dataset that the `datasets` library has opened.

    Args:
        name: path or hub id, for messages.
        dataset: a datasets.Dataset.
    """

    name: str
    dataset: Any  # the datasets library ships no types that mypy can follow

    def describe(self) -> str:
        return self.name

    def identity(self) -> dict[str, Any]:
        """The library's fingerprint, and the files beneath it."""
        return {"dataset": self.name, **self.content()}

    def content(self) -> dict[str, Any]:
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return {
            "fingerprint": self.dataset._fingerprint,
            "rows": len(self.dataset),
            "files": [[file.name, file.stat().st_size] for file in files],
        }

    def chunks(self, columns: Columns, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        """So many rows at a time; only the columns that are wanted are read."""
        import pyarrow as pa

        names = list(self.dataset.column_names)
        columns.check(names, self.name)
        wanted = [name for name in names if name in columns.wanted]
        dataset = self.dataset.with_format(None).select_columns(wanted)
        number = begin["row"] if begin else 0
        try:
            while number < len(dataset):
                batch = dataset[number : number + CHUNK_ROWS]
                cells = zip(*batch.values(), strict=True)
                rows = [dict(zip(batch, values, strict=True)) for values in cells]
                end = number + len(rows)
                named = [Row(f"{self.name} row {number + i}", row) for i, row in enumerate(rows)]
                yield Chunk({"row": number}, {"row": end}, [*named])
                number = end
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"the dataset is damaged (near row {number}): {str(error)[:300]}",
                where=self.name,
                fix="fetch it or save it again",
                id="data.damaged",
            ) from error


@dataclass(frozen=True, slots=True)
class HubStream(Source):
    """The rows of a dataset that is read over the network as they are needed.

    Args:
        name: hub id, subset and split, for messages.
        builder: of the `datasets` library.
        split: one split, not a slice of one.
    """

    name: str
    builder: Any
    split: str

    def describe(self) -> str:
        return self.name

    def identity(self) -> dict[str, Any]:
        """The files; on the hub their names hold the commit, so that they cannot change."""
        files = (self.builder.config.data_files or {}).get(self.split, [])
        return {"dataset": self.name, "files": [str(file) for file in files]}

    def chunks(self, columns: Columns, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        """So many rows at a time, from the library's own state on."""
        dataset = self.builder.as_streaming_dataset(self.split)
        if dataset.column_names is not None:
            columns.check(dataset.column_names, self.name)
        state, number = (begin["state"], begin["number"]) if begin else (None, 0)
        if state is not None:
            dataset.load_state_dict(state)
        rows = iter(dataset)
        while chunk := self._next(rows, number):
            begin = {"state": state, "number": number}
            named = [Row(f"{self.name} row {number + i}", row) for i, row in enumerate(chunk)]
            state, number = dataset.state_dict(), number + len(chunk)
            yield Chunk(begin, {"state": state, "number": number}, [*named])

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


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote this folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def open_saved(folder: Path, split: str) -> DatasetSource:
    """A folder written by `save_to_disk`; the split counts only where it holds several.

    Raises:
        DataError: it is damaged, or has no such split.
    """
    import datasets

    fix = "save it again with save_to_disk of the datasets library"
    loaded = _load(lambda: datasets.load_from_disk(str(folder)), str(folder), fix)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            near = get_close_matches(split, loaded, n=1) or list(loaded)[:1]
            raise DataError(
                f"there is no split {split!r}; there are: {', '.join(loaded)}",
                where=str(folder),
                fix=f"set data.sources.split to {near[0] if near else 'one of them'}",
                id="hub.access",
            )
        loaded = loaded[split]
    return DatasetSource(str(folder), loaded)


def open_hub(path: str, subset: str | None, split: str) -> DatasetSource:
    """A dataset of the Hugging Face hub, downloaded unless it lies in the library's cache.

    Args:
        path: hub id (owner/name), or whatever else `datasets.load_dataset` takes.
        subset: the configuration; None: its default.
        split: the split, or a slice of one such as train[:1%].

    Raises:
        DataError: there is no such dataset, subset or split, or it cannot be reached.
    """
    import datasets

    name = f"{path} ({subset})" if subset else path
    near = "".join(f"; did you mean {other}?" for other in near_names(Path(path))[:1])
    fix = (
        f"as a file, {path!r} does not exist in {Path.cwd()}{near}. As a dataset: look at "
        f"https://huggingface.co/datasets/{path} for its name, subsets and splits; log in with "
        f"`hf auth login` if it is gated; without network, download it before"
    )
    loaded = _load(lambda: datasets.load_dataset(path, name=subset, split=split), name, fix)
    return DatasetSource(f"{name} {split}", loaded)


def stream_hub(path: str, subset: str | None, split: str) -> HubStream:
    """A dataset of the hub without its data.

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
    return HubStream(f"{path} ({subset}) {split}" if subset else f"{path} {split}", builder, split)


def _load(load: Callable[[], Any], name: str, fix: str) -> Any:
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (OSError, ValueError, DatasetsError, pa.ArrowException) as error:
        what = f"cannot be loaded: {type(error).__name__}: {str(error)[:500]}"
        raise DataError(what, where=name, fix=fix, id="hub.access") from error
