"""A fleet from the first step to the last: its groups, and what befalls whom by chance or for
certain; and how thousands of clusters are played as a few."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from isles.plan.simulate.absence import Absence
from isles.plan.simulate.fleet import FleetConfig, GroupConfig, IncidentConfig
from isles.plan.simulate.member import GroupState, Machine, Member, State
from isles.plan.simulate.result import Result, make_result
from isles.plan.simulate.setting import (
    CHUNK_BYTES,
    CHUNKS_AT_ONCE,
    RECONNECT_S,
    Setting,
    auto_sync_every,
)

MOST_SINGLE = 256
"""Up to so many clusters, each is simulated by itself; equal ones of a larger fleet together."""
_SPEEDS = 9
"""Different speeds that stand for a spread."""
_ROWS = 12
"""Members that the timeline shows."""


def simulate(
    fleet: FleetConfig,
    setting: Setting,
    *,
    hours: float | None = None,
    seed: int = 0,
    marks: Sequence[int] = (),
    rounds: int | None = None,
    is_batched: bool | None = None,
) -> Result:
    """Play a run.

    Args:
        hours: it ends then, if not before; None: when its inner steps are done.
        seed: the same seed gives the same run.
        marks: inner steps of whose end the times are wanted.
        rounds: it ends after so many outer steps, if not before.
        is_batched: whether equal clusters are played together; None: in large fleets.
    """
    engine = Engine(fleet, settled(fleet, setting), seed=seed, marks=marks, is_batched=is_batched)
    return engine.run(math.inf if hours is None else 3600.0 * hours, rounds)


def settled(fleet: FleetConfig, setting: Setting) -> Setting:
    """The setting with a number for `sync_every: auto`."""
    if setting.sync_every:
        return setting
    num, hub = fleet.num_clusters, fleet.hub
    wait_s, step_s = [], []
    for config in fleet.clusters:
        up = min(link_rate(config.uplink, config, setting), hub.hubs * hub.downlink / num)
        down = min(link_rate(config.downlink, config, setting), hub.hubs * hub.uplink / num)
        fragments = range(setting.num_fragments)
        sent = sum(setting.contribution_bytes(fragment) for fragment in fragments)
        received = sum(setting.average_bytes(fragment, num) for fragment in fragments)
        wait_s.append(1.05 * (sent / up + received / down))
        step_s.append(step_seconds(config, setting))
    every = auto_sync_every(wait_s, step_s, setting.max_sync_overhead)
    return setting.with_outer(sync_every=every)


def step_seconds(config: GroupConfig, setting: Setting) -> float:
    """Seconds of an inner step."""
    if config.step is not None:
        return config.step
    assert config.tokens_per_s is not None
    return setting.tokens_per_step / config.tokens_per_s


def link_rate(rate: float, config: GroupConfig, setting: Setting) -> float:
    """Bytes/s of one direction of a cluster's link.

    Four chunks of a MiB travel at a time, each is answered before the next one of its connection,
    so a link that is fast and far away is not filled.
    """
    rate = min(rate, setting.max_rate)
    trip_s = 2 * config.latency
    return min(rate, CHUNKS_AT_ONCE * CHUNK_BYTES / (trip_s + CHUNK_BYTES / rate))


class Engine(Absence):
    """One run."""

    def __init__(
        self,
        fleet: FleetConfig,
        setting: Setting,
        *,
        seed: int,
        marks: Sequence[int] = (),
        is_batched: bool | None = None,
    ) -> None:
        super().__init__(fleet, setting, seed=seed, marks=marks)
        self.groups: list[GroupState] = []
        self._machines = {name: Machine(cores) for name, cores in fleet.machines.items()}
        is_large = fleet.num_clusters > MOST_SINGLE
        self._is_batched = is_large if is_batched is None else is_batched
        self._incidents = [each for each in fleet.incidents if each.round is not None]
        self._rounds: int | None = None
        self._has_ended = False
        for config in fleet.clusters:
            self._begin_group(config)
        for incident in fleet.incidents:
            if incident.at is not None:
                self.push(incident.at, self._befall, incident)

    def run(self, until: float, rounds: int | None) -> Result:
        """Play to the end of the inner steps, to a time, or to a number of outer steps."""
        self._rounds = rounds
        self.play(until, self._is_over)
        members = [member for group in self.groups for member in group.members]
        self.account_all(members)
        return make_result(self, self.groups)

    def _is_over(self) -> bool:
        if self._rounds is not None and self.hub.next >= self._rounds:
            return True
        return self._has_ended

    def _end(self, member: Member) -> None:
        super()._end(member)
        self._look_for_end()

    def leave(self, member: Member, state: State, away_s: float) -> None:
        super().leave(member, state, away_s)
        self._look_for_end()

    def _look_for_end(self) -> None:
        # Over is a run where all have ended who are there.
        members = [member for group in self.groups for member in group.members]
        self._has_ended = any(m.state == "done" for m in members) and all(
            m.state in ("done", "away", "queue") for m in members
        )

    # The fleet.

    def _begin_group(self, config: GroupConfig) -> None:
        setting = self.setting
        step_s = step_seconds(config, setting)
        up = link_rate(config.uplink, config, setting)
        down = link_rate(config.downlink, config, setting)
        counts = _speeds(config) if self._is_batched else [(1.0, 1)] * config.count
        if not self._is_batched and config.spread:
            quantiles = statistics.NormalDist(1.0, config.spread)
            parts = [(index + 0.5) / config.count for index in range(config.count)]
            counts = [(quantiles.inv_cdf(part), 1) for part in parts]
        costs = setting.costs.scaled(config.cpu)
        by_speed: dict[float, GroupState] = {}
        for speed, count in counts:
            group = by_speed.get(speed)
            if group is None:
                group = by_speed[speed] = GroupState(config, step_s / speed, up, down, costs)
                self.groups.append(group)
            if config.joins is not None:
                for _ in range(count):
                    member = self._new_member(group, 1)
                    when = self.chance.expovariate(1 / config.joins)
                    self.later(member, when, "back", self.back)
            else:
                member = self._new_member(group, count)
                self.push(0.0, self._begin, member)
        for group in by_speed.values():
            self._begin_chances(group)

    def _new_member(self, group: GroupState, count: int) -> Member:
        member = Member(group, count, self.setting.num_fragments)
        group.members.append(member)
        if sum(len(each.members) for each in self.groups) <= _ROWS:
            member.keep_spans()
        if group.config.machine is not None:
            member.machine = self._machines[group.config.machine]
            member.machine.members.append(member)
        return member

    def _begin(self, member: Member) -> None:
        # It is there from the start.
        self.hub.admit(member)
        self.compute(member)

    def _begin_chances(self, group: GroupState) -> None:
        config = group.config
        number = sum(member.count for member in group.members)
        if config.failures is not None:
            self._next_chance(group, number, config.failures.every, self._failure)
        if config.leaves is not None:
            self._next_chance(group, number, config.leaves.every, self._leaving)
        if config.time_limit is not None:
            for member in list(group.members):
                for _ in range(member.count):
                    when = self.chance.uniform(0.0, config.time_limit)
                    self.push(when, self.time_is_up, member)

    # Chance. Whom it hits is drawn among all clusters of the group; who is not there is spared.

    def _next_chance(self, group: GroupState, number: int, every_s: float, call: object) -> None:
        when = self.now + self.chance.expovariate(number / every_s)
        self.push(when, self._chance, group, number, every_s, call)

    def _chance(self, group: GroupState, number: int, every_s: float, call: object) -> None:
        assert callable(call)
        place = self.chance.randrange(number)
        for member in group.members:
            place -= member.count
            if place < 0:
                if member.state in ("compute", "outer", "wait"):
                    call(member)
                break
        self._next_chance(group, number, every_s, call)

    def _failure(self, member: Member) -> None:
        failures = member.group.config.failures
        assert failures is not None
        self.kill(self._single(member), failures.lasts)

    def _leaving(self, member: Member) -> None:
        leaves = member.group.config.leaves
        assert leaves is not None
        self.leave(self._single(member), "away", self.chance.expovariate(1 / leaves.away))

    def time_is_up(self, member: Member) -> None:
        group = member.group
        if member not in group.members:  # it counts with others by now
            member = max(group.members, key=lambda each: each.count)
        if member.state not in ("compute", "outer", "wait"):
            return
        assert group.config.queue_wait is not None
        wait_s = self.chance.expovariate(1 / group.config.queue_wait)
        self.leave(self._single(member), "queue", wait_s)

    # One of several, and back.

    def _single(self, member: Member) -> Member:
        """One of a member's clusters as a member of its own."""
        if member.count == 1:
            return member
        self.set_state(member, member.state)  # what it did until now counts for all
        one = member.copy_of_one()
        member.count -= 1
        member.group.members.append(one)
        self.hub.split(member, one)
        if member.sending is not None:
            outer_step = member.to_send[0]
            one.sending = self.line_in.take_one(
                self.now, member.sending, lambda: self._sent_by_one(one, outer_step)
            )
        if member.fetching is not None:
            fetched = member.delivered
            one.fetching = self.line_out.take_one(
                self.now, member.fetching, lambda: self._fetched_by_one(one, fetched)
            )
        for key, (when, call, args) in member.pending.items():
            self.later(one, when, key, call, *args)
        return one

    def _sent_by_one(self, one: Member, outer_step: int) -> None:
        one.sending = None
        size = self.setting.contribution_bytes(outer_step % self.setting.num_fragments)
        wait_s = size / one.group.costs.hash + 6 * one.group.config.latency
        self.later(one, self.now + wait_s, "complete", self._complete, outer_step)

    def _fetched_by_one(self, one: Member, outer_step: int) -> None:
        one.fetching = None
        wait_s = one.group.costs.fsync_s + 5 * one.group.config.latency
        self.later(one, self.now + wait_s, "fetched", self._fetched, outer_step)

    def applied(self, member: Member, outer_step: int) -> None:
        super().applied(member, outer_step)
        if self._is_batched and member.count == 1 and member.has_taken_part:
            self.push(self.now, self._try_merge, member)

    def counted(self, member: Member, outer_step: int) -> None:
        super().counted(member, outer_step)
        if self._is_batched and member.count == 1 and member.has_taken_part:
            self._try_merge(member)

    def _try_merge(self, member: Member) -> None:
        # A cluster that is back in the averages, and about as far as others of its group.
        group = member.group
        main = max(group.members, key=lambda each: each.count)
        is_quiet = not (member.is_sending or member.fetching or "fetched" in member.pending)
        same = (
            main is not member
            and member in group.members
            and is_quiet
            and {member.state, main.state} <= {"compute", "outer", "wait"}
            and member.version == main.version
            and member.delivered == main.delivered
            and member.sent.keys() == main.sent.keys()
        )
        if not same:
            return
        apart = (member.steps - member.contributed_at) - (main.steps - main.contributed_at)
        if abs(apart) > self.setting.delay + 2:
            return
        self.set_state(main, main.state)
        self.set_state(member, member.state)
        main.count += 1
        group.members.remove(member)
        self.hub.merge(member, main)
        member.pending.clear()

    # What happens for certain.

    def committed(self) -> None:
        fragments = self.setting.num_fragments
        for incident in list(self._incidents):
            assert incident.round is not None
            if self.hub.next > incident.round * fragments:
                self._incidents.remove(incident)
                self.push(self.now + incident.after, self._befall, incident)

    def _befall(self, incident: IncidentConfig) -> None:
        if incident.kind == "hub":
            self._stop_hub(incident.lasts)
            return
        group = next(g for g in self.groups if g.config.name == incident.cluster)
        member = self._single(max(group.members, key=lambda each: each.count))
        if member.state in ("down", "joining", "queue", "away", "done"):
            return
        match incident.kind:
            case "killed":
                self.kill(member, incident.lasts)
            case "cut":
                self.silence(member)
                self.later(member, self.now + incident.lasts, "mended", self.heard)
            case "frozen" | "stuck":
                if incident.kind == "frozen":
                    self.silence(member)
                self._freeze(member, incident.lasts)

    def _freeze(self, member: Member, lasts_s: float) -> None:
        # No steps; what is under way goes on afterwards.
        member.stopped_in = member.state
        self.set_state(member, "down")
        for key in ("outer", "deadline"):
            if key in member.pending:
                when, call, args = member.pending[key]
                self.later(member, when + lasts_s, key, call, *args)
        member.pending.pop("wake", None)
        self.later(member, self.now + lasts_s, "thaw", self._thaw)

    def _thaw(self, member: Member) -> None:
        state, member.stopped_in = member.stopped_in, None
        assert state is not None
        self.set_state(member, state)
        if not member.is_connected:
            self.heard(member)
        if state == "compute":
            self.wake(member)
        elif state == "wait" and member.delivered > member.version:
            self._spend_waiting(member)

    def _stop_hub(self, lasts_s: float) -> None:
        self.hub.is_away = True
        for member in list(self.hub.living):
            self.stop_transfers(member)
        self.push(self.now + lasts_s, self._hub_is_back)

    def _hub_is_back(self) -> None:
        self.hub.is_away = False
        for member in list(self.hub.living):
            self.later(member, self.now + RECONNECT_S / 2, "heard", self._heard_hub)
        self.push(self.now + RECONNECT_S, self.look)

    def _heard_hub(self, member: Member) -> None:
        if member.is_connected:
            self.heard(member)


def _speeds(config: GroupConfig) -> list[tuple[float, int]]:
    # Speeds that stand for a normal distribution, and how many clusters have each.
    if not config.spread or config.count < 2:
        return [(1.0, config.count)]
    kinds = min(_SPEEDS, config.count)
    spread = statistics.NormalDist(1.0, config.spread)
    base, more = divmod(config.count, kinds)
    return [
        (max(0.05, spread.inv_cdf((index + 0.5) / kinds)), base + (index < more))
        for index in range(kinds)
    ]
