"""The members: who may join, who lives, who is told what."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence

from isles.outer.messages import PROTOCOL, Beat, Join
from isles.outer.rendezvous.book import Book
from isles.outer.rendezvous.refusal import Refusal
from isles.outer.rendezvous.samples import Samples
from isles.outer.rendezvous.settings import Settings


class Roster:
    """Members by number, in the order in which they first joined."""

    def __init__(
        self, book: Book, settings: Settings, samples: Samples, clock: Callable[[], float]
    ) -> None:
        self._book = book
        self._settings = settings
        self._samples = samples
        self._clock = clock
        now = clock()
        # After a restart everybody has the whole time again to be heard.
        self._heard = {row["number"]: now for row in self.living()}
        self._moved: dict[int, tuple[int, float]] = {}
        self.beats: dict[int, Beat] = {}

    def living(self) -> list[sqlite3.Row]:
        """Members that are heard of."""
        return self._book.rows("SELECT * FROM members WHERE state = 'living' ORDER BY number")

    def get(self, number: int) -> sqlite3.Row:
        """One member."""
        row = self._book.row("SELECT * FROM members WHERE number = ?", number)
        assert row is not None, f"no member {number}"
        return row

    def find(self, member_id: str) -> sqlite3.Row:
        """The member with an id.

        Raises:
            Refusal: nobody has joined with it, or it has left.
        """
        row = self._book.row("SELECT * FROM members WHERE id = ?", member_id)
        if row is None or row["state"] == "left":
            raise Refusal(
                404,
                "unknown",
                f"no cluster with the id {member_id[:8]}… takes part",
                "join first; the rendezvous may have been started anew with an empty folder",
            )
        return row

    def heard_s(self, number: int) -> float:
        """Seconds since a member was heard last."""
        return self._clock() - self._heard.get(number, self._clock())

    def check(self, join: Join) -> None:
        """Whether a cluster may join.

        Raises:
            Refusal: it trains something else, its name is another's, or there are too many.
        """
        if join.protocol != PROTOCOL:
            raise Refusal(
                409,
                "protocol",
                f"{join.name} speaks version {join.protocol}, the rendezvous version {PROTOCOL}",
                "install the same version of isles on both",
            )
        self._check_identity(join)
        rival = self._book.row(
            "SELECT * FROM members WHERE name = ? AND id != ? AND state = 'living'",
            join.name,
            join.id,
        )
        if rival is not None:
            raise Refusal(
                409,
                "name_taken",
                f"another cluster called {join.name!r} takes part; it was heard "
                f"{self.heard_s(rival['number']):.1f} s ago",
                "give this cluster another name, or stop the other and wait "
                f"{self._settings.dead_after_s:g} s",
            )
        others = self._book.number(
            "SELECT COUNT(*) FROM members WHERE state = 'living' AND id != ?", join.id
        )
        if others >= self._settings.max_clusters:
            raise Refusal(
                409,
                "full",
                f"{others} clusters take part, and max_clusters is {self._settings.max_clusters}",
                "start the rendezvous with a larger max_clusters",
            )

    def _check_identity(self, join: Join) -> None:
        known = self._book.get("identity")
        if known is None:
            return
        identity, pieces = json.loads(known)
        mine = identity_of(join)
        differences = [
            f"{key}: {mine.get(key, 'nothing')} here, {identity.get(key, 'nothing')} there"
            for key in sorted({*identity, *mine})
            if identity.get(key) != mine.get(key)
        ]
        if not differences and pieces != join.pieces:
            differences = ["the pieces into which the weights are cut"]
        if differences or len(join.anchors) != len(pieces):
            raise Refusal(
                409,
                "other_run",
                f"{join.name} does not train what the others do; {'; '.join(differences)}",
                "let model, adapter and `outer:` be the same on all clusters",
            )

    def settle(self, join: Join) -> tuple[int, bool]:
        """Write a cluster down that may join; its number, and whether it lived before."""
        first = self._book.get("identity") is None
        if first:
            if len(join.anchors) != len(join.pieces):
                raise Refusal(
                    422,
                    "malformed",
                    f"{len(join.anchors)} digests of anchors for {len(join.pieces)} fragments",
                )
            self._book.put("identity", json.dumps([identity_of(join), join.pieces]))
        for former in self._book.rows(
            "SELECT * FROM members WHERE name = ? AND id != ? AND state = 'dropped'",
            join.name,
            join.id,
        ):
            self._samples.give_back(former["number"])
            self._book.run("UPDATE members SET state = 'left' WHERE number = ?", former["number"])
            self._book.note(join.name, "replaced", "a new cluster has taken this name")
        row = self._book.row("SELECT * FROM members WHERE id = ?", join.id)
        if row is None:
            self._book.run(
                "INSERT INTO members (id, name, state) VALUES (?, ?, 'living')", join.id, join.name
            )
            number = self._book.number("SELECT number FROM members WHERE id = ?", join.id)
        else:
            number = int(row["number"])
            # Its claims are numbered from the start again.
            self._book.run(
                "UPDATE members SET state = 'living', name = ?, claim = 0, claimed = '[]' "
                "WHERE number = ?",
                join.name,
                number,
            )
        self._heard[number] = self._clock()
        self._moved.pop(number, None)
        return number, row is not None and row["state"] == "living"

    def hear(self, number: int, beat: Beat) -> None:
        """A sign of life."""
        now = self._clock()
        self._heard[number] = now
        self.beats[number] = beat
        if number not in self._moved or self._moved[number][0] != beat.step:
            self._moved[number] = (beat.step, now)

    @property
    def pace(self) -> int:
        """Inner steps in a round such that no living member's link is too slow for it."""
        return max((beat.pace for beat in self.beats.values()), default=0)

    def touch(self, number: int) -> None:
        """Something came from a member: as good as a beat."""
        self._heard[number] = self._clock()

    def silent(self) -> list[tuple[sqlite3.Row, float]]:
        """Living members that have not been heard for too long, and for how long."""
        return [
            (row, self.heard_s(row["number"]))
            for row in self.living()
            if self.heard_s(row["number"]) > self._settings.dead_after_s
        ]

    def drop(self, row: sqlite3.Row, why: str, state: str = "dropped") -> None:
        """A member is gone: nobody waits for it, and its samples are dealt to others."""
        with self._book.transaction():
            self._book.run("UPDATE members SET state = ? WHERE number = ?", state, row["number"])
            freed, _ = self._samples.give_back(row["number"])
            self._book.note(row["name"], state, f"{why}; {freed} samples go back")
        self.beats.pop(row["number"], None)

    def stalled(self, number: int) -> bool:
        """Whether a member lives, but has done no inner step for too long."""
        moved = self._moved.get(number)
        return moved is not None and self._clock() - moved[1] > self._settings.stalled_after_s

    def expected(self, turn: int) -> frozenset[int]:
        """Members that a turn waits for."""
        return frozenset(
            row["number"]
            for row in self.living()
            if not row["is_behind"] and row["from_turn"] <= turn and not self.stalled(row["number"])
        )

    def order(self, number: int, order: str, reason: str = "") -> None:
        """Have a member told something with its beats, until it joins again or has done it."""
        self._book.run(
            "UPDATE members SET orders = ?, order_reason = ? WHERE number = ?",
            order,
            reason,
            number,
        )

    def names(self, numbers: Sequence[int] | frozenset[int]) -> list[str]:
        """Names of members, in order."""
        return sorted(self.get(number)["name"] for number in numbers)


def identity_of(join: Join) -> dict[str, str]:
    """What must be equal on all clusters."""
    return {**join.identity, "codec": join.codec}
