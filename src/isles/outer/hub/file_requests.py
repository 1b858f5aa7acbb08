"""The requests that carry bytes: contributions and states come, averages and states go."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from aiohttp import web

from isles.outer.client.blobs import Incoming, Sealed, WrongHash, chunk_size, num_chunks
from isles.outer.hub.averaging import chunk_list
from isles.outer.hub.refusal import Refusal
from isles.outer.hub.requests import incomplete, member_id, number, read
from isles.outer.hub.server import Server, json_answer
from isles.outer.messages import OnlyId

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_S = 600.0


class FileRoutes:
    """Requests that move files, in chunks."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._core = server.core

    # Contributions.

    async def _part(self, request: web.Request) -> Incoming:
        turn = number(request, "turn")
        _, fragment, path = await self._server.look(self._core.check_part, member_id(request), turn)
        return await self._server.incoming(path, self._core.sizes[fragment])

    async def part(self, request: web.Request) -> web.Response:
        """GET /v1/turns/T/parts/ID: which chunks are there."""
        return _received(await self._part(request))

    async def put_part(self, request: web.Request) -> web.Response:
        """PUT /v1/turns/T/parts/ID/CHUNK"""
        return await self._put(request, await self._part(request))

    async def _put(self, request: web.Request, incoming: Incoming) -> web.Response:
        index = number(request, "chunk")
        if index >= num_chunks(incoming.size_bytes):
            raise Refusal(
                422,
                "malformed",
                f"chunk {index} of a file of {num_chunks(incoming.size_bytes)} chunks",
            )
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
            await self._server.in_file_thread(incoming.put, index, data, sha256)
        except WrongHash as error:
            raise Refusal(422, "hash", str(error), "send it again") from None
        except Sealed:
            raise Refusal(409, "sealed", "this contribution is complete already") from None
        return json_answer({})

    # Averages.

    async def _average(self, request: web.Request) -> Path:
        turn = number(request, "turn")
        answer = await self._server.look(self._core.answer, turn)
        if answer.state != "committed":
            raise Refusal(409, "early", f"turn {turn} is {answer.state}, not committed")
        if not answer.is_kept:
            raise Refusal(410, "gone", f"the average of turn {turn} is not kept any more")
        return self._core.turns.average_path(turn)

    async def average(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/turns/T/average, or a range of it"""
        return web.FileResponse(await self._average(request))

    async def average_hashes(self, request: web.Request) -> web.Response:
        """GET /v1/turns/T/average/hashes"""
        return await self._hashes(await self._average(request))

    async def _hashes(self, path: Path) -> web.Response:
        text = await self._server.in_file_thread(chunk_list(path).read_text)
        return json_answer(text.split())

    async def _average_upload(self, request: web.Request) -> tuple[Incoming, str]:
        turn = number(request, "turn")
        path, size_bytes, digest = await self._server.look(
            self._core.average_expected, member_id(request), turn
        )
        return await self._server.incoming(path, size_bytes), digest

    async def average_received(self, request: web.Request) -> web.Response:
        """GET /v1/turns/T/average/from/ID: which chunks are there."""
        return _received((await self._average_upload(request))[0])

    async def put_average(self, request: web.Request) -> web.Response:
        """PUT /v1/turns/T/average/from/ID/CHUNK: a turn that members averaged by themselves."""
        return await self._put(request, (await self._average_upload(request))[0])

    async def complete_average(self, request: web.Request) -> web.Response:
        """POST /v1/turns/T/average/from/ID"""
        turn = number(request, "turn")
        incoming, digest = await self._average_upload(request)
        if missing := await self._server.in_file_thread(incoming.seal, digest):
            raise incomplete(missing)
        path = self._core.turns.average_path(turn)
        await self._server.in_file_thread(_write_hashes, incoming, path)
        incoming.path.replace(path)
        await self._server.ask(self._core.turns.keep, turn)
        await self._server.forget(incoming.path, discard=True)
        return json_answer({})

    # States.

    async def _state_file(self, request: web.Request) -> Incoming:
        """A file of a state that the one who asks is uploading."""
        state, index = number(request, "state"), number(request, "index")
        await self._own(state, member_id(request))
        offer = await self._server.look(self._core.states.files, state)
        if index >= len(offer.files):
            raise Refusal(404, "no_state", f"state {state} has {len(offer.files)} files")
        self._core.states.progress()
        path = self._core.states.path(state, index)
        return await self._server.incoming(path, offer.files[index].size_bytes)

    async def _own(self, state: int, asker: str) -> None:
        member = await self._server.look(self._core.heard, asker)
        if await self._server.look(self._core.states.owner, state) != member["number"]:
            raise Refusal(409, "not_yours", f"state {state} is given by another cluster")

    async def received(self, request: web.Request) -> web.Response:
        """GET /v1/states/S/files/I/from/ID: which chunks are there."""
        return _received(await self._state_file(request))

    async def put_state(self, request: web.Request) -> web.Response:
        """PUT /v1/states/S/files/I/from/ID/CHUNK"""
        return await self._put(request, await self._state_file(request))

    async def complete_state(self, request: web.Request) -> web.Response:
        """POST /v1/states/S/complete"""
        state = number(request, "state")
        await self._own(state, (await read(request, OnlyId)).id)
        if await self._server.look(self._core.states.is_complete, state):
            return json_answer({})
        offer = await self._server.look(self._core.states.files, state)
        for index, file in enumerate(offer.files):
            path = self._core.states.path(state, index)
            incoming = await self._server.incoming(path, file.size_bytes)
            if missing := await self._server.in_file_thread(incoming.seal, file.digest):
                raise incomplete(missing)
            await self._server.in_file_thread(_write_hashes, incoming, path)
            if not await self._server.in_file_thread(is_safetensors, path):
                await self._server.forget(path, discard=True)
                raise Refusal(422, "malformed", f"{file.name} is no safetensors file")
        await self._server.ask(self._core.states.complete, state)
        for index in range(len(offer.files)):
            await self._server.forget(self._core.states.path(state, index))
        return json_answer({})

    async def _complete_file(self, request: web.Request) -> Path:
        state, index = number(request, "state"), number(request, "index")
        if not await self._server.look(self._core.states.is_complete, state):
            raise Refusal(409, "early", f"state {state} is still being uploaded")
        self._core.states.touch()
        path = self._core.states.path(state, index)
        if not path.exists():
            raise Refusal(404, "no_state", f"state {state} has no file {index}")
        return path

    async def state(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/states/S/files/I, or a range of it"""
        return web.FileResponse(await self._complete_file(request))

    async def state_hashes(self, request: web.Request) -> web.Response:
        """GET /v1/states/S/files/I/hashes"""
        return await self._hashes(await self._complete_file(request))


def add_file_routes(app: web.Application, server: Server) -> None:
    """Let the server answer these requests."""
    routes = FileRoutes(server)
    turn, file = "/v1/turns/{turn}", "/v1/states/{state}/files/{index}"
    app.add_routes(
        [
            web.get(f"{turn}/parts/{{id}}", routes.part),
            web.put(f"{turn}/parts/{{id}}/{{chunk}}", routes.put_part),
            web.get(f"{turn}/average", routes.average),
            web.get(f"{turn}/average/hashes", routes.average_hashes),
            web.get(f"{turn}/average/from/{{id}}", routes.average_received),
            web.put(f"{turn}/average/from/{{id}}/{{chunk}}", routes.put_average),
            web.post(f"{turn}/average/from/{{id}}", routes.complete_average),
            web.get(f"{file}/from/{{id}}", routes.received),
            web.put(f"{file}/from/{{id}}/{{chunk}}", routes.put_state),
            web.post("/v1/states/{state}/complete", routes.complete_state),
            web.get(file, routes.state),
            web.get(f"{file}/hashes", routes.state_hashes),
        ]
    )


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: the length of a header in JSON, then the header."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        return 2 <= length <= path.stat().st_size - 8 and stream.read(1) == b"{"


def _received(incoming: Incoming) -> web.Response:
    chunks = {str(index): sha256 for index, sha256 in incoming.received().items()}
    return json_answer({"size_bytes": incoming.size_bytes, "chunks": chunks})


def _write_hashes(incoming: Incoming, path: Path) -> None:
    """Let those who fetch a file that has come know the hashes of its chunks."""
    hashes = [sha256 for _, sha256 in sorted(incoming.received().items())]
    chunk_list(path).write_text("".join(f"{sha256}\n" for sha256 in hashes))
