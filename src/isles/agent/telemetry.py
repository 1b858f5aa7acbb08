"""Samples of a node, taken in a thread of its agent: the machine, its GPUs, and its ranks.

The agent sends the last sample in its report to the coordinator, which writes live.json
(`live.py`). All samples are kept in `telemetry/` of the run directory.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from isles.agent.protocol import log_line
from isles.run.cards import GpuReader, find_cards
from isles.run.limits import memory
from isles.run.live import SUMS
from isles.run.process import processor_name
from isles.run.records import write_bytes_atomic

EVERY_S = 2.0
_LIMIT_BYTES = 4 << 20
_RATE_EVERY = 20
"""Number of samples between two queries of the interface's speed, which the driver answers."""

_OF_THE_MOMENT = frozenset(("phase", "stage", "stage_s"))
"""Keys of a rank's report that are useless in later samples."""


class Telemetry:
    """Samples one node while the context is open.

    Args:
        run_path: the run directory, whose disk is sampled.
        file: file for all samples, one JSON line each.
        interface: network interface with the address of this node; None: unknown.
        num_cards: number of GPUs that the ranks use, from the first visible GPU.
        ranks: returns the state of each rank: pid, alive, exit, and its last report.
    """

    def __init__(
        self,
        run_path: Path,
        file: Path,
        interface: str | None,
        num_cards: int,
        ranks: Callable[[], Mapping[int, Mapping[str, Any]]],
    ) -> None:
        self.last: dict[str, Any] = {}
        """The last sample; empty before the first."""
        self._ranks = ranks
        self._num_cards = num_cards
        self._cards: GpuReader | None = None
        self._host = _Host(run_path, interface)
        self._file = SampleFile(file)
        self._processes: dict[int, psutil.Process] = {}
        self._sums: dict[str, float | None] = {}
        self._num_samples = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def __enter__(self) -> Telemetry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(timeout=1)  # a hanging driver or disk must not delay the end

    def begin(self) -> None:
        """Find the GPUs, and read all counters: rates are differences since the last sample."""
        self._cards = find_cards(self._num_cards)
        if self._cards is not None:
            self._cards.read()
        self._host.read()

    def sample(self) -> dict[str, Any]:
        """Take a sample, after `begin` and in the same thread."""
        at = time.time()
        host = self._host.read()
        gpus = self._cards.read() if self._cards is not None else []
        self._add(host, gpus)
        ranks = {str(rank): self._rank(known, gpus) for rank, known in self._ranks().items()}
        sums = {"samples": self._num_samples, **self._sums}
        name = socket.gethostname()
        return {"at": at, "name": name, "host": host, "gpus": gpus, "sums": sums, "ranks": ranks}

    def _run(self) -> None:
        is_begun, has_failed = False, False
        while not self._is_over.wait(EVERY_S if is_begun else 0.0):
            try:
                if is_begun:
                    self._take()
                else:
                    self.begin()
                has_failed = False
            except (
                Exception
            ) as error:  # a thread's edge: the run continues, and the next sample may succeed
                if not has_failed:
                    log_line(f"cannot sample this node: {error!r:.200}", "agent")
                has_failed = True
            is_begun = True

    def _take(self) -> None:
        self.last = sample = self.sample()
        ranks = {
            rank: {key: of[key] for key in of.keys() - _OF_THE_MOMENT}
            for rank, of in sample["ranks"].items()
        }
        self._file.append({**sample, "ranks": ranks})

    def _add(self, host: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> None:
        # Add to the sums, from which readers compute means over any time.
        for key in SUMS.values():
            of_gpus = [gpu[key.removeprefix("gpu_")] for gpu in gpus if key.startswith("gpu_")]
            known = [value for value in of_gpus if value is not None]
            value = sum(known) / len(known) if known else host.get(key)
            total = self._sums.get(key)
            if self._num_samples == 0:
                self._sums[key] = value
            elif total is not None:  # a value that is unknown for a moment does not change the mean
                self._sums[key] = total + (total / self._num_samples if value is None else value)
        self._num_samples += 1

    def _rank(self, known: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        found = {**known, "cpu": None, "resident_bytes": None}
        number = known.get("gpu")  # as torch counts the visible GPUs
        if number is not None and number < len(gpus):
            found["gpu"] = gpus[number]["index"]
        pid = int(known["pid"])
        with suppress(psutil.Error):
            if known["alive"] and pid not in self._processes:
                self._processes[pid] = psutil.Process(pid)
                self._processes[pid].cpu_percent()  # measures from now on
            elif known["alive"]:
                process = self._processes[pid]
                with process.oneshot():
                    found["cpu"] = round(process.cpu_percent() / 100, 4)
                    found["resident_bytes"] = process.memory_info().rss
        return found


class _Host:
    """Metrics of the host."""

    def __init__(self, run_path: Path, interface: str | None) -> None:
        self._run_path = run_path
        # The loopback interface says nothing about a network.
        self._interface = None if interface in ("lo", "lo0") else interface
        self._about = {"cores": psutil.cpu_count(), "cpu_name": processor_name()}
        self._moved: tuple[float, int, int] | None = None
        self._rate: float | None = None
        self._num_reads = 0

    def read(self) -> dict[str, Any]:
        """Current metrics; rates and CPU usage are measured since the last call."""
        main = memory()
        net_in, net_out = self._network()
        free = None
        with suppress(OSError):  # the run directory was deleted
            free = shutil.disk_usage(self._run_path).free
        if self._num_reads % _RATE_EVERY == 0:
            self._rate = self._interface_rate()
        self._num_reads += 1
        return {
            "cpu": round(psutil.cpu_percent() / 100, 4),
            **self._about,
            "memory_bytes": main.total - main.available,
            "memory_total_bytes": main.total,
            "disk_free_bytes": free,
            "net_in": net_in,
            "net_out": net_out,
            "interface": self._interface,
            "interface_rate": self._rate,
        }

    def _network(self) -> tuple[float | None, float | None]:
        found = psutil.net_io_counters(pernic=True, nowrap=False)
        own = self._interface
        counters = [c for name, c in found.items() if name == own or (not own and name != "lo")]
        now = time.monotonic()
        moved = now, sum(c.bytes_recv for c in counters), sum(c.bytes_sent for c in counters)
        before, self._moved = self._moved, moved
        if before is None or now <= before[0] or not counters:
            return None, None
        took_s = now - before[0]
        net_in, net_out = (
            max(0, new - old) for new, old in zip(moved[1:], before[1:], strict=True)
        )
        return round(net_in / took_s, 1), round(net_out / took_s, 1)

    def _interface_rate(self) -> float | None:
        stats = psutil.net_if_stats().get(self._interface or "")
        return stats.speed * 1e6 / 8 if stats is not None and stats.speed > 0 else None


class SampleFile:
    """JSON lines with a size limit. Above it, every second line of the older half is removed, so
    that the whole run stays visible. A full disk loses only lines.

    Args:
        path: the file. Its folder is created with the first line, and never again, so that a
            deleted
            run directory stays deleted.
    """

    def __init__(self, path: Path, limit_bytes: int = _LIMIT_BYTES) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._is_made = False

    def append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        with suppress(OSError):
            if not self._is_made:
                self._path.parent.mkdir(exist_ok=True)
                self._path.touch()
                self._is_made = True
            handle = os.open(self._path, os.O_RDWR | os.O_APPEND)
            with os.fdopen(handle, "r+b", buffering=0) as stream:
                size = os.fstat(handle).st_size
                if size and os.pread(handle, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a kill or a full disk has cut the last line
                stream.write(line)
                size += len(line)
            if size > self._limit_bytes:
                self._thin()

    def _thin(self) -> None:
        lines = self._path.read_bytes().splitlines(keepends=True)
        while len(lines) > 2 and sum(map(len, lines)) > self._limit_bytes:
            half = len(lines) // 2 + 1
            lines = [*lines[:half:2], *lines[half:]]
        write_bytes_atomic(self._path, b"".join(lines), durable=False)
