"""Sources of the run file: what each of them names, and its rows, from any chunk on."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from isles.config.files import BUILT_IN, how_to_find, may_be_hub_id
from isles.config.sections.data import SourceConfig
from isles.data.sources.read import CHUNK_ROWS, file_pieces, unreadable
from isles.data.sources.rows import PLAIN, Chunk, ChunkStart, Columns, Row, Source
from isles.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_SAMPLED_FILES = 256
_SAMPLED_BYTES = 2**16


def open_source(source: SourceConfig, *, streams: bool = False) -> Source:
    """The rows that a source names; `fake` names none.

    In this order: a built-in name (python-docs, python-stdlib), a file, a folder saved by the
    datasets library, a glob, a hub id. Files are looked up now and read later.

    Args:
        source: in the run file.
        streams: whether a dataset of the hub is read as it is needed; else it is downloaded now.

    Raises:
        DataError: there is no such thing.
    """
    assert source.type != "fake" and source.path is not None
    name = source.path
    if name in BUILT_IN:
        return BuiltIn(name)
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
        from isles.data.sources.hub import open_hub, stream_hub

        return (stream_hub if streams else open_hub)(name, source.subset, source.split)
    raise DataError(
        "there is no such file", where=str(path.absolute()), fix=how_to_find(path), id="files.data"
    )


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


@dataclass(frozen=True, slots=True)
class Files(Source):
    """Files that a path or a glob names.

    Args:
        name: the path as the run file has it.
        files: absolute paths in the order in which they are read.
    """

    name: str
    files: tuple[Path, ...]

    def describe(self) -> str:
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

    def content(self) -> dict[str, Any]:
        """Names below their common folder, sizes, and the beginnings and ends of some of them.

        Not their times: the same files may have been copied to each machine by itself.
        """
        root = os.path.commonpath([file.parent for file in self.files])
        every = -(-len(self.files) // _SAMPLED_FILES)
        return {
            "files": {
                os.path.relpath(file, root): [
                    size,
                    None if i % every else _sampled(Path(file), size),
                ]
                for i, (file, size, _) in enumerate(self.identity()["files"])
            }
        }

    def chunks(self, columns: Columns, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        """The chunks of each file in turn."""
        first, place = (begin["file"], tuple(begin["place"])) if begin else (0, (0, 0))
        for index in range(first, len(self.files)):
            for start, end, rows in file_pieces(self.files[index], columns, place):
                # As lists: a `ChunkStart` must not differ once it was written down as JSON.
                yield Chunk(
                    {"file": index, "place": list(start)}, {"file": index, "place": list(end)}, rows
                )
            place = (0, 0)


@dataclass(frozen=True, slots=True)
class BuiltIn(Source):
    """Real text that every CPython carries: no network, no download.

    Args:
        name: `python-docs`: the topics of Python's language reference, as `help()` shows them.
            `python-stdlib`: the sources of its standard library, without tests and files that are
            not UTF-8.
    """

    name: str

    def describe(self) -> str:
        return self.name

    def identity(self) -> dict[str, Any]:
        """The Python version, and how much of its library is installed."""
        python = f"{platform.python_implementation()} {platform.python_version()}"
        identity: dict[str, Any] = {"builtin": self.name, "python": python}
        if self.name == "python-stdlib":
            files = _library()
            size = sum(file.stat().st_size for file in files)
            identity |= {"files": len(files), "size_bytes": size}
        return identity

    def chunks(self, columns: Columns, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        columns.check((PLAIN,), self.name)
        start = begin["row"] if begin else 0
        texts = islice(self._texts(), start, None)
        while piece := [Row(where, {PLAIN: text}) for where, text in islice(texts, CHUNK_ROWS)]:
            yield Chunk({"row": start}, {"row": start + len(piece)}, [*piece])
            start += len(piece)

    def _texts(self) -> Iterator[tuple[str, str]]:
        if self.name == "python-docs":
            from pydoc_data.topics import topics

            for topic in sorted(topics):
                yield f"python-docs {topic}", topics[topic]
            return
        for file in _library():
            try:
                yield str(file), file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _library() -> list[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = [name for name in inner if name not in _LEFT_OUT]
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


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
