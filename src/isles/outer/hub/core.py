"""The hub without its network: every request is one method and one transaction (`Journal.do`).

`status` returns a summary for people.
"""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from isles.facts.units import format_duration
from isles.outer.hub.files import COMING, coming
from isles.outer.hub.journal import JOURNAL, Journal, damaged
from isles.outer.hub.members import LOST, Membership
from isles.outer.hub.rounds import Rounds
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.samples import SampleLeases
from isles.outer.hub.states import States
from isles.outer.hub.verdicts import Verdicts
from isles.outer.messages import (
    PROTOCOL,
    Applied,
    Contribution,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    LeaseAnswer,
    LeaseRequest,
    LeaveRun,
    RoundAnswer,
    RunRules,
    ShownRecord,
    Standing,
)

_MOST_PINNED = 16
_EVENTS, _COMMITS = 50, 20
_QUIET_S = 6.0
"""Three heartbeats."""
_SAME = 1e-3
"""Relative difference of norms on processors with another order of summation."""
_FIXED = {"layout", "codec", "adapter.type", "the frozen weights"}
"""Settings that never change during a run. The others may change while no other cluster takes part
or can come back."""


class HubCore:
    """State and decisions of the hub. One thread at a time; requests through `journal.do`.

    Args:
        folder: its state directory.
        settings: settings of the run.
        clock: monotonic seconds.
        journal: its memory; None: in a file in its folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        clock: Callable[[], float],
        journal: Journal | None = None,
    ) -> None:
        self.folder, self.settings = folder, settings
        is_hub = journal is None
        self.journal = journal = journal or Journal(folder / JOURNAL)
        self.samples = SampleLeases(journal)
        self.membership = Membership(journal, settings, self.samples, clock, is_hub=is_hub)
        self.rounds = Rounds(self.membership, folder / "rounds")
        self.verdicts = Verdicts(self.membership, self.rounds)
        self.states = States(self.membership, self.rounds, self.verdicts, folder / "states")
        has_average = any((folder / "rounds").glob("*/average"))
        if is_hub and has_average and not self.membership.latest():
            # sqlite silently drops the newest changes if their file is damaged.
            raise damaged(folder / JOURNAL, "it lacks averages that are in the same folder")
        journal.note("", "started", f"round {self.rounds.next} is next")
        self.sweep()

    def seed(self, kept: Sequence[tuple[RoundAnswer, str]]) -> None:
        """Continue from the state of a former hub: with the averages that a cluster has kept.

        Args:
            kept: that hub's answers for each outer step, without a gap, and the digest of the
                outer parameters after its average, if known.
        """
        for answer, outer_params in kept:
            names = (*answer.weights, *answer.refused)
            numbers = {name: self.membership.stand_in(name) for name in names}
            self.rounds.take_over(answer, outer_params, numbers)
        if kept:
            self.journal.put("kept_since", str(kept[0][0].outer_step))

    # Joining.

    def join(self, join: Join) -> JoinAnswer:
        """A cluster joins, or rejoins.

        Raises:
            Refusal: it trains something else, its name is taken, or there are too many clusters.
        """
        if join.protocol != PROTOCOL:
            raise Refusal(
                "protocol",
                f"{join.name} uses protocol version {join.protocol}, the hub version {PROTOCOL}",
                "install the same version of isles on both machines",
            )
        if len(join.outer_params) != len(join.pieces):
            what = f"{len(join.outer_params)} digests for {len(join.pieces)} fragments"
            raise Refusal("malformed", what)
        self.membership.refuse_new(join)
        first = self.rounds.first
        changes = {} if first is None else self._changes(join, first)
        self.membership.check(join)
        standing: Standing = "first"
        why = ""
        if first is not None:
            standing, why = self._standing(join)
        # Nothing is refused from here on.
        if first is None:
            self.rounds.begin(join)
            if join.version or join.holding:
                self.samples.follow(join.holding)
        elif changes:
            self.rounds.begin(first.model_copy(update={"identity": join.identity}))
            texts = [f"{key} {there} -> {here}" for key, (there, here) in changes.items()]
            self.journal.note(join.name, "settings", ", ".join(texts))
        from_round = self._first_round()
        is_behind = standing == "behind"
        member = self.membership.admit(join, from_round, is_behind=is_behind, why=why)
        self.membership.holds(member["number"], join.has)
        if not is_behind:
            self.verdicts.claim(member["number"], join.version, join.outer_params)
            self.states.settle_all(join.version)
        lost = self.samples.take_up(member["number"], join.holding)
        what = f"{standing}, from round {member['from_round']} on; {why}"
        self.journal.note(join.name, "joined", what)
        return JoinAnswer(
            standing=standing,
            outer_step=self.rounds.next,
            from_step=member["from_round"],
            settings=RunRules(dead_after_s=self.settings.dead_after_s),
            lost=lost,
            why=why,
        )

    def _first_round(self) -> int:
        # Requests that wait for a cluster to join.
        following = self.rounds.next
        return following + int(self.rounds.has_begun(following))

    def _changes(self, join: Join, first: Join) -> dict[str, tuple[str, str]]:
        # Differences from the run, by key: the run's value, and this cluster's.
        found = differences(first, join)
        has_others = any(row["id"] != join.id for row in self.membership.awaited())
        texts = [
            f"{key} is {here} in {join.name}, but {there} in the run"
            for key, (there, here) in found.items()
            if has_others or key in _FIXED
        ]
        if not texts and first.pieces != join.pieces:
            texts = ["the weights are divided into different pieces"]
        if texts:
            raise Refusal(
                "other_run",
                f"the settings of {join.name} differ from the run's: " + "; ".join(texts),
                "use the same values on all clusters. To change them, stop all clusters and wait "
                f"{self.membership.gone_s:g} s, because a stopped or killed cluster can come back "
                "until then",
            )
        return found

    def _standing(self, join: Join) -> tuple[Standing, str]:
        following = self.rounds.next
        if join.version > following:
            raise Refusal(
                "ahead",
                f"{join.name} has applied {join.version} rounds, but the hub knows only "
                f"{following}",
                "either the cluster joins the wrong run, or the hub was restored from an old copy. "
                "In the latter case, start a hub with an empty folder, and let the most advanced "
                "cluster join first",
            )
        self.states.settle_all(join.version)
        if wrong := self.verdicts.diverged(join.version, join.outer_params):
            return "behind", (
                f"its outer parameters of fragment {wrong[0]} after {join.version} rounds differ "
                "from the run's"
            )
        if join.version == following:
            return "current", ""
        if max(join.version, min(join.has, following)) >= self.rounds.kept_since:
            return "late", ""
        return "behind", f"the average of round {join.version} is not kept any more"

    # Members.

    def caller(self, member_id: str) -> sqlite3.Row:
        """The member that sends a request; every request counts as a heartbeat.

        Raises:
            Refusal: it must join.
        """
        member = self.membership.find(member_id)
        number = member["number"]
        self.membership.touch(number)
        if member["state"] == "dropped":  # it keeps its steps, and rounds wait for it again
            sql = "UPDATE members SET state = 'living', from_round = ? WHERE number = ?"
            self.journal.run(sql, self._first_round(), number)
            what = f"responds again before round {self.rounds.next}"
            self.journal.note(member["name"], "back", what)
        return self.membership.get(number)

    def heartbeat(self, heartbeat: Heartbeat) -> HeartbeatAnswer:
        number, following = self.caller(heartbeat.id)["number"], self.rounds.next
        self.membership.note_heartbeat(number, heartbeat)
        self.membership.reached(number, min(heartbeat.version, following))
        member = self.membership.get(number)
        # Only here, when it has just reported its progress: older knowledge of it may be outdated,
        # above all in a hub restored from a copy, and all clusters would wait for each other.
        has = max(member["version"], min(heartbeat.has, following))
        if not member["is_behind"] and has < self.rounds.kept_since:
            why = f"the average of round {member['version']} is not kept any more"
            self.states.throw_back(member, "behind", why)
            member = self.membership.get(number)
        ended = None
        if heartbeat.ends:
            is_decided = not self.rounds.has_begun(following)
            ended = self.membership.end(number, following, is_decided=is_decided)
        return HeartbeatAnswer(
            outer_step=following,
            open=[*self.rounds.open_rounds()],
            members=[row["name"] for row in self.membership.living()],
            sync_every=self.membership.sync_every(),
            command=member["command"],
            command_reason=member["command_reason"],
            ended=ended,
            send_state=self.states.is_source(number) and not member["is_behind"],
        )

    def show(self, shown: ShownRecord) -> None:
        """Keep a cluster's record for people. It is not a heartbeat, so no round waits for it."""
        self.membership.show(self.membership.find(shown.id)["number"], shown.record)

    def reset_done(self, member_id: str) -> None:
        member = self.membership.find(member_id)
        if member["command"] == "reset":
            self.membership.command(member["number"], "")

    def leave(self, leave: LeaveRun) -> None:
        member, has_finished = self.membership.find(leave.id), leave.has_finished
        why = "it has finished" if has_finished else "it pauses"
        self.membership.retire(member, "left", why, frees=has_finished)
        sql = "UPDATE members SET has_finished = ?, command = '' WHERE number = ?"
        self.journal.run(sql, int(has_finished), member["number"])

    def lease(self, lease: LeaseRequest) -> LeaseAnswer:
        member = self.caller(lease.id)
        return LeaseAnswer(samples=self.samples.lease(member, lease.number, lease.samples))

    def held(self, member_id: str, outer_step: int) -> bool:
        """Note that a cluster has an average; returns whether all living clusters that are not
        behind do."""
        self.membership.holds(self.caller(member_id)["number"], outer_step + 1)
        return self.membership.all_hold(outer_step + 1)

    # Outer steps.

    def part_path(self, member_id: str, outer_step: int) -> Path:
        """Path of a contribution, if it may be sent."""
        member = self.caller(member_id)
        if self.rounds.is_counted(outer_step, member["number"]):
            what = f"the contribution to round {outer_step} is counted already"
            raise Refusal("counted", what)
        self.rounds.check(member, outer_step)
        self.rounds.make_room(member, outer_step)
        return self.rounds.part_path(outer_step, member["number"])

    def is_counted(self, member_id: str, outer_step: int) -> bool:
        return self.rounds.is_counted(outer_step, self.caller(member_id)["number"])

    def complete(
        self, outer_step: int, contribution: Contribution, norm: float, failure: str = ""
    ) -> None:
        """A contribution is complete and on the disk; see `Rounds.complete`."""
        member = self.caller(contribution.id)
        self.rounds.complete(member, outer_step, contribution, norm, failure)

    def measured(self, outer_step: int, found: Mapping[int, float | str]) -> bool:
        """Apply the rules to the content of the contributions' files of a closed round.

        Until it is measured, the norm in the journal is only the sender's claim.

        Args:
            found: see `files.measure`.

        Returns:
            Whether anything has changed: `Rounds.close` then returns another job.
        """
        sql = "SELECT member, norm FROM parts WHERE round = ? AND reason = ''"
        parts = self.journal.rows(sql, outer_step)
        before, wrong = self.journal.num_changes, False
        for part in parts if self.rounds.state(outer_step) == "averaging" else ():
            number, norm = part["member"], found.get(part["member"], part["norm"])
            if isinstance(norm, str):
                self.rounds.leave_out(outer_step, number, norm)
            elif not math.isclose(norm, part["norm"], rel_tol=_SAME):
                sql, wrong = "UPDATE parts SET norm = ? WHERE round = ? AND member = ?", True
                self.journal.run(sql, norm, outer_step, number)
        if wrong:
            self.rounds.refuse_outliers(outer_step)
        return self.journal.num_changes != before

    def commit(self, outer_step: int, digest: str, size_bytes: int) -> None:
        """An average is on the disk; see `Rounds.commit`. Old averages are not kept any more."""
        self.rounds.commit(outer_step, digest, size_bytes)
        self.rounds.prune()
        following = self.rounds.next
        oldest = following - self.settings.keep_averages
        pinned = self.states.oldest_version()
        if pinned is not None:
            # A cluster that pulls a state needs them; an endless pull must not fill the disk.
            least = following - _MOST_PINNED * self.settings.keep_averages
            oldest = min(oldest, max(pinned, least))
        if oldest > self.rounds.kept_since:
            self.journal.put("kept_since", str(oldest))
            self.journal.run(  # see `applied`
                "DELETE FROM applied WHERE round < ? AND round NOT IN "
                "(SELECT round FROM rounds WHERE outer_params = '')",
                oldest,
            )

    def sweep(self) -> None:
        """Remove files that are no longer needed, after the disk has a record of that."""
        self.states.sweep()
        for folder in (self.folder / "rounds").glob("[0-9]*"):
            if int(folder.name) < self.rounds.kept_since:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                # Files of members that are gone are removed immediately, unless they are counted.
                outer_step = int(folder.name)
                needed = set[Path]()
                if outer_step >= self.rounds.next:
                    needed = self.rounds.needed_parts(outer_step)
                for part in folder.glob("*.part*"):
                    if part.with_name(part.name.removesuffix(COMING)) not in needed:
                        part.unlink(missing_ok=True)

    def average_path(self, outer_step: int) -> Path:
        """File of the average of an outer step.

        Raises:
            Refusal: it is not committed, or not kept any more.
        """
        answer = self.rounds.answer(outer_step)
        if answer.state != "committed":
            raise Refusal("early", f"round {outer_step} is {answer.state}, not committed")
        if not answer.is_kept:
            raise Refusal("gone", f"the average of round {outer_step} is not kept any more")
        return self.rounds.average_path(outer_step)

    def applied(self, applied: Applied) -> None:
        """A cluster has applied an average; a cluster whose weights differ from most must pull the
        state."""
        member, outer_step = self.caller(applied.id), applied.outer_step
        answer = self.rounds.answer(outer_step)
        if answer.state != "committed":
            raise Refusal("early", f"round {outer_step} is not committed")
        self.membership.reached(member["number"], outer_step + 1)
        fragment = outer_step % self.rounds.fragments
        if outer_step < self.rounds.first_known or (
            not answer.is_kept and self.verdicts.outer_params(fragment, outer_step + 1)
        ):
            return  # the reports of the others are deleted, and the right digest is known
        self.verdicts.report(member["number"], outer_step, applied.outer_params)
        self.states.settle(outer_step)


