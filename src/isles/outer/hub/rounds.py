"""The contributions to turns: which are there, which were refused, and how much each may weigh."""

from __future__ import annotations

import json
import math
import re
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from isles.outer.hub.files import Average, Job
from isles.outer.hub.journal import Journal
from isles.outer.hub.members import Membership
from isles.outer.hub.rules import Decision, Refusal, RoundView, Settings, judge_round, outliers
from isles.outer.hub.samples import Samples
from isles.outer.messages import SAMPLE_TOKENS, Contribution, OpenRound, RoundAnswer
from isles.outer.samples import without

_NORMS, _LOOKED_AT = 32, 1000
_NUMBER = re.compile(r"[0-9]{1,9}")


class Parts:
    """One row for each contribution that is complete or refused."""

    def __init__(self, db: Journal, settings: Settings, samples: Samples) -> None:
        self._db = db
        self._settings = settings
        self._samples = samples
        self._pieces: Sequence[Sequence[int]] = []
        self._sample_tokens = 0

    def learn(self, identity: Mapping[str, str], pieces: Sequence[Sequence[int]]) -> None:
        """What the first cluster has settled.

        Args:
            identity: see `Join`.
            pieces: of each fragment its pieces.
        """
        self._pieces = pieces
        text = identity.get(SAMPLE_TOKENS, "")
        self._sample_tokens = int(text) if _NUMBER.fullmatch(text) else 0

    def get(self, outer_step: int, number: int) -> sqlite3.Row | None:
        return self._db.row("SELECT * FROM parts WHERE turn = ? AND member = ?", outer_step, number)

    def of_turn(self, outer_step: int) -> list[sqlite3.Row]:
        return self._db.rows("SELECT * FROM parts WHERE turn = ?", outer_step)

    def members(self, outer_step: int, state: str) -> frozenset[int]:
        """Whose contribution to a turn is complete, or refused."""
        rows = self._db.rows(
            "SELECT member FROM parts WHERE turn = ? AND state = ?", outer_step, state
        )
        return frozenset(row["member"] for row in rows)

    def refuse(
        self, outer_step: int, number: int, part: Contribution, reason: str, norm: float = -1.0
    ) -> None:
        self._write(outer_step, number, part, state="refused", norm=norm, reason=reason)

    def refuse_complete(self, outer_step: int, number: int, reason: str) -> None:
        self._db.run(
            "UPDATE parts SET state = 'refused', reason = ? WHERE turn = ? AND member = ?",
            reason,
            outer_step,
            number,
        )

    def take(self, outer_step: int, number: int, part: Contribution, norm: float) -> int:
        """A contribution counts; its weight."""
        sql = "SELECT spans FROM parts WHERE member = ? AND state = 'complete' ORDER BY turn DESC"
        rows = self._db.rows(f"{sql} LIMIT ?", number, _LOOKED_AT)
        earlier = [(start, stop) for row in rows for start, stop in json.loads(row["spans"])]
        new = without(self._samples.own(number, part.samples), earlier)  # each counts once
        counted = sum(stop - start for start, stop in new)
        weight = self._weight(outer_step, number, part.tokens, counted)
        self._write(
            outer_step, number, part, state="complete", norm=norm, samples=counted, tokens=weight
        )
        return weight

    def commit(self, outer_step: int) -> None:
        """What was learnt of the contributions' samples is in an average."""
        for row in self.of_turn(outer_step):
            if row["state"] == "complete":
                spans = [(start, stop) for start, stop in json.loads(row["spans"])]
                self._samples.average(row["member"], spans)

    def take_over(self, outer_step: int, number: int, tokens: int, reason: str) -> None:
        """A contribution to a turn that a hub which is gone has decided."""
        self._db.run(
            "INSERT INTO parts (turn, member, state, tokens, steps, norm, digest, reason) "
            "VALUES (?, ?, ?, ?, 0, -1, '', ?)",
            outer_step,
            number,
            "refused" if reason else "complete",
            tokens,
            reason,
        )

    def _write(
        self,
        outer_step: int,
        number: int,
        part: Contribution,
        *,
        state: str,
        norm: float,
        reason: str = "",
        samples: int = 0,
        tokens: int = 0,
    ) -> None:
        self._db.run(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            outer_step,
            number,
            state,
            tokens or part.tokens,
            part.steps,
            norm,
            part.digest,
            reason,
            samples,
            json.dumps(list(part.samples)),
        )

    def _weight(self, outer_step: int, number: int, tokens: int, samples: int) -> int:
        # At most the tokens of the samples behind a contribution: those in it, and those in the
        # same member's contributions to other fragments since the last one to this fragment.
        if not self._sample_tokens:
            return tokens
        fragments = len(self._pieces)
        last = self._db.row(
            "SELECT MAX(turn) AS turn FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn < ? AND turn % ? = ?",
            number,
            outer_step,
            fragments,
            outer_step % fragments,
        )
        since = -1 if last is None or last["turn"] is None else last["turn"]
        earlier = self._db.number(
            "SELECT SUM(samples) FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn > ? AND turn < ?",
            number,
            since,
            outer_step,
        )
        return max(1, min(tokens, (earlier + samples) * self._sample_tokens))

    def outliers(self, outer_step: int, norms: Mapping[int, tuple[float, int]]) -> dict[int, str]:
        """Members whose norm (and tokens) is far above what was usual, and by how much."""
        fragments = len(self._pieces)
        history = self._db.rows(
            "SELECT norm, tokens FROM parts WHERE state = 'complete' AND turn < ? "
            "AND turn % ? = ? ORDER BY turn DESC, member LIMIT ?",
            outer_step,
            fragments,
            outer_step % fragments,
            _NORMS,
        )
        usual = [(row["norm"], row["tokens"]) for row in history]
        return outliers(self._settings.outlier, usual, norms)

    def norms(self, outer_step: int) -> dict[int, tuple[float, int]]:
        return {
            row["member"]: (row["norm"], row["tokens"])
            for row in self.of_turn(outer_step)
            if row["state"] == "complete"
        }


