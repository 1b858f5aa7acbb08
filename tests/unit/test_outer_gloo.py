"""Clusters that average directly, each a thread here: same bytes as the hub, and no silent hang."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from isles.errors import CommunicationError
from isles.outer.average import combine
from isles.outer.codec.base import parse_codec
from isles.outer.gloo.attempt import Attempt, Made
from isles.outer.gloo.average import UnsoundPartError, average_among, make_plan
from isles.outer.gloo.group import Group
from isles.outer.gloo.reach import UnreachableError, call_each_other
from tests.deadline import DEADLINE_S
from tests.each import each

COUNTS = [5000, 4096, 70_000, 3, 5000]
TOKENS = [100, 300, 200]
NAMES = ["a", "b", "c"]


def together(
    ranks: int,
    work: Callable[[Group], Any],
    timeout_s: float = 30.0,
    kind: type[Group] = Group,
) -> list[Any]:
    """Do something as so many clusters; what each returns, or the error that it met."""
    store = HashStore()

    def one(rank: int) -> Any:
        group = kind(store, rank, NAMES[:ranks], "127.0.0.1", timeout_s, lambda _: None)
        try:
            return work(group)
        except (CommunicationError, RuntimeError, ValueError) as error:
            return error

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def contribution(folder: Path, codec: str, rank: int) -> Path:
    """What a cluster has learnt, encoded."""
    generator = torch.Generator().manual_seed(rank)
    own, path = parse_codec(codec), folder / f"part-{rank}"
    with path.open("wb") as stream:
        for count in COUNTS:
            out = torch.empty(own.size(count), dtype=torch.uint8)
            own.encode(torch.randn(count, generator=generator), out)
            stream.write(out.numpy().tobytes())
    return path


@each("codec", ["none", "bf16", "int8", "int4", "topk:0.05"])
@each("ranks", [1, 3])
def test_the_average_is_the_hubs_on_every_cluster(tmp_path: Path, codec: str, ranks: int) -> None:
    parts = [contribution(tmp_path, codec, rank) for rank in range(ranks)]
    plan = make_plan(codec, COUNTS, ranks)

    def work(group: Group) -> bytes:
        group.compare({"codec": codec, "turn": 3})
        goal = tmp_path / f"average-{group.rank}"
        average_among(group, plan, TOKENS[:ranks], parts[group.rank], goal)
        return goal.read_bytes()

    found = together(ranks, work)
    data = [part.read_bytes() for part in parts]
    wanted = b""
    for index, count in enumerate(COUNTS):
        start, stop = plan.starts[index : index + 2]
        each = [(part[start:stop], float(w)) for part, w in zip(data, TOKENS, strict=False)]
        wanted += combine(codec, count, each)
    assert found == [wanted] * ranks


def test_rows_longer_than_an_operation_and_empty_ones_arrive() -> None:
    size = 3 * 2**20 + 5

    def work(group: Group) -> bool:
        rows = [torch.full((size,), group.rank, dtype=torch.uint8) for _ in NAMES]
        rows[1] = rows[1][:0]  # b gets nothing
        sizes = [0 if group.rank == 1 else size] * 3
        found = group.exchange(rows, sizes, size)
        return [len(row) for row in found] == sizes and all(
            bool((row == sender).all()) for sender, row in enumerate(found)
        )

    assert together(3, work) == [True] * 3


def test_who_would_average_something_else_is_named_and_no_process_ends() -> None:
    def work(group: Group) -> None:
        group.compare({"turn": 3, "size": 100 + 4 * (group.rank == 1), "codec": "int8"})

    for rank, error in enumerate(together(3, work)):
        assert isinstance(error, CommunicationError)
        others = ("b", "a")[rank == 1]
        size = 104 if rank == 1 else 100
        assert error.what == (
            f"cluster {others} is about to average something else: size is {size} here"
        )


def test_an_unsound_contribution_is_blamed_on_its_cluster(tmp_path: Path) -> None:
    parts = [contribution(tmp_path, "none", rank) for rank in range(3)]
    plan = make_plan("none", COUNTS, 3)
    with parts[2].open("r+b") as stream:
        stream.seek(plan.starts[3])
        stream.write(b"\xff" * 4)

    def work(group: Group) -> None:
        average_among(group, plan, TOKENS, parts[group.rank], tmp_path / f"{group.rank}")

    errors = together(3, work, timeout_s=3.0)
    blames = [error for error in errors if isinstance(error, UnsoundPartError)]
    assert [error.rank for error in blames] == [2]
    assert "piece 3" in str(blames[0])


class BadLink(Group):
    """A group on whose way from a to c one bit flips."""

    def exchange(self, rows: Any, sizes: Any, longest: int) -> list[torch.Tensor]:
        found = super().exchange(rows, sizes, longest)
        if self.rank == 2 and len(found[0]):
            found[0][len(found[0]) // 2] ^= 4
        return found


def test_bytes_that_come_damaged_are_not_averaged(tmp_path: Path) -> None:
    parts = [contribution(tmp_path, "int8", rank) for rank in range(3)]
    plan = make_plan("int8", COUNTS, 3)

    def work(group: Group) -> None:
        average_among(group, plan, TOKENS, parts[group.rank], tmp_path / f"{group.rank}")

    errors = together(3, work, timeout_s=3.0, kind=BadLink)
    assert isinstance(errors[2], CommunicationError)
    assert "bytes from cluster a have come damaged" in errors[2].what
    assert all(isinstance(error, Exception) for error in errors)


class Elsewhere:
    """The store as seen by a cluster whose own address means another host to the others."""

    def __init__(self, store: HashStore, port: int) -> None:
        self._store, self._port = store, port

    def set(self, key: str, value: str) -> None:
        """Tell all."""
        if key.startswith("call/"):
            value = json.dumps(["127.0.0.1", self._port, json.loads(value)[2]])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What somebody has told."""
        return self._store.get(key)


