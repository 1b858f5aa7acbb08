"""The hub's memory in a bucket: a chain of entries, each the whole memory after one change.

No process owns the chain. A cluster that changes something writes the entry with the next number,
if that entry does not exist. Of several writers one wins; the others read its entry and try again.
So each change includes all earlier changes, like a transaction of a hub.

Entries that are `_KEPT` numbers old are deleted, in the order of the numbers. A writer that was
frozen for that long may write an outdated number: it finds the previous entry deleted, and stops.
"""

from __future__ import annotations

import gzip
import json
import logging
import re
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from pydantic import ValidationError

from isles.config.foreign import is_plain, parse_json
from isles.errors import ConfigError, UserError
from isles.outer.hub.core import HubCore
from isles.outer.hub.rules import Refusal
from isles.outer.hub.samples import AVERAGED
from isles.run.manifest import number_of
from isles.run.objects import Store, StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")

_FORMAT = 1
_FIX = "check that the url is right and of this version of isles, or use an empty prefix"
_MOST_BYTES, _MOST_VALUES = 16 * 2**20, 2**19
"""Limits of an unpacked entry. A run of a hundred clusters needs less than one MiB."""

_POINTER_BYTES = 20

_KEPT, _SWEEP_EVERY = 64, 16
_AGAIN_S = 0.2
_EVENTS = 50
"""Number of entries that are kept."""

_REAL, _TEXT, _NAME, _DIGEST = "real", "text", "name", "digest"
_COUNT, _FLAG, _END, _OWNER = "count", "flag", "end", "owner"
_SAMPLE, _SIZE, _TOKENS = "sample", "size", "tokens"
_WHOLE = {
    _COUNT: range(10**12),
    _FLAG: range(2),
    _OWNER: range(AVERAGED, 10**12),
    _SAMPLE: range(2**62),
    _SIZE: range(2**60 + 1),
    _TOKENS: range(1, 2**62),
}
"""Limits of each kind of integer: sqlite cannot sum up to 2**63 or more, and no message has an
outer step above 10**12."""
_TABLES = {
    "meta": {"key": _TEXT, "value": _TEXT},
    "members": {
        "number": _COUNT,
        "id": _TEXT,
        "name": _NAME,
        "state": _TEXT,
        "is_behind": _FLAG,
        "from_round": _COUNT,
        "version": _COUNT,
        "refusals": _COUNT,
        "command": _TEXT,
        "command_reason": _TEXT,
        "claim": _COUNT,
        "claimed": _TEXT,
        "has_finished": _FLAG,
        "ended": _END,
        "refusal": _TEXT,
    },
    "rounds": {
        "round": _COUNT,
        "state": _TEXT,
        "digest": _DIGEST,
        "size": _SIZE,
        "outer_params": _TEXT,
        "committed_at": _REAL,
        "seconds": _REAL,
    },
    "parts": {
        "round": _COUNT,
        "member": _COUNT,
        "tokens": _TOKENS,
        "norm": _REAL,
        "spans": _TEXT,
        "reason": _TEXT,
    },
    "objects": {"round": _COUNT, "member": _COUNT, "digest": _DIGEST, "size": _SIZE},
    "blocks": {"start": _SAMPLE, "stop": _SAMPLE, "owner": _OWNER},
    "applied": {"round": _COUNT, "member": _COUNT, "outer_params": _TEXT},
    "states": {
        "number": _COUNT,
        "member": _COUNT,
        "version": _COUNT,
        "content": _TEXT,
        "is_complete": _FLAG,
    },
    "events": {"number": _COUNT, "at": _REAL, "member": _TEXT, "kind": _TEXT, "what": _TEXT},
    "sqlite_sequence": {"name": _TEXT, "seq": _COUNT},
}
"""Columns of each table and the types of their values, checked because others can write to the
bucket."""

_DIGESTS = re.compile(r"([0-9a-f]{64})?")
_OBJECTS = """
CREATE TABLE IF NOT EXISTS objects (
  round INTEGER NOT NULL, member INTEGER NOT NULL, digest TEXT NOT NULL, size INTEGER NOT NULL,
  PRIMARY KEY (round, member))
"""
"""Digest of each contribution, which is part of its name in the bucket."""


