"""The hub within the cluster that was elected to host it; others come through a peer."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from isles.outer.hivemind.keys import Keys
from isles.outer.hub.files import chunk_list
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import Server
from isles.outer.messages import TurnAnswer, hash_chunks

_LOOK_S = 0.2


class Host:
    """An ordinary hub that listens on this machine's loopback only.

    It begins without a journal: with the turns whose averages this cluster has kept, and with what
    the clusters say that they hold.

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
        self.port = 0
        self.is_open = False
        """Whether others may come: this cluster has joined, so that its weights are the run's."""

    async def start(self, kept: Sequence[tuple[TurnAnswer, str, Path]]) -> None:
        """Begin a run, or go on with one; `kept` as in `Spool.kept_turns`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keys.write_identity(self._folder)
        self._server = Server(self._folder, self._settings)
        core = self._server.work.core
        for answer, _, path in kept:
            await asyncio.to_thread(_copy_average, path, core.turns.average_path(answer.turn))
        await self._server.work.ask(core.seed, [(answer, digest) for answer, digest, _ in kept])
        self.port = (await self._server.start("127.0.0.1", 0, self._run)).port

    def check(self) -> None:
        """Raise what has ended the hub, if it has ended."""
        if self._server.work.ticking.done():
            self._server.work.ticking.result()

    async def stop(self, wait_s: float) -> None:
        """Let nobody in any more, once all others have left; they have so many seconds."""
        work, end = self._server.work, time.monotonic() + wait_s
        while await work.look(work.core.membership.living) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        self.is_open = False
        await self._server.stop()


def _copy_average(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    chunk_list(target).write_text("".join(f"{sha256}\n" for sha256 in hash_chunks(target)))
