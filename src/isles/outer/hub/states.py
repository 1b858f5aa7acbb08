"""The state for clusters that are behind: which member gives it, and which files it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path

from isles.outer.hub.journal import Journal
from isles.outer.hub.members import Membership
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.messages import StateAnswer, StateOffer

_WANTED_S = 300.0
_HEAD_BYTES = 1024
_SLACK_BYTES = 4 * 2**20
"""What a file has besides its numbers: its head, with a name for each tensor."""


class States:
    """States that donors have uploaded, and the search for a state source."""

    def __init__(
        self,
        db: Journal,
        settings: Settings,
        membership: Membership,
        folder: Path,
        clock: Callable[[], float],
    ) -> None:
        self._db = db
        self._settings = settings
        self._membership = membership
        self._folder = folder
        self._clock = clock
        self._wanted_at = -_WANTED_S
        self._source: int | None = None
        self._progress_at = 0.0
        self._tried: set[int] = set()

    def path(self, state: int, index: int) -> Path:
        return self._folder / f"{state}" / f"{index}"

    @property
    def is_wanted(self) -> bool:
        """Whether somebody has asked for a state, or fetched of it, lately."""
        return self._clock() - self._wanted_at < _WANTED_S

    def oldest_version(self) -> int | None:
        """The version from which on averages must be kept, while somebody pulls a state."""
        row = self._db.row("SELECT MIN(version) AS v FROM states")
        return int(row["v"]) if self.is_wanted and row and row["v"] is not None else None

    def touch(self) -> None:
        self._wanted_at = self._clock()

    def progress(self) -> None:
        self._progress_at = self._clock()

    def want(self, member: int, is_usable: Callable[[int], bool]) -> StateAnswer:
        """A member needs a state: the newest one that is usable, or who is asked for one.

        Args:
            is_usable: whether the averages of all outer steps since a version are kept.

        Raises:
            Refusal: nobody can give one, and nobody will come who could.
        """
        self.touch()
        for row in self._db.rows(
            "SELECT * FROM states WHERE is_complete = 1 ORDER BY version DESC"
        ):
            if is_usable(row["version"]):
                return self.answer(row["number"])
        self._choose(member, is_usable)
        others = [row for row in self._membership.latest() if row["number"] != member]
        have_gone = [row["has_finished"] and row["state"] == "left" for row in others]
        if self._source is None and others and all(have_gone):
            raise Refusal(
                409,
                "over",
                "the other clusters have finished this run, and the averages since this one was "
                "here last are not kept",
                "their model is the run's; with a larger max_steps on all clusters it goes on",
            )
        source = "" if self._source is None else self._membership.get(self._source)["name"]
        return StateAnswer(state=None, source=source)

    def _choose(self, but: int, is_usable: Callable[[int], bool]) -> None:
        # The most advanced member; another one where it sends nothing.
        able = {
            row["number"]: row["version"]
            for row in self._membership.living()
            if not row["is_behind"] and row["number"] != but and is_usable(row["version"])
        }
        is_idle = self._clock() - self._progress_at > self._settings.source_s
        if self._source in able and not is_idle:
            return
        if self._source is not None and is_idle:
            self._tried.add(self._source)
            self._db.run("DELETE FROM states WHERE member = ? AND is_complete = 0", self._source)
        fresh = {number: v for number, v in able.items() if number not in self._tried}
        if not fresh:
            self._tried.clear()
            fresh = able
        self._source = min(fresh, key=lambda number: (-fresh[number], number), default=None)
        self._progress_at = self._clock()

    def is_source(self, member: int) -> bool:
        return self._source == member and self.is_wanted

    def offer(self, member: int, offer: StateOffer, pieces: Sequence[Sequence[int]]) -> int:
        """A state source begins to upload, or goes on; the state's number.

        Args:
            member: the state source's number.
            offer: what it says.
            pieces: of each fragment its pieces.

        Raises:
            Refusal: it is larger than outer parameters and momentum are, or nobody has asked for
                it.
        """
        size_bytes = sum(file.size_bytes for file in offer.files)
        limit = sum(8 * sum(of) + _HEAD_BYTES * len(of) + _SLACK_BYTES for of in pieces)
        if size_bytes > limit or len(offer.files) > len(pieces):
            raise Refusal(
                413,
                "too_large",
                f"a state of {len(offer.files)} files and {size_bytes} bytes; one of this run has "
                f"{len(pieces)} and {limit} at most",
            )
        if len({file.name for file in offer.files}) < len(offer.files):
            raise Refusal(422, "malformed", "two files of the state have the same name")
        text = offer.model_dump_json(exclude={"id"})
        row = self._db.row("SELECT number FROM states WHERE member = ? AND offer = ?", member, text)
        if row is None and not self.is_source(member):
            what = "no state is asked of this cluster now"
            raise Refusal(409, "not_wanted", what)
        self.progress()
        if row is not None:
            return int(row["number"])
        with self._db.transaction():
            # One at a time: what a member can fill the disk with is bounded.
            self._db.run("DELETE FROM states WHERE member = ? AND is_complete = 0", member)
            self._db.run(
                "INSERT INTO states (member, version, offer) VALUES (?, ?, ?)",
                member,
                offer.version,
                text,
            )
            return self._db.number("SELECT MAX(number) FROM states")

    def complete(self, state: int) -> None:
        row = self._row(state)
        with self._db.transaction():
            self._db.run("UPDATE states SET is_complete = 1 WHERE number = ?", state)
            name = self._membership.get(row["member"])["name"]
            self._db.note(name, "state", f"gave the state after round {row['version'] - 1}")
        self._source = None
        self._tried.clear()

    def answer(self, state: int) -> StateAnswer:
        """What a state consists of."""
        row = self._row(state)
        offer = self.files(state)
        return StateAnswer(
            state=state,
            version=offer.version,
            source=self._membership.get(row["member"])["name"],
            outer_params=offer.outer_params,
            files=offer.files,
        )

    def files(self, state: int) -> StateOffer:
        """The offer of a state, without the state source's id."""
        return StateOffer.model_validate_json(
            '{"id":"' + "0" * 32 + '",' + str(self._row(state)["offer"]).removeprefix("{")
        )

    def owner(self, state: int) -> int:
        return int(self._row(state)["member"])

    def is_complete(self, state: int) -> bool:
        return bool(self._row(state)["is_complete"])

    def _row(self, state: int) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM states WHERE number = ?", state)
        if row is None:
            raise Refusal(404, "no_state", f"there is no state {state}", "ask for the state anew")
        return row

    def forget_useless(self, is_usable: Callable[[int], bool]) -> None:
        """Forget states that are too old for the averages on the disk."""
        for row in self._db.rows("SELECT number, version FROM states"):
            if not is_usable(row["version"]):
                self._db.run("DELETE FROM states WHERE number = ?", row["number"])
