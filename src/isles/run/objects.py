"""Objects below an fsspec URL, such as `s3://bucket/prefix`, or files in a folder.

An object is complete or absent. Clusters agree through `create`: if several of them create the same
object, one succeeds. isles imports fsspec and the package of a bucket when it opens the bucket.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from io import UnsupportedOperation
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from isles.config.foreign import folder_below, open_regular
from isles.errors import MissingDependencyError
from isles.facts.secrets import Redactor
from isles.facts.units import format_bytes, format_duration

T = TypeVar("T")
Moved = Callable[[int], object]
"""Receives the number of bytes of each transfer."""

_CONNECT_S, _READ_S = 10, 30
_PIECE_BYTES, _MOST_PIECES = 8 << 20, 9_000
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
_LONGEST = 300
RECORD_BYTES = 64 << 20
"""The longest record. isles does not read a longer object."""
_AT_ONCE, _PROBES = 4, 2
_DEEPEST = 32
"""Levels of folders. isles writes no deeper object."""

Kind = Literal["away", "full", "forbidden", "missing", "unconditional", "odd"]


class StoreError(Exception):
    """A request to the bucket has failed.

    Args:
        kind: away: a retry may succeed. full: the bucket needs space. forbidden: the credentials
            are missing or insufficient. missing: the bucket does not exist. unconditional: `create`
            overwrites an existing object. odd: isles did not write an object, and does not touch
            it.
        what: the failure as text.
    """

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class Store:
    """The objects below a prefix. Any thread may call.

    Args:
        url: for example `s3://bucket/prefix`.
        where: place of the setting, for messages.

    Raises:
        MissingDependencyError: the package for this kind of bucket is not installed.
        StoreError: isles does not support this kind of bucket.
    """

    def __init__(self, url: str, where: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            import fsspec

            self._fs: Any = fsspec.filesystem(protocol, **_options(protocol))
        except (ImportError, ValueError) as error:
            raise MissingDependencyError(
                f"no installed package supports {protocol}:// ({error})",
                where=f"{where}, {sys.executable}",
                fix=f"pip install '{_PACKAGES.get(protocol, 'isles[bucket]')}'"
                if isinstance(error, ImportError)
                else "use s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER",
            ) from error
        except Exception as error:  # any error of a driver
            raise _explained(error) from error
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1  # isles itself retries, and reports it
        self._root: str = self._fs._strip_protocol(self.url)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _try(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # botocore's, aiohttp's, google's …
            raise _explained(error) from error

    def read(self, name: str, most_bytes: int | None = None) -> bytes | None:
        """The bytes of an object, or None if it does not exist.

        Args:
            most_bytes: limit for the object. Default: RECORD_BYTES.

        Raises:
            StoreError: it is larger (kind `odd`), or the bucket does not provide it.
        """
        most_bytes = RECORD_BYTES if most_bytes is None else most_bytes
        try:
            data = self._read(name, most_bytes + 1)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _explained(error) from error
        if len(data) > most_bytes:
            raise StoreError("odd", f"{name} is longer than {format_bytes(most_bytes)}")
        return data

    def _read(self, name: str, most_bytes: int) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._path(name), start=0, end=most_bytes))
        except Exception as error:
            # A range request for the first byte of an empty object fails.
            if "InvalidRange" in f"{error!r}{error.__cause__!r}" or "416" in str(error)[:60]:
                return b""
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write an object, and replace an existing one."""
        self._try(lambda: self._fs.pipe_file(self._path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if it does not exist. Returns whether it did not exist.

        If several writers try at the same time, one succeeds, if the store supports conditional
        writes: see `probe`. After a StoreError, the object may or may not exist.
        """
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except Exception as error:
            if "PreconditionFailed" in str(error) or "412" in str(error)[:40]:
                return False
            raise _explained(error) from error
        return True

    def sizes(self, prefix: str) -> dict[str, int]:
        """The size in bytes of every object below a folder, by its name within that folder."""
        start = self._path(prefix)
        try:
            found = self._fs.find(start, detail=True)
        except FileNotFoundError:
            return {}
        except Exception as error:
            raise _explained(error) from error
        return {str(path)[len(start) + 1 :]: int(info["size"]) for path, info in found.items()}

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, which ends with a slash. The newest may be missing."""
        return sorted(prefix + name for name in self.sizes(prefix) if name)

    def folders(self) -> list[str]:
        """The names of the folders directly below the prefix."""
        try:
            found = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _explained(error) from error
        folders = (str(entry["name"]) for entry in found if entry["type"] == "directory")
        return [name.rstrip("/").rpartition("/")[2] for name in folders]

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects one after the other, and ignore missing objects."""
        for name in names:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue
            except Exception as error:
                raise _explained(error) from error

    def send(self, path: Path, name: str, moved: Moved) -> str:
        """Write a file as an object. Returns the SHA-256 of the sent bytes.

        Raises:
            OSError: the file is not readable.
        """
        digest = hashlib.sha256()
        with path.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            piece_bytes = max(_PIECE_BYTES, -(-size // _MOST_PIECES))

            def send() -> None:
                with self._open(name, piece_bytes) as target:
                    while piece := source.read(piece_bytes):
                        digest.update(piece)
                        target.write(piece)
                        moved(len(piece))

            self._try(send)
        return digest.hexdigest()

    def _open(self, name: str, piece_bytes: int) -> Any:
        return self._fs.open(self._path(name), "wb", block_size=piece_bytes)

    def fetch(self, name: str, path: Path, moved: Moved) -> None:
        """Copy an object into a new file.

        Raises:
            FileNotFoundError: the object does not exist.
            OSError: the file is not writable.
        """
        from fsspec.callbacks import Callback

        class Moving(Callback):  # type: ignore[misc]  # fsspec has no types
            def relative_update(self, inc: int = 1) -> None:
                moved(inc)

        path.touch()  # an error of this disk is not an error of the bucket
        try:
            self._fs.get_file(self._path(name), str(path), callback=Moving())
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise _explained(error) from error
        except Exception as error:
            raise _explained(error) from error


class Folder(Store):
    """A folder, such as `/mnt/nas/runs` or `file:///mnt/nas/runs`.

    Other users may write to the folder. So isles follows no link below `url`, as a link could lead
    to any file of this machine. Every call is relative to the descriptor of an open folder.
    """

    def __init__(self, url: str, name: str = "") -> None:
        self.url = f"{url.rstrip('/')}/{name}".rstrip("/")
        self._base = Path(url.rstrip("/").removeprefix("file://")).expanduser().absolute()
        self._name = name

    def _parts(self, name: str) -> list[str]:
        parts = [part for part in f"{self._name}/{name}".split("/") if part not in ("", ".")]
        if "\0" in name or ".." in parts:
            raise StoreError("odd", f"{ascii(name)[:80]} is not a valid object name")
        return parts

    @contextmanager
    def _at(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        # The open folder of an object, and the object's name in that folder.
        *parts, last = self._parts(name)
        try:
            with folder_below(self._base, parts, make=make) as folder:
                yield folder, last
        except FileNotFoundError as error:
            raise _explained(error) if make else error from error
        except OSError as error:
            raise self._of(error, name) from error

    def _of(self, error: OSError, name: str) -> StoreError:
        path = self._base / self._name / name
        if isinstance(error, UnsupportedOperation):
            return StoreError("odd", f"{path} is not a regular file")
        if error.errno == errno.ELOOP:
            what = f"{path} or a folder above it is a link, which isles does not follow"
            return StoreError("odd", what)
        return _explained(error)

    def _read(self, name: str, most_bytes: int) -> bytes:
        with self._at(name) as (folder, last), open_regular(last, os.O_NOFOLLOW, folder) as stream:
            return stream.read(most_bytes)

    def sizes(self, prefix: str) -> dict[str, int]:
        found: dict[str, int] = {}
        try:
            with folder_below(self._base, self._parts(prefix)) as folder:
                _walk(folder, "", found)
        except (FileNotFoundError, NotADirectoryError):
            pass  # perhaps deleted just now
        except OSError as error:
            raise self._of(error, prefix) from error
        return found

    def folders(self) -> list[str]:
        try:
            with folder_below(self._base, self._parts("")) as folder, os.scandir(folder) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._of(error, "") from error

    def fetch(self, name: str, path: Path, moved: Moved) -> None:
        with path.open("wb") as target, self._source(name) as stream:
            while piece := self._try(lambda: stream.read(_PIECE_BYTES)):
                target.write(piece)
                moved(len(piece))

    def _source(self, name: str) -> BinaryIO:
        with self._at(name) as (folder, last):
            return open_regular(last, os.O_NOFOLLOW, folder)

    def write(self, name: str, data: bytes) -> None:
        with self._open(name) as target:
            target.write(data)

    @contextmanager
    def _open(self, name: str, piece_bytes: int = 0) -> Iterator[BinaryIO]:
        with (
            self._at(name, make=True) as (folder, last),
            _partial(folder, last) as (partial, stream),
        ):
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.rename(partial, last, src_dir_fd=folder, dst_dir_fd=folder)

    def names(self, prefix: str) -> list[str]:
        found = (name for name in self.sizes(prefix.rstrip("/")) if Path(name).name[0] != ".")
        return sorted(prefix + name for name in found)

    def create(self, name: str, data: bytes) -> bool:
        with (
            self._at(name, make=True) as (folder, last),
            _partial(folder, last) as (partial, stream),
        ):
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
            at = {"src_dir_fd": folder, "dst_dir_fd": folder}
            try:  # appears complete, and only if the file does not exist
                os.link(partial, last, **at, follow_symlinks=False)
            except FileExistsError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError), self._at(name) as (folder, last):
                os.unlink(last, dir_fd=folder)


def _walk(folder: int, below: str, found: dict[str, int]) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError, NotADirectoryError):
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode):
                    found[below + entry.name] = facts.st_size
                elif stat.S_ISDIR(facts.st_mode) and below.count("/") < _DEEPEST:
                    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                    handle = os.open(entry.name, flags, dir_fd=folder)
                    try:
                        _walk(handle, f"{below}{entry.name}/", found)
                    finally:
                        os.close(handle)


@contextmanager
def _partial(folder: int, name: str) -> Iterator[tuple[str, BinaryIO]]:
    # A new file next to its final path.
    partial = f".{name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(partial, flags, 0o600, dir_fd=folder)
    try:
        with os.fdopen(handle, "wb") as stream:
            os.fchmod(handle, 0o644)
            yield partial, stream
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=folder)


def open_store(url: str, where: str, name: str = "") -> Store:
    """The objects at a URL, or the files in a folder, below `name`. Raises the errors of
    `Store`."""
    if "://" not in url or url.startswith("file://"):
        return Folder(url, name)
    return Store(f"{url.rstrip('/')}/{name}".rstrip("/"), where)


def probe(store: Store) -> None:
    """Test whether exactly one of several writers succeeds.

    Raises:
        StoreError: the place is not writable, or several writers succeed (kind `unconditional`).
    """
    if not isinstance(store, Folder) and _looks_before_it_writes(store._fs):
        protocol = store.url.partition("://")[0]
        raise StoreError(
            "unconditional",
            f"the driver of {protocol}:// has no conditional writes",
        )
    for _ in range(_PROBES):
        name = f"probes/{secrets.token_hex(8)}"
        try:
            won = _race(store, name)
            if won == 1:
                won += store.create(name, b"late")
        finally:
            with suppress(StoreError):
                store.delete([name])
        if won != 1:
            raise StoreError(
                "unconditional",
                f"{won or 'none'} of {_AT_ONCE} writers of the same new object succeeded, so the "
                "bucket lacks conditional writes (If-None-Match)",
            )


def _race(store: Store, name: str) -> int:
    def write(number: int) -> bool:
        return store.create(name, b"%d" % number)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return sum(threads.map(write, range(_AT_ONCE)))


def _looks_before_it_writes(fs: Any) -> bool:
    # fsspec's generic method has a race: two writers may both see no object, and write.
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    own = type(fs)
    if isinstance(fs, AsyncFileSystem):
        return own._pipe_file is AsyncFileSystem._pipe_file
    return own.pipe_file is AbstractFileSystem.pipe_file


def call_with_timeout(limit_s: float, work: Callable[[], T], waits_for: str) -> T:
    """Call a function in a thread with a timeout, for libraries without timeouts.

    Raises:
        TimeoutError: the call takes too long, and continues in its thread.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    # A daemon thread, so that a hanging call does not keep the process alive.
    threading.Thread(target=run, name="network", daemon=True).start()
    # Not `result(limit_s)`, as network errors can also be a TimeoutError.
    if not wait([future], timeout=limit_s).done:
        raise TimeoutError(f"waited {format_duration(limit_s)} for {waits_for}")
    return future.result()


def _options(protocol: str) -> dict[str, Any]:
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        retries = {"total_max_attempts": 1, "mode": "standard"}
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "retries": retries,
        }
    return options


_FULL = ("507", "QuotaExceeded", "StorageFull", "InsufficientStorage", "quota", "No space")
_FORBIDDEN = ("AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")
_UNKNOWN = ("Unable to locate credentials", "ExpiredToken", "NoCredentials", "credentials")


def _explained(error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    text = Redactor(())(" ".join(f"{error}".split()))[:_LONGEST] or type(error).__name__
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None)
    if isinstance(answer, dict) and (code := answer.get("Error", {}).get("Code")):
        text = f"{text} ({code})"
    number = getattr(error, "errno", None)
    kind: Kind = "away"
    if number in (errno.ENOSPC, errno.EDQUOT) or _has(text, _FULL):
        kind = "full"
    elif isinstance(error, PermissionError) or _has(text, _FORBIDDEN) or _has(text, _UNKNOWN):
        kind = "forbidden"
    elif isinstance(error, FileNotFoundError):
        kind = "missing"
    return StoreError(kind, text)


def _has(text: str, words: Sequence[str]) -> bool:
    return any(word in text for word in words)