class Chain:
    """A core with the newest known entry. One thread at a time.

    Its methods raise `StoreError` if the bucket fails. The operation may or may not have been done
    then, and can be repeated, as with a hub whose answer was lost.
    """

    def __init__(self, store: Store, core: HubCore) -> None:
        self._store, self.core = store, core
        self.number = 0
        """Number of the newest known entry; 0: no entry."""
        self._id, self._text, self._swept = "", "", 0
        core.journal.run(_OBJECTS)
        core.journal.run("DELETE FROM events")
        self._empty = self._dump()
        self._text = self._empty

    # Reading.

    def open(self) -> None:
        """Find the newest entry."""
        entry = self._newest()  # nothing changes if this fails
        if entry is not None:
            self._have(*entry)
        else:
            if self.number:
                log.warning(
                    "outer the journal at %s is gone, so a new one is started", self._store.url
                )
            self.number, self._id = 0, ""
            self._load(self._empty)
        self.follow()

    def _newest(self) -> tuple[int, dict[str, Any]] | None:
        pointed = self._pointed()
        if pointed and (entry := self._entry(pointed)) is not None:
            return pointed, entry
        for number in sorted(self._listed(), reverse=True):
            if (entry := self._entry(number)) is not None:
                return number, entry
        return None

    def _have(self, number: int, entry: dict[str, Any]) -> None:
        self._load(json.dumps(entry["tables"]))
        self.number, self._id = number, str(entry["chain"])

    def follow(self, *, looks_around: bool = False) -> bool:
        """Read changes of other clusters; returns whether there were any.

        Args:
            looks_around: also check whether this cluster has fallen far behind.
        """
        before = self.number, self._id
        while self._take(self.number + 1):
            pass
        if looks_around and self.number and self._pointed() not in (0, self.number):
            if not self._has(self.number):
                self.open()
        elif looks_around and not self.number:
            self.open()
        return (self.number, self._id) != before

    def _pointed(self) -> int:
        # Approximate position of the newest entry: its writer may have died before updating this.
        try:
            data = self._store.read("newest", _POINTER_BYTES)
        except StoreError as error:
            if error.kind != "odd":
                raise
            data = None  # it is only a hint
        return number_of((data or b"").decode("ascii", "replace")) or 0

    def _has(self, number: int) -> bool:
        return self._store.read(_name(number)) is not None

    def _take(self, number: int) -> bool:
        # Load an entry, if it exists and belongs to this chain.
        entry = self._entry(number)
        if entry is None:
            return False
        if self._id and entry["chain"] != self._id:
            # Either of the two was deleted: of this one nothing is left, or a last entry of that.
            own = self._entry(self.number)
            if own is None or own["chain"] != self._id:
                self.open()
            else:
                self._store.delete([_name(number)])
            return False
        self._have(number, entry)
        return True

    def _entry(self, number: int) -> dict[str, Any] | None:
        data = self._store.read(_name(number))
        return None if data is None else _decode(data, f"{self._store.url}/{_name(number)}")

    def _load(self, text: str) -> None:
        self._text = text
        tables = json.loads(text)

        def load() -> None:
            journal = self.core.journal
            for name, columns in _TABLES.items():
                journal.run(f"DELETE FROM {name}")
                marks = ", ".join("?" * len(columns))
                for row in tables[name]:
                    journal.run(f"INSERT INTO {name} VALUES ({marks})", *row)
            self.core.samples.clean()

        with self._sound():
            self.core.journal.do(load)
            self.core.rounds.note_parts()

    def read(self, call: Callable[[], T]) -> T:
        """Call a method of the core that changes nothing.

        Raises:
            ConfigError: the journal contains a value that isles does not write.
        """
        with self._sound():
            return call()

    @contextmanager
    def _sound(self) -> Iterator[None]:
        # Others can write values that the core never had, and Python may then raise any error. So
        # every error, except errors of this machine and of the store, is an invalid value.
        try:
            yield
        except (Refusal, UserError, StoreError, OSError, MemoryError):
            raise
        except Exception as error:
            why = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_input=False)[0]
                why = f"{error.title} {'.'.join(map(str, first['loc']))}: {first['msg']}"
            why = ascii(why)[1:-1][:300] or type(error).__name__
            raise ConfigError(
                f"the journal contains a value that isles does not write: {why}",
                where=self._store.url,
                fix=_FIX,
                id="bucket.refused",
            ) from error

    # Writing.

    def change(self, by: str, call: Callable[[], T]) -> T:
        """Call a method of the core on the newest entry, and write its changes as the next entry.

        Args:
            by: description of the change, for people.
            call: may be called more than once.

        Raises:
            Refusal: the core refuses; its notes are written.
            ConfigError: the journal contains a value that isles does not write.
        """
        while True:
            refusal: Refusal | None = None
            try:
                with self._sound():
                    result = self.core.journal.do(call)
            except Refusal as error:
                refusal = error
            except BaseException:
                self._load(self._text)
                raise
            if self._write(by):
                if refusal is not None:
                    raise refusal
                return result
            if not self.follow():
                time.sleep(_AGAIN_S)  # it exists, but cannot be read yet

    def _write(self, by: str) -> bool:
        # Write the next entry, if anything has changed; False: another cluster has written it.
        before = self._text
        text = self._dump()
        if text == before:
            return True
        number, chain = self.number + 1, self._id or secrets.token_hex(8)
        entry = {"format": _FORMAT, "chain": chain, "by": by, "at": time.time()}
        data = gzip.compress(json.dumps({**entry, "tables": json.loads(text)}).encode(), 6, mtime=0)
        is_won = is_next = False
        try:
            is_won = self._store.create(_name(number), data)
            is_next = is_won and not self._is_past(number)
        finally:
            if not is_next:
                self._load(before)
        if is_next:
            self.number, self._id, self._text = number, chain, text
            with suppress(StoreError):  # it is only a hint for clusters that join
                self._store.write("newest", b"%d" % number)
        elif is_won:
            self._store.delete([_name(number)])
            self.open()
        return is_next

    def _is_past(self, number: int) -> bool:
        # Whether an entry that was just written replaces a deleted entry, instead of being the
        # next.
        is_first = number == 1
        return self._pointed() >= number + _KEPT // 2 or not (is_first or self._has(number - 1))

    def sweep(self) -> None:
        """Delete entries that are no longer needed, the oldest first."""
        if self.number - self._swept >= _SWEEP_EVERY:
            self._swept = self.number
            old = [number for number in self._listed() if number < self.number - _KEPT]
            self._store.delete(_name(number) for number in sorted(old))

    def _listed(self) -> list[int]:
        names = (name.removeprefix("journal/") for name in self._store.names("journal/"))
        numbers = ((name, number_of(name)) for name in names)
        return [n for name, n in numbers if n is not None and _name(n) == f"journal/{name}"]

    def _dump(self) -> str:
        with self._sound():
            self.core.journal.do(self._prune)
        tables: dict[str, list[list[Any]]] = {}
        for name, columns in _TABLES.items():
            rows = self.core.journal.rows(f"SELECT {', '.join(columns)} FROM {name} ORDER BY 1, 2")
            tables[name] = [list(row) for row in rows]
        return json.dumps(tables)

    def _prune(self) -> None:
        # Rows that no rule needs any more: all clusters read every entry.
        core, run = self.core, self.core.journal.run
        core.rounds.prune()
        run("DELETE FROM objects WHERE round < ?", core.rounds.next)
        run("DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", _EVENTS)


