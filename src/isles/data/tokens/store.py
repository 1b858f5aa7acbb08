"""Prepared tokens on disk: one folder a source, whole or absent.

A folder is written beside its place under a name that says whose it is, hashed as it grows, synced
with its manifest last, and renamed. Readers map it into memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from isles.config.foreign import open_regular
from isles.data.order import Int64Array
from isles.data.tokens.encode import Encoded, Encoder
from isles.errors import DataError
from isles.run.checkpoints import sync_folder
from isles.run.process import ProcessId
from isles.run.records import MAX_LIST_BYTES, read_record, used_up

log = logging.getLogger(__name__)

FORMAT = 2
"""Of the files, and of how rows become tokens; another number is another key."""

TOKENS = "tokens.bin"
DOCUMENTS = "docs.npy"
TRAINED = "trained.bin"
MANIFEST = "manifest.json"
_FILES = {TOKENS, DOCUMENTS, TRAINED}
_COUNTS = ("num_documents", "num_tokens", "end_of_text_id", "max_token_id")

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


def find_damage(folder: Path) -> str | None:
    """Why this folder is not whole, or None: the manifest is there and the sizes are right."""
    manifest = read_record(folder / MANIFEST, MAX_LIST_BYTES)
    if manifest is None or folder.is_symlink():
        return f"{MANIFEST} is missing or damaged, or the folder is a link"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')}, not {FORMAT}"
    if not _is_sound(manifest):
        return f"{MANIFEST} has odd values"
    for name, facts in manifest["files"].items():
        try:
            found = (folder / name).lstat()
        except FileNotFoundError:
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode) or found.st_size != facts["size_bytes"]:
            return f"{name} is not a file of {facts['size_bytes']} bytes"
    return None


def _is_sound(manifest: dict[str, Any]) -> bool:
    # Other users may write to a shared cache, so each value is checked before it is used.
    files, first_bad = manifest.get("files"), manifest.get("first_bad", [])
    if not isinstance(files, dict) or not isinstance(first_bad, list):
        return False
    if not {TOKENS, DOCUMENTS} <= set(files) <= _FILES:
        return False
    counts = [manifest.get(key) for key in _COUNTS]
    counts += [manifest.get(key, 0) for key in ("rows", "empty", "bad")]
    for facts in files.values():
        if not isinstance(facts, dict) or not isinstance(facts.get("sha256"), str):
            return False
        counts.append(facts.get("size_bytes"))
    if not all(type(count) is int and count >= 0 for count in counts):
        return False
    width = {"<u2": 2, "<u4": 4}.get(str(manifest.get("dtype")), 0)
    return (
        all(isinstance(manifest.get(key), str) for key in ("name", "kind"))
        and files[TOKENS]["size_bytes"] == width * manifest["num_tokens"] > 0
        and (TRAINED not in files or files[TRAINED]["size_bytes"] == manifest["num_tokens"])
        and manifest.get("rows", 0) >= manifest.get("bad", 0) >= len(first_bad)
        and bool(first_bad) == bool(manifest.get("bad", 0))
        and all(isinstance(each, list) and list(map(type, each)) == [str] * 3 for each in first_bad)
    )


@dataclass(frozen=True, slots=True)
class TokenStore:
    """The tokens of one source, memory-mapped. Documents of text end with the end-of-text id.

    Args:
        document_ends: for each document, the place after its last token.
        trained: for each token whether it is a target; None: all are.
        kind: type of the source; documents of preferences come in pairs, the chosen one first.
    """

    folder: Path
    name: str
    tokens: TokenArray
    document_ends: Int64Array
    end_of_text_id: int
    max_token_id: int
    trained: npt.NDArray[np.bool_ | np.uint8] | None = None
    kind: str = "text"

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """A folder that `prepare` returned. DataError: it is not whole."""
        trained, damage = None, find_damage(folder)
        manifest = cast("dict[str, Any]", read_record(folder / MANIFEST, MAX_LIST_BYTES))
        try:
            if damage is not None:
                raise ValueError(damage)
            tokens = _mapped(folder / TOKENS, manifest["dtype"])
            ends = _mapped(folder / DOCUMENTS, "<i8")
            if len(ends) != manifest["num_documents"] or ends[-1] != len(tokens):
                raise ValueError(f"{DOCUMENTS} does not belong to {TOKENS}")
            if TRAINED in manifest["files"]:
                trained = _mapped(folder / TRAINED, "?")
        except (OSError, ValueError) as error:
            raise DataError(
                f"the prepared tokens are not whole: {error}",
                where=str(folder),
                fix="start again: they are prepared anew",
                id="data.damaged",
            ) from error
        return cls(
            folder=folder,
            name=manifest["name"],
            tokens=tokens,
            document_ends=ends,
            end_of_text_id=manifest["end_of_text_id"],
            max_token_id=manifest["max_token_id"],
            trained=trained,
            kind=manifest["kind"],
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all that samples are made of, as it was noted when it was written."""
        files = self.manifest["files"]
        if self.kind == "text":
            return str(files[TOKENS]["sha256"])
        parts = [str(files[name]["sha256"]) for name in sorted(files)]
        return hashlib.sha256(" ".join([self.kind, *parts]).encode()).hexdigest()

    @property
    def manifest(self) -> dict[str, Any]:
        """What was noted when it was written: `rows`, `empty`, `bad` and `first_bad` among it."""
        return cast("dict[str, Any]", read_record(self.folder / MANIFEST, MAX_LIST_BYTES))