def differences(run: Join, own: Join) -> dict[str, tuple[str, str]]:
    """The forbidden differences from the settings of the run: for each key, both values."""
    there, here = {**run.identity, "codec": run.codec}, {**own.identity, "codec": own.codec}
    return {
        key: (there.get(key, "nothing"), here.get(key, "nothing"))
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    }


def status(core: HubCore) -> dict[str, Any]:
    """The answer to GET /v1/status, which `isles status` shows."""
    newest = "SELECT * FROM rounds WHERE state = 'committed' ORDER BY round DESC LIMIT ?"
    commits = [_commit(core, row) for row in core.journal.rows(newest, _COMMITS)]
    open_rounds = core.rounds.open_rounds()
    weights = commits[0]["weights"] if commits else {}
    heaviest = core.rounds.heaviest(core.rounds.next - 1, weights) if weights else None
    return {
        "round": core.rounds.next,
        "fragments": core.rounds.fragments,
        "is_over": core.membership.end_kind() == "over",
        "heavy": None
        if heaviest is None
        else {"name": ", ".join(heaviest[0]), "share": heaviest[1]},
        "members": [_member(core, row, weights, open_rounds) for row in core.membership.latest()],
        "open": [_open(core, answer) for answer in open_rounds],
        "commits": commits,
        "events": events(core),
    }


