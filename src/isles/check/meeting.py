"""Whether clusters will reach the rendezvous at which they meet."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from isles.check.course import QUICK_S, Course
from isles.check.finding import Finding
from isles.config.load import Loaded
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import ConfigError
from isles.launch.meeting import own_addresses, split_address
from isles.launch.multi_cluster import is_elsewhere, meeting_place, refuse_peers

_CONNECT_S = 5.0


@contextmanager
def rendezvous_stand_in(loaded: Loaded) -> Iterator[Loaded]:
    """While clusters are checked, listen where the rendezvous of their run will.

    Yields:
        The run file with that address as `outer.rendezvous`; as it is where clusters of another
        machine take no part, or meet elsewhere.

    Raises:
        UserError: there is no address at which they could meet here.
    """
    outer = loaded.config.diloco
    if len(loaded.config.clusters) > 1:
        refuse_peers(loaded)
    is_here = outer is not None and outer.engine != "hivemind" and outer.rendezvous is None
    if outer is None or not is_here or not any(map(is_elsewhere, loaded.config.clusters)):
        yield loaded
        return
    listen, public = meeting_place(loaded)
    where = loaded.where("outer.public", "outer")
    host, port = split_address(listen, where)
    with _listening(host, port, where) as opened:
        address = f"{(public or listen).rpartition(':')[0]}:{opened}"
        update = {"rendezvous": address, "public": None}
        config = loaded.config.model_copy(update={"outer": outer.model_copy(update=update)})
        yield replace(loaded, config=config)


@contextmanager
def _listening(host: str, port: int, where: str) -> Iterator[int]:
    """Let whoever comes in; the port. Where somebody listens already it is the rendezvous."""
    try:
        server = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(
                f"the rendezvous cannot listen at {host} port {port}: {error.strerror or error}",
                where=where,
                fix="outer.public: HOST:PORT, with an address that leads here and a port from "
                "1024 on",
                id="rendezvous.address",
            ) from None
        yield port
        return
    threading.Thread(target=_let_in, args=(server,), daemon=True).start()
    try:
        yield int(server.getsockname()[1])
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        server.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _let_in(server: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            server.accept()[0].close()


def try_rendezvous(course: Course) -> None:
    """The head of the cluster, whose rank 0 speaks with the others, dials the rendezvous."""
    config = course.subject.config
    outer = config.diloco if config is not None else None
    if outer is None or outer.rendezvous is None or not course.panel.places:
        return
    head = course.panel.names[0]
    host, port = split_address(outer.rendezvous, "outer.rendezvous")
    args = {"address": host, "port": port, "timeout_s": _CONNECT_S}
    asked = course.panel.ask("dial", lambda _: args, timeout_s=QUICK_S, only=[head])
    if (answer := asked.answers("net.rendezvous").get(head)) is not None:
        course.panel.findings.append(judge_rendezvous(head, outer, answer))


def judge_rendezvous(head: str, outer: DiLoCoConfig, answer: dict[str, Any]) -> Finding:
    """What dialling it has shown.

    Args:
        head: who has dialled.
        outer: the section of the run file, with the address.
        answer: of the operation `dial`.
    """
    address, state = outer.rendezvous or "", str(answer["state"])
    if state == "ok":
        taken = f"{answer['seconds'] * 1e3:.0f} ms"
        text = f"it reaches the rendezvous at {address}"
        return Finding("net.rendezvous", "ok", head, text, measured=taken)
    host, _, port = address.rpartition(":")
    is_here = host.strip("[]") in own_addresses()
    place = "this machine" if is_here else host
    open_it = f"open port {port} on {place} for it, such as sudo ufw allow {port}/tcp"
    if state == "refused":
        why = "nothing listens there, or a firewall refuses"
        fix = f"is it running (`isles rendezvous`)? {open_it}"
    elif state == "dropped":
        why = f"no answer within {_CONNECT_S:.0f} s: packets are dropped, as by a firewall"
        fix = open_it
    else:
        why, fix = state, f"is {host} its name or address, and is there a way to it?"
    if outer.engine == "hub":
        fix += "; or name an address that it reaches: outer.public, or a rendezvous elsewhere"
    text = f"it does not reach the rendezvous at {address}: {why}"
    return Finding("net.rendezvous", "error", head, text, measured=state, fix=fix)
