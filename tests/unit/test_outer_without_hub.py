"""Engines without a hub of their own: what a bucket remembers, and whom hivemind's peers follow."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from isles.errors import ConfigError, MissingDependencyError
from isles.outer.bucket import BucketSettings
from isles.outer.bucket.api import BucketApi
from isles.outer.bucket.chain import Chain
from isles.outer.client.http import DeadlineError, RateLimit
from isles.outer.client.spool import Spool
from isles.outer.hivemind.dht import Keys
from isles.outer.hivemind.host import Hello, choose
from isles.outer.hub.core import HubCore
from isles.outer.hub.journal import Journal
from isles.outer.hub.samples import SampleLeases
from isles.outer.messages import RoundAnswer
from isles.run.objects import Folder, Store, StoreError, open_store, probe
from tests.deadline import DEADLINE_S, at_once
from tests.outer_world import ZERO, World, joining, member_id, refused
from tests.run_files import faults

LOT = 8

# Engine bucket: a chain of objects, of whose next entry one writer wins.


class Site(World):
    """One cluster's copy of the memory."""

    def __init__(self, folder: Path, name: str, store: Store) -> None:
        super().__init__(folder / name, wait="quorum", quorum=1, grace_s=0.0)
        self.name, self.chain = name, Chain(store, self.core)
        self.chain.open()

    def _open(self) -> HubCore:
        return HubCore(self.folder, self.settings, lambda: self.now, Journal(Path(":memory:")))

    def do(self, ask: Any, *given: Any) -> Any:
        """Call a method on the newest entry; what it changes is the next one."""
        return self.chain.change(self.name, lambda: ask(*given))

    def take(self, number: int) -> list[tuple[int, int]]:
        return self.lease(self.name, number, LOT)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/shared", "outer.url")


def joined(tmp_path: Path, store: Store, names: str) -> list[Site]:
    sites = [Site(tmp_path, name, store) for name in names]
    for site in sites:
        site.join(site.name)
    return sites


def test_of_changes_at_the_same_moment_none_is_lost(tmp_path, store):
    sites = [Site(tmp_path, name, store) for name in "abc"]
    found: list[tuple[int, int]] = []
    waiting = [*sites]

    def work():
        site = waiting.pop()
        site.join(site.name)
        for number in range(1, 9):
            found.extend(site.take(number))

    at_once(3, work)
    starts = sorted(found)
    assert sum(stop - start for start, stop in starts) == 3 * 8 * LOT
    assert all(one[1] <= other[0] for one, other in pairwise(starts))
    for site in sites:
        site.chain.follow()
    assert {site.chain.number for site in sites} == {3 + 3 * 8}
    assert {SampleLeases(site.core.journal).frontier for site in sites} == {3 * 8 * LOT}


def test_who_stood_still_finds_the_newest_and_does_not_write_into_the_past(tmp_path, store):
    late, waiting, busy = joined(tmp_path, store, "lwb")
    late.chain.follow()
    for step in range(60):
        busy.complete("b", step, busy.take(step + 1))
        assert busy.close() == ["b"]
        busy.chain.sweep()
    assert len(store.names("journal/")) < 100 < busy.chain.number
    waiting.chain.follow()
    assert waiting.chain.number < busy.chain.number
    waiting.chain.follow(looks_around=True)
    assert waiting.chain.number == busy.chain.number
    before = busy.chain.number
    taken = late.take(1)
    busy.chain.follow()
    assert late.chain.number == busy.chain.number == before + 1
    assert late.core.rounds.next == 60 and taken[0][0] == 60 * LOT
    # What an entry holds does not grow with the run.
    for table, most in {"rounds": 25, "parts": 35, "blocks": 4}.items():
        assert len(busy.core.journal.rows(f"SELECT * FROM {table}")) < most, table


