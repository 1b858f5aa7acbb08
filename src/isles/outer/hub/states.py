"""States for clusters that are behind: the source member of a state, and its files."""

from __future__ import annotations

import math
import shutil
import sqlite3
from pathlib import Path

from isles.outer.hub.files import state_bytes
from isles.outer.hub.members import Membership
from isles.outer.hub.rounds import Rounds
from isles.outer.hub.rules import FINISHED, FINISHED_FIX, FINISHED_WHAT, Refusal
from isles.outer.hub.verdicts import Verdicts
from isles.outer.messages import State, StateAnswer, StateFile, StateOffer

_WANTED_S = 300.0
_LEAST_BYTES_PER_S = 2**17
"""A source that sends its state more slowly than 1 Mbit/s has failed. After each failure the source
may be half as fast."""
_MOST_DOUBLED = 4
"""Number of failures up to which the time doubles."""


class States:
    """States that members have uploaded (table `states`), and the search for a state source."""

    def __init__(
        self, membership: Membership, rounds: Rounds, verdicts: Verdicts, folder: Path
    ) -> None:
        self._membership, self._rounds, self._folder = membership, rounds, folder
        self._verdicts = verdicts
        self._db, self._clock = membership.db, membership.clock
        self._wanted_at = -math.inf
        self._source: int | None = None
        self._chosen_at = self._progress_at = 0.0
        self._sent_bytes = 0.0
        self._failures: dict[int, tuple[int, float]] = {}
        """Number and last time of each member's failures to send a requested state in time."""

    def touch(self) -> None:
        """Note that a cluster requests or fetches a state."""
        self._wanted_at = self._clock()

    @property
    def _is_wanted(self) -> bool:
        return self._clock() - self._wanted_at < _WANTED_S

    def ask(self, member: int) -> None:
        """Note that another process with the same memory has chosen a member as state source."""
        self.touch()
        if self._source != member:
            self._ask(member)

    def note_progress(self, member: int, num_bytes: float = math.inf) -> None:
        """Count bytes from a member; they belong to its state if it is the source."""
        if self._source == member:
            self._progress_at = self._clock()
            self._sent_bytes += num_bytes

    def is_source(self, member: int) -> bool:
        return self._source == member and self._is_wanted

    def oldest_version(self) -> int | None:
        """Oldest version whose later averages must be kept, while a cluster pulls a state."""
        row = self._db.row("SELECT MIN(version) AS v FROM states")
        return int(row["v"]) if self._is_wanted and row and row["v"] is not None else None

    # For clusters that are behind.

    def want(self, member: sqlite3.Row) -> StateAnswer:
        """A member needs a state: the newest usable state, or the source that must send one.

        A state whose weights are not decided waits for the verdict: no member gets it before.

        Raises:
            Refusal: no member can send a state, and no such member can join.
        """
        self.touch()
        newest = "SELECT * FROM states WHERE is_complete = 1 ORDER BY version DESC"
        for row in self._db.rows(newest):
            content = State.model_validate_json(row["content"])
            if row["version"] < self._rounds.kept_since:
                continue
            self.settle_all(row["version"])
            if self._verdicts.diverged(row["version"], content.outer_params):
                self._reject(row["member"], "its state differs from the run's")
            elif not self._verdicts.undecided(row["version"]):
                source = self._membership.get(row["member"])["name"]
                return StateAnswer(state=row["number"], source=source, **dict(content))
        self._choose(member["number"])
        if self._source is not None:
            return StateAnswer(state=None, source=self._membership.get(self._source)["name"])
        if self._membership.all_have_finished(but=member["number"]):
            raise Refusal(
                FINISHED,
                f"{FINISHED_WHAT}, and the averages since this cluster's last visit are not kept",
                FINISHED_FIX,
            )
        return StateAnswer(state=None)

    def _choose(self, but: int) -> None:
        # The most advanced member; the next one if it does not send its state in time.
        if (source := self._source) is not None and self._is_late(source):
            self._failed(source)
            self._db.run("DELETE FROM states WHERE member = ? AND is_complete = 0", source)
            self._source = None
        kept_since = self._rounds.kept_since
        sql = "SELECT member FROM states WHERE is_complete = 1 AND version >= ?"
        waiting = {row["member"] for row in self._db.rows(sql, kept_since)}  # for a verdict
        able = {
            row["number"]: (*self._failures.get(row["number"], (0, 0.0)), -row["version"])
            for row in self._membership.living()
            if not row["is_behind"] and row["version"] >= kept_since
            if row["number"] != but
            if row["number"] not in waiting or not self._verdicts.undecided(row["version"])
        }
        if self._source not in able:
            self._ask(min(able, key=able.__getitem__, default=None))

    def _failed(self, member: int) -> None:
        self._failures[member] = self._failures.get(member, (0, 0.0))[0] + 1, self._clock()

    def _ask(self, member: int | None) -> None:
        self._source, self._sent_bytes = member, 0.0
        self._chosen_at = self._progress_at = self._clock()

    def _is_late(self, source: int) -> bool:
        # It sends nothing, or so little that others would wait forever, however often it restarts.
        # A source that has failed gets twice the time, because its link may be slow.
        now, source_s = self._clock(), self._membership.settings.source_s
        all_s = source_s + min(self._sent_bytes, self._limit_bytes) / _LEAST_BYTES_PER_S
        more = 2 ** min(self._failures.get(source, (0, 0.0))[0], _MOST_DOUBLED)
        return now - self._chosen_at > all_s * more or now - self._progress_at > source_s

    @property
    def _pieces(self) -> list[list[int]]:
        first = self._rounds.first
        return [] if first is None else first.pieces

    @property
    def _limit_bytes(self) -> int:
        return state_bytes(self._pieces)

    # From a source.

    def offer(self, member: sqlite3.Row, offer: StateOffer) -> int:
        """Start or resume the upload of a state source; returns the state's number.

        Raises:
            Refusal: it differs from the run's, is larger than outer parameters and momentum, or was
                not
                requested.
        """
        number, rounds = member["number"], self._rounds
        is_wrong = (
            offer.version > rounds.next
            or len(offer.outer_params) != rounds.fragments
            or self._verdicts.diverged(offer.version, offer.outer_params)
        )
        if member["is_behind"] or is_wrong:
            raise Refusal("behind", f"the state of {member['name']} differs from the run's")
        pieces, limit = self._pieces, self._limit_bytes
        size_bytes = sum(file.size_bytes for file in offer.files)
        names = {file.name for file in offer.files}
        if size_bytes > limit or len(offer.files) > len(pieces) or len(names) < len(offer.files):
            raise Refusal(
                "too_large",
                f"a state of {len(offer.files)} files and {size_bytes} bytes; a state of this run "
                f"has {len(pieces)} files and at most {limit} bytes",
            )
        content = offer.model_dump_json(exclude={"id"})
        known = "SELECT number FROM states WHERE member = ? AND content = ?"
        row = self._db.row(known, number, content)
        if row is not None:
            return int(row["number"])
        if not self.is_source(number):
            raise Refusal("not_wanted", "no state is requested from this cluster now")
        # One at a time, to limit the disk space that a member can use.
        self._db.run("DELETE FROM states WHERE member = ? AND is_complete = 0", number)
        new = "INSERT INTO states (member, version, content) VALUES (?, ?, ?)"
        self._db.run(new, number, offer.version, content)
        return self._db.number(known, number, content)

    def uploads(self, member: sqlite3.Row, state: int) -> list[tuple[Path, StateFile]]:
        """The files of a state from a member, and their paths for writing.

        Raises:
            Refusal: the state does not exist, belongs to another member, or is complete.
        """
        row = self._row(state)
        if row["member"] != member["number"]:
            raise Refusal("not_yours", f"state {state} belongs to another cluster")
        if row["is_complete"]:
            raise Refusal("sealed", f"state {state} is complete already")
        return self._files(state)

    def is_given(self, member: sqlite3.Row, state: int) -> bool:
        """True if a state from a member is complete."""
        row = self._row(state)
        return bool(row["is_complete"]) and row["member"] == member["number"]

    def content(self, state: int) -> State:
        """The announcement of a state by its source."""
        return State.model_validate_json(self._row(state)["content"])

    def refuse(self, state: int) -> None:
        """Forget a state whose files differ from its announcement: no newcomer could use it."""
        row = self._row(state)
        self._reject(row["member"], "its state differs from its announcement")

    def complete(self, state: int) -> None:
        """Note that all files of a state are complete."""
        row = self._row(state)
        sql = "DELETE FROM states WHERE member = ? AND number != ?"
        self._db.run(sql, row["member"], state)  # a member has one at most
        self._db.run("UPDATE states SET is_complete = 1 WHERE number = ?", state)
        name = self._membership.get(row["member"])["name"]
        self._db.note(name, "state", f"gave the state after round {row['version'] - 1}")
        self._source = None
        if not self._verdicts.undecided(row["version"]):
            self._failures.pop(row["member"], None)

    # Members with other weights.

    def settle(self, outer_step: int) -> None:
        """Decide on a round if possible; members with other weights than most pull the state."""
        for number, reason in self._verdicts.judge(outer_step).items():
            self.throw_back(self._membership.get(number), "diverged", reason)
            self._failed(number)

    def settle_all(self, version: int) -> None:
        """Decide on the weights after `version` rounds if that is possible."""
        for outer_step in self._verdicts.undecided(version).values():
            self.settle(outer_step)

    def throw_back(self, member: sqlite3.Row, event: str, why: str) -> None:
        """Make a member pull the state, and forget the states of this member."""
        self._db.run("UPDATE members SET is_behind = 1 WHERE number = ?", member["number"])
        self._drop(member["number"])
        self._membership.command(member["number"], "pull", why)
        self._db.note(member["name"], event, why)

    def _reject(self, member: int, why: str) -> None:
        self._drop(member)
        self._failed(member)
        name = self._membership.get(member)["name"]
        self._db.note(name, "refused", why)

    def _drop(self, member: int) -> None:
        self._db.run("DELETE FROM states WHERE member = ?", member)
        if self._source == member:
            self._source = None

    def download(self, state: int, index: int) -> Path:
        """A file of a complete state."""
        if not self._row(state)["is_complete"]:
            raise Refusal("early", f"state {state} is still being uploaded")
        self.touch()
        files = self._files(state)
        if index >= len(files):
            raise Refusal("no_state", f"state {state} has {len(files)} files")
        return files[index][0]

    def _row(self, state: int) -> sqlite3.Row:
        row = self._db.row("SELECT * FROM states WHERE number = ?", state)
        if row is None:
            raise Refusal("no_state", f"state {state} does not exist", "request the state again")
        return row

    def _files(self, state: int) -> list[tuple[Path, StateFile]]:
        content = self.content(state)
        folder = self._folder / f"{state}"
        return [(folder / f"{index}", file) for index, file in enumerate(content.files)]

    def sweep(self) -> None:
        """Forget states that are too old for the averages on the disk, and remove their files."""
        self._db.run("DELETE FROM states WHERE version < ?", self._rounds.kept_since)
        known = {str(row["number"]) for row in self._db.rows("SELECT number FROM states")}
        for folder in self._folder.glob("[0-9]*"):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)
