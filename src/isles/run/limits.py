"""Memory and cores that the machine and the control groups allow this process.

A container, a job of a queue and a user's session can each have a control group with limits. The
limits of all groups above a process apply too. Source: Linux, Documentation/admin-guide/
cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

_V1_CACHE, _V1_LIMIT = "total_inactive_file", "hierarchical_memory_limit"
_OPEN_FILES = 2**20
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MainMemory:
    """Main memory of this process's container, job or machine, bytes."""

    total: int
    available: int


def memory() -> MainMemory:
    """Main memory within every limit of control groups and `ulimit -v` for this process."""
    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for folder, is_v2 in cgroup_folders("memory"):
        stat = read_words(folder / "memory.stat")
        # Above memory.high the kernel slows a process down until it nearly stops. The hierarchical
        # limit includes groups above, which may be invisible in a container.
        names = ("memory.max", "memory.high") if is_v2 else ("memory.limit_in_bytes",)
        limits = [*map(_number, (folder / name for name in names)), stat.get(_V1_LIMIT)]
        limit = min((each for each in limits if each is not None), default=total)
        if limit >= machine.total:
            continue
        used = _number(folder / ("memory.current" if is_v2 else "memory.usage_in_bytes")) or 0
        # The kernel gives up the cache of files before it kills.
        cache = stat.get("inactive_file" if is_v2 else _V1_CACHE, 0)
        total = min(total, limit)
        available = min(available, limit - max(0, used - cache))
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if addresses != resource.RLIM_INFINITY:
        total, available = min(total, addresses), min(available, addresses)
    return MainMemory(total, max(0, available))


def cores() -> int:
    """Cores that this process and its children may use. See also `env.usable_cores`."""
    has_affinity = hasattr(os, "sched_getaffinity")
    found = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder, is_v2 in cgroup_folders("cpu"):
        if is_v2:
            words = _read(folder / "cpu.max").split()
            quota, period = (
                (_whole(words[0]), _whole(words[1])) if len(words) == 2 else (None, None)
            )
        else:
            quota, period = (_number(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
        if quota and period and quota > 0:
            found = min(found, quota // period)
    return max(1, found)


def raise_open_files() -> None:
    """Raise the soft limit of open files of this process to the hard limit, but not without limit,
    as some programs look at each possible file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def cgroup_folders(controller: str) -> Iterator[tuple[Path, bool]]:
    """The folder of this process's control group and the folders above it, if visible, and whether
    they have version 2.

    In a container /proc may show the paths of the host. Then only the root of the mounted control
    groups exists, which is the container's own group.
    """
    for line in _read(OWN).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        root = CGROUPS if is_v2 else CGROUPS / controller
        path = PurePosixPath(inside.lstrip("/"))
        for each in (path, *path.parents):
            if ".." not in each.parts and (root / each).is_dir():
                yield root / each, is_v2


def _read(path: Path) -> str:
    with suppress(OSError, ValueError):
        return path.read_text()
    return ""


def _whole(text: str) -> int | None:
    with suppress(ValueError):
        return int(text)
    return None  # "max"


def _number(path: Path) -> int | None:
    return _whole(_read(path).strip())


def read_words(path: Path) -> dict[str, int]:
    """A kernel file of names and numbers, or empty if it is not readable."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
