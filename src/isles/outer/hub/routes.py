"""The hub's HTTP routes: the token is checked first, and errors are answered with text."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from isles.errors import UserError
from isles.outer.body import read_body
from isles.outer.hub.core import live, status
from isles.outer.hub.files import Incoming, chunk_list, write_chunk_list
from isles.outer.hub.rules import Refusal
from isles.outer.hub.traffic import SMALL_BYTES, PacedResponse, Shared, Traffic, address_of, write
from isles.outer.hub.work import TURN, HubWork
from isles.outer.messages import (
    CHUNK_BYTES,
    Applied,
    Contribution,
    ErrorBody,
    Heartbeat,
    HeldAnswer,
    Join,
    LeaseRequest,
    LeaveRun,
    OnlyId,
    Received,
    RoundAnswer,
    ShownRecord,
    StateFile,
    StateNumber,
    StateOffer,
    chunk_size,
    num_chunks,
)
from isles.run.records import used_up
from isles.run.relay import LONGEST

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Knows = Callable[[asyncio.BaseTransport | None, str], None]

_MOST_UPLOADS = 16
"""Number of chunks that a member may send at the same time; a client sends four."""
_JOIN_BYTES, _AT_ONCE_BYTES = 4 * 2**20, 2**15
_BODY_BYTES = {Join: _JOIN_BYTES, Contribution: 2**20, StateOffer: 2**20, ShownRecord: 2 * LONGEST}
"""Limits of long bodies: a join lists the model's pieces."""
_BODY_S, _CHUNK_S, _LONGEST_WAIT_S = 60.0, 600.0, 30.0
_MOST_PARSED = 2
"""Number of long joins that are read at the same time."""
_FEW_SPANS = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NO_TOKEN, _DISK_FULL = 401, 507


def guard(token: str, knows: Knows, traffic: Traffic) -> Middleware:
    """Middleware that answers 401 to every request without the token.

    Args:
        token: the token.
        knows: called with the connection of a request that has the token, and again with its
            member's
            id.
        traffic: writes the answers.

    Every error becomes an answer with text; only bugs of the hub get a traceback.
    """
    right = f"Bearer {token}".encode()

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        try:
            if not hmac.compare_digest(given, right):
                fix = "use the join line of this hub"
                raise Refusal("token", "the token is not this hub's", fix)
            knows(request.transport, "")
            TURN.set(traffic.turn(address := address_of(request)))
            if (sender := await traffic.sender(request)) != address:
                TURN.set(traffic.turn(sender))
                knows(request.transport, sender)
            if encoding := request.headers.get("Content-Encoding"):
                what = f"a body with Content-Encoding {encoding[:32]!r}"
                raise Refusal("encoded", what, "send it uncompressed")
            answered = await handler(request)
        except Exception as error:
            if request.transport is None or request.transport.is_closing():
                raise ConnectionResetError("the connection is gone") from error
            status, body = _explain(error)
            if status == 500:
                log.exception("a bug of the hub at %s %r", request.method, request.path)
            elif status == _DISK_FULL:
                log.error("disk: %s", error)
            answered = _answer(body, status)
            if status == _NO_TOKEN:
                answered.force_close()
        await traffic.send(request, answered)
        return answered

    return answer


def _explain(error: Exception) -> tuple[int, ErrorBody]:
    match error:
        case Refusal():
            return error.status, ErrorBody(kind=error.kind, what=error.what, fix=error.fix)
        case web.HTTPException():
            return error.status, ErrorBody(kind="http", what=f"{error.status} {error.reason}")
        case UserError():
            return 422, ErrorBody(kind="malformed", what=error.what, fix=error.fix)
        case ConnectionError() | TimeoutError():
            return 408, ErrorBody(kind="slow", what="the request's body did not arrive in time")
        case OSError() | sqlite3.OperationalError():
            limit = used_up(error, Path(getattr(error, "filename", None) or "."))
            room = limit[1] if limit else "free some space in its state directory"
            if "locked" in str(error):
                room = "stop the program that reads hub.sqlite"
            what = f"the hub's disk: {getattr(error, 'strerror', None) or error}"
            fix = f"{room}; clusters retry by themselves"
            return _DISK_FULL, ErrorBody(kind="disk", what=what, fix=fix)
        case _:
            fix = "see the traceback in its log"
            return 500, ErrorBody(kind="bug", what="internal error of the hub", fix=fix)


def _answer(content: BaseModel | dict[str, Any] | list[str], status: int = 200) -> PacedResponse:
    text = content.model_dump_json() if isinstance(content, BaseModel) else json.dumps(content)
    return PacedResponse(text.encode(), status)


async def _body(request: web.Request, size: int) -> bytes:
    # Not `request.read`: a connection keeps its last request and the data it has read.
    try:
        return await read_body(request.content, request.transport, size)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("the body was cut off") from error


