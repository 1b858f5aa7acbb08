"""Odd values in the journal of a bucket, which others can write: refused in words, or harmless."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from isles.errors import ConfigError
from isles.outer.bucket.chain import Chain
from isles.outer.hub.core import HubCore, status
from isles.outer.hub.journal import Journal
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.messages import (
    Applied,
    Contribution,
    Heartbeat,
    LeaseRequest,
    StateFile,
    StateOffer,
)
from isles.run.objects import Folder
from tests.outer_world import ZERO, after, joining, member_id

Entry = dict[str, Any]

CASE_S = 10.0
"""Processor time: far more than any of these journals needs."""
NEVER = (10**400, float("nan"), [[1]], {"a": 1})
"""Values that no column has."""
ODD_NUMBERS = (-1, 10**12 - 1, 2**60, 2**62 - 1, 2**63, 1.5, 1e299, True, "x", None)
ODD_TEXTS = ("", "x", "-1", "9" * 5000, "{}", "[[0, 1e400]]", '[["a"]]', "[" * 9999)
ODD_TEXTS += ("\ud800", "a\nb", 1, None)


class Endless(BaseException):
    """Raised within the code that takes too long; no `except Exception` hides it."""


class Cluster:
    """The memory of a cluster, at a bucket, and the requests that it makes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.now = name, 0.0
        folder.mkdir(exist_ok=True)
        (folder / "shared").mkdir(exist_ok=True)
        rules = Settings.model_validate({"min_clusters": 2})
        self.core = HubCore(folder, rules, lambda: self.now, Journal(Path(":memory:")))
        self.chain = Chain(Folder(f"file://{folder}/shared", ""), self.core)
        self.chain.open()

    def change(self, call: Callable[[], object]) -> None:
        self.chain.change(self.name, call)

    def join(self) -> None:
        self.change(lambda: self.core.join(joining(self.name)))

    def heartbeat(self) -> None:
        said = Heartbeat(id=member_id(self.name), step=1, version=1, has=1)
        self.change(lambda: self.core.heartbeat(said))

    def lease(self) -> None:
        body = LeaseRequest(id=member_id(self.name), number=1, samples=10)
        self.change(lambda: self.core.lease(body))

    def complete(self, outer_step: int) -> None:
        values = {"tokens": 10, "steps": 1, "samples": [[0, 5]], "digest": ZERO}
        body = Contribution.model_validate({"id": member_id(self.name), **values})

        def count() -> None:
            self.core.complete(outer_step, body, 1.0)
            new, number = "INSERT OR REPLACE INTO objects VALUES (?, ?, ?, ?)", self.number
            self.core.journal.run(new, outer_step, number, ZERO, 16)

        self.change(count)

    @property
    def number(self) -> int:
        return int(self.core.membership.find(member_id(self.name))["number"])

    def close(self) -> None:
        def close() -> None:
            self.core.membership.drop_silent()
            if (job := self.core.rounds.close()) is not None:
                self.core.journal.put("averager", f"{job.outer_step} {self.number}")

        self.change(close)

    def commit(self) -> None:
        step = self.core.rounds.next
        if self.core.rounds.state(step) == "averaging":
            self.change(lambda: self.core.measured(step, {1: 1.0, 2: 1.0}))
            self.change(lambda: self.core.commit(step, ZERO, 16))
            self.change(self.core.sweep)

    def applied(self) -> None:
        said = Applied(id=member_id(self.name), outer_step=0, outer_params=after(0))
        self.change(lambda: self.core.applied(said))

    def offer(self) -> None:
        file = StateFile(name="a.safetensors", size_bytes=10, digest=ZERO)
        own = {"version": 1, "outer_params": [after(0)], "files": [file]}
        body = StateOffer.model_validate({"id": member_id(self.name), **own})

        def offer() -> None:
            self.core.states.ask(self.number)
            state = self.core.states.offer(self.core.caller(body.id), body)
            self.core.states.complete(state)

        self.change(offer)

    def want(self) -> None:
        self.change(lambda: self.core.states.want(self.core.caller(member_id(self.name))))

    def read(self) -> None:
        self.chain.read(lambda: json.dumps(status(self.core)))
        for step in (0, 1, 2):
            self.chain.read(lambda step=step: self.core.rounds.answer(step))

    def do_all(self) -> None:
        """Look at the journal, and make each kind of request once."""
        self.read()
        for act in (self.join, self.heartbeat, self.lease, lambda: self.complete(1), self.close):
            self.tried(act)
        for act in (self.commit, self.applied, self.offer, self.want, self.close):
            self.tried(act)
        self.now += 1e4
        for act in (self.close, self.join, self.lease, self.read):
            self.tried(act)

    def tried(self, act: Callable[[], None]) -> None:
        with suppress(Refusal):  # an answer of the core, in words
            act()


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    """A journal with rows in each table: two clusters have averaged once, and one contributes."""
    folder = tmp_path_factory.mktemp("journal")
    one, two = Cluster(folder, "a"), Cluster(folder, "b")
    for each in (one, two):
        each.chain.follow()
        each.join()
        each.lease()
    for each in (one, two):
        each.chain.follow()
        each.complete(0)
    two.close()
    two.commit()
    for each in (one, two):
        each.chain.follow()
        each.applied()
    one.chain.follow()
    one.heartbeat()
    one.offer()
    one.complete(1)
    newest = max((folder / "shared" / "journal").iterdir())
    found: Entry = json.loads(gzip.decompress(newest.read_bytes()))
    return found


