"""The ledger of samples: every number is free, claimed, contributed or committed; one of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

from isles.outer.hub.book import Book
from isles.outer.hub.refusal import Refusal
from isles.outer.spans import dealt, joined, reserve_of, without

_MOST_CLAIMED = 2**27
"""Samples that one cluster has at a time at most: so many tokens can weigh in one turn."""

Span = tuple[int, int]
"""Sample numbers from the first up to, without, the second."""


class Samples:
    """Rows that cover all numbers below the frontier, without gaps and without overlaps."""

    def __init__(self, book: Book) -> None:
        self._book = book

    @property
    def frontier(self) -> int:
        """The first number that has never been dealt."""
        return self._book.number("SELECT MAX(stop) FROM samples")

    def claim(self, member: int, number: int, count: int) -> list[Span]:
        """Deal samples to a member: those given back first, then new ones.

        A claim with the number of the member's last one gives what that gave: its answer was lost
        on the way.
        """
        last = self._book.row("SELECT claim, claimed FROM members WHERE number = ?", member)
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
        held = self._book.number(
            "SELECT SUM(stop - start) FROM samples WHERE state = 'claimed' AND member = ?", member
        )
        if held + count > _MOST_CLAIMED:
            raise Refusal(
                409,
                "too_many",
                f"{held + count} samples would be claimed at a time; {_MOST_CLAIMED} are allowed",
                "contribute what was trained on before more is claimed",
            )
        with self._book.transaction():
            dealt = self._deal(member, count)
            self._book.run(
                "UPDATE members SET claim = ?, claimed = ? WHERE number = ?",
                number,
                json.dumps(dealt),
                member,
            )
        return dealt

    def _deal(self, member: int, count: int) -> list[Span]:
        dealt: list[Span] = []
        free = self._book.rows(
            "SELECT start, stop FROM samples WHERE state = 'free' ORDER BY start"
        )
        for row in free:
            if count == 0:
                break
            stop = min(row["stop"], row["start"] + count)
            self._cut(stop)
            self._book.run(
                "UPDATE samples SET state = 'claimed', member = ? WHERE start = ?",
                member,
                row["start"],
            )
            dealt.append((row["start"], stop))
            count -= stop - row["start"]
        if count:
            start = self.frontier
            self._book.run(
                "INSERT INTO samples VALUES (?, ?, 'claimed', ?, NULL)",
                start,
                start + count,
                member,
            )
            dealt.append((start, start + count))
        return joined(dealt)

    def give_back(self, member: int, holding: Sequence[Span] = ()) -> tuple[int, list[Span]]:
        """Free what a member has claimed, save what it holds.

        What it holds and has been freed before, but not dealt to another, is its own again.

        Returns:
            How many samples were freed, and what it holds without a right to.
        """
        with self._book.transaction():
            holding = dealt(holding)
            self._cut_all(holding)
            lost: list[Span] = []
            kept: set[int] = set()
            for start, stop in joined(holding):
                for row in self._within(start, stop):
                    if row["state"] == "free":
                        self._book.run(
                            "UPDATE samples SET state = 'claimed', member = ? WHERE start = ?",
                            member,
                            row["start"],
                        )
                    elif (row["state"], row["member"]) != ("claimed", member):
                        lost.append((row["start"], row["stop"]))
                        continue
                    kept.add(row["start"])
            freed = 0
            for row in self._book.rows(
                "SELECT start, stop FROM samples WHERE state = 'claimed' AND member = ?", member
            ):
                if row["start"] not in kept:
                    freed += row["stop"] - row["start"]
                    self._book.run(
                        "UPDATE samples SET state = 'free', member = NULL WHERE start = ?",
                        row["start"],
                    )
        return freed, joined(lost)

    def take_over(self, member: int, holding: Sequence[Span]) -> None:
        """The ledger was lost, and a member holds samples that it had been dealt from the former.

        What lies before them counts as done: nobody knows better, and nothing comes twice.
        """
        holding = dealt(holding)
        end, last = self.frontier, max((stop for _, stop in holding), default=0)
        if last <= end:
            return
        with self._book.transaction():
            self._book.run(
                "INSERT INTO samples VALUES (?, ?, 'committed', ?, -1)", end, last, member
            )
            held = without(holding, [(0, end)])
            self._cut_all(held)
            for start, stop in held:
                for row in self._within(start, stop):
                    self._book.run(
                        "UPDATE samples SET state = 'claimed', turn = NULL WHERE start = ?",
                        row["start"],
                    )

    def contribute(self, member: int, turn: int, spans: Sequence[Span]) -> int:
        """A member has trained on these, and contributes to a turn what it learned.

        Returns:
            How many of them belong to another or to an earlier turn: those are not counted again.
        """
        with self._book.transaction():
            rows, reserve = self._countable(member, spans)
            for row in rows:
                self._book.run(
                    "UPDATE samples SET state = 'contributed', member = ?, turn = ? "
                    "WHERE start = ?",
                    member,
                    turn,
                    row["start"],
                )
            for start, stop in reserve:
                sql = "INSERT INTO reserve VALUES (?, ?, ?, ?)"
                self._book.run(sql, member, start, stop, turn)
        return _total(joined(spans)) - _count(rows) - _total(reserve)

    def countable(self, member: int, spans: Sequence[Span]) -> int:
        """How many of these samples would count, if the member contributed them now."""
        with self._book.transaction():
            rows, reserve = self._countable(member, spans)
        return _count(rows) + _total(reserve)

    def _countable(
        self, member: int, spans: Sequence[Span]
    ) -> tuple[list[sqlite3.Row], list[Span]]:
        """Rows of the ledger that are the member's or free; and what is of its own reserve.

        A member reads its reserve, which nobody else can have, while no rendezvous deals samples.
        """
        mine = dealt(spans)
        self._cut_all(mine)
        rows = [
            row
            for start, stop in joined(mine)
            for row in self._within(start, stop)
            if row["state"] == "free" or (row["state"], row["member"]) == ("claimed", member)
        ]
        found = self._book.row("SELECT id FROM members WHERE number = ?", member)
        assert found is not None
        own, known = (
            reserve_of(found["id"]),
            self._book.rows("SELECT start, stop FROM reserve WHERE member = ?", member),
        )
        extra = without(spans, mine)
        if foreign := without(extra, [own]):
            start, stop = foreign[0]
            raise _never_dealt(start, stop, self.frontier)
        return rows, without(extra, [(row["start"], row["stop"]) for row in known])

    def withdraw(self, member: int, turn: int) -> None:
        """A contribution does not count after all: its samples are the member's claim again."""
        self._book.run(
            "UPDATE samples SET state = 'claimed', turn = NULL "
            "WHERE state = 'contributed' AND member = ? AND turn = ?",
            member,
            turn,
        )
        self._book.run("DELETE FROM reserve WHERE member = ? AND turn = ?", member, turn)

    def commit(self, turn: int) -> None:
        """All that was contributed to a turn is done, for good."""
        self._book.run(
            "UPDATE samples SET state = 'committed' WHERE state = 'contributed' AND turn = ?", turn
        )

    def counts(self) -> dict[str, int]:
        """How many samples are in which state."""
        found = self._book.rows(
            "SELECT state, SUM(stop - start) AS n FROM samples GROUP BY state UNION ALL "
            "SELECT 'reserve', SUM(stop - start) FROM reserve"
        )
        return {row["state"]: row["n"] for row in found if row["n"]}

    def audit(self) -> list[str]:
        """What is wrong with the ledger: a gap, an overlap, a number without an owner."""
        faults = []
        end = 0
        for row in self._book.rows("SELECT * FROM samples ORDER BY start"):
            span = f"{row['start']}–{row['stop']} ({row['state']})"
            if row["start"] != end:
                faults.append(f"{span} begins where {end} was due")
            if (row["state"] == "free") != (row["member"] is None):
                faults.append(f"{span} belongs to member {row['member']}")
            if (row["state"] in ("contributed", "committed")) != (row["turn"] is not None):
                faults.append(f"{span} belongs to turn {row['turn']}")
            end = row["stop"]
        return faults

    def _within(self, start: int, stop: int) -> list[sqlite3.Row]:
        return self._book.rows(
            "SELECT * FROM samples WHERE start >= ? AND start < ? ORDER BY start", start, stop
        )

    def _cut_all(self, spans: Sequence[Span]) -> None:
        """Let rows begin and end where the spans do."""
        end = self.frontier
        for start, stop in spans:
            if not 0 <= start < stop <= end:
                raise _never_dealt(start, stop, end)
            self._cut(start)
            self._cut(stop)

    def _cut(self, at: int) -> None:
        """Let a row begin at a number, where one covers it."""
        row = self._book.row(
            "SELECT * FROM samples WHERE start < ? ORDER BY start DESC LIMIT 1", at
        )
        if row is None or row["stop"] <= at:
            return
        self._book.run("UPDATE samples SET stop = ? WHERE start = ?", at, row["start"])
        self._book.run(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
            at,
            row["stop"],
            row["state"],
            row["member"],
            row["turn"],
        )


def _never_dealt(start: int, stop: int, frontier: int) -> Refusal:
    return Refusal(
        422,
        "samples",
        f"samples {start} to {stop} have never been dealt (the next is {frontier})",
        "train on what claims have given, and on nothing else",
    )


def _count(rows: Sequence[sqlite3.Row]) -> int:
    return sum(row["stop"] - row["start"] for row in rows)


def _total(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
