"""What a changed program writes to a bucket, and what a hub answers: bounded and measured."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import AsyncExitStack
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from isles.outer.bucket import BucketSettings, replica
from isles.outer.bucket import api as bucket_api
from isles.outer.bucket.api import BucketApi
from isles.outer.bucket.link import BucketRefusal
from isles.outer.client.http import RateLimit
from isles.outer.client.spool import Spool
from isles.outer.hub.files import average_norm
from isles.outer.messages import HeartbeatAnswer, JoinAnswer, RoundAnswer, StateAnswer, digest_of
from isles.outer.messages import hash_chunks as hashes_of
from tests.deadline import DEADLINE_S
from tests.outer_world import ZERO, joining
from tests.unit.test_outer_sizes import Tables, member_of

GOOD = (0.1, -0.2, 0.1, 0.2)


@pytest.mark.parametrize("values", [(float("nan"),) * 4, (1e6,) * 4])
def test_a_contribution_is_measured_by_whoever_averages(tmp_path, monkeypatch, values):
    """The sender says that its norm is 0.5."""
    (tmp_path / "bucket").mkdir()
    settings = BucketSettings(f"file://{tmp_path}/bucket", {"min_clusters": 3})
    measure = bucket_api.norm_of

    async def take_part() -> RoundAnswer:
        async with AsyncExitStack() as stack:
            apis = []
            for name in ("evil", "one", "two"):
                join = joining(name)
                spool = Spool.of(tmp_path / name, join.pieces, 0, 0)
                pace: dict[str, Any] = {"up": RateLimit(0.0), "down": RateLimit(0.0)}
                say: dict[str, Any] = {"report": lambda _: None, "show": lambda _: None}
                api = BucketApi(settings, join.id, name, spool, **pace, **say)
                apis.append(await stack.enter_async_context(api))
                stack.callback(api.close)
                await api.join(join, DEADLINE_S)
            for api, each in zip(apis, (values, GOOD, GOOD), strict=True):
                path = tmp_path / f"{api.id}.part"
                path.write_bytes(struct.pack("<4f", *each))
                lies = each is values
                monkeypatch.setattr(bucket_api, "norm_of", (lambda *_: 0.5) if lies else measure)
                own: dict[str, Any] = {"tokens": 10, "steps": 1, "samples": []}
                await api.contribute(0, path, **own, deadline_s=DEADLINE_S)
            answer = await apis[1].wait_round(0, DEADLINE_S)
            await apis[2].wait_round(0, DEADLINE_S)
            await apis[2].fetch_average(answer, tmp_path / "average", DEADLINE_S)
            return answer

    answer = asyncio.run(take_part())
    assert set(answer.weights) == {"one", "two"} and set(answer.refused) == {"evil"}
    assert average_norm("none", [4], 2, tmp_path / "average") == pytest.approx(0.1**0.5, 1e-3)


def test_an_average_of_another_is_checked_before_it_is_applied(tmp_path):
    async def fetch(number: int, values: tuple[float, ...]) -> str:
        async with member_of(tmp_path / f"{number}") as member:
            made = tmp_path / f"made-{number}"
            made.write_bytes(struct.pack("<4f", *values))
            digest = digest_of(hashes_of(made))
            place = member.folder / "shared" / replica.average_place(1, digest)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.with_name(f"{place.name}-00000").write_bytes(made.read_bytes())

            def commit(tables: Tables) -> None:
                tables["rounds"].append([1, "committed", digest, 16, "", 1.0, 1.0])
                tables["parts"].append([1, tables["members"][0][0], 10, 1.0, "[]", ""])

            member.write(commit)
            answer = await member.api.wait_round(1, DEADLINE_S)
            try:
                await member.api.fetch_average(answer, member.folder / "fetched", DEADLINE_S)
            except BucketRefusal as error:
                assert not member.fetched
                return error.what
            return ""

    assert "is nan" in asyncio.run(fetch(0, (float("nan"),) * 4))
    assert "has a norm of 2e+06" in asyncio.run(fetch(1, (1e6,) * 4))
    assert asyncio.run(fetch(2, GOOD)) == ""


def test_a_journal_of_another_layout_is_refused(tmp_path):
    async def look() -> str:
        async with member_of(tmp_path / "a") as member:

            def lie(tables: Tables) -> None:
                for row in tables["meta"]:
                    if row[0] == "first":
                        row[1] = json.dumps({**json.loads(row[1]), "pieces": [[2**24]]})

            member.write(lie)
            looking = member.api._looking
            assert looking is not None
            await asyncio.wait({looking}, timeout=DEADLINE_S)
            return str(looking.exception())

    assert "weights are divided into different pieces" in asyncio.run(look())


@pytest.mark.parametrize("number", [2**63 - 1, 2**63, -1, True, 1.5])
def test_a_round_that_no_run_has_is_refused_with_its_value(tmp_path, number):
    async def look() -> str:
        async with member_of(tmp_path / "a") as member:
            row = [number, "open", "", 16, "", 1.0, 1.0]
            member.write(lambda tables: tables["rounds"].append(row))
            looking = member.api._looking
            assert looking is not None
            await asyncio.wait({looking}, timeout=DEADLINE_S)
            return str(looking.exception())

    assert f"rounds.round is {number}" in asyncio.run(look())


def test_a_long_heartbeat_is_not_read_and_the_others_are_heard(tmp_path):
    async def look() -> None:
        async with member_of(tmp_path / "a") as member:
            there = member.api._replica
            path = member.folder / "shared" / "members" / "e"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"[" * (replica.BEAT_BYTES + 1))
            assert there._read_beat("e") == b"" and there._read_beat("f") is None
            path.write_bytes(b"[" * replica.BEAT_BYTES)
            assert there._read_beat("e") == path.read_bytes()

    asyncio.run(look())


LONG = "m" * 2**20
JOINED: dict[str, Any] = {"standing": "behind", "outer_step": 0, "from_step": 0, "lost": []}
BEAT: dict[str, Any] = {"outer_step": 0, "open": [], "members": ["a"]}
ROUND: dict[str, Any] = {"outer_step": 0, "state": "committed"}


def test_answers_of_a_hub_have_bounds():
    known: list[tuple[type[BaseModel], dict[str, Any], list[dict[str, Any]]]] = [
        (
            JoinAnswer,
            {**JOINED, "settings": {"dead_after_s": 10.0, "wait": "all"}},
            [{"settings": {"dead_after_s": "abc"}}, {"why": LONG}, {"lost": [[3, 2]]}],
        ),
        (
            HeartbeatAnswer,
            BEAT,
            [{"members": [LONG]}, {"members": ["a"] * 5000}, {"command_reason": LONG}],
        ),
        (
            RoundAnswer,
            ROUND,
            [{"weights": {LONG: 1}}, {"refused": {"a": LONG}}, {"digest": LONG}, {"due_in_s": -1}],
        ),
        (StateAnswer, {"state": 1}, [{"source": LONG}, {"outer_params": [ZERO] * 5000}]),
    ]
    accepted = []
    for kind, good, changes in known:
        kind.model_validate(good)
        for change in changes:
            try:
                kind.model_validate({**good, **change})
            except ValidationError:
                continue
            accepted.append((kind.__name__, list(change)))
    assert accepted == []
