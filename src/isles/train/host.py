"""The host's part in a step: garbage collection at fixed steps, the heap, and cores near the rank's
GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from isles.dist.world import World

log = logging.getLogger(__name__)

_COLLECT_EVERY = 50
"""Steps between two collections, as in torchtitan. torchtitan collects only young objects, so an
object that outlives a collection stays until the end."""

_SYS = Path("/sys")

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""

_MAPPED_BYTES = 2**16
"""Smallest block that `map_large_blocks` lets glibc allocate with mmap."""


def map_large_blocks() -> None:
    """Make this process return the memory of large tensors to the kernel when it frees them.

    For steps that gather and unpack many matrices on a CPU. Does nothing without glibc.
    """
    # glibc raises its threshold to 32 MiB when a program frees large blocks. Then tensors are in
    # the heap, between small blocks that stay. With matrices of 25 MB in four bits, a rank held
    # 390 MB more. New pages in each step cost a small model a tenth of its speed.
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim_heap() -> None:
    """Return the free memory of the heap to the kernel. Does nothing without glibc."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def collecting_at_steps() -> Iterator[None]:
    """Collect garbage only in `collect_garbage`, inside a `with`.

    By default Python collects when a rank has made enough objects, at another step on each rank,
    and all ranks wait for that rank. Objects from before training are never collected again.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    trim_heap()  # 60 MB after a rank has prepared tokens
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def collect_garbage(step: int) -> None:
    """Collect the garbage of the last steps, at the same steps on every rank."""
    if step % _COLLECT_EVERY == 0:
        gc.collect()  # all generations, which is cheap without the objects from before training


def bind_to_gpu(world: World) -> None:
    """Keep this thread, and threads and processes that it starts, on the cores of its GPU's socket.

    Does nothing with one rank on the node, which may need all cores, and on a node with one socket.
    Cores that a queue or a container does not allow stay excluded.
    """
    if world.device.type != "cuda" or world.local_world_size < 2:
        return
    card = torch.cuda.get_device_properties(world.device)
    address = [getattr(card, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in address:
        return  # an older torch
    domain, bus, number = address
    allowed = os.sched_getaffinity(0)
    cores = near_cores(
        f"{domain:04x}:{bus:02x}:{number:02x}.0",
        allowed,
        least=len(allowed) // world.local_world_size,
    )
    if cores:
        os.sched_setaffinity(0, cores)
        log.info("rank %d uses the %d cores of its GPU's NUMA node", world.rank, len(cores))


def near_cores(address: str, allowed: set[int], sys: Path = _SYS, *, least: int = 1) -> set[int]:
    """The allowed cores of a PCI device's NUMA node; empty if no binding is useful.

    Args:
        address: of the device, such as 0000:65:00.0.
        allowed: cores that this process may use.
        sys: where sysfs is mounted.
        least: number of cores that a rank needs. A queue may give a job few cores near its GPUs.
    """
    nodes = sys / "devices/system/node"
    try:
        node = int((sys / "bus/pci/devices" / address / "numa_node").read_text())
        if node < 0:  # the firmware does not report it
            return set()
        near = _cores((nodes / f"node{node}" / "cpulist").read_text()) & allowed
    except (OSError, ValueError):
        return set()
    return near if least <= len(near) < len(allowed) else set()


def _cores(text: str) -> set[int]:
    # Numbers of a list such as 0-3,8-11.
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
