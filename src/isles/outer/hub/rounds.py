"""Rounds: contributions to an outer step arrive, a rule closes it, its average is committed."""

from __future__ import annotations

import json
import math
import sqlite3
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from isles.outer.hub.files import AveragingJob
from isles.outer.hub.members import Membership
from isles.outer.hub.rules import Refusal, counted_tokens, heavy, of_members, outliers, tempered
from isles.outer.hub.samples import valid
from isles.outer.hub.times import Times
from isles.outer.messages import Contribution, Join, RoundAnswer
from isles.outer.samples import RESERVE, reserve_of

_REFUSALS = 3
_NORMS, _ROUNDS = 32, 20
"""Number of contributions to compare norms and tokens with; number of stored decided rounds."""
_NORMS_EACH = 8
"""Maximum of these contributions per member."""
_TELLS = 0.99  # if a larger fraction of the claimed tokens counts, there is no event


class Rounds:
    """All rounds of a run, by outer step; they are committed in order.

    The journal has a row for each round (table `rounds`), and one for each contribution that is
    complete or refused (table `parts`).
    """

    def __init__(self, membership: Membership, folder: Path) -> None:
        self._membership, self._folder = membership, folder
        self._db, self._clock = membership.db, membership.clock
        self._settings, self._samples = membership.settings, membership.samples
        self._began = self._clock()
        self._came: dict[tuple[int, int], float] = {}
        self._read: tuple[str | None, Join | None] = None, None
        self._turn = self.next, self._began
        self._times = Times(self._settings)

    @property
    def first(self) -> Join | None:
        """The first cluster's join request: it determines the run."""
        text = self._db.get("first")  # not cached: a full disk may have undone `begin`
        if text != self._read[0]:
            self._read = text, None if text is None else Join.model_validate_json(text)
        return self._read[1]

    def begin(self, join: Join) -> None:
        """Start the run of the first cluster; or of the only cluster, with other settings."""
        if self._db.get("kept_since") is None:
            self._db.put("kept_since", str(join.version))
        self._db.put("first", join.model_dump_json(exclude={"holding"}))

    # Queries.

    @property
    def fragments(self) -> int:
        return 1 if self.first is None else len(self.first.pieces)

    @property
    def next(self) -> int:
        """The next outer step to be committed, which is the number of committed ones."""
        last = self._db.row("SELECT MAX(round) AS t FROM rounds WHERE state = 'committed'")
        if last is not None and last["t"] is not None:
            return int(last["t"]) + 1
        return 0 if self.first is None else self.first.version

    @property
    def first_known(self) -> int:
        """The first outer step that this hub knows."""
        return self._db.number("SELECT MIN(round) FROM rounds")

    @property
    def kept_since(self) -> int:
        """First outer step whose average is on the disk, with all later ones."""
        return int(self._db.get("kept_since") or 0)

    def _row(self, outer_step: int) -> sqlite3.Row | None:
        return self._db.row("SELECT * FROM rounds WHERE round = ?", outer_step)

    def state(self, outer_step: int) -> str:
        """committed, averaging, collecting or future."""
        if (row := self._row(outer_step)) is not None:
            return str(row["state"])
        return "committed" if outer_step < self.next else "future"

    def has_begun(self, outer_step: int) -> bool:
        """True if any cluster has contributed."""
        return bool(self._parts(outer_step))

    def part_path(self, outer_step: int, number: int) -> Path:
        return self._folder / f"{outer_step:08d}" / f"{number}.part"

    def average_path(self, outer_step: int) -> Path:
        return self._folder / f"{outer_step:08d}" / "average"

    def _parts(self, outer_step: int) -> list[sqlite3.Row]:
        return self._db.rows(
            "SELECT parts.*, members.name FROM parts JOIN members ON member = number "
            "WHERE round = ? ORDER BY name, number",
            outer_step,
        )

    def _complete_parts(self, outer_step: int) -> list[sqlite3.Row]:
        return [part for part in self._parts(outer_step) if not part["reason"]]

    def needed_parts(self, outer_step: int) -> set[Path]:
        """The files of contributions that are counted, or may still arrive."""
        numbers = {row["number"] for row in self._membership.not_gone()}
        numbers |= {part["member"] for part in self._complete_parts(outer_step)}
        return {self.part_path(outer_step, number) for number in numbers}

    def is_counted(self, outer_step: int, number: int) -> bool:
        """True if a member's contribution is complete."""
        return number in [part["member"] for part in self._complete_parts(outer_step)]

    # Contributions.

    def check(self, member: sqlite3.Row, outer_step: int) -> None:
        """Check whether a member may contribute now.

        Raises:
            Refusal: the outer step is past or too far ahead, or the member must pull the state
                first.
        """
        following = self.next
        if member["is_behind"]:
            raise Refusal(
                "behind", f"{member['name']} must pull the state first: {member['command_reason']}"
            )
        if outer_step < following or self.state(outer_step) == "averaging":
            raise Refusal(
                "late",
                f"round {outer_step} is decided without {member['name']}; the next is round "
                f"{max(following, outer_step + 1)}",
                "apply its average and contribute to the next round; no step of this cluster is "
                "lost",
            )
        if outer_step >= following + self._settings.open_rounds:
            raise Refusal(
                "early",
                f"round {outer_step} is too far ahead; the next is round {following}",
                "apply the averages of the earlier rounds first",
            )

    def make_room(self, member: sqlite3.Row, outer_step: int) -> None:
        """Make room for the contribution of a member among refused contributions.

        Refused contributions of members that are gone are forgotten if there are too many. Counted
        ones stay: their members hold their names and places until the round is decided.
        """
        parts = self._parts(outer_step)
        others = [part for part in parts if part["member"] != member["number"] and part["reason"]]
        known = {row["number"] for row in self._membership.not_gone()}
        gone = sorted(part["member"] for part in others if part["member"] not in known)
        too_many = max(0, len(others) + 1 - self._settings.max_clusters)
        same = [part["member"] for part in others if part["name"] == member["name"]]
        for number in dict.fromkeys([*same, *gone[:too_many]]):
            sql = "DELETE FROM parts WHERE round = ? AND member = ?"
            self._db.run(sql, outer_step, number)

    def complete(
        self,
        member: sqlite3.Row,
        outer_step: int,
        contribution: Contribution,
        norm: float,
        failure: str,
    ) -> None:
        """Record a contribution that is complete and on the disk.

        Args:
            contribution: the member's own description of it.
            norm: its norm as measured here.
            failure: why it must not be averaged, if so.

        Raises:
            Refusal: the outer step is decided; or there is a failure.
        """
        number = member["number"]
        if self.is_counted(outer_step, number):
            return
        self.check(member, outer_step)
        self.make_room(member, outer_step)
        reason = failure or ("" if math.isfinite(norm) else f"its norm is {norm}")
        new = "INSERT OR IGNORE INTO rounds (round, state) VALUES (?, 'collecting')"
        self._db.run(new, outer_step)
        self._db.run(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?)",
            outer_step,
            number,
            contribution.tokens,
            -1.0 if reason else norm,
            json.dumps(contribution.samples),
            reason,
        )
        if reason:
            self._refuse(member, outer_step, reason, resets=True)
            raise Refusal(
                "refused",
                f"the contribution of {member['name']} to round {outer_step} is refused: {reason}",
                "go back to the outer parameters, and find the step where its loss became nan",
            )
        self._came[outer_step, number] = self._clock()

    def _refuse(self, member: sqlite3.Row, outer_step: int, reason: str, *, resets: bool) -> None:
        what = f"round {outer_step}: {reason}"
        self._db.note(member["name"], "refused", what)
        self._db.run("UPDATE members SET refusal = ? WHERE number = ?", what, member["number"])
        if resets:
            why = f"the contribution to round {outer_step} was refused: {reason}"
            self._membership.command(member["number"], "reset", why)

    # The rule.

    def _came_at(self, outer_step: int) -> list[float]:
        # After a restart they count as arrived then, which adds at most one time box.
        parts = self._complete_parts(outer_step)
        return sorted(self._came.get((outer_step, part["member"]), self._began) for part in parts)

    def open_for_s(self, outer_step: int) -> float:
        """Seconds since the first contribution; after a restart, since then."""
        return self._clock() - min(self._came_at(outer_step), default=self._clock())

    @property
    def _turn_began(self) -> float:
        # Start of the next round: contributions sent ahead do not start a time box.
        if self._turn[0] != self.next:
            self._turn = self.next, self._clock()
        return self._turn[1]

    def _fair_s(self, outer_step: int) -> float:
        # A cluster that contributes immediately must not shorten the training of others: the time
        # box starts when half of the missing clusters usually contribute, except with a majority.
        missing = self._waits_for(outer_step)
        if len(missing) < len(self._complete_parts(outer_step)):
            return 0.0
        needed_s = [self._times.usual_s(name) for name in missing]
        return statistics.median_high(needed_s) if needed_s else 0.0

    def _due_in_s(self, outer_step: int) -> float | None:
        # Seconds until it closes without the missing; None: not decided by time, or not yet.
        if outer_step != self.next:
            return None
        match self._settings.wait:
            case "all":
                return None
            case "time_boxed":
                enough, limit_s = 1, self._settings.time_box_s
            case "quorum":
                enough, limit_s = self._settings.quorum, self._settings.grace_s
        came_at = self._came_at(outer_step)
        if len(came_at) < enough:
            return None
        begins = max(came_at[enough - 1], self._turn_began + self._fair_s(outer_step))
        return max(0.0, begins + limit_s - self._clock())

    def _waits_for(self, outer_step: int) -> list[str]:
        answered = {part["name"] for part in self._parts(outer_step)}
        return [name for name in self._membership.expected(outer_step) if name not in answered]

    def _is_time(self, outer_step: int) -> bool:
        # Also if all awaited contributions were refused: the round then changes nothing.
        answered = len(self._parts(outer_step))
        if not answered or answered < self._membership.least:
            return False
        return not self._waits_for(outer_step) or self._due_in_s(outer_step) == 0.0

    def close(self) -> AveragingJob | None:
        """The next round to average, if the rule closes it now or has closed it before.

        A round whose contributions were all refused has no parts: its average is empty, it changes
        nothing, and no cluster waits for it.
        """
        outer_step = self.next
        state = self.state(outer_step)
        if state == "collecting" and self._is_time(outer_step):
            self._weigh(outer_step)
            self.refuse_outliers(outer_step)
            sql = "UPDATE rounds SET state = 'averaging' WHERE round = ?"
            self._db.run(sql, outer_step)
        elif state != "averaging":
            return None
        parts = [
            (self.part_path(outer_step, part["member"]), part["tokens"])
            for part in self._complete_parts(outer_step)
        ]
        return AveragingJob(outer_step, parts, self.average_path(outer_step))

    def _weigh(self, outer_step: int) -> None:
        # Limit the tokens to plausible numbers: a member's weight is only its own claim.
        parts, first = self._complete_parts(outer_step), self.first
        text = "" if first is None else first.identity.get("data.seq_length", "")
        claims = {part["member"]: part["tokens"] for part in parts}
        if text.isascii() and text.isdecimal():
            for part in parts:
                start, stop = reserve_of(self._membership.get(part["member"])["id"])
                spans = [(a, b) for a, b in json.loads(part["spans"]) if a >= RESERVE]
                own = sum(max(0, min(b, stop) - max(a, start)) for a, b in spans)
                # A sample has one text, or two texts to compare, and its number was leased.
                most = 2 * int(text) * (self._samples.frontier + min(own, stop - start))
                if self._samples.frontier:
                    claims[part["member"]] = min(part["tokens"], most)
        counted = counted_tokens(claims, self._history(outer_step), self._settings.outlier)
        self._count(outer_step, counted, "the limit for now")

    def _count(self, outer_step: int, counted: Mapping[int, int], why: str) -> None:
        for part in self._complete_parts(outer_step):
            number = part["member"]
            if (tokens := counted.get(number, part["tokens"])) < part["tokens"]:
                sql = "UPDATE parts SET tokens = ? WHERE round = ? AND member = ?"
                self._db.run(sql, tokens, outer_step, number)
                if tokens <= _TELLS * part["tokens"]:
                    what = f"round {outer_step}: {tokens} of the {part['tokens']} tokens"
                    self._db.note(part["name"], "weight", f"{what} that it claims count ({why})")

    def _history(self, outer_step: int) -> list[tuple[int, float, int]]:
        # Member, norm and tokens of accepted contributions for the same fragment in the last
        # rounds; only a few of a member that was often alone.
        rows = self._db.rows(
            "SELECT member, norm, tokens FROM (SELECT *, ROW_NUMBER() OVER (PARTITION BY member "
            "ORDER BY round DESC) AS place FROM parts WHERE reason = '' AND norm >= 0 "
            "AND round < ? AND round >= ? AND round % ? = ?) WHERE place <= ? "
            "ORDER BY round DESC, member LIMIT ?",
            outer_step,
            outer_step - _NORMS * self.fragments,
            self.fragments,
            outer_step % self.fragments,
            _NORMS_EACH,
            _NORMS,
        )
        return [(row["member"], row["norm"], row["tokens"]) for row in rows]

    def refuse_outliers(self, outer_step: int) -> None:
        """Exclude contributions whose norm is far above the usual; see `outliers`."""
        history = self._history(outer_step)
        judges = of_members(history, {row["number"] for row in self._membership.not_gone()})
        parts = self._complete_parts(outer_step)
        norms = {part["member"]: (part["norm"], part["tokens"]) for part in parts}
        factor, num_living = self._settings.outlier, len(self._membership.living())
        # A member that is alone, because others are late or away, cannot show a common cause. But a
        # cluster that has always been alone is compared with no other.
        may_be_common = (len(norms) > 1 and 2 * len(norms) >= num_living) or (
            {member for member, _, _ in history} <= set(norms)
        )
        found = outliers(factor, judges, norms, num_living, may_be_common=may_be_common)
        accepted = {number: both for number, both in norms.items() if number not in found}
        counted = tempered(factor, judges, accepted)
        if not may_be_common or len(counted) < len(norms):
            self._count(outer_step, counted, "its norm is large")
        for number, reason in found.items():
            refusals = self._membership.get(number)["refusals"] + 1
            self._db.run("UPDATE members SET refusals = ? WHERE number = ?", refusals, number)
            self.leave_out(outer_step, number, reason, resets=refusals >= _REFUSALS)

    def leave_out(self, outer_step: int, number: int, reason: str, *, resets: bool = False) -> None:
        """Exclude a counted contribution from the average.

        Args:
            resets: whether its cluster goes back to the last average; else its next contribution
                has these
                steps.
        """
        member = self._membership.get(number)
        sql = "UPDATE parts SET reason = ? WHERE round = ? AND member = ?"
        self._db.run(sql, reason, outer_step, number)
        if member["state"] != "living":
            self._samples.give_back(number)
        self._refuse(member, outer_step, reason, resets=resets)

    def note_parts(self) -> None:
        """Note the arrival of contributions that another process has counted in a shared memory."""
        _ = self._turn_began
        sql = "SELECT round, member FROM parts WHERE reason = '' AND round >= ?"
        for part in self._db.rows(sql, self.next):
            self._came.setdefault((part["round"], part["member"]), self._clock())

    def commit(self, outer_step: int, digest: str, size_bytes: int) -> None:
        """Commit a closed round, when its average is on the disk; see `files.average`."""
        assert outer_step == self.next and self.state(outer_step) == "averaging", outer_step
        began = self._turn_began
        self._db.run(
            "UPDATE rounds SET state = 'committed', digest = ?, size = ?, committed_at = ?, "
            "seconds = ? WHERE round = ?",
            digest,
            size_bytes,
            time.time(),
            self.open_for_s(outer_step),
            outer_step,
        )
        parts = self._complete_parts(outer_step)
        self._note_heavy(outer_step, {part["name"]: part["tokens"] for part in parts})
        needed_s = dict[str, float]()
        for part in parts:
            came = self._came.get((outer_step, part["member"]), self._began)
            needed_s[part["name"]] = max(0.0, came - began)
            self._samples.average(part["member"], valid(json.loads(part["spans"])))
            self._db.run("UPDATE members SET refusals = 0 WHERE number = ?", part["member"])
            self._came.pop((outer_step, part["member"]), None)
        self._times.note(needed_s, {row["name"] for row in self._membership.latest()})
        self._turn = outer_step + 1, self._clock()

    def heaviest(
        self, outer_step: int, weights: Mapping[str, int]
    ) -> tuple[list[str], float] | None:
        """Members that outweigh all other living members, also the missing ones; see `heavy`."""
        living = {
            row["name"]
            for row in self._membership.living()
            if row["from_round"] <= outer_step and not (row["is_behind"] or row["has_finished"])
        }
        return heavy({**dict.fromkeys(living, 0), **weights})

    def _note_heavy(self, outer_step: int, weights: Mapping[str, int]) -> None:
        # Once, and again when the members change.
        found, before = self.heaviest(outer_step, weights), self._db.get("heavy") or ""
        names, share = found or ([], 0.0)
        if (now := ", ".join(names)) != before:
            self._db.put("heavy", now)
            for name in names:
                what = "it is" if len(names) == 1 else f"{now} are together"
                what += (
                    f" {share:.1%} of the average of round {outer_step}, by their claimed tokens"
                )
                self._db.note(name, "weight", what)

    def prune(self) -> None:
        """Delete rows that no rule needs any more, so that the memory stays small."""
        following = self.next
        oldest = min(self.kept_since, following - _ROUNDS)
        least = min(oldest, following - _NORMS * self.fragments)
        # A member's last part stays, as a record that the member took part.
        no_last = (
            "AND (round, member) NOT IN (SELECT MAX(round), member FROM parts "
            "JOIN members ON member = number WHERE reason = '' GROUP BY member)"
        )
        for table, limit, but in (
            ("rounds", oldest - self.fragments, ""),
            ("parts", least, no_last),
        ):
            where = f"FROM {table} WHERE round < ? {but}"
            if self._db.row(f"SELECT 1 {where} LIMIT 1", limit) is not None:
                self._db.run(f"DELETE {where}", limit)
        self._db.run("UPDATE parts SET spans = '[]' WHERE round < ? AND spans != '[]'", following)

    def take_over(self, answer: RoundAnswer, outer_params: str, numbers: Mapping[str, int]) -> None:
        """Import a round decided by a former hub; its average is on the disk.

        Args:
            outer_params: digest after its average; empty: unknown.
            numbers: numbers of the members in the answer.
        """
        self._db.run(
            "INSERT INTO rounds (round, state, digest, size, outer_params, committed_at) "
            "VALUES (?, 'committed', ?, ?, ?, ?)",
            answer.outer_step,
            answer.digest,
            answer.size_bytes,
            outer_params,
            time.time(),
        )
        for name, number in numbers.items():
            tokens, reason = answer.weights.get(name, 0), answer.refused.get(name, "")
            sql = "INSERT INTO parts VALUES (?, ?, ?, -1, '[]', ?)"
            self._db.run(sql, answer.outer_step, number, tokens, reason)

    # Answers.

    def open_rounds(self) -> list[RoundAnswer]:
        """The rounds that collect contributions."""
        rows = self._db.rows("SELECT round FROM rounds WHERE state = 'collecting' ORDER BY round")
        return [self.answer(row["round"]) for row in rows]

    def answer(self, outer_step: int) -> RoundAnswer:
        row, state = self._row(outer_step), self.state(outer_step)
        if row is None:
            return RoundAnswer.model_validate({"outer_step": outer_step, "state": state})
        parts = self._parts(outer_step)
        tokens = {part["name"]: part["tokens"] for part in parts if not part["reason"]}
        is_open, is_committed = state == "collecting", state == "committed"
        return RoundAnswer(
            outer_step=outer_step,
            state=row["state"],
            due_in_s=self._due_in_s(outer_step) if is_open else None,
            contributed=list(tokens),
            waits_for=self._waits_for(outer_step) if is_open else [],
            weights=tokens if is_committed else {},
            refused={part["name"]: part["reason"] for part in parts if part["reason"]},
            digest=row["digest"],
            size_bytes=row["size"],
            is_kept=is_committed and outer_step >= self.kept_since,
        )
