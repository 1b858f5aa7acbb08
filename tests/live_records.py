"""Records of what a run does now, made by hand: attempts/N/live.json, metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from isles.run.paths import Attempt, RunDir
from isles.run.records import write_record

GIB = 2**30


def rank_record(step: int = 40, communication_s: float = 0.2, **more: Any) -> dict[str, Any]:
    """A rank that trains; its steps take half a second."""
    parts = {"data": 0.01, "forward_backward": 0.28, "optimizer": 0.01}
    return {
        "pid": 100,
        "alive": True,
        "exit": None,
        "at": time.time(),
        "cpu": 1.0,
        "resident_bytes": GIB,
        "restart": 0,
        "step": step,
        "phase": "step",
        "stage": "forward and backward",
        "stage_s": 0.1,
        "step_s": 0.5,
        "parts": {**parts, "communication": communication_s},
        "rows": 4,
        "micro_batch": 2,
        **more,
    }


def gpu_record(index: int, **more: Any) -> dict[str, Any]:
    """A card that is busy."""
    return {
        "index": index,
        "uuid": f"GPU-{index}",
        "name": "NVIDIA H100 80GB HBM3",
        "use": 0.97,
        "memory_bytes": 60 * GIB,
        "memory_total_bytes": 80 * GIB,
        "temperature_c": 61.0,
        "power_w": 640.0,
        "clock_mhz": 1755.0,
        "throttle": "",
        "pcie_in": 1e9,
        "pcie_out": 1e9,
        "nvlink_in": None,
        "nvlink_out": None,
        **more,
    }


def node_record(
    name: str,
    first_rank: int,
    ranks: Sequence[Mapping[str, Any]],
    gpus: Sequence[Mapping[str, Any]] = (),
    *,
    heard_s_ago: float = 0.5,
    **more: Any,
) -> dict[str, Any]:
    """A node that is there."""
    now = time.time()
    sums = dict.fromkeys(("gpu_use", "gpu_memory_bytes", "gpu_power_w", "gpu_temperature_c"), 0.0)
    sums |= dict.fromkeys(("samples", "cpu", "memory_bytes", "net_in", "net_out"), 1.0)
    return {
        "at": now - heard_s_ago,
        "skew_s": 0.0,
        "heard_at": now - heard_s_ago,
        "state": "there",
        "why": "",
        "name": name,
        "address": "10.0.0.1",
        "first_rank": first_rank,
        "num_ranks": len(ranks),
        "host": {
            "cpu": 0.5,
            "cores": 64,
            "cpu_name": "AMD EPYC 9654",
            "memory_bytes": 100 * GIB,
            "memory_total_bytes": 512 * GIB,
            "disk_free_bytes": 900 * GIB,
            "net_in": 1e6,
            "net_out": 2e6,
            "interface": "eth0",
            "interface_rate": 125e6,
        },
        "gpus": list(gpus),
        "sums": sums,
        "ranks": {str(first_rank + n): dict(rank) for n, rank in enumerate(ranks)},
        **more,
    }


def live_record(*nodes: Mapping[str, Any], ago_s: float = 0.0, restart: int = 0) -> dict[str, Any]:
    """All nodes of an attempt."""
    numbered = {str(number): dict(node) for number, node in enumerate(nodes)}
    return {"at": time.time() - ago_s, "restart": restart, "nodes": numbered}


def write_live(attempt: Attempt, *nodes: Mapping[str, Any], **more: Any) -> None:
    """As the coordinator writes it."""
    write_record(attempt.live, live_record(*nodes, **more), durable=False)


def metrics_row(step: int, **more: Any) -> dict[str, Any]:
    """A recorded step."""
    return {
        "kind": "train",
        "step": step,
        "learning_rate": 1e-3,
        "loss": 8.0 / step,
        "tokens_per_second": 3000.0,
        "step_time_s": 0.5,
        "mfu": 0.41,
        "tokens": 1500 * step,
        "elapsed_s": 0.5 * step,
        "at": time.time(),
        **more,
    }


def write_metrics(run_dir: RunDir, *rows: Mapping[str, Any]) -> None:
    """All rows that there are."""
    run_dir.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
