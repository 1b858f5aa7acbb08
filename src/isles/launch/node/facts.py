"""What a node says of itself before a run is started there; fast, and without torch."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from importlib.util import find_spec
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import psutil

from isles import __version__
from isles.launch.gpus import find_gpus
from isles.launch.ssh.facts import PACKAGES, code_digest, version
from isles.launch.worker import NEEDED_TO_TRAIN


def node_facts(args: dict[str, Any]) -> dict[str, Any]:
    """Facts about this machine.

    Args:
        args: `port`: the first of a hundred ports of which a free one is wanted (optional).

    Returns:
        host, user, pid, executable, python, isles, code, packages (name -> version), missing
        (packages that training needs), gpus, gpu_warning, num_cores, memory_bytes, addresses
        (interface -> IPv4 addresses), networks (interface, address and prefix of each),
        reached_at (the address at which ssh has reached this machine), machine_id, clock (seconds
        since the epoch), cwd, and port where one was asked for (None: all are taken).
    """
    finding = find_gpus()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "user": os.environ.get("USER", str(os.getuid())),
        "pid": os.getpid(),
        "executable": sys.executable,
        "python": platform.python_version(),
        "isles": __version__,
        "code": code_digest(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "missing": [name for name in NEEDED_TO_TRAIN if find_spec(name) is None],
        "gpus": len(finding.gpus),
        "gpu_warning": finding.warning,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_bytes": psutil.virtual_memory().total,
        "addresses": _addresses(),
        "networks": _networks(),
        "reached_at": reached_at(),
        "machine_id": machine_id(),
        "clock": time.time(),
        "cwd": str(Path.cwd()),
    }
    if "port" in args:
        facts["port"] = free_port(int(args["port"]))
    return facts


def free_port(first: int, count: int = 100) -> int | None:
    """The first of `count` ports on which a server can listen; None where all are taken."""
    for port in range(first, first + count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return None


def _addresses() -> dict[str, list[str]]:
    found = {
        name: [a.address for a in addresses if a.family == socket.AF_INET]
        for name, addresses in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _networks() -> list[dict[str, Any]]:
    """Every IPv4 address of an interface that is up, without the loopback."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    return [
        {
            "interface": name,
            "address": a.address,
            "prefix": IPv4Network(f"{a.address}/{a.netmask or 32}", strict=False).prefixlen,
        }
        for name, addresses in psutil.net_if_addrs().items()
        for a in addresses
        if a.family == socket.AF_INET and name in up and not a.address.startswith("127.")
    ]


def reached_at() -> str | None:
    """This machine's end of the ssh connection, which sshd leaves in the environment."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def machine_id() -> str:
    """Two names of one machine have the same; empty where it cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}.{socket.gethostname()}"
