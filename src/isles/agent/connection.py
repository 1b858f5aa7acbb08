"""Connection of an agent to the coordinator: orders come, reports go."""

from __future__ import annotations

import importlib.metadata
import math
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from isles import __version__
from isles.agent.server import DirectLink, NodeConnection
from isles.errors import CommunicationError, UserError
from isles.run.pace import (
    GONE_AFTER_S,
    HELLO_S,
    LOST_AFTER_S,
    RECONNECT_AFTER_S,
    SIGN_EVERY_S,
    WAITING_EVERY_S,
    Silence,
)
from isles.run.wire import (
    GREETING_BYTES,
    NotOurs,
    Wire,
    is_proof,
    new_challenge,
    proof,
    refusal,
)

_CONNECT_S = 2.0
_LOOK_S = 0.05
_UNKNOWN_S = 4.0
"""How long something else on the port is tried again."""

_MUTE = "somebody there takes the connection, and says nothing"
"""Another program does, and a coordinator that is frozen for a while: no reason to go."""

State = Literal["seeking", "there", "cut off", "refused"]


@dataclass(frozen=True, slots=True)
class Head:
    """Where the coordinator listens."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        at = f"{self.address}:{self.port}"
        return at if self.name in ("", self.address) else f"{self.name} ({at})"


def authenticate(wire: Wire, message: dict[str, Any], token: str, timeout_s: float) -> Any:
    """Send the first message of an agent, with proof that it knows the token.

    Args:
        wire: a new connection.
        message: `hello` or `fetch`.
        token: the secret of the attempt.
        timeout_s: longest wait for the coordinator's challenge, and again for its answer.

    Returns:
        The answer, with the coordinator's own proof verified; None where none came in time.

    Raises:
        UserError: the coordinator refuses this agent.
        NotOurs: it is not the coordinator of this attempt.
        OSError: the connection ended.
    """
    challenge = wire.receive(timeout_s, GREETING_BYTES)
    if challenge is None:
        return None
    if "challenge" not in challenge:
        raise NotOurs(f"it says {challenge!r:.200}")
    mine = new_challenge()
    given = proof(token, str(challenge["challenge"]), "agent")
    wire.send({**message, "proof": given, "challenge": mine})
    answer = wire.receive(timeout_s)
    if answer is None:
        return None
    if "refused" in answer:
        raise refusal(answer["refused"])
    if not is_proof(answer.get("proof"), token, mine, "coordinator"):
        raise NotOurs("it does not know the token of this start of the run")
    return answer


class OwnConnection:
    """In place of `Connection` for the agent in the coordinator's own process."""

    state: State = "there"
    fault = None
    why = ""
    may_return = False

    def __init__(self, peer: NodeConnection) -> None:
        self._peer = peer

    @property
    def order(self) -> dict[str, Any]:
        """See Connection."""
        return self._peer.wire.order if isinstance(self._peer.wire, DirectLink) else {}

    def report(self, report: dict[str, Any]) -> None:
        """See Connection."""
        self._peer.report = report

    def come_anew(self) -> None:
        """Never called: this connection does not break."""

    def leave(self) -> None:
        """See Connection."""
        self._peer.is_done = True


