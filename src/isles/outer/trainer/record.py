"""What the outer steps leave on record: a row for each, and a part of status.json."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from isles.outer.cluster import Applied
from isles.outer.diloco import Mode
from isles.outer.messages import Apply, Pending
from isles.outer.trainer.sync import Coordinator, Recorder, SyncState

_STATUS_EVERY_S = 2.0


class Progress(Protocol):
    """How far the run has come; see `isles.train.progress`."""

    step: int
    samples: int
    target_tokens: int

    def skip_to(self, step: int) -> None: ...


class OuterRecord:
    """Times and bytes of the outer steps."""

    def __init__(self, recorder: Recorder, progress: Progress, fragments: int) -> None:
        self._recorder, self._progress, self._fragments = recorder, progress, fragments
        self._began: dict[int, float] = {}
        self._exposed: dict[int, float] = {}
        self._waiting: dict[int, float] = {}
        self._exposed_s = self._hidden_s = 0.0
        self._last: dict[str, Any] | None = None
        self._recorded_at = -math.inf

    def begin(self, outer_step: int) -> None:
        """The contribution to an outer step is made now."""
        self._began[outer_step] = time.perf_counter()

    def exposed(self, outer_step: int, seconds: float) -> None:
        """No inner step was made for so long, because of this outer step."""
        if outer_step not in self._waiting:  # it is counted there
            self._exposed[outer_step] = self._exposed.get(outer_step, 0.0) + seconds

    def waits(self, outer_step: int) -> None:
        """From now on no inner step is made, because of this outer step."""
        self._waiting[outer_step] = time.perf_counter()

    def waits_no_more(self, outer_step: int) -> None:
        """Inner steps go on."""
        if (since := self._waiting.pop(outer_step, None)) is not None:
            self.exposed(outer_step, time.perf_counter() - since)

    def applied(self, apply: Apply, pending: Pending | None, applied: Applied, mode: Mode) -> None:
        """An average has been applied."""
        outer_step = apply.outer_step
        self.waits_no_more(outer_step)
        exposed_s = self._exposed.pop(outer_step, 0.0)
        began = self._began.pop(outer_step, None)
        took_s = exposed_s if began is None else time.perf_counter() - began
        hidden_s = max(0.0, took_s - exposed_s)
        self._exposed_s += exposed_s
        self._hidden_s += hidden_s
        row: dict[str, Any] = {
            "kind": "outer",
            "step": self._progress.step,
            "outer_step": outer_step,
            "fragment": outer_step % self._fragments,
            "round": outer_step // self._fragments,
            "mode": mode,
            "num_clusters": len(apply.weights),
            "weights": apply.weights,
            "refused": apply.refused,
            "tokens": 0 if pending is None else pending.tokens,
            "inner_steps": 0 if pending is None else pending.inner_steps,
            "samples": [] if pending is None else [list(span) for span in pending.samples],
            "norm": applied.norm,
            "digest": applied.digest,
            "average_bytes": apply.size_bytes,
            "sent_bytes": apply.sent_bytes,
            "received_bytes": apply.received_bytes,
            "send_s": apply.send_s,
            "receive_s": apply.receive_s,
            "exposed_s": exposed_s,
            "hidden_s": hidden_s,
            "at": time.time(),
        }
        kept = ("outer_step", "step", "mode", "weights", "refused", "norm", "digest", "at")
        self._last = {name: row[name] for name in kept}
        self._recorded_at = -math.inf
        self._recorder.row(row)

    def state(
        self, sync_state: SyncState, coordinator: Coordinator | None, *, is_last: bool = False
    ) -> None:
        """Set the part of status.json; seldom, save after an average and at the end."""
        now = time.monotonic()
        if coordinator is None or (now - self._recorded_at < _STATUS_EVERY_S and not is_last):
            return
        self._recorded_at = now
        hub = coordinator.hub.state
        total_s = self._exposed_s + self._hidden_s
        self._recorder.update(
            outer={
                "outer_step": sync_state.version,
                "round": sync_state.version // self._fragments,
                "fragments": self._fragments,
                "sync_every": coordinator.sync_every_at(sync_state.version),
                "steps_since": sync_state.steps - sync_state.contributed_at,
                "waits_for_outer_steps": list(sync_state.sent),
                "is_averaged": not sync_state.sent and not sync_state.has_learnt,
                "clusters": list(hub.members),
                "is_connected": hub.is_connected,
                "is_behind": hub.is_behind,
                "sent_bytes": hub.sent_bytes,
                "received_bytes": hub.received_bytes,
                "bytes_per_s": coordinator.speed.bytes_per_s,
                "exposed_s": self._exposed_s,
                "hidden_s": self._hidden_s,
                "hidden_share": self._hidden_s / total_s if total_s else None,
                "last_outer_step": self._last,
            }
        )
