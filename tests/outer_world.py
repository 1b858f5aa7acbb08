"""A hub without network, and with a clock that the test turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from isles.outer.hub.core import HubCore, events
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.messages import (
    Applied,
    Contribution,
    Heartbeat,
    HeartbeatAnswer,
    Join,
    JoinAnswer,
    LeaseRequest,
    LeaveRun,
    RoundAnswer,
    StateAnswer,
    StateFile,
    StateOffer,
)
from isles.outer.samples import Interval

ZERO = "0" * 64


class World:
    """A hub on a folder, and a clock; these have joined (a letter is a name)."""

    def __init__(self, folder: Path, names: str = "", fragments: int = 1, **rules: object) -> None:
        self.now = 0.0
        self.folder = folder
        self.fragments = fragments
        self.settings = Settings.model_validate(rules)
        self.core = self._open()
        for name in names:
            self.join(name)

    def _open(self) -> HubCore:
        return HubCore(self.folder, self.settings, lambda: self.now)

    def restart(self) -> None:
        """As after kill -9: only what is on the disk is left."""
        self.core.journal.close()
        self.core = self._open()

    @property
    def do(self):
        """Calls a method as the hub does, in one transaction."""
        return self.core.journal.do

    # What clusters ask.

    def join(self, own: str, **more: Any) -> JoinAnswer:
        """A cluster joins; one digest stands for those of all fragments."""
        if isinstance(digest := more.get("outer_params"), str):
            more["outer_params"] = [digest] * self.fragments
        return self.do(self.core.join, joining(own, self.fragments, **more))

    def heartbeat(
        self, name: str, step: int = 0, version: int = 0, has: int = 0, **more: Any
    ) -> HeartbeatAnswer:
        heartbeat = Heartbeat(id=member_id(name), step=step, version=version, has=has, **more)
        return self.do(self.core.heartbeat, heartbeat)

    def end(self, name: str) -> int | None:
        """A cluster has nothing left to contribute: after how many turns all end, if they do."""
        return self.heartbeat(name, version=self.core.rounds.next, ends=True).ended

    def lease(self, name: str, number: int, samples: int) -> list[Interval]:
        body = LeaseRequest(id=member_id(name), number=number, samples=samples)
        return list(self.do(self.core.lease, body).samples)

    def complete(
        self,
        names: Iterable[str],
        outer_step: int,
        samples: Iterable[Interval] = (),
        tokens: int = 10,
        norm: float = 1.0,
        failure: str = "",
    ) -> None:
        """A contribution has come, of each of these."""
        values = {"tokens": tokens, "steps": 1, "samples": list(samples), "digest": ZERO}
        for name in names:
            body = Contribution.model_validate({"id": member_id(name), **values})
            self.do(self.core.complete, outer_step, body, norm, failure)

    def applied(self, name: str, outer_step: int, outer_params: str) -> None:
        body = Applied(id=member_id(name), outer_step=outer_step, outer_params=outer_params)
        self.do(self.core.applied, body)

    def held(self, name: str, outer_step: int) -> bool:
        return self.do(self.core.held, member_id(name), outer_step)

    def leave(self, name: str, *, has_finished: bool = False) -> None:
        self.do(self.core.leave, LeaveRun(id=member_id(name), has_finished=has_finished))

    def want_state(self, name: str) -> StateAnswer:
        return self.do(lambda: self.core.states.want(self.core.caller(member_id(name))))

    def offer_state(
        self, name: str, version: int, outer_params: str, size_bytes: int = 10, files: int = 1
    ) -> int:
        """Begin to upload a state; its number."""
        each = [
            StateFile(name=f"f{n}.safetensors", size_bytes=size_bytes, digest=ZERO)
            for n in range(files)
        ]
        offer = StateOffer(
            id=member_id(name), version=version, outer_params=[outer_params], files=each
        )
        number = self.do(lambda: self.core.states.offer(self.core.caller(offer.id), offer))
        self.do(self.core.sweep)
        return number

    # What the hub does by itself.

    def close(self) -> list[str] | None:
        """Who takes part in the turn that is closed now, and commit it; None: it waits."""
        job = self.do(self.core.rounds.close)
        if job is None:
            return None
        average = (ZERO, 16) if job.parts else ("", 0)
        self.do(self.core.commit, job.outer_step, *average)
        self.do(self.core.sweep)
        return sorted(self.answer(job.outer_step).weights)

    def turn(self, names: str, outer_step: int) -> list[str] | None:
        """These contribute; who takes part in the turn if it is closed then."""
        self.complete(names, outer_step)
        return self.close()

    def turns(self, names: str, *outer_steps: int) -> None:
        """All of these contribute to each of these turns, and apply its average."""
        for outer_step in outer_steps:
            assert self.turn(names, outer_step) == list(names)
            for name in names:
                self.applied(name, outer_step, after(outer_step))

    def drop_silent(self) -> None:
        self.do(self.core.membership.drop_silent)

    def drop(self, name: str, *, for_long: bool = False) -> None:
        """Only this one is not heard; for so long that its samples are leased to others, or not."""
        for seconds in (11.0, 300.0) if for_long else (11.0,):
            self.now += seconds
            for row in self.core.membership.living():
                if row["name"] != name:
                    self.core.membership.touch(row["number"])
            self.drop_silent()

    # What it knows.

    def answer(self, outer_step: int) -> RoundAnswer:
        return self.core.rounds.answer(outer_step)

    def number(self, name: str) -> int:
        """A member's number, also of one that has left."""
        sql = "SELECT number FROM members WHERE id = ?"
        return self.core.journal.number(sql, member_id(name))

    def events(self, kind: str) -> list[str]:
        return [f"{e['member']}: {e['what']}" for e in events(self.core) if e["kind"] == kind]


def refused(ask: Callable[..., object], *given: Any, **more: Any) -> Refusal:
    """With what the hub refuses this."""
    with pytest.raises(Refusal) as caught:
        ask(*given, **more)
    return caught.value


def joining(own: str, fragments: int = 1, **more: object) -> Join:
    """How a cluster asks to take part."""
    values = {"id": member_id(own), "name": own, "identity": {"layout": "a"}, "codec": "none"}
    values |= {"pieces": [[4]] * fragments, "version": 0, "outer_params": [ZERO] * fragments}
    return Join.model_validate({**values, **more})


def member_id(name: str) -> str:
    return name.encode().hex().rjust(32, "0")


def after(outer_step: int) -> str:
    """The digest of outer parameters after a turn."""
    return f"{outer_step + 1:064x}"


def participants(journal: Journal) -> list[list[int]]:
    """The numbers of the members that were averaged, by round."""
    found: dict[int, list[int]] = {}
    for row in journal.rows("SELECT * FROM parts WHERE reason = '' ORDER BY round, member"):
        found.setdefault(row["round"], []).append(row["member"])
    return list(found.values())


def overlaps(journal: Journal) -> list[str]:
    """What is wrong with the blocks of samples: a gap, an overlap."""
    found, end = [], 0
    for row in journal.rows("SELECT * FROM blocks ORDER BY start"):
        if row["start"] != end:
            found.append(f"block {row['start']} to {row['stop']} begins where {end} was due")
        end = row["stop"]
    return found
