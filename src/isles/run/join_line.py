"""The join line of a cluster: address, token and certificate of the hub, and a GET request to it.

Commands without aiohttp query a hub through this module.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import http.client
import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isles.errors import CommunicationError, ConfigError, PreflightError
from isles.run.owner import not_own, read_text
from isles.run.records import parse_record
from isles.run.web import read_answer

SECRET_BYTES = 32
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of runs and clusters."""

_LINE = re.compile(
    r"isles://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})"
    r"/(?P<run>[^/#?]+)#(?P<token>[A-Za-z0-9_-]{43})\.(?P<fingerprint>[A-Za-z0-9_-]{43})"
)
_OK, _TOKEN = 200, 401
_MOST_LETTERS = 2**16
"""Longest file with a join line."""
_FIX = "paste the whole line that the hub has written (isles://HOST:PORT/RUN#…)"


ENDED = "ended.json"
"""File in the state directory of an ended hub, with the reason for the end."""
NOTHING_LEFT = "outer.finished"
"""The id of errors of a cluster that joins, or resumes, after the others have finished."""


def apart(one: str, other: str, length: int = 16) -> tuple[str, str]:
    """Shorten two texts to a part that differs."""
    first = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, first - length // 2) if first >= length else 0
    dots = "…" if begin else ""
    return f"{dots}{one[begin : begin + length]}…", f"{dots}{other[begin : begin + length]}…"


@dataclass(frozen=True, slots=True)
class JoinLine:
    """Address and secrets of a hub. Its text shows no secret.

    `owner` is the other user who owns the file of the line. `ask_hub` refuses such a line.
    """

    host: str
    port: int
    run: str
    token: str = field(repr=False)
    fingerprint: bytes
    """sha256 of the certificate, which identifies the server."""
    owner: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str, *, where: str = "the join line") -> JoinLine:
        """Read a pasted line, even if an email has split it into several lines.

        Raises:
            ConfigError: it is not a join line. The error omits the text, which may hold half a
                token.
        """
        match = _LINE.fullmatch("".join(text.split()))
        if match is None:
            raise ConfigError("this is not a join line", where=where, fix=_FIX, id="join.line")
        port = int(match["port"])
        if not 0 < port < 2**16 or not NAME.fullmatch(match["run"]):
            raise ConfigError(
                "the join line has an invalid port or run", where=where, fix=_FIX, id="join.line"
            )
        try:
            fingerprint = _decode(match["fingerprint"])
            _decode(match["token"])
        except (binascii.Error, ValueError):
            raise ConfigError(
                "the join line is incomplete or mistyped", where=where, fix=_FIX, id="join.line"
            ) from None
        return cls(match["host"].strip("[]"), port, match["run"], match["token"], fingerprint)

    @classmethod
    def read(cls, path: Path) -> JoinLine:
        """Read the line from a file. Raises the errors of `parse`."""
        with _clear_errors(path):
            text, owner = read_text(path)
        return replace(cls.parse(text, where=str(path)), owner=owner)

    @classmethod
    def given(cls, path: Path) -> JoinLine:
        """Read the line from a file that the user gives, and therefore trusts. The file may be a
        pipe.

        Raises the errors of `parse`.
        """
        with _clear_errors(path), path.open(encoding="utf-8") as stream:
            text = stream.read(_MOST_LETTERS)
        return cls.parse(text, where=str(path))

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"https://{self.address}"

    def secret_text(self) -> str:
        """The whole line with its token, for a file with mode 0600 and never for a log."""
        return f"isles://{self.address}/{self.run}#{self.token}.{encode(self.fingerprint)}"

    def __str__(self) -> str:
        return f"isles://{self.address}/{self.run}"


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the join line is not readable: {error}", where=str(path), fix=_FIX, id="join.line"
        ) from error


def encode(secret: bytes) -> str:
    """Bytes as letters that an email or a shell does not change."""
    return base64.urlsafe_b64encode(secret).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    secret = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if len(secret) != SECRET_BYTES or encode(secret) != text:
        raise ValueError("not 32 bytes")
    return secret


def ask_hub(line: JoinLine, path: str, timeout_s: float) -> dict[str, Any]:
    """GET a JSON object from a hub.

    Args:
        line: its join line. The token is sent only to the server that has its certificate.
        timeout_s: longest wait for the connection, and for any part of the answer.

    Raises:
        CommunicationError: it is not reachable, or does not respond in time.
        PreflightError: another server responds, the hub refuses the token or the request, or the
            line comes from another user's record.
    """
    if line.owner:
        raise not_own("connect to its hub", line.owner, line.address)
    connection = _Pinned(line, timeout_s)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {line.token}"})
        answer = connection.getresponse()
        body = read_answer(answer, timeout_s)
    except ssl.SSLError as error:
        raise PreflightError(
            f"the server at this address is not a hub: {error.reason or error}",
            where=line.address,
            fix="check that the join line has the hub's address",
            id="hub.silent",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreached(line, error, timeout_s) from None
    finally:
        connection.close()
    return _content(line, answer.status, body)


class _Pinned(http.client.HTTPSConnection):
    """HTTPS connection to the one server that has the certificate of a join line."""

    def __init__(self, line: JoinLine, timeout_s: float) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # isles compares its fingerprint instead
        super().__init__(line.host, line.port, timeout=timeout_s, context=context)
        self._line = line

    def connect(self) -> None:
        """Connect, and compare the certificate before sending anything."""
        super().connect()
        assert isinstance(self.sock, ssl.SSLSocket)
        shown = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").digest()
        if not hmac.compare_digest(shown, self._line.fingerprint):
            raise PreflightError(
                "the server's certificate has sha256 {}, and the join line expects {}".format(
                    *apart(shown.hex(), self._line.fingerprint.hex())
                ),
                where=str(self._line),
                fix="use the current join line of the hub. If you did, another machine "
                "intercepts the connection",
                id="join.line",
            )


def _content(line: JoinLine, status: int, body: bytes) -> dict[str, Any]:
    try:
        found = parse_record(body)
    except (ValueError, RecursionError):
        found = None
    if status == _OK and isinstance(found, dict):
        return found
    answer = found if isinstance(found, dict) else {}
    if status == _TOKEN:
        raise PreflightError(
            "the hub does not accept the token of this join line",
            where=str(line),
            fix="use the join line that the hub printed last",
            id="join.line",
        )
    raise PreflightError(
        f"the hub reports {str(answer.get('what') or f'HTTP status {status}')[:500]!r}",
        where=str(line),
        fix=str(answer.get("fix") or "install the same version of isles on both machines")[:500],
    )


def _unreached(line: JoinLine, error: Exception, timeout_s: float) -> CommunicationError:
    fix = (
        f"check that the hub runs and that its port is open for this machine: nc -vz {line.host} "
        f"{line.port}"
    )
    match error:
        case socket.gaierror():
            what = f"this machine does not know the host {line.host}"
            fix = "check whether a VPN is up, or start the hub with another --public"
        case TimeoutError():
            what = f"the hub has not answered within {timeout_s:g} s"
        case ConnectionRefusedError():
            what = "no hub listens at this address"
        case http.client.HTTPException():
            what = f"the server at this address is not a hub: {error!r}"
        case _:
            what = f"cannot reach the hub: {error}"
    return CommunicationError(what, where=line.address, fix=fix, id="hub.silent")