@contextmanager
def bounded() -> Iterator[None]:
    def end(*_: object) -> None:
        raise Endless

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class Bucket:
    """A bucket that holds one entry of a journal."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._journal = folder, folder / "shared" / "journal"
        self._journal.mkdir(parents=True)
        self._first = Cluster(folder, "a")

    def fault(self, entry: object, named: str = "") -> str:
        """What is wrong about how a cluster takes an entry; empty: nothing is.

        Args:
            named: the refusal says this; empty: the entry may be harmless.
        """
        for path in self._journal.iterdir():
            path.unlink()
        data = gzip.compress(json.dumps(entry).encode(), 1)
        (self._journal / "00000001").write_bytes(data)
        try:
            with bounded():
                self._first.chain.open()
                Cluster(self._folder, "a").do_all()
        except ConfigError as error:
            is_in_words = error.id == "bucket.refused" and error.what.isprintable()
            is_fine = is_in_words and len(error.what) < 500 and named in error.what
            return "" if is_fine else f"not in words: {error.what}"
        except (Exception, Endless) as error:
            return repr(error)[:200]
        return "it is taken" if named else ""


def test_an_odd_value_in_any_column_is_refused_or_harmless(tmp_path: Path, entry: Entry) -> None:
    tables: dict[str, list[list[Any]]] = entry["tables"]
    assert all(tables.values()), "a table has no row"
    bucket = Bucket(tmp_path)
    wrong = [bucket.fault(entry)]
    for table, rows in tables.items():
        for index, row in enumerate(rows):
            for column, value in enumerate(row):
                for odd in (*NEVER, *(ODD_TEXTS if isinstance(value, str) else ODD_NUMBERS)):
                    row[column] = odd
                    named = f"not an entry of a journal of isles: {table}." if odd in NEVER else ""
                    if fault := bucket.fault(entry, named):
                        wrong.append(f"{table} {index} {column} {odd!r:.40}: {fault}")
                row[column] = value
    assert not any(wrong), "\n".join(wrong)


def test_rows_and_tables_of_another_form_are_refused_or_harmless(
    tmp_path: Path, entry: Entry
) -> None:
    tables, wrong, bucket = entry["tables"], [], Bucket(tmp_path)
    for table, rows in tables.items():
        (*others, row) = rows
        odd_rows = ([], row[:-1], [*row, 1], [row], None, 3, "x" * len(row), {"a": 1}, row, rows)
        for odd in (*([*rows, each] for each in odd_rows), None, 3, "x", {"a": row}, [], others):
            tables[table] = odd
            if fault := bucket.fault(entry):
                wrong.append(f"{table} {odd!r:.80}: {fault}")
        tables[table] = rows
    for odd in ({}, [], None, {**entry, "format": 10**400}, {**entry, "chain": [1]}):
        if fault := bucket.fault(odd):
            wrong.append(f"{odd!r:.80}: {fault}")
    assert not wrong, "\n".join(wrong)
