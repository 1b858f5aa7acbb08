"""The contributions to turns: which are there, which were refused, and how much each may weigh."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence

from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Settings, outliers
from isles.outer.hub.samples import Samples
from isles.outer.messages import SAMPLE_TOKENS, Contribution
from isles.outer.spans import without

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

    def get(self, turn: int, number: int) -> sqlite3.Row | None:
        """A member's contribution to a turn."""
        return self._db.row("SELECT * FROM parts WHERE turn = ? AND member = ?", turn, number)

    def of_turn(self, turn: int) -> list[sqlite3.Row]:
        """All contributions to a turn."""
        return self._db.rows("SELECT * FROM parts WHERE turn = ?", turn)

    def members(self, turn: int, state: str) -> frozenset[int]:
        """Whose contribution to a turn is complete, or refused."""
        rows = self._db.rows("SELECT member FROM parts WHERE turn = ? AND state = ?", turn, state)
        return frozenset(row["member"] for row in rows)

    def refuse(
        self, turn: int, number: int, part: Contribution, reason: str, norm: float = -1.0
    ) -> None:
        """A contribution counts for nothing."""
        self._write(turn, number, part, state="refused", norm=norm, reason=reason)

    def refuse_complete(self, turn: int, number: int, reason: str) -> None:
        """A contribution that was complete counts for nothing."""
        self._db.run(
            "UPDATE parts SET state = 'refused', reason = ? WHERE turn = ? AND member = ?",
            reason,
            turn,
            number,
        )

    def take(self, turn: int, number: int, part: Contribution, norm: float) -> int:
        """A contribution counts; its weight."""
        sql = "SELECT spans FROM parts WHERE member = ? AND state = 'complete' ORDER BY turn DESC"
        rows = self._db.rows(f"{sql} LIMIT ?", number, _LOOKED_AT)
        earlier = [(start, stop) for row in rows for start, stop in json.loads(row["spans"])]
        new = without(self._samples.own(number, part.samples), earlier)  # each counts once
        counted = sum(stop - start for start, stop in new)
        weight = self._weight(turn, number, part.tokens, counted)
        self._write(turn, number, part, state="complete", norm=norm, samples=counted, tokens=weight)
        return weight

    def commit(self, turn: int) -> None:
        """What was learnt of the contributions' samples is in an average."""
        for row in self.of_turn(turn):
            if row["state"] == "complete":
                spans = [(start, stop) for start, stop in json.loads(row["spans"])]
                self._samples.average(row["member"], spans)

    def take_over(self, turn: int, number: int, tokens: int, reason: str) -> None:
        """A contribution to a turn that a hub which is gone has decided."""
        self._db.run(
            "INSERT INTO parts (turn, member, state, tokens, steps, norm, digest, reason) "
            "VALUES (?, ?, ?, ?, 0, -1, '', ?)",
            turn,
            number,
            "refused" if reason else "complete",
            tokens,
            reason,
        )

    def _write(
        self,
        turn: int,
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
            turn,
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

    def _weight(self, turn: int, number: int, tokens: int, samples: int) -> int:
        """The tokens for which a contribution counts: at most those of the samples behind it.

        Behind it are the samples in it, and those in the same member's contributions to other
        fragments since the last one to this fragment.
        """
        if not self._sample_tokens:
            return tokens
        fragments = len(self._pieces)
        last = self._db.row(
            "SELECT MAX(turn) AS turn FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn < ? AND turn % ? = ?",
            number,
            turn,
            fragments,
            turn % fragments,
        )
        since = -1 if last is None or last["turn"] is None else last["turn"]
        earlier = self._db.number(
            "SELECT SUM(samples) FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn > ? AND turn < ?",
            number,
            since,
            turn,
        )
        return max(1, min(tokens, (earlier + samples) * self._sample_tokens))

    def outliers(self, turn: int, norms: Mapping[int, tuple[float, int]]) -> dict[int, str]:
        """Members whose norm (and tokens) is far above what was usual, and by how much."""
        fragments = len(self._pieces)
        history = self._db.rows(
            "SELECT norm, tokens FROM parts WHERE state = 'complete' AND turn < ? "
            "AND turn % ? = ? ORDER BY turn DESC, member LIMIT ?",
            turn,
            fragments,
            turn % fragments,
            _NORMS,
        )
        usual = [(row["norm"], row["tokens"]) for row in history]
        return outliers(self._settings.outlier, usual, norms)

    def norms(self, turn: int) -> dict[int, tuple[float, int]]:
        """Norm and tokens of each complete contribution to a turn."""
        return {
            row["member"]: (row["norm"], row["tokens"])
            for row in self.of_turn(turn)
            if row["state"] == "complete"
        }
