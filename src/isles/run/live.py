"""Live data of a run in addition to its status: samples of the nodes and stacks of the ranks."""

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
"""Names of sampled values in metrics.jsonl, and in the `sums` of a node."""


Tell = Callable[[dict[str, Any]], None]
"""Sends reports of a running rank to its agent, without waiting. OSError: the agent is gone."""


class SampledMeans:
    """Means of the agents' samples over all nodes, for the rows of metrics.jsonl.

    Args:
        path: live.json of the attempt, which the coordinator replaces every two seconds.
        rest: pause after a read, as a multiple of its CPU time. A read takes milliseconds for many
            nodes, and a step waits for it.
    """

    def __init__(self, path: Path, rest: int = 1000) -> None:
        self._path = path
        self._rest = rest
        self._seen_ns = 0
        self._not_before = 0.0
        self._sums: dict[str, dict[str, Any]] = {}
        self.since_last()

    def since_last(self) -> dict[str, float | None]:
        """Means of the samples since the last call, or empty without samples. Never raises.

        A value is None if no node has it, for example without a GPU.
        """
        # isles ignores a record of another version: a curve must not stop a run.
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
                old = {}  # another agent has replaced it
            count = sums["samples"] - old.get("samples", 0)
            has_any = has_any or count > 0
            for name, key in SUMS.items():
                if count > 0 and sums[key] is not None:
                    found[name].append((sums[key] - (old.get(key) or 0.0)) / count)
        if not has_any:
            return {}
        return {name: sum(of) / len(of) if of else None for name, of in found.items()}


def ask_for_stacks(attempt: Attempt) -> float:
    """Leave a request for the stacks of all ranks. Returns the `asked_at` of its answer.

    Raises:
        PreflightError: the attempt belongs to another user.
        OSError: the folder is not writable.
    """
    if owner := attempt.owner:
        raise not_own("ask its ranks for their stacks", owner, attempt.path)
    at = time.time()
    write_record(attempt.stacks_request, {"at": at}, durable=False)
    return at


class StacksRequests:
    """Requests for the stacks of all ranks, for the process that answers them."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._answered: float | None = None
        with suppress(OSError):
            self._answered = (read_record(attempt.stacks, MAX_LIST_BYTES) or {}).get("asked_at")

    def new(self) -> float | None:
        """A request without an answer, or None."""
        at = (read_record(self._attempt.stacks_request) or {}).get("at")
        return at if at != self._answered and isinstance(at, float | int) else None

    def answer(self, asked_at: float, ranks: dict[int, dict[str, Any]]) -> None:
        """Write the answer. On a full disk, isles loses it.

        Args:
            ranks: host, step, stage, at, waits_in and stacks of each rank with an answer.
        """
        self._answered = asked_at
        record = {"asked_at": asked_at, "at": time.time()}
        with suppress(OSError):
            write_record(self._attempt.stacks, {**record, "ranks": ranks}, durable=False)
