"""The rendezvous within the side process of the cluster that hosts it, and its copies."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from isles.outer.hivemind.copies import Copier, Copy, Lineage
from isles.outer.hivemind.keys import Keys
from isles.outer.hub.app import make_server
from isles.outer.hub.settings import Settings

log = logging.getLogger(__name__)

_EPOCHS = 10**6


class Host:
    """A rendezvous that listens on this machine's loopback only; others come through a peer.

    Args:
        folder: for its state; what was there is removed.
        keys: of the run.
        rules: of the run; see `Settings`.
        run: name of the run.
    """

    def __init__(
        self, folder: Path, keys: Keys, rules: dict[str, str | int | float], run: str
    ) -> None:
        self._folder, self._keys, self._run = folder, keys, run
        self._settings = Settings.model_validate(rules)
        self._turns: dict[str, int] = {}
        self._told = asyncio.Event()
        self.port = 0
        self.is_open = False
        """Whether others may come: a first cluster has joined, whose weights are the run's."""

    async def start(self, copy: Copy | None, term: int, me: str, living: Collection[str]) -> None:
        """Go on where a copy of the book ends, or begin a run.

        Args:
            copy: the newest that any living cluster has.
            term: larger than any before.
            me: this peer.
            living: names of the clusters that are reached.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keys.write_identity(self._folder)
        lineage: Lineage = [(term, me, 0)]
        if copy is not None:
            copy.unpack(self._folder)
            lineage = [*copy.lineage, (term, me, copy.changes + 1)]
            self.is_open = True
        self._server = make_server(self._folder, self._settings)
        core = self._server.core
        await self._server.ask(self._take_over, term, living)
        line = await self._server.start("127.0.0.1", 0, self._run)
        self.port = line.port
        self._copier = Copier(core.folder / "rendezvous.sqlite", lineage)

    def _take_over(self, term: int, living: Collection[str]) -> None:
        """What differs from a rendezvous that was only started again."""
        core = self._server.core
        # Numbers of epochs that the former host gave and no copy knows of must not come again.
        core.book.put("epoch", str(max(term * _EPOCHS, int(core.book.get("epoch") or 0))))
        for row in core.membership.living():
            if row["name"] not in living:
                core.membership.drop(
                    row, "the cluster that hosts the rendezvous now does not reach it"
                )
        # Files of the former host are gone: members give averages, and contribute again.
        core.book.run("UPDATE turns SET kept = 0, is_direct = 1 WHERE state = 'committed'")
        core.book.run("DELETE FROM turns WHERE state != 'committed'")
        core.book.run("DELETE FROM parts WHERE turn >= ?", core.turns.next)
        core.book.run(
            "UPDATE samples SET state = 'claimed', turn = NULL WHERE state = 'contributed'"
        )
        core.book.note("", "hosted", json.dumps({"term": term, "living": sorted(living)}))

    @property
    def ticking(self) -> asyncio.Task[None]:
        """Ends only where the rendezvous has failed."""
        return self._server.ticking

    async def copy(self) -> Copy:
        """The book as it is now."""
        return await self._server.look(self._copier.take)

    def has_copy(self, peer: str, turn: int) -> None:
        """A cluster's own copy says that this turn is next."""
        if self._turns.get(peer, -1) < turn:
            self._turns[peer] = turn
            self._told.set()
            self._told = asyncio.Event()

    async def all_have(self, turn: int, peers: Iterable[str], deadline_s: float) -> None:
        """Wait until the copies of all these know of a turn; for so long at most."""
        wanted = set(peers)
        try:
            async with asyncio.timeout(deadline_s):
                while any(self._turns.get(peer, -1) < turn for peer in wanted):
                    await self._told.wait()
        except TimeoutError:
            slow = sorted(peer[-8:] for peer in wanted if self._turns.get(peer, -1) < turn)
            log.warning("no copy with turn %d at %s in %.0f s", turn, slow, deadline_s)

    async def stop(self) -> None:
        """Let nobody in any more."""
        self.is_open = False
        self._copier.close()
        await self._server.stop()
