"""What is found of a machine: system, memory, cores, limits, clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from isles.check.finding import Finding, Level
from isles.check.panel import Answers
from isles.check.subject import Subject
from isles.facts.units import format_bytes, format_duration

_GIB, _MIB = 1 << 30, 1 << 20
_RANK_BYTES = _GIB
"""What a rank takes besides the model: Python, torch and its libraries."""
_SHM_BAD, _SHM_LOW = 32 * _MIB, 512 * _MIB
_SKEW_WARNING_S, _SKEW_ERROR_S = 2.0, 30.0
_RANK_THREADS, _RANK_FILES = 200, 64
_PINNED = 64 * _MIB


def judge_machines(
    subject: Subject, machines: Answers, facts: Answers, nproc: Mapping[str, int]
) -> list[Finding]:
    """Findings of every machine."""
    findings: list[Finding] = []
    world_size = sum(nproc.values())
    for name, own in machines.items():
        findings.append(
            Finding("os.kernel", "ok", name, f"{own['os']}, Linux {own['kernel']}", own["os"])
        )
        findings += _memory(subject, name, own, nproc[name])
        findings += _cores(name, own, int(facts[name]["num_cores"]), nproc[name])
        findings += _shm(name, own["shm"])
        findings += _limits(name, own, nproc[name], world_size)
        findings += _leases(name, own, len(machines))
    return findings


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Clocks against the median of all, this machine's among them.

    Args:
        offsets: of each host: seconds that it is ahead of this machine, and the round trip.
    """
    if not offsets:
        return []
    middle = median([0.0, *(offset for offset, _ in offsets.values())])
    if len(offsets) == 1:
        middle = 0.0
    findings, worst = [], 0.0
    for name, (offset, trip) in offsets.items():
        skew = offset - middle
        sure = max(0.0, abs(skew) - trip / 2)
        worst = max(worst, abs(skew))
        if sure <= _SKEW_WARNING_S:
            continue
        level: Level = "error" if sure > _SKEW_ERROR_S else "warning"
        findings.append(
            Finding(
                "clock.skew",
                level,
                name,
                f"its clock is {format_duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}; "
                "signs of life and records of the hosts are compared by their times",
                measured=f"{skew:+.1f} s",
                limit=f"{_SKEW_WARNING_S:.0f} s",
                fix=f"on {name}: sudo timedatectl set-ntp true (or: sudo chronyc makestep)",
            )
        )
    if not findings:
        where = next(iter(offsets)) if len(offsets) == 1 else "all hosts"
        ms = f"{worst * 1000:.0f} ms"
        findings.append(Finding("clock.skew", "ok", where, f"clocks agree within {ms}", ms))
    return findings


def _memory(subject: Subject, name: str, own: dict[str, Any], nproc: int) -> Iterator[Finding]:
    available, total = int(own["available_bytes"]), int(own["memory_bytes"])
    load = subject.load_bytes() or 0
    needed = nproc * (_RANK_BYTES + load)
    text = f"{format_bytes(available)} of {format_bytes(total)} memory free"
    level: Level = "ok"
    if available < needed:
        level = "error" if available < nproc * load else "warning"
        text += f"; {nproc} ranks take some {format_bytes(needed)} while they load the model"
    yield Finding(
        "memory.free",
        level,
        name,
        text,
        measured=format_bytes(available),
        limit=format_bytes(needed),
        fix="" if level == "ok" else f"end what else runs on {name} (ps aux --sort=-rss | head)",
    )
    swapped = int(own["swap_used_bytes"])
    is_bad = swapped > _GIB and available < total // 10
    yield Finding(
        "memory.swap",
        "warning" if is_bad else "ok",
        name,
        f"{format_bytes(swapped)} of its memory lie on disk, and little is free: steps will stall"
        if is_bad
        else f"{format_bytes(swapped)} on swap",
        measured=format_bytes(swapped),
        fix=f"end what else runs on {name}" if is_bad else "",
    )


