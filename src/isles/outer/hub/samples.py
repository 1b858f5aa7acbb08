"""Which cluster trains on which samples: they are leased by blocks, which are never cut.

A cluster reads its blocks from their beginning. What is in averages of a block is its first part;
the rest stays with the cluster for as long as it may come back, and is leased to another then.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal
from isles.outer.samples import RESERVE, Interval, joined, leased, reserve_of, without

_MOST_LEASED = 2**27
"""Samples that one cluster has at a time at most: so many tokens can weigh in one outer step."""


class Samples:
    """One row for each block: from where to where, whose it is, and how much of it is averaged."""

    def __init__(self, db: Journal) -> None:
        self._db = db

    @property
    def frontier(self) -> int:
        """The first number that has never been leased."""
        return self._db.number("SELECT MAX(stop) FROM blocks")

    def lease(self, member: int, number: int, count: int) -> list[Interval]:
        """At least so many samples: what others have given back first, then a new block.

        A request with the number of the member's last one gives what that gave: its answer was
        lost on the way.
        """
        last = self._db.row("SELECT claim, claimed FROM members WHERE number = ?", member)
        assert last is not None
        if number == last["claim"]:
            return [(start, stop) for start, stop in json.loads(last["claimed"])]
        if number < last["claim"]:
            raise Refusal(
                409,
                "old_claim",
                f"claim {number} comes after claim {last['claim']} of the same cluster",
                "number the claims upwards; join again after a restart",
            )
        held = self._db.number(
            "SELECT SUM(stop - start - read) FROM blocks WHERE member = ?", member
        )
        if held + count > _MOST_LEASED:
            raise Refusal(
                409,
                "too_many",
                f"{held + count} samples would be claimed at a time; {_MOST_LEASED} are allowed",
                "contribute what was trained on before more is claimed",
            )
        with self._db.transaction():
            given: list[Interval] = []
            free = "SELECT * FROM blocks WHERE member IS NULL AND read < stop - start"
            for row in self._db.rows(f"{free} ORDER BY start"):
                if sum(b - a for a, b in given) < count:
                    self._give(row, member)
                    given.append((row["start"] + row["read"], row["stop"]))
            if (left := count - sum(b - a for a, b in given)) > 0:
                start = self.frontier
                self._insert(start, start + left, member)
                given.append((start, start + left))
            given = joined(given)
            sql = "UPDATE members SET claim = ?, claimed = ? WHERE number = ?"
            self._db.run(sql, number, json.dumps(given), member)
        return given

    def take_up(self, member: int, holding: Sequence[Interval]) -> list[Interval]:
        """A member comes, or comes back, and goes on in its own blocks; others are given back.

        What nobody here has heard of was leased by a hub whose journal is lost.

        Returns:
            What it holds without a right to: another's by now, or averaged already.
        """
        spans, lost, own = joined(leased(holding)), list[Interval](), set[int]()
        with self._db.transaction():
            for span in spans:
                rows = self._touched(span)
                for row in rows:
                    averaged = (row["start"], row["start"] + row["read"])
                    if row["member"] in (None, member):
                        self._give(row, member)
                        own.add(row["start"])
                        lost += _common(span, averaged)
                    else:
                        lost += _common(span, (row["start"], row["stop"]))
                for start, stop in without([span], [(r["start"], r["stop"]) for r in rows]):
                    self._insert(start, stop, member)
                    own.add(start)
            for row in self._db.rows("SELECT * FROM blocks WHERE member = ?", member):
                if row["start"] not in own:
                    self._give(row, None)
        return joined(lost)

    def has_any(self, member: int) -> bool:
        return self._db.row("SELECT 1 FROM blocks WHERE member = ? LIMIT 1", member) is not None

    def give_back(self, member: int) -> int:
        """A member has gone: its blocks are leased to others; how many samples there are."""
        left = "SELECT SUM(stop - start - read) FROM blocks WHERE member = ?"
        freed = self._db.number(left, member)
        self._db.run("UPDATE blocks SET member = NULL WHERE member = ?", member)
        return freed

    def own(self, member: int, spans: Sequence[Interval]) -> list[Interval]:
        """Those of some samples that a member may have trained on: none of another's block.

        Raises:
            Refusal: some were never leased.
        """
        mine = joined(leased(spans))
        rows = [row for span in mine for row in self._touched(span)]
        found = self._db.row("SELECT id FROM members WHERE number = ?", member)
        assert found is not None
        # It reads its reserve, which nobody else can have, while no hub leases samples.
        extra = [span for span in joined(spans) if span[0] >= RESERVE]
        known = [(row["start"], row["stop"]) for row in rows]
        if unknown := [*without(mine, known), *without(extra, [reserve_of(found["id"])])]:
            start, stop = unknown[0]
            raise Refusal(
                422,
                "samples",
                f"samples {start} to {stop} have never been dealt (the next is {self.frontier})",
                "train on what claims have given, and on nothing else",
            )
        others = [row for row in rows if row["member"] not in (None, member)]
        return [*without(mine, [(row["start"], row["stop"]) for row in others]), *extra]

    def average(self, member: int, spans: Sequence[Interval]) -> None:
        """What a member has learnt of these is in an average, for good."""
        for span in joined(leased(spans)):
            for row in self._touched(span):
                if row["member"] in (None, member):
                    read = min(span[1], row["stop"]) - row["start"]
                    sql = "UPDATE blocks SET read = MAX(read, ?) WHERE start = ?"
                    self._db.run(sql, read, row["start"])

    def counts(self) -> dict[str, int]:
        found = self._db.rows(
            "SELECT 'averaged' AS state, SUM(read) AS n FROM blocks UNION ALL "
            "SELECT 'leased', SUM(stop - start - read) FROM blocks WHERE member IS NOT NULL "
            "UNION ALL SELECT 'free', SUM(stop - start - read) FROM blocks WHERE member IS NULL"
        )
        return {row["state"]: row["n"] for row in found if row["n"]}

    def _touched(self, span: Interval) -> list[sqlite3.Row]:
        sql = "SELECT * FROM blocks WHERE start < ? AND stop > ? ORDER BY start"
        return self._db.rows(sql, span[1], span[0])

    def _give(self, row: sqlite3.Row, member: int | None) -> None:
        self._db.run("UPDATE blocks SET member = ? WHERE start = ?", member, row["start"])

    def _insert(self, start: int, stop: int, member: int) -> None:
        self._db.run("INSERT INTO blocks VALUES (?, ?, ?, 0)", start, stop, member)


def _common(one: Interval, other: Interval) -> list[Interval]:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return [(start, stop)] if start < stop else []