def test_a_prefix_that_was_emptied_begins_anew_with_whoever_comes(tmp_path, store):
    a, b = joined(tmp_path, store, "ab")
    for number in range(1, 6):
        a.take(number)
    store.delete(["newest", *store.names("journal/")])
    assert refused(a.take, 6).kind == "unknown"
    a.join("a")
    b.chain.follow(looks_around=True)
    assert a.chain.number == b.chain.number == 1
    assert [row["name"] for row in b.core.membership.living()] == ["a"]


def test_an_outer_step_that_lacks_clusters_says_so(tmp_path, store):
    join, settings = joining("a"), BucketSettings(store.url, {"min_clusters": 2})

    async def wait():
        spool = Spool.of(tmp_path / "spool", join.pieces, join.version, 0)
        pace: dict[str, Any] = {"up": RateLimit(0.0), "down": RateLimit(0.0)}
        api = BucketApi(settings, join.id, join.name, spool, **pace, report=str, show=str)
        async with api:
            await api.join(join, DEADLINE_S)
            with pytest.raises(DeadlineError, match=r"clusters \(0 of 2, outer.min_clusters\)"):
                await api.wait_round(0, 0.0)
        api.close()

    asyncio.run(wait())


class Blind(Folder):
    """A store that does not know conditional writes."""

    def create(self, name: str, data: bytes) -> bool:
        self.write(name, data)
        return True


class Lossy(Folder):
    """The answer to every second entry is lost."""

    def create(self, name: str, data: bytes) -> bool:
        won = super().create(name, data)
        if won and int(name[-1]) % 2:
            raise StoreError("away", "the line broke")
        return won


def test_a_repeated_request_counts_once_also_where_an_answer_was_lost(tmp_path, store):
    site = Site(tmp_path, "a", Lossy(store.url))
    with pytest.raises(StoreError):
        site.join("a")
    site.join("a")
    with pytest.raises(StoreError):
        site.take(1)
    assert site.take(1) == [(0, LOT)]
    number = site.chain.number
    assert site.take(1) == [(0, LOT)]
    refused(site.do, site.core.part_path, member_id("a"), 99)
    assert site.chain.number == number
    assert Site(tmp_path, "b", store).core.membership.get(1)["name"] == "a"


def test_a_store_without_conditional_writes_is_found_out(store):
    probe(store)
    with pytest.raises(StoreError, match="lacks conditional writes") as caught:
        probe(Blind(store.url))
    assert caught.value.kind == "unconditional"
    assert store.names("probes/") == []


def test_nonsense_in_the_journal_is_named(tmp_path, store):
    store.write("journal/00000001", b"hello")
    with pytest.raises(ConfigError, match="not an entry of a journal") as caught:
        Site(tmp_path, "a", store)
    assert "journal/00000001" in caught.value.where


def test_urls_are_looked_at(tmp_path):
    text = (
        "name: x\nmodel: {name_or_path: m}\ndata: {sources: [{path: d.jsonl}]}\n"
        "training: {max_steps: 9, global_batch_size: 2}\nouter: {kind: diloco, sync_every: 2, %s}"
    )
    for outer, words in (
        ("engine: bucket", "needs outer.url"),
        ("engine: bucket, url: 's3://key:hush@bucket/x'", "credentials, which do not belong"),
        ("engine: bucket, url: 's3://bucket/x?key=hush'", "credentials, which do not belong"),
        ("engine: bucket, url: bucket/x", "not a place in object storage"),
        ("url: 's3://bucket/x'", "bucket"),
    ):
        (fault,) = faults(tmp_path, text % outer)
        assert words in fault.what and "hush" not in str(fault)
    with pytest.raises(MissingDependencyError, match="s4://") as caught:
        open_store("s4://bucket/prefix", "outer.url")
    assert "file:///FOLDER" in caught.value.fix, "no package would help"


# Engine hivemind without its network: who hosts, what a new host begins with, who may come.


def hello(host: str = "", has: int = 0, term: int = 0) -> Hello:
    return Hello(name="n", host=host, has=has, term=term)


def chosen(everybody: dict[str, Hello], at_least: int = 1, *, settled: bool = True) -> list[str]:
    """Whom each follows."""
    return [
        choose(me, own, everybody, at_least=at_least, has_listened=settled)
        for me, own in everybody.items()
    ]