def _name(number: int) -> str:
    return f"journal/{number:08d}"


def _decode(data: bytes, where: str) -> dict[str, Any]:
    try:
        entry = parse_json(_unpacked(data), _MOST_VALUES)
        if entry["format"] != _FORMAT:
            shown = ascii(entry["format"])[:20]
            what = f"this journal is of another version of isles ({shown})"
            raise ConfigError(what, where=where, fix=_FIX, id="bucket.refused")
        if not isinstance(entry["chain"], str):
            raise ValueError("chain")
        for name, columns in _TABLES.items():
            for row in entry["tables"][name]:
                for (column, kind), value in zip(columns.items(), row, strict=True):
                    if not _is_sound(value, kind):
                        raise ValueError(f"{name}.{column} is {ascii(value)[:60]}")
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        what = f"this is not an entry of a journal of isles: {error}"
        raise ConfigError(what, where=where, fix=_FIX, id="bucket.refused") from None
    found: dict[str, Any] = entry
    return found


def _unpacked(data: bytes) -> bytes:
    # A few KB can unpack to gigabytes, so the size has a limit.
    gunzip = zlib.decompressobj(wbits=31)
    text = gunzip.decompress(data, _MOST_BYTES)
    if not gunzip.eof or gunzip.unused_data:
        raise ValueError("it is longer than an entry can be, or cut off")
    return text


def _is_sound(value: object, kind: str) -> bool:
    match kind:
        case "end":  # None for a member that has not ended
            return value is None or _is_sound(value, _COUNT)
        case "real":  # sqlite accepts only 64-bit integers
            return (type(value) is float and abs(value) < 1e300) or (
                type(value) is int and value in range(-(2**62), 2**62)
            )
        case "digest":
            return isinstance(value, str) and bool(_DIGESTS.fullmatch(value))
        case "name":
            return is_plain(value)
        case "text":
            return value is None or isinstance(value, str)
        case _:
            return type(value) is int and value in _WHOLE[kind]
