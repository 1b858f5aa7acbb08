"""Records of what a run does now, made by hand: attempts/N/live.json, metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isles.run.live import SUMS
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_record

GIB = 2**30


def rank_record(communication_s: float = 0.2, **more: Any) -> dict[str, Any]:
    """A rank that trains; its steps take half a second."""
    process = {"pid": 100, "alive": True, "exit": None, "cpu": 1.0, "resident_bytes": GIB}
    doing = {"step": 40, "phase": "step", "stage": "forward and backward", "stage_s": 0.1}
    parts = {"data": 0.01, "forward_backward": 0.28, "optimizer": 0.01}
    last = {"step_s": 0.5, "parts": {**parts, "communication": communication_s}}
    sizes = {"restart": 0, "rows": 4, "micro_batch": 2}
    return {"at": time.time(), **process, **doing, **last, **sizes, **more}


def gpu_record(index: int, **more: Any) -> dict[str, Any]:
    """A card that is busy."""
    card = {"index": index, "uuid": f"GPU-{index}", "name": "NVIDIA H100 80GB HBM3"}
    memory = {"memory_bytes": 60 * GIB, "memory_total_bytes": 80 * GIB}
    figures = {"use": 0.97, "temperature_c": 61.0, "power_w": 640.0, "clock_mhz": 1755.0}
    links = {"pcie_in": 1e9, "pcie_out": 1e9, "nvlink_in": None, "nvlink_out": None}
    return {**card, **memory, **figures, "throttle": "", **links, **more}


def node_record(
    name: str,
    first_rank: int,
    ranks: Sequence[Mapping[str, Any]],
    gpus: Sequence[Mapping[str, Any]] = (),
    *,
    heard_s_ago: float = 0.5,
) -> dict[str, Any]:
    """A node that is there."""
    at = time.time() - heard_s_ago
    place = {"name": name, "address": "10.0.0.1", "first_rank": first_rank, "num_ranks": len(ranks)}
    seen = {"at": at, "heard_at": at, "skew_s": 0.0, "state": "there", "why": ""}
    host: dict[str, Any] = {"cpu": 0.5, "cores": 64, "cpu_name": "AMD EPYC 9654"}
    host |= {"memory_bytes": 100 * GIB, "memory_total_bytes": 512 * GIB}
    host |= {"disk_free_bytes": 900 * GIB, "net_in": 1e6, "net_out": 2e6}
    host |= {"interface": "eth0", "interface_rate": 125e6}
    sums = {"samples": 1.0, **dict.fromkeys(SUMS.values(), 1.0)}
    numbered = {str(first_rank + n): dict(rank) for n, rank in enumerate(ranks)}
    parts = {"host": host, "gpus": list(gpus), "sums": sums, "ranks": numbered}
    return {**place, **seen, **parts}


def write_live(
    attempt: Attempt, *nodes: Mapping[str, Any], ago_s: float = 0.0, restart: int = 0
) -> None:
    """All nodes of an attempt, as the coordinator writes them."""
    numbered = {str(number): dict(node) for number, node in enumerate(nodes)}
    record = {"at": time.time() - ago_s, "restart": restart, "nodes": numbered}
    write_record(attempt.live, record, durable=False)


def metrics_row(step: int) -> dict[str, Any]:
    """A recorded step."""
    row = {"kind": "train", "step": step, "learning_rate": 1e-3, "loss": 8.0 / step}
    row |= {"tokens_per_second": 3000.0, "step_time_s": 0.5, "mfu": 0.41}
    return {**row, "tokens": 1500 * step, "elapsed_s": 0.5 * step, "at": time.time()}


def write_metrics(run_dir: RunDir, *rows: Mapping[str, Any]) -> None:
    """All rows that there are."""
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
