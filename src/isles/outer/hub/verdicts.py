"""Verdicts on the right weights after a round, from the digests that clusters report."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from isles.outer.hub.members import Membership
from isles.outer.hub.rounds import Rounds
from isles.outer.hub.rules import divergence, may_judge

_SILENT_ROUNDS = 2
"""A member that has applied more later rounds than this has no vote on a round that it has not
reported on: it would keep newcomers waiting."""


class Verdicts:
    """The reports of members (table `applied`); the digest of a round after its decision.

    A member has one report on a round. If it reports another digest, its report becomes empty, and
    agrees with no other report.
    """

    def __init__(self, membership: Membership, rounds: Rounds) -> None:
        self._membership, self._rounds, self._db = membership, rounds, membership.db

    def _last(self, fragment: int, version: int) -> sqlite3.Row | None:
        return self._db.row(
            "SELECT round, outer_params FROM rounds WHERE round < ? AND round % ? = ? "
            "AND state = 'committed' ORDER BY round DESC LIMIT 1",
            version,
            self._rounds.fragments,
            fragment,
        )

    def outer_params(self, fragment: int, version: int) -> str:
        """The digest of a fragment's outer parameters after `version` outer steps.

        Empty: unknown, or not decided.
        """
        if (row := self._last(fragment, version)) is not None:
            return str(row["outer_params"])
        first = self._rounds.first
        return "" if first is None else first.outer_params[fragment]

    def diverged(self, version: int, outer_params: Sequence[str]) -> list[int]:
        """The fragments that differ from the run's, by the decided digests after
        `version` steps."""
        return [
            fragment
            for fragment, digest in enumerate(outer_params)
            if self.outer_params(fragment, version) not in ("", digest)
        ]

    def undecided(self, version: int) -> dict[int, int]:
        """By fragment its last round before `version`, if its weights are not decided."""
        lasts = {n: self._last(n, version) for n in range(self._rounds.fragments)}
        return {n: row["round"] for n, row in lasts.items() if row and not row["outer_params"]}

    def report(self, member: int, outer_step: int, outer_params: str) -> None:
        """A member has these outer parameters after an outer step; see `judge`."""
        sql = "SELECT outer_params FROM applied WHERE round = ? AND member = ?"
        before = self._db.row(sql, outer_step, member)
        if before is None:
            new = "INSERT INTO applied VALUES (?, ?, ?)"
            self._db.run(new, outer_step, member, outer_params)
        elif before["outer_params"] != outer_params:
            # A member that is alone has no source for the right state.
            is_alone = self._voters(outer_step) <= {member}
            sql = "UPDATE applied SET outer_params = ? WHERE round = ? AND member = ?"
            self._db.run(sql, outer_params if is_alone else "", outer_step, member)

    def claim(self, member: int, version: int, outer_params: Sequence[str]) -> None:
        """A member has joined with these outer parameters: its first report on a round counts."""
        for fragment, outer_step in self.undecided(version).items():
            new = "INSERT OR IGNORE INTO applied VALUES (?, ?, ?)"
            self._db.run(new, outer_step, member, outer_params[fragment])

    def _had_part(self, outer_step: int) -> set[int]:
        sql = "SELECT member FROM parts WHERE round = ? AND reason = ''"
        return {row["member"] for row in self._db.rows(sql, outer_step)}

    def _voters(self, outer_step: int) -> set[int]:
        # A cluster that is disconnected for some seconds keeps its vote.
        up_to_date = {row["number"] for row in self._membership.living() if not row["is_behind"]}
        away = {row["number"] for row in self._membership.away() if not row["is_behind"]}
        return up_to_date | (away & self._had_part(outer_step))

    def judge(self, outer_step: int) -> dict[int, str]:
        """Decide on a round if possible; returns the members that must pull the state, and why.

        Members that were wrong only by an earlier verdict need not pull any more.
        """
        # Members that have left count only for averages that they had a part in, so that clusters
        # under many names have no more votes than clusters may take part.
        had_part = self._had_part(outer_step)
        rows = self._db.rows(
            "SELECT member, outer_params, state FROM applied JOIN members ON member = number "
            "WHERE round = ?",
            outer_step,
        )
        reports = {
            row["member"]: row["outer_params"]
            for row in rows
            if row["state"] != "left" or row["member"] in had_part
        }
        silent = {
            row["number"]
            for row in self._membership.living()
            if row["version"] > outer_step + _SILENT_ROUNDS and row["number"] not in reports
        }
        if not may_judge(reports, self._voters(outer_step) - silent, had_part):
            return {}
        right, wrong = divergence(reports)
        self._db.run("UPDATE rounds SET outer_params = ? WHERE round = ?", right, outer_step)
        reason = f"its outer parameters after round {outer_step} differ from most others"
        found = {}
        for number in reports:
            other = self._membership.get(number)
            is_commanded = other["command_reason"] == reason
            # Also a member that has rejoined since: it was behind by the earlier digest.
            is_thrown_back = other["is_behind"] and other["version"] == outer_step + 1
            if number in wrong and not is_commanded:
                found[number] = reason
            elif number not in wrong and (is_commanded or is_thrown_back):
                self._db.run("UPDATE members SET is_behind = 0 WHERE number = ?", number)
                self._membership.command(number, "")
        return found
