"""What a node says of its GPUs, by nvidia-smi."""

from __future__ import annotations

import subprocess
from typing import Any

from isles.launch.gpus import find_gpus

_FIELDS = (
    "uuid",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "temperature.gpu",
)
_TROUBLES = ("uuid", "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active")
_ROWS = ("gpu_uuid", "remapped_rows.failure", "remapped_rows.pending")
_USERS = ("gpu_uuid", "pid", "used_memory", "process_name")

_REASONS = ((0x20 | 0x40, "heat"), (0x80, "the power supply"), (0x8, "the hardware"))
"""Bits of clocks_throttle_reasons (nvml.h) that are faults; 0x4, the usual power cap, is none."""


def gpus(args: dict[str, Any]) -> dict[str, Any]:
    """The GPUs that a rank would see, and what troubles them.

    Returns:
        warning: why the list may be incomplete; gpus: for each index, name, uuid, driver,
        memory_bytes, used_bytes, temperature, uncorrected, throttle (words), failed_rows, and
        users: processes with memory on it.
    """
    del args
    found = find_gpus(timeout_s=8)
    if not found.gpus:
        return {"warning": found.warning, "gpus": []}
    base, troubles = _query("gpu", _FIELDS), _query("gpu", _TROUBLES)
    rows, users = _query("remapped-rows", _ROWS), _query("compute-apps", _USERS)
    facts = []
    for index, gpu in enumerate(found.gpus):
        one, more, bad = (_first(table, gpu.uuid) for table in (base, troubles, rows))
        facts.append(
            {
                "index": index,
                "name": gpu.name,
                "uuid": gpu.uuid,
                "driver": one.get("driver_version", ""),
                "memory_bytes": gpu.memory_bytes or 0,
                "used_bytes": _number(one.get("memory.used")) * 2**20,
                "temperature": _number(one.get("temperature.gpu")),
                "uncorrected": _number(more.get("ecc.errors.uncorrected.volatile.total")),
                "throttle": _throttle(more.get("clocks_throttle_reasons.active", "")),
                "failed_rows": _number(bad.get("remapped_rows.failure")),
                "users": [
                    {
                        "pid": _number(user.get("pid")),
                        "name": user.get("process_name", ""),
                        "bytes": _number(user.get("used_memory")) * 2**20,
                    }
                    for user in users
                    if user.get("gpu_uuid") == gpu.uuid
                ],
            }
        )
    return {"warning": found.warning, "gpus": facts}


def _query(what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """A table of nvidia-smi; empty where this driver does not know it."""
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=8,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    table = []
    for line in done.stdout.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= len(fields):
            # The last field, a process' name, may hold commas.
            last = ", ".join(parts[len(fields) - 1 :])
            table.append(dict(zip(fields, [*parts[: len(fields) - 1], last], strict=True)))
    return table


def _first(table: list[dict[str, str]], uuid: str) -> dict[str, str]:
    return next((row for row in table if uuid in (row.get("uuid"), row.get("gpu_uuid"))), {})


def _number(text: str | None) -> int:
    """A field as a number; 0 where the driver does not say."""
    digits = (text or "").split(" ")[0].partition(".")[0]
    if digits.lower() == "yes":
        return 1
    return int(digits) if digits.isdigit() else 0


def _throttle(text: str) -> str:
    try:
        bits = int(text, 16)
    except ValueError:
        return ""
    return next((word for bit, word in _REASONS if bits & bit), "")
