"""Rows out of Hugging Face datasets: from the hub, or saved to a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from isles.data.sources.opening import near_names
from isles.data.sources.rows import Columns, Row, Rows
from isles.errors import DataError


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """One split of a dataset that the `datasets` library has opened.

    Args:
        name: path or hub id, for messages.
        dataset: a datasets.Dataset.
    """

    name: str
    dataset: Any  # the datasets library ships no types that mypy can follow

    def describe(self) -> str:
        """The name for messages."""
        return self.name

    def identity(self) -> dict[str, Any]:
        """The library's fingerprint, and the files beneath it."""
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return {
            "dataset": self.name,
            "fingerprint": self.dataset._fingerprint,
            "rows": len(self.dataset),
            "files": [[file.name, file.stat().st_size] for file in files],
        }

    def rows(self, columns: Columns, first: int = 0) -> Rows:
        """The rows; only the columns that are wanted are read.

        Args:
            columns: of whoever reads the rows.
            first: number of the first row, for messages.

        Raises:
            DataError: a column is missing, or the dataset is damaged.
        """
        import pyarrow as pa

        names = list(self.dataset.column_names)
        columns.check(names, self.name)
        wanted = [name for name in names if name in columns.wanted]
        dataset = self.dataset.with_format(None).select_columns(wanted)
        number = first
        try:
            for batch in dataset.iter(batch_size=1000):
                for values in zip(*batch.values(), strict=True):
                    yield Row(f"{self.name} row {number}", dict(zip(batch, values, strict=True)))
                    number += 1
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"the dataset is damaged (near row {number}): {str(error)[:300]}",
                where=self.name,
                fix="fetch it or save it again",
                id="data.damaged",
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


def _load(load: Callable[[], Any], name: str, fix: str) -> Any:
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        return load()
    except (OSError, ValueError, DatasetsError, pa.ArrowException) as error:
        what = f"cannot be loaded: {type(error).__name__}: {str(error)[:500]}"
        raise DataError(what, where=name, fix=fix, id="hub.access") from error
