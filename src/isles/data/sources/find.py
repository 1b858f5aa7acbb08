"""Sources of the run file: the files or dataset of each, and its rows from any chunk on."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from threading import Event
from typing import Any

from isles.config.endings import ending_of
from isles.config.files import (
    BUILT_IN,
    GLOB_FIX,
    folder_issue,
    how_to_find,
    may_be_huggingface_id,
    named_files,
)
from isles.config.foreign import open_foreign
from isles.config.sections.data import SourceConfig
from isles.data.sources.arrow import (
    check_plain,
    check_saved,
    damaged,
    one_of_each,
    small_parts,
    table_rows,
    undecoded,
    without_nulls,
)
from isles.data.sources.files import unreadable
from isles.data.sources.read import check_endings, file_chunks
from isles.data.sources.rows import (
    CHUNK_ROWS,
    PLAIN,
    Chunk,
    ChunkStart,
    Parser,
    Row,
    Rows,
    Source,
    counted_chunks,
)
from isles.errors import DataError

_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_LOOK = (
    "check its name, subsets and splits at https://huggingface.co/datasets/{}; log in with "
    "`hf auth login` if it is gated"
)
_SAMPLED_FILES = 256
_SAMPLED_BYTES = 2**16
_HASHED_BYTES = 2**20


def open_source(source: SourceConfig, *, streams: bool = False) -> Source:
    """The rows that a source names; `fake` names none.

    In this order: a built-in name (python-docs, python-stdlib), a file, a folder saved by the
    datasets library, a glob, a Hugging Face id. Files are found now and read later. DataError: not
    found.

    Args:
        streams: whether a Hugging Face dataset is read while it is needed; otherwise it is
            downloaded now.
    """
    assert source.type != "fake" and source.path is not None
    name = source.path
    if name in BUILT_IN:
        return BuiltIn(name)
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            if found := folder_issue(path, source.type):
                raise DataError(found[0], where=str(path), fix=found[1], id="files.data")
            return _open_saved(path.absolute(), source.split)
        if files := named_files(name):
            check_endings(files)
            return Files(name, tuple(file.absolute() for file in files))
    except OSError as error:
        raise unreadable(path, error) from error
    if glob.has_magic(name):
        raise DataError(
            f"the glob {name!r} matches no file",
            where=f"from the folder {Path.cwd()}",
            fix=GLOB_FIX,
            id="files.data",
        )
    if may_be_huggingface_id(name):
        return (stream_huggingface if streams else open_huggingface)(
            name, source.subset, source.split
        )
    raise DataError(
        "file not found", where=str(path.absolute()), fix=how_to_find(path), id="files.data"
    )


@dataclass(frozen=True, slots=True)
class Files(Source):
    """Files of a path or a glob, by absolute paths, in reading order."""

    name: str
    files: tuple[Path, ...]

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

    def stamp(self) -> list[int]:
        # A program can set the time of change of a file, but not that of its inode.
        return [file.stat().st_ctime_ns for file in self.files]

    def content(self) -> dict[str, Any]:
        """Names below their common folder, sizes, and the beginnings and ends of some of them.

        Not their times: the same files may have been copied to each machine by itself.
        """
        root = os.path.commonpath([file.parent for file in self.files])
        every = -(-len(self.files) // _SAMPLED_FILES)
        return {
            "files": {
                os.path.relpath(file, root): [size, None if i % every else _sample(file, size)]
                for i, (file, size, _) in enumerate(self.identity()["files"])
            }
        }

    def near(self, identity: dict[str, Any]) -> dict[str, Any]:
        """Format and size of each file, without its path and its time."""
        sizes = [size for _, size, _ in identity["files"]]
        endings = [ending_of(file.name) for file in self.files]
        return {"files": [[e.format, e.packing, n] for e, n in zip(endings, sizes, strict=True)]}

    def digest(self, is_over: Event) -> str:
        """A hash of all bytes of all files."""
        whole = hashlib.sha256()
        block = memoryview(bytearray(_HASHED_BYTES))
        for file in self.files:
            if is_over.is_set():
                break
            digest = hashlib.sha256()
            try:
                with open_foreign(file)[0] as stream:
                    while (size := stream.readinto(block)) and not is_over.is_set():
                        digest.update(block[:size])
            except OSError as error:
                raise unreadable(file, error) from error
            whole.update(digest.digest())
        return whole.hexdigest()

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        begin = begin or {"file": 0}
        for index in range(begin["file"], len(self.files)):
            for chunk in file_chunks(self.files[index], parser, begin):
                start, end = {"file": index, **chunk.begin}, {"file": index, **chunk.end}
                yield Chunk(start, end, chunk.rows)
            begin = {}


def _sample(file: str, size: int) -> str:
    # A hash of a file's beginning and end.
    try:
        with open_foreign(Path(file))[0] as stream:
            digest = hashlib.sha256(stream.read(_SAMPLED_BYTES))
            stream.seek(max(size - _SAMPLED_BYTES, 0))
            digest.update(stream.read(_SAMPLED_BYTES))
    except OSError as error:
        raise unreadable(Path(file), error) from error
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class BuiltIn(Source):
    """Real text that is part of every CPython, without a download.

    `python-docs`: the topics of Python's language reference, as `help()` shows them.
    `python-stdlib`: the sources of its standard library, without tests and without files that are
    not UTF-8.
    """

    name: str

    def identity(self) -> dict[str, Any]:
        """The Python version."""
        python = f"{platform.python_implementation()} {platform.python_version()}"
        return {"builtin": self.name, "python": python}

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        parser.check((PLAIN,), self.name)
        first = begin["row"] if begin else 0
        rows = (Row(where, {PLAIN: text}) for where, text in self._texts())
        yield from counted_chunks(islice(rows, first, None), first)

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


@dataclass(frozen=True, slots=True)
class DatasetSource(Source):
    """One split of a dataset that the `datasets` library has opened."""

    name: str
    dataset: Any  # the datasets library ships no types that mypy can follow

    def identity(self) -> dict[str, Any]:
        """The library's fingerprint, and the files beneath it."""
        return self.content()

    def content(self) -> dict[str, Any]:
        files = [Path(entry["filename"]) for entry in self.dataset.cache_files]
        return {
            "fingerprint": self.dataset._fingerprint,
            "rows": len(self.dataset),
            "files": [[file.name, file.stat().st_size] for file in files],
        }

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        first = begin["row"] if begin else 0
        yield from counted_chunks(self._rows(parser, first), first)

    def _rows(self, parser: Parser, first: int) -> Rows:
        names = list(self.dataset.column_names)
        parser.check(names, self.name)
        one_of_each(names, parser.wanted, self.name)
        wanted = [name for name in names if name in parser.wanted]
        cells = {name: self.dataset.data.column(name) for name in names if name not in wanted}
        skipped = [name for name, each in cells.items() if each.null_count < len(each)]
        # As Arrow, so that the library opens nothing that a row names.
        dataset = self.dataset.with_format("arrow").select_columns(wanted)
        features = undecoded(dataset.features)
        has_json = any(features._column_requires_decoding.values())
        for number in range(first, len(dataset), CHUNK_ROWS):
            where = f"{self.name} row {number}"
            try:
                table = dataset[number : number + CHUNK_ROWS]
            except Exception as error:  # whatever damaged buffers provoke
                raise damaged(error, where) from error
            check_plain(table, self.name)
            for begin, part in small_parts(table, self.name, number):
                where = f"{self.name} row {begin}"
                rows = table_rows(part, where, keeps_nulls=has_json)
                if has_json:
                    rows = [_with_json(features, row, where) for row in rows]
                yield from _numbered(self.name, begin, rows, skipped)


