"""The requests that the hub answers: the token before anything else, errors in words."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import math
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
from isles.outer.hub.files import (
    Incoming,
    Sealed,
    WrongHash,
    chunk_list,
    is_safetensors,
    write_hashes,
)
from isles.outer.hub.rules import Refusal
from isles.outer.hub.status import events, status
from isles.outer.hub.work import Work
from isles.outer.messages import (
    Applied,
    Contribution,
    ContributionAnswer,
    ErrorBody,
    Heartbeat,
    HeldAnswer,
    Join,
    LeaseRequest,
    LeaveRun,
    OnlyId,
    Received,
    StateOffer,
    chunk_size,
    num_chunks,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_S, _CHUNK_S, _LONGEST_WAIT_S, _WARN_EVERY_S = 60.0, 600.0, 30.0, 10.0
_JSON_BYTES = 16 * 2**20
_MOST_DIGITS = 12
_ID, _SHA256 = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")
_DISK_FULL = 507


def token_check(token: str, welcome: Callable[[object], None]) -> Middleware:
    """Answers 401, whatever was asked for, unless a request carries the token.

    Args:
        welcome: is told the connections that have shown it.
    """
    right = hashlib.sha256(token.encode()).digest()
    refused, warn_at = 0, 0.0

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal refused, warn_at
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        if hmac.compare_digest(digest, right) and scheme == "Bearer":
            welcome(request.protocol)
            return await handler(request)
        refused += 1
        now = asyncio.get_running_loop().time()
        if now >= warn_at:  # not so often that strangers could fill the disk
            warn_at = now + _WARN_EVERY_S
            what = "refused: a request from %s without the right token (%d so far)"
            log.warning(what, request.remote, refused)
        fix = "use the join line that this hub has written"
        what = "the token is not this hub's"
        return _error(401, ErrorBody(kind="token", what=what, fix=fix))

    return check


@web.middleware
async def explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes an answer in words; only bugs of the hub get a traceback."""
    try:
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        status, body = _explain(error)
        if status == 500:
            log.exception("a bug of the hub at %s %s", request.method, request.path)
        elif status == _DISK_FULL:
            log.error("disk: %s", error)
        return _error(status, body)


def _explain(error: Exception) -> tuple[int, ErrorBody]:
    match error:
        case Refusal():
            return error.status, ErrorBody(kind=error.kind, what=error.what, fix=error.fix)
        case web.HTTPException():
            return error.status, ErrorBody(kind="http", what=f"{error.status} {error.reason}")
        case UserError():
            return 422, ErrorBody(kind="malformed", what=error.what, fix=error.fix)
        case ConnectionError() | TimeoutError():
            return 408, ErrorBody(kind="slow", what="the request's body did not come in time")
        case OSError() | sqlite3.OperationalError():
            what = f"the hub's disk: {getattr(error, 'strerror', None) or error}"
            fix = "free some space in its state directory; clusters try again by themselves"
            return _DISK_FULL, ErrorBody(kind="disk", what=what, fix=fix)
        case _:
            fix = "its log has the traceback"
            return 500, ErrorBody(kind="bug", what="the hub has failed", fix=fix)


def _error(status: int, body: ErrorBody) -> web.Response:
    text = body.model_dump_json()
    return web.Response(status=status, body=text.encode(), content_type="application/json")


async def read(request: web.Request, kind: type[M]) -> M:
    """The body of a request.

    Raises:
        Refusal: it is not of this kind, or too large.
    """
    if request.content_length is None:
        raise Refusal(411, "malformed", "a body without Content-Length")
    async with asyncio.timeout(_BODY_S):
        body = await request.read()
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise Refusal(422, "malformed", f"{place}: {first['msg']}") from None


def _answer(content: BaseModel | dict[str, Any] | list[Any] | None) -> web.Response:
    if isinstance(content, BaseModel):
        text = content.model_dump_json()
    else:
        text = json.dumps({} if content is None else content)
    return web.Response(body=text.encode(), content_type="application/json")


