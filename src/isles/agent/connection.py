"""An agent's line to the supervisor: what it is to do, and what it has to report."""

from __future__ import annotations

import math
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

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
from isles.run.wire import GREETING_BYTES, NotOurs, Wire, refusal

_CONNECT_S = 2.0
_LOOK_S = 0.05
_UNKNOWN_S = 4.0
"""How long something else on the port is tried again."""

_MUTE = "somebody there takes the connection, and says nothing"
"""Another program does, and a supervisor that is frozen for a while: no reason to go."""

State = Literal["seeking", "there", "cut off", "refused"]


@dataclass(frozen=True, slots=True)
class Head:
    """Where the supervisor listens."""

    name: str
    address: str
    port: int

    def __str__(self) -> str:
        at = f"{self.address}:{self.port}"
        return at if self.name in ("", self.address) else f"{self.name} ({at})"


class Contact:
    """Keeps the line to the supervisor, and opens it again where it breaks.

    Args:
        head: where the supervisor listens.
        hello: who this node is.
        start_timeout_s: longest wait for the supervisor at the start, and, where `may_return`,
            once more after the line was lost.
        may_return: whether the run goes on without this node, which may then come back.
    """

    def __init__(
        self, head: Head, hello: dict[str, Any], *, start_timeout_s: float, may_return: bool
    ) -> None:
        self.head = head
        self._hello = hello
        self._start_timeout_s = start_timeout_s
        self.may_return = may_return
        self._lock = threading.Lock()
        self._token = uuid.uuid4().hex
        self._report: dict[str, Any] = {}
        self._order: dict[str, Any] = {}
        self._state: State = "seeking"
        self._why = ""
        self._told = ""
        self._is_mute = False
        self._fault: UserError | None = None
        self._is_leaving = False
        self._thread = threading.Thread(target=self._run, name="contact", daemon=True)
        self._thread.start()

    may_return: bool
    """Whether the run may go on without this node, and take it back."""

    @property
    def state(self) -> State:
        """How the line stands."""
        return self._state

    @property
    def order(self) -> dict[str, Any]:
        """The last word of the supervisor; empty before the first."""
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
        """Tell the supervisor how the ranks stand; said again every second."""
        self._report = report

    def come_anew(self) -> None:
        """After the line was cut off and the ranks were ended: seek the supervisor again."""
        self._thread.join(_CONNECT_S)  # it has seen the cut; two of them would take turns
        with self._lock:
            self._token = uuid.uuid4().hex
            self._order = {}
            self._state = "seeking"
        self._thread = threading.Thread(target=self._run, name="contact", daemon=True)
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

    def _tell(self, line: str) -> None:
        """Whom this node waits for; its ranks may still be importing what they need."""
        if line and line != self._told:
            say(line)
        self._told = line

    def _look(self, silence: Silence, refused_s: float) -> None:
        silent_s = silence.look(time.monotonic())
        waits = int(silent_s // WAITING_EVERY_S)
        if self._state == "seeking" and waits:
            mute = f": {_MUTE}" if self._is_mute else ""
            self._tell(
                f"waiting for the supervisor at {self.head} ({waits * WAITING_EVERY_S:.0f} s){mute}"
            )
        if self._state == "there" and refused_s > GONE_AFTER_S:
            # Not for a while: the run is over, and there is nothing to return to.
            self.may_return = False
            self._cut_off(f"the supervisor on {self.head}, through which the nodes meet, is gone")
        elif self._state == "there" and silent_s > LOST_AFTER_S:
            self._cut_off(f"{self.head} has not been heard of for {silent_s:.0f} s")
        elif self._state == "seeking" and silent_s > self._start_timeout_s:
            self._refuse(self._unanswered())

    def _connect(self, silence: Silence) -> Wire:
        address = (self.head.address, self.head.port)
        wire = Wire(socket.create_connection(address, timeout=_CONNECT_S))
        try:
            wire.send({"hello": {**self._hello, "token": self._token}})
            answer = self._first_word(wire, silence)
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
        if "refused" in answer:
            wire.close()
            raise refusal(answer["refused"])
        if "welcome" not in answer:
            wire.close()
            raise NotOurs(f"it says {answer!r:.200}")
        return wire

    def _first_word(self, wire: Wire, silence: Silence) -> dict[str, Any] | None:
        """The answer to a greeting; the time until it comes is not that of a frozen process."""
        deadline = time.monotonic() + HELLO_S
        while time.monotonic() < deadline:
            answer = wire.receive(_CONNECT_S / 4, GREETING_BYTES)
            if answer is not None:
                return answer
            silent_s = silence.look(time.monotonic())
            if self._is_leaving or (self._state == "seeking" and silent_s > self._start_timeout_s):
                return None
        return None

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
                    self._tell(str(self._order.get("waiting", "")))
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
            f"no supervisor has answered at {self.head} within {self._start_timeout_s:.0f} s"
            + (f": {_MUTE}" if self._is_mute else ""),
            where=f"host {socket.gethostname()}",
            fix=fix,
            id="start.timeout",
        )

    def _unknown(self, error: Exception) -> UserError:
        return CommunicationError(
            f"what listens at {self.head} is not the supervisor of this run: {error}",
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
