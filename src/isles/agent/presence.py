"""Who of a run's nodes is there, on record: nodes.json and node-K.json on the head."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from isles.run.fleet import Fleet
from isles.run.paths import Attempt
from isles.run.records import write_record
from isles.agent.server import RendezvousServer

_EVERY_S = 5.0


class Presence:
    """Keeps the records of the nodes: at every change, and every few seconds."""

    def __init__(self, attempt: Attempt, fleet: Fleet, rendezvous: RendezvousServer) -> None:
        self._attempt = attempt
        self._fleet = fleet
        self._rendezvous = rendezvous
        self._noted: list[dict[str, Any]] = []
        self._noted_at = 0.0

    def note(self, places: dict[int, tuple[int, int]], *, now: bool = False) -> None:
        """Write what has changed.

        Args:
            places: first rank and number of ranks of the nodes that train.
            now: also if nothing has.
        """
        nodes = [self._node(node, places) for node in range(len(self._fleet.nodes))]
        is_late = time.monotonic() - self._noted_at > _EVERY_S
        if nodes == self._noted and not is_late and not now:
            return
        old = {node["node"]: node for node in self._noted}
        with suppress(OSError):  # a full disk: the run itself finds that out
            for node in nodes:
                if node.get("pid") and node != old.get(node["node"]):
                    write_record(self._attempt.node_record(node["node"]), node, durable=False)
            peers = self._rendezvous.peers()
            heard = {node: time.time() - peer.silence.seconds for node, peer in peers.items()}
            full = [{**node, "heard_at": heard.get(node["node"])} for node in nodes]
            record = {"at": time.time(), "launcher": self._fleet.launcher, "nodes": full}
            write_record(self._attempt.nodes, record, durable=False)
            self._noted, self._noted_at = nodes, time.monotonic()

    def _node(self, number: int, places: dict[int, tuple[int, int]]) -> dict[str, Any]:
        place, peer = self._fleet.nodes[number], self._rendezvous.peers().get(number)
        first, count = places.get(number, (None, place.nproc))
        node: dict[str, Any] = {
            "node": number,
            "name": place.name,
            "address": place.address,
            "ssh": place.ssh,
            "first_rank": first,
            "ranks": count,
            "state": "missing",
            "why": "",
        }
        if peer is not None:
            state = "lost" if peer.lost else "ended" if peer.is_done else "there"
            node |= {**peer.process.record(), "state": state, "why": peer.lost}
        return node
