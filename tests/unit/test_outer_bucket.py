"""Engine bucket's memory: a chain of objects, of whose next entry one writer wins."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from isles.config.load import load_run_file
from isles.errors import ConfigError, ConfigErrors, MissingDependencyError
from isles.outer.bucket import BucketSettings
from isles.outer.bucket.api import BucketApi
from isles.outer.bucket.chain import Chain
from isles.outer.client.http import DeadlineError, RateLimit
from isles.outer.client.spool import Spool
from isles.outer.hub.core import Core
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.samples import Samples
from isles.outer.messages import Applied, Contribution, Join, LeaseRequest
from isles.run.objects import Folder, Store, StoreError, open_store, probe
from tests.deadline import DEADLINE_S, at_once
from tests.outer_world import ZERO, member_id

LOT = 8


class Site:
    """One cluster's copy of the memory."""

    def __init__(self, folder: Path, name: str, store: Store) -> None:
        self.name, self.id = name, member_id(name)
        memory = Journal(Path(":memory:"))
        self.core = Core(
            folder / name, Settings(wait="quorum", quorum=1, grace_s=0.0), lambda: 0.0, memory
        )
        self.chain = Chain(store, self.core)
        self.chain.open()

    def join(self, version: int = 0) -> None:
        join = Join(
            id=self.id,
            name=self.name,
            identity={"layout": "a"},
            codec="none",
            pieces=[[4]],
            version=version,
            outer_params=[ZERO],
        )
        self.chain.change(self.name, lambda: self.core.join(join))

    def lease(self, number: int) -> list[tuple[int, int]]:
        body = LeaseRequest(id=self.id, number=number, samples=LOT)
        return self.chain.change(self.name, lambda: self.core.lease(body)).samples

    def turn(self, step: int, samples: list[tuple[int, int]]) -> None:
        """One round that this cluster decides alone."""
        body = Contribution(id=self.id, tokens=1, steps=1, samples=samples, digest=ZERO)

        def count() -> None:
            self.core.complete(step, body, 1.0)
            assert self.core.rounds.close() is not None
            self.core.commit(step, ZERO, 4)
            self.core.applied(Applied(id=self.id, outer_step=step, outer_params=ZERO))

        self.chain.change(self.name, count)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/shared", "outer.url")


def test_of_changes_at_the_same_moment_none_is_lost(tmp_path: Path, store: Store) -> None:
    sites = [Site(tmp_path, name, store) for name in "abc"]
    found: list[tuple[int, int]] = []
    waiting = [*sites]

    def work() -> None:
        site = waiting.pop()
        site.join()
        for number in range(1, 9):
            found.extend(site.lease(number))

    at_once(3, work)
    starts = sorted(found)
    assert sum(stop - start for start, stop in starts) == 3 * 8 * LOT
    assert all(one[1] <= other[0] for one, other in pairwise(starts))
    for site in sites:
        site.chain.follow()
    assert {site.chain.number for site in sites} == {3 + 3 * 8}
    assert {Samples(site.core.journal).frontier for site in sites} == {3 * 8 * LOT}


def test_a_repeated_request_changes_nothing(tmp_path: Path, store: Store) -> None:
    site = Site(tmp_path, "a", store)
    site.join()
    number = site.chain.number
    first = site.lease(1)
    assert site.lease(1) == first and site.chain.number == number + 1
    with pytest.raises(Refusal):
        site.chain.change("a", lambda: site.core.part_path(site.id, 99))
    assert site.chain.number == number + 1


def test_a_writer_that_stood_still_does_not_write_into_the_past(
    tmp_path: Path, store: Store
) -> None:
    late, busy = Site(tmp_path, "late", store), Site(tmp_path, "busy", store)
    late.join()
    busy.join()
    late.chain.follow()
    for step in range(100):
        busy.turn(step, busy.lease(step + 1))
        busy.chain.sweep()
    assert len(store.names("journal/")) < 100
    before = busy.chain.number
    taken = late.lease(1)
    busy.chain.follow()
    assert late.chain.number == busy.chain.number == before + 1
    assert late.core.rounds.next == 100 and taken[0][0] == 100 * LOT
    # What an entry holds does not grow with the run.
    tables = [busy.core.journal.rows(f"SELECT * FROM {t}") for t in ("rounds", "parts", "blocks")]
    assert [len(rows) for rows in tables] < [25, 35, 4]


