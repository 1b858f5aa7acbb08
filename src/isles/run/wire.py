"""Lines of JSON over one TCP connection, both ways: how the coordinator and the agents talk.

Each end proves that it knows the token of the attempt, which itself is never sent: the answer to a
random challenge is its HMAC-SHA256 with the token as key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import select
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import printable

_SEND_S = 5.0
_LONGEST_BYTES = 64 * 2**20
_LONGEST_WORDS = 600
_WORDS = ("what", "where", "fix")

GREETING_BYTES = 64 * 2**10
"""The longest first message of somebody who is not known yet."""


def new_challenge() -> str:
    """Random text for the other end to prove itself with."""
    return secrets.token_hex(16)


def proof(token: str, challenge: str, role: str) -> str:
    """What shows that `role` (agent, coordinator) knows the token, without showing the token."""
    return hmac.new(token.encode(), f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, challenge: str, role: str) -> bool:
    """Whether `given` is that proof; takes as long for a wrong one as for the right one."""
    return hmac.compare_digest(str(given).encode(), proof(token, challenge, role).encode())


class NotOurs(ValueError):
    """The other end does not talk as isles does."""


class Wire:
    """One connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._read = b""

    def send(self, message: dict[str, Any]) -> None:
        """Say something.

        Raises:
            OSError: the other end is gone, or has taken nothing for seconds.
        """
        line = json.dumps(message, default=str).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def receive(
        self, timeout_s: float, longest_bytes: int = _LONGEST_BYTES
    ) -> dict[str, Any] | None:
        """The next message; None where it has not come in time, with all its bytes.

        Args:
            timeout_s: longest wait; what has come by then is kept for the next call.
            longest_bytes: of a message.

        Raises:
            OSError: the other end has closed the connection.
            NotOurs: what came is no message of isles.
        """
        end = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if len(self._read) > longest_bytes:
                raise NotOurs("a line without an end")
            try:
                poll = select.poll()  # unlike select, for any number of connections
                poll.register(self._connection, select.POLLIN)
                is_ready = poll.poll(max(0.0, end - time.monotonic()) * 1000)
            except ValueError:
                raise ConnectionResetError("the connection was closed here") from None
            if not is_ready:
                return None
            part = self._connection.recv(1 << 16)
            if not part:
                raise ConnectionResetError("the connection was closed")
            self._read += part
            if b"\n" not in part and time.monotonic() > end:
                return None
        line, _, rest = self._read.partition(b"\n")
        if len(line) > longest_bytes:
            raise NotOurs("a line that is too long")
        self._read = rest
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise NotOurs(f"not a message: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise NotOurs(f"not a message: {line[:80]!r}")
        return message

    def has_message(self, timeout_s: float) -> bool:
        """Whether something can be received, within this time; also the end of the connection."""
        if self._read:
            return True
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def hang_up(self) -> None:
        """End the connection; the thread that receives from it wakes up, and closes it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; a thread that receives from it wakes up."""
        self.hang_up()
        self._connection.close()


def refusal(told: Any) -> UserError:
    """The error that a coordinator has sent to a node which it does not take in.

    Raises:
        NotOurs: what came is none.
    """
    try:
        words = (printable(str(told[key]), longest=_LONGEST_WORDS) for key in _WORDS)
        what, where, fix = words
        id = str(told.get("id", ""))
        error: UserError = PreflightError(what, where=where, fix=fix, id=id)
        error.exit_code = ExitCode(int(told["exit_code"]))
    except (KeyError, TypeError, ValueError):
        raise NotOurs(f"it says {told!r:.200}") from None
    return error


def free_port(address: str) -> int:
    """A port at this address on which nobody listens now; 0 where this machine has no such."""
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return 0
        return int(probe.getsockname()[1])
