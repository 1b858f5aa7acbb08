"""The machine: system, memory, cores, /dev/shm, limits, the address that ssh uses, the clock."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import psutil

from isles.check.checks.network import interfaces
from isles.check.finding import Finding, Level
from isles.check.plan import NodePlan
from isles.facts.units import format_bytes, format_duration, plural
from isles.launch.ssh.facts import reached_at
from isles.run.env import is_wsl, usable_cores
from isles.run.limits import memory

_GIB, _MIB = 1 << 30, 1 << 20
_RANK_BYTES = _GIB
"""Memory of a rank without the model: Python, torch and its libraries."""
_SHM_BAD, _SHM_LOW = 32 * _MIB, 512 * _MIB
_SKEW_WARNING_S, _SKEW_ERROR_S = 2.0, 30.0
_RANK_THREADS, _RANK_FILES = 200, 8
_PINNED = 64 * _MIB


def machine(plan: NodePlan) -> Iterator[Finding]:
    """Findings on this machine that need neither torch nor a network."""
    try:
        system = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        system = f"{platform.system()} {platform.release()}"
    text = f"{system}, Linux {platform.release()}"
    if is_wsl():
        text += ", in WSL2: ranks use fixed memory segments, and pinned memory is limited"
        system = f"{system} (WSL2)"
    yield Finding("os.kernel", "ok", plan.name, text, system)
    yield _memory(plan)
    yield _cores(plan)
    yield _shm(plan)
    yield from _limits(plan)
    yield from _lease(plan)


def _memory(plan: NodePlan) -> Finding:
    main = memory()
    total, available = main.total, main.available
    needed = plan.nproc * (_RANK_BYTES + plan.load_bytes)
    text = f"{format_bytes(available)} of {format_bytes(total)} memory free"
    level: Level = "ok"
    fix = ""
    if available < needed:
        level = "error" if available < plan.nproc * plan.load_bytes else "warning"
        ranks = plural(plan.nproc, "rank")
        text += f"; {ranks} need about {format_bytes(needed)} to load the model"
        fix = f"stop other programs on {plan.name} (ps aux --sort=-rss | head)"
    free, limit = format_bytes(available), format_bytes(needed)
    return Finding("memory.free", level, plan.name, text, free, limit, fix)


def _cores(plan: NodePlan) -> Finding:
    cores, busy = usable_cores(), os.getloadavg()[0]
    count, load = plural(cores, "core"), f"load {busy:.1f}"
    if cores < plan.nproc:
        text = f"{plan.nproc} ranks share {count}, and each needs one to feed its GPU"
        fix = f"use fewer ranks on {plan.name}, or ask the scheduler for more cores"
    elif busy > max(1.0, cores - plan.nproc):
        text = f"other programs keep {busy:.1f} of {count} busy"
        fix = f"stop them (see top), or expect {plan.name} to be the slowest"
    else:
        each = f"{plural(cores // plan.nproc, 'thread')} for each of {plural(plan.nproc, 'rank')}"
        return Finding("cpu.cores", "ok", plan.name, f"{count}: {each}; {load}", count)
    return Finding("cpu.cores", "warning", plan.name, text, load, count, fix)


def _shm(plan: NodePlan) -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
        text = f"{format_bytes(free)} free in /dev/shm"
    except OSError:
        free, text = 0, "/dev/shm not found"
    if free >= _SHM_LOW:
        return Finding("shm.size", "ok", plan.name, text, format_bytes(free))
    level: Level = "error" if free < _SHM_BAD else "warning"
    text += ", which ranks of one machine use to communicate"
    fix = "sudo mount -o remount,size=8G /dev/shm; in Docker, use --shm-size=8g"
    limit = format_bytes(_SHM_LOW)
    return Finding("shm.size", level, plan.name, text, format_bytes(free), limit, fix)


def _limits(plan: NodePlan) -> Iterator[Finding]:
    needed = 512 + _RANK_FILES * plan.world_size
    # Only root can raise a hard limit.
    yield _limit(plan, "nofile", resource.RLIMIT_NOFILE, needed, "open files", "")
    # The limit counts all threads of this user.
    threads = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            threads += process.info["num_threads"] or 1
    needed = threads + _RANK_THREADS * plan.nproc
    now = "ulimit -u 65536"
    yield _limit(plan, "nproc", resource.RLIMIT_NPROC, needed, "processes and threads", now)
    if not Path("/sys/class/infiniband").is_dir():
        return
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text, measured = "no limit of locked memory", "unlimited"
    level: Level = "ok"
    fix = ""
    if locked != resource.RLIM_INFINITY:
        measured = format_bytes(locked)
        text = f"at most {measured} may be locked, and InfiniBand locks its buffers"
        if locked < _PINNED * plan.nproc:
            level, fix = "error", _for_good("memlock", "unlimited")
    yield Finding("limits.memlock", level, plan.name, text, measured, "unlimited", fix)


def _limit(plan: NodePlan, kind: str, number: int, needed: int, what: str, now: str) -> Finding:
    # Ranks raise their limit of open files to the hard limit.
    most = resource.getrlimit(number)[number == resource.RLIMIT_NOFILE]
    level: Level = "ok"
    text, measured, fix = f"at most {most} {what}", str(most), ""
    if most == resource.RLIM_INFINITY:
        text, measured = f"no limit of {what}", "unlimited"
    elif most < needed:
        level, fix = "warning", _for_good(kind, "65536")
        fix = f"{now} before the start; or permanently {fix}" if now else fix
    return Finding(f"limits.{kind}", level, plan.name, text, measured, str(needed), fix)


def _for_good(kind: str, value: str) -> str:
    return f"write the line `* - {kind} {value}` to /etc/security/limits.conf, and log in again"


def _lease(plan: NodePlan) -> Iterator[Finding]:
    # An address from a router's DHCP may change after the next restart.
    used = reached_at()
    own = next((own for own in interfaces() if own.address == used), None)
    if plan.num_hosts < 2 or own is None:
        return
    if not own.is_leased:
        text = f"{own.address} is a static address"
        yield Finding("address.dhcp", "ok", plan.name, text, own.address)
        return
    prefix = sum(int(part).bit_count() for part in own.netmask.split("."))
    text = f"{own.address} on {own.name} is from DHCP, and may change"
    static = f"{own.name}: {{dhcp4: no, addresses: [{own.address}/{prefix}]}}"
    fix = "reserve it in the router, or make it static in /etc/netplan/*.yaml with "
    fix += f"{static}, then sudo netplan apply"
    yield Finding("address.dhcp", "warning", plan.name, text, f"{own.address}, dynamic", fix=fix)


def clock_skew(offsets: Mapping[str, tuple[float, float]]) -> Iterator[Finding]:
    """Compare clocks with the median of all clocks, including this machine's.

    Args:
        offsets: for each host, seconds that its clock is ahead of this machine, and the round trip.
    """
    if not offsets:
        return
    middle, worst, is_well = 0.0, 0.0, True
    if len(offsets) > 1:
        middle = median([0.0, *(offset for offset, _ in offsets.values())])
    for name, (offset, trip) in offsets.items():
        skew = offset - middle
        worst = max(worst, abs(skew))
        sure = max(0.0, abs(skew) - trip / 2)
        if sure <= _SKEW_WARNING_S:
            continue
        is_well = False
        level: Level = "error" if sure > _SKEW_ERROR_S else "warning"
        text = f"its clock is {format_duration(abs(skew))} {'ahead' if skew > 0 else 'behind'}; "
        text += "isles compares times in heartbeats and records of the hosts"
        fix = f"on {name}: sudo timedatectl set-ntp true (or sudo chronyc makestep)"
        limit = f"{_SKEW_WARNING_S:.0f} s"
        yield Finding("clock.skew", level, name, text, f"{skew:+.1f} s", limit, fix)
    if is_well:
        where = next(iter(offsets)) if len(offsets) == 1 else "all hosts"
        ms = f"{worst * 1000:.0f} ms"
        yield Finding("clock.skew", "ok", where, f"clocks agree within {ms}", ms)
