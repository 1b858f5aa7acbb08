"""The hub's memory: one sqlite file that survives kill -9 at any time."""

from __future__ import annotations

import heapq
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from isles.errors import ConfigError, UserError
from isles.outer.hub.rules import Refusal
from isles.run.repeats import Repeats

P = ParamSpec("P")
T = TypeVar("T")

JOURNAL = "hub.sqlite"

_VERSION = 4
"""Version of the tables; raise it when they change."""

_EACH, _A_MINUTE = 100, 20
"""Number of the newest rows of one kind that each name has in the log. More rows within a minute
share a row."""
_GONE = 2000
"""Number of events that are kept for all names without a member together."""
_MOST, _LEAST = 6000, 5000
"""If the log has more than `_MOST` events, it keeps `_LEAST`: the newest of each name first."""
_LONGEST = 2000
_MATTERS, _AHEAD = {"refused", "weight", "diverged", "failure"}, 5
"""Serious kinds of events, and the number of additional rows of them that each name has."""

# A round has a row in `parts` for each contribution; a row with a reason is a refused one. The
# owner of a block is a member's number, or a constant of samples.py.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, name TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('living', 'dropped', 'left')),
  is_behind INTEGER NOT NULL DEFAULT 0, from_round INTEGER NOT NULL DEFAULT 0,
  version INTEGER NOT NULL DEFAULT 0, refusals INTEGER NOT NULL DEFAULT 0,
  command TEXT NOT NULL DEFAULT '', command_reason TEXT NOT NULL DEFAULT '',
  claim INTEGER NOT NULL DEFAULT 0, claimed TEXT NOT NULL DEFAULT '[]',
  has_finished INTEGER NOT NULL DEFAULT 0, ended INTEGER, refusal TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS rounds (
  round INTEGER PRIMARY KEY,
  state TEXT NOT NULL CHECK (state IN ('collecting', 'averaging', 'committed')),
  digest TEXT NOT NULL DEFAULT '', size INTEGER NOT NULL DEFAULT 0,
  outer_params TEXT NOT NULL DEFAULT '',
  committed_at REAL NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS parts (
  round INTEGER NOT NULL, member INTEGER NOT NULL, tokens INTEGER NOT NULL, norm REAL NOT NULL,
  spans TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (round, member));
CREATE TABLE IF NOT EXISTS blocks (
  start INTEGER PRIMARY KEY, stop INTEGER NOT NULL CHECK (stop > start), owner INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS blocks_by_owner ON blocks (owner);
CREATE TABLE IF NOT EXISTS applied (
  round INTEGER NOT NULL, member INTEGER NOT NULL, outer_params TEXT NOT NULL,
  PRIMARY KEY (round, member));
CREATE TABLE IF NOT EXISTS states (
  number INTEGER PRIMARY KEY AUTOINCREMENT, member INTEGER NOT NULL, version INTEGER NOT NULL,
  content TEXT NOT NULL, is_complete INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS events (
  number INTEGER PRIMARY KEY, at REAL NOT NULL, member TEXT NOT NULL, kind TEXT NOT NULL,
  what TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_member ON events (member, kind, number);
"""


class Journal:
    """Tables and transactions. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._repeats = Repeats()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.row_factory = sqlite3.Row
            self._open(path)
        except sqlite3.OperationalError as error:  # such as a full disk
            raise UserError(
                f"cannot open the hub's memory: {error}",
                where=str(path),
                fix="end the program that has it open"
                if "locked" in str(error)
                else "free some space there, and check that this user may write there",
            ) from error
        except sqlite3.DatabaseError as error:
            raise damaged(path, str(error)) from error

    def _open(self, path: Path) -> None:
        is_new = not self.number("SELECT COUNT(*) FROM sqlite_master")
        if not is_new and (found := self.number("PRAGMA user_version")) != _VERSION:
            raise ConfigError(
                f"this state directory belongs to another version of isles ({found}, not "
                f"{_VERSION})",
                where=str(path),
                fix="use the version that created it, or an empty folder",
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        failures = [row[0] for row in self.rows("PRAGMA quick_check(1)") if row[0] != "ok"]
        if failures:
            raise damaged(path, failures[0])
        self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={_VERSION}; COMMIT;")

    def do(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a transaction; its changes are on the disk when this returns, or none
        are.

        A `Refusal` is a normal answer: the changes before it stay.
        """
        refusal: Refusal | None = None
        self._db.execute("BEGIN")
        try:
            try:
                result = call(*args, **kwargs)
            except Refusal as error:
                refusal = error
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # sqlite itself rolls back if the disk is full
                self._db.execute("ROLLBACK")
            raise
        if refusal is not None:
            raise refusal
        return result

    @property
    def num_changes(self) -> int:
        """Rows that have been written since the journal was opened."""
        return self._db.total_changes

    def rows(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Any) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self._db.execute(sql, values).fetchone()
        return found

    def number(self, sql: str, *values: Any) -> int:
        """The one number that a query gives; 0 for NULL."""
        found = self._db.execute(sql, values).fetchone()
        return int(found[0] or 0)

    def run(self, sql: str, *values: Any) -> None:
        self._db.execute(sql, values)

    def get(self, key: str) -> str | None:
        found = self.row("SELECT value FROM meta WHERE key = ?", key)
        return None if found is None else str(found["value"])

    def put(self, key: str, value: str) -> None:
        self.run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def note(self, member: str, kind: str, what: str) -> None:
        """Append to the log of events. Many of one kind within a minute share a row, with a count.

        So the events of a member displace only earlier events of the same name.
        """
        more = self._repeats.count((member, kind)) - _A_MINUTE
        last = "SELECT number, what FROM events WHERE member = ? AND kind = ? ORDER BY number DESC"
        if more > 0 and (row := self.row(last, member, kind)) is not None:
            text = row["what"].removesuffix(_more(more - 1)) + _more(more)
            self.run("UPDATE events SET what = ? WHERE number = ?", text, row["number"])
            return
        text = "".join(c if c.isprintable() else "?" for c in what[:_LONGEST])
        sql = "INSERT INTO events (at, member, kind, what) VALUES (?, ?, ?, ?)"
        self.run(sql, time.time(), member, kind, text)
        self.run(
            "DELETE FROM events WHERE member = ? AND kind = ? AND number <= (SELECT number FROM "
            "events WHERE member = ? AND kind = ? ORDER BY number DESC LIMIT 1 OFFSET ?)",
            *(member, kind, member, kind, _EACH),
        )
        # Clusters that join and leave under many names.
        self.run(
            "DELETE FROM events WHERE number IN (SELECT number FROM events WHERE member != '' AND "
            "member NOT IN (SELECT name FROM members WHERE state != 'left' OR NOT has_finished) "
            "ORDER BY number DESC LIMIT -1 OFFSET ?)",
            _GONE,
        )
        if self.number("SELECT COUNT(*) FROM events") > _MOST:
            kept = self.newest(_LEAST)
            numbers = ",".join(map(str, kept))
            self.run(f"DELETE FROM events WHERE number NOT IN ({numbers})")

    def newest(self, most: int) -> list[int]:
        """The numbers of the last events, oldest first, shared out among names and kinds.

        Members take turns, so a member cannot displace the events of others. Refusals and other
        serious events come first.
        """
        # Not a window function: that is twenty times slower.
        places = Counter[tuple[str, str]]()
        ranked = []
        for member, kind, number in self._db.execute(
            "SELECT member, kind, number FROM events ORDER BY member DESC, kind DESC, number DESC"
        ):
            places[member, kind] += 1
            place = places[member, kind] - _AHEAD * (kind in _MATTERS)
            ranked.append((place, -number))
        return sorted(-number for _, number in heapq.nsmallest(most, ranked))

    def close(self) -> None:
        self._db.close()


def _more(count: int) -> str:
    return f" ({count:,} more like this)" if count > 0 else ""


def damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(
        f"the hub's memory is damaged: {what}",
        where=str(path),
        fix="restore a copy if you have one. Otherwise move the file away, with the folder rounds "
        "next to it, start the hub again, and then the clusters, with the cluster that has applied "
        "the most rounds first",
    )
