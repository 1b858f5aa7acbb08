"""A hub or a bucket announces sizes that no file of this run has: nothing of it is fetched."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from isles.errors import ConfigError
from isles.outer.average import average_size
from isles.outer.bucket import BucketSettings
from isles.outer.bucket.api import BucketApi
from isles.outer.bucket.link import BucketRefusal
from isles.outer.client.api import HubApi
from isles.outer.client.http import HubRefusal, RateLimit
from isles.outer.client.spool import Spool
from isles.outer.hub.server import fingerprint, make_identity
from isles.outer.messages import Join, RoundAnswer, State, StateFile
from isles.run.join_line import JoinLine
from tests.deadline import DEADLINE_S
from tests.made_watch import running
from tests.outer_world import ZERO, joining, member_id
from tests.unit.test_web import Near

NUMBERS = 4
BYTES = 4 * NUMBERS
"""Of an average of the run, and of a contribution."""

Tables = dict[str, list[list[Any]]]


def average(size_bytes: int, clusters: int = 1) -> RoundAnswer:
    weights = {f"c{number}": 10 for number in range(clusters)}
    values = {"outer_step": 0, "state": "committed", "size_bytes": size_bytes, "digest": ZERO}
    return RoundAnswer.model_validate({**values, "weights": weights, "is_kept": True})


def state_of(*files: tuple[str, int]) -> State:
    each = [
        StateFile(name=f"{name}.safetensors", size_bytes=size, digest=ZERO) for name, size in files
    ]
    return State(version=0, outer_params=[ZERO], files=each)


ODD_STATES = (
    state_of(("a", 2**48)),
    state_of(("a", 100), ("b", 100)),
    state_of(("a", 100), ("a", 100)),
    state_of(("a", 2**23)),
)


class OddHub(Near):
    """Whatever it is asked to give, it has not; but it answers who joins, and gives a state."""

    answers: ClassVar[dict[str, dict[str, Any]]] = {}

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        answer = self.answers.get(self.path)
        if answer is None:
            self.heard.append(self.path)
        body = json.dumps(answer or {"kind": "no_file", "what": "it is not there"}).encode()
        self.send_response(200 if answer else 404)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET


def test_an_average_or_a_state_of_another_size_is_not_asked_of_a_hub(tmp_path):
    make_identity(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    joined = {"standing": "first", "outer_step": 0, "from_step": 0, "settings": {}, "lost": []}
    OddHub.answers, OddHub.heard = {"/v1/join": joined}, []
    goal = tmp_path / "fetched"

    async def fetch(join: Join, answer: RoundAnswer) -> str:
        async with HubApi(line, join.id) as api:
            await api.join(join, DEADLINE_S)
            with pytest.raises(HubRefusal) as caught:
                await api.fetch_average(answer, goal, DEADLINE_S)
            return caught.value.what

    async def pull(state: State) -> str:
        OddHub.answers["/v1/state"] = {"state": 1, "source": "e", **state.model_dump()}
        async with HubApi(line, member_id("a")) as api:
            await api.join(joining("a"), DEADLINE_S)
            with pytest.raises(HubRefusal) as caught:
                await api.pull_state(goal, DEADLINE_S)
            return caught.value.what

    topk = joining("a", codec="topk:0.01")
    own = average_size(topk.codec, NUMBERS, 1)
    with ThreadingHTTPServer(("127.0.0.1", 0), OddHub) as hub:
        hub.socket = context.wrap_socket(hub.socket, server_side=True)
        port, token = hub.server_address[1], (tmp_path / "token").read_text().strip()
        line = JoinLine("127.0.0.1", port, "t", token, fingerprint(tmp_path))
        with running(hub):
            for join, answer in (
                (joining("a"), average(2**50)),
                (joining("a"), average(BYTES + 1)),
                (joining("a"), average(BYTES, clusters=0)),
                (topk, average(2 * own)),
            ):
                assert "is announced" in asyncio.run(fetch(join, answer)), answer.size_bytes
            for state in ODD_STATES:
                assert "is announced with" in asyncio.run(pull(state)), state
            assert not OddHub.heard and not goal.exists()
            asyncio.run(fetch(joining("a"), average(BYTES)))
            asyncio.run(fetch(topk, average(3 * own, clusters=3)))
            assert OddHub.heard == 2 * ["/v1/rounds/0/average/hashes"]


class Member:
    """A cluster that has contributed once, and a writer of its bucket."""

    def __init__(self, folder: Path, api: BucketApi, told: list[str]) -> None:
        self.folder, self.api, self.told = folder, api, told
        self._journal = folder / "shared" / "journal"

    def write(self, change: Callable[[Tables], None]) -> None:
        """Another writes the next entry of the journal."""
        made = self.folder / "entry"
        while True:  # the member itself may write the next entry meanwhile
            last = max(self._journal.iterdir())
            entry = json.loads(gzip.decompress(last.read_bytes()))
            change(entry["tables"])
            made.write_bytes(gzip.compress(json.dumps(entry).encode()))
            try:
                (self._journal / f"{int(last.name) + 1:08d}").hardlink_to(made)
            except FileExistsError:
                continue
            made.unlink()
            return

    @property
    def fetched(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if "fetched" in path.name]


@asynccontextmanager
async def member_of(folder: Path) -> AsyncIterator[Member]:
    folder.mkdir()
    (folder / "shared").mkdir()
    join, told = joining("a"), list[str]()
    settings = BucketSettings(f"file://{folder}/shared", {"min_clusters": 1})
    spool = Spool.of(folder / "spool", join.pieces, join.version, 0)
    pace: dict[str, Any] = {"up": RateLimit(0.0), "down": RateLimit(0.0)}
    api = BucketApi(settings, join.id, "a", spool, **pace, report=told.append, show=lambda _: None)
    (folder / "part").write_bytes(bytes(BYTES))
    async with api:
        await api.join(join, DEADLINE_S)
        own: dict[str, Any] = {"tokens": 10, "steps": 1, "samples": [], "deadline_s": DEADLINE_S}
        await api.contribute(0, folder / "part", **own)
        await api.wait_round(0, DEADLINE_S)
        yield Member(folder, api, told)
    api.close()


def commit(size_bytes: int) -> Callable[[Tables], None]:
    """A round that nobody has averaged."""

    def change(tables: Tables) -> None:
        tables["rounds"].append([1, "committed", "1" * 64, size_bytes, "", 1.0, 1.0])
        tables["parts"].append([1, tables["members"][0][0], 10, 1.0, "[]", ""])

    return change


def test_an_average_of_another_size_is_not_fetched_from_a_bucket(tmp_path):
    async def fetch(size_bytes: int) -> None:
        async with member_of(tmp_path / f"{size_bytes}") as member:
            member.write(commit(size_bytes))
            with pytest.raises(BucketRefusal, match=r"is announced with|that isles does not write"):
                answer = await member.api.wait_round(1, DEADLINE_S)
                await member.api.fetch_average(answer, member.folder / "fetched", DEADLINE_S)
            assert not member.fetched

    for size_bytes in (2**50, 300 * 2**20, 2**60):
        asyncio.run(fetch(size_bytes))


def test_a_state_of_another_size_is_not_fetched_from_a_bucket(tmp_path):
    async def pull(number: int, state: State) -> None:
        async with member_of(tmp_path / f"{number}") as member:

            def give(tables: Tables) -> None:
                one = tables["members"][0][0]
                tables["states"].append([1, one, 0, state.model_dump_json(), 1])

            member.write(give)
            # It reads what another has written at its next look.
            pulling = asyncio.create_task(member.api.pull_state(member.folder / "fetched", 60.0))
            while not (member.told or pulling.done()):
                await asyncio.sleep(0.01)
            pulling.cancel()
            await asyncio.wait([pulling])
            assert "is announced with" in member.told[-1], state
            assert not member.fetched

    for number, state in enumerate(ODD_STATES):
        asyncio.run(pull(number, state))


def test_a_contribution_of_another_size_is_not_fetched_from_a_bucket(tmp_path):
    def contribute(tables: Tables) -> None:
        evil = [*tables["members"][0]]
        evil[:3] = [77, member_id("e"), "e"]
        tables["members"].append(evil)
        tables["rounds"].append([1, "averaging", "", 0, "", 0.0, 0.0])
        tables["parts"].append([1, 77, 10, 1.0, "[]", ""])
        tables["objects"].append([1, 77, "1" * 64, 2**50])

    async def take_part() -> None:
        async with member_of(tmp_path / "a") as member:
            member.write(contribute)
            answer = await member.api.wait_round(1, DEADLINE_S)
            assert f"announced with {2**50} bytes" in answer.refused["e"]

    asyncio.run(take_part())


def test_what_the_core_cannot_read_in_a_journal_ends_in_words(tmp_path):
    def spoil(table: str, row: list[Any]) -> Callable[[Tables], None]:
        return lambda tables: tables[table].append(row)

    async def look(case: int, change: Callable[[Tables], None]) -> None:
        async with member_of(tmp_path / f"{case}") as member:
            member.write(change)
            looking = member.api._looking
            assert looking is not None
            await asyncio.wait({looking}, timeout=DEADLINE_S)
            with pytest.raises(
                ConfigError, match=r"that isles does not|not an entry of a journal"
            ) as caught:
                member.api.check()
            assert caught.value.id == "bucket.refused" and "\n" not in caught.value.what

    for case, change in enumerate(
        (
            spoil("rounds", [1, "committed", "", None, "", 1.0, 1.0]),
            spoil("rounds", [1, "collecting", "", 2**62, "", 1.0, 1.0]),
            spoil("meta", ["first", "{}"]),
        )
    ):
        asyncio.run(look(case, change))
