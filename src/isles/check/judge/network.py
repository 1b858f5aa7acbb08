"""What is found between hosts: names, ports, packets, bandwidth, and the all-reduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from isles.check.finding import Finding
from isles.check.panel import Answers
from isles.check.subject import Subject
from isles.config.sections.cluster import NetworkConfig
from isles.facts.units import format_bytes, format_duration
from isles.launch.ssh.addresses import Reach

_SLOW_TRIP_S = 0.01
_LOST = 2
_SLOW_BYTES = 10e6
_SLOW_STEP_S = 10.0
_STUCK = 64 << 10


def judge_interfaces(
    reach: Mapping[str, Reach], machines: Answers, network: NetworkConfig
) -> list[Finding]:
    """The address of every host, and what carries it."""
    findings = []
    for name, own in reach.items():
        entry = next((e for e in machines[name]["interfaces"] if e["address"] == own.address), None)
        if entry is None:
            findings.append(
                Finding(
                    "net.interface",
                    "warning",
                    name,
                    f"{own.address} is none of its own addresses: is there a router between?",
                    measured=own.address,
                    fix="let every port through to it, or write an address of its own: "
                    f"{{ssh: {name}, address: …}}",
                )
            )
            continue
        is_wireless = bool(entry["is_wireless"])
        findings.append(
            Finding(
                "net.interface",
                "warning" if is_wireless else "ok",
                name,
                f"{own.address} on {network.interface or own.interface}"
                + (", which is wireless: slow, and it loses packets" if is_wireless else ""),
                measured=f"{own.address} on {entry['interface']}",
                fix="use a cable, or expect few steps a minute" if is_wireless else "",
            )
        )
    mtus = {name: _mtu(machines[name], own.address) for name, own in reach.items()}
    if len(set(mtus.values())) > 1:
        usual = max(mtus.values())
        findings += [
            Finding(
                "net.mtu",
                "warning",
                name,
                f"its largest packet is {mtu} bytes, and {usual} on other hosts",
                measured=str(mtu),
                limit=str(usual),
                fix=f"on {name}: sudo ip link set {reach[name].interface} mtu {usual}, if the "
                "switch takes it; else the smaller one on all hosts",
            )
            for name, mtu in mtus.items()
            if mtu and mtu != usual
        ]
    return findings


def _mtu(machine: dict[str, Any], address: str) -> int:
    return next((int(e["mtu"]) for e in machine["interfaces"] if e["address"] == address), 0)


def judge_names(
    answers: Answers, hostnames: Mapping[str, str], reach: Mapping[str, Reach]
) -> list[Finding]:
    """Whether every host finds the others by name; ranks do not need it, other programs may."""
    lost: list[Finding] = []
    for name, answer in answers.items():
        own = answer["addresses"].get(hostnames[name], [])
        if any(address.startswith("127.") for address in own):
            # Debian's /etc/hosts. torchrun and others would give that address to the others.
            lost.append(_trap(name, hostnames[name], own, reach[name].address))
        for other, hostname in hostnames.items():
            if other == name:
                continue
            if hostname in answer["silent"]:
                lost.append(_silent(name, hostname))
    if lost:
        return lost
    text = "no host takes its own name for the loopback"
    unknown = [
        f"{name} -> {other}"
        for name, answer in answers.items()
        for other, hostname in hostnames.items()
        if other != name and reach[other].address not in answer["addresses"].get(hostname, [])
    ]
    if unknown:
        text += f"; not found by name: {', '.join(unknown[:4])} (isles uses addresses)"
    return [Finding("net.names", "ok", "all hosts", text, f"{len(unknown)} not found")]


def _trap(name: str, hostname: str, own: list[str], address: str) -> Finding:
    return Finding(
        "net.names",
        "warning",
        name,
        f"{hostname} is {own[0]} there: programs that tell others their name are not found "
        "(isles uses addresses; a script of yours may not)",
        measured=own[0],
        limit=address,
        fix=f"in /etc/hosts of {name}: {address} {hostname}, in place of {own[0]}",
    )


def _silent(name: str, hostname: str) -> Finding:
    return Finding(
        "net.names",
        "warning",
        name,
        f"asking for the address of {hostname} takes more than 3 s",
        measured="more than 3 s",
        fix=f"see /etc/resolv.conf of {name}; lines in /etc/hosts help at once",
    )


def judge_reach(
    reached: Answers, reach: Mapping[str, Reach], machines: Answers, ports: Answers
) -> list[Finding]:
    """Ports, packets and round trips of every pair, in both directions."""
    findings: list[Finding] = []
    num_ok, trips = 0, []
    for name, others in reached.items():
        for other, link in others.items():
            pair = f"{name} -> {other}"
            back = reached.get(other, {}).get(name, {})
            bad = list(_ports(pair, other, link, back, reach, machines, ports))
            findings += bad
            if bad:
                continue
            num_ok += 1
            trips.append(float(link.get("rtt_s", 0.0)))
            findings += _packets(pair, name, other, link)
    if num_ok:
        slowest = max(trips)
        findings.append(
            Finding(
                "net.connect",
                "ok",
                "all pairs" if not findings else f"{num_ok} pairs",
                "the run's port and any other can be reached",
                measured=f"{num_ok} of {sum(map(len, reached.values()))}",
            )
        )
        if slowest <= _SLOW_TRIP_S and not any(f.id == "net.latency" for f in findings):
            text = f"a round trip takes {_ms(slowest)} at most, and no packet was lost"
            findings.append(Finding("net.latency", "ok", "all pairs", text, _ms(slowest)))
        if not any(f.id == "net.mtu" for f in findings):
            findings.append(Finding("net.mtu", "ok", "all pairs", "packets of full size arrive"))
    return findings


def _ports(
    pair: str,
    other: str,
    link: dict[str, Any],
    back: dict[str, Any],
    reach: Mapping[str, Reach],
    machines: Answers,
    ports: Answers,
) -> Iterator[Finding]:
    run, free = link["run"], link["any"]
    if run == free == "ok":
        return
    address = reach[other].address
    numbers = f"{ports[other]['run']} and {ports[other]['any']}"
    if run != "ok" and free != "ok":
        what = f"{address} ports {numbers}: {_how(run)}"
    elif run == "ok":
        what = (
            f"{address} port {ports[other]['run']} is open, and {ports[other]['any']} is not "
            f"({_how(free)}): ranks talk over ports that the system chooses, so one open port is "
            "not enough"
        )
    else:
        what = f"{address} port {ports[other]['run']}, the run's: {_how(run)}"
    works_back = back and back.get("run") == back.get("any") == "ok"
    side = f"; the other way works, so it is the firewall of {other}" if works_back else ""
    yield Finding(
        "net.connect",
        "error",
        pair,
        what + side,
        measured=run if run != "ok" else free,
        limit="ok",
        fix=_open(other, reach[other], machines[other]["firewalls"]),
    )


def _how(state: str) -> str:
    if state == "dropped":
        return "no answer: packets are dropped, as by a firewall"
    if state == "refused":
        return "refused, as by a firewall that rejects"
    return state


def _open(name: str, reach: Reach, firewalls: list[str]) -> str:
    """The line that lets the other hosts in, for the firewall that is there."""
    network = str(reach.network) if reach.network is not None else "SUBNET"
    lines = {
        "ufw": f"sudo ufw allow from {network}",
        "firewall-cmd": f"sudo firewall-cmd --permanent --zone=trusted --add-source={network} && "
        "sudo firewall-cmd --reload",
        "nft": f"sudo nft insert rule inet filter input ip saddr {network} accept (names of table "
        "and chain: sudo nft list ruleset)",
        "iptables": f"sudo iptables -I INPUT -s {network} -j ACCEPT",
    }
    line = next((lines[kind] for kind in lines if kind in firewalls), f"let {network} in")
    return f"on {name}: {line}"


def _packets(pair: str, name: str, other: str, link: dict[str, Any]) -> Iterator[Finding]:
    trip = float(link.get("rtt_s", 0.0))
    lost, sent = int(link.get("lost", 0)), int(link.get("pings", 0))
    if lost >= _LOST:
        yield Finding(
            "net.latency",
            "warning",
            pair,
            f"{lost} of {sent} packets were lost: every exchange of gradients will stall",
            measured=f"{100 * lost // sent} % lost",
            limit="0 % lost",
            fix="try another cable or port of the switch; see ip -s link on both hosts",
        )
    elif trip > _SLOW_TRIP_S:
        yield Finding(
            "net.latency",
            "warning",
            pair,
            f"a round trip takes {_ms(trip)}: ranks wait for one another several times a step",
            measured=_ms(trip),
            limit=_ms(_SLOW_TRIP_S),
            fix="are both on one network, without Wi-Fi, VPN or internet between?",
        )
    if link.get("full_size") is False:
        yield Finding(
            "net.mtu",
            "warning",
            pair,
            f"packets of the full size of {name} do not arrive at {other}: something between has a "
            "smaller MTU and does not say so",
            measured="lost",
            fix="give all hosts and switches one MTU: sudo ip link set INTERFACE mtu 1500",
        )


def judge_bandwidth(
    rates: Mapping[tuple[str, str], float], subject: Subject, num_hosts: int
) -> list[Finding]:
    """What each link carries, against what a step sends over it."""
    if not rates:
        return []
    sent = (subject.gradient_bytes() or 0) * 2 * (num_hosts - 1) / max(1, num_hosts)
    findings = []
    for (name, other), rate in rates.items():
        pair = f"{name} -> {other}"
        if rate < _STUCK:
            findings.append(_stuck(pair))
        elif rate < _SLOW_BYTES or (sent and sent / rate > _SLOW_STEP_S):
            step = f"; a step's gradients take {format_duration(sent / rate)}" if sent else ""
            findings.append(
                Finding(
                    "net.bandwidth",
                    "warning",
                    pair,
                    f"{_rate(rate)}{step}",
                    measured=_rate(rate),
                    limit=_rate(_SLOW_BYTES),
                    fix="a faster cable or switch (see ethtool INTERFACE | grep Speed); fewer "
                    "exchanges: a larger training.global_batch_size; or train an adapter",
                )
            )
    slowest = min(rates.values())
    if not findings:
        text = f"{_rate(slowest)} or more, both ways"
        if sent:
            text += f"; a step's gradients ({format_bytes(sent)}) take {_seconds(sent / slowest)}"
        findings.append(Finding("net.bandwidth", "ok", "all pairs", text, _rate(slowest)))
    return findings


def _stuck(pair: str) -> Finding:
    return Finding(
        "net.bandwidth",
        "error",
        pair,
        "a connection opens, and then carries nothing: large packets are lost on the way",
        measured="0",
        fix="a smaller MTU on all hosts shows whether it is that: sudo ip link set INTERFACE mtu "
        "1400",
    )


def judge_reduce(
    answers: Answers, orders: Mapping[str, list[dict[str, Any]]], subject: Subject
) -> list[Finding]:
    """The all-reduce: its speed, or who failed and where."""
    owner = {order["rank"]: name for name, own in orders.items() for order in own}
    found = {
        order["rank"]: answer
        for name, own in answers.items()
        for order, answer in zip(orders[name], own["ranks"], strict=True)
    }
    bad = {rank: answer for rank, answer in found.items() if answer.get("fault")}
    first = orders[next(iter(orders))][0]
    backend = first["backend"]
    if bad:
        return _failed(bad, owner, backend, subject)
    rows = found[0]["rows"]
    world = f"{len(found)} rank{'s' if len(found) > 1 else ''}"
    sizes = ", ".join(f"{format_bytes(row['bytes'])} in {_seconds(row['seconds'])}" for row in rows)
    findings = [Finding("reduce.works", "ok", "all hosts", f"{backend}, {world}: {sizes}", world)]
    if len(found) > 1:
        best = max(rows, key=lambda row: row["bytes"])
        text = f"bus bandwidth {_rate(best['bus'])}, algorithm bandwidth {_rate(best['algorithm'])}"
        findings.append(Finding("reduce.speed", "ok", "all hosts", text, _rate(best["bus"])))
    return findings


def _failed(
    bad: Mapping[int, dict[str, Any]], owner: Mapping[int, str], backend: str, subject: Subject
) -> list[Finding]:
    missing = sorted({rank for answer in bad.values() for rank in answer.get("missing", ())})
    hosts = sorted({owner[rank] for rank in missing if rank in owner})
    findings = []
    for rank, answer in bad.items():
        if missing and rank not in missing and not answer.get("missing"):
            continue  # it only waited for those
        what = answer["fault"]
        if answer.get("missing"):
            what = f"ranks {', '.join(map(str, missing))} on {', '.join(hosts)} did not come"
        findings.append(
            Finding(
                "reduce.works",
                "error",
                f"{owner[rank]} rank {rank}",
                f"{backend} failed {_STAGES.get(answer['stage'], answer['stage'])}: {what}",
                measured=answer["stage"],
                fix=_nccl_fix(subject)
                if backend == "nccl"
                else "is the interface right (clusters[0].network.interface)? is every port open "
                "between the hosts?",
            )
        )
    return findings


_STAGES = {
    "store": "to meet at rank 0",
    "group": "to connect the ranks",
    "sum": "to add up",
    "died": "in the library",
    "silent": "to end in time",
}


def _nccl_fix(subject: Subject) -> str:
    profile = subject.cluster.network.profile
    hint = (
        ""
        if profile == "ethernet"
        else "clusters[0].network.profile: ethernet leaves out InfiniBand; "
    )
    return f"{hint}NCCL_DEBUG=INFO in clusters[0].environment.variables says more"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def _seconds(seconds: float) -> str:
    return _ms(seconds) if seconds < 1 else f"{seconds:.1f} s"


def _rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