def live(core: HubCore) -> dict[str, Any]:
    """The answer to GET /v1/live, which `isles top` shows."""
    found = core.membership.shown().items()
    return {
        "members": {name: {"heard_s": round(s, 1), "record": text} for name, (s, text) in found}
    }


def events(core: HubCore) -> list[dict[str, Any]]:
    """The last events, oldest first; see `Journal.newest`."""
    sql = "SELECT number, at, member, kind, what FROM events WHERE number = ?"
    return [dict(row) for n in core.journal.newest(_EVENTS) for row in core.journal.rows(sql, n)]


def _member(
    core: HubCore, row: sqlite3.Row, weights: dict[str, int], open_rounds: list[RoundAnswer]
) -> dict[str, Any]:
    name, number = row["name"], row["number"]
    nothing = Heartbeat(id="0" * 32, step=0, version=row["version"])
    heartbeat = core.membership.heartbeats.get(number, nothing)
    late = [answer.outer_step for answer in open_rounds if name in answer.waits_for]
    state = row["state"]
    if state == "left" and (row["has_finished"] or row["command"] == LOST):
        state = "finished" if row["has_finished"] else "dropped"
    return {
        **heartbeat.model_dump(exclude={"id", "has", "ends"}),
        "name": name,
        "state": state,
        "is_behind": bool(row["is_behind"]),
        "heard_s": round(core.membership.last_seen_s(number), 1),
        "weight": weights[name] / sum(weights.values()) if name in weights else 0.0,
        "refused": row["refusal"],
        "slow": _why(core, row, min(late)) if late else "",
    }


