"""One cluster among its peers: finds them, elects the host of the hub, and hosts it if elected."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from isles.errors import CommunicationError
from isles.outer.client.api import HubApi, HubMeeting
from isles.outer.client.meeting import ClientState, Meeting
from isles.outer.client.spool import Spool
from isles.outer.hivemind import HivemindSettings
from isles.outer.hivemind.dht import Body, Keys, PeerError, Peers, Reader, Tunnel, Writer
from isles.outer.hub.files import chunk_list
from isles.outer.hub.rules import Settings
from isles.outer.hub.server import Server
from isles.outer.messages import RoundAnswer, hash_chunks
from isles.run.records import (
    MAX_LIST_BYTES,
    read_record,
    write_record,
    write_secret,
    write_text_atomic,
)

log = logging.getLogger(__name__)

_ASK_S, _LOOK_S = 2.0, 0.2
_FIND_EVERY_S, _FIND_OFTEN_S = 20.0, 2.0
_LISTEN_S = 3.0
_RETRY_S = 5.0
_EMPTY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A cluster's periodic message about itself.

    Args:
        term: number of the host that it follows; each new host has a higher number.
        host: the peer that it follows; itself if it hosts; empty: no peer.
        has: number of outer steps that it has applied, or can apply with its averages.
    """

    name: str
    term: int = 0
    host: str = ""
    has: int = 0


def choose(
    me: str, own: Hello, others: Mapping[str, Hello], *, at_least: int, has_listened: bool
) -> str:
    """Choose the peer to follow; this peer itself: host; empty: wait. Needs no clocks.

    No average is applied before all living clusters have it. So the cluster with the most averages
    can continue the run. After a network split, two clusters may host for a while; the one with the
    shorter history steps down.

    Args:
        others: recent messages, by peer.
        at_least: number of clusters, this one included, that must be known before one hosts.
        has_listened: whether this cluster has listened long enough to know of an existing host.
    """
    everybody = {me: own, **others}
    hosts = {peer for peer, hello in everybody.items() if hello.host == peer}
    if hosts:
        first = max(hosts, key=lambda peer: (everybody[peer].has, everybody[peer].term, peer))
        return own.host if own.host in hosts and own.host != me else first
    if not has_listened or len(everybody) < at_least:
        return ""
    first = max(everybody, key=lambda peer: (everybody[peer].has, peer))
    return me if first == me else ""