def _with_json(features: Any, row: dict[str, Any], where: str) -> dict[str, Any]:
    # The row with its texts of JSON read, as the library would.
    try:
        decoded: dict[str, Any] = features.decode_example(row)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise damaged(error, where) from error
    return {name: without_nulls(value, features.get(name)) for name, value in decoded.items()}


@dataclass(frozen=True, slots=True)
class HuggingFaceStream(Source):
    """The rows of one split of a dataset, read over the network while they are needed."""

    name: str
    builder: Any
    split: str

    def identity(self) -> dict[str, Any]:
        """The files; on Hugging Face their names hold the commit, so that they cannot change."""
        files = (self.builder.config.data_files or {}).get(self.split, [])
        return {"dataset": self.name, "files": [str(file) for file in files]}

    def chunks(self, parser: Parser, begin: ChunkStart | None = None) -> Iterator[Chunk]:
        if getattr(self.builder.config, "decode_num_threads", None):
            self.builder.config.decode_num_threads = 0  # they would open what rows name
        dataset = self.builder.as_streaming_dataset(self.split)
        if dataset.column_names is not None:
            parser.check(dataset.column_names, self.name)
            dataset = dataset.cast(undecoded(dataset.features))
        state, number = (begin["state"], begin["number"]) if begin else (None, 0)
        if state is not None:
            dataset.load_state_dict(state)
        rows, features = iter(dataset), dataset.features or {}
        while chunk := self._next(rows, features, number):
            begin = {"state": state, "number": number}
            named = _numbered(self.name, number, chunk)
            state, number = dataset.state_dict(), number + len(chunk)
            yield Chunk(begin, {"state": state, "number": number}, named)

    def _next(self, rows: Iterator[Any], features: Any, number: int) -> list[Any]:
        try:
            return [
                {name: without_nulls(value, features.get(name)) for name, value in row.items()}
                for row in islice(rows, CHUNK_ROWS)
            ]
        # The library lets whatever the files provoke pass through, and those come from elsewhere.
        except Exception as error:
            raise DataError(
                f"cannot be read further: {type(error).__name__}: {str(error)[:300]}",
                where=f"{self.name} row {number}",
                fix="check the network and start again: the run resumes from its last checkpoint",
            ) from error