class Connection:
    """Keeps the connection to the coordinator, and opens it again where it breaks.

    Args:
        head: where the coordinator listens.
        hello: who this node is.
        token: the secret of the attempt.
        start_timeout_s: longest wait for the coordinator at the start, and, where `may_return`,
            once more after the connection was lost.
        may_return: whether the run goes on without this node, which may then come back.
    """

    def __init__(
        self,
        head: Head,
        hello: dict[str, Any],
        token: str,
        *,
        start_timeout_s: float,
        may_return: bool,
    ) -> None:
        self.head = head
        self._hello = hello
        self._token = token
        self._start_timeout_s = start_timeout_s
        self.may_return = may_return
        self._lock = threading.Lock()
        self._agent = uuid.uuid4().hex
        self._report: dict[str, Any] = {}
        self._order: dict[str, Any] = {}
        self._state: State = "seeking"
        self._why = ""
        self._logged = ""
        self._is_mute = False
        self._fault: UserError | None = None
        self._is_leaving = False
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    may_return: bool
    """Whether the run may go on without this node, and take it back."""

    @property
    def state(self) -> State:
        """How the line stands."""
        return self._state

    @property
    def order(self) -> dict[str, Any]:
        """The last word of the coordinator; empty before the first."""
        return self._order

    @property
    def why(self) -> str:
        """Why the line is cut off."""
        return self._why

    @property
    def fault(self) -> UserError | None:
        """Why this node cannot be a part of the run."""
        return self._fault

    def report(self, report: dict[str, Any]) -> None:
        """Tell the coordinator how the ranks stand; said again every second."""
        self._report = report

    def come_anew(self) -> None:
        """After the line was cut off and the ranks were ended: seek the coordinator again."""
        self._thread.join(_CONNECT_S)  # it has seen the cut; two of them would take turns
        with self._lock:
            self._agent = uuid.uuid4().hex
            self._order = {}
            self._state = "seeking"
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Say goodbye."""
        self._is_leaving = True
        self._thread.join(_CONNECT_S)

    def _run(self) -> None:
        """Until this node leaves, is refused, or is cut off."""
        silence = Silence(time.monotonic())
        strange_since: float | None = None
        refused_s = 0.0
        while not self._is_leaving and self._state in ("seeking", "there"):
            try:
                wire = self._connect(silence)
                refused_s = 0.0
                self._talk(wire, silence)
            except UserError as error:
                self._refuse(error)
            except NotOurs as error:
                strange_since = strange_since or time.monotonic()
                is_late = time.monotonic() - strange_since > _UNKNOWN_S
                if is_late and self._state == "seeking":
                    self._refuse(self._unknown(error))
                time.sleep(_LOOK_S * 4)
            except ConnectionRefusedError:
                refused_s += _LOOK_S * 4
                time.sleep(_LOOK_S * 4)
            except OSError:
                time.sleep(_LOOK_S)
            self._look(silence, refused_s)

    def _log(self, line: str) -> None:
        """Whom this node waits for; its ranks may still be importing what they need."""
        if line and line != self._logged:
            say(line)
        self._logged = line

    def _look(self, silence: Silence, refused_s: float) -> None:
        silent_s = silence.look(time.monotonic())
        waits = int(silent_s // WAITING_EVERY_S)
        if self._state == "seeking" and waits:
            mute = f": {_MUTE}" if self._is_mute else ""
            waited_s = waits * WAITING_EVERY_S
            self._log(f"waiting for the coordinator at {self.head} ({waited_s:.0f} s){mute}")
        if self._state == "there" and refused_s > GONE_AFTER_S:
            # Not for a while: the run is over, and there is nothing to return to.
            self.may_return = False
            self._cut_off(f"the coordinator on {self.head}, through which the nodes meet, is gone")
        elif self._state == "there" and silent_s > LOST_AFTER_S:
            self._cut_off(f"{self.head} has not been heard of for {silent_s:.0f} s")
        elif self._state == "seeking" and silent_s > self._start_timeout_s:
            self._refuse(self._unanswered())

    def _connect(self, silence: Silence) -> Wire:
        address = (self.head.address, self.head.port)
        wire = Wire(socket.create_connection(address, timeout=_CONNECT_S))
        try:
            answer = self._greet(wire, silence)
        except OSError as error:
            wire.close()
            if self._state == "seeking" and isinstance(error, ConnectionResetError):
                # A host that has died answers nothing; somebody has hung up.
                raise NotOurs("it hangs up") from error
            raise
        except BaseException:
            wire.close()
            raise
        self._is_mute = answer is None
        if answer is None:
            wire.close()
            raise TimeoutError(_MUTE)
        return wire

    def _greet(self, wire: Wire, silence: Silence) -> Any:
        """The coordinator's welcome; a silence while this process was frozen does not count."""
        deadline = time.monotonic() + HELLO_S
        while time.monotonic() < deadline and not wire.has_message(_CONNECT_S / 4):
            silent_s = silence.look(time.monotonic())
            if self._is_leaving or (self._state == "seeking" and silent_s > self._start_timeout_s):
                return None
        hello = {"hello": {**self._hello, "agent": self._agent}}
        left_s = max(_CONNECT_S, deadline - time.monotonic())
        return authenticate(wire, hello, self._token, left_s)

    def _talk(self, wire: Wire, silence: Silence) -> None:
        """Hear and report until the connection ends."""
        self._state = "there"
        silence.heard()
        said: dict[str, Any] = {}
        said_at = -math.inf
        try:
            while True:
                message = wire.receive(_LOOK_S)
                now_s = time.monotonic()
                if message is not None:
                    silence.heard()
                    self._order = message.get("order", self._order)
                    self._log(str(self._order.get("waiting", "")))
                if self._is_leaving:
                    wire.send({"report": self._report, "clock": time.time(), "bye": True})
                    return
                report = self._report
                if report != said or now_s - said_at > SIGN_EVERY_S:
                    wire.send({"report": report, "clock": time.time()})
                    said, said_at = report, now_s
                if silence.look(now_s) > RECONNECT_AFTER_S:
                    return
        finally:
            wire.close()

    def _cut_off(self, why: str) -> None:
        with self._lock:
            self._why, self._state = why, "cut off"

    def _refuse(self, error: UserError) -> None:
        was_lost = self._state == "there" and "taken for lost" in error.what
        with self._lock:
            if was_lost:
                self._why, self._state = f"{self.head} has taken this node for lost", "cut off"
            else:
                self._fault, self._state = error, "refused"

    def _unanswered(self) -> UserError:
        address, port = self.head.address, self.head.port
        fix = f"is the first node started, and is its port open? try: nc -vz {address} {port}"
        if self._is_mute:
            fix = f"is it frozen, or has another program its port? there: ss -ltnp | grep {port}"
        return CommunicationError(
            f"no coordinator has answered at {self.head} within {self._start_timeout_s:.0f} s"
            + (f": {_MUTE}" if self._is_mute else ""),
            where=f"host {socket.gethostname()}",
            fix=fix,
            id="start.timeout",
        )

    def _unknown(self, error: Exception) -> UserError:
        return CommunicationError(
            f"what listens at {self.head} is not the coordinator of this run: {error}",
            where=f"host {socket.gethostname()}",
            fix="another program has this port: see `ss -ltnp` there, and set "
            "clusters[0].network.port",
            id="port.unknown",
        )


def say(line: str) -> None:
    """One line for the agent's log."""
    with suppress(OSError):  # its log may be on a disk that is full
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} agent: {line}\n")
        sys.stderr.flush()


def versions() -> dict[str, str]:
    """What must be the same on all nodes; found out without importing it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return {"isles": __version__, "torch": torch}
