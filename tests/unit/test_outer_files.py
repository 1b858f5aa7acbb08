"""Files that members send: what is counted or complete cannot be changed, nor stop a run."""

from __future__ import annotations

import asyncio
import hashlib
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.outer import average as codecs
from isles.outer.codec import Codec
from isles.outer.hub import files
from isles.outer.hub.files import AveragingJob, Incoming
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.work import HubWork
from isles.outer.messages import Contribution, digest_of
from isles.outer.parallel import in_order
from isles.outer.state_file import momentum_of, state_digest, state_head
from tests.deadline import DEADLINE_S
from tests.outer_trainer import mean
from tests.outer_world import World, joining, member_id, refused

INT8 = Codec("int8")
NAN = struct.pack("<4f", *[float("nan")] * 4)


def sound(value: float) -> bytes:
    return struct.pack("<4f", *[value] * 4)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def with_hub(folder: Path, test: Callable[[HubWork], Awaitable[None]]) -> None:
    """A hub without network that a and e have joined."""

    async def run() -> None:
        work = HubWork(folder, Settings(min_clusters=2))
        work.begin()
        try:
            for name in "ae":
                await work.ask(work.core.join, joining(name))
            await test(work)
        finally:
            await work.stop()

    asyncio.run(run())


async def contribute(work: HubWork, name: str, data: bytes) -> None:
    incoming = await work.part(member_id(name), 0)
    incoming.put(0, data, sha256(data))
    values = {"tokens": 10, "steps": 1, "samples": [], "digest": digest_of([sha256(data)])}
    await work.complete(0, Contribution.model_validate({"id": member_id(name), **values}))


async def average(work: HubWork) -> bytes:
    while work.core.rounds.next == 0:
        changed = work.changed
        if await work.ask(lambda: work.core.rounds.next == 0):
            await changed.wait()
    return work.core.rounds.average_path(0).read_bytes()


def test_a_chunk_that_comes_late_changes_no_contribution_that_is_counted(tmp_path):
    async def test(work: HubWork) -> None:
        slow = await work.part(member_id("e"), 0)
        await work.ask(work.core.membership.retire, work.core.caller(member_id("e")), "left", "")
        await work.sweep()
        await work.ask(work.core.join, joining("e"))
        between = await work.part(member_id("e"), 0)
        await contribute(work, "e", sound(1.0))
        for late in (slow, between):
            assert "not needed any more" in refused(late.put, 0, NAN, sha256(NAN)).what
        with pytest.raises(Refusal, match="counted already"):
            await work.part(member_id("e"), 0)
        await contribute(work, "a", sound(3.0))
        assert await average(work) == sound(2.0)

    with_hub(tmp_path, test)


@pytest.mark.parametrize("damage", ["nan", "short", "missing"])
def test_a_contribution_that_is_damaged_is_left_out_by_name(tmp_path, damage):
    async def test(work: HubWork) -> None:
        await contribute(work, "e", sound(1.0))
        path = work.core.rounds.part_path(0, 2)
        {
            "nan": lambda: path.write_bytes(NAN),
            "short": lambda: path.write_bytes(b"1234"),
            "missing": path.unlink,
        }[damage]()
        await contribute(work, "a", sound(3.0))
        assert await average(work) == sound(3.0)
        answer = work.core.rounds.answer(0)
        assert list(answer.weights) == ["a"] and list(answer.refused) == ["e"]

    with_hub(tmp_path, test)


def test_a_file_that_lacks_momentum_is_no_state_of_a_run_with_it(tmp_path):
    path = tmp_path / "fragment-0.safetensors"
    found = {}
    for holds in (True, False):
        head = state_head("a", 0, 0, 4, has_momentum=holds)
        path.write_bytes(head + bytes(16 * (1 + holds)))
        for text in ("0.9", "0.0", None):
            identity = {} if text is None else {"outer.momentum": text}
            needs = momentum_of(identity)
            found[holds, text] = bool(state_digest(path, "a", 0, 0, [4], needs))
    assert found == {
        (True, "0.9"): True,
        (True, "0.0"): False,
        (True, None): True,
        (False, "0.9"): False,
        (False, "0.0"): True,
        (False, None): True,
    }