def test_who_waits_finds_the_newest_after_a_long_time(tmp_path: Path, store: Store) -> None:
    late, busy = Site(tmp_path, "late", store), Site(tmp_path, "busy", store)
    late.join()
    busy.join()
    for number in range(1, 101):
        busy.lease(number)
        busy.chain.sweep()
    late.chain.follow()
    assert late.chain.number < busy.chain.number
    late.chain.follow(looks_around=True)
    assert late.chain.number == busy.chain.number


def test_a_prefix_that_was_emptied_begins_anew_with_whoever_comes(
    tmp_path: Path, store: Store
) -> None:
    a, b = Site(tmp_path, "a", store), Site(tmp_path, "b", store)
    a.join(), b.join()
    for number in range(1, 6):
        a.lease(number)
    store.delete(["newest", *store.names("journal/")])
    with pytest.raises(Refusal) as caught:
        a.lease(6)
    assert caught.value.kind == "unknown"
    a.join()
    b.chain.follow(looks_around=True)
    assert a.chain.number == b.chain.number == 1
    assert [row["name"] for row in b.core.membership.living()] == ["a"]


def test_an_outer_step_that_lacks_clusters_says_so(tmp_path: Path, store: Store) -> None:
    join = Join(
        id=member_id("a"),
        name="a",
        identity={"layout": "a"},
        codec="none",
        pieces=[[4]],
        version=0,
        outer_params=[ZERO],
    )

    async def wait() -> None:
        api = BucketApi(
            BucketSettings(store.url, {"min_clusters": 2}),
            join.id,
            join.name,
            Spool.of(tmp_path / "spool", join.pieces, join.version, 0),
            up=RateLimit(0.0),
            down=RateLimit(0.0),
            report=str,
            show=lambda _: None,
        )
        async with api:
            await api.join(join, DEADLINE_S)
            with pytest.raises(DeadlineError, match=r"it has 0 of 2 \(outer.min_clusters\)"):
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


def test_what_was_written_although_the_answer_was_lost_counts_once(
    tmp_path: Path, store: Store
) -> None:
    site = Site(tmp_path, "a", Lossy(store.url))
    with pytest.raises(StoreError):
        site.join()
    site.join()
    with pytest.raises(StoreError):
        site.lease(1)
    assert site.lease(1) == [(0, LOT)]
    assert Site(tmp_path, "b", store).core.membership.get(1)["name"] == "a"


def test_a_store_without_conditional_writes_is_found_out(store: Store) -> None:
    probe(store)
    with pytest.raises(StoreError, match="does not know conditional writes") as caught:
        probe(Blind(store.url))
    assert caught.value.kind == "unconditional"
    assert store.names("probes/") == []


def test_nonsense_in_the_journal_is_named(tmp_path: Path, store: Store) -> None:
    store.write("journal/00000001", b"hello")
    with pytest.raises(ConfigError, match="no entry of a journal") as caught:
        Site(tmp_path, "a", store)
    assert "journal/00000001" in caught.value.where


@pytest.mark.parametrize(
    ("outer", "words"),
    [
        ("engine: bucket", "outer.url does not say where"),
        ("engine: bucket, url: 's3://key:hush@bucket/x'", "credentials do not belong"),
        ("engine: bucket, url: 's3://bucket/x?key=hush'", "credentials do not belong"),
        ("engine: bucket, url: bucket/x", "not a place in object storage"),
        ("url: 's3://bucket/x'", "bucket"),
    ],
)
def test_urls_of_run_files(tmp_path: Path, outer: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "name: x\nmodel: {name_or_path: m}\ndata: {sources: [{path: d.jsonl}]}\n"
        "training: {max_steps: 9, global_batch_size: 2}\n"
        f"outer: {{kind: diloco, sync_every: 2, {outer}}}\n"
    )
    with pytest.raises((ConfigError, ConfigErrors), match=words) as caught:
        load_run_file(path)
    assert "hush" not in str(caught.value)


def test_a_url_of_no_known_kind_is_to_be_corrected() -> None:
    with pytest.raises(MissingDependencyError, match="s4://") as raised:
        open_store("s4://bucket/prefix", "outer.url")
    assert "file:///FOLDER" in str(raised.value.fix), "no package would help"
