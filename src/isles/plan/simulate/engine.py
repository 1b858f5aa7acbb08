"""Simulation of a fleet from the first step to the last, with random events and incidents. It
simulates thousands of clusters as a few members."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from isles.plan.simulate.absence import Absence
from isles.plan.simulate.core import Core
from isles.plan.simulate.exchange import Exchange
from isles.plan.simulate.fleet import FleetConfig, GroupConfig, IncidentConfig
from isles.plan.simulate.member import GroupState, Member, SharedMachine
from isles.plan.simulate.result import Result, make_result
from isles.plan.simulate.setting import (
    CHUNK_BYTES,
    CHUNKS_AT_ONCE,
    RECONNECT_S,
    SimulationSettings,
    auto_sync_every,
)

MOST_SINGLE = 256
"""Largest fleet to simulate one by one. In larger fleets, equal clusters are merged."""
_SPEEDS = 9
"""Number of different speeds that represent a spread."""
_ROWS = 12
"""Number of members in the timeline."""
_AT_WORK = {"compute", "outer", "wait"}


def simulate(
    fleet: FleetConfig,
    setting: SimulationSettings,
    *,
    hours: float | None = None,
    seed: int = 0,
    marks: Sequence[int] = (),
    rounds: int | None = None,
    is_batched: bool | None = None,
) -> Result:
    """Simulate a run.

    Args:
        hours: limit of the simulated time. None: until all inner steps are done.
        seed: the same seed gives the same run.
        marks: inner steps whose end times are recorded.
        rounds: limit of outer steps.
        is_batched: whether equal clusters are simulated together. None: in large fleets.
    """
    if is_batched is None:
        is_batched = fleet.num_clusters > MOST_SINGLE
    core = Core(fleet, settled(fleet, setting), seed=seed, marks=marks, is_batched=is_batched)
    return Simulation(core).run(math.inf if hours is None else 3600.0 * hours, rounds)


def settled(fleet: FleetConfig, setting: SimulationSettings) -> SimulationSettings:
    """The setting with `sync_every: auto` replaced by a number."""
    if setting.sync_every:
        return setting
    num, hub = fleet.num_clusters, fleet.hub
    wait_s, step_s = [], []
    for config in fleet.clusters:
        up = min(link_rate(config.uplink, config, setting), hub.downlink / num)
        down = min(link_rate(config.downlink, config, setting), hub.uplink / num)
        fragments = range(setting.num_fragments)
        sent = sum(setting.contribution_bytes(fragment) for fragment in fragments)
        received = sum(setting.average_bytes(fragment, num) for fragment in fragments)
        wait_s.append(1.05 * (sent / up + received / down))
        step_s.append(step_seconds(config, setting))
    every = auto_sync_every(wait_s, step_s, setting.max_sync_overhead)
    return replace(setting, sync_every=every, warmup_rounds=0)


def step_seconds(config: GroupConfig, setting: SimulationSettings) -> float:
    """Seconds of an inner step."""
    if config.step is not None:
        return config.step
    assert config.tokens_per_s is not None
    return setting.tokens_per_step / config.tokens_per_s


def link_rate(rate: float, config: GroupConfig, setting: SimulationSettings) -> float:
    """Bytes/s of one direction of a cluster's link.

    Four chunks of one MiB travel in parallel, and each is acknowledged before the next chunk of
    its connection. So a fast link with a high latency is not full.
    """
    rate = min(rate, setting.max_rate)
    trip_s = 2 * config.latency
    return min(rate, CHUNKS_AT_ONCE * CHUNK_BYTES / (trip_s + CHUNK_BYTES / rate))


class Simulation:
    """One simulated run."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._exchange = exchange = Exchange(core)
        self._absence = absence = Absence(core, exchange)
        self._groups: list[GroupState] = []
        self._machines = {name: SharedMachine(cores) for name, cores in core.fleet.machines.items()}
        core.calls |= {
            # Events of a cluster.
            "begin": self._begin,
            "wake": exchange.boundary,
            "outer": exchange.go_on,
            "hand": exchange.hand_in,
            "complete": exchange.complete,
            "counted": self._counted,
            "closing": exchange.closing,
            "fetched": absence.fetched,
            "deadline": exchange.give_up,
            "merge": self._try_merge,
            # Events of an absent or joining cluster.
            "drop": absence.drop,
            "back": absence.back,
            "caught up": absence.caught_up,
            "adopt": absence.adopt,
            "mended": absence.heard,
            "heard": self._heard_hub,
            "thaw": self._thaw,
            # Events of the hub.
            "look": exchange.look,
            "average": exchange.average,
            "commit": exchange.commit,
            "serve state": absence.serve_state,
            "hub is back": self._hub_is_back,
            # Random events, and incidents.
            "chance": self._chance,
            "time is up": self._time_is_up,
            "befall": self._befall,
        }
        for config in core.fleet.clusters:
            self._begin_group(config)
        for incident in core.fleet.incidents:
            if incident.at is not None:
                core.push(incident.at, "befall", incident)

    def run(self, until: float, rounds: int | None) -> Result:
        """Simulate to the end of the inner steps, to a time, or to a number of outer steps."""
        core = self._core
        core.play(until, lambda: self._is_over(rounds))
        for member in [member for group in self._groups for member in group.members]:
            if member.state != "done":
                core.set_state(member, member.state)  # count its time up to now
        return make_result(core, self._groups)

    def _is_over(self, rounds: int | None) -> bool:
        core = self._core
        if rounds is not None and core.hub.next >= rounds:
            return True
        if not core.has_somebody_left:
            return False
        # The run is over if every present member has ended.
        core.has_somebody_left = False
        states = [member.state for group in self._groups for member in group.members]
        return "done" in states and {*states} <= {"done", "away", "queue"}

    # Building the fleet.

    def _begin_group(self, config: GroupConfig) -> None:
        core, setting = self._core, self._core.setting
        step_s = step_seconds(config, setting)
        up = link_rate(config.uplink, config, setting)
        down = link_rate(config.downlink, config, setting)
        counts = _speeds(config) if core.is_batched else [(1.0, 1)] * config.count
        if not core.is_batched and config.spread:
            quantiles = statistics.NormalDist(1.0, config.spread)
            parts = [(index + 0.5) / config.count for index in range(config.count)]
            counts = [(quantiles.inv_cdf(part), 1) for part in parts]
        costs = setting.costs.scaled(config.cpu)
        by_speed: dict[float, GroupState] = {}
        for speed, count in counts:
            group = by_speed.get(speed)
            if group is None:
                group = by_speed[speed] = GroupState(config, step_s / speed, up, down, costs)
                self._groups.append(group)
            if config.joins is not None:
                for _ in range(count):
                    member = self._new_member(group, 1)
                    when = core.chance.expovariate(1 / config.joins)
                    core.later(member, when, "back")
            else:
                core.push(0.0, "begin", self._new_member(group, count))
        for group in by_speed.values():
            self._begin_chances(group)

    def _new_member(self, group: GroupState, count: int) -> Member:
        member = Member(group, count, self._core.setting.num_fragments)
        group.members.append(member)
        if sum(len(each.members) for each in self._groups) <= _ROWS:
            member.keep_spans()
        if group.config.machine is not None:
            member.machine = self._machines[group.config.machine]
            member.machine.members.append(member)
        return member

    def _begin(self, member: Member) -> None:
        # Present from the start.
        self._core.hub.admit(member)
        self._exchange.compute(member)

    def _begin_chances(self, group: GroupState) -> None:
        config, core = group.config, self._core
        number = sum(member.count for member in group.members)
        for kind, chances in (("failure", config.failures), ("leaving", config.leaves)):
            if chances is not None:
                self._next_chance(group, number, chances.every, kind)
        if config.time_limit is not None:
            for member in list(group.members):
                for _ in range(member.count):
                    core.push(core.chance.uniform(0.0, config.time_limit), "time is up", member)

    # Random events. Draw among all clusters of the group; an absent cluster is skipped.

    def _next_chance(self, group: GroupState, number: int, every_s: float, kind: str) -> None:
        when = self._core.now + self._core.chance.expovariate(number / every_s)
        self._core.push(when, "chance", group, number, every_s, kind)

    def _chance(self, group: GroupState, number: int, every_s: float, kind: str) -> None:
        chance, config = self._core.chance, group.config
        place = chance.randrange(number)
        for member in group.members:
            place -= member.count
            if place < 0:
                break
        if member.state in _AT_WORK and kind == "failure" and config.failures is not None:
            self._absence.kill(self._single(member), config.failures.lasts)
        elif member.state in _AT_WORK and config.leaves is not None:
            away_s = chance.expovariate(1 / config.leaves.away)
            self._absence.leave(self._single(member), "away", away_s)
        self._next_chance(group, number, every_s, kind)

    def _time_is_up(self, member: Member) -> None:
        # The time limit of a job is reached.
        group = member.group
        if member not in group.members:  # it is merged with others by now
            member = max(group.members, key=lambda each: each.count)
        if member.state not in _AT_WORK:
            return
        assert group.config.queue_wait is not None
        wait_s = self._core.chance.expovariate(1 / group.config.queue_wait)
        self._absence.leave(self._single(member), "queue", wait_s)

    # Separating one cluster from a member, and merging it again.

    def _single(self, member: Member) -> Member:
        """Separate one of a member's clusters as a new member."""
        if member.count == 1:
            return member
        core, exchange = self._core, self._exchange
        core.set_state(member, member.state)  # count the time up to now for all
        one = member.copy_of_one()
        member.count -= 1
        member.group.members.append(one)
        core.hub.split(member, one)
        if member.sending is not None:
            outer_step = member.to_send[0]
            size = core.setting.contribution_bytes(outer_step % core.setting.num_fragments)
            done = partial(exchange.sent, one, outer_step, size)
            one.sending = core.line_in.take_one(core.now, member.sending, done)
        if member.fetching is not None:
            done = partial(exchange.got, one, member.delivered, 0.0)
            one.fetching = core.line_out.take_one(core.now, member.fetching, done)
        for key, (when, args) in member.pending.items():
            core.later(one, when, key, *args)
        return one

    def _counted(self, member: Member, outer_step: int) -> None:
        self._exchange.counted(member, outer_step)
        if self._core.is_batched and member.count == 1 and member.has_taken_part:
            self._try_merge(member)

    def _try_merge(self, member: Member) -> None:
        # Merge a cluster that takes part in averages again and is about as far as its group.
        group = member.group
        main = max(group.members, key=lambda each: each.count)
        is_quiet = not (member.is_sending or member.fetching or "fetched" in member.pending)
        same = (
            main is not member
            and member in group.members
            and is_quiet
            and {member.state, main.state} <= _AT_WORK
            and member.version == main.version
            and member.delivered == main.delivered
            and member.sent.keys() == main.sent.keys()
        )
        if not same:
            return
        apart = (member.steps - member.contributed_at) - (main.steps - main.contributed_at)
        if abs(apart) > self._core.setting.delay + 2:
            return
        self._core.set_state(main, main.state)
        self._core.set_state(member, member.state)
        main.count += 1
        group.members.remove(member)
        self._core.hub.merge(member, main)
        member.pending.clear()

    # Incidents.

    def _befall(self, incident: IncidentConfig) -> None:
        core, absence, hub = self._core, self._absence, self._core.hub
        if incident.kind == "hub":
            hub.is_away = True
            for member in list(hub.living):
                absence.stop_transfers(member)
            core.push(core.now + incident.lasts, "hub is back")
            return
        group = next(g for g in self._groups if g.config.name == incident.cluster)
        member = self._single(max(group.members, key=lambda each: each.count))
        if member.state in ("down", "joining", "queue", "away", "done"):
            return
        if incident.kind == "killed":
            absence.kill(member, incident.lasts)
            return
        if incident.kind in ("cut", "frozen"):
            absence.silence(member)
        if incident.kind == "cut":
            core.later(member, core.now + incident.lasts, "mended")
        else:
            self._freeze(member, incident.lasts)

    def _freeze(self, member: Member, lasts_s: float) -> None:
        # No steps now. Pending work continues afterwards.
        core = self._core
        member.stopped_in = member.state
        core.set_state(member, "down")
        for key in ("outer", "deadline"):
            if key in member.pending:
                when, args = member.pending[key]
                core.later(member, when + lasts_s, key, *args)
        member.pending.pop("wake", None)
        core.later(member, core.now + lasts_s, "thaw")

    def _thaw(self, member: Member) -> None:
        state, member.stopped_in = member.stopped_in, None
        assert state is not None
        self._core.set_state(member, state)
        if not member.is_connected:
            self._absence.heard(member)
        if state == "compute":
            self._exchange.wake(member)
        elif state == "wait" and member.delivered > member.version:
            self._exchange.end_wait(member)

    def _hub_is_back(self) -> None:
        core = self._core
        core.hub.is_away = False
        for member in list(core.hub.living):
            core.later(member, core.now + RECONNECT_S / 2, "heard")
        core.push(core.now + RECONNECT_S, "look")

    def _heard_hub(self, member: Member) -> None:
        if member.is_connected:
            self._absence.heard(member)


def _speeds(config: GroupConfig) -> list[tuple[float, int]]:
    # Speeds that represent a normal distribution, with the number of clusters of each.
    if not config.spread or config.count < 2:
        return [(1.0, config.count)]
    kinds = min(_SPEEDS, config.count)
    spread = statistics.NormalDist(1.0, config.spread)
    base, more = divmod(config.count, kinds)
    return [
        (max(0.05, spread.inv_cdf((index + 0.5) / kinds)), base + (index < more))
        for index in range(kinds)
    ]
