"""A hub without network, and with a clock that the test turns."""

from __future__ import annotations

from pathlib import Path

from isles.outer.hub.core import Core
from isles.outer.hub.files import Average
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Settings
from isles.outer.hub.status import events
from isles.outer.messages import Applied, Contribution, Heartbeat, Join, LeaseRequest

ZERO = "0" * 64


class World:
    """A hub on a folder, and a clock."""

    def __init__(self, folder: Path, fragments: int = 1, **rules: object) -> None:
        self.now = 0.0
        self.folder = folder
        self.fragments = fragments
        self.settings = Settings.model_validate(rules)
        self.core = self._open()

    def _open(self) -> Core:
        return Core(self.folder, self.settings, lambda: self.now)

    def restart(self) -> None:
        """As after kill -9: only what is on the disk is left."""
        self.core.journal.close()
        self.core = self._open()

    def join(
        self,
        name: str,
        version: int = 0,
        outer_params: str | list[str] = ZERO,
        called: str = "",
        **more: object,
    ):
        values = {
            "id": member_id(name),
            "name": called or name,
            "identity": {"layout": "a"},
            "codec": "none",
            "pieces": [[4]] * self.fragments,
            "version": version,
            "outer_params": [outer_params] * self.fragments
            if isinstance(outer_params, str)
            else outer_params,
        }
        join = Join.model_validate({**values, **more})
        return self.core.join(join, [4 * sum(pieces) for pieces in join.pieces])

    def heartbeat(self, name: str, step: int = 0, version: int = 0, has: int = 0, **more: bool):
        heartbeat = Heartbeat(id=member_id(name), step=step, version=version, has=has, **more)
        return self.core.heartbeat(heartbeat)

    def end(self, name: str) -> int | None:
        """A cluster has nothing left to contribute: after how many turns all end, if they do."""
        return self.heartbeat(name, version=self.core.rounds.next, ends=True).ended

    def lease(self, name: str, number: int, samples: int) -> list[tuple[int, int]]:
        body = LeaseRequest(id=member_id(name), number=number, samples=samples)
        return list(self.core.lease(body).samples)

    def complete(
        self,
        name: str,
        outer_step: int,
        samples=(),
        tokens: int = 10,
        norm: float = 1.0,
        failure="",
    ) -> None:
        body = Contribution(
            id=member_id(name),
            tokens=tokens,
            steps=1,
            samples=list(samples),
            digest=ZERO,
        )
        self.core.complete(outer_step, body, norm, failure)

    def close(self) -> list[str] | None:
        """Who takes part in the turn that is closed now, and commit it; None: it waits."""
        job = self.core.close_round()
        if job is None:
            return None
        self.core.commit(job.outer_step, Average(ZERO, 16) if job.parts else Average("", 0))
        return sorted(self.core.answer(job.outer_step).weights)

    def applied(self, name: str, outer_step: int, outer_params: str) -> None:
        self.core.applied(
            Applied(id=member_id(name), outer_step=outer_step, outer_params=outer_params)
        )

    def events(self, kind: str) -> list[str]:
        return [f"{e['member']}: {e['what']}" for e in events(self.core, 0) if e["kind"] == kind]


def member_id(name: str) -> str:
    return name.encode().hex().rjust(32, "0")


def overlaps(journal: Journal) -> list[str]:
    """What is wrong with the blocks of samples: a gap, an overlap."""
    found, end = [], 0
    for row in journal.rows("SELECT * FROM blocks ORDER BY start"):
        if row["start"] != end:
            found.append(f"block {row['start']} to {row['stop']} begins where {end} was due")
        end = row["stop"]
    return found
