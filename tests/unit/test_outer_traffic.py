"""The hub's memory for requests and answers, shared out among those who send and read."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict, CIMultiDictProxy

from isles.outer.hub import traffic
from isles.outer.hub.rules import Refusal, Settings
from isles.outer.hub.traffic import Shared, Traffic
from isles.outer.hub.work import TURN, HubWork
from isles.run.unauthenticated import network
from tests.outer_world import member_id

_MIB = 2**20


async def _is_member(member_id: str) -> bool:
    return member_id.endswith(("61", "62"))


async def _known(made: Traffic, name: str) -> str:
    headers = {traffic.MEMBER: member_id(name)}
    return await made.sender(make_mocked_request("GET", "/", headers=headers))


def test_what_is_no_id_is_asked_of_nobody():
    """It would reach sqlite, and be a key of tables: bytes that are no text, other digits."""
    bad = ["\udcff" * 32, "\ud800" * 32, "\u0663" * 32, "\xff" * 32, "A" * 32, "0" * 31, "0" * 33]
    bad += ["at 10.0.0.1".ljust(32), "%" * 32, "0" * 31 + "\n", "0" * 31 + "'", "\0" * 32, ""]
    asked = list[str]()

    async def ask(member_id: str) -> bool:
        asked.append(member_id)
        return True

    async def use() -> None:
        made = Traffic(ask, 64)
        for given in bad:
            # aiohttp's mock encodes what it is given; the headers of a request are set by hand.
            request = make_mocked_request("GET", "/")
            request._headers = CIMultiDictProxy(CIMultiDict({traffic.MEMBER: given}))
            assert (await made.sender(request)).startswith("at "), given
        assert asked == []
        assert await _known(made, "a") == member_id("a")

    asyncio.run(use())


def test_who_fills_its_share_keeps_no_other_waiting():
    async def use() -> None:
        made = Traffic(_is_member, 64)
        assert await _known(made, "a") == member_id("a")
        assert (await _known(made, "x")).startswith("at "), "no member"
        b = await _known(made, "b")
        async with AsyncExitStack() as stack:
            for number in range(8):  # of eight addresses: all that there is
                for _ in range(16):
                    held = made.holding(f"at {number}", _MIB, 600.0)
                    await stack.enter_async_context(held)
            assert made.num_bytes == 128 * _MIB
            for _ in range(4):
                await stack.enter_async_context(made.holding(b, _MIB, 600.0))
            waiting = asyncio.create_task(stack.enter_async_context(made.holding("at 1", 1, 600.0)))
            await asyncio.sleep(0)
            assert not waiting.done()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert made.num_bytes == 0

    asyncio.run(use())


def test_few_of_one_sender_wait():
    async def use() -> None:
        made = Traffic(_is_member, 64)

        async def hold() -> None:
            async with made.holding("at 1", 16 * _MIB, 600.0):
                pass

        async with made.holding("at 1", 16 * _MIB, 600.0):
            tasks = [asyncio.create_task(hold()) for _ in range(65)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            (refused,) = done
            with pytest.raises(Refusal) as caught:
                await refused
            assert caught.value.status == 429
        await asyncio.gather(*set(tasks) - done)
        assert made.num_bytes == 0

    asyncio.run(use())


def test_of_too_many_long_polls_of_one_sender_the_oldest_answer():
    async def use() -> None:
        made, changed = Traffic(_is_member, 64), asyncio.Event()
        over = []

        async def poll(sender: str, number: int) -> None:
            async with made.polling(sender) as held:
                while not (held.is_over or changed.is_set()):
                    await held.wait(changed, 600.0)
                if held.is_over:
                    over.append(number)

        other = asyncio.create_task(poll("b", -1))
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(poll("e", number)))
            await asyncio.sleep(0)
        await asyncio.gather(*tasks[:4])
        assert over == [0, 1, 2, 3] and not other.done() and not tasks[4].done()
        changed.set()
        await asyncio.gather(other, *tasks)

    asyncio.run(use())


def test_a_transfer_that_lasts_ends_once_another_waits_for_its_memory():
    async def use() -> None:
        made, loop = Traffic(_is_member, 64), asyncio.get_running_loop()
        clock, later = loop.time, [0.0]
        loop.time = lambda: clock() + later[0]
        ended = []

        async def hold(sender: str, until: asyncio.Event) -> None:
            try:
                async with made.holding(sender, 16 * _MIB, 600.0):
                    await until.wait()
            except TimeoutError:
                ended.append(sender)

        try:
            never, now = asyncio.Event(), asyncio.Event()
            now.set()
            slow = [asyncio.create_task(hold(f"at {number}", never)) for number in range(8)]
            await asyncio.sleep(0)
            waiting = asyncio.create_task(hold("at 9", now))
            await asyncio.sleep(0)
            assert not ended and not waiting.done()
            later[0] = 30.0
            await waiting
            assert ended == ["at 0"], "the oldest, and no more than are needed"
            later[0] += 600.0
            await asyncio.gather(*slow)
            assert made.num_bytes == 0
        finally:
            loop.time = clock

    asyncio.run(use())


def test_many_requests_of_one_sender_take_turns_with_others(tmp_path):
    async def use() -> None:
        work, order = HubWork(tmp_path, Settings()), list[str]()

        async def ask(sender: str) -> None:
            TURN.set(made.turn(sender))
            await work.ask(order.append, sender)

        try:
            made = Traffic(_is_member, 64)
            async with asyncio.TaskGroup() as tasks:
                for sender in ("e",) * 100 + ("a",):
                    tasks.create_task(ask(sender))
        finally:
            work.ticking = asyncio.gather()
            work._importing = asyncio.create_task(asyncio.sleep(0))
            await work.stop()
        assert order.index("a") <= 2 and len(order) == 101

    asyncio.run(use())


def test_slow_readers_of_a_shared_answer_keep_two_in_memory():
    async def use() -> None:
        made = 0

        async def make() -> bytes:
            nonlocal made
            made += 1
            return bytes([made])

        shared, loop = Shared(make), asyncio.get_running_loop()
        clock, now = loop.time, [0.0]
        loop.time = lambda: now[0]
        try:
            async with AsyncExitStack() as stack:
                seen = []
                for _ in range(5):
                    now[0] += 1.0
                    seen.append(await stack.enter_async_context(shared.newest()))
            assert seen == [b"\1", b"\2", b"\2", b"\2", b"\2"]
            now[0] += 1.0
            async with shared.newest() as body:
                assert body == b"\3"
        finally:
            loop.time = clock

    asyncio.run(use())


def test_a_site_has_one_network():
    found = {
        "192.0.2.1": "192.0.2.1",
        "2001:db8:1:2:3::4": "2001:db8:1:2::/64",
        "fe80::1%eth0": "fe80::/64",
        None: "None",
    }
    assert {address: network(address) for address in found} == found
