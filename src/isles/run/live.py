"""What watchers read of a run beside its status: samples of the nodes, stacks of the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from isles.run.owner import not_own
from isles.run.paths import Attempt
from isles.run.records import MAX_LIST_BYTES, MAX_SHOWN_BYTES, read_record, write_record

SUMS = {
    "gpu_use": "gpu_use",
    "gpu_memory_bytes": "gpu_memory_bytes",
    "gpu_power_w": "gpu_power_w",
    "gpu_temperature_c": "gpu_temperature_c",
    "cpu_use": "cpu",
    "host_memory_bytes": "memory_bytes",
    "net_in_bytes_per_s": "net_in",
    "net_out_bytes_per_s": "net_out",
}
"""Names in metrics.jsonl, and in `sums` of a node, to which each of its samples is added."""


Tell = Callable[[dict[str, Any]], None]
"""Takes what a rank tells of itself while it runs, to its agent. Never waits; OSError: the agent is
gone."""


class SampledMeans:
    """Means over the nodes of what their agents have sampled, for the rows of metrics.jsonl.

    Args:
        path: live.json of the attempt, which the coordinator replaces every two seconds.
        rest: nothing is read for so many times the processor's time that the last reading took,
            which is milliseconds where there are many nodes: a step waits for it.
    """

    def __init__(self, path: Path, rest: int = 1000) -> None:
        self._path = path
        self._rest = rest
        self._seen_ns = 0
        self._not_before = 0.0
        self._sums: dict[str, dict[str, Any]] = {}
        self.since_last()

    def since_last(self) -> dict[str, float | None]:
        """Of the samples since the last call; empty: there are none. Never raises.

        None: no node has such a figure, as without a GPU.
        """
        # A record of another version is as good as none: a curve is not worth a run.
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            written_ns = self._path.stat().st_mtime_ns
            if written_ns != self._seen_ns and time.monotonic() >= self._not_before:
                self._seen_ns = written_ns
                began_s = time.thread_time()
                found = self._read()
                took_s = time.thread_time() - began_s
                self._not_before = time.monotonic() + self._rest * took_s
                return found
        return {}

    def _read(self) -> dict[str, float | None]:
        nodes = (read_record(self._path, MAX_SHOWN_BYTES) or {})["nodes"]
        before = self._sums
        self._sums = now = {node: of["sums"] for node, of in nodes.items() if of["sums"]}
        found: dict[str, list[float]] = {name: [] for name in SUMS}
        has_any = False
        for node, sums in now.items():
            old = before.get(node, {})
            if old.get("samples", 0) > sums["samples"]:
                old = {}  # another agent has taken its place
            count = sums["samples"] - old.get("samples", 0)
            has_any = has_any or count > 0
            for name, key in SUMS.items():
                if count > 0 and sums[key] is not None:
                    found[name].append((sums[key] - (old.get(key) or 0.0)) / count)
        if not has_any:
            return {}
        return {name: sum(of) / len(of) if of else None for name, of in found.items()}


def ask_for_stacks(attempt: Attempt) -> float:
    """Leave a request for the stacks of all ranks; the `asked_at` of its answer.

    Raises:
        PreflightError: this start is another user's, in whose folder nothing is written.
        OSError: the folder cannot be written.
    """
    if owner := attempt.owner:
        raise not_own("ask its ranks for their stacks", owner, attempt.path)
    at = time.time()
    write_record(attempt.stacks_request, {"at": at}, durable=False)
    return at


class StacksRequests:
    """Requests of watchers for the stacks of all ranks, for whoever answers them."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._answered: float | None = None
        with suppress(OSError):
            self._answered = (read_record(attempt.stacks, MAX_LIST_BYTES) or {}).get("asked_at")

    def new(self) -> float | None:
        """A request that has no answer yet; None: there is none."""
        at = (read_record(self._attempt.stacks_request) or {}).get("at")
        return at if at != self._answered and isinstance(at, float | int) else None

    def answer(self, asked_at: float, ranks: dict[int, dict[str, Any]]) -> None:
        """Write the answer; a full disk costs it.

        Args:
            ranks: host, step, stage, at, waits_in and stacks of each that has answered.
        """
        self._answered = asked_at
        record = {"asked_at": asked_at, "at": time.time()}
        with suppress(OSError):
            write_record(self._attempt.stacks, {**record, "ranks": ranks}, durable=False)
