"""Rows out of a source of the run file: what it names is found out here."""

from __future__ import annotations

import glob
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isles.config.files import how_to_find, may_be_hub_id
from isles.config.sections.data import SourceConfig
from isles.data.sources.builtin import PythonDocs, PythonStdlib
from isles.data.sources.opening import unreadable
from isles.data.sources.readers import read_rows
from isles.data.sources.rows import Columns, Rows
from isles.errors import DataError


class Source(Protocol):
    """Rows in an order that does not change."""

    def describe(self) -> str:
        """A short name for messages."""
        ...

    def identity(self) -> dict[str, Any]:
        """All that the rows depend on, for a key; plain JSON."""
        ...

    def rows(self, columns: Columns) -> Rows:
        """The rows, each time from the first.

        Args:
            columns: of whoever reads the rows.

        Raises:
            DataError: something cannot be read, or lacks a column.
        """
        ...


@dataclass(frozen=True, slots=True)
class Files:
    """Files that a path or a glob names.

    Args:
        name: the path as the run file has it.
        files: absolute paths in the order in which they are read.
    """

    name: str
    files: tuple[Path, ...]

    def describe(self) -> str:
        """The path as the run file has it."""
        return self.name

    def identity(self) -> dict[str, Any]:
        """Path, size and time of change of every file."""
        stamps = []
        for file in self.files:
            try:
                status = file.stat()
            except OSError as error:
                raise unreadable(file, error) from error
            stamps.append([str(file), status.st_size, status.st_mtime_ns])
        return {"files": stamps}

    def rows(self, columns: Columns) -> Rows:
        """The rows of one file after another."""
        for file in self.files:
            yield from read_rows(file, columns)


def open_source(source: SourceConfig) -> Source:
    """The rows that a source names; `fake` names none.

    In this order: a built-in name (python-docs, python-stdlib), a file, a folder saved by the
    datasets library, a glob, a hub id. Files are looked up now and read later; a dataset is
    downloaded now.

    Raises:
        DataError: there is no such thing.
    """
    assert source.type != "fake" and source.path is not None
    name = source.path
    if name == "python-docs":
        return PythonDocs()
    if name == "python-stdlib":
        return PythonStdlib()
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path, source)
        if path.exists():
            return Files(name, (path.absolute(),))
        if glob.has_magic(name):
            return Files(name, _expand(path))
    except OSError as error:
        raise unreadable(path, error) from error
    if may_be_hub_id(name):
        from isles.data.sources.hub import open_hub

        return open_hub(name, source.subset, source.split)
    raise _missing(path)


def _open_folder(path: Path, source: SourceConfig) -> Source:
    from isles.data.sources.hub import is_saved_dataset, open_saved

    if is_saved_dataset(path):
        return open_saved(path.absolute(), source.split)
    # Not read as it is: a folder of data also holds readmes, archives and caches.
    endings = Counter(file.suffix for file in path.rglob("*") if file.is_file())
    if not endings:
        raise DataError(
            "the folder holds no files", where=str(path), fix="name one that does", id="files.data"
        )
    ending, count = endings.most_common(1)[0]
    raise DataError(
        "is a folder, and not one that save_to_disk of the datasets library wrote",
        where=str(path),
        fix=f"name its files with a glob: {path}/**/*{ending} ({count} files)",
        id="files.data",
    )


def _expand(pattern: Path) -> tuple[Path, ...]:
    # Path.glob takes no absolute patterns.
    found = sorted(glob.glob(str(pattern), recursive=True))  # noqa: PTH207
    files = tuple(Path(name).absolute() for name in found if Path(name).is_file())
    if not files:
        raise DataError(
            f"the glob {str(pattern)!r} matches no file",
            where=f"from the folder {Path.cwd()}",
            fix="try it with ls; ** stands for folders of any depth, and * skips hidden files",
            id="files.data",
        )
    return files


def _missing(path: Path) -> DataError:
    return DataError(
        "there is no such file", where=str(path.absolute()), fix=how_to_find(path), id="files.data"
    )
