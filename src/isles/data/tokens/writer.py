"""Writes folders of prepared tokens: whole or absent, named after their owner until whole."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isles.data.rng import Int64Array
from isles.data.tokens.encode import Encoded, Encoder
from isles.data.tokens.store import DOCUMENTS, FORMAT, MANIFEST, TOKENS, TRAINED, find_fault
from isles.errors import DataError
from isles.run.checkpoints import sync_folder
from isles.run.process import ProcessId

log = logging.getLogger(__name__)

_SYNC_BYTES = 256 * 2**20
_CLOSED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_faults(cache_dir: Path, needed_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turns the system's errors about a full or closed disk into ours.

    Args:
        cache_dir: for the message.
        needed_bytes: how many are known to be needed.

    Raises:
        DataError: full, or closed to us. Other errors pass through.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            reason = "a file may not grow further" if error.errno == errno.EFBIG else "disk full"
            usage = shutil.disk_usage(cache_dir)
            raise DataError(
                f"{reason}: the tokens need more than {needed_bytes()} bytes, "
                f"{usage.free} of {usage.total} are free",
                where=str(cache_dir),
                fix="free some space, or set data.cache_dir to a folder on a larger disk",
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
    """Appends documents to a new folder; `finish` makes it whole.

    Args:
        folder: made here.
        encoder: that makes the documents; small vocabularies take two bytes a token, others four.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._folder = folder
        self._kind = encoder.kind
        self._end_of_text = encoder.end_of_text_id
        dtype = np.dtype("<u2" if encoder.vocab_size <= 2**16 else "<u4")
        self._tokens = _Column(folder / TOKENS, dtype)
        mask = _Column(folder / TRAINED, np.dtype(np.bool_))
        self._trained = mask if encoder.has_mask else None
        self._lengths: list[Int64Array] = []
        self._max_token_id = encoder.end_of_text_id
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> None:
        with self._faults():
            self._folder.mkdir()
            for column in self._columns():
                column.open()

    def __exit__(self, *_: object) -> None:
        for column in self._columns():
            column.close()

    def append(self, documents: Sequence[Encoded]) -> None:
        """Add documents."""
        if not documents:
            return
        lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
        total = int(lengths.sum())
        every = chain.from_iterable(document.ids for document in documents)
        ids = np.fromiter(every, dtype=np.int64, count=total)
        assert ids.min() >= 0 and ids.max() <= np.iinfo(self._tokens.dtype).max, "no such id"
        with self._faults():
            self._tokens.append(ids)
            if self._trained is not None:
                self._trained.append(np.concatenate([mask_of(document) for document in documents]))
        self._lengths.append(lengths)
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        self.num_documents += len(documents)
        self.num_tokens += total

    def finish(self, name: str, source: dict[str, Any], rows: dict[str, Any] | None = None) -> None:
        """Write the rest, the manifest last, all of it down to the disk.

        Args:
            name: of the source, for messages.
            source: the source's identity.
            rows: counts of rows and the first bad ones, as `Tally.record` gives them; None: not
                counted.
        """
        buffer = io.BytesIO()
        np.save(buffer, np.cumsum(np.concatenate(self._lengths)).astype("<i8"), allow_pickle=False)
        ends = buffer.getvalue()
        manifest = {
            "format": FORMAT,
            "name": name,
            "kind": self._kind,
            "source": source,
            "dtype": self._tokens.dtype.str,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "end_of_text_id": self._end_of_text,
            "max_token_id": self._max_token_id,
            **(rows or {}),
            "files": {
                **{column.path.name: column.facts() for column in self._columns()},
                DOCUMENTS: {"size_bytes": len(ends), "sha256": hashlib.sha256(ends).hexdigest()},
            },
        }
        with self._faults():
            for column in self._columns():
                column.sync()
            _write_synced(self._folder / DOCUMENTS, ends)
            _write_synced(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_folder(self._folder)

    def _columns(self) -> list[_Column]:
        return [self._tokens] if self._trained is None else [self._tokens, self._trained]

    def _faults(self) -> AbstractContextManager[None]:
        return disk_faults(
            self._folder.parent, lambda: sum(column.size_bytes for column in self._columns())
        )


def mask_of(document: Encoded) -> npt.NDArray[np.bool_]:
    """Which tokens of a document are trained, one by one."""
    if document.trained is None:
        return np.ones(len(document.ids), dtype=np.bool_)
    assert len(document.trained) == len(document.ids)
    return document.trained


class _Column:
    """A file of numbers of one type, hashed as it grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path = path
        self.dtype = dtype
        self.size_bytes = 0
        self._hash = hashlib.sha256()
        self._synced_bytes = 0
        self._stream: io.FileIO | None = None

    def open(self) -> None:
        """Make the file."""
        # Unbuffered: a write fails where it is made, not when the file is closed.
        self._stream = io.FileIO(self.path, "w")

    def append(self, numbers: npt.NDArray[Any]) -> None:
        """Write numbers at the end."""
        assert self._stream is not None
        data = memoryview(numbers.astype(self.dtype).tobytes())
        self._hash.update(data)
        self.size_bytes += len(data)
        while data:  # a disk that is nearly full takes a part
            data = data[self._stream.write(data) :]
        if self.size_bytes - self._synced_bytes >= _SYNC_BYTES:
            self.sync()  # so that the last one does not take minutes

    def facts(self) -> dict[str, Any]:
        """Size and hash, for the manifest."""
        return {"size_bytes": self.size_bytes, "sha256": self._hash.hexdigest()}

    def sync(self) -> None:
        """Bring it down to the disk."""
        assert self._stream is not None
        os.fsync(self._stream.fileno())
        self._synced_bytes = self.size_bytes

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def temporary_beside(folder: Path, kind: str = "new") -> Path:
    """A name that says whose it is, so that a dead process' leftovers can be told."""
    process = ProcessId.of(os.getpid())
    owner = f"{process.host}@{process.pid}@{process.started}"
    return folder.with_name(f".tmp-{kind}-{folder.name}@{owner}")


def remove_stale(folder: Path, *, locked: bool) -> None:
    """Remove what dead processes of this machine left beside a folder.

    Args:
        folder: the one that is about to be made.
        locked: whether nobody else makes it now, so that what others left of it goes as well.
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
    if folder.exists():
        if find_fault(folder) is None:  # without file locks, or from elsewhere: another was first
            shutil.rmtree(temporary)
            return
        old = temporary_beside(folder, "old")
        folder.rename(old)
        shutil.rmtree(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
