"""Clock, events, links and costs of a simulated run. `exchange.py` has the events' actions.

Events are data: a time, a name and a member. `Simulation` has the table of their actions.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from isles.plan.simulate.fleet import FleetConfig
from isles.plan.simulate.line import Flow, Line
from isles.plan.simulate.member import Member, SharedMachine, State
from isles.plan.simulate.rounds import Hub
from isles.plan.simulate.setting import HUB_GIVES, HUB_TAKES, ON_THE_WIRE, SimulationSettings


class Core:
    """Clock, events, links and the costs of work.

    Args:
        is_batched: whether equal clusters are simulated together.
    """

    def __init__(
        self,
        fleet: FleetConfig,
        setting: SimulationSettings,
        *,
        seed: int,
        marks: Sequence[int],
        is_batched: bool,
    ) -> None:
        self.fleet, self.setting, self.is_batched = fleet, setting, is_batched
        self.now = 0.0
        self.chance = random.Random(seed)
        hub = fleet.hub
        self.hub = Hub(setting)
        self.line_in = Line(min(hub.downlink, HUB_TAKES * hub.cpu))
        self.line_out = Line(min(hub.uplink, HUB_GIVES * hub.cpu))
        self.hub_costs = setting.costs.scaled(hub.cpu)
        self.marks = sorted(marks)
        self.marked: dict[tuple[str, int], tuple[float, float]] = {}
        self.calls: dict[str, Callable[..., None]] = {
            "member": self._fire,
            "line": self._line_event,
        }
        """Action of each event, by its name."""
        self.incidents = [each for each in fleet.incidents if each.round is not None]
        """Incidents that start at the end of a round and have not started yet."""
        self.has_somebody_left = False
        """True if a member has ended or left since the last check for the end of the run."""
        self._events: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._line_ends = {self.line_in: math.inf, self.line_out: math.inf}
        self.num_events = 0

    # Events.

    def push(self, when: float, name: str, *args: object) -> None:
        heapq.heappush(self._events, (max(when, self.now), next(self._numbers), name, args))

    def later(self, member: Member, when: float, key: str, *args: object) -> None:
        """Schedule an event of a member. The same key again replaces the event.

        Args:
            key: name of the event, with a number after it if there are several.
        """
        member.pending[key] = when, args
        self.push(when, "member", member, key, when)

    def _fire(self, member: Member, key: str, when: float) -> None:
        found = member.pending.get(key)
        if found is not None and found[0] == when:
            del member.pending[key]
            self.calls[key.partition(":")[0]](member, *found[1])

    def play(self, until: float, is_over: Callable[[], bool]) -> None:
        """Run all events before a time."""
        while self._events and not is_over():
            when, _, name, args = heapq.heappop(self._events)
            if when > until:
                self.now = until
                return
            self.now = when
            self.num_events += 1
            self.calls[name](*args)

    # Links.

    def flow(
        self, line: Line, size: float, limit: float, count: int, done: Callable[[], None]
    ) -> Flow:
        """Start a transfer of `size` bytes of a file."""
        flow = Flow(limit, count, done)
        line.add(self.now, size * ON_THE_WIRE, flow)
        self.line_changed(line)
        return flow

    def cut_flow(self, line: Line, flow: Flow) -> float:
        """Stop a transfer. Returns the bytes of the file that are left."""
        left = line.remove(self.now, flow)
        self.line_changed(line)
        return left / ON_THE_WIRE

    def line_changed(self, line: Line) -> None:
        when = line.next_end()
        self._line_ends[line] = when
        if when < math.inf:
            self.push(when, "line", line, when)

    def _line_event(self, line: Line, when: float) -> None:
        if self._line_ends[line] != when:
            return
        done = line.finished(self.now)
        self.line_changed(line)
        for flow in done:
            flow.done()

    # Costs.

    def apply_s(self, member: Member, outer_step: int) -> float:
        """Seconds to decode an average, run the outer optimizer and hash the outer parameters."""
        numbers = self.setting.fragments[outer_step % self.setting.num_fragments]
        parts = 1
        if self.setting.codec.kind == "topk":
            parts = self.hub.kept.get(outer_step, 1)
        costs = member.group.costs
        return parts * numbers / costs.apply + 4 * numbers / costs.hash

    def copy_s(self, member: Member, outer_step: int) -> float:
        """Seconds to copy weights to or from the engine."""
        numbers = self.setting.fragments[outer_step % self.setting.num_fragments]
        return numbers / member.group.costs.copy

    def average_s(self, outer_step: int, num_parts: int) -> float:
        """Seconds of averaging at the hub until the average is on disk."""
        setting, costs = self.setting, self.hub_costs
        fragment = outer_step % setting.num_fragments
        numbers = setting.fragments[fragment]
        encode = 0.0 if setting.codec.kind == "topk" else numbers / costs.encode
        written = setting.average_bytes(fragment, num_parts) / costs.hash + 3 * costs.fsync_s
        return num_parts * numbers / costs.average + encode + written

    # Members.

    def settle(self, member: Member) -> None:
        """Update a member's steps to the present time."""
        if member.state == "compute":
            before = member.pos
            member.pos += (self.now - member.at) * member.rate
            member.group.steps_done += (member.pos - before) * member.count
        member.at = self.now

    def set_state(self, member: Member, state: State) -> None:
        """Change a member's state from now on."""
        self.settle(member)
        before, group = member.state, member.group
        if before != "done":
            if before == "wait":
                self._account_wait(member)
            else:
                group.add(before, (self.now - member.since) * member.count)
        if member.spans is not None and self.now > member.since:
            member.spans.append((before, member.since, self.now))
        member.state, member.since = state, self.now
        if member.machine is not None and "compute" in (before, state) and before != state:
            self._share_machine(member.machine)

    def _account_wait(self, member: Member) -> None:
        # The share of the wait that would remain if all contributed at the same time is for the
        # link and the hub.
        waited_s, group = self.now - member.since, member.group
        outer_step, begun = member.wait_for, self.now
        current = None if outer_step is None else self.hub.rounds.get(outer_step)
        if outer_step is not None and outer_step < len(self.hub.committed):
            begun = self.hub.committed[outer_step].last_begun
        elif current is not None and current.is_closed:
            begun = current.last_begun
        others_s = min(max(0.0, begun - member.wait_since), waited_s)
        group.add("others", others_s * member.count)
        group.add("transfer", (waited_s - others_s) * member.count)

    def _share_machine(self, machine: SharedMachine) -> None:
        active = [m for m in machine.members if m.state == "compute"]
        ranks = sum(m.group.config.ranks * m.count for m in active)
        share = min(1.0, machine.cores / ranks) if ranks else 1.0
        for member in active:
            self.settle(member)
            member.rate = share / member.group.step_s
            if "wake" in member.pending:
                self.wake_at(member, *member.pending["wake"][1])

    def wake_at(self, member: Member, goal: int) -> None:
        """Wake a member after this inner step."""
        self.settle(member)
        left = max(0.0, goal - member.pos)
        self.later(member, self.now + left / member.rate, "wake", goal)