def _mapped(path: Path, dtype: str) -> Any:
    with open_regular(path, os.O_NOFOLLOW) as stream:
        if path.name == DOCUMENTS:
            np.lib.format.read_magic(stream)
            np.lib.format.read_array_header_1_0(stream)
        found = np.memmap(stream, dtype=dtype, mode="r", offset=stream.tell())
    return found.view(np.ndarray)  # slicing a memmap object is slow


@contextmanager
def disk_errors(cache_dir: Path) -> Iterator[None]:
    """Turns the system's errors about a full or closed disk into ours.

    DataError: full, or closed to us. Other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if limit := used_up(error, cache_dir):
            usage = shutil.disk_usage(cache_dir)
            raise DataError(
                f"{limit[0]} while tokens are written: {usage.free} of {usage.total} bytes are "
                "free",
                where=str(cache_dir),
                fix=f"{limit[1]}, or set data.cache_dir to a folder on a larger disk",
                id="disk.free",
            ) from error
        if error.errno in _CLOSED:
            raise DataError(
                f"the cache folder cannot be written: {error.strerror}",
                where=str(error.filename or cache_dir),
                fix="set data.cache_dir to a folder of yours",
                id="files.output",
            ) from error
        raise


class TokenWriter:
    """Appends the documents of an encoder to a new folder; `finish` makes it whole.

    Small vocabularies take two bytes a token, others four.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._folder = folder
        self._encoder = encoder
        self._lengths: list[Int64Array] = []
        self._max_token_id = encoder.end_of_text_id
        self.num_documents = 0
        self.num_tokens = 0
        dtypes: dict[str, np.dtype[Any]] = {}
        dtypes[TOKENS] = np.dtype("<u2" if encoder.vocab_size <= 2**16 else "<u4")
        if encoder.has_mask:
            dtypes[TRAINED] = np.dtype(np.bool_)
        with disk_errors(folder.parent):
            folder.mkdir()
            self._columns = {name: _Column(folder / name, dtypes[name]) for name in dtypes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for column in self._columns.values():
            column.stream.close()

    def append(self, documents: Sequence[Encoded]) -> None:
        """Add documents."""
        if not documents:
            return
        lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
        total = int(lengths.sum())
        every = chain.from_iterable(document.ids for document in documents)
        ids = np.fromiter(every, dtype=np.int64, count=total)
        assert ids.min() >= 0 and ids.max() <= np.iinfo(self._columns[TOKENS].dtype).max
        with disk_errors(self._folder.parent):
            self._columns[TOKENS].append(ids)
            if TRAINED in self._columns:
                masks = [document.trained for document in documents]
                trained = np.concatenate([mask for mask in masks if mask is not None])
                assert len(trained) == total, "a mask for each token"
                self._columns[TRAINED].append(trained)
        self._lengths.append(lengths)
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        self.num_documents += len(documents)
        self.num_tokens += total

    def finish(self, name: str, source: dict[str, Any], rows: dict[str, Any]) -> None:
        """Write the counts of `Tally.record` and the rest, the manifest last, down to the disk."""
        buffer = io.BytesIO()
        np.save(buffer, np.cumsum(np.concatenate(self._lengths)).astype("<i8"), allow_pickle=False)
        ends = buffer.getvalue()
        files = {
            name: {"size_bytes": column.size_bytes, "sha256": column.hash.hexdigest()}
            for name, column in self._columns.items()
        }
        files[DOCUMENTS] = {"size_bytes": len(ends), "sha256": hashlib.sha256(ends).hexdigest()}
        manifest = {
            "format": FORMAT,
            "name": name,
            "kind": self._encoder.kind,
            "source": source,
            "dtype": self._columns[TOKENS].dtype.str,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "end_of_text_id": self._encoder.end_of_text_id,
            "max_token_id": self._max_token_id,
            **rows,
            "files": files,
        }
        with disk_errors(self._folder.parent):
            for column in self._columns.values():
                os.fsync(column.stream.fileno())
            for file, data in (
                (DOCUMENTS, ends),
                (MANIFEST, json.dumps(manifest, indent=1).encode()),
            ):
                with (self._folder / file).open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
            sync_folder(self._folder)


class _Column:
    # A file of numbers of one type, hashed as it grows.

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.size_bytes = 0
        self.hash = hashlib.sha256()
        # Unbuffered: a write fails where it is made, not when the file is closed.
        self.stream = io.FileIO(path, "w")

    def append(self, numbers: npt.NDArray[Any]) -> None:
        data = memoryview(numbers.astype(self.dtype).tobytes())
        self.hash.update(data)
        self.size_bytes += len(data)
        while data:  # a disk that is nearly full takes a part
            data = data[self.stream.write(data) :]


def temporary_beside(folder: Path, kind: str = "new") -> Path:
    """A name beside a folder that has its owner's process in it, for `remove_stale`."""
    process = ProcessId.of(os.getpid())
    owner = f"{process.host}@{process.pid}@{process.started}"
    return folder.with_name(f".tmp-{kind}-{folder.name}@{owner}")


def remove_stale(folder: Path, *, locked: bool) -> None:
    """Remove what dead processes of this machine left beside a folder.

    `locked`: nobody else makes it now, so that what others left of it goes as well.
    """
    for entry in folder.parent.glob(".tmp-*"):
        parts = re.fullmatch(r"\.tmp-[a-z]+-(.+?)@(.+)@(\d+)@([\d.]+)", entry.name)
        if parts is None:
            continue
        owner = ProcessId(parts[2], int(parts[3]), float(parts[4]))
        stale = not owner.is_alive() if owner.is_here() else locked and parts[1] == folder.name
        if stale:
            log.info("removing leftovers=%s", entry)
            shutil.rmtree(entry, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Give a whole folder its name, in the place of a damaged one."""
    if os.path.lexists(folder):
        if find_damage(folder) is None:  # without file locks, or from elsewhere: another was first
            shutil.rmtree(temporary)
            return
        old = temporary_beside(folder, "old")
        folder.rename(old)
        old.unlink() if old.is_symlink() else shutil.rmtree(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
