"""What a node says of itself before a run is started there; fast, and without torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from isles import __version__
from isles.launch.gpus import find_gpus

_PACKAGES = ("torch", "transformers", "safetensors", "datasets", "peft", "deepspeed")


def node_facts(args: dict[str, Any]) -> dict[str, Any]:
    """Facts about this machine.

    Args:
        args: `port`: the first of a hundred ports of which a free one is wanted (optional).

    Returns:
        host, user, python, isles, packages (name -> version), gpus, num_cores, memory_bytes,
        addresses (interface -> IPv4 addresses), machine_id, clock (seconds since the epoch), cwd,
        and port where one was asked for (None: all are taken).
    """
    finding = find_gpus()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "user": os.environ.get("USER", str(os.getuid())),
        "executable": sys.executable,
        "python": platform.python_version(),
        "isles": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "gpus": len(finding.gpus),
        "gpu_warning": finding.warning,
        "num_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_bytes": psutil.virtual_memory().total,
        "addresses": _addresses(),
        "machine_id": _machine_id(),
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine_id() -> str:
    """Two names of one machine have the same; empty where it cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}.{socket.gethostname()}"