async def _read(
    request: web.Request,
    kind: type[M],
    traffic: Traffic,
    parsing: asyncio.Semaphore | None = None,
) -> M:
    # The body of a request.
    size = request.content_length
    if size is None:
        raise Refusal("malformed", "a body without Content-Length")
    if size > _BODY_BYTES.get(kind, SMALL_BYTES):
        raise Refusal("too_large", f"a body of {size} bytes")
    try:
        if size <= SMALL_BYTES:
            async with asyncio.timeout(_BODY_S):
                body = await request.read()
            return kind.model_validate_json(body, strict=True)
        async with traffic.holding(await traffic.sender(request), size, _BODY_S):
            body = await _body(request, size)
            if parsing is None or size <= _AT_ONCE_BYTES:
                return kind.model_validate_json(body, strict=True)
            async with parsing:  # other requests are answered in the meantime
                return await asyncio.to_thread(kind.model_validate_json, body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refusal("malformed", f"{place}: {first['msg']}") from None


def _number(request: web.Request, key: str) -> int:
    return int(request.match_info[key])


async def _put(request: web.Request, incoming: Incoming, traffic: Traffic) -> web.StreamResponse:
    index, count = _number(request, "chunk"), num_chunks(incoming.size_bytes)
    if index >= count:
        raise Refusal("malformed", f"chunk {index} of a file of {count} chunks")
    due = chunk_size(incoming.size_bytes, index)
    sha256 = request.headers.get("X-Sha256", "")
    if request.content_length != due or not _SHA256.fullmatch(sha256):
        raise Refusal(
            "malformed",
            f"chunk {index} has {request.content_length} bytes instead of {due}, with their sha256",
            "use the same model and fragments on all clusters",
        )
    async with traffic.holding(await traffic.sender(request), due, _CHUNK_S):
        data = await _body(request, due)
        await asyncio.to_thread(incoming.put, index, data, sha256)
    return _answer({})


def _read_part(path: Path, part: slice) -> tuple[bytes, int]:
    # The requested part, empty if it begins after the end; and the size of the file.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if part.start >= size:
            return b"", size
        file.seek(part.start)
        return file.read(part.stop - part.start), size


def make_app(work: HubWork, token: str, knows: Knows) -> web.Application:
    """The routes of a hub; all require the token."""
    core = work.core
    clusters = core.settings.max_clusters
    traffic = Traffic(lambda member_id: work.ask(core.membership.has, member_id), clusters)
    routes, middlewares = Routes(work, traffic), [guard(token, knows, traffic)]
    app = web.Application(middlewares=middlewares, client_max_size=_JOIN_BYTES)

    def post(path: str, kind: type[M], call: Callable[[M], Any]) -> web.RouteDef:
        # A request that one method of the core answers.
        async def handler(request: web.Request) -> web.StreamResponse:
            return _answer(await work.ask(call, await _read(request, kind, traffic)) or {})

        return web.post(path, handler)

    def upload(path: str, find: Callable[[web.Request], Awaitable[Incoming]], put: Handler) -> None:
        # The stored chunks of a file; and an upload of a chunk.
        async def received(request: web.Request) -> web.StreamResponse:
            incoming = await find(request)
            chunks = {str(index): sha256 for index, sha256 in incoming.received().items()}
            return _answer(Received(size_bytes=incoming.size_bytes, chunks=chunks))

        app.add_routes([web.get(path, received), web.put(f"{path}/{{chunk:[0-9]{{1,12}}}}", put)])

    def download(path: str, find: Callable[[web.Request], Awaitable[Path]]) -> None:
        # A file, and the hashes of its chunks.
        async def content(request: web.Request) -> web.StreamResponse:
            # A chunk per request, as clusters need it; a FileResponse passes 16 KiB at a time to
            # TLS.
            path, sender = await find(request), await traffic.sender(request)
            with suppress(ValueError, FileNotFoundError):  # FileResponse answers these
                part = request.http_range
                if part.stop is not None and part.stop - part.start <= CHUNK_BYTES:
                    async with traffic.answering(request, sender, CHUNK_BYTES, _CHUNK_S):
                        data, size = await asyncio.to_thread(_read_part, path, part)
                        if data:
                            span = f"bytes {part.start}-{part.start + len(data) - 1}/{size}"
                            headers = {"Content-Range": span}
                            answer = PacedResponse(data, 206, headers)
                            await write(request, answer)
                            return answer
            return web.FileResponse(path)

        async def hashes(request: web.Request) -> web.StreamResponse:
            try:
                return _answer(chunk_list(await find(request)).read_text().split())
            except FileNotFoundError:
                what = "this file is empty or not kept, so it has no chunks"
                raise Refusal("no_file", what) from None

        app.add_routes([web.get(path, content), web.get(f"{path}/hashes", hashes)])

    step, state = "/v1/rounds/{outer_step:[0-9]{1,12}}", "/v1/states/{state:[0-9]{1,12}}"
    file, member = f"{state}/files/{{index:[0-9]{{1,12}}}}", "{id:[0-9a-f]{32}}"
    app.add_routes(
        [
            web.post("/v1/join", routes.join),
            post("/v1/heartbeat", Heartbeat, core.heartbeat),
            post("/v1/leave", LeaveRun, core.leave),
            post("/v1/reset-done", OnlyId, lambda body: core.reset_done(body.id)),
            post("/v1/lease", LeaseRequest, core.lease),
            post("/v1/applied", Applied, core.applied),
            web.post(f"{step}/complete", routes.complete),
            web.get(step, routes.round),
            web.post(f"{step}/held", routes.held),
            post("/v1/live", ShownRecord, core.show),
            post("/v1/state", OnlyId, lambda body: core.states.want(core.caller(body.id))),
            web.post("/v1/states", routes.offer_state),
            web.post(f"{state}/complete", routes.complete_state),
            # For people, and for clusters that want to join.
            web.get("/v1/status", routes.status),
            web.get("/v1/live", routes.live),
            web.get("/v1/run-file", routes.run_file),
        ]
    )
    upload(f"{step}/parts/{member}", routes.part, routes.put_part)
    download(f"{step}/average", routes.average)
    upload(f"{file}/from/{member}", routes.state_part, routes.put_state)
    download(file, routes.state)
    return app


class Routes:
    """Requests that need more than one answer of the core; see `make_app`."""

    def __init__(self, work: HubWork, traffic: Traffic) -> None:
        self._work, self._core, self._traffic = work, work.core, traffic
        self._live, self._status = Shared(self._make_live), Shared(self._make_status)
        self._sending: dict[str, list[asyncio.Task[Any]]] = {}
        self._joining = set[str]()
        self._parsing, self._long = asyncio.Semaphore(_MOST_PARSED), asyncio.Lock()

    async def join(self, request: web.Request) -> web.StreamResponse:
        join = await _read(request, Join, self._traffic, self._parsing)
        if join.id in self._joining:
            raise Refusal("busy", "an earlier join of this cluster is still being checked", "wait")
        self._joining.add(join.id)
        try:
            await self._work.check_codec(join)
            if len(join.holding) <= _FEW_SPANS:
                return _answer(await self._work.ask(self._core.join, join))
            async with self._long:  # heartbeats pass between two of them
                return _answer(await self._work.ask(self._core.join, join))
        finally:
            self._joining.discard(join.id)

    async def _long_poll(
        self, request: web.Request, look: Callable[[], T], is_done: Callable[[T], bool]
    ) -> T:
        # Hold the answer back until the awaited event, for at most `wait` seconds.
        wait_s = 0.0
        with suppress(ValueError):
            wait_s = min(float(request.query.get("wait", "0")), _LONGEST_WAIT_S)
        loop = asyncio.get_running_loop()
        end = loop.time() + (wait_s if math.isfinite(wait_s) else 0.0)
        async with self._traffic.polling(await self._traffic.sender(request)) as poll:
            while True:
                changed = self._work.changed  # before looking, so that no change is missed
                found = await self._work.ask(look)
                left_s = end - loop.time()
                if is_done(found) or left_s <= 0 or poll.is_over:
                    return found
                await poll.wait(changed, left_s)

    async def round(self, request: web.Request) -> web.StreamResponse:
        outer_step = _number(request, "outer_step")

        def is_committed(answer: RoundAnswer) -> bool:
            return answer.state == "committed"

        look = self._core.rounds.answer
        answer = await self._long_poll(request, lambda: look(outer_step), is_committed)
        return _answer(answer)

    async def held(self, request: web.Request) -> web.StreamResponse:
        outer_step = _number(request, "outer_step")
        asker = (await _read(request, OnlyId, self._traffic)).id
        await self._work.ask(self._core.held, asker, outer_step)
        self._work.wake()  # it may be the last one
        is_everywhere = await self._long_poll(
            request, lambda: self._core.held(asker, outer_step), bool
        )
        return _answer(HeldAnswer(is_everywhere=is_everywhere))

    # Contributions and averages.

    async def put(self, request: web.Request, incoming: Incoming) -> web.StreamResponse:
        """Receive a chunk of a file. A member with too many uploads loses the oldest upload, whose
        connection may be down."""
        who, task = request.match_info["id"], asyncio.current_task()
        assert task is not None
        tasks = self._sending.setdefault(who, [])
        if len(tasks) >= _MOST_UPLOADS:
            tasks.pop(0).cancel()
        tasks.append(task)
        try:
            return await _put(request, incoming, self._traffic)
        finally:
            if task in tasks:
                tasks.remove(task)
            if not tasks:
                self._sending.pop(who, None)

    async def part(self, request: web.Request) -> Incoming:
        return await self._work.part(request.match_info["id"], _number(request, "outer_step"))

    async def put_part(self, request: web.Request) -> web.StreamResponse:
        return await self.put(request, await self.part(request))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        outer_step = _number(request, "outer_step")
        contribution = await _read(request, Contribution, self._traffic)
        return _answer(await self._work.complete(outer_step, contribution))

    async def average(self, request: web.Request) -> Path:
        return await self._work.ask(self._core.average_path, _number(request, "outer_step"))

    # States.

    async def offer_state(self, request: web.Request) -> web.StreamResponse:
        offer = await _read(request, StateOffer, self._traffic)
        caller, states = self._core.caller, self._core.states
        number = await self._work.ask(lambda: states.offer(caller(offer.id), offer))
        await self._work.sweep()
        return _answer(StateNumber(state=number))

    async def _uploads(self, state: int, asker: str) -> list[tuple[Path, StateFile]]:
        caller, states = self._core.caller, self._core.states
        return await self._work.ask(lambda: states.uploads(caller(asker), state))

    async def state_part(self, request: web.Request) -> Incoming:
        state, index = _number(request, "state"), _number(request, "index")
        files = await self._uploads(state, request.match_info["id"])
        if index >= len(files):
            raise Refusal("no_state", f"state {state} has {len(files)} files")
        path, file = files[index]
        return await self._work.incoming(path, file.size_bytes)

    async def put_state(self, request: web.Request) -> web.StreamResponse:
        """Receive a chunk of a state; only a new chunk counts as progress."""
        incoming = await self.state_part(request)
        before = len(incoming.received())
        answer = await self.put(request, incoming)
        if len(incoming.received()) > before:
            states, asker = self._core.states, request.match_info["id"]
            note, size = states.note_progress, request.content_length or 0
            await self._work.ask(lambda: note(self._core.caller(asker)["number"], size))
        return answer

    async def complete_state(self, request: web.Request) -> web.StreamResponse:
        state = _number(request, "state")
        asker, states = (await _read(request, OnlyId, self._traffic)).id, self._core.states
        if await self._work.ask(lambda: states.is_given(self._core.caller(asker), state)):
            return _answer({})  # the answer to an earlier request was lost
        files, whole = await self._uploads(state, asker), list[Incoming]()
        for path, file in files:
            incoming = await self._work.incoming(path, file.size_bytes)
            await asyncio.to_thread(incoming.seal, file.digest)
            hashes = [sha256 for _, sha256 in sorted(incoming.received().items())]
            await asyncio.to_thread(write_chunk_list, path, hashes)
            whole.append(incoming)
        if not await self._work.is_sound(state, [incoming.path for incoming in whole]):
            await self._work.ask(self._core.states.refuse, state)
            await self._work.sweep()
            raise Refusal(
                "malformed",
                f"the outer parameters in state {state} differ from its announcement",
                "check the disk of the cluster that sent it",
            )

        def complete() -> None:
            # Keep exactly the checked files, or complete nothing: a refusal undoes nothing.
            if not states.is_given(self._core.caller(asker), state):
                for incoming in whole:
                    incoming.keep()
                states.complete(state)

        await self._work.ask(complete)
        await self._work.forget(*[path for path, _ in files])
        return _answer({})

    async def state(self, request: web.Request) -> Path:
        state, index = _number(request, "state"), _number(request, "index")
        return await self._work.ask(self._core.states.download, state, index)

    # For people, and for clusters that want to join.

    async def status(self, request: web.Request) -> web.StreamResponse:
        return await self._share(request, self._status)

    async def live(self, request: web.Request) -> web.StreamResponse:
        return await self._share(request, self._live)

    async def _share(self, request: web.Request, shared: Shared) -> web.StreamResponse:
        async with shared.newest() as body:
            answer = PacedResponse(body, is_shared=True)
            await self._traffic.send(request, answer)
        return answer

    async def _make_status(self) -> bytes:
        found = {"run": self._work.run, **await self._work.ask(status, self._core)}
        return await asyncio.to_thread(lambda: json.dumps(found).encode())

    async def _make_live(self) -> bytes:
        found = await self._work.ask(live, self._core)
        return await asyncio.to_thread(lambda: json.dumps(found).encode())

    async def run_file(self, _: web.Request) -> web.StreamResponse:
        path = self._work.run_file
        if not path.exists():
            raise Refusal(
                "no_run_file",
                f"the hub of {self._work.run} was started without a run file",
                "give this cluster a separate run file",
            )
        return _answer({"run": self._work.run, "text": path.read_text()})
