"""Reading requests and writing answers: the token before anything else, errors in words."""

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
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from isles.errors import UserError
from isles.outer.messages import ErrorBody

log = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_S, _LONGEST_WAIT_S, _TELL_EVERY_S = 60.0, 30.0, 10.0
_MOST_DIGITS = 12
_ID = re.compile(r"[0-9a-f]{32}")
_DISK_FULL = 507


class Refusal(Exception):
    """A request that is refused: with an HTTP status, a kind for programs, and words for people.

    Args:
        status: 404, 409, 413, 422, 507 …
        kind: one word that the client acts on.
        what: what is wrong, with the value.
        fix: what to do about it.
    """

    def __init__(self, status: int, kind: str, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.status = status
        self.kind = kind
        self.what = what
        self.fix = fix


def token_check(token: str, welcome: Callable[[object], None]) -> Middleware:
    """Answers 401, whatever was asked for, unless a request carries the token.

    Args:
        token: the hub's.
        welcome: is told the connections that have shown it.
    """
    right = hashlib.sha256(token.encode()).digest()
    refused, tell_at = 0, 0.0

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        nonlocal refused, tell_at
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        if hmac.compare_digest(digest, right) and scheme == "Bearer":
            welcome(request.protocol)
            return await handler(request)
        refused += 1
        now = asyncio.get_running_loop().time()
        if now >= tell_at:  # not so often that strangers could fill the disk
            tell_at = now + _TELL_EVERY_S
            what = "refused: a request from %s without the right token (%d so far)"
            log.warning(what, request.remote, refused)
        fix = "use the join line that this rendezvous has written"
        what = "the token is not this rendezvous's"
        return _error(401, ErrorBody(kind="token", what=what, fix=fix))

    return check


@web.middleware
async def explain_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes an answer in words; only our own faults get a traceback."""
    try:
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if isinstance(error, web.HTTPException) and error.status < 400:
            raise
        status, body = _explain(error)
        if status == 500:
            log.exception("a fault of the rendezvous at %s %s", request.method, request.path)
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
            what = f"the rendezvous's disk: {getattr(error, 'strerror', None) or error}"
            fix = "free some space in its state directory; clusters try again by themselves"
            return _DISK_FULL, ErrorBody(kind="disk", what=what, fix=fix)
        case _:
            fix = "its log has the traceback"
            return 500, ErrorBody(kind="bug", what="the rendezvous has failed", fix=fix)


def _error(status: int, body: ErrorBody) -> web.Response:
    return web.Response(
        status=status, body=body.model_dump_json().encode(), content_type="application/json"
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
    body = answer.model_dump_json().encode()
    return web.Response(body=body, content_type="application/json")


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


def json_answer(content: dict[str, Any] | list[Any]) -> web.Response:
    """An answer in JSON."""
    return web.Response(body=json.dumps(content).encode(), content_type="application/json")
