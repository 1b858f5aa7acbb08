"""Which cluster trains on which samples: blocks that are leased, cut where a part is averaged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal
from isles.outer.messages import LAST_SAMPLE, MOST_LEASED, MOST_SPANS
from isles.outer.samples import Interval, joined, leased, without

FREE, AVERAGED = 0, -1
"""Owners of blocks that no member has."""

_HORIZON = 2**40
"""A hub that replaces a lost hub accepts numbers this far beyond the first cluster's numbers."""
_MOST_HELD = 2 * MOST_LEASED
"""Samples that a member has at a time."""
_LEASED_BLOCKS = 64
"""Blocks in one lease."""


class Samples:
    """One row for each block: from where to where, and whose it is.

    A block stays with its cluster for as long as that may come back, and is leased to another then.
    Neighbours of one owner are one block, and no owner has more than `MOST_SPANS`, so that the
    table stays small whatever members report.
    """

    def __init__(self, db: Journal) -> None:
        self._db = db
        self.clean()

    def clean(self) -> None:
        """Forget numbers that no lease has given: isles 0.1.0 believed any that a cluster sent."""
        self._db.run("DELETE FROM blocks WHERE stop > ?", LAST_SAMPLE)

    @property
    def frontier(self) -> int:
        """The first number that has never been leased."""
        return self._db.number("SELECT MAX(stop) FROM blocks")

    def follow(self, holding: Sequence[Interval]) -> None:
        """This hub's memory begins in a run that is under way: more was leased than it knows.

        Args:
            holding: of the first cluster that comes.
        """
        known = max((stop for _, stop in leased(holding)), default=0)
        self._db.put("horizon", str(min(known, LAST_SAMPLE // 2) + _HORIZON))

    def lease(self, member: sqlite3.Row, number: int, count: int) -> list[Interval]:
        """Lease `count` samples: first samples that members have given back, then a new block.

        If the answer to a request was lost, the same request gives the same samples again.

        Raises:
            Refusal: the member has too many that it has not trained on.
        """
        if number <= member["claim"]:
            claimed = json.loads(member["claimed"])
            if len(again := valid(claimed)) == len(claimed):
                return again
        own = "SELECT SUM(stop - start) FROM blocks WHERE owner = ?"
        held, frontier = self._db.number(own, member["number"]), self.frontier
        if held + count > _MOST_HELD or frontier + count > LAST_SAMPLE:
            raise Refusal(
                "too_many",
                f"{member['name']} holds {held} samples and asks for {count} more; {_MOST_HELD} "
                "at most may be leased to a cluster",
                "train on those first",
            )
        given, left = list[Interval](), count
        free = "SELECT * FROM blocks WHERE owner = ? ORDER BY start LIMIT ?"
        for row in self._db.rows(free, FREE, _LEASED_BLOCKS):
            if left > 0:
                given.append((row["start"], min(row["stop"], row["start"] + left)))
                left -= given[-1][1] - given[-1][0]
        if left > 0:
            self._insert((frontier, frontier + left), FREE)
            given.append((frontier, frontier + left))
        for span in given:
            self._give(span, (FREE,), member["number"])
        given = joined(given)
        sql = "UPDATE members SET claim = ?, claimed = ? WHERE number = ?"
        self._db.run(sql, number, json.dumps(given), member["number"])
        return given

    def take_up(self, member: int, holding: Sequence[Interval]) -> list[Interval]:
        """A member joins or returns with the samples that it holds; its others are free again.

        Unknown samples count as leased by an earlier hub whose journal is lost, if there was one.

        Returns:
            Samples that the member may not use: leased to another, averaged, or never leased.
        """
        self.give_back(member)
        limit = max(self.frontier, int(self._db.get("horizon") or 0))
        lost, held = list[Interval](), 0
        for start, stop in joined(leased(holding)):
            span = start, min(stop, limit)
            held += stop - start
            rows = self._within(span)
            others = [(row["start"], row["stop"]) for row in rows if row["owner"] != FREE]
            others = [(max(a, start), min(b, stop)) for a, b in others]
            if start >= limit or held > _MOST_HELD or len(lost) + len(others) > MOST_SPANS:
                lost.append((start, stop))
                continue
            lost += [*others, *([(limit, stop)] if stop > limit else [])]
            for unknown in without([span], [(row["start"], row["stop"]) for row in rows]):
                self._insert(unknown, FREE)
            self._give(span, (FREE,), member)
        return joined(lost)

    def has_any(self, member: int) -> bool:
        return self._db.row("SELECT 1 FROM blocks WHERE owner = ? LIMIT 1", member) is not None

    def give_back(self, member: int) -> int:
        """A member has gone: its blocks are leased to others; how many samples there are."""
        blocks = "SELECT * FROM blocks WHERE owner = ?"
        rows = self._db.rows(blocks, member)
        for row in rows:
            self._give((row["start"], row["stop"]), (member,), FREE)
        self._thin(FREE)
        return sum(row["stop"] - row["start"] for row in rows)

    def average(self, member: int, spans: Sequence[Interval]) -> None:
        """What a member has learnt of these is in an average, for good."""
        for span in joined(leased(valid(spans))):
            self._give(span, (member, FREE), AVERAGED)
        for owner in (member, FREE):
            self._thin(owner)

    def counts(self) -> dict[str, int]:
        """Samples that are averaged, leased and free."""
        names = {AVERAGED: "averaged", FREE: "free"}
        found: dict[str, int] = {}
        for row in self._db.rows("SELECT owner, SUM(stop - start) AS n FROM blocks GROUP BY owner"):
            name = names.get(row["owner"], "leased")
            found[name] = found.get(name, 0) + row["n"]
        return found

    def _thin(self, owner: int) -> None:
        # Whoever reports every other sample would cut the blocks to pieces, more of them each time.
        number = self._db.number("SELECT COUNT(*) FROM blocks WHERE owner = ?", owner)
        if number > MOST_SPANS:
            smallest = "SELECT * FROM blocks WHERE owner = ? ORDER BY stop - start, start LIMIT ?"
            rows = self._db.rows(smallest, owner, number - MOST_SPANS)
            for row in rows:
                self._give((row["start"], row["stop"]), (owner,), AVERAGED)
            lost = sum(row["stop"] - row["start"] for row in rows)
            what = f"{lost} samples in {len(rows)} pieces are given up: too many pieces"
            self._db.note("", "samples", what)

    def _within(self, span: Interval) -> list[sqlite3.Row]:
        # The blocks that have a sample of a span, in order.
        before = "SELECT MAX(start) FROM blocks WHERE start <= ?"
        first = self._db.number(before, span[0])
        sql = "SELECT * FROM blocks WHERE start >= ? AND start < ? AND stop > ? ORDER BY start"
        return self._db.rows(sql, first, span[1], span[0])

    def _give(self, span: Interval, owners: Sequence[int], to: int) -> None:
        # What some have of a span is another's from now on. Neighbours of one owner become one.
        before = self._within((max(0, span[0] - 1), span[1] + 1))
        found: list[tuple[int, int, int]] = []
        for row in before:
            start, stop = max(row["start"], span[0]), min(row["stop"], span[1])
            pieces = [(row["start"], row["stop"], row["owner"])]
            if row["owner"] in owners and start < stop:
                pieces = [(row["start"], start, row["owner"]), (start, stop, to)]
                pieces += [(stop, row["stop"], row["owner"])]
            for first, last, owner in pieces:
                if found and found[-1][1:] == (first, owner):
                    found[-1] = (found[-1][0], last, owner)
                elif first < last:
                    found.append((first, last, owner))
        known = {(row["start"], row["stop"], row["owner"]) for row in before}
        starts = {start for start, _, _ in found}
        for row in before:
            if row["start"] not in starts:
                self._db.run("DELETE FROM blocks WHERE start = ?", row["start"])
        for block in found:
            if block not in known:
                self._db.run("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", *block)

    def _insert(self, span: Interval, owner: int) -> None:
        self._db.run("INSERT INTO blocks VALUES (?, ?, ?)", *span, owner)


def valid(spans: Sequence[Sequence[int]]) -> list[Interval]:
    """The spans of a journal that a message of today may contain."""
    return [(start, stop) for start, stop in spans if 0 <= start < stop <= LAST_SAMPLE]
