"""The members: who may join, who lives, and which command each is given."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Literal

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import FINISHED, FINISHED_FIX, FINISHED_WHAT, Refusal, Settings
from isles.outer.hub.samples import Samples
from isles.outer.messages import Heartbeat, Join

_LONGEST_ROUND = 1000
"""Inner steps that a cluster may ask for in a round: `auto` asks for no more."""
_ROWS_EACH = 4
"""So many former members stay known for each cluster that may take part."""
_SHOWN_BYTES = 24 * 2**20
"""All that members show of themselves."""
_STANDS_IN = "stands in for "
"""What the id of a stand-in begins with; ids of members are hexadecimal."""
LOST = "lost"
"""The command of a member that has gone without a word; to others it is dropped still."""
_GONE = 20
"""A member that is not heard for so many times `dead_after` has gone: its samples are leased to
others, and it joins anew when it comes back. Until then it may go on with them."""


class Membership:
    """Members by number, in the order in which they first joined.

    The journal has a row for each (table `members`). Heartbeats, and when they came, are known
    since this process began: after a restart everybody has the whole time again to be heard.

    Args:
        is_hub: whether this process runs for longer than the clusters do.
    """

    def __init__(
        self,
        db: Journal,
        settings: Settings,
        samples: Samples,
        clock: Callable[[], float],
        *,
        is_hub: bool = True,
    ) -> None:
        self.db, self.settings, self.samples, self.clock = db, settings, samples, clock
        self._is_hub = is_hub
        self._began = clock()
        self._last_seen: dict[int, float] = {}
        self._moved_at: dict[int, float] = {}
        self._has: dict[int, int] = {}
        self._gather_until = 0.0
        self.heartbeats: dict[int, Heartbeat] = {}
        self._shown: dict[int, tuple[float, str]] = {}
        self.has_left = False
        """Whether somebody has left since this was set to False: its files may go."""

    # Who there is.

    def living(self) -> list[sqlite3.Row]:
        return self.db.rows("SELECT * FROM members WHERE state = 'living' ORDER BY number")

    def away(self) -> list[sqlite3.Row]:
        """Members that are not heard of, and may come back."""
        return self.db.rows("SELECT * FROM members WHERE state = 'dropped' ORDER BY number")

    def not_gone(self) -> list[sqlite3.Row]:
        """Members that live, or may come back."""
        return self.db.rows("SELECT * FROM members WHERE state != 'left' ORDER BY number")

    def holders(self) -> list[sqlite3.Row]:
        """Members that have a name and a place, which no other cluster can take.

        They live, or may come back, also after a pause, or have a part in an open round. A name
        that only rounds of another hub have (see `stand_in`) is free.
        """
        open_parts = (
            "SELECT member FROM parts JOIN rounds USING (round) "
            "WHERE reason = '' AND rounds.state != 'committed'"
        )
        counted = {row["member"] for row in self.db.rows(open_parts)}
        return [
            row
            for row in self.db.rows(
                "SELECT * FROM members WHERE id NOT LIKE ? ORDER BY number", f"{_STANDS_IN}%"
            )
            if row["state"] != "left"
            or row["number"] in counted
            or not (row["has_finished"] or self._is_gone(row["number"]))
        ]

    @property
    def gone_s(self) -> float:
        """After this many seconds of silence a member counts as gone."""
        return _GONE * self.settings.dead_after_s

    def awaited(self) -> list[sqlite3.Row]:
        """Holders whose settings stay the run's, and that are not forgotten.

        Without a hub each process is a cluster's own. It does not know how long the others had
        paused when it began, so it does not wait for these.
        """
        rows = self.holders()
        return rows if self._is_hub else self._timed(rows)

    def _timed(self, rows: list[sqlite3.Row]) -> list[sqlite3.Row]:
        # A process that was started again does not know how long the others have paused.
        return [r for r in rows if r["state"] != "left" or r["number"] in self._last_seen]

    def _is_gone(self, number: int) -> bool:
        return self.last_seen_s(number) > self.gone_s

    def latest(self) -> list[sqlite3.Row]:
        """Of each name the member that has it, or had it last."""
        return self.db.rows(
            "SELECT * FROM members WHERE number IN (SELECT MAX(number) FROM members GROUP BY name) "
            "ORDER BY number"
        )

    def get(self, number: int) -> sqlite3.Row:
        row = self.db.row("SELECT * FROM members WHERE number = ?", number)
        assert row is not None, f"no member {number}"
        return row

    def find(self, member_id: str) -> sqlite3.Row:
        """The member with an id.

        Raises:
            Refusal: nobody has joined with it, or it has left.
        """
        row = self.db.row("SELECT * FROM members WHERE id = ? AND state != 'left'", member_id)
        if row is None:
            raise Refusal(
                "unknown",
                "the hub does not know this cluster",
                "join first; the hub may have been started anew with an empty folder",
            )
        return row

    def has(self, member_id: str) -> bool:
        """Whether an id belongs to a member."""
        sql = "SELECT 1 FROM members WHERE id = ? AND state != 'left'"
        return self.db.row(sql, member_id) is not None

    def all_have_finished(self, but: int | None = None) -> bool:
        """Whether all clusters except `but` have left after the last step; False if none joined.

        A cluster that pauses, or that left earlier, may come back and train.
        """
        others = [row for row in self.latest() if row["number"] != but]
        return bool(others) and all(
            row["state"] == "left" and row["has_finished"] for row in others
        )

    def end_kind(self) -> Literal["", "over", "alone"]:
        """How far the run's end is.

        over: all clusters have finished and left, and enough of them had a part in an average.
        alone: some have finished and no cluster is alive, but the run is not over.
        """
        members = self.latest()
        if not any(row["has_finished"] for row in members):
            return ""
        is_enough = len(self._have_done_their_part()) >= self.settings.min_clusters
        if is_enough and self.all_have_finished():
            return "over"
        return "" if any(row["state"] == "living" for row in members) else "alone"

    def refuse_new(self, join: Join) -> None:
        """Refuse a cluster that begins the run anew after the others have finished it.

        The averages that are kept would make the old model of it without any step of its own. A
        cluster that had a part in the run may come back, for example to train longer.

        Raises:
            Refusal: the run is finished, and this cluster begins it.
        """
        sql = "SELECT 1 FROM members WHERE id = ?"
        if join.version or self.db.row(sql, join.id) is not None:
            return
        if self.all_have_finished() and (names := self._have_done_their_part()):
            raise Refusal(FINISHED, f"{FINISHED_WHAT} ({', '.join(sorted(names))})", FINISHED_FIX)

    def _have_done_their_part(self) -> set[str]:
        # The names of those that have finished after they had a part in an average.
        sql = (
            "SELECT DISTINCT name FROM members JOIN parts ON member = number "
            "WHERE has_finished = 1 AND reason = '' "
            "AND round NOT IN (SELECT round FROM rounds WHERE state != 'committed')"
        )
        return {row["name"] for row in self.db.rows(sql)}

    # Coming and going.

    def check(self, join: Join) -> None:
        """Whether a cluster may join.

        Raises:
            Refusal: its name is another's or was its own otherwise, or there are too many.
        """
        before = self.db.row("SELECT name FROM members WHERE id = ?", join.id)
        if before is not None and before["name"] != join.name:
            raise Refusal(
                "renamed",
                f"this cluster was called {before['name']!r} before, not {join.name!r}: averages "
                "that others may still fetch have it under that name",
                f"call it {before['name']}, or start it as a new run",
            )
        # Also one that is not heard, or pauses, has its name, its place and what it has
        # contributed, until it is gone: to be cut off or preempted costs nobody these.
        others = [row for row in self.holders() if row["id"] != join.id]
        for row in others:
            if row["name"] == join.name:
                silent_s = self.last_seen_s(row["number"])
                raise Refusal(
                    "name_taken",
                    f"another cluster called {join.name!r} takes part, or pauses; it was heard "
                    f"{silent_s:.1f} s ago",
                    "give this cluster another name, or resume it with its old run directory. If "
                    "that directory is lost, stop the old cluster and wait "
                    f"{max(0.0, self.gone_s - silent_s):.0f} s: a name is free after "
                    f"{self.gone_s:g} s of silence, once the rounds that it has contributed to "
                    "are decided",
                )
        others = self._timed(others)
        if len(others) >= self.settings.max_clusters:
            raise Refusal(
                "full",
                f"{len(others)} clusters take part, or may come back, and "
                f"{self.settings.max_clusters} at most may",
                "stop a cluster first. A cluster that was killed or pauses counts until it has "
                f"been silent for {self.gone_s:g} s",
            )

    def admit(self, join: Join, from_round: int, *, is_behind: bool, why: str) -> sqlite3.Row:
        """Record a cluster that has joined.

        Args:
            from_round: the first round that waits for it, unless it is in one already.
            is_behind: it must pull the state.
            why: for `is_behind`.
        """
        self._forget()
        new = "INSERT OR IGNORE INTO members (id, name, state) VALUES (?, ?, 'left')"
        self.db.run(new, join.id, join.name)
        number = self.db.number("SELECT number FROM members WHERE id = ?", join.id)
        before = self.get(number)
        if before["state"] == "living" and not before["is_behind"]:
            from_round = before["from_round"]
        self.db.run(
            "UPDATE members SET state = 'living', name = ?, claim = 0, claimed = '[]', "
            "has_finished = 0, ended = NULL, is_behind = ?, from_round = ?, version = ?, "
            "command = ?, command_reason = ? WHERE number = ?",
            join.name,
            int(is_behind),
            from_round,
            join.version,
            "pull" if is_behind else "",
            why,
            number,
        )
        self.touch(number)
        self.heartbeats.pop(number, None)
        self._moved_at.pop(number, None)
        return self.get(number)

    def _forget(self) -> None:
        # Of members that are not awaited the newest stay known, one of each name, and those whose
        # contributions others may still ask for. `max_clusters` bounds those that are awaited.
        held = self.awaited()
        numbers, names = {row["number"] for row in held}, {row["name"] for row in held}
        most = len(names) + _ROWS_EACH * self.settings.max_clusters
        rows = self.db.rows(
            "SELECT number, name FROM members WHERE state = 'left' AND number NOT IN "
            "(SELECT member FROM parts WHERE round >= (SELECT CAST(value AS INTEGER) FROM meta "
            "WHERE key = 'kept_since')) ORDER BY number DESC"
        )
        for number, name in rows:
            if number in numbers:
                continue
            if name in names or len(names) >= most:
                self.samples.give_back(number)
                self.db.run("DELETE FROM applied WHERE member = ?", number)
                self.db.run("DELETE FROM states WHERE member = ?", number)
                self.db.run("DELETE FROM members WHERE number = ?", number)
                for known in (self._last_seen, self._moved_at, self._has, self.heartbeats):
                    known.pop(number, None)
                self._shown.pop(number, None)
            names.add(name)

    def stand_in(self, name: str) -> int:
        """The number for a name in rounds that another hub has decided."""
        sql = "SELECT number FROM members WHERE name = ?"
        if self.db.row(sql, name) is None:
            new = "INSERT INTO members (id, name, state) VALUES (?, ?, 'left')"
            self.db.run(new, f"{_STANDS_IN}{name}", name)
        return self.db.number(sql, name)

    def retire(
        self, row: sqlite3.Row, state: Literal["dropped", "left"], why: str, *, frees: bool = False
    ) -> None:
        """Nobody waits for a member any more.

        Args:
            state: dropped: it takes part again once it is heard. left: it must join anew.
            why: for the log of events.
            frees: its samples are leased to others.
        """
        if frees:
            why += f"; {self.samples.give_back(row['number'])} samples go back"
        self.has_left = self.has_left or state == "left"
        self.db.run("UPDATE members SET state = ? WHERE number = ?", state, row["number"])
        self.db.note(row["name"], state, why)

    def drop_silent(self) -> None:
        """Drop whoever has not been heard for too long."""
        for row in self.db.rows("SELECT * FROM members"):
            number, silent_s = row["number"], self.last_seen_s(row["number"])
            if row["state"] == "living":
                if silent_s > self.settings.dead_after_s:
                    self.retire(row, "dropped", f"not heard for {silent_s:.1f} s")
            elif self._is_gone(number) and (
                row["state"] == "dropped" or self.samples.has_any(number)
            ):
                self.retire(row, "left", f"not heard for {silent_s:.0f} s", frees=True)
                self.command(number, LOST)

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
            self.db.run("UPDATE members SET has_finished = 1 WHERE number = ?", number)
        rows = self.not_gone()
        if is_decided and all(row["has_finished"] and not row["is_behind"] for row in rows):
            sql = "UPDATE members SET ended = ? WHERE ended IS NULL AND state != 'left'"
            self.db.run(sql, rounds)
        ended: int | None = self.get(number)["ended"]
        return ended

    # What they report.

    def touch(self, number: int) -> None:
        """A member is heard."""
        now = self.clock()
        if not self._last_seen:
            self._gather_until = now + self.settings.gather_s
        self._last_seen[number] = now

    def last_seen_s(self, number: int) -> float:
        return self.clock() - self._last_seen.get(number, self._began)

    def note_heartbeat(self, number: int, heartbeat: Heartbeat) -> None:
        before = self.heartbeats.get(number)
        if before is None or before.step != heartbeat.step:
            self._moved_at[number] = self.clock()
        self.heartbeats[number] = heartbeat
        self.holds(number, heartbeat.has)

    def show(self, number: int, record: str) -> None:
        """Keep what a member shows of itself, and of each name only the newest.

        Raises:
            Refusal: the records of the other living members leave no room for it.
        """
        latest = {row["number"]: row["state"] == "living" for row in self.latest()}
        found = {n: shown for n, shown in self._shown.items() if n in latest and n != number}
        gone = sorted((n for n in found if not latest[n]), key=lambda n: found[n][0])
        size = len(record) + sum(len(text) for _, text in found.values())
        while size > _SHOWN_BYTES and gone:
            size -= len(found.pop(gone.pop(0))[1])
        if size > _SHOWN_BYTES:
            what = f"all clusters together show {size} bytes; {_SHOWN_BYTES} at most are kept"
            raise Refusal("too_large", what)
        self._shown = {**found, number: (self.clock(), record)}

    def shown(self) -> dict[str, tuple[float, str]]:
        """What members show of themselves, by name: seconds since it came, and the record."""
        now = self.clock()
        found = ((row["name"], self._shown.get(row["number"])) for row in self.latest())
        return {name: (now - shown[0], shown[1]) for name, shown in found if shown is not None}

    def still_s(self, number: int) -> float:
        """Seconds since a member's last inner step, as far as is known."""
        return self.clock() - self._moved_at.get(number, self.clock())

    def reached(self, number: int, version: int) -> None:
        """Note that a member has applied so many rounds; older reports may arrive later."""
        if version > self.get(number)["version"]:  # most heartbeats say nothing new: no write
            self.db.run("UPDATE members SET version = ? WHERE number = ?", version, number)

    def holds(self, number: int, has: int) -> None:
        self._has[number] = max(self._has.get(number, 0), has)

    def all_hold(self, has: int) -> bool:
        return all(
            max(row["version"], self._has.get(row["number"], 0)) >= has
            for row in self.living()
            if not row["is_behind"]
        )

    def sync_every(self) -> int:
        """Inner steps in a round such that no living member's link is too slow for it."""
        living = {row["number"] for row in self.living()}
        wanted = [heartbeat.sync_every for n, heartbeat in self.heartbeats.items() if n in living]
        return min(max(wanted, default=0), _LONGEST_ROUND)

    # Whom a round waits for.

    @property
    def least(self) -> int:
        """Least contributions of a round: `min_clusters`, or fewer if clusters finish.

        A cluster that finishes without a part in any average does not lower this number.
        """
        least, done = self.settings.min_clusters, self._have_done_their_part()
        going_on = sum(not row["has_finished"] for row in self.latest())
        if len(self._last_seen) < self.settings.gather and self.clock() < self._gather_until:
            least = max(least, self.settings.gather)
        return max(1, min(least, going_on)) if done else least

    def expected(self, outer_step: int) -> list[str]:
        """The names of those whose contribution a round waits for."""
        return sorted(
            row["name"]
            for row in self.living()
            if not (row["is_behind"] or row["has_finished"])
            and row["from_round"] <= outer_step
            and self.still_s(row["number"]) <= self.settings.still_after_s
        )

    def command(self, number: int, command: str, reason: str = "") -> None:
        """What a member's heartbeats are answered with until it joins again."""
        sql = "UPDATE members SET command = ?, command_reason = ? WHERE number = ?"
        self.db.run(sql, command, reason, number)
