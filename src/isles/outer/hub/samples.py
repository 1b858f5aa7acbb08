"""Leases of samples to clusters, in blocks that are split when only a part is averaged."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal
from isles.outer.messages import LAST_SAMPLE, MOST_LEASED, MOST_SPANS
from isles.outer.samples import Interval, joined, leased, without

FREE, AVERAGED = 0, -1
"""Owners of blocks that belong to no member."""

_HORIZON = 2**40
"""Distance beyond the first cluster's numbers up to which a replacement hub accepts sample
numbers."""
_MOST_HELD = 2 * MOST_LEASED
"""Maximum number of samples that a member holds."""
_LEASED_BLOCKS = 64
"""Maximum number of blocks in one lease."""


class SampleLeases:
    """Blocks of samples with their owners, one row each.

    A block stays with its cluster while the cluster may come back; then it is leased to another.
    Adjacent blocks of one owner are merged, and no owner has more than `MOST_SPANS`, so that the
    table stays small whatever members report.
    """

    def __init__(self, db: Journal) -> None:
        self._db = db
        self.clean()

    def clean(self) -> None:
        """Delete numbers that no lease has given: isles 0.1.0 accepted any numbers from
        clusters."""
        self._db.run("DELETE FROM blocks WHERE stop > ?", LAST_SAMPLE)

    @property
    def frontier(self) -> int:
        """The first number that has never been leased."""
        return self._db.number("SELECT MAX(stop) FROM blocks")

    def follow(self, holding: Sequence[Interval]) -> None:
        """Note that this hub's memory starts during a run: more samples were leased than it knows.

        Args:
            holding: samples of the first cluster that joins.
        """
        known = max((stop for _, stop in leased(holding)), default=0)
        self._db.put("horizon", str(min(known, LAST_SAMPLE // 2) + _HORIZON))

    def lease(self, member: sqlite3.Row, number: int, count: int) -> list[Interval]:
        """Lease `count` samples: first returned samples, then a new block.

        If the answer to a request was lost, the same request gives the same samples again.

        Raises:
            Refusal: the member has too many untrained samples.
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
                f"{member['name']} holds {held} samples and requests {count} more, but the maximum "
                f"per cluster is {_MOST_HELD}",
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
        """Update the samples of a member that joins or returns; samples that it no longer holds
        become free.

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
        """Free the blocks of a member that has gone, for other members; returns the number of
        samples."""
        blocks = "SELECT * FROM blocks WHERE owner = ?"
        rows = self._db.rows(blocks, member)
        for row in rows:
            self._give((row["start"], row["stop"]), (member,), FREE)
        self._thin(FREE)
        return sum(row["stop"] - row["start"] for row in rows)

    def average(self, member: int, spans: Sequence[Interval]) -> None:
        """Note that an average finally contains a member's progress on these samples."""
        for span in joined(leased(valid(spans))):
            self._give(span, (member, FREE), AVERAGED)
        for owner in (member, FREE):
            self._thin(owner)

    def counts(self) -> dict[str, int]:
        """Number of averaged, leased and free samples."""
        names = {AVERAGED: "averaged", FREE: "free"}
        found: dict[str, int] = {}
        for row in self._db.rows("SELECT owner, SUM(stop - start) AS n FROM blocks GROUP BY owner"):
            name = names.get(row["owner"], "leased")
            found[name] = found.get(name, 0) + row["n"]
        return found

    def _thin(self, owner: int) -> None:
        # A member that reports every other sample would split the blocks into ever more pieces.
        number = self._db.number("SELECT COUNT(*) FROM blocks WHERE owner = ?", owner)
        if number > MOST_SPANS:
            smallest = "SELECT * FROM blocks WHERE owner = ? ORDER BY stop - start, start LIMIT ?"
            rows = self._db.rows(smallest, owner, number - MOST_SPANS)
            for row in rows:
                self._give((row["start"], row["stop"]), (owner,), AVERAGED)
            lost = sum(row["stop"] - row["start"] for row in rows)
            what = f"{lost} samples in {len(rows)} pieces are given up (too many pieces)"
            self._db.note("", "samples", what)

    def _within(self, span: Interval) -> list[sqlite3.Row]:
        # The blocks that overlap a span, in order.
        before = "SELECT MAX(start) FROM blocks WHERE start <= ?"
        first = self._db.number(before, span[0])
        sql = "SELECT * FROM blocks WHERE start >= ? AND start < ? AND stop > ? ORDER BY start"
        return self._db.rows(sql, first, span[1], span[0])

    def _give(self, span: Interval, owners: Sequence[int], to: int) -> None:
        # Moves a span to another owner. Adjacent blocks of one owner are merged.
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
    """The spans of a journal that are valid in current messages."""
    return [(start, stop) for start, stop in spans if 0 <= start < stop <= LAST_SAMPLE]
