"""The GPUs of a node, as nvidia-smi reports them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isles.check.finding import Finding, Level
from isles.check.plan import NodePlan
from isles.facts.units import format_bytes
from isles.launch.gpus import ask_driver, find_gpus

_GIB = 1 << 30
_ANSWER_S = 8

_FIELDS = ("uuid", "driver_version", "memory.used", "temperature.gpu")
_ERRORS, _THROTTLE = "ecc.errors.uncorrected.volatile.total", "clocks_throttle_reasons.active"
_ROWS = ("gpu_uuid", "remapped_rows.failure", "remapped_rows.pending")
_USERS = ("gpu_uuid", "pid", "used_memory", "process_name")

_REASONS = ((0x20 | 0x40, "heat"), (0x80, "the power supply"), (0x8, "the hardware"))
"""Bits of clocks_throttle_reasons (nvml.h) that are faults. 0x4, the usual power cap, is not."""

_WELL = {
    "gpu.errors": "no memory errors",
    "gpu.throttle": "no GPU is throttled",
    "gpu.busy": "no other programs use them",
}


@dataclass(frozen=True, slots=True)
class _Gpu:
    label: str
    index: int
    memory_bytes: int
    fields: dict[str, str]
    users: list[dict[str, str]]


def gpus(plan: NodePlan) -> Iterator[Finding]:
    """Findings on the GPUs that are visible to a rank."""
    name = plan.name
    found = find_gpus(timeout_s=_ANSWER_S)
    if found.warning:
        level: Level = "error" if plan.device == "cuda" else "warning"
        fix = f"run nvidia-smi on {name}; after an update of the driver, sudo reboot"
        yield Finding("gpu.driver", level, name, found.warning, fix=fix)
    if not found.gpus:
        return
    count, fields = len(found.gpus), _by_uuid()
    users = query("compute-apps", _USERS)
    driver = fields.get(found.gpus[0].uuid, {}).get("driver_version", "")
    text = f"{count} x {', '.join(dict.fromkeys(gpu.name for gpu in found.gpus))}"
    yield Finding("gpu.driver", "ok", name, text, driver)
    if plan.device == "cuda" and plan.nproc <= count:
        yield Finding("gpu.count", "ok", name, f"{count} GPUs", str(count))
    cards = [
        _Gpu(
            f"GPU {index} ({gpu.name})",
            index,
            gpu.memory_bytes or 0,
            fields.get(gpu.uuid, {}),
            [user for user in users if user["gpu_uuid"] == gpu.uuid],
        )
        for index, gpu in enumerate(found.gpus)
    ]
    bad = [*_errors(name, cards), *_throttled(name, cards), *_busy(name, cards)]
    for finding_id, well in _WELL.items():
        own = [finding for finding in bad if finding.id == finding_id]
        yield from own or [Finding(finding_id, "ok", name, well)]


def _errors(name: str, cards: list[_Gpu]) -> Iterator[Finding]:
    for gpu in cards:
        bad = _number(gpu.fields.get(_ERRORS))
        rows = _number(gpu.fields.get(_ROWS[1]))
        if not bad and not rows:
            continue
        what = f"{bad} uncorrected memory errors"
        if not bad:
            what = "memory rows that cannot be repaired"
        fix = f"sudo nvidia-smi -r -i {gpu.index}, or reboot; if they return, skip this GPU "
        fix += "(CUDA_VISIBLE_DEVICES) and have it replaced"
        text, measured = f"{gpu.label} has {what}", str(bad or "failed rows")
        yield Finding("gpu.errors", "error", name, text, measured, "0", fix)


def _throttled(name: str, cards: list[_Gpu]) -> Iterator[Finding]:
    for gpu in cards:
        try:
            bits = int(gpu.fields.get(_THROTTLE, ""), 16)
        except ValueError:
            continue  # the driver does not report it
        why = next((word for bit, word in _REASONS if bits & bit), "")
        if why:
            degrees = _number(gpu.fields.get("temperature.gpu"))
            text = f"{gpu.label} is throttled by {why}, at {degrees} degrees"
            fix = "check fans, dust, room and power supply; the run continues, but slower"
            yield Finding("gpu.throttle", "warning", name, text, why, fix=fix)


def _busy(name: str, cards: list[_Gpu]) -> Iterator[Finding]:
    for gpu in cards:
        used = _number(gpu.fields.get("memory.used")) * 2**20
        if not gpu.users and used < max(_GIB, gpu.memory_bytes // 10):
            continue
        who = "a program that the driver does not list"
        fix = f"on {name}: sudo fuser -v /dev/nvidia*"
        if gpu.users:
            pids = [str(_number(user["pid"])) for user in gpu.users]
            programs = [user["process_name"].rpartition("/")[2] for user in gpu.users]
            pairs = zip(programs, pids, strict=True)
            who = ", ".join(f"{program} (pid {pid})" for program, pid in pairs)
            fix = f"if it is yours, use isles stop, or on {name}: kill {' '.join(pids)}"
        text = f"{gpu.label}: {format_bytes(used)} of {format_bytes(gpu.memory_bytes)} are in use "
        text += f"by {who}"
        yield Finding("gpu.busy", "warning", name, text, format_bytes(used), fix=fix)


def _by_uuid() -> dict[str, dict[str, str]]:
    # Fields that the driver does not know are missing.
    tables = [
        query("gpu", _FIELDS),
        query("gpu", ("uuid", _ERRORS, _THROTTLE)),
        query("remapped-rows", _ROWS),
    ]
    found: dict[str, dict[str, str]] = {}
    for table in tables:
        for row in table:
            uuid = row.get("uuid") or row["gpu_uuid"]
            found[uuid] = {**found.get(uuid, {}), **row}
    return found


def query(what: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    """Rows of a table of nvidia-smi. Empty if this driver does not know the table."""
    words = (f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    answer = ask_driver(*words, timeout_s=_ANSWER_S)
    table = []
    for line in answer.splitlines():
        # The last field, a process name, may have commas.
        parts = [part.strip() for part in line.split(",", len(fields) - 1)]
        if len(parts) == len(fields):
            table.append(dict(zip(fields, parts, strict=True)))
    return table


def _number(text: str | None) -> int:
    # 0 if the driver does not report it.
    digits = (text or "").split(" ")[0].partition(".")[0]
    if digits.lower() == "yes":
        return 1
    return int(digits) if digits.isdecimal() else 0
