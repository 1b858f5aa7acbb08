"""Protocol of the coordinator and the agents: lines of JSON over TCP, both ways.

Each end proves that it knows the token of the attempt, which itself is never sent: the answer to a
random challenge is its HMAC-SHA256 with the token as key.

    coordinator  {"challenge": C}
    agent        {"hello": {...} or "fetch": true, "proof": of C, "challenge": D}
    coordinator  {"welcome": true or "files": {...}, "proof": of D}, or {"refused": {...}}
    coordinator  {"command": {...}}                     whenever it changes, and each second
    agent        {"report": {...}, "clock": T, "bye": is leaving}                   the same

A message holds the whole state of its sender, so that a connection that was cut loses nothing. The
times below are those of both ends, so that both come to the same end: a node that the coordinator
takes for lost has ended its ranks by itself.
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
"""An agent that has received nothing for so long opens a new connection in place of the old one."""
LOST_AFTER_S = 20.0
"""A node that has sent nothing for so long is lost: switched off, or its network is cut. A cut or a
freeze that is shorter costs nothing but its own time."""
GONE_AFTER_S = 4.0
"""A process that has closed its connection, and does not come back for so long, has ended."""
HELLO_S = 10.0
"""Longest wait for the first message on a new connection."""
END_GRACE_S = 5.0
"""What is left of a rank so long after it was asked to end is killed."""
WAITING_EVERY_S = 5.0
"""How often a wait for other nodes is logged."""
CLOSING_S = 60.0
"""How long agents may take to end once the run has its outcome."""
GREETING_BYTES = 64 * 2**10
"""The longest first message of an agent, which is not authenticated yet."""

_MUTE = "somebody there takes the connection, and says nothing"
"""Another program does, and a coordinator that is frozen for a while: no reason to give up."""

_SEND_S = 5.0
_LONGEST_BYTES = 64 * 2**20
_LONGEST_WORDS = 600


class ProtocolError(ValueError):
    """The other end does not speak this protocol."""


class LastSeen:
    """Seconds since the last message, as this process has lived through them.

    A process that was frozen for a minute has received nothing in that minute, and must not take it
    for a silence of the other end: a long gap between two looks counts as a short one.
    """

    _LONGEST_GAP_S = 5.0

    def __init__(self, now_s: float) -> None:
        self._looked_at = now_s
        self.seconds = 0.0

    def reset(self) -> None:
        self.seconds = 0.0

    def look(self, now_s: float) -> float:
        """Seconds up to now."""
        self.seconds += min(now_s - self._looked_at, self._LONGEST_GAP_S)
        self._looked_at = now_s
        return self.seconds


class Wire:
    """One connection; any thread may send, one receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._lock = threading.Lock()
        self._read = b""

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

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

        Raises:
            OSError: the other end has closed the connection.
            ProtocolError: what came is no message of isles.
        """
        end = time.monotonic() + timeout_s
        line, found, rest = self._read.partition(b"\n")
        while not found:
            if len(line) > longest_bytes:
                raise ProtocolError("a line without an end")
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
            raise ConnectionResetError("the connection was closed here") from None


def new_challenge() -> str:
    return secrets.token_hex(16)


def proof(token: str, challenge: str, role: str) -> str:
    """Proof that `role` (agent, coordinator) knows the token, without the token."""
    return hmac.new(token.encode(), f"{role} {challenge}".encode(), hashlib.sha256).hexdigest()


def is_proof(given: object, token: str, challenge: str, role: str) -> bool:
    """Whether `given` is that proof; takes as long for a wrong one as for the right one."""
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
        raise ProtocolError(f"it says {challenge!r:.200}")
    mine = new_challenge()
    given = proof(token, str(challenge["challenge"]), "agent")
    wire.send({**message, "proof": given, "challenge": mine})
    answer = wire.receive(timeout_s)
    if answer is None:
        raise TimeoutError(_MUTE)
    if "refused" in answer:
        raise refusal(answer["refused"])
    if not is_proof(answer.get("proof"), token, mine, "coordinator"):
        raise ProtocolError("it does not know the token of this start of the run")
    return answer


def refusal(refused: Any) -> UserError:
    """The error that a coordinator has sent to a node which it does not take in.

    Raises:
        ProtocolError: what came is none.
    """
    try:
        what, where, fix = (
            printable(str(refused[key]), longest=_LONGEST_WORDS) for key in ("what", "where", "fix")
        )
        error: UserError = PreflightError(what, where=where, fix=fix, id=str(refused.get("id", "")))
        error.exit_code = ExitCode(int(refused["exit_code"]))
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"it says {refused!r:.200}") from None
    return error


def log_line(line: str, process: str = "coordinator") -> None:
    """Write one line to the log of the coordinator, or of an agent."""
    with suppress(OSError):  # its log may be on a disk that is full
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {process}: {line}\n")
        sys.stderr.flush()