def _cores(name: str, own: dict[str, Any], cores: int, nproc: int) -> Iterator[Finding]:
    busy = float(own["load"])
    if cores < nproc:
        text = f"{nproc} ranks share {cores} cores, and each takes one to feed its GPU"
        fix = f"use fewer ranks on {name}, or ask the scheduler for more cores"
    elif busy > max(1.0, cores - nproc):
        text = f"other programs keep {busy:.1f} of {cores} cores busy"
        fix = f"end them, or expect {name} to be the slowest: top"
    else:
        yield Finding("cpu.cores", "ok", name, f"{cores} cores, load {busy:.1f}", f"{cores} cores")
        return
    yield Finding("cpu.cores", "warning", name, text, f"load {busy:.1f}", f"{cores} cores", fix)


def _shm(name: str, shm: dict[str, int] | None) -> Iterator[Finding]:
    free = shm["free"] if shm else 0
    if free >= _SHM_LOW:
        yield Finding(
            "shm.size", "ok", name, f"{format_bytes(free)} free in /dev/shm", format_bytes(free)
        )
        return
    yield Finding(
        "shm.size",
        "error" if free < _SHM_BAD else "warning",
        name,
        f"{format_bytes(free)} free in /dev/shm, through which ranks of one machine talk"
        if shm
        else "there is no /dev/shm, through which ranks of one machine talk",
        measured=format_bytes(free),
        limit=format_bytes(_SHM_LOW),
        fix="sudo mount -o remount,size=8G /dev/shm; in Docker: --shm-size=8g",
    )


def _limits(name: str, own: dict[str, Any], nproc: int, world_size: int) -> Iterator[Finding]:
    limits = own["limits"]
    needed = 512 + _RANK_FILES * world_size
    yield _limit(name, "nofile", limits["nofile"], needed, "open files", "ulimit -n 65536")
    needed = int(own["processes"]) + _RANK_THREADS * nproc
    yield _limit(name, "nproc", limits["nproc"], needed, "processes and threads", "ulimit -u 65536")
    if own["has_infiniband"]:
        locked = limits["memlock"]
        is_ok = locked is None or locked >= _PINNED * nproc
        yield Finding(
            "limits.memlock",
            "ok" if is_ok else "error",
            name,
            "memory may be locked without limit"
            if locked is None
            else f"{format_bytes(locked)} may be locked, and InfiniBand locks its buffers",
            measured="unlimited" if locked is None else format_bytes(locked),
            limit="unlimited",
            fix="" if is_ok else _conf("memlock"),
        )


def _limit(name: str, kind: str, most: int | None, needed: int, what: str, now: str) -> Finding:
    is_ok = most is None or most >= needed
    words = "no limit" if most is None else f"at most {most}"
    return Finding(
        f"limits.{kind}",
        "ok" if is_ok else "warning",
        name,
        f"{words} {what}" if most is not None else f"{words} of {what}",
        measured="unlimited" if most is None else str(most),
        limit=str(needed),
        fix="" if is_ok else f"{now} before the start; for good: {_conf(kind)}",
    )


def _conf(kind: str) -> str:
    line = f"* - {kind} {'unlimited' if kind == 'memlock' else 65536}"
    return f"the line `{line}` in /etc/security/limits.conf, and log in again"


def _leases(name: str, own: dict[str, Any], num_hosts: int) -> Iterator[Finding]:
    """Addresses that a router lends may be others after its next restart."""
    used = (own["connection"] or [""] * 4)[2] if len(own["connection"]) == 4 else None
    if num_hosts < 2 or used is None:
        return
    for entry in own["interfaces"]:
        if entry["address"] != used:
            continue
        if not entry["is_leased"]:
            yield Finding("address.dhcp", "ok", name, f"{used} is its own address", used)
            return
        yield Finding(
            "address.dhcp",
            "warning",
            name,
            f"{used} on {entry['interface']} is lent by DHCP, and may be another tomorrow",
            measured=f"{used}, dynamic",
            fix="reserve it in the router, or make it static: /etc/netplan/*.yaml with "
            f"{entry['interface']}: {{dhcp4: no, addresses: [{used}/"
            f"{_prefix(entry['netmask'])}]}}, then sudo netplan apply",
        )


def _prefix(netmask: str) -> int:
    return sum(int(part).bit_count() for part in netmask.split("."))
