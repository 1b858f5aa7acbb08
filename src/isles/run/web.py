"""HTTP requests without packages, to untrusted servers.

An answer has a limit of bytes and of time, and cannot redirect to another address: a request
carries a token, and the other address may be a service of this machine. `outer/client/http.py` has
the same limits for requests of a cluster to its hub.
"""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from email.message import Message
from urllib.parse import urljoin, urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

MOST_BYTES = 32 * 2**20
"""Limit of an answer."""
_PART_BYTES, _PARTS = 2**18, 10
_MOVED = frozenset({301, 302, 303, 307, 308})
_HOPS = 5


@dataclass(frozen=True, slots=True)
class WebAnswer:
    """An answer of any status, including refusals."""

    status: int
    headers: Message
    body: bytes


def ask_url(request: Request, timeout_s: float, most_bytes: int = MOST_BYTES) -> WebAnswer:
    """Send a request by http or https, through the proxy in the environment.

    A GET follows a redirect only to the same scheme, host and port.

    Args:
        timeout_s: longest wait for the connection, and for any part of the answer.

    Raises:
        OSError, HTTPException, ValueError: the answer was incomplete or too long.
    """
    opener = OpenerDirector()
    for kind in (ProxyHandler, UnknownHandler, HTTPHandler, HTTPSHandler):  # no file://, no ftp://
        opener.add_handler(kind())
    for _ in range(_HOPS):
        with opener.open(request, timeout=timeout_s) as answer:
            url = urljoin(request.full_url, answer.headers.get("Location") or "")
            is_moved = answer.status in _MOVED and request.get_method() == "GET"
            if not (is_moved and _origin(url) == _origin(request.full_url)):
                body = read_answer(answer, timeout_s, most_bytes)
                return WebAnswer(answer.status, answer.headers, body)
        request = Request(url, headers=dict(request.headers))
    raise http.client.HTTPException(f"it redirects more than {_HOPS} times")


def read_answer(
    answer: http.client.HTTPResponse, timeout_s: float, most_bytes: int = MOST_BYTES
) -> bytes:
    """The body of an answer, which may take ten times `timeout_s` in all.

    Raises:
        OSError, HTTPException: it ends early, is too long or takes too much time.
    """
    body, end = bytearray(), time.monotonic() + _PARTS * timeout_s
    while part := answer.read1(_PART_BYTES):
        body += part
        if len(body) > most_bytes or time.monotonic() > end:
            raise http.client.HTTPException(
                f"its answer has more than {most_bytes} bytes, or takes too long"
            )
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(body)


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc
