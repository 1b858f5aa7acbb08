"""Objects in a bucket, by fsspec; or files in a folder that all clusters share.

An object is whole or absent. What the clusters agree by is `create`: of all who write an object
that is not there, one succeeds.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from isles.errors import MissingDependencyError

_CONNECT_S, _READ_S = 10, 30
_AT_ONCE = 4
_PROBES = 2
_MORE = {"gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}
_LONGEST = 300

Kind = Literal["away", "full", "forbidden", "missing", "unconditional"]


class StoreError(Exception):
    """The bucket does not do what was asked.

    Args:
        kind: away: it may do so in a moment. full: once there is space. forbidden: not with these
            credentials, if any. missing: there is no such bucket. unconditional: it writes an
            object that is there as if it were not.
        what: in words.
    """

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class Store:
    """The objects below a prefix. Any thread may call; each call ends by itself.

    Args:
        url: as `s3://bucket/prefix`.

    Raises:
        MissingDependencyError: the package for this kind of bucket is not installed.
        StoreError: no bucket of this kind can be used.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        protocol = url.partition("://")[0]
        try:
            import fsspec

            self._fs: Any = fsspec.filesystem(protocol, **_options(protocol))
        except (ImportError, ValueError) as error:
            package = _MORE.get(protocol, "isles[bucket]")
            raise MissingDependencyError(
                f"no package that is installed reaches {protocol}:// ({error})",
                where=f"outer.url {url}, {sys.executable}",
                fix=f"pip install '{package}'",
            ) from error
        except Exception as error:  # of a driver: whatever it says
            raise _explained(error) from error
        if hasattr(self._fs, "retries"):
            self._fs.retries = 1
        self._root: str = self._fs._strip_protocol(self.url)
        if _pipes_like_any(self._fs):
            raise StoreError(
                "unconditional",
                f"the driver of {protocol}:// cannot write an object only where there is none",
            )

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None: there is none."""
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        except Exception as error:  # botocore's, aiohttp's, google's …
            raise _explained(error) from error

    def write(self, name: str, data: bytes) -> None:
        """Write an object, over one that is there."""
        try:
            self._fs.pipe_file(self._path(name), data)
        except Exception as error:
            raise _explained(error) from error

    def create(self, name: str, data: bytes) -> bool:
        """Write an object if it is not there; whether it was not.

        Where it is not known whether it was written, it may have been: `StoreError`.
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

    def names(self, prefix: str) -> list[str]:
        """The objects below a prefix, which ends with a slash; not always the newest ones."""
        try:
            found = self._fs.find(self._path(prefix))
        except FileNotFoundError:
            return []
        except Exception as error:
            raise _explained(error) from error
        start = len(self._root) + 1
        # Where there are none the prefix itself may be given, as a folder.
        names = (str(path)[start:] for path in found)
        return sorted(name for name in names if name.startswith(prefix) and name != prefix)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, one after the other; those that are not there are left out."""
        for name in names:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue
            except Exception as error:
                raise _explained(error) from error


class Folder(Store):
    """A folder that all clusters share, by NFS or the like, as `file:///shared/run`."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._folder = Path(self.url.removeprefix("file://")).expanduser()

    def read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _explained(error) from error

    def write(self, name: str, data: bytes) -> None:
        self._place(name, data, replaces=True)

    def create(self, name: str, data: bytes) -> bool:
        try:
            self._place(name, data, replaces=False)
        except FileExistsError:
            return False
        return True

    def _place(self, name: str, data: bytes, *, replaces: bool) -> None:
        path = self._folder / name
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("wb") as stream:
                    stream.write(data)
                    stream.flush()
                    os.fsync(stream.fileno())
                if replaces:
                    partial.replace(path)
                else:
                    path.hardlink_to(partial)  # whole at once, and only where there is none
            finally:
                partial.unlink(missing_ok=True)
        except FileExistsError:
            raise
        except OSError as error:
            raise _explained(error) from error

    def names(self, prefix: str) -> list[str]:
        found = (self._folder / prefix).rglob("*")
        try:
            files = [path for path in found if path.is_file() and path.name[0] != "."]
        except OSError as error:
            raise _explained(error) from error
        return sorted(str(path.relative_to(self._folder)) for path in files)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)


def open_store(url: str) -> Store:
    """The objects at a url."""
    return Folder(url) if url.startswith("file://") else Store(url)


def probe(store: Store) -> None:
    """Find out whether one of several writers wins.

    Raises:
        StoreError: it cannot be written there; or several win, kind `unconditional`.
    """
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
                f"of {_AT_ONCE} that wrote the same new object {won or 'none'} succeeded: it "
                "does not know conditional writes (If-None-Match)",
            )


def _race(store: Store, name: str) -> int:
    def write(number: int) -> bool:
        return store.create(name, b"%d" % number)

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return sum(threads.map(write, range(_AT_ONCE)))


def _options(protocol: str) -> dict[str, Any]:
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        retries = {"max_attempts": 1, "mode": "standard"}  # we try again, and say so
        options["config_kwargs"] = {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "retries": retries,
        }
    return options


def _pipes_like_any(fs: Any) -> bool:
    # The general way looks first and writes then: two may both see nothing.
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    own = type(fs)
    if isinstance(fs, AsyncFileSystem):
        return own._pipe_file is AsyncFileSystem._pipe_file
    return own.pipe_file is AbstractFileSystem.pipe_file


_FULL = ("507", "QuotaExceeded", "StorageFull", "InsufficientStorage", "quota", "No space")
_FORBIDDEN = ("AccessDenied", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch", "403")
_UNKNOWN = ("Unable to locate credentials", "ExpiredToken", "NoCredentials", "credentials")


def _explained(error: Exception) -> StoreError:
    text = " ".join(f"{error}".split())[:_LONGEST] or type(error).__name__
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