def test_clusters_that_do_not_reach_one_another_are_named_by_all() -> None:
    """Nobody answers where b should be, and something else where c should be."""

    def call(ranks: int, stores: list[Any]) -> list[Any]:
        def one(rank: int) -> Any:
            try:
                return call_each_other(stores[rank], rank, NAMES[:ranks], "lo", DEADLINE_S)
            except UnreachableError as error:
                return error

        with ThreadPoolExecutor(ranks) as pool:
            return list(pool.map(one, range(ranks)))

    assert call(3, [HashStore()] * 3) == [None] * 3
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        closed = nobody.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as unknown:
        threading.Thread(target=_speak, args=(unknown,), daemon=True).start()
        store, port = HashStore(), unknown.getsockname()[1]
        errors = call(3, [store, Elsewhere(store, closed), Elsewhere(store, port)])
        unknown.shutdown(socket.SHUT_RDWR)
    assert [error.pairs for error in errors] == [[(0, 1), (0, 2), (1, 2), (2, 1)]] * 3
    assert f"a does not reach b at 127.0.0.1 port {closed}: " in errors[2].what
    assert f"a does not reach c at 127.0.0.1 port {port}: another host answers" in errors[0].what


def _speak(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"x" * 32)


def test_a_cluster_that_stays_away_holds_nobody_for_long() -> None:
    asyncio.run(_stays_away())


async def _stays_away() -> None:
    store, noticed = HashStore(), threading.Event()

    def work(rank: int, attempt: Attempt) -> Made:
        group = attempt.hold(Group(store, rank, NAMES[:2], "127.0.0.1", 2.0, lambda _: None))
        if rank == 1:  # it lives, and sends nothing
            assert noticed.wait(DEADLINE_S)
        group.compare({"turn": 3})
        raise AssertionError("it has averaged with nobody")

    waits, idle = (Attempt(partial(work, rank)) for rank in (0, 1))
    while waits.group is None or idle.group is None:
        await asyncio.sleep(0.01)
    assert not await waits.abandon(0.1), "gloo waits on"
    assert waits.is_alive
    with pytest.raises(RuntimeError, match="Timed out"):
        await asyncio.wait_for(waits.result, DEADLINE_S)
    await idle.abandon(0.0)
    noticed.set()
    with pytest.raises(CommunicationError, match="the epoch has ended"):
        await asyncio.wait_for(idle.result, DEADLINE_S)
    assert await waits.abandon(DEADLINE_S) and await idle.abandon(DEADLINE_S)