def _numbered(
    name: str, first: int, rows: Sequence[Any], skipped: Sequence[str] = ()
) -> list[Row | DataError]:
    return [Row(f"{name} row {first + i}", row, skipped) for i, row in enumerate(rows)]


def _open_saved(folder: Path, split: str) -> DatasetSource:
    # The split counts only where the folder holds several.
    import datasets

    check_saved(folder)
    fix = "save it again with save_to_disk of the datasets library"
    loaded = _load(lambda: datasets.load_from_disk(str(folder)), str(folder), fix)
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            near = get_close_matches(split, loaded, n=1) or list(loaded)[:1]
            raise DataError(
                f"split {split!r} not found; the dataset has {', '.join(loaded)}",
                where=str(folder),
                fix=f"set data.sources.split to {near[0] if near else 'one of them'}",
                id="huggingface.access",
            )
        loaded = loaded[split]
    return DatasetSource(str(folder), loaded)


def open_huggingface(path: str, subset: str | None, split: str) -> DatasetSource:
    """A dataset of the Hugging Face Hub, downloaded unless it is in the library's cache.

    DataError: the dataset, subset or split (or slice) does not exist or cannot be reached.
    """
    import datasets

    name = f"{path} ({subset})" if subset else path
    fix = (
        f"as a file, {path!r} does not exist in {Path.cwd()}: {how_to_find(Path(path))}. As a "
        f"dataset: {_LOOK.format(path)}; without a network, download it first"
    )

    def load() -> Any:
        with _own_files_only(path):
            builder = datasets.load_dataset_builder(path, name=subset)
            _check_files(builder, path)
            builder.download_and_prepare()
            return builder.as_dataset(split)

    return DatasetSource(f"{name} {split}", _load(load, name, fix))


def stream_huggingface(path: str, subset: str | None, split: str) -> HuggingFaceStream:
    """A dataset of the hub without its data.

    DataError: the dataset, subset or split does not exist or cannot be reached.
    """
    import datasets

    def load() -> Any:
        with _own_files_only(path):
            builder = datasets.load_dataset_builder(path, name=subset)
            _check_files(builder, path)
            builder.as_streaming_dataset(split)
            return builder

    name = f"{path} ({subset}) {split}" if subset else f"{path} {split}"
    fix = f"{_LOOK.format(path)}; a slice of a split cannot be streamed"
    return HuggingFaceStream(name, _load(load, name, fix), split)


@contextmanager
def _own_files_only(path: str) -> Iterator[None]:
    # The readme of a dataset may name any file of this machine, or any address, as data. The
    # library looks there before it has a builder, so it is stopped here, where each pattern passes:
    # from a readme, a .huggingface.yaml or a data_dir.
    from datasets import data_files

    resolve = data_files.resolve_pattern

    def own(pattern: str, base_path: str, *args: Any, **more: Any) -> Any:
        is_inside = re.match(r"[/\\~]|[A-Za-z][\w+.-]*:", pattern) is None
        for place in (base_path, f"{base_path}/{pattern}" if is_inside else pattern):
            _check_place(place, path)
        return resolve(pattern, base_path, *args, **more)

    data_files.resolve_pattern = own
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def _check_files(builder: Any, path: str) -> None:
    # The files that were found: a pattern may have led elsewhere, over a link of a folder.
    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            _check_place(file, path)


def _check_place(place: str, path: str) -> None:
    on_hub = f"hf://datasets/{path}"
    if place.startswith(on_hub):
        is_own = place[len(on_hub) :][:1] in ("", "@", "/")
        below = place[len(on_hub) :]
    else:
        folder = str(Path(path).resolve())
        is_own = place == folder or place.startswith(f"{folder}/")
        below = place[len(folder) :]
    parts = below.split("/")[1:]
    is_odd = "::" in below or "://" in below or any(part in (".", "..") for part in parts)
    if not is_own or is_odd:
        raise ValueError(f"it names {place!r:.200} as data, which is not in the dataset")


def _load(load: Callable[[], Any], name: str, fix: str) -> Any:
    try:
        return load()
    # The library lets whatever the files provoke pass through, and those come from elsewhere.
    except Exception as error:
        what = f"cannot be loaded: {type(error).__name__}: {str(error)[:500]}"
        raise DataError(what, where=name, fix=fix, id="huggingface.access") from error
