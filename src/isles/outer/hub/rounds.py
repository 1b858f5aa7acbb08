"""Rounds: contributions to an outer step come in, a rule closes it, its average is committed."""

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
from isles.outer.hub.rules import Refusal, Settings, outliers
from isles.outer.hub.samples import Samples
from isles.outer.messages import SAMPLE_TOKENS, Contribution, OpenRound, RoundAnswer
from isles.outer.samples import Interval, without

_REFUSALS = 3
_NORMS, _LOOKED_AT = 32, 1000
_NUMBER = re.compile(r"[0-9]{1,9}")


class Rounds:
    """All rounds of a run, by outer step; one after the other is committed.

    The journal has a row for each round (table `rounds`), and one for each contribution that is
    complete or refused (table `parts`).
    """

    def __init__(
        self,
        db: Journal,
        settings: Settings,
        samples: Samples,
        membership: Membership,
        folder: Path,
        clock: Callable[[], float],
    ) -> None:
        self._db, self._settings, self._samples = db, settings, samples
        self._membership, self._folder, self._clock = membership, folder, clock
        self._fragments = 1
        self._sample_tokens = 0
        # When the first contribution came, and the one that made the quorum. After a restart both
        # times begin anew: one more time box at most.
        self._first: dict[int, float] = {}
        self._quorum: dict[int, float] = {}

    def learn(self, identity: Mapping[str, str], num_fragments: int) -> None:
        """Take what the first cluster has determined; see `Join.identity`."""
        self._fragments = num_fragments
        text = identity.get(SAMPLE_TOKENS, "")
        self._sample_tokens = int(text) if _NUMBER.fullmatch(text) else 0

    # What is known.

    @property
    def next(self) -> int:
        """The outer step that is committed next: so many have been."""
        start = int(self._db.get("start") or 0)
        last = self._db.row("SELECT MAX(round) AS t FROM rounds WHERE state = 'committed'")
        return start if last is None or last["t"] is None else int(last["t"]) + 1

    def _row(self, outer_step: int) -> sqlite3.Row | None:
        return self._db.row("SELECT * FROM rounds WHERE round = ?", outer_step)

    def state(self, outer_step: int) -> str:
        """committed, averaging, collecting or future."""
        if (row := self._row(outer_step)) is not None:
            return str(row["state"])
        return "committed" if outer_step < self.next else "future"

    def has_begun(self, outer_step: int) -> bool:
        """Whether anybody has contributed."""
        return bool(self._parts(outer_step))

    def outer_params(self, fragment: int, version: int) -> str:
        """The digest of a fragment's outer parameters after so many outer steps; empty: unknown."""
        row = self._db.row(
            "SELECT outer_params FROM rounds WHERE round < ? AND round % ? = ? "
            "AND state = 'committed' ORDER BY round DESC LIMIT 1",
            version,
            self._fragments,
            fragment,
        )
        if row is not None:
            return str(row["outer_params"])
        return str(json.loads(self._db.get("outer_params") or "[]")[fragment])

    def has_outer_params(self, outer_step: int) -> bool:
        row = self._row(outer_step)
        return row is not None and bool(row["outer_params"])

    def is_kept_since(self, version: int) -> bool:
        """Whether the averages are on the disk that lead from a version to now."""
        following = self.next
        sql = "SELECT COUNT(*) FROM rounds WHERE round >= ? AND round < ? AND kept = 1"
        return self._db.number(sql, version, following) == following - version

    def part_path(self, outer_step: int, number: int) -> Path:
        return self._folder / f"{outer_step:08d}" / f"{number}.part"

    def average_path(self, outer_step: int) -> Path:
        return self._folder / f"{outer_step:08d}" / "average"

    def _parts(self, outer_step: int) -> list[sqlite3.Row]:
        return self._db.rows("SELECT * FROM parts WHERE round = ?", outer_step)

    def is_counted(self, outer_step: int, number: int) -> bool:
        """Whether a member's contribution is complete."""
        return number in self._members(outer_step, "complete")

    def _members(self, outer_step: int, state: str) -> frozenset[int]:
        parts = self._parts(outer_step)
        return frozenset(part["member"] for part in parts if part["state"] == state)

    # Contributions.

    def check(self, member: sqlite3.Row, outer_step: int) -> None:
        """Whether a member may contribute now.

        Raises:
            Refusal: the outer step is past or far off, or the member must pull the state first.
        """
        following = self.next
        if member["is_behind"]:
            raise Refusal(
                409,
                "behind",
                f"{member['name']} must pull the state first: {member['order_reason']}",
            )
        if outer_step < following or self.state(outer_step) == "averaging":
            raise Refusal(
                409,
                "late",
                f"round {outer_step} is decided without {member['name']}; the next is round "
                f"{max(following, outer_step + 1)}",
                "apply its average and contribute to the next round; no step of yours is lost",
            )
        if outer_step >= following + self._settings.open_rounds:
            raise Refusal(
                409,
                "early",
                f"round {outer_step} is far off; the next is round {following}",
                "apply the averages of the rounds before it",
            )

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
            contribution: the member's own account of it.
            norm: its norm as measured here.
            failure: why it must not be averaged, if so.

        Raises:
            Refusal: the outer step is decided; or there is a failure.
        """
        number = member["number"]
        if self.is_counted(outer_step, number):
            return
        self.check(member, outer_step)
        reason = failure or ("" if math.isfinite(norm) else f"its norm is {norm}")
        with self._db.transaction():
            if self.state(outer_step) == "future":
                self._db.run(
                    "INSERT INTO rounds (round, state) VALUES (?, 'collecting')", outer_step
                )
            if reason:
                self._write(outer_step, number, contribution, norm=-1.0, reason=reason)
                self._refuse(member, outer_step, reason, reset=True)
            else:
                self._count(member, outer_step, contribution, norm)
        if reason:
            raise Refusal(
                422,
                "refused",
                f"the contribution of {member['name']} to round {outer_step} is refused: {reason}",
                "go back to the outer parameters; look for the step at which its loss became nan",
            )
        self._note_times(outer_step)

    def _count(self, member: sqlite3.Row, outer_step: int, part: Contribution, norm: float) -> None:
        number = member["number"]
        sql = "SELECT spans FROM parts WHERE member = ? AND state = 'complete' ORDER BY round DESC"
        rows = self._db.rows(f"{sql} LIMIT ?", number, _LOOKED_AT)
        new = without(self._samples.own(number, part.samples), _spans(rows))  # each counts once
        counted = sum(stop - start for start, stop in new)
        weight = self._weight(outer_step, number, part.tokens, counted)
        self._write(outer_step, number, part, norm=norm, samples=counted, tokens=weight)
        if weight < part.tokens:
            what = f"it claims {part.tokens} tokens; its samples have {weight} at most"
            self._db.note(member["name"], "weight", f"round {outer_step}: {what}")

    def _weight(self, outer_step: int, number: int, tokens: int, samples: int) -> int:
        # At most the tokens of the samples behind a contribution: those in it, and those in the
        # same member's contributions to other fragments since the last one to this fragment.
        if not self._sample_tokens:
            return tokens
        own = "member = ? AND state = 'complete' AND round < ?"
        last = self._db.row(
            f"SELECT MAX(round) AS round FROM parts WHERE {own} AND round % ? = ?",
            number,
            outer_step,
            self._fragments,
            outer_step % self._fragments,
        )
        since = -1 if last is None or last["round"] is None else last["round"]
        sql = f"SELECT SUM(samples) FROM parts WHERE {own} AND round > ?"
        earlier = self._db.number(sql, number, outer_step, since)
        return max(1, min(tokens, (earlier + samples) * self._sample_tokens))

    def _write(
        self,
        outer_step: int,
        number: int,
        part: Contribution,
        *,
        norm: float,
        reason: str = "",
        samples: int = 0,
        tokens: int = 0,
    ) -> None:
        self._db.run(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            outer_step,
            number,
            "refused" if reason else "complete",
            tokens or part.tokens,
            part.steps,
            norm,
            part.digest,
            reason,
            samples,
            json.dumps(list(part.samples)),
        )

    def _refuse(self, member: sqlite3.Row, outer_step: int, reason: str, *, reset: bool) -> None:
        what = f"round {outer_step}: {reason}"
        self._db.note(member["name"], "refused", what)
        self._db.run("UPDATE members SET refusal = ? WHERE number = ?", what, member["number"])
        if reset:
            why = f"the contribution to round {outer_step} was refused: {reason}"
            self._membership.command(member["number"], "reset", why)

    # The rule.

    def _note_times(self, outer_step: int) -> None:
        complete = len(self._members(outer_step, "complete"))
        if complete >= 1:
            self._first.setdefault(outer_step, self._clock())
        if complete >= self._settings.quorum:
            self._quorum.setdefault(outer_step, self._clock())

    def open_for_s(self, outer_step: int) -> float:
        """Seconds since the first contribution; after a restart, since then."""
        return self._clock() - self._first.get(outer_step, self._clock())

    def _due_in_s(self, outer_step: int) -> float | None:
        # Until it is closed without the missing; None: that is not decided by time, or not yet.
        self._note_times(outer_step)
        began, limit_s = None, 0.0
        match self._settings.wait:
            case "time_boxed":
                began, limit_s = self._first.get(outer_step), self._settings.time_box_s
            case "quorum":
                began, limit_s = self._quorum.get(outer_step), self._settings.grace_s
            case "all":
                pass
        return None if began is None else max(0.0, began + limit_s - self._clock())

    def _waits_for(self, outer_step: int) -> frozenset[int]:
        answered = frozenset(part["member"] for part in self._parts(outer_step))
        return self._membership.expected(outer_step) - answered

    def _is_time(self, outer_step: int) -> bool:
        # Also where all who are waited for were refused: the round then changes nothing.
        answered = len(self._parts(outer_step))
        if not answered or answered < self._membership.least:
            return False
        return not self._waits_for(outer_step) or self._due_in_s(outer_step) == 0.0

    def close(self) -> Job | None:
        """The next round to be averaged, if the rule closes it now or has closed it before.

        A round whose contributions were all refused has no parts: its average is empty, it changes
        nothing, and nobody waits for it.
        """
        outer_step = self.next
        state = self.state(outer_step)
        if state == "collecting":
            if not self._is_time(outer_step):
                return None
            with self._db.transaction():
                self._refuse_outliers(outer_step)
                taken = sorted(
                    self._members(outer_step, "complete"),
                    key=lambda n: (self._membership.get(n)["name"], n),
                )
                self._db.run(
                    "UPDATE rounds SET state = 'averaging', participants = ? WHERE round = ?",
                    json.dumps(taken),
                    outer_step,
                )
        elif state != "averaging":
            return None
        row = self._row(outer_step)
        assert row is not None
        tokens = {part["member"]: int(part["tokens"]) for part in self._parts(outer_step)}
        parts = [
            (self.part_path(outer_step, number), tokens[number])
            for number in json.loads(row["participants"])
        ]
        fragment, target = outer_step % self._fragments, self.average_path(outer_step)
        return Job(outer_step, fragment, parts, target)

    def _refuse_outliers(self, outer_step: int) -> None:
        history = self._db.rows(
            "SELECT norm, tokens FROM parts WHERE state = 'complete' AND round < ? "
            "AND round % ? = ? ORDER BY round DESC, member LIMIT ?",
            outer_step,
            self._fragments,
            outer_step % self._fragments,
            _NORMS,
        )
        usual = [(row["norm"], row["tokens"]) for row in history]
        complete = [part for part in self._parts(outer_step) if part["state"] == "complete"]
        norms = {part["member"]: (part["norm"], part["tokens"]) for part in complete}
        for number, reason in outliers(self._settings.outlier, usual, norms).items():
            member = self._membership.get(number)
            self._db.run(
                "UPDATE parts SET state = 'refused', reason = ? WHERE round = ? AND member = ?",
                reason,
                outer_step,
                number,
            )
            if member["state"] != "living":
                self._samples.give_back(number)
            self._db.run("UPDATE members SET refusals = refusals + 1 WHERE number = ?", number)
            self._refuse(member, outer_step, reason, reset=member["refusals"] + 1 >= _REFUSALS)

    def commit(self, outer_step: int, average: Average) -> None:
        """A round is decided, durably."""
        with self._db.transaction():
            row = self._row(outer_step)
            assert row is not None and row["state"] == "averaging", f"outer step {outer_step}"
            assert outer_step == self.next
            self._db.run(
                "UPDATE rounds SET state = 'committed', digest = ?, size = ?, kept = 1, "
                "committed_at = ?, seconds = ? WHERE round = ?",
                average.digest,
                average.size_bytes,
                time.time(),
                self.open_for_s(outer_step),
                outer_step,
            )
            for part in self._parts(outer_step):
                if part["state"] == "complete":
                    self._samples.average(part["member"], _spans([part]))
            for number in json.loads(row["participants"]):
                self._db.run("UPDATE members SET refusals = 0 WHERE number = ?", number)
        self._first.pop(outer_step, None)
        self._quorum.pop(outer_step, None)

    def take_over(self, answer: RoundAnswer, outer_params: str, numbers: Mapping[str, int]) -> None:
        """A round was decided by a hub that is gone; its average is on the disk."""
        self._db.run(
            "INSERT INTO rounds (round, state, participants, digest, size, kept, outer_params, "
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
            self._db.run(
                "INSERT INTO parts (round, member, state, tokens, steps, norm, digest, reason) "
                "VALUES (?, ?, ?, ?, 0, -1, '', ?)",
                answer.outer_step,
                number,
                "refused" if reason else "complete",
                answer.weights.get(name, 0),
                reason,
            )

    # Answers.

    def open_rounds(self) -> list[OpenRound]:
        """The rounds that collect."""
        rows = self._db.rows("SELECT round FROM rounds WHERE state = 'collecting' ORDER BY round")
        return [
            OpenRound(
                outer_step=row["round"],
                due_in_s=self._due_in_s(row["round"]),
                contributed=self._membership.names(self._members(row["round"], "complete")),
                waits_for=self._membership.names(self._waits_for(row["round"])),
            )
            for row in rows
        ]

    def answer(self, outer_step: int) -> RoundAnswer:
        row = self._row(outer_step)
        if row is None:
            is_past = outer_step < self.next
            return RoundAnswer(outer_step=outer_step, state="committed" if is_past else "future")
        is_committed, is_open = row["state"] == "committed", row["state"] == "collecting"
        parts = {self._name(part): part for part in self._parts(outer_step)}
        tokens = {n: p["tokens"] for n, p in sorted(parts.items()) if p["state"] == "complete"}
        return RoundAnswer(
            outer_step=outer_step,
            state=row["state"],
            due_in_s=self._due_in_s(outer_step) if is_open else None,
            contributed=list(tokens),
            waits_for=self._membership.names(self._waits_for(outer_step)) if is_open else [],
            weights=tokens if is_committed else {},
            refused={n: p["reason"] for n, p in parts.items() if p["state"] == "refused"},
            digest=row["digest"],
            size_bytes=row["size"],
            is_kept=bool(row["kept"]),
        )

    def _name(self, part: sqlite3.Row) -> str:
        return str(self._membership.get(part["member"])["name"])


def _spans(rows: Sequence[sqlite3.Row]) -> list[Interval]:
    return [(start, stop) for row in rows for start, stop in json.loads(row["spans"])]
