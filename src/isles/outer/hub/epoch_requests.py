"""The requests of the engine gloo: ready, prepared, failed, and the store of an epoch."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress

from aiohttp import web

from isles.outer.hub.refusal import Refusal
from isles.outer.hub.requests import member_id, number, read, said, waiting
from isles.outer.hub.server import Server, json_answer
from isles.outer.messages import EpochAnswer, Failed, OnlyId, Prepared, Ready

_KEY = re.compile(r"[A-Za-z0-9_.,:/+=@-]{1,256}")
_VALUE_BYTES = 1 << 16


class EpochRoutes:
    """Requests to `Epochs`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._epochs = server.core.epochs

    async def _member(self, member_id: str) -> int:
        member = await self._server.look(self._server.core.heard, member_id)
        return int(member["number"])

    async def ready(self, request: web.Request) -> web.Response:
        """POST /v1/turns/T/ready?wait=SECONDS: at once where an epoch is formed."""
        turn = number(request, "turn")
        ready = await read(request, Ready)
        member = await self._member(ready.id)
        loop = asyncio.get_running_loop()
        end = loop.time() + waiting(request)
        while True:
            changed = self._server.changed
            answer = await self._server.look(self._epochs.ready, member, turn, ready)
            if answer.state != "waiting" or loop.time() >= end:
                return said(answer)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), end - loop.time())

    async def prepared(self, request: web.Request) -> web.Response:
        """POST /v1/epochs/E/prepared?wait=SECONDS: at once where all have prepared the same."""
        epoch = number(request, "epoch")
        prepared = await read(request, Prepared)
        member = await self._member(prepared.id)
        loop = asyncio.get_running_loop()
        end = loop.time() + waiting(request)
        answer: EpochAnswer = await self._server.ask(self._epochs.prepared, member, epoch, prepared)
        while answer.state != "committed" and loop.time() < end:
            changed = self._server.changed
            answer = await self._server.look(self._epochs.prepared, member, epoch, prepared)
            if answer.state != "committed":
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), max(0.0, end - loop.time()))
        return said(answer)

    async def failed(self, request: web.Request) -> web.Response:
        """POST /v1/epochs/E/failed"""
        failed = await read(request, Failed)
        member, epoch = await self._member(failed.id), number(request, "epoch")
        await self._server.ask(self._epochs.fail, member, epoch, failed)
        return json_answer({})

    async def want_average(self, request: web.Request) -> web.Response:
        """POST /v1/turns/T/want: the average, which only members have"""
        turn = number(request, "turn")
        member = await self._member((await read(request, OnlyId)).id)
        await self._server.look(self._epochs.want_average, member, turn)
        return json_answer({})

    async def put(self, request: web.Request) -> web.Response:
        """PUT /v1/epochs/E/store/ID?key=KEY"""
        if request.content_length is None or request.content_length > _VALUE_BYTES:
            raise Refusal(413, "too_large", f"a value has at most {_VALUE_BYTES} bytes")
        value = await request.read()
        member, epoch = await self._member(member_id(request)), number(request, "epoch")
        await self._server.ask(self._epochs.put, member, epoch, _key(request), value)
        return json_answer({})

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/epochs/E/store/ID?key=KEY&wait=SECONDS: the value; 204 where none is there."""
        epoch, key = number(request, "epoch"), _key(request)
        member = await self._member(member_id(request))
        loop = asyncio.get_running_loop()
        end = loop.time() + waiting(request)
        while True:
            changed = self._server.changed
            value = await self._server.look(self._epochs.get, member, epoch, key)
            if value is not None:
                return web.Response(body=value)
            if loop.time() >= end:
                return web.Response(status=204)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), end - loop.time())


def add_epoch_routes(app: web.Application, server: Server) -> None:
    """Let the server answer these requests."""
    routes = EpochRoutes(server)
    app.add_routes(
        [
            web.post("/v1/turns/{turn}/ready", routes.ready),
            web.post("/v1/epochs/{epoch}/prepared", routes.prepared),
            web.post("/v1/epochs/{epoch}/failed", routes.failed),
            web.post("/v1/turns/{turn}/want", routes.want_average),
            web.put("/v1/epochs/{epoch}/store/{id}", routes.put),
            web.get("/v1/epochs/{epoch}/store/{id}", routes.get),
        ]
    )


def _key(request: web.Request) -> str:
    key = request.query.get("key", "")
    if not _KEY.fullmatch(key):
        raise Refusal(422, "malformed", f"{key[:80]!r} is no key")
    return key
