"""Whole states, and averages that others have missed, on their way to and from this cluster."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable

from isles.errors import CommunicationError
from isles.outer.client.client import Client
from isles.outer.client.http import RendezvousRefusal
from isles.outer.link.messages import Donate, Event, GiveState, Note, StateReady
from isles.outer.messages import StateAnswer
from isles.outer.side.engine import patiently
from isles.outer.side.faults import NotLetInError, RejoinError
from isles.outer.side.spool import Spool

log = logging.getLogger(__name__)

_DEADLINE_S = 60.0
_WHOLE_S = 24 * 3600.0
_ASK_AGAIN_S = 60.0


class States:
    """Gives states and averages where it is asked to, and pulls a state where it must.

    Args:
        group: where its tasks run.
        client: for data.
        spool: where files lie.
        emit: tells rank 0.
    """

    def __init__(
        self,
        group: asyncio.TaskGroup,
        client: Client,
        spool: Spool,
        emit: Callable[[Event], None],
    ) -> None:
        self._group, self._client, self._spool, self._emit = group, client, spool, emit
        self._giving: asyncio.Task[None] | None = None
        self._lending: asyncio.Task[None] | None = None
        self._asked_at = -_ASK_AGAIN_S

    def ask(self) -> None:
        """Another cluster needs the state: have rank 0 write it, if that is not under way."""
        now = asyncio.get_running_loop().time()
        is_busy = self._giving is not None and not self._giving.done()
        if not is_busy and now - self._asked_at >= _ASK_AGAIN_S:
            self._asked_at = now
            self._emit(Donate())

    def give(self, state: GiveState) -> None:
        """Rank 0 has written the state."""
        if self._giving is None or self._giving.done():
            self._giving = self._group.create_task(self._give(state))

    async def _give(self, state: GiveState) -> None:
        try:
            await patiently(
                lambda: self._client.give_state(
                    state.version, list(state.outer_params), list(state.paths), _WHOLE_S
                )
            )
        except RendezvousRefusal as error:
            if error.kind == "unknown":
                raise RejoinError(error.what) from error
            text = f"the state given to another cluster was refused: {error.what}"
            log.info("%s", text)
            self._emit(Note(text=text))
        self._asked_at = -_ASK_AGAIN_S

    def lend(self, turn: int) -> None:
        """Another cluster has missed a turn: upload its average, if it still lies here."""
        path = self._spool.average(turn)
        if path.exists() and (self._lending is None or self._lending.done()):
            self._lending = self._group.create_task(self._lend(turn))

    async def _lend(self, turn: int) -> None:
        path = self._spool.average(turn)
        try:
            await patiently(lambda: self._client.give_average(turn, path, _WHOLE_S))
        except (RendezvousRefusal, FileNotFoundError) as error:
            log.info("the average of turn %d is not given: %s", turn, error)

    async def pull(self) -> None:
        """Fetch another cluster's state, for as long as it takes, and tell rank 0 of it.

        Raises:
            RejoinError, NotLetInError: see there.
        """
        while True:
            try:
                answer = await self._client.pull_state(self._spool.pulled, _DEADLINE_S)
            except RendezvousRefusal as error:
                if error.kind == "unknown":
                    raise RejoinError(error.what) from error
                if error.kind == "over":
                    raise NotLetInError(error) from error
                self._warn(error.what)
                await asyncio.sleep(1.0)
            except CommunicationError as error:
                self._warn(error.what)
            else:
                self._emit(self._ready(answer))
                return

    def _warn(self, text: str) -> None:
        log.warning("%s", text)
        self._emit(Note(text=text, is_warning=True))

    def _ready(self, answer: StateAnswer) -> StateReady:
        return StateReady(
            version=answer.version,
            paths=tuple(self._spool.pulled / file.name for file in answer.files),
            outer_params=tuple(answer.outer_params),
            donor=answer.donor,
        )

    def forget_pulled(self) -> None:
        """A state was taken over: its files are not needed any more."""
        shutil.rmtree(self._spool.pulled, ignore_errors=True)
