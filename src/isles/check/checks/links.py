"""Links between hosts: a listener on each host, measurements of its peers, findings for pairs."""

from __future__ import annotations

import socket
import socketserver
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isles.check.checks.network import connect
from isles.check.finding import Finding
from isles.check.plan import Answers, Hosts
from isles.errors import UserError
from isles.facts.units import format_bytes, format_duration
from isles.launch.ssh.hosts import Reach
from isles.run.links import keep_links

_CONNECT_S, _STREAM_S, _BLOCKED_S, _POLL_S = 3.0, 0.5, 6.0, 0.05
_PING = 64
_NUM_PINGS, _PING_EVERY_S, _PING_WAIT_S = 20, 0.02, 1.0
_MANY = 16
"""With this many hosts or more, bandwidth is measured only around a ring."""

_SLOW_TRIP_S = 0.01
_LOST = 2
_SLOW_BYTES, _STUCK_BYTES = 10e6, 64 << 10
_SLOW_STEP_S = 10.0

Links = dict[str, dict[str, "LinkMeasurement"]]
"""Links by the measuring host, and by its peer."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Measurements of one host to another.

    Args:
        run, free: state of the run's port, and of a port that the system chose: ok, or an error of
            `connect`.
        rtt_s: median round trip over TCP. 0: not measured.
        sent, lost: UDP packets. If UDP gets no answers, none are counted, as ranks use TCP.
    """

    run: str
    free: str
    rtt_s: float = 0.0
    sent: int = 0
    lost: int = 0

    @property
    def is_open(self) -> bool:
        return self.run == self.free == "ok"


class Listener:
    """Servers for the peers of a node: TCP on the run's port and a free one, UDP on a free one."""

    def __init__(self) -> None:
        self._servers: list[socketserver.BaseServer] = []

    def listen(self, port: int) -> dict[str, int]:
        """Open three ports: `run`, the first free one of a hundred; `any` and `udp`, by the system.

        Raises:
            UserError: all hundred ports are in use.
        """
        run = None
        for own in range(port, port + 100):
            with suppress(OSError):
                run = _Server(("", own), _LinkHandler)
                break
        if run is None:
            raise UserError(
                f"the ports {port} to {port + 99} are all taken",
                fix="set clusters.0.network.port to the first of a hundred free ports",
                id="port.taken",
            )
        free, udp = _Server(("", 0), _LinkHandler), socketserver.UDPServer(("", 0), _Datagram)
        ports = {}
        for name, server in (("run", run), ("any", free), ("udp", udp)):
            threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True).start()
            self._servers.append(server)
            ports[name] = server.server_address[1]
        return ports

    def unlisten(self) -> dict[str, int]:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []
        return {}


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256


class _LinkHandler(socketserver.BaseRequestHandler):
    # The first byte is the mode. E: echo all data. S: count it, and reply with bytes and seconds.
    def handle(self) -> None:
        link: socket.socket = self.request
        with suppress(OSError):
            link.settimeout(30.0)
            mode = link.recv(1)
            if mode == b"E":
                while data := link.recv(_PING):
                    link.sendall(data)
            elif mode == b"S":
                total, begin = 0, time.monotonic()
                while size := len(link.recv(1 << 18)):
                    total += size
                link.sendall(f"{total} {time.monotonic() - begin}\n".encode())


