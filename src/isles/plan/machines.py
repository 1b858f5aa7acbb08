"""The machines of a plan: hosts, the devices of their ranks, and the links between them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from isles.config.roofline import Chip, Links, inside_rate
from isles.facts.gpus import Gpu, Products, find_gpu

Confidence = Literal["measured", "given", "table", "guess", "unknown"]
"""Source of a figure: this machine, the command line or run file, the GPU table, or a guess."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network or link between machines.

    Args:
        bytes_per_s: bytes per second in one direction.
        latency_s: seconds of latency per message.
    """

    bytes_per_s: float
    latency_s: float
    confidence: Confidence
    name: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank.

    Args:
        name: printed name.
        gpu: row of the GPU table. None for a CPU, and for a GPU that is not in the table.
        memory_bytes: total memory. None: unknown.
        free_bytes: free memory now. None: unknown.
        flops: FLOP/s of 16-bit matrix products on a GPU, and of all products on a CPU. 0: unknown.
        bandwidth: bytes per second of its memory.
    """

    name: str
    gpu: Gpu | None
    memory_bytes: float | None
    free_bytes: float | None
    confidence: Confidence
    flops: float = 0.0
    bandwidth: float = 0.0
    is_cuda: bool = True

    def chip(self, products: Products) -> Chip:
        """Its speed."""
        flops = self.flops if self.gpu is None else self.gpu.flops(products)
        return Chip(flops, self.bandwidth, self.is_cuda)

    @classmethod
    def of(cls, gpu: Gpu) -> Device:
        """A GPU of the table."""
        return cls(
            gpu.name,
            gpu,
            gpu.memory_bytes,
            None,
            "table",
            gpu.bf16_flops,
            gpu.bandwidth_bytes_per_s,
        )

    @classmethod
    def reported(cls, name: str, memory_bytes: float | None, free_bytes: float | None) -> Device:
        """A GPU by its name in the driver."""
        gpu = find_gpu(name)
        short = name.replace("NVIDIA ", "").replace("GeForce ", "")
        if gpu is None:
            confidence: Confidence = "unknown" if memory_bytes is None else "measured"
            return cls(short, None, memory_bytes, free_bytes, confidence)
        if memory_bytes is None:
            return cls.of(gpu)
        own = replace(cls.of(gpu), name=short, memory_bytes=memory_bytes, free_bytes=free_bytes)
        return replace(own, confidence="measured")


UNKNOWN = Device("unknown GPU", None, None, None, "unknown")
UNKNOWN_CPU = Device("CPU process", None, None, None, "unknown", is_cuda=False)


@dataclass(frozen=True, slots=True)
class Host:
    """One machine.

    Args:
        memory_bytes: main memory. None: unknown.
        disk_free_bytes: free space on the disk of the run directory. None: unknown.
    """

    name: str
    devices: tuple[Device, ...]
    memory_bytes: float | None = None
    disk_free_bytes: float | None = None

    @property
    def inside_bytes_per_s(self) -> float:
        """Bytes per second between its devices, in one direction. A guess, except for NVLink."""
        return min(inside_rate(device.gpu) for device in self.devices)


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of one cluster.

    Args:
        name: name of the cluster.
        network: link between its hosts.
        line: uplink to the hub, if there are several clusters.
        notes: remarks for the reader on how the machines were found.
    """

    name: str
    hosts: tuple[Host, ...]
    network: Link
    line: Link
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """Devices of all ranks, in rank order."""
        return tuple(device for host in self.hosts for device in host.devices)

    @property
    def local_world_size(self) -> int:
        """Ranks per node. For unequal nodes, the greatest common divisor."""
        return math.gcd(*(len(host.devices) for host in self.hosts))

    @property
    def links(self) -> Links:
        """Its links as the cost of communication needs them."""
        return Links(
            self.local_world_size,
            len(self.hosts),
            min(host.inside_bytes_per_s for host in self.hosts),
            self.network.bytes_per_s,
            self.network.latency_s,
        )

    def host_of(self, rank: int) -> Host:
        """Host of a rank."""
        for host in self.hosts:
            if rank < len(host.devices):
                return host
            rank -= len(host.devices)
        raise IndexError(rank)


GUESSED_NETWORK = Link(125e6, 2e-4, "guess", "1 Gbit/s")
GUESSED_FABRIC = Link(25e9, 5e-6, "guess", "200 Gbit/s")
GUESSED_LINE = Link(12.5e6, 0.025, "guess", "100 Mbit/s")


def rate_text(bytes_per_s: float) -> str:
    """Rate as vendors of networks write it: `1 Gbit/s`."""
    bits = bytes_per_s * 8
    for unit, scale in (("Tbit/s", 1e12), ("Gbit/s", 1e9)):
        if bits >= scale:
            return f"{bits / scale:.3g} {unit}"
    return f"{bits / 1e6:.3g} Mbit/s"


def summary(machines: Machines) -> str:
    """Short description of the machines: `2 x (8 x H100), 200 Gbit/s (guess)`."""
    hosts = [_cards(host) for host in machines.hosts]
    groups = [(text, len(list(group))) for text, group in groupby(hosts)]
    parts = [f"{count} x ({text})" if count > 1 else text for text, count in groups]
    network = machines.network
    if len(machines.hosts) == 1:
        return parts[0]
    between = f"{network.name} between hosts ({network.confidence})"
    return f"{' + '.join(parts)}, {between}"


def _cards(host: Host) -> str:
    groups = [(name, len(list(g))) for name, g in groupby(d.name for d in host.devices)]
    return " + ".join(f"{count} x {name}" if count > 1 else name for name, count in groups)