def _open(core: HubCore, answer: RoundAnswer) -> dict[str, Any]:
    missing = [row for row in core.membership.latest() if row["name"] in answer.waits_for]
    return {
        "round": answer.outer_step,
        "since_s": round(core.rounds.open_for_s(answer.outer_step), 1),
        "due_in_s": answer.due_in_s,
        "contributed": answer.contributed,
        "waits_for": answer.waits_for,
        "missing": {row["name"]: _why(core, row, answer.outer_step) for row in missing},
    }


def _commit(core: HubCore, row: sqlite3.Row) -> dict[str, Any]:
    answer = core.rounds.answer(row["round"])
    return {
        "round": row["round"],
        "at": row["committed_at"],
        "seconds": round(row["seconds"], 3),
        "weights": answer.weights,
        "refused": answer.refused,
        "size_bytes": row["size"],
    }


def _why(core: HubCore, row: sqlite3.Row, outer_step: int) -> str:
    # Why a round still waits for a cluster.
    number = row["number"]
    silent_s, still_s = core.membership.last_seen_s(number), core.membership.still_s(number)
    heartbeat = core.membership.heartbeats.get(number)
    if row["is_behind"]:
        return f"copying the state of another cluster ({row['command_reason']})"
    if silent_s > _QUIET_S:
        return f"no heartbeat for {format_duration(silent_s)}"
    if share := _arrived(core, outer_step, number):
        return f"sending its contribution ({share:.0%} received)"
    if heartbeat is None:
        return ""
    phase = heartbeat.phase
    if still_s > max(_QUIET_S, core.settings.still_after_s / 10):
        return f"no inner step for {format_duration(still_s)} (phase: {phase or 'unknown'})"
    speed = f", {heartbeat.tokens_per_s:,.0f} tokens/s" if heartbeat.tokens_per_s else ""
    return f"{phase or 'training'}: {heartbeat.since} inner steps since its last round{speed}"


def _arrived(core: HubCore, outer_step: int, number: int) -> float:
    # Received fraction of a contribution.
    try:
        found = coming(core.rounds.part_path(outer_step, number)).stat()
    except OSError:
        return 0.0
    return min(1.0, 512 * found.st_blocks / max(1, found.st_size))