class _Datagram(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        data, server = self.request
        with suppress(OSError):
            server.sendto(data[:8], self.client_address)  # small: only one way is measured


def reach(peers: list[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    """Try every port of every peer in parallel.

    Args:
        peers: name, address and ports of each peer, the ports as from `Listener.listen`.
        timeout_s: longest wait for a connection.

    Returns:
        The fields of a `LinkMeasurement` for each peer.
    """

    def measure(peer: dict[str, Any]) -> LinkMeasurement:
        ports, address = peer["ports"], peer["address"]
        with ThreadPoolExecutor(3) as pool:
            run = pool.submit(connect, address, ports["run"], timeout_s)
            free = pool.submit(_round_trips, address, ports["any"], timeout_s)
            datagrams = pool.submit(_datagrams, address, ports["udp"])
            opened, (state, rtt_s) = run.result(), free.result()
        if not isinstance(opened, str):
            opened.close()
            opened = "ok"
        return LinkMeasurement(opened, state, rtt_s, *datagrams.result())

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        found = list(pool.map(measure, peers))
    return {peer["name"]: asdict(link) for peer, link in zip(peers, found, strict=True)}


def _round_trips(address: str, port: int, timeout_s: float) -> tuple[str, float]:
    # State of a port, and the median of its round trips.
    link = connect(address, port, timeout_s)
    if isinstance(link, str):
        return link, 0.0
    times = []
    try:
        with link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(b"E")
            for _ in range(_NUM_PINGS):
                begin = time.perf_counter()
                link.sendall(bytes(_PING))
                left = _PING
                while left:
                    data = link.recv(left)
                    if not data:
                        return "ok", 0.0
                    left -= len(data)
                times.append(time.perf_counter() - begin)
    except TimeoutError:
        return "ok", timeout_s  # the port is open, and the host is very slow
    except OSError as error:
        return error.strerror or str(error), 0.0
    return "ok", statistics.median(times)


def _datagrams(address: str, port: int) -> tuple[int, int]:
    # Sent packets, and packets without an answer.
    waiting: set[bytes] = set()

    def drain(wait_s: float) -> None:
        link.settimeout(wait_s)
        with suppress(OSError):
            while waiting:
                waiting.discard(link.recv(64))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        try:
            link.connect((address, port))
        except OSError:
            return 0, 0
        for number in range(_NUM_PINGS):
            word = number.to_bytes(8, "big")
            waiting.add(word)
            with suppress(OSError):
                link.send(word + bytes(_PING - 8))
            drain(_PING_EVERY_S)
        end = time.monotonic() + _PING_WAIT_S
        while waiting and (left := end - time.monotonic()) > 0:
            drain(left)
    # If no packet gets an answer, a firewall blocks UDP.
    return (_NUM_PINGS, len(waiting)) if len(waiting) < _NUM_PINGS else (0, 0)


def bandwidth(address: str, port: int, seconds: float) -> dict[str, float]:
    """Bytes per second that one peer receives. 0: nothing arrives."""
    block = bytes(1 << 18)
    try:
        with socket.create_connection((address, port), timeout=_CONNECT_S) as link:
            link.sendall(b"S")
            end = time.monotonic() + seconds
            # A link without any throughput fails at the first full buffer.
            link.settimeout(_BLOCKED_S)
            while time.monotonic() < end:
                link.sendall(block)
            link.shutdown(socket.SHUT_WR)
            size, duration = link.makefile().readline().split()
    except (OSError, ValueError):
        return {"bytes_per_s": 0.0}
    return {"bytes_per_s": int(size) / max(float(duration), 1e-9)}


def try_links(hosts: Hosts) -> None:
    """Try the ports and the bandwidth of every pair of hosts."""
    if not hosts.reach:
        return
    hosts.print_line("testing every link")
    port = {"port": hosts.run.cluster.network.port}
    ports = hosts.ask("listen", port, finding_id="net.connect")()
    peers = [
        {"name": name, "address": hosts.reach[name].address, "ports": ports[name]}
        for name in hosts.names
        if name in ports
    ]

    def others(name: str) -> dict[str, Any]:
        rest = [peer for peer in peers if peer["name"] != name]
        return {"peers": rest, "timeout_s": _CONNECT_S}

    reached = {
        name: {other: LinkMeasurement(**link) for other, link in answer.items()}
        for name, answer in hosts.ask("reach", others)().items()
    }
    hosts.findings += link_findings(hosts, reached, ports)
    rates = _rates(hosts, ports, reached)
    gradients = hosts.run.gradient_bytes()
    hosts.findings += bandwidth_findings(rates, gradients, len(hosts.names))
    hosts.ask("unlisten", finding_id="net.connect")()
    _keep(hosts, reached, rates)


def _keep(hosts: Hosts, reached: Links, rates: Mapping[tuple[str, str], float]) -> None:
    # Keep them on this machine for plans, and on the first host for monitors of a run.
    if hosts.run.loaded is None:
        return
    names = {name: str(facts["host"]) for name, facts in hosts.facts.items()}
    if len(set(names.values())) < len(names):
        names = {name: name for name in names}
    pairs: dict[str, dict[str, Any]] = {}
    for name, others in reached.items():
        for other, link in others.items():
            if link.is_open:
                own = {"bytes_per_s": rates.get((name, other)), "rtt_s": link.rtt_s}
                pairs.setdefault(names[name], {})[names[other]] = own
    kept: dict[str, Any] = {
        "output_dir": hosts.run.output_dir,
        "pairs": pairs,
        "names": names,
        "at": time.time(),
    }
    keep_pairs(**kept)
    hosts.ask("keep_pairs", kept, only=hosts.names[:1], finding_id="net.bandwidth")()


def keep_pairs(
    output_dir: str, pairs: dict[str, Any], names: dict[str, str], at: float
) -> dict[str, Any]:
    """Write the measurements to the output folder of this machine; see `isles.run.links`."""
    keep_links(Path(output_dir).expanduser(), pairs, names, at)
    return {}


def _rates(hosts: Hosts, ports: Answers, reached: Links) -> dict[tuple[str, str], float]:
    # In each round, every host sends to one host and receives from one, as in a ring all-reduce.
    names = [name for name in hosts.names if name in ports]
    rates: dict[tuple[str, str], float] = {}
    for shift in range(1, len(names) if len(names) <= _MANY else 2):
        to = {name: names[(index + shift) % len(names)] for index, name in enumerate(names)}
        links = {name: reached.get(name, {}).get(to[name]) for name in names}
        only = [name for name, link in links.items() if link is not None and link.free == "ok"]

        def stream(name: str, to: Mapping[str, str] = to) -> dict[str, Any]:
            address, port = hosts.reach[to[name]].address, ports[to[name]]["any"]
            return {"address": address, "port": port, "seconds": _STREAM_S}

        answers = hosts.ask("bandwidth", stream, only=only, finding_id="net.bandwidth")()
        for name, answer in answers.items():
            rates[name, to[name]] = float(answer["bytes_per_s"])
    return rates


def link_findings(hosts: Hosts, reached: Links, ports: Answers) -> list[Finding]:
    """Findings on ports, packets and round trips of every pair, in both directions."""
    findings: list[Finding] = []
    trips = []
    for name, others in reached.items():
        for other, link in others.items():
            pair = f"{name} -> {other}"
            if link.is_open:
                trips.append(link.rtt_s)
                findings += _packets(pair, link)
                continue
            text = _closed(link, hosts.reach[other].address, ports[other])
            back = reached.get(other, {}).get(name)
            if back is not None and back.is_open:
                text += f"; the other direction works, so the firewall of {other} blocks it"
            state = link.run if link.run != "ok" else link.free
            fix = _opening(other, hosts.reach[other], hosts.facts[other]["firewalls"])
            findings.append(Finding("net.connect", "error", pair, text, state, "ok", fix))
    if not trips:
        return findings
    bad = {finding.id for finding in findings}
    where = "all pairs" if not bad else f"{len(trips)} pairs"
    text = "the run's port and other ports are open"
    count = f"{len(trips)} of {sum(map(len, reached.values()))}"
    findings.append(Finding("net.connect", "ok", where, text, count))
    slowest = max(trips)
    if slowest <= _SLOW_TRIP_S and "net.latency" not in bad:
        text = f"a round trip takes at most {milliseconds(slowest)}, and no packet was lost"
        findings.append(Finding("net.latency", "ok", "all pairs", text, milliseconds(slowest)))
    return findings


def _closed(link: LinkMeasurement, address: str, ports: Mapping[str, int]) -> str:
    state = link.free if link.run == "ok" else link.run
    how = {
        "dropped": "no answer, as if a firewall drops packets",
        "refused": "refused, as if a firewall rejects it",
    }.get(state, state)
    if link.run == "ok":
        return (
            f"{address} port {ports['run']} is open, and {ports['any']} is not ({how}): ranks use "
            "ports that the system chooses, so one open port is not enough"
        )
    if link.free == "ok":
        return f"{address} port {ports['run']} (of the run): {how}"
    return f"{address} ports {ports['run']} and {ports['any']}: {how}"


def _opening(name: str, reach: Reach, firewalls: list[str]) -> str:
    # Command to allow the other hosts, for the installed firewall.
    network = str(reach.network) if reach.network is not None else "SUBNET"
    lines = {
        "ufw": f"sudo ufw allow from {network}",
        "firewall-cmd": f"sudo firewall-cmd --permanent --zone=trusted --add-source={network} && "
        "sudo firewall-cmd --reload",
        "nft": f"sudo nft insert rule inet filter input ip saddr {network} accept (names of "
        "table and chain: sudo nft list ruleset)",
        "iptables": f"sudo iptables -I INPUT -s {network} -j ACCEPT",
    }
    line = lines[firewalls[0]] if firewalls else f"allow {network} in its firewall"
    return f"on {name}: {line}"


def _packets(pair: str, link: LinkMeasurement) -> Iterator[Finding]:
    if link.lost >= _LOST:
        text = f"{link.lost} of {link.sent} packets were lost: every exchange of gradients "
        text += "will wait"
        lost = f"{100 * link.lost // link.sent} % lost"
        fix = "try another cable or switch port; see ip -s link on both hosts"
        yield Finding("net.latency", "warning", pair, text, lost, "0 % lost", fix)
    elif link.rtt_s > _SLOW_TRIP_S:
        trip = milliseconds(link.rtt_s)
        text = f"a round trip takes {trip}: ranks wait for each other several times per step"
        fix = "connect both hosts to one network, without Wi-Fi, VPN or internet between them"
        yield Finding("net.latency", "warning", pair, text, trip, milliseconds(_SLOW_TRIP_S), fix)


def bandwidth_findings(
    rates: Mapping[tuple[str, str], float], gradient_bytes: int, num_hosts: int
) -> Iterator[Finding]:
    """Compare bytes per second of each link with the gradients of a step (0: unknown)."""
    if not rates:
        return
    sent = gradient_bytes * 2 * (num_hosts - 1) / max(1, num_hosts)
    is_well = True
    for (name, other), rate in rates.items():
        pair, measured = f"{name} -> {other}", bit_rate(rate)
        if rate < _STUCK_BYTES:
            is_well = False
            text = "a connection opens, but no data arrives: large packets are lost"
            fix = "try a smaller MTU on all hosts: sudo ip link set INTERFACE "
            fix += "mtu 1400"
            yield Finding("net.bandwidth", "error", pair, text, "0", fix=fix)
        elif rate < _SLOW_BYTES or (sent and sent / rate > _SLOW_STEP_S):
            is_well = False
            text = measured
            if sent:
                text += f"; a step's gradients take {format_duration(sent / rate)}"
            fix = "use a faster cable or switch (see ethtool INTERFACE | grep Speed); or exchange "
            fix += "less: increase training.global_batch_size, or train an adapter"
            limit = bit_rate(_SLOW_BYTES)
            yield Finding("net.bandwidth", "warning", pair, text, measured, limit, fix)
    if is_well:
        slowest = min(rates.values())
        text = f"{bit_rate(slowest)} or more, in both directions"
        if sent:
            text += f"; a step's gradients ({format_bytes(sent)}) take {short_time(sent / slowest)}"
        yield Finding("net.bandwidth", "ok", "all pairs", text, bit_rate(slowest))


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


def short_time(seconds: float) -> str:
    return milliseconds(seconds) if seconds < 1 else f"{seconds:.1f} s"


def bit_rate(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