def test_a_state_is_complete_once_and_its_source_must_send(tmp_path):
    world = World(tmp_path, "aen", source_s=2.0)
    world.core.states.touch()
    source = world.want_state("n").source
    other = "e" if source == "a" else "a"
    number = world.offer_state(source, 0, "0" * 64)
    states, caller = world.core.states, world.core.caller

    def uploads(name: str) -> object:
        return world.do(lambda: states.uploads(caller(member_id(name)), number))

    asked = set()
    for _ in range(5):  # it asks, and sends no byte
        world.now += 0.7
        try:
            uploads(source)
            world.offer_state(source, 0, "0" * 64)
        except Refusal:
            break
        asked.add(world.want_state("n").source)
    assert world.want_state("n").source == other, asked
    right = world.offer_state(other, 0, "0" * 64)
    states.complete(right)
    refusal = refused(lambda: world.do(lambda: states.uploads(caller(member_id(other)), right)))
    assert "complete already" in refusal.what
    assert states.is_given(caller(member_id(other)), right)


def test_of_a_file_that_is_closed_nothing_is_kept(tmp_path):
    path, data = tmp_path / "0", sound(1.0)
    first = Incoming(path, len(data))
    first.put(0, data, sha256(data))
    first.seal(digest_of([sha256(data)]))
    first.close()
    second = Incoming(path, len(data))
    second.put(0, NAN, sha256(NAN))
    assert "not needed any more" in refused(first.keep).what
    assert not path.exists()


def test_pieces_are_averaged_at_once_to_the_same_bytes(tmp_path, monkeypatch):
    pieces, paths, all_begun = [5000, 300, 5000, 4096, 7, 5000], [], threading.Barrier(4)
    for seed in (1, 2):
        values = torch.randn(sum(pieces), generator=torch.Generator().manual_seed(seed))
        parts = [torch.empty(INT8.size(n), dtype=torch.uint8) for n in pieces]
        for own, part in zip(values.split(pieces), parts, strict=True):
            INT8.encode(own, part)
        paths.append(tmp_path / f"{seed}.part")
        paths[-1].write_bytes(torch.cat(parts).numpy().tobytes())
    wanted = mean(INT8, pieces, [(path.read_bytes(), 1.0 + i) for i, path in enumerate(paths)])
    job = AveragingJob(0, [(path, 1 + i) for i, path in enumerate(paths)], tmp_path / "average")
    combine = codecs.combine_each

    def combine_together(codec: str, n: int, *arguments: Any) -> bytes:
        if threading.current_thread() is not threading.main_thread() and n in (300, 5000):
            all_begun.wait(DEADLINE_S)  # four of the six pieces
        return combine(codec, n, *arguments)

    monkeypatch.setattr(codecs, "combine_each", combine_together)
    found = []
    for threads in (1, 4):
        found.append(files.average("int8", pieces, job, threads=threads))
        assert job.target.read_bytes() == wanted
        assert files.norm_of("int8", pieces, paths[0], threads=threads) == pytest.approx(
            files.norm_of("int8", pieces, paths[0])
        )
    assert found[0] == found[1] and found[0][1] == len(wanted)
    paths[1].write_bytes(paths[1].read_bytes()[:-4])
    with pytest.raises(EOFError, match=r"2\.part is 4 bytes too short"):
        files.average("int8", pieces, job, threads=4)
    paths[0].write_bytes(b"\xff" * paths[0].stat().st_size)
    with pytest.raises(ValueError, match=r"^piece 0: number 0 of 5000"):
        files.norm_of("int8", pieces, paths[0], threads=4)


def test_threads_run_a_few_items_ahead_and_stop_at_the_first_failure():
    taken, done = [], []

    def items() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    def call(number: int) -> int:
        if number == 20:
            raise ValueError("item 20")
        return number

    with pytest.raises(ValueError, match="item 20"):
        for result in in_order(call, items(), threads=3):
            done.append(result)
            assert len(taken) <= len(done) + 6
    assert done == [*range(20)] and len(taken) < 30