def test_who_hosts():
    """Who has most averages; a host is followed as long as it is heard."""
    everybody = {"a": hello(has=4), "b": hello(has=5), "c": hello(has=4)}
    assert chosen(everybody) == ["", "b", ""]
    assert chosen(everybody, 4) == chosen(everybody, settled=False) == ["", "", ""]
    ahead = {"a": hello("b", 7), "b": hello("b", 5, term=1), "c": hello("", 9)}
    assert chosen(ahead, 9) == ["b", "b", "b"]
    assert chosen({"a": hello("b", 5), "c": hello("b", 5)}) == ["", "c"]
    # A network was cut in two; each half has a host: the one that is behind steps down.
    halves = {"a": hello("a", 5, term=3), "b": hello("b", 6, term=2), "c": hello("a", 5)}
    assert chosen(halves) == ["b", "b", "a"]
    assert chosen({**halves, "a": hello("", 5)}) == ["b", "b", "b"]


def test_a_new_host_goes_on_from_what_clusters_hold(tmp_path):
    """a, who hosts now, has applied turns 0 and 1, and has the average of turn 2; b lacks it."""
    world = World(tmp_path, keep_averages=8)
    decided = {"state": "committed", "weights": {"a": 3, "gone": 5}, "refused": {"b": "nan"}}
    answers = [RoundAnswer(outer_step=n, digest=ZERO, size_bytes=16, **decided) for n in range(3)]
    world.do(world.core.seed, list(zip(answers, ["1" * 64, "2" * 64, ""], strict=True)))
    first = world.join("a", version=2, has=3, outer_params="2" * 64, holding=[(10, 20)])
    assert (first.standing, first.outer_step, first.from_step) == ("first", 3, 3)
    b = world.join("b", version=2, has=2, outer_params="2" * 64, holding=[(20, 24), (0, 4)])
    assert (b.standing, b.lost) == ("late", []), "it goes on in its own block"
    assert world.answer(1).weights == {"a": 3, "gone": 5}
    assert world.answer(1).refused == {"b": "nan"}
    assert world.answer(2).is_kept
    refusal = refused(world.join, "c", version=4, outer_params="4" * 64)
    assert refusal.kind == "ahead" and "knows only 3" in refusal.what, "it must host instead"
    assert world.join("c", version=1, outer_params="7" * 64).standing == "behind"
    assert world.lease("a", 1, 5) == [(24, 29)], "none is leased that was leased before"


def test_no_average_is_applied_that_some_living_cluster_lacks(tmp_path):
    world = World(tmp_path, "abc", dead_after_s=10.0)
    world.turn("abc", 0)
    for now in (0.0, 6.0):
        world.now = now
        assert not world.held("a", 0) and not world.held("b", 0)
    world.now = 11.0
    world.drop_silent()
    assert world.held("a", 0), "c is not heard"
    world.heartbeat("c")
    assert not world.held("a", 0)
    world.heartbeat("c", has=1)
    assert world.held("a", 0)


def test_all_clusters_make_the_same_certificate_of_a_secret(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a line that is long enough\n")
    mine, yours, another = Keys.read("run", secret), Keys.read("run", secret), Keys("run", b"other")
    assert mine.line(1).secret_text() == yours.line(1).secret_text()
    assert mine.topic == yours.topic != another.topic
    proof = yours.proof("a", "b")
    assert mine.is_proof(proof, "a", "b") and not mine.is_proof(proof, "c", "b")
    for wrong in (another.proof("a", "b"), None):
        assert not mine.is_proof(wrong, "a", "b")
    mine.write_identity(tmp_path / "host")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "host" / "certificate.pem", tmp_path / "host" / "key.pem")
    secret.write_text("short")
    with pytest.raises(ConfigError, match="5 bytes; it needs at least 16"):
        Keys.read("run", secret)
    with pytest.raises(ConfigError, match="cannot read the secret"):
        Keys.read("run", tmp_path / "none")
