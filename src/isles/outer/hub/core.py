"""The hub without its network: every request is one method, one transaction."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isles.outer.hub.files import Average, Job
from isles.outer.hub.journal import JOURNAL, Journal
from isles.outer.hub.members import Membership
from isles.outer.hub.rounds import Rounds
from isles.outer.hub.rules import Refusal, Settings, divergence
from isles.outer.hub.samples import Samples
from isles.outer.hub.states import States
from isles.outer.messages import (
    PROTOCOL,
    Applied,
    Contribution,
    ContributionAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    LeaseAnswer,
    LeaseRequest,
    RoundAnswer,
    Standing,
    StateAnswer,
    StateOffer,
)

_MOST_PINNED = 16
_FIXED = {"layout", "codec", "adapter.type", "the frozen weights"}
"""What no run changes on its way. The rest may be changed while no cluster takes part."""

_FIX = "let these be the same on all clusters"


class Core:
    """All that the hub knows and decides. One thread at a time.

    Args:
        folder: its state directory.
        settings: the rules of the run.
        clock: seconds that only grow.
    """

    def __init__(self, folder: Path, settings: Settings, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.settings = settings
        self.journal = Journal(folder / JOURNAL)
        self.samples = Samples(self.journal)
        self.membership = Membership(self.journal, settings, self.samples, clock)
        self.rounds = Rounds(
            self.journal, settings, self.samples, self.membership, folder / "rounds", clock
        )
        self.states = States(self.journal, settings, self.membership, folder / "states", clock)
        self.codec = ""
        """How contributions are encoded."""
        self.pieces: list[list[int]] = []
        """Of each fragment its pieces; none as long as nobody has joined."""
        self.sizes: list[int] = []
        """Of each fragment the bytes of a contribution to it."""
        self._learn()
        self.journal.note("", "started", f"round {self.rounds.next} is next")
        self._oldest = self.rounds.next - settings.keep_averages
        self._sweep()

    def _learn(self) -> None:
        known = self.journal.get("identity")
        if known is not None:
            identity, self.pieces = json.loads(known)
            self.codec = identity["codec"]
            self.sizes = json.loads(self.journal.get("sizes") or "[]")
            self.rounds.learn(identity, len(self.pieces))

    def seed(self, kept: Sequence[tuple[RoundAnswer, str]]) -> None:
        """Begin where a hub that is gone has ended: with the averages that a cluster has kept.

        Args:
            kept: that hub's answers for each outer step, without a gap, and the digest of the
                outer parameters that its average has led to, where it is known.
        """
        with self.journal.transaction():
            for answer, outer_params in kept:
                numbers = {
                    name: self.membership.stand_in(name)
                    for name in (*answer.weights, *answer.refused)
                }
                self.rounds.take_over(answer, outer_params, numbers)

    # Joining.

    def join(self, join: Join, sizes: Sequence[int] = ()) -> JoinAnswer:
        """A cluster joins, or joins again.

        Args:
            join: what it says.
            sizes: of each fragment the bytes of a contribution; the first cluster's are kept.

        Raises:
            Refusal: it trains something else, its name is another's, or there are too many.
        """
        if join.protocol != PROTOCOL:
            raise Refusal(
                409,
                "protocol",
                f"{join.name} speaks version {join.protocol}, the hub version {PROTOCOL}",
                "install the same version of isles on both",
            )
        known = self.journal.get("identity")
        changes = {} if known is None else self._changes(join, known)
        self.membership.check(join)
        with self.journal.transaction():
            if known is None:
                self._begin_run(join, sizes)
            elif changes:
                self._change_settings(join, known, changes)
            if known is None:
                answer = self._let_in(join, "first", "")
            else:
                answer = self._let_in(join, *self._standing(join))
        self._learn()
        return answer

    def _let_in(self, join: Join, standing: Standing, why: str) -> JoinAnswer:
        journal, rounds = self.journal, self.rounds
        number, was_living = self.membership.admit(join)
        before = self.membership.get(number)
        self.membership.holds(number, join.has)
        lost = self.samples.take_up(number, join.holding)
        following = rounds.next
        is_behind = standing == "behind"
        from_step = before["from_round"]
        if not was_living or before["is_behind"]:
            from_step = following + int(rounds.has_begun(following))
        command = "pull" if is_behind else ""
        values = (int(is_behind), from_step, join.version, command, why, number)
        journal.run(
            "UPDATE members SET is_behind = ?, from_round = ?, version = ?, orders = ?, "
            "order_reason = ? WHERE number = ?",
            *values,
        )
        journal.note(join.name, "joined", f"{standing}, from round {from_step} on; {why}")
        return JoinAnswer(
            standing=standing,
            outer_step=following,
            from_step=from_step,
            settings=self.settings.model_dump(),
            lost=lost,
            why=why,
        )

    # What must be equal.

    def _changes(self, join: Join, known: str) -> dict[str, tuple[str, str]]:
        identity, pieces = json.loads(known)
        mine = identity_of(join)
        found = {
            key: (identity.get(key, "nothing"), mine.get(key, "nothing"))
            for key in sorted({*identity, *mine})
            if identity.get(key) != mine.get(key)
        }
        others = [row["name"] for row in self.membership.living() if row["id"] != join.id]
        refused = {key: both for key, both in found.items() if others or key in _FIXED}
        texts = [
            f"{key} is {here} in {join.name} and {there} in the run"
            for key, (there, here) in refused.items()
        ]
        if not texts and (pieces != join.pieces or len(join.outer_params) != len(pieces)):
            texts = ["the pieces into which the weights are cut differ"]
        if texts:
            raise Refusal(
                409,
                "other_run",
                f"{join.name} does not train what this run does: " + "; ".join(texts),
                _FIX,
            )
        return found

    def _begin_run(self, join: Join, sizes: Sequence[int]) -> None:
        if len(join.outer_params) != len(join.pieces):
            raise Refusal(
                422,
                "malformed",
                f"{len(join.outer_params)} digests for {len(join.pieces)} fragments",
            )
        self.journal.put("start", str(join.version))
        self.journal.put("outer_params", json.dumps(join.outer_params))
        self.journal.put("sizes", json.dumps(list(sizes)))
        self.journal.put("identity", json.dumps([identity_of(join), join.pieces]))

    def _change_settings(
        self, join: Join, known: str, changes: Mapping[str, tuple[str, str]]
    ) -> None:
        # Nobody else takes part: a run that goes on with other settings has these from now on.
        # Members that are away join anew when they come back, and are compared then.
        _, pieces = json.loads(known)
        self.journal.put("identity", json.dumps([identity_of(join), pieces]))
        texts = [f"{key} {there} -> {here}" for key, (there, here) in changes.items()]
        self.journal.note(join.name, "settings", ", ".join(texts))
        for row in self.membership.away():
            if row["id"] != join.id:
                self.membership.part(row, "it must join anew: the run's settings have changed")

    # Where it stands.

    def _standing(self, join: Join) -> tuple[Standing, str]:
        following = self.rounds.next
        if join.version > following:
            raise Refusal(
                409,
                "ahead",
                f"{join.name} has applied {join.version} rounds, and the hub knows of {following}",
                "it joins the wrong run, or the hub was set back to an old copy: start a "
                "hub with an empty folder, and let the most advanced cluster join first",
            )
        for fragment, outer_params in enumerate(join.outer_params):
            right = self.rounds.outer_params(fragment, join.version)
            if right and outer_params != right:
                return "behind", (
                    f"its outer parameters of fragment {fragment} after {join.version} rounds are "
                    "not those of the run"
                )
        if join.version == following:
            return "current", ""
        if self.rounds.is_kept_since(max(join.version, min(join.has, following))):
            return "late", ""
        return "behind", f"the average of round {join.version} is not kept any more"

    # Members.

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        member = self.membership.find(heartbeat.id)
        number = member["number"]
        self.membership.note_heartbeat(number, heartbeat)
        self.membership.reached(number, min(heartbeat.version, self.rounds.next))
        self.membership.holds(number, heartbeat.has)
        member = self._back(member) if member["state"] == "dropped" else self.membership.get(number)
        # Only here, where it has just said how far it is: what is known of it may be old, above all
        # to a hub that goes on from a copy, and all clusters would wait for one another.
        has = max(member["version"], min(heartbeat.has, self.rounds.next))
        if not member["is_behind"] and not self.rounds.is_kept_since(has):
            self._fell_behind(member)
            member = self.membership.get(number)
        return HeartbeatAnswer(
            outer_step=self.rounds.next,
            open=self.rounds.open_rounds(),
            members=[row["name"] for row in self.membership.living()],
            sync_every=self.membership.sync_every,
            command=member["orders"],
            command_reason=member["order_reason"],
            ended=self._end(number) if heartbeat.ends else None,
            send_state=self.states.is_source(number),
        )

    def _back(self, member: sqlite3.Row) -> sqlite3.Row:
        # It keeps its steps, and is waited for again.
        following = self.rounds.next
        with self.journal.transaction():
            self.journal.run(
                "UPDATE members SET state = 'living', from_round = ? WHERE number = ?",
                following + int(self.rounds.has_begun(following)),
                member["number"],
            )
            self.journal.note(member["name"], "back", f"heard again before round {following}")
        return self.membership.get(member["number"])

    def _end(self, number: int) -> int | None:
        following = self.rounds.next
        with self.journal.transaction():
            return self.membership.end(
                number, following, is_decided=not self.rounds.has_begun(following)
            )

    def _fell_behind(self, member: sqlite3.Row) -> None:
        with self.journal.transaction():
            self._command_pull(
                member, f"the average of round {member['version']} is not kept any more"
            )

    def _command_pull(self, member: sqlite3.Row, why: str) -> None:
        self.journal.run("UPDATE members SET is_behind = 1 WHERE number = ?", member["number"])
        self.membership.command(member["number"], "pull", why)
        self.journal.note(member["name"], "behind", why)

    def reset_done(self, member_id: str) -> None:
        member = self.membership.find(member_id)
        if member["orders"] == "reset":
            self.membership.command(member["number"], "")

    def leave(self, member_id: str, *, has_finished: bool = False) -> None:
        member = self.membership.find(member_id)
        with self.journal.transaction():
            if has_finished:
                self.membership.part(member, "it has finished")
            else:
                self.membership.pause(member)
            sql = "UPDATE members SET has_finished = ? WHERE number = ?"
            self.journal.run(sql, int(has_finished), member["number"])

    def is_over(self) -> bool:
        """Whether all clusters that have ever taken part have finished, and left."""
        members = self.membership.latest()
        return bool(members) and all(m["state"] == "left" and m["has_finished"] for m in members)

    def is_left_alone(self) -> bool:
        """Whether some clusters have finished, and of the others none is heard of."""
        members = self.membership.latest()
        is_any_done = any(m["has_finished"] for m in members)
        return is_any_done and all(m["state"] != "living" for m in members)

    def lease(self, lease: LeaseRequest) -> LeaseAnswer:
        member = self.caller(lease.id)
        return LeaseAnswer(
            samples=self.samples.lease(member["number"], lease.number, lease.samples)
        )

    def held(self, member_id: str, outer_step: int) -> bool:
        """A cluster has an average; whether all that live and are not behind have it."""
        member = self.caller(member_id)
        self.membership.holds(member["number"], outer_step + 1)
        return self.membership.all_hold(outer_step + 1)

    def caller(self, member_id: str) -> sqlite3.Row:
        """The member that asks; a request of any kind is a sign of life."""
        member = self.membership.find(member_id)
        self.membership.touch(member["number"])
        return self._back(member) if member["state"] == "dropped" else member

    # Outer steps.

    def check_part(self, member_id: str, outer_step: int) -> tuple[int, int, Path]:
        """Whether a chunk of a contribution may come.

        Returns:
            The member's number, the contribution's fragment, and its file.
        """
        member = self.caller(member_id)
        number = member["number"]
        if self.rounds.is_counted(outer_step, number):
            raise Refusal(
                409, "counted", f"the contribution to round {outer_step} is counted already"
            )
        self.rounds.check(member, outer_step)
        return number, outer_step % len(self.pieces), self.rounds.part_path(outer_step, number)

    def counted(self, member_id: str, outer_step: int) -> ContributionAnswer | None:
        number = self.caller(member_id)["number"]
        return ContributionAnswer() if self.rounds.is_counted(outer_step, number) else None

    def complete(
        self, outer_step: int, contribution: Contribution, norm: float, failure: str = ""
    ) -> ContributionAnswer:
        member = self.caller(contribution.id)
        self.rounds.complete(member, outer_step, contribution, norm, failure)
        return ContributionAnswer()

    def drop_silent(self) -> bool:
        """Drop whoever has not been heard for too long; whether anybody was."""
        silent = self.membership.silent()
        for row, silent_s in silent:
            self.membership.drop(row, f"not heard for {silent_s:.1f} s")
        for row, silent_s in self.membership.gone():
            self.membership.part(row, f"not heard for {silent_s:.0f} s")
        return bool(silent)

    def close_round(self) -> Job | None:
        """Close the next outer step if it is time; what is to be averaged then."""
        return self.rounds.close() if self.pieces else None

    def commit(self, outer_step: int, average: Average) -> None:
        self.rounds.commit(outer_step, average)
        self._collect_garbage()

    def answer(self, outer_step: int) -> RoundAnswer:
        return self.rounds.answer(outer_step)

    def applied(self, applied: Applied) -> None:
        """A cluster has applied an average; whoever has other weights than most pulls the state."""
        member = self.caller(applied.id)
        outer_step = applied.outer_step
        if self.rounds.state(outer_step) != "committed":
            raise Refusal(409, "early", f"round {outer_step} is not committed")
        with self.journal.transaction():
            self.journal.run(
                "INSERT OR REPLACE INTO applied VALUES (?, ?, ?)",
                outer_step,
                member["number"],
                applied.outer_params,
            )
            self.membership.reached(member["number"], outer_step + 1)
            if outer_step < self._oldest and self.rounds.has_outer_params(outer_step):
                return  # what the others have reported is forgotten, and what was right is known
            rows = self.journal.rows("SELECT * FROM applied WHERE round = ?", outer_step)
            right, wrong = divergence({row["member"]: row["outer_params"] for row in rows})
            self.journal.run(
                "UPDATE rounds SET outer_params = ? WHERE round = ?", right, outer_step
            )
            reason = f"its outer parameters after round {outer_step} are not those of most"
            for row in rows:
                other = self.membership.get(row["member"])
                is_commanded = other["order_reason"] == reason
                if row["member"] in wrong and not is_commanded:
                    self.journal.note(other["name"], "diverged", reason)
                    self._command_pull(other, reason)
                elif row["member"] not in wrong and is_commanded:
                    self.journal.run(
                        "UPDATE members SET is_behind = 0 WHERE number = ?", row["member"]
                    )
                    self.membership.command(row["member"], "")

    # State transfer.

    def want_state(self, member_id: str) -> StateAnswer:
        return self.states.want(self.caller(member_id)["number"], self.rounds.is_kept_since)

    def offer_state(self, offer: StateOffer) -> int:
        member = self.caller(offer.id)
        if member["is_behind"] or offer.version > self.rounds.next:
            raise Refusal(409, "behind", f"the state of {member['name']} is not the run's")
        for fragment, outer_params in enumerate(offer.outer_params):
            right = self.rounds.outer_params(fragment, offer.version)
            if right and outer_params != right:
                raise Refusal(
                    409, "diverged", f"the outer parameters of {member['name']} are not the run's"
                )
        if not self.rounds.is_kept_since(offer.version):
            raise Refusal(409, "late", f"the average of round {offer.version} is not kept any more")
        state = self.states.offer(member["number"], offer, self.pieces)
        self._sweep()
        return state

    # Housekeeping.

    def _collect_garbage(self) -> None:
        following = self.rounds.next
        oldest = following - self.settings.keep_averages
        pinned = self.states.oldest_version()
        if pinned is not None:
            # A cluster that pulls a state needs them; one that never ends must not fill the disk.
            least = following - _MOST_PINNED * self.settings.keep_averages
            oldest = min(oldest, max(pinned, least))
        self._oldest = oldest
        with self.journal.transaction():
            self.journal.run("UPDATE rounds SET kept = 0 WHERE round < ? AND kept = 1", oldest)
            self.journal.run("DELETE FROM applied WHERE round < ?", oldest)  # see `applied`
            self.states.forget_useless(self.rounds.is_kept_since)
        self._sweep()

    def _sweep(self) -> None:
        following = self.rounds.next
        for folder in (self.folder / "rounds").glob("[0-9]*"):
            outer_step = int(folder.name)
            if outer_step >= following:
                continue
            row = self.journal.row("SELECT kept FROM rounds WHERE round = ?", outer_step)
            if row is None or not (row["kept"] or outer_step >= self._oldest):
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for part in folder.glob("*.part*"):
                part.unlink(missing_ok=True)
        states = {str(row["number"]) for row in self.journal.rows("SELECT number FROM states")}
        for folder in (self.folder / "states").glob("[0-9]*"):
            if folder.name not in states:
                shutil.rmtree(folder, ignore_errors=True)


def identity_of(join: Join) -> dict[str, str]:
    return {**join.identity, "codec": join.codec}
