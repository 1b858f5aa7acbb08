"""Which cluster trains on which samples: blocks that are leased, cut where a part is averaged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from isles.outer.hub.journal import Journal
from isles.outer.samples import Interval, joined, leased, without

FREE, AVERAGED = 0, -1
"""Owners of blocks that no member has."""


class Samples:
    """One row for each block: from where to where, and whose it is.

    A block stays with its cluster for as long as that may come back, and is leased to another then.
    """

    def __init__(self, db: Journal) -> None:
        self._db = db

    @property
    def frontier(self) -> int:
        """The first number that has never been leased."""
        return self._db.number("SELECT MAX(stop) FROM blocks")

    def lease(self, member: sqlite3.Row, number: int, count: int) -> list[Interval]:
        """At least so many samples: what others have given back first, then a new block.

        A request with the number of the member's last one, whose answer was lost on the way, gives
        what that gave.
        """
        if number <= member["claim"]:
            return [(start, stop) for start, stop in json.loads(member["claimed"])]
        given, left = list[Interval](), count
        for row in self._db.rows("SELECT * FROM blocks WHERE owner = ? ORDER BY start", FREE):
            if left > 0:
                sql = "UPDATE blocks SET owner = ? WHERE start = ?"
                self._db.run(sql, member["number"], row["start"])
                given.append((row["start"], row["stop"]))
                left -= row["stop"] - row["start"]
        if left > 0:
            start = self.frontier
            self._insert((start, start + left), member["number"])
            given.append((start, start + left))
        given = joined(given)
        sql = "UPDATE members SET claim = ?, claimed = ? WHERE number = ?"
        self._db.run(sql, number, json.dumps(given), member["number"])
        return given

    def take_up(self, member: int, holding: Sequence[Interval]) -> list[Interval]:
        """A member comes, or comes back, and goes on with what it holds; the rest is given back.

        What is not known here was leased by a hub whose journal is lost.

        Returns:
            What it holds without a right to: another's by now, or averaged already.
        """
        self.give_back(member)
        lost = list[Interval]()
        for span in joined(leased(holding)):
            rows = self._cut(span)
            lost += [(row["start"], row["stop"]) for row in rows if row["owner"] != FREE]
            for unknown in without([span], [(row["start"], row["stop"]) for row in rows]):
                self._insert(unknown, FREE)
            sql = "UPDATE blocks SET owner = ? WHERE start >= ? AND stop <= ? AND owner = ?"
            self._db.run(sql, member, *span, FREE)
        return joined(lost)

    def has_any(self, member: int) -> bool:
        return self._db.row("SELECT 1 FROM blocks WHERE owner = ? LIMIT 1", member) is not None

    def give_back(self, member: int) -> int:
        """A member has gone: its blocks are leased to others; how many samples there are."""
        freed = self._db.number("SELECT SUM(stop - start) FROM blocks WHERE owner = ?", member)
        self._db.run("UPDATE blocks SET owner = ? WHERE owner = ?", FREE, member)
        return freed

    def average(self, member: int, spans: Sequence[Interval]) -> None:
        """What a member has learnt of these is in an average, for good."""
        for span in joined(leased(spans)):
            self._cut(span)
            self._db.run(
                "UPDATE blocks SET owner = ? WHERE start >= ? AND stop <= ? AND owner IN (?, ?)",
                AVERAGED,
                *span,
                member,
                FREE,
            )

    def counts(self) -> dict[str, int]:
        """Samples that are averaged, leased and free."""
        names = {AVERAGED: "averaged", FREE: "free"}
        found: dict[str, int] = {}
        for row in self._db.rows("SELECT owner, SUM(stop - start) AS n FROM blocks GROUP BY owner"):
            name = names.get(row["owner"], "leased")
            found[name] = found.get(name, 0) + row["n"]
        return found

    def _cut(self, span: Interval) -> list[sqlite3.Row]:
        # The blocks within a span, once those that reach beyond it are cut in two.
        for at in span:
            row = self._db.row("SELECT * FROM blocks WHERE start < ? ORDER BY start DESC", at)
            if row is not None and row["stop"] > at:
                self._db.run("UPDATE blocks SET stop = ? WHERE start = ?", at, row["start"])
                self._insert((at, row["stop"]), row["owner"])
        sql = "SELECT * FROM blocks WHERE start >= ? AND stop <= ? ORDER BY start"
        return self._db.rows(sql, *span)

    def _insert(self, span: Interval, owner: int) -> None:
        self._db.run("INSERT INTO blocks VALUES (?, ?, ?)", *span, owner)
