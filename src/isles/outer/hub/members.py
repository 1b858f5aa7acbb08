"""The members: which clusters may join, which live, and the command for each."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Literal

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import FINISHED, FINISHED_FIX, FINISHED_WHAT, Refusal, Settings
from isles.outer.hub.samples import SampleLeases
from isles.outer.messages import Heartbeat, Join

_LONGEST_ROUND = 1000
"""Maximum of inner steps per round that a cluster may request; `auto` requests no more."""
_ROWS_EACH = 4
"""Number of former members that stay known, per cluster that may take part."""
_SHOWN_BYTES = 24 * 2**20
"""Maximum size of all records that members show, in bytes."""
_STANDS_IN = "stands in for "
"""Prefix of a stand-in's id; ids of members are hexadecimal."""
LOST = "lost"
"""The command of a silent member that has gone; other members see it as dropped."""
_GONE = 20
"""Multiple of `dead_after` of silence after which a member has gone: its samples are leased to
others, and it must rejoin. Until then it may continue with them."""


class Membership:
    """Members by number, in the order of their first join.

    The journal has a row for each (table `members`). Heartbeats, and their times, are known only
    since this process started: after a restart every member has the full time again.

    Args:
        is_hub: whether this process runs longer than the clusters do.
    """

    def __init__(
        self,
        db: Journal,
        settings: Settings,
        samples: SampleLeases,
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
        """True if a member has left since this was set to False: its files may be deleted."""

    # The members.

    def living(self) -> list[sqlite3.Row]:
        return self.db.rows("SELECT * FROM members WHERE state = 'living' ORDER BY number")

    def away(self) -> list[sqlite3.Row]:
        """Silent members that may come back."""
        return self.db.rows("SELECT * FROM members WHERE state = 'dropped' ORDER BY number")

    def not_gone(self) -> list[sqlite3.Row]:
        """Members that are living or may come back."""
        return self.db.rows("SELECT * FROM members WHERE state != 'left' ORDER BY number")

    def holders(self) -> list[sqlite3.Row]:
        """Members with a name and a place that no other cluster can take.

        They are living, or may come back, also after a pause, or have a part in an open round. A
        name that only rounds of another hub have (see `stand_in`) is free.
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
        """Holders whose settings determine the run's, and that are not forgotten.

        Without a hub, each process belongs to a cluster. It does not know how long the others had
        been paused when it started, so it does not wait for paused clusters.
        """
        rows = self.holders()
        return rows if self._is_hub else self._timed(rows)

    def _timed(self, rows: list[sqlite3.Row]) -> list[sqlite3.Row]:
        # A restarted process does not know how long the others have been paused.
        return [r for r in rows if r["state"] != "left" or r["number"] in self._last_seen]

    def _is_gone(self, number: int) -> bool:
        return self.last_seen_s(number) > self.gone_s

    def latest(self) -> list[sqlite3.Row]:
        """For each name, its current or last member."""
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
            Refusal: no member has this id, or it has left.
        """
        row = self.db.row("SELECT * FROM members WHERE id = ? AND state != 'left'", member_id)
        if row is None:
            raise Refusal(
                "unknown",
                "the hub does not know this cluster",
                "join first; the hub may have been restarted with an empty folder",
            )
        return row

    def has(self, member_id: str) -> bool:
        """True if an id belongs to a member."""
        sql = "SELECT 1 FROM members WHERE id = ? AND state != 'left'"
        return self.db.row(sql, member_id) is not None

    def all_have_finished(self, but: int | None = None) -> bool:
        """True if all clusters except `but` have left after the last step. False if none joined.

        A cluster that pauses, or that left earlier, may come back and train.
        """
        others = [row for row in self.latest() if row["number"] != but]
        return bool(others) and all(
            row["state"] == "left" and row["has_finished"] for row in others
        )

    def end_kind(self) -> Literal["", "over", "alone"]:
        """State of the run's end.

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
        """Refuse a cluster that starts the run from the beginning after the others have finished
        it.

        The kept averages would turn it into the old model without any step of its own. A cluster
        that had a part in the run may come back, for example to train longer.

        Raises:
            Refusal: the run is finished, and this cluster starts it.
        """
        sql = "SELECT 1 FROM members WHERE id = ?"
        if join.version or self.db.row(sql, join.id) is not None:
            return
        if self.all_have_finished() and (names := self._have_done_their_part()):
            raise Refusal(FINISHED, f"{FINISHED_WHAT} ({', '.join(sorted(names))})", FINISHED_FIX)

    def _have_done_their_part(self) -> set[str]:
        # Names of clusters that have finished after they had a part in an average.
        sql = (
            "SELECT DISTINCT name FROM members JOIN parts ON member = number "
            "WHERE has_finished = 1 AND reason = '' "
            "AND round NOT IN (SELECT round FROM rounds WHERE state != 'committed')"
        )
        return {row["name"] for row in self.db.rows(sql)}

    # Joining and leaving.

    def check(self, join: Join) -> None:
        """Check whether a cluster may join.

        Raises:
            Refusal: its name is taken or has changed, or there are too many clusters.
        """
        before = self.db.row("SELECT name FROM members WHERE id = ?", join.id)
        if before is not None and before["name"] != join.name:
            raise Refusal(
                "renamed",
                f"this cluster was named {before['name']!r} before, not {join.name!r}; averages "
                "that others may still fetch contain the old name",
                f"name it {before['name']}, or start it as a new run",
            )
        # A silent or paused member also keeps its name, its place and its contributions, until it
        # is gone: a network failure or preemption must not cost it these.
        others = [row for row in self.holders() if row["id"] != join.id]
        for row in others:
            if row["name"] == join.name:
                silent_s = self.last_seen_s(row["number"])
                raise Refusal(
                    "name_taken",
                    f"another cluster named {join.name!r} takes part, or is paused (last heartbeat "
                    f"{silent_s:.1f} s ago)",
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
                f"{len(others)} clusters take part, or may come back, and the maximum is "
                f"{self.settings.max_clusters}",
                "stop a cluster first. A cluster that was killed or pauses counts until it has "
                f"been silent for {self.gone_s:g} s",
            )

    def admit(self, join: Join, from_round: int, *, is_behind: bool, why: str) -> sqlite3.Row:
        """Record a cluster that has joined.

        Args:
            from_round: the first round that waits for it, unless it is in one already.
            is_behind: whether it must pull the state.
            why: reason for `is_behind`.
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
        # Of former members, the newest stay known, one per name, and those whose contributions
        # others may still request. `max_clusters` bounds the number of awaited members.
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
        """Stop waiting for a member.

        Args:
            state: dropped: it takes part again after its next heartbeat. left: it must rejoin.
            why: reason for the log of events.
            frees: whether its samples are leased to others.
        """
        if frees:
            why += f"; {self.samples.give_back(row['number'])} samples are returned"
        self.has_left = self.has_left or state == "left"
        self.db.run("UPDATE members SET state = ? WHERE number = ?", state, row["number"])
        self.db.note(row["name"], state, why)

    def drop_silent(self) -> None:
        """Drop members that have been silent for too long."""
        for row in self.db.rows("SELECT * FROM members"):
            number, silent_s = row["number"], self.last_seen_s(row["number"])
            if row["state"] == "living":
                if silent_s > self.settings.dead_after_s:
                    self.retire(row, "dropped", f"no heartbeat for {silent_s:.1f} s")
            elif self._is_gone(number) and (
                row["state"] == "dropped" or self.samples.has_any(number)
            ):
                self.retire(row, "left", f"no heartbeat for {silent_s:.0f} s", frees=True)
                self.command(number, LOST)

    def end(self, number: int, rounds: int, *, is_decided: bool) -> int | None:
        """Note that all work of a member is in an average; returns the last round if all members
        end there.

        All members end together: a cluster that joins later does not change this. A silent member
        may come back, so the end waits for it until it counts as gone.

        Args:
            number: the member.
            rounds: number of decided rounds.
            is_decided: whether no member has contributed to the next round.
        """
        if not self.get(number)["has_finished"]:  # called repeatedly: no write
            self.db.run("UPDATE members SET has_finished = 1 WHERE number = ?", number)
        rows = self.not_gone()
        if is_decided and all(row["has_finished"] and not row["is_behind"] for row in rows):
            sql = "UPDATE members SET ended = ? WHERE ended IS NULL AND state != 'left'"
            self.db.run(sql, rounds)
        ended: int | None = self.get(number)["ended"]
        return ended

    # Reports of members.

    def touch(self, number: int) -> None:
        """Note a heartbeat of a member."""
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
        """Keep the newest record that a member shows to people, per name.

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
            what = f"all clusters together show {size} bytes; the maximum is {_SHOWN_BYTES}"
            raise Refusal("too_large", what)
        self._shown = {**found, number: (self.clock(), record)}

    def shown(self) -> dict[str, tuple[float, str]]:
        """Records that members show to people, by name: age in seconds, and the record."""
        now = self.clock()
        found = ((row["name"], self._shown.get(row["number"])) for row in self.latest())
        return {name: (now - shown[0], shown[1]) for name, shown in found if shown is not None}

    def still_s(self, number: int) -> float:
        """Seconds since a member's last inner step, as far as is known."""
        return self.clock() - self._moved_at.get(number, self.clock())

    def reached(self, number: int, version: int) -> None:
        """Note that a member has applied `version` rounds; older reports may arrive later."""
        if version > self.get(number)["version"]:  # most heartbeats have nothing new: no write
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
        """Inner steps per round that are enough for every living member's link."""
        living = {row["number"] for row in self.living()}
        wanted = [heartbeat.sync_every for n, heartbeat in self.heartbeats.items() if n in living]
        return min(max(wanted, default=0), _LONGEST_ROUND)

    # The members that a round waits for.

    @property
    def least(self) -> int:
        """Minimum contributions of a round: `min_clusters`, or fewer if clusters finish.

        A cluster that finishes without a part in any average does not lower this number.
        """
        least, done = self.settings.min_clusters, self._have_done_their_part()
        going_on = sum(not row["has_finished"] for row in self.latest())
        if len(self._last_seen) < self.settings.gather and self.clock() < self._gather_until:
            least = max(least, self.settings.gather)
        return max(1, min(least, going_on)) if done else least

    def expected(self, outer_step: int) -> list[str]:
        """Names of the members that a round waits for."""
        return sorted(
            row["name"]
            for row in self.living()
            if not (row["is_behind"] or row["has_finished"])
            and row["from_round"] <= outer_step
            and self.still_s(row["number"]) <= self.settings.still_after_s
        )

    def command(self, number: int, command: str, reason: str = "") -> None:
        """Set the command in answers to a member's heartbeats until it rejoins."""
        sql = "UPDATE members SET command = ?, command_reason = ? WHERE number = ?"
        self.db.run(sql, command, reason, number)
