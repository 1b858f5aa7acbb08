"""Protocol between the coordinator and the agents: lines of JSON over TCP, in both directions.

Each end proves that it knows the token of the attempt, which is never sent. The answer to a random
challenge is its HMAC-SHA256 with the token as key.

    coordinator  {"challenge": C}
    agent        {"hello": {...} or "fetch": true, "proof": of C, "challenge": D}
    coordinator  {"welcome": true or "files": {...}, "proof": of D}, or {"refused": {...}}
    coordinator  {"command": {...}}                     on each change, and every second
    agent        {"report": {...}, "clock": T, "bye": is leaving}                   the same

A message contains the whole state of its sender, so a broken connection loses nothing. Both ends
use the times below, so both come to the same decision: a node that the coordinator declares lost
has already ended its ranks by itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import printable

HEARTBEAT_EVERY_S = 1.0
RECONNECT_AFTER_S = 4.0
"""Seconds without a message after which an agent opens a new connection."""
LOST_AFTER_S = 20.0
"""Seconds without a message after which a node is lost: switched off, or without network. A shorter
interruption costs nothing but its own time."""
GONE_AFTER_S = 4.0
"""Seconds after a closed connection without a new one, after which the process counts as ended."""
HELLO_S = 10.0
"""Longest wait for the first message on a new connection."""
END_GRACE_S = 5.0
"""Seconds between asking a rank to end and killing it."""
WAITING_EVERY_S = 5.0
"""Interval of log lines about a wait for other nodes."""
CLOSING_S = 60.0
"""Longest time for agents to exit after the run has its outcome."""
GREETING_BYTES = 64 * 2**10
"""Longest first message of an agent, which is not authenticated yet."""

_MUTE = "a program there accepts the connection but sends nothing"
"""Another program does this, and also a coordinator that is frozen for a while: keep trying."""

_SEND_S = 5.0
_LONGEST_BYTES = 64 * 2**20
_LONGEST_WORDS = 600


class ProtocolError(ValueError):
    """The other end does not follow this protocol."""


class LastSeen:
    """Seconds since the last message, counted only while this process was running.

    A process that was frozen for a minute received nothing in that minute; this is not silence of
    the other end. So a long gap between two looks counts as a short gap.
    """

    _LONGEST_GAP_S = 5.0

    def __init__(self, now_s: float) -> None:
        self._looked_at = now_s
        self.seconds = 0.0

    def reset(self) -> None:
        self.seconds = 0.0

    def look(self, now_s: float) -> float:
        """Seconds since the last message, until now."""
        self.seconds += min(now_s - self._looked_at, self._LONGEST_GAP_S)
        self._looked_at = now_s
        return self.seconds


class Wire:
    """One connection; any thread may send, one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._read = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the other end has closed the connection, or has accepted no data for seconds.
        """
        line = json.dumps(message, default=str).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def receive(
        self, timeout_s: float, longest_bytes: int = _LONGEST_BYTES
    ) -> dict[str, Any] | None:
        """The next message; None if it has not arrived completely in time.

        Args:
            timeout_s: longest wait; an incomplete message is kept for the next call.
            longest_bytes: longest message.

        Raises:
            OSError: the other end has closed the connection.
            ProtocolError: the data is not a message of isles.
        """
        end = time.monotonic() + timeout_s
        line, found, rest = self._read.partition(b"\n")
        while not found:
            if len(line) > longest_bytes:
                raise ProtocolError("a line without a line break")
            self._read = line
            left_s = end - time.monotonic()
            if left_s < 0 or not self._has_more(left_s):
                return None
            part = self._connection.recv(1 << 16)
            if not part:
                raise ConnectionResetError("the connection was closed")
            line, found, rest = (line + part).partition(b"\n")
        self._read = rest
        if len(line) > longest_bytes:
            raise ProtocolError("a line that is too long")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise ProtocolError(f"not a message: {line[:80]!r}")
        return message

    def close(self) -> None:
        """End the connection; a thread that receives from it wakes up."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _has_more(self, timeout_s: float) -> bool:
        try:
            return bool(wait([self._connection], timeout_s))
        except ValueError:
            raise ConnectionResetError("this end closed the connection") from None


def new_challenge() -> str:
    return secrets.token_hex(16)


def proof(token: str, challenge: str, role: str) -> str:
    """Proof that `role` (agent, coordinator) knows the token, without the token."""
    return hmac.new(token.encode(), f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, challenge: str, role: str) -> bool:
    """True if `given` is that proof; takes as long for a wrong one as for the right one."""
    return hmac.compare_digest(str(given).encode(), proof(token, challenge, role).encode())


def authenticate(wire: Wire, message: dict[str, Any], token: str, timeout_s: float) -> Any:
    """Send the first message of an agent, with proof that it knows the token.

    Args:
        message: `hello` or `fetch`.
        timeout_s: longest wait for the coordinator's challenge, and again for its answer.

    Returns:
        The answer, with the coordinator's own proof verified.

    Raises:
        UserError: the coordinator refuses this agent.
        ProtocolError: it is not the coordinator of this attempt.
        OSError: the connection ended, or nothing came in time.
    """
    challenge = wire.receive(timeout_s, GREETING_BYTES)
    if challenge is None:
        raise TimeoutError(_MUTE)
    if "challenge" not in challenge:
        raise ProtocolError(f"it sent {challenge!r:.200}")
    mine = new_challenge()
    given = proof(token, str(challenge["challenge"]), "agent")
    wire.send({**message, "proof": given, "challenge": mine})
    answer = wire.receive(timeout_s)
    if answer is None:
        raise TimeoutError(_MUTE)
    if "refused" in answer:
        raise refusal(answer["refused"])
    if not is_proof(answer.get("proof"), token, mine, "coordinator"):
        raise ProtocolError("it does not know the token of this attempt")
    return answer


def refusal(refused: Any) -> UserError:
    """The error that a coordinator sent to a node that it refuses.

    Raises:
        ProtocolError: the data is not an error record.
    """
    try:
        what, where, fix = (
            printable(str(refused[key]), longest=_LONGEST_WORDS) for key in ("what", "where", "fix")
        )
        error: UserError = PreflightError(what, where=where, fix=fix, id=str(refused.get("id", "")))
        error.exit_code = ExitCode(int(refused["exit_code"]))
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"it sent {refused!r:.200}") from None
    return error


def log_line(line: str, process: str = "coordinator") -> None:
    """Write one line to the log of the coordinator, or of an agent."""
    with suppress(OSError):  # its log may be on a disk that is full
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {process}: {line}\n")
        sys.stderr.flush()
