"""Prepared tokens on disk: one folder per source, complete or absent.

A folder is written under a temporary name that identifies its owner, hashed while it grows, synced
with its manifest last, and renamed. Readers map it into memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import shutil
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
from isles.data.sources.rows import MOST_UNREAD
from isles.data.tokens.encode import Encoded, Encoder
from isles.errors import DataError, PreflightError
from isles.run.checkpoints import sync_folder
from isles.run.prepared import MANIFEST, TOKENS, hold, temporary_beside
from isles.run.records import MAX_LIST_BYTES, read_record, used_up

log = logging.getLogger(__name__)

FORMAT = 5
"""Version of the files and of the conversion of rows to tokens; a new number gives new keys."""

DOCUMENTS = "docs.npy"
TRAINED = "trained.bin"
_FILES = {TOKENS, DOCUMENTS, TRAINED}
_MOST_HEADER_BYTES = 256
_ENDS_AT_ONCE = 2**20
_COUNTS = ("num_documents", "num_tokens", "end_of_text_id", "max_token_id")

TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_OTHER_FOLDER = "set data.cache_dir to a folder of yours"
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})


def find_damage(folder: Path, encoder: Encoder | None = None) -> str | None:
    """The reason why this folder cannot be used, or None.

    The check covers the manifest, the sizes and types of the files, and the ends of the documents.
    If `encoder` is given, the tokens must be of its type and its tokenizer.
    """
    try:
        _whole(folder, encoder)
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror or error}"
    except ValueError as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class _Whole:
    manifest: dict[str, Any]
    tokens: TokenArray
    document_ends: Int64Array
    trained: npt.NDArray[np.uint8] | None


def _whole(folder: Path, encoder: Encoder | None = None) -> _Whole:
    # Map the files of a folder. ValueError: a value, a size, or an end of a document is odd, or the
    # tokens are not of this encoder. Token ids are not read here, as there may be terabytes: see
    # `TokenStore.check_ids`.
    manifest = read_record(folder / MANIFEST, MAX_LIST_BYTES)
    if manifest is None or folder.is_symlink():
        raise ValueError(f"{MANIFEST} is missing or damaged, or the folder is a link")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} has format {str(manifest.get('format'))[:20]}, not {FORMAT}")
    if not _is_sound(manifest):
        raise ValueError(f"{MANIFEST} has odd values")
    if encoder is not None and not _is_of(manifest, encoder):
        raise ValueError(f"{MANIFEST} names another type or another tokenizer")
    sizes = {name: facts["size_bytes"] for name, facts in manifest["files"].items()}
    tokens = _mapped(folder / TOKENS, sizes[TOKENS], manifest["dtype"])
    ends = _mapped(folder / DOCUMENTS, sizes[DOCUMENTS], "<i8", manifest["num_documents"])
    if not _are_in_order(ends, len(tokens)):
        raise ValueError(f"{DOCUMENTS} does not belong to {TOKENS}")
    trained = _mapped(folder / TRAINED, sizes[TRAINED], "u1") if TRAINED in sizes else None
    return _Whole(manifest, tokens, ends, trained)


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
        and manifest["end_of_text_id"] <= manifest["max_token_id"]
        and (manifest["kind"] != "preference" or manifest["num_documents"] % 2 == 0)
        and manifest.get("rows", 0) >= manifest.get("bad", 0) >= len(first_bad)
        and bool(first_bad) == bool(manifest.get("bad", 0))
        and all(isinstance(each, list) and list(map(type, each)) == [str] * 3 for each in first_bad)
        and isinstance(manifest.get("ignored", []), list)
        and isinstance(unread := manifest.get("unread", {}), dict)
        and len(unread) <= MOST_UNREAD
        and all(type(n) is int and 0 < n <= manifest.get("rows", 0) for n in unread.values())
    )


def _is_of(manifest: dict[str, Any], encoder: Encoder) -> bool:
    # The name of the folder says it, but whoever shares the cache chooses the names.
    return (
        manifest["kind"] == encoder.kind
        and (TRAINED in manifest["files"]) == encoder.has_mask
        and manifest["end_of_text_id"] == encoder.end_of_text_id
        and manifest["max_token_id"] < encoder.vocab_size
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
    def open(cls, folder: Path, name: str | None = None) -> TokenStore:
        """A folder that `prepare` returned. DataError: it is not whole or not sound.

        `name`: of the source, which may have had another name when the folder was made.
        """
        try:
            found = _whole(folder)
        except (OSError, ValueError) as error:
            raise _damaged(f"the prepared tokens are incomplete: {error}", folder) from error
        return cls(
            folder=folder,
            name=name or found.manifest["name"],
            tokens=found.tokens,
            document_ends=found.document_ends,
            end_of_text_id=found.manifest["end_of_text_id"],
            max_token_id=found.manifest["max_token_id"],
            trained=found.trained,
            kind=found.manifest["kind"],
        )

    def check_ids(self, ids: npt.NDArray[Any]) -> None:
        """Check ids of this store before they are used. To check all of them first would be slow.

        DataError: an id is larger than `max_token_id`.
        """
        if ids.size and (largest := int(ids.max())) > self.max_token_id:
            what = f"the prepared tokens hold id {largest}, but {MANIFEST} allows at most "
            raise _damaged(f"{what}{self.max_token_id}", self.folder)

    @property
    def digest(self) -> str:
        """SHA-256 of all data of the samples, from the manifest."""
        files = self.manifest["files"]
        if self.kind == "text":
            return str(files[TOKENS]["sha256"])
        parts = [str(files[name]["sha256"]) for name in sorted(files)]
        return hashlib.sha256(" ".join([self.kind, *parts]).encode()).hexdigest()

    @property
    def manifest(self) -> dict[str, Any]:
        """Counts from the manifest, among them `rows`, `empty`, `bad` and `first_bad`."""
        return cast("dict[str, Any]", read_record(self.folder / MANIFEST, MAX_LIST_BYTES))


def _damaged(what: str, folder: Path) -> DataError:
    return DataError(
        what,
        where=str(folder),
        fix="delete this folder, or set data.cache_dir to your own folder, and start again: isles "
        "then prepares the tokens again",
        id="data.damaged",
    )


def _mapped(path: Path, size_bytes: int, dtype: str, count: int | None = None) -> Any:
    # `count`: numbers in a file of NumPy; None: the file has nothing but numbers.
    with open_regular(path, os.O_NOFOLLOW) as stream:
        if path.name == TOKENS:
            hold(stream.fileno(), path)  # the map keeps a copy of this handle and its lock
        if os.fstat(stream.fileno()).st_size != size_bytes:
            raise ValueError(f"{path.name} is not a file of {size_bytes} bytes")
        offset = 0
        if count is not None:
            offset = size_bytes - count * np.dtype(dtype).itemsize
            # NumPy parses the header as Python, and a long one could be nested too deep.
            if count == 0 or not 0 < offset <= _MOST_HEADER_BYTES:
                raise ValueError(f"{path.name} does not hold {count} numbers")
            header = io.BytesIO(stream.read(offset))
            np.lib.format.read_magic(header)
            shape, _, found = np.lib.format.read_array_header_1_0(header)
            if (shape, found, header.tell()) != ((count,), np.dtype(dtype), offset):
                raise ValueError(f"{path.name} does not hold {count} numbers of type {dtype}")
        mapped = np.memmap(stream, dtype=dtype, mode="r", offset=offset)
    return mapped.view(np.ndarray)  # slicing a memmap object is slow


def _are_in_order(ends: Int64Array, total: int) -> bool:
    # Whether each document has a token, and the last ends with the tokens. In pieces, as a
    # comparison of all would take as much memory again.
    last = 0
    for start in range(0, len(ends), _ENDS_AT_ONCE):
        piece = ends[start : start + _ENDS_AT_ONCE]
        if piece[0] <= last or not (piece[1:] > piece[:-1]).all():
            return False
        last = int(piece[-1])
    return last == total


@contextmanager
def disk_errors(cache_dir: Path) -> Iterator[None]:
    """Turns the system's errors about a full or closed disk into ours.

    DataError: full, closed to us, or another user's entry is in the way. Other errors pass
    through.
    """
    try:
        yield
    except PreflightError as error:
        raise DataError(error.what, where=error.where, fix=_OTHER_FOLDER, id=error.id) from error
    except OSError as error:
        if limit := used_up(error, cache_dir):
            usage = shutil.disk_usage(cache_dir)
            raise DataError(
                f"{limit[0]} while writing tokens: {usage.free} of {usage.total} bytes are free",
                where=str(cache_dir),
                fix=f"{limit[1]}, or set data.cache_dir to a folder on a larger disk",
                id="disk.free",
            ) from error
        if error.errno in _CLOSED:
            raise DataError(
                f"cannot write to the cache folder: {error.strerror}",
                where=str(error.filename or cache_dir),
                fix=_OTHER_FOLDER,
                id="files.output",
            ) from error
        raise


class TokenWriter:
    """Appends the documents of an encoder to a new folder; `finish` makes it whole.

    Small vocabularies take two bytes per token, others four.
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
        # With the count, NumPy allocates the array once.
        ids = np.fromiter(every, dtype=np.int64, count=total)
        # Conversion to two bytes would wrap a larger id around without an error.
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
                # A new file, as other users of a group may have put a link into this folder.
                with (self._folder / file).open("xb") as stream:
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
        self.stream = io.FileIO(path, "x")

    def append(self, numbers: npt.NDArray[Any]) -> None:
        data = memoryview(numbers.astype(self.dtype).tobytes())
        self.hash.update(data)
        self.size_bytes += len(data)
        while data:  # a disk that is nearly full takes a part
            data = data[self.stream.write(data) :]


def publish(temporary: Path, folder: Path, encoder: Encoder) -> None:
    """Give a whole folder its name, in the place of a damaged one."""
    if os.path.lexists(folder) and find_damage(folder, encoder) is not None:
        old = temporary_beside(folder, "old")
        folder.rename(old)
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)  # another user's files may stay
        else:
            old.unlink()
    try:
        temporary.rename(folder)
    except OSError:
        # Without a common lock, as between users or hosts, another process may have been first.
        if find_damage(folder, encoder) is not None:
            raise
        shutil.rmtree(temporary)
    sync_folder(folder.parent)
