"""The part of a check that lies between hosts: every link, and the all-reduce over all ranks."""

from __future__ import annotations

from typing import Any

from isles.check.course import QUICK_S, Course
from isles.check.finding import Finding
from isles.check.judge.network import (
    judge_bandwidth,
    judge_names,
    judge_reach,
    judge_reduce,
)
from isles.check.panel import Answers
from isles.launch.ssh.network import network_variables

_CONNECT_S, _STREAM_S, _MEET_S = 3.0, 0.5, 30.0
_CPU_SIZES = [4 << 10, 1 << 20, 16 << 20]
_GPU_SIZES = [4 << 10, 4 << 20, 64 << 20]
_MANY = 16
"""From so many hosts on, bandwidth is measured around a ring only."""

_HINDERS = (
    "net.connect",
    "net.interface",
    "torch.imports",
    "gpu.visible",
    "gpu.kernel",
    "gpu.count",
)
"""With an error in one of these an all-reduce can only hang."""


def try_links(course: Course) -> None:
    """Every port of every pair, names, and the bandwidth of every pair."""
    panel, subject = course.panel, course.subject
    if not course.reach:
        return
    mtu = {name: _mtu(course, name) for name in panel.names}
    port = subject.cluster.network.port
    ports = panel.ask("listen", lambda _: {"port": port}, timeout_s=QUICK_S).answers("net.connect")
    peers = [
        {"name": name, "address": course.reach[name].address, "ports": ports[name]}
        for name in panel.names
        if name in ports
    ]

    def others(name: str) -> dict[str, Any]:
        rest = [peer for peer in peers if peer["name"] != name]
        return {"peers": rest, "timeout_s": _CONNECT_S, "mtu": mtu[name]}

    hostnames = {name: course.facts[name]["host"] for name in panel.names}
    names = panel.ask("resolve", lambda _: {"names": list(hostnames.values())}, timeout_s=QUICK_S)
    reached = panel.ask("reach", others, timeout_s=QUICK_S).answers()
    panel.findings += judge_reach(reached, course.reach, course.machines, ports)
    panel.findings += judge_names(names.answers("net.names"), hostnames, course.reach)
    rates = _rates(course, ports, reached)
    panel.findings += judge_bandwidth(rates, subject, len(panel.places))
    panel.ask("unlisten", timeout_s=QUICK_S).answers("net.connect")


def _mtu(course: Course, name: str) -> int:
    address = course.reach[name].address
    interfaces = course.machines[name]["interfaces"]
    return next((int(i["mtu"]) for i in interfaces if i["address"] == address), 1500)


def _rates(course: Course, ports: Answers, reached: Answers) -> dict[tuple[str, str], float]:
    """Bytes a second from host to host: in each round everybody sends to one and hears from one, as
    in a ring of an all-reduce."""
    names = [name for name in course.panel.names if name in ports]
    rates: dict[tuple[str, str], float] = {}
    shifts = range(1, len(names)) if len(names) <= _MANY else range(1, 2)
    for shift in shifts:
        to = {name: names[(index + shift) % len(names)] for index, name in enumerate(names)}
        open_ = [
            name
            for name in names
            if name in course.panel.names
            and reached.get(name, {}).get(to[name], {}).get("any") == "ok"
        ]
        answers = course.panel.ask(
            "bandwidth",
            lambda name, to=to: {  # type: ignore[misc]
                "address": course.reach[to[name]].address,
                "port": ports[to[name]]["any"],
                "seconds": _STREAM_S,
            },
            timeout_s=QUICK_S,
            only=open_,
        ).answers("net.bandwidth")
        for name, answer in answers.items():
            rates[name, to[name]] = float(answer["bytes_per_s"])
    return rates


def try_reduce(course: Course) -> None:
    """A real all-reduce over all ranks, unless it is known that it must hang."""
    panel, subject = course.panel, course.subject
    names = panel.names
    bad = [f for f in panel.findings if f.level == "error" and f.id in _HINDERS]
    if bad or not course.reach or len(names) < len(course.facts):
        why = f"{bad[0].where}: {bad[0].text}" if bad else "hosts are missing"
        panel.findings.append(
            Finding(
                "reduce.works",
                "warning",
                "all hosts",
                f"the all-reduce was not tried ({why})",
                fix="mend that first, and check again",
            )
        )
        return
    course.say("adding up tensors over all ranks")
    head, port = names[:1], subject.cluster.network.port
    free = panel.ask("facts", lambda _: {"port": port}, timeout_s=QUICK_S, only=head).answers()
    if not free:
        return
    orders = _orders(course, free[names[0]]["port"])
    answers = panel.ask(
        "reduce",
        lambda name: {"orders": orders[name], "timeout_s": course.extent.timeout_s - 2},
        timeout_s=course.extent.timeout_s,
    ).answers("reduce.works")
    panel.findings += judge_reduce(answers, orders, subject)


def _orders(course: Course, port: int) -> dict[str, list[dict[str, Any]]]:
    """For each rank of each host what `isles.train.check_rank.reduce` takes."""
    names, network = course.panel.names, course.subject.cluster.network
    world_size, first = sum(course.nproc[name] for name in names), 0
    orders: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        interface = course.reach[name].interface or ("lo" if len(names) == 1 else None)
        orders[name] = [
            {
                "rank": first + index,
                "world_size": world_size,
                "address": course.reach[names[0]].address,
                "port": port,
                "backend": "nccl" if course.device == "cuda" else "gloo",
                "index": index,
                "variables": network_variables(network, interface, course.device),
                "sizes": _GPU_SIZES if course.device == "cuda" else _CPU_SIZES,
                "timeout_s": min(_MEET_S, course.extent.timeout_s / 2),
            }
            for index in range(course.nproc[name])
        ]
        first += course.nproc[name]
    return orders