_REFUSALS = 3


class Rounds:
    """All turns of a run; one after the other is committed."""

    def __init__(
        self,
        db: Journal,
        settings: Settings,
        samples: Samples,
        membership: Membership,
        folder: Path,
        clock: Callable[[], float],
    ) -> None:
        self._db = db
        self._settings = settings
        self._samples = samples
        self._membership = membership
        self._folder = folder
        self._clock = clock
        self.parts = Parts(db, settings, samples)
        # When a turn's first contribution came, and the one that made the quorum. After a restart
        # both times begin anew: one more time box at most.
        self._first: dict[int, float] = {}
        self._quorum: dict[int, float] = {}

    @property
    def next(self) -> int:
        """The turn that is committed next: so many have been."""
        start = int(self._db.get("start") or 0)
        last = self._db.row("SELECT MAX(turn) AS t FROM turns WHERE state = 'committed'")
        return start if last is None or last["t"] is None else int(last["t"]) + 1

    def state(self, outer_step: int) -> str:
        """committed, averaging, collecting or future."""
        row = self._db.row("SELECT state FROM turns WHERE turn = ?", outer_step)
        if row is not None:
            return str(row["state"])
        return "committed" if outer_step < self.next else "future"

    def has_begun(self, outer_step: int) -> bool:
        return bool(self._db.number("SELECT COUNT(*) FROM parts WHERE turn = ?", outer_step))

    def outer_params(self, fragment: int, version: int) -> str:
        """The digest of a fragment's outer parameters after so many turns; empty: not known."""
        fragments = len(json.loads(self._db.get("identity") or "[{}, []]")[1])
        row = self._db.row(
            "SELECT outer_params FROM turns WHERE turn < ? AND turn % ? = ? "
            "AND state = 'committed' ORDER BY turn DESC LIMIT 1",
            version,
            fragments,
            fragment,
        )
        if row is not None:
            return str(row["outer_params"])
        return str(json.loads(self._db.get("outer_params") or "[]")[fragment])

    def is_kept_since(self, version: int) -> bool:
        """Whether the averages of all turns since so many were applied are on the disk."""
        following = self.next
        sql = "SELECT COUNT(*) FROM turns WHERE turn >= ? AND turn < ? AND kept = 1"
        kept = self._db.number(sql, version, following)
        return kept == following - version

    def part_path(self, outer_step: int, number: int) -> Path:
        return self._folder / f"{outer_step:08d}" / f"{number}.part"

    def has_outer_params(self, outer_step: int) -> bool:
        row = self._db.row("SELECT outer_params FROM turns WHERE turn = ?", outer_step)
        return row is not None and bool(row["outer_params"])

    def average_path(self, outer_step: int) -> Path:
        return self._folder / f"{outer_step:08d}" / "average"

    def check(self, member: sqlite3.Row, outer_step: int) -> None:
        """Whether a member may contribute to a turn now.

        Raises:
            Refusal: the turn is past or far off, or the member must pull the state first.
        """
        if member["is_behind"]:
            raise Refusal(
                409,
                "behind",
                f"{member['name']} must pull the state first: {member['order_reason']}",
            )
        following = self.next
        if outer_step < following or self.state(outer_step) == "averaging":
            raise Refusal(
                409,
                "late",
                f"turn {outer_step} is decided without {member['name']}; the next is turn "
                f"{max(following, outer_step + 1)}",
                "apply its average and contribute to the next turn; no step of yours is lost",
            )
        if outer_step >= following + self._settings.open_rounds:
            raise Refusal(
                409,
                "early",
                f"turn {outer_step} is far off; the next is turn {following}",
                "apply the averages of the turns before it",
            )

    def open(self, outer_step: int) -> None:
        if self.state(outer_step) == "future":
            self._db.run("INSERT INTO turns (turn, state) VALUES (?, 'collecting')", outer_step)

    def is_counted(self, outer_step: int, number: int) -> bool:
        part = self.parts.get(outer_step, number)
        return part is not None and part["state"] == "complete"

    def complete(
        self,
        member: sqlite3.Row,
        outer_step: int,
        contribution: Contribution,
        norm: float,
        failure: str,
    ) -> None:
        """A contribution is whole and on the disk.

        Args:
            member: whose it is.
            outer_step: to which turn.
            contribution: what the member says of it.
            norm: its norm as measured here.
            failure: why it must not be averaged, if so.

        Raises:
            Refusal: the turn is decided; or there is a fault.
        """
        number = member["number"]
        known = self.parts.get(outer_step, number)
        if known is not None and known["state"] == "complete":
            return
        self.check(member, outer_step)
        reason = failure or ("" if math.isfinite(norm) else f"its norm is {norm}")
        with self._db.transaction():
            self.open(outer_step)
            if reason:
                self.parts.refuse(outer_step, number, contribution, reason)
                self._refuse(member, outer_step, reason, reset=True)
            else:
                weight = self.parts.take(outer_step, number, contribution, norm)
                if weight < contribution.tokens:
                    leases = f"it claims {contribution.tokens} tokens"
                    what = f"turn {outer_step}: {leases}; its samples have {weight} at most"
                    self._db.note(member["name"], "weight", what)
        if reason:
            raise Refusal(
                422,
                "refused",
                f"the contribution of {member['name']} to turn {outer_step} is refused: {reason}",
                "go back to the outer parameters; look for the step at which its loss became nan",
            )
        self._note_times(outer_step)

    def _refuse(self, member: sqlite3.Row, outer_step: int, reason: str, *, reset: bool) -> None:
        what = f"turn {outer_step}: {reason}"
        self._db.note(member["name"], "refused", what)
        self._db.run("UPDATE members SET refusal = ? WHERE number = ?", what, member["number"])
        if reset:
            why = f"the contribution to turn {outer_step} was refused: {reason}"
            self._membership.command(member["number"], "reset", why)

    def _note_times(self, outer_step: int) -> None:
        now = self._clock()
        complete = len(self.parts.members(outer_step, "complete"))
        if complete >= 1:
            self._first.setdefault(outer_step, now)
        if complete >= self._settings.quorum:
            self._quorum.setdefault(outer_step, now)

    def decision(self, outer_step: int) -> Decision:
        self._note_times(outer_step)
        view = RoundView(
            expected=self._membership.expected(outer_step),
            complete=self.parts.members(outer_step, "complete"),
            refused=self.parts.members(outer_step, "refused"),
            first_at=self._first.get(outer_step),
            quorum_at=self._quorum.get(outer_step),
            least=self._membership.least,
        )
        return judge_round(self._settings, view, self._clock())

    def close(self, fragments: int) -> Job | None:
        """The next turn to be averaged, if the rule closes it now or has closed it before.

        A turn whose contributions were all refused has no parts: its average is empty, it changes
        nothing, and nobody waits for it.
        """
        outer_step = self.next
        state = self.state(outer_step)
        if state == "collecting":
            if not self.decision(outer_step).is_closed:
                return None
            with self._db.transaction():
                self._refuse_outliers(outer_step)
                taken = sorted(
                    self.parts.members(outer_step, "complete"),
                    key=lambda n: (self._membership.get(n)["name"], n),
                )
                self._db.run(
                    "UPDATE turns SET state = 'averaging', participants = ? WHERE turn = ?",
                    json.dumps(taken),
                    outer_step,
                )
        elif state != "averaging":
            return None
        return self._job(outer_step, fragments)

    def _job(self, outer_step: int, fragments: int) -> Job:
        row = self._db.row("SELECT * FROM turns WHERE turn = ?", outer_step)
        assert row is not None
        parts = []
        for number in json.loads(row["participants"]):
            part = self.parts.get(outer_step, number)
            assert part is not None
            parts.append((self.part_path(outer_step, number), int(part["tokens"])))
        return Job(outer_step, outer_step % fragments, parts, self.average_path(outer_step))

    def _refuse_outliers(self, outer_step: int) -> None:
        for number, reason in self.parts.outliers(outer_step, self.parts.norms(outer_step)).items():
            member = self._membership.get(number)
            self.parts.refuse_complete(outer_step, number, reason)
            if member["state"] != "living":
                self._samples.give_back(number)
            self._db.run("UPDATE members SET refusals = refusals + 1 WHERE number = ?", number)
            self._refuse(member, outer_step, reason, reset=member["refusals"] + 1 >= _REFUSALS)

    def commit(self, outer_step: int, average: Average) -> None:
        """A turn is decided, durably."""
        with self._db.transaction():
            row = self._db.row("SELECT * FROM turns WHERE turn = ?", outer_step)
            assert row is not None and row["state"] == "averaging", f"turn {outer_step}"
            assert outer_step == self.next
            self._db.run(
                "UPDATE turns SET state = 'committed', digest = ?, size = ?, kept = 1, "
                "committed_at = ?, seconds = ? WHERE turn = ?",
                average.digest,
                average.size_bytes,
                time.time(),
                self.open_for_s(outer_step),
                outer_step,
            )
            self.parts.commit(outer_step)
            for number in json.loads(row["participants"]):
                self._db.run("UPDATE members SET refusals = 0 WHERE number = ?", number)
        self._first.pop(outer_step, None)
        self._quorum.pop(outer_step, None)

    def take_over(self, answer: RoundAnswer, outer_params: str, numbers: Mapping[str, int]) -> None:
        """A turn was decided by a hub that is gone; its average is on the disk."""
        self._db.run(
            "INSERT INTO turns (turn, state, participants, digest, size, kept, outer_params, "
            "committed_at) VALUES (?, 'committed', ?, ?, ?, 1, ?, ?)",
            answer.outer_step,
            json.dumps(sorted(numbers[name] for name in answer.weights)),
            answer.digest,
            answer.size_bytes,
            outer_params,
            time.time(),
        )
        for name, number in numbers.items():
            reason = answer.refused.get(name, "")
            self.parts.take_over(answer.outer_step, number, answer.weights.get(name, 0), reason)

    def open_for_s(self, outer_step: int) -> float:
        """Seconds since a turn's first contribution; after a restart, since then."""
        return self._clock() - self._first.get(outer_step, self._clock())

    def open_rounds(self) -> list[OpenRound]:
        rows = self._db.rows("SELECT turn FROM turns WHERE state = 'collecting' ORDER BY turn")
        found = []
        for row in rows:
            decision = self.decision(row["turn"])
            due = None if decision.due_at is None else max(0.0, decision.due_at - self._clock())
            found.append(
                OpenRound(
                    outer_step=row["turn"],
                    due_in_s=due,
                    contributed=self._membership.names(self.parts.members(row["turn"], "complete")),
                    waits_for=self._membership.names(decision.waits_for),
                )
            )
        return found

    def answer(self, outer_step: int) -> RoundAnswer:
        row = self._db.row("SELECT * FROM turns WHERE turn = ?", outer_step)
        if row is None:
            return RoundAnswer(
                outer_step=outer_step, state="committed" if outer_step < self.next else "future"
            )
        named = {
            self._membership.get(part["member"])["name"]: part
            for part in self.parts.of_turn(outer_step)
        }
        due_in_s, waits_for = None, frozenset[int]()
        if row["state"] == "collecting":
            decision = self.decision(outer_step)
            waits_for = decision.waits_for
            if decision.due_at is not None:
                due_in_s = max(0.0, decision.due_at - self._clock())
        complete = {name: part for name, part in named.items() if part["state"] == "complete"}
        is_committed = row["state"] == "committed"
        return RoundAnswer(
            outer_step=outer_step,
            state=row["state"],
            due_in_s=due_in_s,
            contributed=sorted(complete),
            waits_for=self._membership.names(waits_for),
            weights={n: p["tokens"] for n, p in sorted(complete.items())} if is_committed else {},
            refused={n: p["reason"] for n, p in named.items() if p["state"] == "refused"},
            digest=row["digest"],
            size_bytes=row["size"],
            is_kept=bool(row["kept"]),
        )
