"""The members: who may join, who lives, and which command each is given."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.samples import Samples
from isles.outer.messages import Heartbeat, Join

_LONGEST_ROUND = 100_000
"""Inner steps that a cluster may ask for in a round."""
_GONE = 20
"""A member that is not heard for so many times `dead_after` has gone: its samples are leased to
others, and it joins anew when it comes back. Until then it may go on with them."""


class Membership:
    """Members by number, in the order in which they first joined."""

    def __init__(
        self, db: Journal, settings: Settings, samples: Samples, clock: Callable[[], float]
    ) -> None:
        self._db = db
        self._settings = settings
        self._samples = samples
        self._clock = clock
        now = clock()
        # After a restart everybody has the whole time again to be heard.
        self._last_seen = {row["number"]: now for row in db.rows("SELECT number FROM members")}
        self._moved: dict[int, tuple[int, float]] = {}
        self._come: set[int] = set()
        """Members that were heard since this process began."""
        self._gather_until = 0.0
        self.heartbeats: dict[int, Heartbeat] = {}
        self._has: dict[int, int] = {}

    def living(self) -> list[sqlite3.Row]:
        return self._db.rows("SELECT * FROM members WHERE state = 'living' ORDER BY number")

    def away(self) -> list[sqlite3.Row]:
        """Members that are not heard of, and may come back."""
        return self._db.rows("SELECT * FROM members WHERE state = 'dropped' ORDER BY number")

    def latest(self) -> list[sqlite3.Row]:
        """Of each name the member that has it, or had it last."""
        return self._db.rows(
            "SELECT * FROM members WHERE number IN (SELECT MAX(number) FROM members GROUP BY name) "
            "ORDER BY number"
        )

    @property
    def least(self) -> int:
        """Contributions that a round has at least: no more than there are clusters that go on."""
        finished = [bool(row["has_finished"]) for row in self.latest()]
        least = self._settings.min_clusters
        if len(self._come) < self._settings.gather and self._clock() < self._gather_until:
            least = max(least, self._settings.gather)
        return max(1, min(least, finished.count(False))) if any(finished) else least

    def get(self, number: int) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM members WHERE number = ?", number)
        assert row is not None, f"no member {number}"
        return row

    def find(self, member_id: str) -> sqlite3.Row:
        """The member with an id.

        Raises:
            Refusal: nobody has joined with it, or it has left.
        """
        row = self._db.row("SELECT * FROM members WHERE id = ?", member_id)
        if row is None or row["state"] == "left":
            raise Refusal(
                404,
                "unknown",
                "the hub does not know this cluster",
                "join first; the hub may have been started anew with an empty folder",
            )
        return row

    def last_seen_s(self, number: int) -> float:
        return self._clock() - self._last_seen.get(number, self._clock())

    def check(self, join: Join) -> None:
        """Whether a cluster may join.

        Raises:
            Refusal: its name is another's, or there are too many.
        """
        rival = self._db.row(
            "SELECT * FROM members WHERE name = ? AND id != ? AND state = 'living'",
            join.name,
            join.id,
        )
        if rival is not None:
            raise Refusal(
                409,
                "name_taken",
                f"another cluster called {join.name!r} takes part; it was heard "
                f"{self.last_seen_s(rival['number']):.1f} s ago",
                "give this cluster another name, or stop the other and wait "
                f"{self._settings.dead_after_s:g} s",
            )
        others = self._db.number(
            "SELECT COUNT(*) FROM members WHERE state = 'living' AND id != ?", join.id
        )
        if others >= self._settings.max_clusters:
            raise Refusal(
                409,
                "full",
                f"{others} clusters take part, and {self._settings.max_clusters} at most may",
                "stop one of them first",
            )

    def admit(self, join: Join) -> tuple[int, bool]:
        """Record a cluster that may join; its number, and whether it lived before."""
        for former in self._db.rows(
            "SELECT * FROM members WHERE name = ? AND id != ? AND state = 'dropped'",
            join.name,
            join.id,
        ):
            self._samples.give_back(former["number"])
            self._db.run("UPDATE members SET state = 'left' WHERE number = ?", former["number"])
            self._db.note(join.name, "replaced", "a new cluster has taken this name")
        row = self._db.row("SELECT * FROM members WHERE id = ?", join.id)
        if row is None:
            self._db.run(
                "INSERT INTO members (id, name, state) VALUES (?, ?, 'living')", join.id, join.name
            )
            number = self._db.number("SELECT number FROM members WHERE id = ?", join.id)
        else:
            number = int(row["number"])
            # Its leases are numbered from the start again.
            self._db.run(
                "UPDATE members SET state = 'living', name = ?, claim = 0, claimed = '[]', "
                "has_finished = 0 WHERE number = ?",
                join.name,
                number,
            )
            self._db.run("DELETE FROM ended WHERE member = ?", number)
        self._see(number)
        self._moved.pop(number, None)
        return number, row is not None and row["state"] == "living"

    def stand_in(self, name: str) -> int:
        """The number for a name in rounds that another hub has decided."""
        row = self._db.row("SELECT number FROM members WHERE name = ?", name)
        if row is None:
            sql = "INSERT INTO members (id, name, state) VALUES (?, ?, 'left')"
            self._db.run(sql, f"stands in for {name}", name)
            row = self._db.row("SELECT number FROM members WHERE name = ?", name)
        assert row is not None
        return int(row["number"])

    def note_heartbeat(self, number: int, heartbeat: Heartbeat) -> None:
        now = self._clock()
        self._see(number)
        self.heartbeats[number] = heartbeat
        if number not in self._moved or self._moved[number][0] != heartbeat.step:
            self._moved[number] = (heartbeat.step, now)

    def reached(self, number: int, version: int) -> None:
        """Note that a member has applied so many rounds; older reports may arrive later."""
        if version > self.get(number)["version"]:  # most heartbeats say nothing new: no write
            self._db.run("UPDATE members SET version = ? WHERE number = ?", version, number)

    def holds(self, number: int, has: int) -> None:
        self._has[number] = max(self._has.get(number, 0), has)

    def all_hold(self, has: int) -> bool:
        return all(
            max(row["version"], self._has.get(row["number"], 0)) >= has
            for row in self.living()
            if not row["is_behind"]
        )

    @property
    def sync_every(self) -> int:
        """Inner steps in a round such that no living member's link is too slow for it."""
        living = {row["number"] for row in self.living()}
        wanted = [heartbeat.sync_every for n, heartbeat in self.heartbeats.items() if n in living]
        return min(max(wanted, default=0), _LONGEST_ROUND)

    def touch(self, number: int) -> None:
        self._see(number)

    def _see(self, number: int) -> None:
        now = self._clock()
        self._last_seen[number] = now
        if not self._come:
            self._gather_until = now + self._settings.gather_s
        self._come.add(number)

    def forgive(self, seconds: float) -> None:
        """Subtract a time in which this process itself stood still from all silences."""
        now = self._clock()
        self._last_seen = {number: min(now, at + seconds) for number, at in self._last_seen.items()}
        self._moved = {n: (s, min(now, at + seconds)) for n, (s, at) in self._moved.items()}

    def silent(self) -> list[tuple[sqlite3.Row, float]]:
        """Living members that have not been heard for too long, and for how long."""
        return [
            (row, self.last_seen_s(row["number"]))
            for row in self.living()
            if self.last_seen_s(row["number"]) > self._settings.dead_after_s
        ]

    def gone(self) -> list[tuple[sqlite3.Row, float]]:
        """Members that are away with samples, and not heard for very long; and for how long."""
        rows = self._db.rows("SELECT * FROM members WHERE state IN ('dropped', 'left')")
        return [
            (row, self.last_seen_s(row["number"]))
            for row in rows
            if self.last_seen_s(row["number"]) > _GONE * self._settings.dead_after_s
            and (row["state"] == "dropped" or self._samples.has_any(row["number"]))
        ]

    def drop(self, row: sqlite3.Row, why: str) -> None:
        """A member is not heard: nobody waits for it."""
        with self._db.transaction():
            sql = "UPDATE members SET state = 'dropped' WHERE number = ?"
            self._db.run(sql, row["number"])
            self._db.note(row["name"], "dropped", why)

    def pause(self, row: sqlite3.Row) -> None:
        """A member stops and means to come back: it keeps its samples for a while."""
        self._db.run("UPDATE members SET state = 'left' WHERE number = ?", row["number"])
        self._db.note(row["name"], "left", "it pauses")

    def part(self, row: sqlite3.Row, why: str) -> None:
        """A member takes part no more: its samples go back. It may join anew."""
        with self._db.transaction():
            self._db.run("UPDATE members SET state = 'left' WHERE number = ?", row["number"])
            freed = self._samples.give_back(row["number"])
            self._db.note(row["name"], "left", f"{why}; {freed} samples go back")

    def still_s(self, number: int) -> float:
        """Seconds since a member's last inner step, as far as is known."""
        moved = self._moved.get(number)
        return 0.0 if moved is None else self._clock() - moved[1]

    def is_still(self, number: int) -> bool:
        return self.still_s(number) > self._settings.still_after_s

    def expected(self, outer_step: int) -> frozenset[int]:
        return frozenset(
            row["number"]
            for row in self.living()
            if not (row["is_behind"] or row["has_finished"] or self.is_still(row["number"]))
            and row["from_round"] <= outer_step
        )

    def end(self, number: int, rounds: int, *, is_decided: bool) -> int | None:
        """A member has nothing left that is in no average; after how many rounds all end, if so.

        All end at once: who joins thereafter changes nothing for them. A member that is not heard
        may come back, and is waited for until it counts as gone.

        Args:
            number: the member.
            rounds: so many are decided.
            is_decided: nobody has contributed to the next one.
        """
        if not self.get(number)["has_finished"]:  # asked again and again: no write
            self._db.run("UPDATE members SET has_finished = 1 WHERE number = ?", number)
        rows = [*self.living(), *self.away()]
        if is_decided and all(row["has_finished"] and not row["is_behind"] for row in rows):
            for row in rows:
                self._db.run("INSERT OR IGNORE INTO ended VALUES (?, ?)", row["number"], rounds)
        ended = self._db.row("SELECT rounds FROM ended WHERE member = ?", number)
        return None if ended is None else int(ended["rounds"])

    def command(self, number: int, command: str, reason: str = "") -> None:
        """Set the order that a member's heartbeats are answered with until it joins again."""
        self._db.run(
            "UPDATE members SET orders = ?, order_reason = ? WHERE number = ?",
            command,
            reason,
            number,
        )

    def names(self, numbers: Sequence[int] | frozenset[int]) -> list[str]:
        return sorted(self.get(number)["name"] for number in numbers)
