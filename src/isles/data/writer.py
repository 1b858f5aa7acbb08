"""Writes a folder of prepared tokens, and says what a full or closed disk means."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from isles.data.rng import Int64Array
from isles.data.store import DOCUMENTS, FORMAT, MANIFEST, TOKENS
from isles.errors import DataError

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
            ) from error
        if error.errno in _CLOSED:
            raise DataError(
                f"the cache folder cannot be written: {error.strerror}",
                where=str(error.filename or cache_dir),
                fix="set data.cache_dir to a folder of yours",
            ) from error
        raise


class TokenWriter:
    """Appends documents to a new folder; `finish` makes it whole.

    Args:
        folder: made here.
        end_of_text: the id that ends every document.
        vocab_size: one more than the largest id; small ones take two bytes, others four.
    """

    def __init__(self, folder: Path, end_of_text: int, vocab_size: int) -> None:
        self._folder = folder
        self._end_of_text = end_of_text
        self._dtype = np.dtype("<u2" if vocab_size <= 2**16 else "<u4")
        self._hash = hashlib.sha256()
        self._lengths: list[Int64Array] = []
        self._max_token_id = end_of_text
        self._bytes = 0
        self._synced_bytes = 0
        self.num_documents = 0
        self.num_tokens = 0

    def __enter__(self) -> None:
        with self._faults():
            self._folder.mkdir()
            # Unbuffered: a write fails where it is made, not when the file is closed.
            self._stream = (self._folder / TOKENS).open("wb", buffering=0)

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def append(self, documents: list[list[int]]) -> None:
        """Add documents; each gets the end-of-text id."""
        for document in documents:
            document.append(self._end_of_text)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        total = int(lengths.sum())
        ids = np.fromiter(chain.from_iterable(documents), dtype=np.int64, count=total)
        assert ids.min() >= 0 and ids.max() <= np.iinfo(self._dtype).max, "beyond the vocabulary"
        data = memoryview(ids.astype(self._dtype).tobytes())
        self._hash.update(data)
        self._bytes += len(data)
        with self._faults():
            while data:  # a disk that is nearly full takes a part
                data = data[self._stream.write(data) :]
            if self._bytes - self._synced_bytes >= _SYNC_BYTES:
                os.fsync(self._stream.fileno())  # so that the last one does not take minutes
                self._synced_bytes = self._bytes
        self._lengths.append(lengths)
        self._max_token_id = max(self._max_token_id, int(ids.max()))
        self.num_documents += len(documents)
        self.num_tokens += total

    def finish(self, name: str, source: dict[str, Any]) -> None:
        """Write the rest, the manifest last, all of it down to the disk.

        Args:
            name: of the source, for messages.
            source: the source's identity.
        """
        buffer = io.BytesIO()
        np.save(buffer, np.cumsum(np.concatenate(self._lengths)).astype("<i8"), allow_pickle=False)
        ends = buffer.getvalue()
        self._bytes += len(ends)
        manifest = {
            "format": FORMAT,
            "name": name,
            "source": source,
            "dtype": self._dtype.str,
            "num_documents": self.num_documents,
            "num_tokens": self.num_tokens,
            "end_of_text_id": self._end_of_text,
            "max_token_id": self._max_token_id,
            "files": {
                TOKENS: {
                    "size_bytes": self.num_tokens * self._dtype.itemsize,
                    "sha256": self._hash.hexdigest(),
                },
                DOCUMENTS: {"size_bytes": len(ends), "sha256": hashlib.sha256(ends).hexdigest()},
            },
        }
        with self._faults():
            os.fsync(self._stream.fileno())
            _write_synced(self._folder / DOCUMENTS, ends)
            _write_synced(self._folder / MANIFEST, json.dumps(manifest, indent=1).encode())
            sync_folder(self._folder)

    def _faults(self) -> AbstractContextManager[None]:
        return disk_faults(self._folder.parent, lambda: self._bytes)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder down to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
