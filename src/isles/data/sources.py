"""Documents out of a source of the run file: what it names is found out here."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from isles.config.data import SourceConfig
from isles.config.files import how_to_find, may_be_hub_id
from isles.data.builtin import PythonDocs, PythonStdlib
from isles.data.readers import read_documents, unreadable
from isles.errors import DataError


class Source(Protocol):
    """Documents in an order that does not change."""

    def describe(self) -> str:
        """A short name for messages."""
        ...

    def identity(self) -> dict[str, Any]:
        """All that the documents depend on, for a key; plain JSON."""
        ...

    def documents(self) -> Iterator[str]:
        """The documents, each time from the first.

        Raises:
            DataError: something cannot be read, or is not text.
        """
        ...


@dataclass(frozen=True, slots=True)
class Files:
    """Files that a path or a glob names.

    Args:
        name: the path as the run file has it.
        files: absolute paths in the order in which they are read.
        text_column: the column with the text, for files that have columns.
    """

    name: str
    files: tuple[Path, ...]
    text_column: str

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
        return {"files": stamps, "text_column": self.text_column}

    def documents(self) -> Iterator[str]:
        """The documents of one file after another."""
        for file in self.files:
            yield from read_documents(file, self.text_column)


def open_source(source: SourceConfig) -> Source:
    """The documents that a source of type `text` names.

    In this order: a built-in name (python-docs, python-stdlib), a file, a folder saved by the
    datasets library, a glob, a hub id. Files are looked up now and read later; a dataset is
    downloaded now.

    Raises:
        DataError: there is no such thing.
    """
    assert source.type == "text" and source.path is not None
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
            return Files(name, (path.absolute(),), source.text_column)
        if glob.has_magic(name):
            return Files(name, _expand(path), source.text_column)
    except OSError as error:
        raise unreadable(path, error) from error
    if may_be_hub_id(name):
        from isles.data.hub import open_hub

        return open_hub(name, source.subset, source.split, source.text_column)
    raise _missing(path)


def read_source(source: Source) -> Iterator[str]:
    """The documents of a source; those that hold nothing but white space are left out.

    Raises:
        DataError: none is left, or something cannot be read.
    """
    empty = True
    for document in source.documents():
        if document and not document.isspace():
            empty = False
            yield document
    if empty:
        raise DataError(
            "is empty: no document that holds more than white space",
            where=source.describe(),
            fix="give it text, or take it out of data.sources",
        )


def _open_folder(path: Path, source: SourceConfig) -> Source:
    from isles.data.hub import is_saved_dataset, open_saved

    if is_saved_dataset(path):
        return open_saved(path.absolute(), source.split, source.text_column)
    # Not read as it is: a folder of data also holds readmes, archives and caches.
    endings = Counter(file.suffix for file in path.rglob("*") if file.is_file())
    if not endings:
        raise DataError("the folder holds no files", where=str(path), fix="name one that does")
    ending, count = endings.most_common(1)[0]
    raise DataError(
        "is a folder, and not one that save_to_disk of the datasets library wrote",
        where=str(path),
        fix=f"name its files with a glob: {path}/**/*{ending} ({count} files)",
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
        )
    return files


def _missing(path: Path) -> DataError:
    return DataError("there is no such file", where=str(path.absolute()), fix=how_to_find(path))
