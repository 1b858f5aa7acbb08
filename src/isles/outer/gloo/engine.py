"""Engine gloo: clusters that reach one another average directly, epoch by epoch."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from isles.errors import CommunicationError, UserError
from isles.outer.client.blobs import digest_of, hash_chunks
from isles.outer.client.client import Client
from isles.outer.client.http import RendezvousRefusal
from isles.outer.client.rate_limit import RateLimit
from isles.outer.gloo.attempt import Attempt, Made
from isles.outer.gloo.average import UnsoundPartError, average_among, make_plan
from isles.outer.gloo.group import Group
from isles.outer.gloo.reach import UnreachableError, call_each_other
from isles.outer.gloo.store import EpochStore
from isles.outer.link.messages import Contribute, Member
from isles.outer.link.settings import LinkSettings
from isles.outer.messages import EpochAnswer, Prepared, Ready
from isles.outer.side.engine import Exchange, Traffic, patiently
from isles.outer.side.spool import Spool
from isles.run.join_line import JoinLine

log = logging.getLogger(__name__)

_DEADLINE_S = 60.0
_CALL_S = 10.0
_LET_GO_S, _MOST_STUCK = 1.0, 4
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 10.0
_STUCK = 71


class GlooExchange:
    """Waits for an epoch, averages with its members, and has the turn committed.

    Whatever goes wrong, the contribution stays as it is, and is brought into the next epoch. Where
    clusters do not get together the rendezvous says so, and the turn goes through it.

    Args:
        client: for what is said to the rendezvous.
        relay: for turns that go through it.
        member: this cluster.
        settings: interface, time limit, rate.
        spool: where the average is to lie.
        warn: is told what went wrong.
    """

    def __init__(
        self,
        client: Client,
        relay: Exchange,
        member: Member,
        settings: LinkSettings,
        spool: Spool,
        warn: Callable[[str], None],
    ) -> None:
        self._client, self._relay = client, relay
        self._member, self._settings = member, settings
        self._spool, self._warn = spool, warn
        self._limit = RateLimit(settings.up_bytes_per_s, time.monotonic)
        self._stuck: list[Attempt] = []
        self._attempt: Attempt | None = None
        self._moved = (0, 0)
        self._relayed_why = ""
        self._address = _own_address(client.channel.line)

    @property
    def moved(self) -> tuple[int, int]:
        """See `Exchange`."""
        group = None if self._attempt is None else self._attempt.group
        sent, received = (0, 0) if group is None else (group.sent_bytes, group.received_bytes)
        return self._moved[0] + sent, self._moved[1] + received

    async def take_part(self, part: Contribute) -> Traffic:
        """See `Exchange`."""
        ready = Ready(
            id=self._client.id,
            tokens=part.tokens,
            steps=part.inner_steps,
            samples=list(part.samples),
            norm=part.norm,
        )
        pause_s = _FIRST_PAUSE_S
        total = Traffic(0, 0, 0.0)
        while True:
            answer = await patiently(lambda: self._client.ready(part.turn, ready, _DEADLINE_S))
            if answer.state == "committed":
                await asyncio.to_thread(self._spool.take_over, part.turn, answer.digest)
                return total
            if answer.state == "relayed":
                self._tell_relayed(answer.why)
                return total + await self._relay.take_part(part)
            if answer.state == "waiting":
                continue
            is_done, traffic = await self._take_part_once(part, answer)
            total = total + traffic
            if is_done:
                return total
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _tell_relayed(self, why: str) -> None:
        """Say once why turns take another way than the run file says."""
        if why == self._relayed_why:
            return
        self._relayed_why = why
        self._warn(
            f"averages go through the rendezvous, for ten minutes at least: {why}. `engine: gloo` "
            "needs clusters that reach one another on all TCP ports: open them, or name the VPN's "
            "interface in outer.interface; `engine: hub` needs none"
        )

    async def _take_part_once(self, part: Contribute, epoch: EpochAnswer) -> tuple[bool, Traffic]:
        """One epoch: whether it has led to a commit, and what it has cost."""
        started = time.monotonic()
        loop = asyncio.get_running_loop()
        self._attempt = attempt = Attempt(partial(self._average, loop, epoch, part))
        ending = asyncio.create_task(self._watch(epoch.epoch))
        is_done, fault = False, None
        try:
            waits: set[asyncio.Future[Any]] = {attempt.result, ending}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if attempt.result.done():
                is_done = await self._prepare(part.turn, epoch.epoch, attempt.result.result())
            else:
                ending.result()
        except (UserError, RuntimeError, OSError, ValueError) as error:
            fault = error
        finally:
            ending.cancel()
            self._moved, self._attempt = self.moved, None
            await self._let_go(attempt)
            if not is_done:
                self._spool.attempt(part.turn, epoch.epoch).unlink(missing_ok=True)
        if fault is not None:
            await self._fail(epoch, fault)
        group = attempt.group
        sent, received = (group.sent_bytes, group.received_bytes) if group else (0, 0)
        return is_done, Traffic(sent, received, time.monotonic() - started)

    async def _watch(self, epoch: int) -> None:
        """Wait until the rendezvous says that an epoch is over.

        Raises:
            RendezvousRefusal: it is.
        """
        while True:
            await patiently(lambda: self._client.get_value(epoch, "over", _DEADLINE_S))

    async def _prepare(self, turn: int, epoch: int, made: Made) -> bool:
        """Say that the average is here, until all have it.

        Raises:
            RendezvousRefusal: it is void.
        """
        prepared = Prepared(
            id=self._client.id, turn=turn, digest=made.digest, size_bytes=made.size_bytes
        )
        while True:
            answer = await patiently(lambda: self._client.prepared(epoch, prepared, _DEADLINE_S))
            if answer.state == "committed":
                if answer.digest == made.digest:
                    self._spool.attempt(turn, epoch).replace(self._spool.average(turn))
                return True

    async def _fail(self, epoch: EpochAnswer, error: Exception) -> None:
        """Tell the others that this attempt came to nothing, if they do not know."""
        if isinstance(error, RendezvousRefusal) and error.kind == "epoch":
            return
        text = error.what if isinstance(error, UserError) else str(error)
        what = (text or type(error).__name__).splitlines()[0]
        culprit = error.rank if isinstance(error, UnsoundPartError) else None
        if culprit is not None:
            what = f"the contribution of {epoch.members[culprit]} is unsound: {what}"
        apart = error.pairs if isinstance(error, UnreachableError) else []
        others = ", ".join(name for name in epoch.members if name != self._member.name)
        if not apart:  # else the rendezvous tells all
            self._warn(f"averaging with {others} has failed, and is tried again: {what}")
        await patiently(
            lambda: self._client.epoch_failed(epoch.epoch, what, _DEADLINE_S, culprit, apart)
        )

    async def _let_go(self, attempt: Attempt) -> None:
        """Have the attempt's thread end, now or when its time is over.

        Where gloo does not let too many go, this process ends, and another is started.
        """
        self._stuck = [other for other in self._stuck if other.is_alive]
        if not await attempt.abandon(_LET_GO_S):
            self._stuck.append(attempt)
        if len(self._stuck) > _MOST_STUCK:
            sys.stderr.write(f"gloo does not let go of {len(self._stuck)} threads\n")
            sys.stderr.flush()
            os._exit(_STUCK)

    async def close(self) -> None:
        """See `Exchange`."""

    def _average(
        self,
        loop: asyncio.AbstractEventLoop,
        epoch: EpochAnswer,
        part: Contribute,
        attempt: Attempt,
    ) -> Made:
        """Average with the members of an epoch; in a thread."""
        fragment = part.turn % len(self._member.pieces)
        counts = self._member.pieces[fragment]
        plan = make_plan(self._member.codec, counts, len(epoch.members))
        size_bytes = part.path.stat().st_size
        if size_bytes != plan.starts[-1]:
            raise CommunicationError(
                f"the contribution has {size_bytes} bytes, its pieces {plan.starts[-1]}",
                where=str(part.path),
                fix="look whether the disk is full",
            )
        group = attempt.hold(self._make_group(loop, epoch))
        group.compare(
            {
                "epoch": epoch.epoch,
                "turn": part.turn,
                "fragment": fragment,
                "size": size_bytes,
                "codec": self._member.codec,
                "pieces": hashlib.sha256(str(counts).encode()).hexdigest()[:16],
                "weights": str(epoch.tokens),
            }
        )
        target = self._spool.attempt(part.turn, epoch.epoch)
        average_among(group, plan, epoch.tokens, part.path, target)
        return Made(digest_of(hash_chunks(target)), target.stat().st_size)

    def _make_group(self, loop: asyncio.AbstractEventLoop, epoch: EpochAnswer) -> Group:
        timeout_s = self._settings.timeout_s
        store = EpochStore(self._client, loop, epoch.epoch, timeout_s)
        place = self._settings.interface or self._address
        if len(epoch.members) > 1 and not epoch.have_met:
            call_each_other(store, epoch.rank, epoch.members, place, _CALL_S)
        return Group(store, epoch.rank, epoch.members, place, timeout_s, self._pace)

    def _pace(self, num_bytes: int) -> None:
        delay_s = self._limit.delay(num_bytes)
        if delay_s:
            time.sleep(delay_s)


def _own_address(line: JoinLine) -> str:
    """The address from which this host speaks to the rendezvous.

    A host's own name often means an address of its loopback, where no other cluster gets through.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(
            line.host, line.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""