class HubHost:
    """An ordinary hub that listens only on this machine's loopback interface.

    It starts without a journal: with the averages that this cluster has kept, and with reports of
    the clusters about their averages.

    Args:
        folder: for its state; existing files are removed.
    """

    def __init__(
        self, folder: Path, keys: Keys, rules: dict[str, str | int | float], run: str
    ) -> None:
        self._folder, self._keys, self._run = folder, keys, run
        self._settings = Settings.model_validate(rules)
        self.port = 0
        self.is_open = False
        """True if others may connect: this cluster has joined, so its weights are the run's."""

    async def start(self, kept: Sequence[tuple[RoundAnswer, str, Path]]) -> None:
        """Start a run, or continue one; `kept` as in `Spool.kept_rounds`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._keys.write_identity(self._folder)
        self._server = Server(self._folder, self._settings)
        core = self._server.work.core
        for answer, _, path in kept:
            await asyncio.to_thread(
                _copy_average, path, core.rounds.average_path(answer.outer_step)
            )
        await self._server.work.ask(core.seed, [(answer, digest) for answer, digest, _ in kept])
        self.port = (await self._server.start("127.0.0.1", 0, self._run)).port

    def check(self) -> None:
        """Raise the error that has ended the hub, if any."""
        if self._server.work.ticking.done():
            self._server.work.ticking.result()

    async def stop(self, wait_s: float) -> None:
        """Refuse new connections, and stop when all others have left, within `wait_s` seconds."""
        work, end = self._server.work, time.monotonic() + wait_s
        while await work.ask(work.core.membership.living) and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
        self.is_open = False
        await self._server.stop()


def _copy_average(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    chunk_list(target).write_text("".join(f"{sha256}\n" for sha256 in hash_chunks(target)))


class Node:
    """Keeps a path to the hub open, wherever it is: a port on this machine's loopback interface."""

    def __init__(
        self,
        settings: HivemindSettings,
        name: str,
        folder: Path,
        spool: Spool,
        report: Callable[..., None],
    ) -> None:
        self._settings, self._name, self._folder = settings, name, folder
        self._spool, self._report = spool, report
        secret = settings.secret_file
        self._keys = Keys.read(settings.run, None if secret is None else Path(secret))
        folder.mkdir(mode=0o700, exist_ok=True)
        self._dead_after_s = float(settings.rules.get("dead_after_s", 10.0))
        self._at_least = int(settings.rules.get("min_clusters", 1))
        self._known: dict[str, list[str]] = read_record(folder / "peers.json", MAX_LIST_BYTES) or {}
        self._last_seen: dict[str, tuple[float, Hello]] = {}
        self._host: HubHost | None = None
        self._following = ""
        self._term = 0
        self._must_host = False
        self._reported = ""
        self._tunnel = Tunnel(self._connect)
        self._task: asyncio.Task[None] | None = None
        self.peers = Peers(settings, self._keys, folder, [], {})

    async def listen(self) -> Path:
        """Start to listen on the loopback interface; returns the join line that leads there."""
        path = self._folder / "line"
        write_secret(path, self._keys.line(await self._tunnel.open()).secret_text())
        return path

    def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def check(self) -> None:
        """Raise the error that has ended this node, or its hub; `begin` restarts it."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()
        if self._host is not None:
            self._host.check()

    async def close(self, *, waits: bool) -> None:
        """Close; with `waits` a hub on this node stays until the others have left it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            if self._host is not None:
                await self._host.stop(_EMPTY_S if waits else 0.0)
        await self.peers.close()

    # The way to the hub.

    async def _connect(self) -> tuple[Reader, Writer] | None:
        if self._host is not None:
            return await asyncio.open_connection("127.0.0.1", self._host.port)
        if not self._following:
            return None
        async with asyncio.timeout(_ASK_S):
            given = {"term": self._term}
            _, reader, writer = await self.peers.open(self._following, "tunnel", given)
        return reader, writer

    async def _let_in(self, peer: str, body: Body, reader: Reader, writer: Writer) -> None:
        host = self._host
        if host is not None and host.is_open and body.get("term") == self._term:
            near = await asyncio.open_connection("127.0.0.1", host.port)
            await self.peers.accept(writer, peer)
            await self._tunnel.join(reader, writer, *near)

    def has_joined(self) -> None:
        """Note that the hub has accepted this cluster: if the hub is here, others may connect."""
        self._must_host = False
        if self._host is not None:
            self._host.is_open = True

    def knows_more(self) -> None:
        """Note that the hub knows fewer outer steps than were applied here: it must move here."""
        self._must_host = True

    def explain(self, why: str) -> str:
        """Why the hub does not answer: the clusters that this one waits for, not the error
        itself."""
        return why if self._host is not None or self._following else self._reported or why

    # Finding the others.

    def _hello(self) -> Hello:
        is_host = self._host is not None and self._host.is_open
        return Hello(
            name=self._name,
            term=self._term,
            host=self.peers.id if is_host else self._following,
            has=self._spool.has,
        )

    def _others(self) -> dict[str, Hello]:
        since = time.monotonic() - self._dead_after_s
        return {peer: hello for peer, (at, hello) in self._last_seen.items() if at >= since}

    async def _run(self) -> None:
        await self._start()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._find())
            group.create_task(self._decide())

    async def _start(self) -> None:
        while True:
            known = [address for found in self._known.values() for address in found]
            await self.peers.close()
            handlers = {"hello": self._greet, "tunnel": self._let_in}
            self.peers = Peers(self._settings, self._keys, self._folder, known, handlers)
            try:
                await self.peers.start()
                break
            except CommunicationError as error:
                self._inform(f"{error.what}, trying again every {_RETRY_S:g} s ({error.fix})", True)
                await asyncio.sleep(_RETRY_S)
        is_first = not self._settings.initial_peers and not self._known
        self._listened_at = time.monotonic() + (0.0 if is_first else _LISTEN_S)
        lines = " ".join(self.peers.addresses)
        write_text_atomic(self._folder / "initial_peers", f"{lines}\n", durable=False)
        self._inform(f"hivemind: other clusters can reach this one with --initial_peers {lines}")

    def _inform(self, text: str, is_warning: bool = False) -> None:
        if text != self._reported:
            self._reported = text
            self._report(text, warns=is_warning)

    async def _find(self) -> None:
        while True:
            try:
                found = await self.peers.find()
            except Exception:  # an error of hivemind itself: the next look may succeed
                log.exception("cannot read the DHT now")
                found = {}
            for peer, addresses in found.items():
                self._known.setdefault(peer, addresses)
            is_alone = len(self._others()) + 1 < max(2, self._at_least)
            await asyncio.sleep(_FIND_OFTEN_S if is_alone else _FIND_EVERY_S)

    async def _ask(self, peer: str) -> None:
        asked_at = time.monotonic()
        with suppress(PeerError, KeyError):
            answer = await self.peers.ask(peer, "hello", self._introduction(), _ASK_S)
            term, has = int(answer["term"]), int(answer["has"])
            hello = Hello(name=str(answer["name"]), term=term, host=str(answer["host"]), has=has)
            self._last_seen[peer] = (asked_at, hello)
            self._meet(peer, answer)

    def _introduction(self) -> Body:
        return {**asdict(self._hello()), "addresses": self.peers.addresses}

    def _meet(self, peer: str, body: Body) -> None:
        addresses = [str(address) for address in body["addresses"]]
        if self._known.get(peer) != addresses:
            self._known[peer] = addresses
            write_record(self._folder / "peers.json", self._known)
            log.info("cluster %s is at %s", body["name"], " ".join(addresses))

    async def _greet(self, peer: str, body: Body, _: Reader, writer: Writer) -> None:
        self._meet(peer, body)
        await self.peers.accept(writer, peer, self._introduction())

    # The election of the host.

    async def _decide(self) -> None:
        tick_s = min(1.0, self._dead_after_s / 8)
        while True:
            started = time.monotonic()
            await asyncio.gather(*(self._ask(peer) for peer in [*self._known]))
            await self._follow()
            await asyncio.sleep(max(0.05, tick_s - (time.monotonic() - started)))

    async def _follow(self) -> None:
        others, me = self._others(), self.peers.id
        own = self._hello()
        if self._host is not None:
            own = replace(own, host=me)
        has_listened = time.monotonic() >= self._listened_at
        chosen = choose(me, own, others, at_least=self._at_least, has_listened=has_listened)
        if chosen == me or (self._must_host and self._host is None):
            if self._host is None:
                await self._begin_to_host(others)
        elif self._host is not None:
            self._inform(f"hivemind: {others[chosen].name} also hosts the hub and is ahead")
            host, self._host = self._host, None
            await host.stop(0.0)
            self._switch("", self._term)
        elif not chosen:
            if self._following:
                self._switch("", self._term)
            self._inform_alone(others)
        elif (chosen, others[chosen].term) != (self._following, self._term):
            self._switch(chosen, others[chosen].term)
            self._inform(f"hivemind: {others[chosen].name} hosts the hub")

    def _inform_alone(self, others: dict[str, Hello]) -> None:
        names = ", ".join(sorted(hello.name for hello in others.values()))
        names = names or f"no other cluster of run {self._settings.run} with this secret"
        if len(others) + 1 < self._at_least:
            text = f"this cluster waits for {self._at_least - len(others) - 1} more (min_clusters"
            self._inform(f"hivemind: {text} is {self._at_least}); reached: {names}", True)
        else:
            self._inform(f"hivemind: no cluster hosts the hub yet (reached: {names})")

    def _switch(self, peer: str, term: int) -> None:
        self._following, self._term = peer, term
        self._tunnel.cut()

    async def _begin_to_host(self, others: dict[str, Hello]) -> None:
        term = 1 + max([self._term, *(hello.term for hello in others.values())])
        folder = self._folder / f"hub-{term}"
        host = HubHost(folder, self._keys, self._settings.rules, self._settings.run)
        await host.start(self._spool.kept_rounds())
        self._switch("", term)
        self._host, self._must_host = host, False
        self._inform("hivemind: this cluster hosts the hub")


class HivemindMeeting(Meeting):
    """A hub in one of the clusters, reached through this cluster's own `Node`."""

    refuser, they_are = "hub", "the other clusters are"
    kept_averages, close_s, may_forget = 8, 15.0, True

    def __init__(self, settings: HivemindSettings) -> None:
        self._settings = settings
        self._node: Node | None = None
        self._hub: HubMeeting | None = None

    async def open(self, client: ClientState) -> HubApi:
        if self._node is None:
            name, folder = client.first_join.name, client.spool.folder / "hivemind"
            self._node = Node(self._settings, name, folder, client.spool, client.report)
        if self._hub is None:
            self._hub = HubMeeting(await self._node.listen())
        self._node.begin()
        return await self._hub.open(client)

    def check(self) -> None:
        if self._hub is not None:
            self._hub.check()
        if self._node is not None:
            self._node.check()

    async def close(self, *, waits: bool) -> None:
        if self._node is not None:
            await self._node.close(waits=waits)

    def has_joined(self) -> None:
        if self._node is not None:
            self._node.has_joined()

    def move_here(self) -> bool:
        if self._node is not None:
            self._node.knows_more()
        return self._node is not None

    def explain(self, why: str) -> str:
        return why if self._node is None else self._node.explain(why)
