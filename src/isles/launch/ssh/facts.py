"""Facts about a machine before a run is started there; fast, and without torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import psutil

import isles
from isles import __version__
from isles.errors import PreflightError
from isles.launch.gpus import find_gpus
from isles.launch.worker import NEEDED_TO_TRAIN
from isles.run.env import usable_cores

PACKAGES = (*NEEDED_TO_TRAIN, "datasets", "peft", "deepspeed", "bitsandbytes")
"""Packages compared between hosts that have them."""


def node_facts(args: dict[str, Any]) -> dict[str, Any]:
    """Facts about this machine.

    Args:
        args: `port` (optional): first of a hundred ports, to find a free port.

    Returns:
        host, pid, executable, python, isles, code, packages (name -> version), missing (packages
        for training that are not installed), gpus, gpu_warning, num_cores, networks (interface,
        address and prefix of each active network, without the loopback), reached_at, machine_id,
        and
        port if requested (None: all are taken).
    """
    finding, versions = find_gpus(), fingerprint()
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "python": versions.pop("python"),
        "isles": versions.pop("isles"),
        "code": versions.pop("code"),
        "packages": versions,
        "missing": [name for name in NEEDED_TO_TRAIN if find_spec(name) is None],
        "gpus": len(finding.gpus),
        "gpu_warning": finding.warning,
        "num_cores": usable_cores(),
        "networks": _networks(),
        "reached_at": reached_at(),
        "machine_id": machine_id(),
    }
    if "port" in args:
        facts["port"] = free_port(int(args["port"]))
    return facts


def free_port(first: int, count: int = 100) -> int | None:
    """The first free port out of `count`; None if all are taken."""
    for port in range(first, first + count):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    return None


def port_taken(first: int, host: str) -> PreflightError:
    """The error for a host on which `free_port` found no port."""
    return PreflightError(
        f"all ports from {first} to {first + 99} are in use",
        where=f"host {host}",
        fix="set clusters.0.network.port to the first port of another range of a hundred",
        id="port.taken",
    )


def interface_of(address: str) -> str | None:
    """The network interface of this machine with this address; None if no interface has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None


def _networks() -> list[dict[str, Any]]:
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
    """This machine's address in the ssh connection, from sshd's environment variable."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def machine_id() -> str:
    """Equal for two names of the same machine; empty if it cannot be read."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}.{socket.gethostname()}"


def fingerprint() -> dict[str, str]:
    """Values that must be equal on all hosts: versions by name, and `code`, a digest of isles'
    files."""
    found = {"python": platform.python_version(), "isles": __version__, "code": code_digest()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def code_files() -> list[tuple[str, bytes]]:
    """Every file of the package isles, by its path inside it."""
    root = Path(isles.__file__).parent
    paths = []
    for folder, inner, names in os.walk(root):
        # Never entered: another process may write or remove it at any time.
        inner[:] = [name for name in inner if name != "__pycache__"]
        paths += [Path(folder, name) for name in names]
    # A copy of only this folder has a broken link to a page.
    there = (path for path in sorted(paths) if path.is_file())
    return [(path.relative_to(root).as_posix(), path.read_bytes()) for path in there]


def code_digest() -> str:
    """Equal on two hosts with equal code, whatever the version."""
    return digest_of(code_files())


def digest_of(files: Iterable[tuple[str, bytes]]) -> str:
    """A short digest of files and their names."""
    digest = hashlib.sha256()
    for name, content in files:
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
