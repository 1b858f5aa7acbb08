"""The rendezvous without its network: every request is one method, one transaction."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from isles.outer.hub.averaging import Average, Job
from isles.outer.hub.book import BOOK, Book
from isles.outer.hub.entry import Entry
from isles.outer.hub.epochs import Epochs
from isles.outer.hub.membership import Membership
from isles.outer.hub.refusal import Refusal
from isles.outer.hub.rules import divergence
from isles.outer.hub.samples import Samples
from isles.outer.hub.settings import Settings
from isles.outer.hub.states import States
from isles.outer.hub.turns import Turns
from isles.outer.messages import (
    Applied,
    Beat,
    BeatAnswer,
    Claim,
    ClaimAnswer,
    Contribution,
    ContributionAnswer,
    Join,
    JoinAnswer,
    StateAnswer,
    StateOffer,
    TurnAnswer,
)

_MOST_PINNED = 16


class Core:
    """All that the rendezvous knows and decides. One thread at a time.

    Args:
        folder: its state directory.
        settings: the rules of the run.
        clock: seconds that only grow.
    """

    def __init__(self, folder: Path, settings: Settings, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.settings = settings
        self.book = Book(folder / BOOK)
        self.samples = Samples(self.book)
        self.membership = Membership(self.book, settings, self.samples, clock)
        self.turns = Turns(
            self.book, settings, self.samples, self.membership, folder / "turns", clock
        )
        self.epochs = Epochs(self.book, settings, self.membership, self.turns, clock)
        self.states = States(self.book, settings, self.membership, folder / "states", clock)
        self._entry = Entry(self.book, settings, self.membership, self.samples, self.turns)
        self.codec = ""
        """How contributions are encoded."""
        self.pieces: list[list[int]] = []
        """Of each fragment its pieces; none as long as nobody has joined."""
        self.sizes: list[int] = []
        """Of each fragment the bytes of a contribution to it."""
        self._learn()
        self.book.note("", "started", f"turn {self.turns.next} is next")
        self._tidy = self.turns.next
        self._oldest = self._tidy - settings.keep_averages
        self._sweep()

    def _learn(self) -> None:
        """What the first cluster has settled, kept at hand for other threads."""
        known = self.book.get("identity")
        if known is not None:
            identity, self.pieces = json.loads(known)
            self.codec = identity["codec"]
            self.sizes = json.loads(self.book.get("sizes") or "[]")
            self.turns.parts.learn(identity, self.pieces, self.sizes)

    # Members.

    def join(self, join: Join, sizes: Sequence[int] = ()) -> JoinAnswer:
        """A cluster joins, or joins again. See `Entry.join`."""
        answer = self._entry.join(join, sizes)
        self._learn()
        return answer

    def beat(self, beat: Beat) -> BeatAnswer:
        """A cluster lives."""
        member = self.membership.find(beat.id)
        number = member["number"]
        self.membership.hear(number, beat)
        self.membership.reached(number, min(beat.version, self.turns.next))
        member = self._back(member) if member["state"] == "dropped" else self.membership.get(number)
        # Only here, where it has just said how far it is: what is known of it may be old, above all
        # to a rendezvous that goes on from a copy, and all clusters would wait for one another.
        has = max(member["version"], min(beat.has, self.turns.next))
        if not member["is_behind"] and not self.turns.is_kept_since(has):
            self._fell_behind(member)
            member = self.membership.get(number)
        return BeatAnswer(
            turn=self.turns.next,
            open=[*self.turns.open_turns(), *self.epochs.open_turns()],
            members=[row["name"] for row in self.membership.living()],
            pace=self.membership.pace,
            order=member["orders"],
            order_reason=member["order_reason"],
            ended=self._end(number) if beat.ends else None,
            donate=self.states.is_donor(number),
            upload_average=self.epochs.average_asked_of(number),
        )

    def _back(self, member: sqlite3.Row) -> sqlite3.Row:
        """A dropped member is heard again: it keeps its steps, and is waited for again."""
        following = self.turns.next
        with self.book.transaction():
            self.book.run(
                "UPDATE members SET state = 'living', from_turn = ? WHERE number = ?",
                following + int(self.turns.has_begun(following)),
                member["number"],
            )
            self.book.note(member["name"], "back", f"heard again before turn {following}")
        return self.membership.get(member["number"])

    def _end(self, number: int) -> int | None:
        following = self.turns.next
        with self.book.transaction():
            return self.membership.end(
                number, following, is_settled=not self.turns.has_begun(following)
            )

    def _fell_behind(self, member: sqlite3.Row) -> None:
        with self.book.transaction():
            self._order_pull(
                member, f"the average of turn {member['version']} is not kept any more"
            )

    def _order_pull(self, member: sqlite3.Row, why: str) -> None:
        self.book.run("UPDATE members SET is_behind = 1 WHERE number = ?", member["number"])
        self.membership.order(member["number"], "pull", why)
        self.book.note(member["name"], "behind", why)

    def obeyed(self, member_id: str) -> None:
        """A cluster has gone back to its outer parameters, as it was told."""
        member = self.membership.find(member_id)
        if member["orders"] == "reset":
            self.membership.order(member["number"], "")

    def leave(self, member_id: str, *, has_finished: bool = False) -> None:
        """A cluster ends: nobody waits for it."""
        member = self.membership.find(member_id)
        why = "it has finished" if has_finished else "it pauses"
        with self.book.transaction():
            self.membership.part(member, why)
            sql = "UPDATE members SET has_finished = ? WHERE number = ?"
            self.book.run(sql, int(has_finished), member["number"])

    def is_over(self) -> bool:
        """Whether all clusters that have ever taken part have finished, and left."""
        members = self.membership.latest()
        return bool(members) and all(m["state"] == "left" and m["has_finished"] for m in members)

    def is_left_alone(self) -> bool:
        """Whether some clusters have finished, and of the others none is heard."""
        members = self.membership.latest()
        is_any_done = any(m["has_finished"] for m in members)
        return is_any_done and all(m["state"] != "living" for m in members)

    def claim(self, claim: Claim) -> ClaimAnswer:
        """A cluster needs samples."""
        member = self.heard(claim.id)
        return ClaimAnswer(
            samples=self.samples.claim(member["number"], claim.number, claim.samples)
        )

    def heard(self, member_id: str) -> sqlite3.Row:
        """Who asks; whatever it asks is a sign of life."""
        member = self.membership.find(member_id)
        self.membership.touch(member["number"])
        return self._back(member) if member["state"] == "dropped" else member

    # Turns.

    def check_part(self, member_id: str, turn: int) -> tuple[int, int, Path]:
        """Whether a chunk of a contribution may come.

        Returns:
            The member's number, the contribution's fragment, and its file.
        """
        member = self.heard(member_id)
        number = member["number"]
        if self.turns.is_counted(turn, number):
            raise Refusal(409, "counted", f"the contribution to turn {turn} is counted already")
        self.turns.check(member, turn)
        return number, turn % len(self.pieces), self.turns.part_path(turn, number)

    def counted(self, member_id: str, turn: int) -> ContributionAnswer | None:
        """What was said of a contribution that is complete already."""
        part = self.turns.parts.get(turn, self.heard(member_id)["number"])
        if part is None or part["state"] != "complete":
            return None
        return ContributionAnswer(repeated=part["repeated"])

    def complete(
        self, turn: int, contribution: Contribution, norm: float, fault: str = ""
    ) -> ContributionAnswer:
        """A contribution is whole, on the disk, and measured. See `Turns.complete`."""
        member = self.heard(contribution.id)
        return ContributionAnswer(
            repeated=self.turns.complete(member, turn, contribution, norm, fault)
        )

    def drop_silent(self) -> bool:
        """Drop whoever has not been heard for too long, and let the others form an epoch.

        Returns:
            Whether an epoch has ended or begun.
        """
        for row, silent_s in self.membership.silent():
            self.membership.drop(row, f"not heard for {silent_s:.1f} s")
        for row, silent_s in self.membership.gone():
            self.membership.part(row, f"not heard for {silent_s:.0f} s")
        has_ended = self.epochs.drop()
        if self.turns.next != self._tidy:  # an epoch has committed a turn
            self._collect_garbage()
        return (bool(self.pieces) and self.epochs.form()) or has_ended

    def close_turn(self) -> Job | None:
        """Close the next turn if it is time; what is to be averaged then."""
        return self.turns.close(len(self.pieces)) if self.pieces else None

    def commit(self, turn: int, average: Average) -> None:
        """The average of a turn is on the disk; an empty one changes nothing."""
        self.turns.commit(turn, average)
        self._collect_garbage()

    def answer(self, turn: int) -> TurnAnswer:
        """How a turn stands."""
        return self.turns.answer(turn)

    def applied(self, applied: Applied) -> None:
        """A cluster has applied an average; whoever has other weights than most pulls the state."""
        member = self.heard(applied.id)
        turn = applied.turn
        if self.turns.state(turn) != "committed":
            raise Refusal(409, "early", f"turn {turn} is not committed")
        with self.book.transaction():
            self.book.run(
                "INSERT OR REPLACE INTO applied VALUES (?, ?, ?)",
                turn,
                member["number"],
                applied.outer_params,
            )
            self.membership.reached(member["number"], turn + 1)
            if turn < self._oldest and self.turns.has_outer_params(turn):
                return  # what the others have reported is forgotten, and what was right is known
            rows = self.book.rows("SELECT * FROM applied WHERE turn = ?", turn)
            right, wrong = divergence({row["member"]: row["outer_params"] for row in rows})
            self.book.run("UPDATE turns SET outer_params = ? WHERE turn = ?", right, turn)
            reason = f"its outer parameters after turn {turn} are not those of most"
            for row in rows:
                other = self.membership.get(row["member"])
                is_told = other["order_reason"] == reason
                if row["member"] in wrong and not is_told:
                    self.book.note(other["name"], "diverged", reason)
                    self._order_pull(other, reason)
                elif row["member"] not in wrong and is_told:
                    self.book.run(
                        "UPDATE members SET is_behind = 0 WHERE number = ?", row["member"]
                    )
                    self.membership.order(row["member"], "")

    def average_expected(self, member_id: str, turn: int) -> tuple[Path, int, str]:
        """Whether a member may upload the average of a turn: to where, how large, which digest."""
        number = self.heard(member_id)["number"]
        row = self.book.row("SELECT * FROM turns WHERE turn = ? AND is_direct = 1", turn)
        if row is None or row["kept"] or number not in json.loads(row["participants"]):
            raise Refusal(409, "not_wanted", f"the average of turn {turn} is not wanted")
        path = self.turns.average_path(turn)
        return path.with_name("average.upload"), row["size"], row["digest"]

    # State transfer.

    def want_state(self, member_id: str) -> StateAnswer:
        """A cluster is behind."""
        return self.states.want(self.heard(member_id)["number"], self.turns.is_kept_since)

    def offer_state(self, offer: StateOffer) -> int:
        """A donor is about to upload; the state's number."""
        member = self.heard(offer.id)
        if member["is_behind"] or offer.version > self.turns.next:
            raise Refusal(409, "behind", f"the state of {member['name']} is not the run's")
        for fragment, outer_params in enumerate(offer.outer_params):
            right = self.turns.outer_params(fragment, offer.version)
            if right and outer_params != right:
                raise Refusal(
                    409, "diverged", f"the outer parameters of {member['name']} are not the run's"
                )
        if not self.turns.is_kept_since(offer.version):
            raise Refusal(409, "late", f"the average of turn {offer.version} is not kept any more")
        state = self.states.offer(member["number"], offer, self.pieces)
        self._sweep()
        return state

    # Housekeeping.

    def _collect_garbage(self) -> None:
        """Forget averages that nobody needs, and whoever is too far behind for those left."""
        self._tidy = following = self.turns.next
        oldest = following - self.settings.keep_averages
        pinned = self.states.oldest_version()
        if pinned is not None:
            # A cluster that pulls a state needs them; one that never ends must not fill the disk.
            least = following - _MOST_PINNED * self.settings.keep_averages
            oldest = min(oldest, max(pinned, least))
        self._oldest = oldest
        with self.book.transaction():
            self.book.run("UPDATE turns SET kept = 0 WHERE turn < ? AND kept = 1", oldest)
            self.book.run("DELETE FROM applied WHERE turn < ?", oldest)  # see `applied`
            self.states.forget_useless(self.turns.is_kept_since)
        self._sweep()

    def _sweep(self) -> None:
        """Remove the files of what the book knows to be over."""
        following = self.turns.next
        for folder in (self.folder / "turns").glob("[0-9]*"):
            turn = int(folder.name)
            if turn >= following:
                continue
            row = self.book.row("SELECT kept FROM turns WHERE turn = ?", turn)
            if row is None or not (row["kept"] or turn >= self._oldest):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for part in folder.glob("*.part*"):
                part.unlink(missing_ok=True)
        states = {str(row["number"]) for row in self.book.rows("SELECT number FROM states")}
        for folder in (self.folder / "states").glob("[0-9]*"):
            if folder.name not in states:
                shutil.rmtree(folder, ignore_errors=True)
