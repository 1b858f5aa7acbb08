"""The requests that say something: join, beat, claim, complete, applied, status."""

from __future__ import annotations

import asyncio
import math
import re
from contextlib import suppress
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from isles.outer.hub.refusal import Refusal
from isles.outer.hub.server import Server, json_answer
from isles.outer.hub.status import events, status
from isles.outer.messages import (
    Applied,
    Beat,
    Claim,
    Contribution,
    ContributionAnswer,
    Join,
    LeaveRun,
    OnlyId,
    StateOffer,
)

M = TypeVar("M", bound=BaseModel)

_BODY_S = 60.0
_LONGEST_WAIT_S = 30.0
_MOST_DIGITS = 12
_ID = re.compile(r"[0-9a-f]{32}")


class Routes:
    """Requests to `Core`, one method each."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._core = server.core

    async def join(self, request: web.Request) -> web.Response:
        """POST /v1/join"""
        join = await read(request, Join)
        sizes = await self._server.sizes(join)
        return said(await self._server.ask(self._core.join, join, sizes))

    async def beat(self, request: web.Request) -> web.Response:
        """POST /v1/beat"""
        return said(await self._server.look(self._core.beat, await read(request, Beat)))

    async def leave(self, request: web.Request) -> web.Response:
        """POST /v1/leave"""
        leave = await read(request, LeaveRun)
        await self._server.ask(self._core.leave, leave.id, has_finished=leave.has_finished)
        return json_answer({})

    async def obeyed(self, request: web.Request) -> web.Response:
        """POST /v1/obeyed"""
        await self._server.ask(self._core.obeyed, (await read(request, OnlyId)).id)
        return json_answer({})

    async def claim(self, request: web.Request) -> web.Response:
        """POST /v1/claim"""
        return said(await self._server.ask(self._core.claim, await read(request, Claim)))

    async def turn(self, request: web.Request) -> web.Response:
        """GET /v1/turns/T?wait=SECONDS: at once where it is committed; else after a while."""
        turn = number(request, "turn")
        loop = asyncio.get_running_loop()
        end = loop.time() + waiting(request)
        while True:
            changed = self._server.changed  # before looking, so that no change is missed
            answer = await self._server.look(self._core.answer, turn)
            left = end - loop.time()
            if answer.state == "committed" or left <= 0:
                return said(answer)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)

    async def complete(self, request: web.Request) -> web.Response:
        """POST /v1/turns/T/complete: all chunks are there; they are looked at, then they count."""
        turn = number(request, "turn")
        contribution = await read(request, Contribution)
        counted = await self._server.look(self._core.counted, contribution.id, turn)
        if counted is not None:
            return said(counted)
        _, fragment, path = await self._server.look(self._core.check_part, contribution.id, turn)
        incoming = await self._server.incoming(path, self._core.sizes[fragment])
        if missing := await self._server.in_file_thread(incoming.seal, contribution.digest):
            raise incomplete(missing)
        measured = await self._server.measure(turn, path, contribution.digest)
        if measured is None:
            return said(ContributionAnswer(is_measured=False))
        norm, fault = measured
        try:
            answer = await self._server.ask(self._core.complete, turn, contribution, norm, fault)
        except Refusal as error:
            if error.kind == "refused":
                await self._server.forget(path, discard=True)
            raise
        await self._server.forget(path)
        return said(answer)

    async def applied(self, request: web.Request) -> web.Response:
        """POST /v1/applied"""
        await self._server.ask(self._core.applied, await read(request, Applied))
        return json_answer({})

    async def want_state(self, request: web.Request) -> web.Response:
        """POST /v1/state"""
        asker = (await read(request, OnlyId)).id
        return said(await self._server.ask(self._core.want_state, asker))

    async def offer_state(self, request: web.Request) -> web.Response:
        """POST /v1/states"""
        offer = await read(request, StateOffer)
        return json_answer({"state": await self._server.ask(self._core.offer_state, offer)})

    async def status(self, _: web.Request) -> web.Response:
        """GET /v1/status"""
        found = await self._server.look(status, self._core)
        return json_answer({"run": self._server.run, **found})

    async def run_file(self, _: web.Request) -> web.Response:
        """GET /v1/run-file: what a cluster elsewhere needs to take part"""
        path = self._server.run_file
        if not path.exists():
            raise Refusal(
                404,
                "no_run_file",
                f"the rendezvous of {self._server.run} was started without a run file",
                "give this cluster a run file of its own",
            )
        text = await self._server.in_file_thread(path.read_text)
        return json_answer({"run": self._server.run, "text": text})

    async def events(self, request: web.Request) -> web.Response:
        """GET /v1/events?after=NUMBER"""
        after = request.query.get("after", "0")
        if not after.isdecimal() or len(after) > _MOST_DIGITS:
            raise Refusal(422, "malformed", f"after={after[:80]!r} is no number")
        return json_answer(await self._server.look(events, self._core, int(after)))


def add_routes(app: web.Application, server: Server) -> None:
    """Let the server answer these requests."""
    routes = Routes(server)
    app.add_routes(
        [
            web.post("/v1/join", routes.join),
            web.post("/v1/beat", routes.beat),
            web.post("/v1/leave", routes.leave),
            web.post("/v1/obeyed", routes.obeyed),
            web.post("/v1/claim", routes.claim),
            web.get("/v1/turns/{turn}", routes.turn),
            web.post("/v1/turns/{turn}/complete", routes.complete),
            web.post("/v1/applied", routes.applied),
            web.post("/v1/state", routes.want_state),
            web.post("/v1/states", routes.offer_state),
            web.get("/v1/status", routes.status),
            web.get("/v1/events", routes.events),
            web.get("/v1/run-file", routes.run_file),
        ]
    )


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


def said(answer: BaseModel) -> web.Response:
    """An answer."""
    return json_answer(answer.model_dump_json())


def number(request: web.Request, key: str) -> int:
    """A number in a request's path.

    Raises:
        Refusal: it is none.
    """
    text = request.match_info[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise Refusal(422, "malformed", f"{key} {text[:80]!r} is no number")
    return int(text)


def member_id(request: web.Request) -> str:
    """The id of a member in a request's path.

    Raises:
        Refusal: it is none.
    """
    text = request.match_info["id"]
    if not _ID.fullmatch(text):
        raise Refusal(422, "malformed", "an id has 32 hexadecimal digits")
    return text


def waiting(request: web.Request) -> float:
    """For how long a request may be answered late, seconds."""
    try:
        wait_s = float(request.query.get("wait", "0"))
    except ValueError:
        return 0.0
    return max(0.0, min(wait_s, _LONGEST_WAIT_S)) if math.isfinite(wait_s) else 0.0


def incomplete(missing: list[int]) -> Refusal:
    """What a sender is told whose file is not whole."""
    return Refusal(
        409,
        "incomplete",
        f"{len(missing)} chunks are missing or not what was announced, the first is {missing[0]}",
        "ask which chunks are there and send the others",
    )
