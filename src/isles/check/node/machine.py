"""What a node says of itself as a machine: system, memory, limits, network interfaces."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

_FIREWALLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SBIN = os.pathsep.join((os.defpath, "/usr/sbin", "/sbin", "/usr/local/sbin"))
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
}


def clock(args: dict[str, Any]) -> dict[str, Any]:
    """The time of this machine's clock, in seconds since the epoch."""
    del args
    return {"now": time.time()}


def machine(args: dict[str, Any]) -> dict[str, Any]:
    """This machine. Sizes in bytes; a limit is None where there is none."""
    del args
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    total, available = _within_cgroup(memory.total, memory.available)
    return {
        "os": _os_name(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "memory_bytes": total,
        "available_bytes": available,
        "swap_used_bytes": swap.used,
        "load": os.getloadavg()[0],
        "shm": _space(Path("/dev/shm")),
        "limits": {name: _limit(number) for name, number in _LIMITS.items()},
        "processes": _num_threads(),
        "interfaces": _interfaces(),
        "firewalls": [name for name in _FIREWALLS if shutil.which(name, path=_SBIN)],
        "has_infiniband": Path("/sys/class/infiniband").is_dir(),
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
    }


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {platform.release()}"


def _within_cgroup(total: int, available: int) -> tuple[int, int]:
    """Memory as a container or a job's control group leaves it."""
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            most, used = int(Path(limit).read_text()), int(Path(usage).read_text())
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
        if most < total:
            return most, min(available, most - used)
    return total, available


def _space(path: Path) -> dict[str, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _limit(number: int) -> int | None:
    soft = resource.getrlimit(number)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _num_threads() -> int:
    """Threads of this user: what the limit of processes counts."""
    total = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            total += process.info["num_threads"] or 1
    return total


def _interfaces() -> list[dict[str, Any]]:
    """Every IPv4 address: its interface and netmask, its MTU, whether it is only leased."""
    leased, stats = _leased(), psutil.net_if_stats()
    return [
        {
            "interface": name,
            "address": address.address,
            "netmask": address.netmask or "255.255.255.255",
            "mtu": stats[name].mtu if name in stats else 0,
            "is_up": name in stats and stats[name].isup,
            "is_leased": address.address in leased,
            "is_wireless": Path(f"/sys/class/net/{name}/wireless").exists(),
        }
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET
    ]


def _leased() -> set[str]:
    """Addresses that end some day unless a DHCP server renews them."""
    command = shutil.which("ip", path=_SBIN)
    if command is None:
        return set()
    try:
        answer = subprocess.run(
            [command, "-j", "-4", "addr"], capture_output=True, text=True, timeout=3, check=True
        ).stdout
        links = json.loads(answer)
    except (OSError, ValueError, subprocess.SubprocessError):
        return set()
    return {
        address["local"]
        for link in links
        for address in link.get("addr_info", ())
        if address.get("dynamic")
    }
