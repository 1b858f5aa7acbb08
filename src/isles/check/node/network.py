"""The network between nodes: a listener on each, and what its peers measure against it."""

from __future__ import annotations

import errno
import itertools
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from isles.errors import UserError

_PING = 64
_NUM_PINGS, _PING_EVERY_S, _PING_WAIT_S = 20, 0.02, 1.0
_STALL_S = 6.0
_IP_HEADERS = 28
_MTU_DISCOVER, _PMTUDISC_PROBE, _IP_MTU = 10, 3, 14
"""linux/in.h; the module socket does not name them before Python 3.14."""


class Listener:
    """Answers the peers of this node: TCP on the run's port and on any, UDP on any."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def listen(self, args: dict[str, Any]) -> dict[str, Any]:
        """Open the ports.

        Args:
            args: `port`: the first of a hundred that are tried.

        Returns:
            run: the first free port; any: a port of the kernel's choice; udp: one of UDP.
        """
        first = int(args["port"])
        run = next((s for port in range(first, first + 100) if (s := _bound(port))), None)
        if run is None:
            raise UserError(
                f"the ports {first} to {first + 99} are all taken",
                fix="set clusters[0].network.port to the first of a hundred that are not",
                id="port.taken",
            )
        free, udp = _bound(0), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        assert free is not None
        udp.bind(("", 0))
        self._sockets = [run, free, udp]
        for server in (run, free):
            server.listen(256)
            threading.Thread(target=_accept, args=(server,), daemon=True).start()
        threading.Thread(target=_echo_datagrams, args=(udp,), daemon=True).start()
        names = ("run", "any", "udp")
        ports = [server.getsockname()[1] for server in self._sockets]
        return dict(zip(names, ports, strict=True))

    def unlisten(self, args: dict[str, Any]) -> dict[str, Any]:
        """Close them."""
        del args
        for server in self._sockets:
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
        self._sockets = []
        return {}


def reach(args: dict[str, Any]) -> dict[str, Any]:
    """Try every port of every peer at once.

    Args:
        args: `peers`: each with name, address, and ports as `Listener.listen` gave them;
            `timeout_s`: longest wait for a connection; `mtu`: of the interface that is used.

    Returns:
        For each peer: run and any ("ok", "refused", "dropped", or what the kernel said), and
        where any is ok rtt_s, path_mtu, source (the address used here); lost and pings where
        UDP is answered, and full_size: whether packets of the interface's size arrive.
    """
    peers, timeout_s = args["peers"], float(args["timeout_s"])

    def measure(peer: dict[str, Any]) -> dict[str, Any]:
        ports, address = peer["ports"], peer["address"]
        with ThreadPoolExecutor(3) as pool:
            run = pool.submit(_connect, address, ports["run"], timeout_s)
            free = pool.submit(_connect, address, ports["any"], timeout_s, _round_trips)
            datagrams = pool.submit(_datagrams, address, ports["udp"], int(args["mtu"]))
            return {"run": run.result()["state"], **_renamed(free.result()), **datagrams.result()}

    with ThreadPoolExecutor(max(1, len(peers))) as pool:
        return {
            peer["name"]: found for peer, found in zip(peers, pool.map(measure, peers), strict=True)
        }


def dial(args: dict[str, Any]) -> dict[str, Any]:
    """Whether something listens at an address.

    Args:
        args: `address`, `port`, `timeout_s`.

    Returns:
        state: as in `reach`; seconds: what it took.
    """
    begin = time.perf_counter()
    found = _connect(args["address"], int(args["port"]), float(args["timeout_s"]))
    return {"state": found["state"], "seconds": time.perf_counter() - begin}


def bandwidth(args: dict[str, Any]) -> dict[str, Any]:
    """Bytes a second to one peer, as it has received them.

    Args:
        args: `address`, `port` (any of a listener), `seconds`.
    """
    seconds, block = float(args["seconds"]), bytes(1 << 18)
    try:
        with socket.create_connection((args["address"], args["port"]), timeout=3.0) as link:
            link.sendall(b"S")
            end = time.monotonic() + seconds
            # A link that carries nothing shows at the first full buffer.
            link.settimeout(_STALL_S)
            while time.monotonic() < end:
                link.sendall(block)
            link.shutdown(socket.SHUT_WR)
            link.settimeout(_STALL_S)
            size, duration = link.makefile().readline().split()
    except (OSError, ValueError) as error:
        return {"bytes_per_s": 0.0, "fault": str(error) or type(error).__name__}
    return {"bytes_per_s": int(size) / max(float(duration), 1e-9), "fault": ""}


def resolve(args: dict[str, Any]) -> dict[str, Any]:
    """The IPv4 addresses of names, as this machine finds them.

    Args:
        args: `names`.
    """
    found: dict[str, list[str]] = {}

    def look(name: str) -> None:
        try:
            rows = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            rows = []
        found[name] = sorted({str(row[4][0]) for row in rows})

    threads = [
        threading.Thread(target=look, args=(name,), daemon=True) for name in set(args["names"])
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 3.0
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return {"addresses": dict(found), "silent": sorted(set(args["names"]) - set(found))}


def _bound(port: int) -> socket.socket | None:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", port))
        server.listen(1)  # with SO_REUSEADDR two may be bound, and only one can listen
    except OSError:
        server.close()
        return None
    return server


def _accept(server: socket.socket) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return  # closed
        threading.Thread(target=_serve, args=(link,), daemon=True).start()


def _serve(link: socket.socket) -> None:
    """E: give back what comes. S: count it, and say how much came in how many seconds."""
    with link, suppress(OSError):
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


def _echo_datagrams(server: socket.socket) -> None:
    while True:
        try:
            data, peer = server.recvfrom(65_536)
            if peer is None:
                return  # closed
            server.sendto(data[:8], peer)  # the way back is not what is measured
        except OSError:
            if server.fileno() < 0:
                return


def _connect(
    address: str,
    port: int,
    timeout_s: float,
    then: Callable[[socket.socket], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as link:
            facts = {"state": "ok", "source": link.getsockname()[0]}
            if then is not None:
                try:
                    facts |= then(link)
                except TimeoutError:
                    facts["rtt_s"] = timeout_s  # it is open, and somebody there is very slow
            return facts
    except ConnectionRefusedError:
        return {"state": "refused"}
    except TimeoutError:
        return {"state": "dropped"}
    except OSError as error:
        # A firewall that rejects may answer with either.
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES, errno.EPERM):
            return {"state": f"refused: {error.strerror}"}
        return {"state": error.strerror or str(error)}


def _renamed(facts: dict[str, Any]) -> dict[str, Any]:
    return {"any": facts.pop("state"), **facts}


def _round_trips(link: socket.socket) -> dict[str, Any]:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(b"E")
    times = []
    for _ in range(_NUM_PINGS):
        begin = time.perf_counter()
        link.sendall(bytes(_PING))
        left = _PING
        while left:
            data = link.recv(left)
            if not data:
                return {}
            left -= len(data)
        times.append(time.perf_counter() - begin)
    mtu = link.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    return {"rtt_s": statistics.median(times), "path_mtu": mtu}


def _datagrams(address: str, port: int, mtu: int) -> dict[str, Any]:
    """Lost packets, and whether one of the interface's full size arrives unbroken.

    Nothing is said where UDP is not answered at all: ranks talk TCP.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link, suppress(OSError):
        link.connect((address, port))
        lost = _NUM_PINGS - _pings(link, [_PING] * _NUM_PINGS)
        if lost == _NUM_PINGS:
            return {}
        facts = {"pings": _NUM_PINGS, "lost": lost}
        full = mtu - _IP_HEADERS
        if _PING < full <= 65_507:
            link.setsockopt(socket.IPPROTO_IP, _MTU_DISCOVER, _PMTUDISC_PROBE)
            facts["full_size"] = _pings(link, [full] * 5) > 0
        return facts
    return {}


def _pings(link: socket.socket, sizes: list[int]) -> int:
    """How many of these packets are answered."""
    numbers = itertools.count(int(time.monotonic() * 1000) << 16)
    waiting: set[bytes] = set()

    def drain(wait_s: float) -> None:
        link.settimeout(wait_s)
        with suppress(TimeoutError, ConnectionRefusedError, BlockingIOError):
            while waiting:
                waiting.discard(link.recv(64))

    for size in sizes:
        word = next(numbers).to_bytes(8, "big")
        waiting.add(word)
        with suppress(OSError):
            link.send(word + bytes(size - 8))
        drain(_PING_EVERY_S)
    end = time.monotonic() + _PING_WAIT_S
    while waiting and (left := end - time.monotonic()) > 0:
        drain(left)
    return len(sizes) - len(waiting)
