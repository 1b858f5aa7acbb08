"""A conversation with a node over a TCP connection that the node has opened: for the step of a job,
where no ssh leads from node to node."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from isles.errors import CommunicationError, UserError
from isles.launch.node.operations import READY

_LOOK_S, _HELLO_S = 0.2, 5.0
_AT_ONCE_S = 0.05
"""A node greets as soon as it is connected."""

_MOST_AT_ONCE = 64
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Link:
    """Questions to one node that has come; see `isles.check.panel.Place`.

    Args:
        name: of the node.
        connection: to it, past its greeting.
    """

    def __init__(self, name: str, connection: socket.socket) -> None:
        self.name = name
        self._connection = connection
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._number, self._is_closed = 0, False
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, op: str, **args: Any) -> Future[dict[str, Any]]:
        """Ask without waiting; the future raises UserError."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._is_closed:
                future.set_exception(self._lost())
                return future
            self._number += 1
            self._waiting[self._number] = future
            line = json.dumps({"id": self._number, "op": op, "args": args}) + "\n"
            with suppress(OSError):  # the reader finds the end of the connection
                self._connection.sendall(line.encode())
        return future

    def close(self) -> None:
        """End the conversation; the process there ends with it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        is_ready = False
        with suppress(OSError, ValueError):
            for line in self._connection.makefile("r", encoding="utf-8"):
                if not is_ready:
                    is_ready = line.startswith(READY)
                    continue
                reply = json.loads(line)
                with self._lock:
                    future = self._waiting.pop(reply["id"], None)
                if future is None:
                    continue
                if "error" in reply:
                    future.set_exception(
                        UserError(reply["error"]["what"], fix=reply["error"]["fix"])
                    )
                else:
                    future.set_result(reply["result"])
        with self._lock:
            self._is_closed = True
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(self._lost())

    def _lost(self) -> CommunicationError:
        return CommunicationError(
            "no answer to any question: its process has ended, or the connection is cut",
            where=f"host {self.name}",
            fix="see the output of this task, and whether the node is up",
            id="host.answers",
        )


def meet(server: socket.socket, names: list[str], digest: str, timeout_s: float) -> dict[int, Link]:
    """Wait for the other nodes of a job; the first node calls this.

    Args:
        server: listens at the address that the others know.
        names: of all nodes, in the order of their numbers.
        digest: of the run, so that nodes of another are not taken.
        timeout_s: longest wait.

    Returns:
        Those that have come, by their number.
    """
    end = time.monotonic() + timeout_s
    links: dict[int, Link] = {}
    come: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    # Each has a thread: nobody waits for one that says nothing.
    greeting: list[threading.Thread] = []
    while len(links) < len(names) - 1 and (left := end - time.monotonic()) > 0:
        server.settimeout(min(left, _LOOK_S if greeting else left))
        with suppress(TimeoutError):
            connection, _ = server.accept()
            greeting = [thread for thread in greeting if thread.is_alive()]
            if len(greeting) >= _MOST_AT_ONCE:
                connection.close()
                continue
            greeting.append(
                threading.Thread(target=_greet, args=(connection, digest, come), daemon=True)
            )
            greeting[-1].start()
            greeting[-1].join(_AT_ONCE_S)
        while not come.empty():
            node, connection = come.get()
            if 0 < node < len(names) and node not in links and _welcome(connection, digest):
                links[node] = Link(names[node], connection)
            else:
                connection.close()
    return links


def _greet(
    connection: socket.socket, digest: str, come: queue.SimpleQueue[tuple[int, socket.socket]]
) -> None:
    """Hear which node has come, if it is one of this run."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        hello = json.loads(_line(connection))
        if hello["digest"] == digest:
            come.put((int(hello["node"]), connection))
            return
    connection.close()


def _welcome(connection: socket.socket, digest: str) -> bool:
    """Tell a node that it is in; False where it has gone."""
    try:
        connection.sendall(f"{digest}\n".encode())
        connection.settimeout(None)
        _keep_alive(connection)
    except OSError:
        return False
    return True


def join(address: tuple[str, int], node: int, digest: str, timeout_s: float) -> socket.socket:
    """Reach the first node of a job; every other node calls this.

    Raises:
        CommunicationError: it does not answer in time, or is of another run.
    """
    end, fault = time.monotonic() + timeout_s, "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=min(left, _HELLO_S))
            connection.sendall(json.dumps({"node": node, "digest": digest}).encode() + b"\n")
            if _line(connection) == digest:
                connection.settimeout(None)
                _keep_alive(connection)
                return connection
            fault = "another run answers there, or this node's number is taken"
            connection.close()
        except OSError as error:
            fault = str(error) or type(error).__name__
        time.sleep(_LOOK_S)  # the first node's task may not have begun to listen
    raise CommunicationError(
        f"the first node was not reached within {timeout_s:.0f} s: {fault}",
        where=f"node {node}, host {os.uname().nodename}",
        fix=f"has its task started, and can {address[0]} port {address[1]} be reached?",
        id="net.connect",
    )


def _line(connection: socket.socket) -> str:
    """One short line, and not a byte more: what follows is for another reader.

    Raises:
        TimeoutError: not all of it has come within `_HELLO_S`.
    """
    data, end = b"", time.monotonic() + _HELLO_S
    while not data.endswith(b"\n") and len(data) < 1000:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("it has begun a line, and does not end it")
        connection.settimeout(left)
        byte = connection.recv(1)
        if not byte:
            break
        data += byte
    return data.decode(errors="replace").strip()


def _keep_alive(connection: socket.socket) -> None:
    """A node that loses its power sends nothing: without this its peer would wait for ever."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
