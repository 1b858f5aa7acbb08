"""A question to the rendezvous of several clusters, from where no aiohttp is installed."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import socket
import ssl
import time
from typing import Any

from isles.errors import CommunicationError, PreflightError
from isles.run.join_line import JoinLine

_MOST_BYTES = 64 << 20
_SLICE = 1 << 16
_OK, _TOKEN = 200, 401


def ask_rendezvous(line: JoinLine, path: str, timeout_s: float) -> dict[str, Any]:
    """GET something from a rendezvous, as JSON.

    Args:
        line: its join line. The token is sent to nobody who has not its certificate.
        path: such as `/v1/status`.
        timeout_s: longest wait for the whole answer.

    Raises:
        CommunicationError: it cannot be reached, or does not answer in time.
        PreflightError: another server is there, it does not take the token, or it says no.
    """
    end = time.monotonic() + timeout_s
    connection = _Pinned(line, timeout_s)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {line.token}"})
        answer = connection.getresponse()
        body = bytearray()
        while part := answer.read1(_SLICE):
            body += part
            if len(body) > _MOST_BYTES or time.monotonic() > end:
                raise TimeoutError(f"its answer has no end after {len(body)} bytes")
    except ssl.SSLError as error:
        raise PreflightError(
            f"what listens there is no rendezvous: {error.reason or error}",
            where=line.address,
            fix="see that the join line's address is the rendezvous's own",
            id="rendezvous.silent",
        ) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreached(line, error, timeout_s) from None
    finally:
        connection.close()
    return _content(line, answer.status, bytes(body))


class _Pinned(http.client.HTTPSConnection):
    """A connection to the one server that has a certificate."""

    def __init__(self, line: JoinLine, timeout_s: float) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # its fingerprint is compared instead
        super().__init__(line.host, line.port, timeout=timeout_s, context=context)
        self._line = line

    def connect(self) -> None:
        """Connect, and look at the certificate before anything is said."""
        super().connect()
        assert isinstance(self.sock, ssl.SSLSocket)
        shown = hashlib.sha256(self.sock.getpeercert(binary_form=True) or b"").digest()
        if not hmac.compare_digest(shown, self._line.fingerprint):
            raise PreflightError(
                f"the server there has a certificate with sha256 {shown.hex()[:16]}…, the join "
                f"line names {self._line.fingerprint.hex()[:16]}…",
                where=str(self._line),
                fix="use the present join line of the rendezvous; if it is, somebody stands "
                "between it and this machine",
                id="join.line",
            )


def _content(line: JoinLine, status: int, body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if status == _OK and isinstance(found, dict):
        return found
    said = found if isinstance(found, dict) else {}
    if status == _TOKEN:
        raise PreflightError(
            "the rendezvous does not take the token of this join line",
            where=str(line),
            fix="use the join line that it has written at last",
            id="join.line",
        )
    raise PreflightError(
        f"the rendezvous says {str(said.get('what') or f'HTTP status {status}')[:500]!r}",
        where=str(line),
        fix=str(said.get("fix") or "install the same version of isles there and here")[:500],
    )


def _unreached(line: JoinLine, error: Exception, timeout_s: float) -> CommunicationError:
    fix = f"see that it runs, and that its port is open to here: nc -vz {line.host} {line.port}"
    match error:
        case socket.gaierror():
            what = f"there is no host {line.host} as this machine knows it"
            fix = "see whether a VPN is up; or let the rendezvous be started with another --public"
        case TimeoutError():
            what = f"the rendezvous has not answered within {timeout_s:g} s"
        case ConnectionRefusedError():
            what = "no rendezvous listens there"
        case http.client.HTTPException():
            what = f"what answers there is no rendezvous: {error!r}"
        case _:
            what = f"the rendezvous cannot be reached: {error}"
    return CommunicationError(what, where=line.address, fix=fix, id="rendezvous.silent")
