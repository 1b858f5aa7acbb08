"""The contributions to turns: which are there, which were refused, and how much each may weigh."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Mapping, Sequence

from isles.outer.hub.book import Book
from isles.outer.hub.rules import outliers
from isles.outer.hub.samples import Samples
from isles.outer.hub.settings import Settings
from isles.outer.messages import SAMPLE_TOKENS, Contribution, Ready

_NORMS = 32
_NUMBER = re.compile(r"[0-9]{1,9}")


class Parts:
    """One row for each contribution that is complete or refused."""

    def __init__(self, book: Book, settings: Settings, samples: Samples) -> None:
        self._book = book
        self._settings = settings
        self._samples = samples
        self._pieces: Sequence[Sequence[int]] = []
        self._sizes: Sequence[int] = []
        self._sample_tokens = 0

    def learn(
        self,
        identity: Mapping[str, str],
        pieces: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> None:
        """What the first cluster has settled.

        Args:
            identity: see `Join`.
            pieces: of each fragment its pieces.
            sizes: of each fragment the bytes of a contribution.
        """
        self._pieces, self._sizes = pieces, sizes
        text = identity.get(SAMPLE_TOKENS, "")
        self._sample_tokens = int(text) if _NUMBER.fullmatch(text) else 0

    def largest_average(self, turn: int, num_parts: int) -> int:
        """Bytes that the average of so many contributions to a turn has at most."""
        fragment = turn % len(self._pieces)
        pieces = self._pieces[fragment]
        as_they_are = num_parts * (self._sizes[fragment] + 4 * len(pieces))
        return max(4 * sum(pieces), as_they_are)

    def get(self, turn: int, number: int) -> sqlite3.Row | None:
        """A member's contribution to a turn."""
        return self._book.row("SELECT * FROM parts WHERE turn = ? AND member = ?", turn, number)

    def of_turn(self, turn: int) -> list[sqlite3.Row]:
        """All contributions to a turn."""
        return self._book.rows("SELECT * FROM parts WHERE turn = ?", turn)

    def members(self, turn: int, state: str) -> frozenset[int]:
        """Whose contribution to a turn is complete, or refused."""
        rows = self._book.rows("SELECT member FROM parts WHERE turn = ? AND state = ?", turn, state)
        return frozenset(row["member"] for row in rows)

    def refuse(
        self, turn: int, number: int, part: Contribution | Ready, reason: str, norm: float = -1.0
    ) -> None:
        """A contribution counts for nothing."""
        self._write(turn, number, part, state="refused", norm=norm, reason=reason)

    def refuse_complete(self, turn: int, number: int, reason: str) -> None:
        """A contribution that was complete counts for nothing."""
        self._book.run(
            "UPDATE parts SET state = 'refused', reason = ? WHERE turn = ? AND member = ?",
            reason,
            turn,
            number,
        )

    def take(
        self, turn: int, number: int, part: Contribution | Ready, norm: float
    ) -> tuple[int, int]:
        """A contribution counts; its samples are those of the turn.

        Returns:
            How many of its samples are another's or were counted before, and its weight.
        """
        weight = self.weight(turn, number, part)
        counted = self._samples.countable(number, part.samples)
        repeated = self._samples.contribute(number, turn, part.samples)
        self._write(
            turn,
            number,
            part,
            state="complete",
            norm=norm,
            repeated=repeated,
            samples=counted,
            tokens=weight,
        )
        return repeated, weight

    def _write(
        self,
        turn: int,
        number: int,
        part: Contribution | Ready,
        *,
        state: str,
        norm: float,
        reason: str = "",
        repeated: int = 0,
        samples: int = 0,
        tokens: int = 0,
    ) -> None:
        digest = part.digest if isinstance(part, Contribution) else ""
        self._book.run(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            turn,
            number,
            state,
            tokens or part.tokens,
            part.steps,
            norm,
            digest,
            repeated,
            reason,
            samples,
        )

    def weight(self, turn: int, number: int, part: Contribution | Ready) -> int:
        """The tokens for which a contribution counts: at most those of the samples behind it.

        Behind it are the samples in it, and those in the same member's contributions to other
        fragments since the last one to this fragment.
        """
        if not self._sample_tokens:
            return part.tokens
        fragments = len(self._pieces)
        last = self._book.row(
            "SELECT MAX(turn) AS turn FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn < ? AND turn % ? = ?",
            number,
            turn,
            fragments,
            turn % fragments,
        )
        since = -1 if last is None or last["turn"] is None else last["turn"]
        earlier = self._book.number(
            "SELECT SUM(samples) FROM parts WHERE member = ? AND state = 'complete' "
            "AND turn > ? AND turn < ?",
            number,
            since,
            turn,
        )
        samples = earlier + self._samples.countable(number, part.samples)
        return max(1, min(part.tokens, samples * self._sample_tokens))

    def outliers(self, turn: int, norms: Mapping[int, tuple[float, int]]) -> dict[int, str]:
        """Members whose norm (and tokens) is far above what was usual, and by how much."""
        fragments = len(self._pieces)
        history = self._book.rows(
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