def _number(request: web.Request, key: str) -> int:
    text = request.match_info[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise Refusal(422, "malformed", f"{key} {text[:80]!r} is no number")
    return int(text)


def _member_id(request: web.Request) -> str:
    text = request.match_info["id"]
    if not _ID.fullmatch(text):
        raise Refusal(422, "malformed", "an id has 32 hexadecimal digits")
    return text


def _wait_s(request: web.Request) -> float:
    # For how long an answer may be held back.
    try:
        wait_s = float(request.query.get("wait", "0"))
    except ValueError:
        return 0.0
    return max(0.0, min(wait_s, _LONGEST_WAIT_S)) if math.isfinite(wait_s) else 0.0


def _incomplete(missing: list[int]) -> Refusal:
    return Refusal(
        409,
        "incomplete",
        f"{len(missing)} chunks are missing or not what was announced, the first is {missing[0]}",
        "ask which chunks are there and send the others",
    )


def make_app(work: Work, token: str, welcome: Callable[[object], None]) -> web.Application:
    """Answers requests that carry the token; `welcome` is told the connections that do."""
    app = web.Application(
        middlewares=[token_check(token, welcome), explain_errors], client_max_size=_JSON_BYTES
    )
    core, routes = work.core, Routes(work)

    def post(path: str, kind: type[M], call: Callable[[M], Any]) -> web.RouteDef:
        # A body that the core answers.
        async def handler(request: web.Request) -> web.Response:
            return _answer(await work.ask(call, await read(request, kind)))

        return web.post(path, handler)

    def leave(body: LeaveRun) -> None:
        core.leave(body.id, has_finished=body.has_finished)

    step, file = "/v1/rounds/{outer_step}", "/v1/states/{state}/files/{index}"
    app.add_routes(
        [
            web.post("/v1/join", routes.join),
            web.post("/v1/heartbeat", routes.heartbeat),
            post("/v1/leave", LeaveRun, leave),
            post("/v1/reset-done", OnlyId, lambda body: core.reset_done(body.id)),
            post("/v1/lease", LeaseRequest, core.lease),
            post("/v1/applied", Applied, core.applied),
            post("/v1/state", OnlyId, lambda body: core.want_state(body.id)),
            post("/v1/states", StateOffer, lambda offer: {"state": core.offer_state(offer)}),
            # A contribution: which chunks are there, a chunk, all are there. Then the average.
            web.get(f"{step}/parts/{{id}}", routes.part),
            web.put(f"{step}/parts/{{id}}/{{chunk}}", routes.put_part),
            web.post(f"{step}/complete", routes.complete),
            web.get(step, routes.round),
            web.get(f"{step}/average", routes.average),
            web.get(f"{step}/average/hashes", routes.average_hashes),
            web.post(f"{step}/held", routes.held),
            # A state: from the one who gives it, and to others.
            web.get(f"{file}/from/{{id}}", routes.received),
            web.put(f"{file}/from/{{id}}/{{chunk}}", routes.put_state),
            web.post("/v1/states/{state}/complete", routes.complete_state),
            web.get(file, routes.state),
            web.get(f"{file}/hashes", routes.state_hashes),
            # For people, and for clusters that are to join.
            web.get("/v1/status", routes.status),
            web.get("/v1/events", routes.events),
            web.get("/v1/run-file", routes.run_file),
        ]
    )
    return app


class Routes:
    """The requests that need more than one answer of the core; see `make_app`."""

    def __init__(self, work: Work) -> None:
        self._work, self._core = work, work.core

    async def join(self, request: web.Request) -> web.Response:
        join = await read(request, Join)
        sizes = await self._work.sizes(join)
        return _answer(await self._work.ask(self._core.join, join, sizes))

    async def heartbeat(self, request: web.Request) -> web.Response:
        body = await read(request, Heartbeat)
        return _answer(await self._work.look(self._core.heartbeat, body))

    async def _long_poll(
        self, request: web.Request, look: Callable[[], T], is_done: Callable[[T], bool]
    ) -> T:
        loop = asyncio.get_running_loop()
        end = loop.time() + _wait_s(request)
        while True:
            changed = self._work.changed  # before looking, so that no change is missed
            found = await self._work.look(look)
            left_s = end - loop.time()
            if is_done(found) or left_s <= 0:
                return found
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left_s)

    async def round(self, request: web.Request) -> web.Response:
        outer_step = _number(request, "outer_step")
        answer = await self._long_poll(
            request, lambda: self._core.answer(outer_step), lambda found: found.state == "committed"
        )
        return _answer(answer)

    async def held(self, request: web.Request) -> web.Response:
        outer_step, asker = _number(request, "outer_step"), (await read(request, OnlyId)).id
        await self._work.ask(self._core.held, asker, outer_step)
        is_everywhere = await self._long_poll(
            request, lambda: self._core.held(asker, outer_step), bool
        )
        return _answer(HeldAnswer(is_everywhere=is_everywhere))

    # Contributions.

    async def _part(self, request: web.Request) -> Incoming:
        outer_step, asker = _number(request, "outer_step"), _member_id(request)
        _, fragment, path = await self._work.look(self._core.check_part, asker, outer_step)
        return await self._work.incoming(path, self._core.sizes[fragment])

    async def part(self, request: web.Request) -> web.Response:
        return _received(await self._part(request))

    async def put_part(self, request: web.Request) -> web.Response:
        return await self._put(request, await self._part(request))

    async def complete(self, request: web.Request) -> web.Response:
        outer_step = _number(request, "outer_step")
        contribution = await read(request, Contribution)
        counted = await self._work.look(self._core.counted, contribution.id, outer_step)
        if counted is not None:
            return _answer(counted)
        _, fragment, path = await self._work.look(
            self._core.check_part, contribution.id, outer_step
        )
        incoming = await self._work.incoming(path, self._core.sizes[fragment])
        if missing := await self._work.in_file_thread(incoming.seal, contribution.digest):
            raise _incomplete(missing)
        measured = await self._work.measure(outer_step, path, contribution.digest)
        if measured is None:
            return _answer(ContributionAnswer(is_measured=False))
        try:
            answer = await self._work.ask(self._core.complete, outer_step, contribution, *measured)
        except Refusal as error:
            if error.kind == "refused":
                await self._work.forget(path, discard=True)
            raise
        await self._work.forget(path)
        return _answer(answer)

    async def _put(self, request: web.Request, incoming: Incoming) -> web.Response:
        index, count = _number(request, "chunk"), num_chunks(incoming.size_bytes)
        if index >= count:
            raise Refusal(422, "malformed", f"chunk {index} of a file of {count} chunks")
        due = chunk_size(incoming.size_bytes, index)
        sha256 = request.headers.get("X-Sha256", "")
        if request.content_length != due or not _SHA256.fullmatch(sha256):
            raise Refusal(
                413,
                "malformed",
                f"chunk {index} has {request.content_length} bytes; {due} and their sha256 are due",
                "cut the same weights into the same pieces on all clusters",
            )
        async with asyncio.timeout(_CHUNK_S):
            try:
                data = await request.content.readexactly(due)
            except asyncio.IncompleteReadError as error:
                raise ConnectionResetError("cut in the middle of a chunk") from error
        try:
            await self._work.in_file_thread(incoming.put, index, data, sha256)
        except WrongHash as error:
            raise Refusal(422, "hash", str(error), "send it again") from None
        except Sealed:
            raise Refusal(409, "sealed", "this contribution is complete already") from None
        return _answer(None)

    # Averages.

    async def _average(self, request: web.Request) -> Path:
        outer_step = _number(request, "outer_step")
        answer = await self._work.look(self._core.answer, outer_step)
        if answer.state != "committed":
            raise Refusal(409, "early", f"round {outer_step} is {answer.state}, not committed")
        if not answer.is_kept:
            raise Refusal(410, "gone", f"the average of round {outer_step} is not kept any more")
        return self._core.rounds.average_path(outer_step)

    async def average(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(await self._average(request))

    async def average_hashes(self, request: web.Request) -> web.Response:
        return await self._hashes(await self._average(request))

    async def _hashes(self, path: Path) -> web.Response:
        text = await self._work.in_file_thread(chunk_list(path).read_text)
        return _answer(text.split())

    # States.

    async def _state_file(self, request: web.Request) -> Incoming:
        state, index = _number(request, "state"), _number(request, "index")
        await self._own(state, _member_id(request))
        offer = await self._work.look(self._core.states.files, state)
        if index >= len(offer.files):
            raise Refusal(404, "no_state", f"state {state} has {len(offer.files)} files")
        self._core.states.progress()
        path = self._core.states.path(state, index)
        return await self._work.incoming(path, offer.files[index].size_bytes)

    async def _own(self, state: int, asker: str) -> None:
        member = await self._work.look(self._core.caller, asker)
        if await self._work.look(self._core.states.owner, state) != member["number"]:
            raise Refusal(409, "not_yours", f"state {state} is given by another cluster")

    async def received(self, request: web.Request) -> web.Response:
        return _received(await self._state_file(request))

    async def put_state(self, request: web.Request) -> web.Response:
        return await self._put(request, await self._state_file(request))

    async def complete_state(self, request: web.Request) -> web.Response:
        state = _number(request, "state")
        await self._own(state, (await read(request, OnlyId)).id)
        if await self._work.look(self._core.states.is_complete, state):
            return _answer(None)
        offer = await self._work.look(self._core.states.files, state)
        for index, file in enumerate(offer.files):
            path = self._core.states.path(state, index)
            incoming = await self._work.incoming(path, file.size_bytes)
            if missing := await self._work.in_file_thread(incoming.seal, file.digest):
                raise _incomplete(missing)
            await self._work.in_file_thread(write_hashes, incoming, path)
            if not await self._work.in_file_thread(is_safetensors, path):
                await self._work.forget(path, discard=True)
                raise Refusal(422, "malformed", f"{file.name} is no safetensors file")
        await self._work.ask(self._core.states.complete, state)
        for index in range(len(offer.files)):
            await self._work.forget(self._core.states.path(state, index))
        return _answer(None)

    async def _complete_file(self, request: web.Request) -> Path:
        state, index = _number(request, "state"), _number(request, "index")
        if not await self._work.look(self._core.states.is_complete, state):
            raise Refusal(409, "early", f"state {state} is still being uploaded")
        self._core.states.touch()
        path = self._core.states.path(state, index)
        if not path.exists():
            raise Refusal(404, "no_state", f"state {state} has no file {index}")
        return path

    async def state(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(await self._complete_file(request))

    async def state_hashes(self, request: web.Request) -> web.Response:
        return await self._hashes(await self._complete_file(request))

    # For people, and for clusters that are to join.

    async def status(self, _: web.Request) -> web.Response:
        found = await self._work.look(status, self._core)
        return _answer({"run": self._work.run, **found})

    async def events(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > _MOST_DIGITS:
            raise Refusal(422, "malformed", f"after={after[:80]!r} is no number")
        return _answer(await self._work.look(events, self._core, int(after)))

    async def run_file(self, _: web.Request) -> web.Response:
        path = self._work.run_file
        if not path.exists():
            raise Refusal(
                404,
                "no_run_file",
                f"the hub of {self._work.run} was started without a run file",
                "give this cluster a run file of its own",
            )
        text = await self._work.in_file_thread(path.read_text)
        return _answer({"run": self._work.run, "text": text})


def _received(incoming: Incoming) -> web.Response:
    chunks = {str(index): sha256 for index, sha256 in incoming.received().items()}
    return _answer(Received(size_bytes=incoming.size_bytes, chunks=chunks))
