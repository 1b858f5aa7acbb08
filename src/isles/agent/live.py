"""live.json of an attempt: the last samples of all nodes, for commands that watch the run."""

from __future__ import annotations

import json
import time
from typing import Any

from isles.agent.protocol import log_line
from isles.agent.server import NodeConnection, RendezvousServer
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import Attempt
from isles.run.records import write_text_atomic

_EVERY_S = 2.0
_NOTHING: dict[str, Any] = {"at": None, "host": {}, "gpus": [], "sums": {}, "ranks": {}}
"""Sample of a node that has sent no sample yet."""


class LiveRecord:
    """Writes live.json. An error costs only the record, never the run."""

    def __init__(self, attempt: Attempt, nodes: Fleet, server: RendezvousServer) -> None:
        self._attempt = attempt
        self._nodes = nodes
        self._server = server
        self._written_at = 0.0
        self._has_failed = False

    def write(self, places: dict[int, tuple[int, int]], restart: int, *, now: bool = False) -> None:
        """Write the record if the last one is two seconds old, or `now`.

        Args:
            places: first rank and number of ranks of the nodes that train.
            restart: number of the current restart of the ranks.
            now: whether to write in any case.
        """
        if not now and time.monotonic() - self._written_at < _EVERY_S:
            return
        self._written_at = time.monotonic()
        try:
            peers = self._server.peers()
            nodes = {
                each.node: self._node(each, places, peers.get(each.node)) for each in self._nodes
            }
            record = {"at": time.time(), "restart": restart, "nodes": nodes}
            text = json.dumps(record, separators=(",", ":"), allow_nan=False)
            write_text_atomic(self._attempt.live, text, durable=False)
            self._has_failed = False
        except OSError:
            pass  # a full disk or a deleted directory: the run itself detects that
        except Exception as error:  # an agent that sends invalid data must not end the run
            if not self._has_failed:
                log_line(f"{self._attempt.live.name} could not be written: {error!r:.200}")
            self._has_failed = True

    def _node(
        self, place: FleetNode, places: dict[int, tuple[int, int]], peer: NodeConnection | None
    ) -> dict[str, Any]:
        first, count = places.get(place.node, (None, place.nproc))
        node = {**_NOTHING, "skew_s": None, "heard_at": None, "state": "missing", "why": ""}
        if peer is not None:
            node |= peer.report.get("telemetry") or {}
            node |= {"state": peer.state, "why": peer.lost, "skew_s": peer.skew_s}
            node["heard_at"] = time.time() - peer.silent_s
        node |= {"name": place.name, "address": place.address}
        return {**node, "first_rank": first, "num_ranks": count}
