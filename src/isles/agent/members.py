"""The nodes that train together now: their ranks, their reports, and which of them are lost."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from isles.agent.server import NodeConnection, RendezvousServer, say
from isles.run.fleet import Fleet
from isles.run.outcome import ErrorRecord, agent_error
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_record
from isles.run.restarts import (
    Restart,
    current_restart,
    list_restarts,
    newest_step,
    read_last_step,
    write_restart,
)

Reports = dict[int, dict[str, Any]]

_QUIET_S = 2.5
"""A node says something every second."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the run file says of losses and waits.

    Args:
        max_restarts: how often ranks that were lost are started again.
        save_timeout_s: longest wait for ranks that save before they hand over.
        needs_head: whether the run cannot go on without the first node, where the coordinator is.
        is_script: whether the ranks are those of a user's own script.
    """

    max_restarts: int
    save_timeout_s: float
    needs_head: bool
    is_script: bool = False


class Members:
    """Who has begun the present restart.

    Args:
        run_dir: the run, on this host.
        attempt: this start of it.
        fleet: all its nodes.
        rendezvous: who is there.
        max_restarts: of the run file.
    """

    def __init__(
        self,
        run_dir: RunDir,
        attempt: Attempt,
        fleet: Fleet,
        rendezvous: RendezvousServer,
        max_restarts: int,
    ) -> None:
        self._max_restarts = max_restarts
        self._run_dir = run_dir
        self._attempt = attempt
        self._fleet = fleet
        self._rendezvous = rendezvous
        self._agents: dict[int, str] = {}
        self.restart = current_restart(attempt)  # a job that was queued again goes on counting
        self.ranks: dict[int, tuple[int, int]] = {}
        """First rank and number of ranks of each."""

    @property
    def nodes(self) -> list[int]:
        """Their numbers, which are in the order of their ranks; none before the first start."""
        return sorted(self._agents)

    @property
    def world_size(self) -> int:
        """Ranks on all of them."""
        return sum(count for _, count in self.ranks.values())

    def begin(self, nodes: list[int]) -> None:
        """These are the members from now on."""
        self.restart += bool(self._agents)
        peers = self._rendezvous.peers()
        self._agents = {node: peers[node].agent for node in nodes}
        self.ranks, first = {}, 0
        for node in nodes:
            nproc = self._fleet.nodes[node].nproc
            self.ranks[node] = (first, nproc)
            first += nproc
        record = {"restart": self.restart, "nodes": nodes, "world_size": first}
        try:
            write_record(self._attempt.path / "members.json", record)
        except OSError as error:
            say(f"members.json of {self._attempt.path} could not be written: {error.strerror}")

    def is_there(self, node: int) -> bool:
        """Whether a member is the one that has begun, and not lost."""
        peer = self._rendezvous.peers().get(node)
        return peer is not None and not peer.lost and peer.agent == self._agents[node]

    def lost(self) -> list[int]:
        """Members that are gone."""
        return [node for node in self._agents if not self.is_there(node)]

    def newcomers(self) -> list[int]:
        """Nodes that are there, no members, and ready to start ranks at once."""
        peers = self._rendezvous.peers()
        there = (node for node in self._rendezvous.there() if node not in self._agents)
        return [node for node in there if peers[node].report.get("state") == "idle"]

    def reports(self) -> Reports:
        """What the members have said of the ranks of this restart."""
        said = {peer.node: peer.report for peer in self._peers()}
        return {node: r for node, r in said.items() if r.get("restart") == self.restart}

    def said(self) -> list[tuple[dict[str, Any], NodeConnection]]:
        """The same, with who has said it."""
        peers = self._rendezvous.peers()
        return [(report, peers[node]) for node, report in self.reports().items()]

    def busy(self) -> list[NodeConnection]:
        """Members that have not ended their ranks."""
        return [peer for peer in self._peers() if peer.report.get("state") != "idle"]

    def is_anybody_quiet(self) -> bool:
        """Whether a member may be lost, and it is too early to say."""
        return any(s.wire is None or s.silence.seconds > _QUIET_S for s in self._peers())

    def labels(self, nodes: Iterable[int]) -> str:
        """Nodes as messages call them."""
        return ", ".join(self._rendezvous.label(node) for node in nodes)

    def missing(self, there: list[int]) -> str:
        """The nodes that are not there."""
        return self.labels(n.node for n in self._fleet.nodes if n.node not in there)

    def waiting_text(self, there: list[int], left_s: float) -> str:
        """Whom the others wait for."""
        text = (
            f"waiting for {self.missing(there)}: {len(there)} of {len(self._fleet.nodes)} nodes "
            f"are there; {left_s:.0f} s left"
        )
        refused = self._rendezvous.refused
        return f"{text}; refused: {refused.what}" if refused is not None else text

    def late_text(self, there: list[int]) -> str:
        """Whom they wait for no longer."""
        text = (
            f"{self.missing(there)} did not come within {self._fleet.start_timeout_s:.0f} s; "
            f"there: {self.labels(there) or 'none'}"
        )
        refused = self._rendezvous.refused
        return f"{text}; refused: {refused.what}" if refused is not None else text

    def lost_culprit(self, node: int) -> ErrorRecord:
        """The error record of a node that is lost."""
        peer, place = self._rendezvous.peers().get(node), self._fleet.nodes[node]
        why = (peer.lost if peer is not None else "") or "it is gone"
        fix = (
            f"see whether {place.name} is switched on and its network is up, and the last words "
            f"of its agent there: attempts/{self._attempt.path.name}/node-{node}.log"
        )
        found = agent_error(f"{self._rendezvous.label(node)} is lost: {why}", fix, id="host.lost")
        return {**found, "host": place.name, "where": f"host {place.name}"}

    def changed(self, now: Iterable[int]) -> Restart:
        """Put on record that the ranks start again because nodes have come or gone.

        Args:
            now: who goes on.
        """
        before, after = set(self._agents), set(now)
        # A node that was lost and is back already is another one: it has nothing of the old ranks.
        gone = sorted({*(before - after), *(n for n in before & after if not self.is_there(n))})
        come = sorted(after - before)
        words = [f"{self.labels(gone)} {'is' if len(gone) == 1 else 'are'} gone"] if gone else []
        words += [f"{self.labels(come)} {'has' if len(come) == 1 else 'have'} come"] if come else []
        restart = Restart(
            number=self.restart + 1,
            at=time.time(),
            decision="restart",
            culprit=None,
            why=" and ".join(words) or "the nodes have met again",
            reached=read_last_step(self._attempt, self.restart),
            saved=newest_step(self._run_dir),
            count=sum(entry.is_counted for entry in list_restarts(self._attempt)),
            max_restarts=self._max_restarts,
            is_counted=False,
        )
        return write_restart(self._attempt, restart)

    def _peers(self) -> list[NodeConnection]:
        peers = self._rendezvous.peers()
        return [peers[node] for node in self._agents if self.is_there(node)]
