"""What the outer steps leave on record: a row for each turn, and a part of status.json."""

from __future__ import annotations

import math
import time
from typing import Any

from isles.outer.base import Applied, Mode
from isles.outer.client.events import Sent
from isles.train.outer.coordinator import OuterCoordinator, SyncState, Take
from isles.train.progress import Progress
from isles.train.record import Recorder

_STATUS_EVERY_S = 2.0


class OuterRecord:
    """Times and bytes of the turns.

    Args:
        recorder: of the run.
        progress: of the run.
        fragments: of the layout.
    """

    def __init__(self, recorder: Recorder, progress: Progress, fragments: int) -> None:
        self._recorder, self._progress, self._fragments = recorder, progress, fragments
        self._began: dict[int, float] = {}
        self._exposed: dict[int, float] = {}
        self._waiting: dict[int, float] = {}
        self._exposed_s = self._hidden_s = 0.0
        self._last: dict[str, Any] | None = None
        self._told_at = -math.inf

    def begin(self, turn: int) -> None:
        """The contribution to a turn is made now."""
        self._began[turn] = time.perf_counter()

    def exposed(self, turn: int, seconds: float) -> None:
        """No inner step was made for so long, because of this turn."""
        if turn not in self._waiting:  # it is counted there
            self._exposed[turn] = self._exposed.get(turn, 0.0) + seconds

    def waits(self, turn: int) -> None:
        """From now on no inner step is made, because of this turn."""
        self._waiting[turn] = time.perf_counter()

    def waits_no_more(self, turn: int) -> None:
        """Inner steps go on."""
        if (since := self._waiting.pop(turn, None)) is not None:
            self.exposed(turn, time.perf_counter() - since)

    def turn(self, take: Take, sent: Sent | None, applied: Applied, mode: Mode) -> None:
        """A turn has been taken in."""
        event = take.event
        self.waits_no_more(event.turn)
        exposed_s = self._exposed.pop(event.turn, 0.0)
        began = self._began.pop(event.turn, None)
        took_s = exposed_s if began is None else time.perf_counter() - began
        hidden_s = max(0.0, took_s - exposed_s)
        self._exposed_s += exposed_s
        self._hidden_s += hidden_s
        samples = [list(span) for span in sent.samples] if sent is not None else []
        row = {
            "kind": "outer",
            "step": self._progress.step,
            "turn": event.turn,
            "fragment": event.turn % self._fragments,
            "round": event.turn // self._fragments,
            "mode": mode,
            "num_clusters": len(event.weights),
            "weights": event.weights,
            "refused": event.refused,
            "tokens": 0 if sent is None else sent.tokens,
            "inner_steps": 0 if sent is None else sent.inner_steps,
            "samples": samples,
            "norm": applied.norm,
            "digest": applied.digest,
            "average_bytes": event.size_bytes,
            "sent_bytes": event.sent_bytes,
            "received_bytes": event.received_bytes,
            "send_s": event.send_s,
            "receive_s": event.receive_s,
            "exposed_s": exposed_s,
            "hidden_s": hidden_s,
            "at": time.time(),
        }
        self._last = {name: row[name] for name in ("turn", "step", "mode", "weights", "refused")}
        self._last |= {"norm": applied.norm, "digest": applied.digest, "at": row["at"]}
        self._told_at = -math.inf
        self._recorder.row(row)

    def state(
        self, sync_state: SyncState, coordinator: OuterCoordinator | None, *, is_last: bool = False
    ) -> None:
        """How it stands, for status.json; seldom, save after a turn and at the end."""
        now = time.monotonic()
        if coordinator is None or (now - self._told_at < _STATUS_EVERY_S and not is_last):
            return
        self._told_at = now
        line = coordinator.line
        total_s = self._exposed_s + self._hidden_s
        self._recorder.update(
            outer={
                "turn": sync_state.version,
                "round": sync_state.version // self._fragments,
                "fragments": self._fragments,
                "sync_every": coordinator.round_steps(sync_state.version),
                "steps_since": sync_state.steps - sync_state.contributed_at,
                "waits_for_turns": list(sync_state.sent),
                "is_averaged": not sync_state.sent and not sync_state.has_learnt,
                "clusters": list(line.members),
                "is_connected": line.is_connected,
                "is_behind": coordinator.is_behind,
                "sent_bytes": line.sent_bytes,
                "received_bytes": line.received_bytes,
                "bytes_per_s": coordinator.pace.bytes_per_s,
                "exposed_s": self._exposed_s,
                "hidden_s": self._hidden_s,
                "hidden_share": self._hidden_s / total_s if total_s else None,
                "last_turn": self._last,
            }
        )
