"""Copies of the rendezvous's book: every cluster has one, so that any can go on where one ended.

A cluster acts upon nothing that its own copy does not say. So whoever has the newest copy knows all
that any living cluster has acted upon, and can host the rendezvous from there on.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

Lineage = list[tuple[int, str, int]]
"""Who hosted: term, peer, and the number of changes at which it began."""

_KEPT_TURNS, _KEPT_EVENTS = 512, 500
_MOST_BYTES = 2**31


@dataclass(frozen=True, slots=True)
class Copy:
    """A book as it was.

    Args:
        lineage: of the history that it tells.
        changes: how often it had changed, over the whole history.
        turn: the next to be committed.
        data: compressed.
    """

    lineage: Lineage
    changes: int
    turn: int
    data: bytes

    def head(self) -> dict[str, object]:
        """All but the data, to be sent before it."""
        return {"lineage": self.lineage, "changes": self.changes, "turn": self.turn}

    @classmethod
    def parse(cls, head: dict[str, object], data: bytes) -> Copy:
        """What `head` gave, and the data."""
        told = head["lineage"]
        assert isinstance(told, list)
        lineage = [(int(term), str(peer), int(start)) for term, peer, start in told]
        return cls(lineage, int(str(head["changes"])), int(str(head["turn"])), data)

    def precedes(self, lineage: Sequence[tuple[int, str, int]]) -> bool:
        """Whether a history has gone on from this copy, or from a later one of the same."""
        own = len(self.lineage)
        if list(lineage[:own]) != self.lineage:
            return False
        return own == len(lineage) or self.changes < lineage[own][2]

    def save(self, path: Path) -> None:
        """Keep it, for when this process is started again."""
        partial = path.with_suffix(".new")
        partial.write_bytes(json.dumps(self.head()).encode() + b"\n" + self.data)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Copy | None:
        """The one that was kept; None: none, or none that is whole."""
        with suppress(OSError, ValueError, KeyError, AssertionError):
            head, _, data = path.read_bytes().partition(b"\n")
            return cls.parse(json.loads(head), data)
        return None

    def unpack(self, folder: Path) -> None:
        """Put the book where a rendezvous will find it."""
        book = zlib.decompressobj().decompress(self.data, _MOST_BYTES)
        (folder / "rendezvous.sqlite").write_bytes(book)


class Copier:
    """Copies a book that another thread writes; for one thread.

    Args:
        book: the file.
        lineage: of its history; the last entry is its host's own.
    """

    def __init__(self, book: Path, lineage: Lineage) -> None:
        self._db = sqlite3.connect(
            f"file:{book}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
        )
        self._lineage = lineage
        self._seen = -1
        self._changes = lineage[-1][2]
        self._last: Copy | None = None

    def take(self) -> Copy:
        """The book as it is now."""
        seen = self._db.execute("PRAGMA data_version").fetchone()[0]
        if self._last is None or seen != self._seen:
            self._seen = seen
            self._changes += 1
            self._last = self._take()
        return self._last

    def _take(self) -> Copy:
        with closing(sqlite3.connect(":memory:")) as small:
            self._db.backup(small)
            turn = _next_turn(small)
            _trim(small, turn - _KEPT_TURNS)
            small.commit()
            small.execute("VACUUM")
            data = zlib.compress(small.serialize(), 1)
        return Copy(self._lineage, self._changes, turn, data)

    def close(self) -> None:
        """Close the file."""
        self._db.close()


def _next_turn(db: sqlite3.Connection) -> int:
    last = db.execute("SELECT MAX(turn) FROM turns WHERE state = 'committed'").fetchone()[0]
    if last is not None:
        return int(last) + 1
    start = db.execute("SELECT value FROM meta WHERE key = 'start'").fetchone()
    return int(start[0]) if start else 0


def _trim(db: sqlite3.Connection, oldest: int) -> None:
    """Leave out what is of interest to people only, and long past."""
    db.execute(
        "DELETE FROM events WHERE number <= (SELECT MAX(number) FROM events) - ?", [_KEPT_EVENTS]
    )
    db.execute("DELETE FROM parts WHERE turn < ?", [oldest])
    db.execute("DELETE FROM turns WHERE turn < ?", [oldest])
    db.execute("DELETE FROM states")  # their files are not in the copy
    rows = db.execute(
        "SELECT start, stop FROM samples WHERE state = 'committed' AND turn < ? ORDER BY start",
        [oldest],
    ).fetchall()
    first, last = -1, -1
    for start, stop in rows:
        if start == last:  # goes on from the one before
            db.execute("DELETE FROM samples WHERE start = ?", [start])
            db.execute("UPDATE samples SET stop = ? WHERE start = ?", [stop, first])
        else:
            first = start
        last = stop
