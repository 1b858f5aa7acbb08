"""One cluster among its peers: finds them, agrees on who hosts the rendezvous, and leads there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from isles.errors import CommunicationError
from isles.outer.hivemind.choice import Hello, choose
from isles.outer.hivemind.copies import Copy
from isles.outer.hivemind.door import Door
from isles.outer.hivemind.host import Host
from isles.outer.hivemind.inbox import Inbox
from isles.outer.hivemind.keys import Keys
from isles.outer.hivemind.peers import Body, PeerError, Peers, Reader, Writer
from isles.outer.link.messages import Begin, Note
from isles.outer.side.faults import RejoinError
from isles.run.records import read_record, write_record, write_secret

log = logging.getLogger(__name__)

_ASK_S = 2.0
_COPY_S = 60.0
_FIND_EVERY_S, _FIND_OFTEN_S = 20.0, 2.0
_SETTLE_S = 3.0
_RETRY_S = 5.0
_BYE_S = 1.0
_ACTED_UPON = ("/join", "/claim")
"""Answers that change what this cluster does; and all about turns and epochs."""


class Node:
    """Keeps a door open on this machine's loopback that leads to the rendezvous, wherever it is.

    Args:
        begin: all that rank 0 knows.
        emit: tells it something.
    """

    def __init__(self, begin: Begin, emit: Callable[[Note], None]) -> None:
        assert begin.settings.hivemind is not None
        self._begin, self._emit = begin, emit
        self._name = begin.member.name
        self._settings = begin.settings.hivemind
        secret = self._settings.secret_file
        self._keys = Keys.read(self._settings.run, None if secret is None else Path(secret))
        self._folder = begin.spool / "hivemind"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._dead_after_s = float(self._settings.rules.get("dead_after_s", 10.0))
        self._known: dict[str, list[str]] = read_record(self._folder / "peers.json") or {}
        self._heard: dict[str, tuple[float, Hello]] = {}
        self._host: Host | None = None
        self._following = ""
        self._term = 0
        self._copying = asyncio.Lock()
        self._door = Door(self._lead)
        self.inbox = Inbox()
        """What comes for epochs."""
        self._said = ""
        kept = self._folder / "book"
        # After a new start of the trainer, which may come from an old checkpoint, the clusters
        # that live know better; and if none does, whoever has applied most turns begins anew.
        self._copy = Copy.load(kept) if begin.has_joined else None
        if not begin.has_joined:
            kept.unlink(missing_ok=True)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    # The door.

    async def open_door(self) -> Begin:
        """Begin to listen on the loopback; what rank 0 knows, with the way in through the door."""
        path = self._folder / "line"
        write_secret(path, self._keys.line(await self._door.open()).secret_text())
        return replace(self._begin, join_file=path)

    async def _lead(self) -> tuple[Reader, Writer] | None:
        if self._host is not None:
            return await asyncio.open_connection("127.0.0.1", self._host.port)
        if not self._following:
            return None
        async with asyncio.timeout(_ASK_S):
            told = {"term": self._term}
            _, reader, writer = await self.peers.open(self._following, "tunnel", told)
        return reader, writer

    async def _let_in(self, peer: str, body: Body, reader: Reader, writer: Writer) -> None:
        """A connection of another cluster to the rendezvous here."""
        host = self._host
        if host is not None and host.is_open and body.get("term") == self._term:
            near = await asyncio.open_connection("127.0.0.1", host.port)
            await self.peers.accept(writer, peer)
            await self._door.join(reader, writer, *near)

    # Copies of the book: see `hivemind_copies`.

    def mark(self) -> tuple[int, str]:
        """Which rendezvous answers now; for `confirm`."""
        return self._term, self._following

    async def confirm(self, mark: tuple[int, str], path: str) -> None:
        """Before this cluster acts upon an answer: have a copy of the book that knows of it.

        And before it acts upon a commit: let all others have one, too, so that no turn is applied
        that whoever hosts next might not know of.

        Raises:
            PeerError: the answer is void, since another cluster hosts the rendezvous now.
        """
        if not path.endswith(_ACTED_UPON) and "/turns/" not in path and "/epochs/" not in path:
            return
        before = -1 if self._copy is None else self._copy.turn
        copy = await self._fetch_copy(mark)
        if self._host is not None and path.endswith("/join"):
            self._host.is_open = True
        if copy.turn > before:
            await self._wait_for_copies(copy.turn)
        if mark != self.mark():
            raise PeerError("the rendezvous has moved to another cluster")

    async def _fetch_copy(self, mark: tuple[int, str]) -> Copy:
        async with self._copying:
            if self._host is not None:
                copy = await self._host.copy()
            else:
                own = self._copy
                have = {} if own is None else {"changes": own.changes, "lineage": own.lineage}
                host = mark[1]
                if not host:
                    raise PeerError("no cluster hosts the rendezvous now")
                answer, data = await self.peers.ask(host, "copy", {"have": have}, _COPY_S)
                if answer.get("same") and own is not None:
                    return own
                copy = Copy.parse(answer, data)
            if mark != self.mark():
                raise PeerError("the rendezvous has moved to another cluster")
            if copy != self._copy:
                await asyncio.to_thread(copy.save, self._folder / "book")
                self._copy = copy
            return copy

    async def _give_copy(self, peer: str, body: Body, _: Reader, writer: Writer) -> None:
        host = self._host
        if host is None:
            return
        copy = await host.copy()
        have = body.get("have", {})
        lineage = [list(entry) for entry in copy.lineage]
        if have.get("changes") == copy.changes and have.get("lineage") == lineage:
            await self.peers.accept(writer, peer, {"same": True})
            return
        await self.peers.accept(writer, peer, {**copy.head(), "bytes": len(copy.data)})
        writer.write(copy.data)
        await writer.drain()

    async def _wait_for_copies(self, turn: int) -> None:
        if self._host is not None:
            await self._all_have(turn)
        else:
            told = {"turn": turn}
            await self.peers.ask(self._following, "safe", told, 2 * self._dead_after_s)

    async def _all_have(self, turn: int) -> None:
        host = self._host
        if host is not None:
            mine = [p for p, hello in self._others().items() if hello.host == self.peers.id]
            await host.all_have(turn, mine, self._dead_after_s)

    async def _is_safe(self, peer: str, body: Body, _: Reader, writer: Writer) -> None:
        if self._host is not None:
            self._host.has_copy(peer, int(body["turn"]))
            await self._all_have(int(body["turn"]))
            await self.peers.accept(writer, peer)

    # Who hosts.

    def _hello(self) -> Hello:
        copy, host = self._copy, self._host
        is_host = host is not None and host.is_open
        return Hello(
            name=self._name,
            term=self._term,
            host=self.peers.id if is_host else self._following,
            turn=self._begin.version if copy is None else copy.turn,
            changes=-1 if copy is None else copy.changes,
        )

    def _others(self) -> dict[str, Hello]:
        """Who was heard not long ago."""
        since = self._now - self._dead_after_s
        return {peer: hello for peer, (at, hello) in self._heard.items() if at >= since}

    def peer_of(self, name: str) -> str:
        """The peer of a cluster.

        Raises:
            PeerError: it is not heard.
        """
        found = {p: self._heard[p][0] for p, h in self._others().items() if h.name == name}
        if not found:
            raise PeerError(f"cluster {name} is not heard any more")
        return max(found, key=lambda peer: found[peer])

    async def run(self) -> None:
        """Take part among the peers, for ever.

        Raises:
            RejoinError: others have gone on from where this cluster's copy of the book was not.
        """
        await self._start()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._find())
            group.create_task(self._decide())

    async def _start(self) -> None:
        while True:
            known = [address for found in self._known.values() for address in found]
            self.peers = Peers(self._settings, self._keys, self._folder, known)
            self.peers.serve("hello", self._greet)
            self.peers.serve("bye", self._let_go)
            self.peers.serve("tunnel", self._let_in)
            self.peers.serve("copy", self._give_copy)
            self.peers.serve("safe", self._is_safe)
            self.peers.serve("pieces", self._take_pieces)
            try:
                await self.peers.start()
                break
            except CommunicationError as error:
                self._tell(f"{error.what}; tried again every {_RETRY_S:g} s; {error.fix}", True)
                await asyncio.sleep(_RETRY_S)
        is_first = not self._settings.initial_peers and not self._known
        self._settled_at = self._now + (0.0 if is_first else _SETTLE_S)
        lines = " ".join(self.peers.addresses)
        (self._folder / "initial_peers").write_text(f"{lines}\n")
        self._tell(f"hivemind: other clusters reach this one by --initial_peers {lines}")

    def _tell(self, text: str, is_warning: bool = False) -> None:
        if text != self._said:
            self._said = text
            log.info("%s", text)
            self._emit(Note(text=text, is_warning=is_warning))

    def explain(self, why: str) -> str:
        """Why the rendezvous does not answer: whom this cluster waits for, rather than what failed.

        Args:
            why: as the door's other side sees it.
        """
        return why if self._host is not None or self._following else self._said or why

    async def _find(self) -> None:
        """Look for clusters in the DHT, often as long as there are few."""
        while True:
            try:
                found = await self.peers.find()
            except Exception:  # hivemind's own: the next look may do better
                log.exception("the DHT cannot be read now")
                found = {}
            for peer, addresses in found.items():
                self._known.setdefault(peer, addresses)
            is_alone = len(self._others()) + 1 < max(2, self._at_least)
            await asyncio.sleep(_FIND_OFTEN_S if is_alone else _FIND_EVERY_S)

    @property
    def _at_least(self) -> int:
        return int(self._settings.rules.get("min_clusters", 1))

    async def _decide(self) -> None:
        """Again and again: hear the others, and follow whoever hosts, or host."""
        tick_s = min(1.0, self._dead_after_s / 8)
        while True:
            started = self._now
            await asyncio.gather(*(self._ask(peer) for peer in [*self._known]))
            try:
                await self._settle()
            except PeerError as error:
                log.info("%s", error)
            if self._host is not None and self._host.ticking.done():
                self._host.ticking.result()
            await asyncio.sleep(max(0.05, tick_s - (self._now - started)))

    async def _ask(self, peer: str) -> None:
        asked_at = self._now
        with suppress(PeerError, KeyError):
            answer, _ = await self.peers.ask(peer, "hello", self._introduction(), _ASK_S)
            self._heard[peer] = (asked_at, Hello.parse(answer))
            self._meet(peer, answer)

    def _introduction(self) -> Body:
        return {**self._hello().body(), "addresses": self.peers.addresses}

    def _meet(self, peer: str, body: Body) -> None:
        """Remember where a cluster is, also for when this process is started again."""
        addresses = [str(address) for address in body["addresses"]]
        if self._known.get(peer) != addresses:
            self._known[peer] = addresses
            write_record(self._folder / "peers.json", self._known)
            log.info("cluster %s is at %s", body["name"], " ".join(addresses))

    async def _greet(self, peer: str, body: Body, _: Reader, writer: Writer) -> None:
        self._meet(peer, body)
        await self.peers.accept(writer, peer, self._introduction())

    async def _let_go(self, peer: str, body: Body, _: Reader, writer: Writer) -> None:
        """A cluster ends: nobody waits until it counts as dead."""
        self._heard.pop(peer, None)
        self._known.pop(peer, None)
        await self.peers.accept(writer, peer)

    async def _settle(self) -> None:
        others, me = self._others(), self.peers.id
        own = self._hello()
        if self._host is not None:
            own = replace(own, host=me)
        chosen = choose(
            me, own, others, at_least=self._at_least, is_settled=self._now >= self._settled_at
        )
        if chosen == me:
            if self._host is None:
                await self._begin_to_host(others)
        elif self._host is not None:
            raise self._gives_up(f"{others[chosen].name} hosts the rendezvous, too, and is ahead")
        elif not chosen:
            if self._following:
                self._switch("", self._term)
            self._tell_alone(others)
        elif (chosen, others[chosen].term) != (self._following, self._term):
            await self._follow(chosen, others[chosen])
        elif self._copy is not None and others[chosen].turn > self._copy.turn:
            copy = await self._fetch_copy(self.mark())
            await self._wait_for_copies(copy.turn)

    def _tell_alone(self, others: dict[str, Hello]) -> None:
        names = ", ".join(sorted(hello.name for hello in others.values()))
        names = names or f"no other of run {self._settings.run} with this secret"
        if len(others) + 1 < self._at_least:
            text = f"this cluster waits for {self._at_least - len(others) - 1} more: min_clusters"
            self._tell(f"hivemind: {text} is {self._at_least}, reached is {names}", True)
        else:
            self._tell(f"hivemind: no cluster hosts the rendezvous yet; reached is {names}")

    def _switch(self, peer: str, term: int) -> None:
        """From here on another cluster hosts the rendezvous, or none."""
        self._following, self._term = peer, term
        self._door.cut()

    async def _follow(self, peer: str, hello: Hello) -> None:
        answer, data = await self.peers.ask(peer, "copy", {}, _COPY_S)
        copy = Copy.parse(answer, data)
        if self._copy is not None and not self._copy.precedes(copy.lineage):
            raise self._gives_up(
                f"{hello.name} hosts the rendezvous, and does not know all of this"
            )
        self._switch(peer, hello.term)
        self._copy = copy
        await asyncio.to_thread(copy.save, self._folder / "book")
        self._tell(f"hivemind: {hello.name} hosts the rendezvous")

    def _gives_up(self, why: str) -> RejoinError:
        """This cluster's copy is of a history that the others do not go on with."""
        (self._folder / "book").unlink(missing_ok=True)
        return RejoinError(why)

    async def _begin_to_host(self, others: dict[str, Hello]) -> None:
        term = 1 + max([self._term, *(hello.term for hello in others.values())])
        folder = self._folder / f"rendezvous-{term}"
        host = Host(folder, self._keys, self._settings.rules, self._settings.run)
        living = {self._name, *(hello.name for hello in others.values())}
        await host.start(self._copy, term, self.peers.id, living)
        self._switch("", term)
        self._host = host
        self._tell("hivemind: this cluster hosts the rendezvous")

    async def close(self) -> None:
        """Say good-bye, so that others need not find out."""
        host, self._host = self._host, None
        if host is not None:
            host.is_open = False
        byes = [self.peers.ask(peer, "bye", {}, _BYE_S) for peer in self._others()]
        await asyncio.gather(*byes, return_exceptions=True)
        await self.peers.close()

    async def _take_pieces(self, peer: str, body: Body, reader: Reader, writer: Writer) -> None:
        """A stream for an epoch: see `hivemind_group`."""
        key = (int(body["term"]), int(body["epoch"]), int(body["rank"]))
        stream = self.inbox.put(key, reader, writer)
        if stream is not None:
            await self.peers.accept(writer, peer)
            await stream.done.wait()
