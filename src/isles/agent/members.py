"""The nodes that train together now: their ranks, their reports, and which of them are lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from isles.agent.server import NodeConnection, RendezvousServer
from isles.run.nodes import Fleet
from isles.run.outcome import ErrorRecord, agent_error
from isles.run.paths import Attempt, RunDir
from isles.run.restarts import Restart, current_restart, record_restart

_QUIET_S = 2.5
"""A node sends a message every second."""


class Members:
    """The nodes of the present restart."""

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        all_nodes: Fleet,
        server: RendezvousServer,
        max_restarts: int,
    ) -> None:
        self._max_restarts = max_restarts
        self._run_dir = run_dir
        self._attempt = attempt
        self._all = all_nodes
        self._server = server
        self._agents: dict[int, str] = {}
        self.restart = current_restart(attempt)  # a job that was queued again continues the count
        self.ranks: dict[int, tuple[int, int]] = {}
        """First rank and number of ranks of each member."""

    @property
    def nodes(self) -> list[int]:
        """Numbers of the members, in the order of their ranks; empty before the first start."""
        return sorted(self._agents)

    @property
    def world_size(self) -> int:
        return sum(count for _, count in self.ranks.values())

    def begin(self, nodes: list[int]) -> None:
        """Make these nodes the members, for another start of the ranks."""
        self.restart += bool(self._agents)
        peers = self._server.peers()
        self._agents = {node: peers[node].agent for node in nodes}
        self.ranks, first = {}, 0
        for node in nodes:
            self.ranks[node] = (first, self._all[node].nproc)
            first += self._all[node].nproc

    def connections(self) -> dict[int, NodeConnection]:
        """Connections of members that are not lost, by node. A node with a new agent does not
        count."""
        peers = self._server.peers()
        return {
            node: peer
            for node, agent in self._agents.items()
            if (peer := peers.get(node)) is not None and not peer.lost and peer.agent == agent
        }

    def hosts(self) -> list[str]:
        """The host of each rank."""
        peers = self._server.peers()
        return [peers[node].process.host for node, (_, n) in self.ranks.items() for _ in range(n)]

    def lost(self) -> list[int]:
        connected = self.connections()
        return [node for node in self._agents if node not in connected]

    def newcomers(self) -> list[int]:
        """Nodes that are connected, not members, and ready to start ranks immediately."""
        peers = self._server.peers()
        others = (node for node in self._server.connected() if node not in self._agents)
        return [node for node in others if peers[node].report.get("state") == "idle"]

    def reports(self) -> dict[int, dict[str, Any]]:
        """Reports of the members about the ranks of this restart, by node."""
        reports = {node: peer.report for node, peer in self.connections().items()}
        return {n: report for n, report in reports.items() if report.get("restart") == self.restart}

    def busy(self) -> list[NodeConnection]:
        """Members that have not ended their ranks."""
        return [p for p in self.connections().values() if p.report.get("state") != "idle"]

    def is_anybody_quiet(self) -> bool:
        """True if a member is silent, but not yet long enough to be declared lost."""
        peers = self.connections().values()
        return any(peer.wire is None or peer.last_seen.seconds > _QUIET_S for peer in peers)

    def labels(self, nodes: Iterable[int]) -> str:
        return ", ".join(self._server.label(node) for node in nodes)

    def missing(self, connected: list[int]) -> str:
        """The nodes that are not connected, for messages."""
        return self.labels(n.node for n in self._all if n.node not in connected)

    def lost_error(self, node: int) -> ErrorRecord:
        peer, place = self._server.peers().get(node), self._server.place(node)
        why = (peer.lost if peer is not None else "") or "it is disconnected"
        fix = (
            f"check that {place.name} is switched on and its network is up, and read the end of "
            f"its agent's log there: attempts/{self._attempt.path.name}/node-{node}.log"
        )
        found = agent_error(f"{self._server.label(node)} is lost: {why}", fix, id="host.lost")
        return {**found, "host": place.name, "where": f"host {place.name}"}

    def changed(self, now: Iterable[int]) -> Restart:
        """Record that the ranks restart because nodes have joined or left; `now`: the new
        members."""
        before, after, connected = set(self._agents), set(now), self.connections()
        # A node that was lost and has already rejoined counts as new: its old ranks are gone.
        gone = sorted({*(before - after), *(n for n in before & after if n not in connected)})
        come = sorted(after - before)
        words = [f"{self.labels(gone)} {'is' if len(gone) == 1 else 'are'} gone"] if gone else []
        words += (
            [f"{self.labels(come)} {'has' if len(come) == 1 else 'have'} joined"] if come else []
        )
        why = " and ".join(words) or "the nodes have reconnected"
        number, limit = self.restart + 1, self._max_restarts
        return record_restart(
            self._run_dir, self._attempt, number, why, max_restarts=limit, is_planned=not gone
        )
