"""Clusters that are gone, cut off or new: what the others see of it, and how they come back.

It is that of `isles.outer.trainer.outer.Outer.begin`: back to the checkpoint, then the averages
since it one by one, or the state of another cluster where they are not kept any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from isles.plan.simulate.exchange import Exchange
from isles.plan.simulate.fleet import FleetConfig
from isles.plan.simulate.member import Member, State
from isles.plan.simulate.setting import RECONNECT_S, Setting
from isles.plan.simulate.sizes import state_bytes

_ASK_S = 10.0
"""Until somebody is looked for again who can give the state."""


class Absence(Exchange):
    """What goes on where something fails."""

    def __init__(
        self, fleet: FleetConfig, setting: Setting, *, seed: int, marks: Sequence[int]
    ) -> None:
        super().__init__(fleet, setting, seed=seed, marks=marks)
        self._pulling: list[Member] = []

    def time_is_up(self, member: Member) -> None:
        """The time limit of a member's job is over."""
        raise NotImplementedError

    def stop_transfers(self, member: Member) -> None:
        """Cut a member's transfers off; what has come is kept by the other end."""
        if member.sending is not None:
            left = self.cut_flow(self.line_in, member.sending)
            member.left_bytes[f"send {member.to_send[0]}"] = left
            member.group.sent_bytes -= left * member.count
        if member.fetching is not None:
            left = self.cut_flow(self.line_out, member.fetching)
            member.left_bytes[f"fetch {member.delivered}"] = left
            member.group.received_bytes -= left * member.count
        member.sending = member.fetching = None
        member.is_sending = False
        for key in ("complete", "counted", "fetched"):
            member.pending.pop(key, None)

    def silence(self, member: Member) -> None:
        """Nothing of a member reaches the hub from now on, nor the other way."""
        self.stop_transfers(member)
        member.is_connected = False
        if member.is_living:
            self.later(member, self.now + self.setting.dead_after_s, "drop", self.drop)

    def drop(self, member: Member) -> None:
        """A member has not been heard for too long, or has left: nobody waits for it."""
        self.hub.drop(member)
        self.look()

    def heard(self, member: Member) -> None:
        """A member reaches the hub again."""
        member.pending.pop("drop", None)
        member.is_connected = True
        self.hub.admit(member)
        if member.delivered < self.hub.kept_since:
            if not member.is_behind:
                self._pull(member)
        else:
            self.fetch(member)
        self.send(member)

    def kill(self, member: Member, lasts_s: float) -> None:
        """Its ranks are gone; they start again from the last checkpoint."""
        self.set_state(member, "down")
        member.group.num_failures += 1
        saved = member.checkpoint(self.setting, self.now)
        self.silence(member)
        drop = member.pending.get("drop")
        lost = member.go_back(saved)
        member.group.steps_lost += lost
        member.pending.clear()
        member.encoded_at.clear()
        member.finishing = False
        if drop is not None:
            self.later(member, drop[0], "drop", self.drop)
        self.later(member, self.now + lasts_s, "back", self.back)

    def leave(self, member: Member, state: State, away_s: float) -> None:
        """It saves, and says that it goes."""
        self.stop_transfers(member)
        self.set_state(member, state)
        member.pos = float(member.steps)
        member.is_connected = False
        member.pending.clear()
        member.to_send = [t for t in sorted(member.sent) if not member.sent[t].is_counted]
        member.encoded_at.clear()
        member.waited.clear()
        self.drop(member)
        self.later(member, self.now + away_s, "back", self.back)

    def back(self, member: Member) -> None:
        """It starts, or starts again, and joins."""
        if self.hub.is_away:
            self.later(member, self.now + RECONNECT_S, "back", self.back)
            return
        limit = member.group.config.time_limit
        if member.state == "queue" and limit is not None:
            self.push(self.now + limit, self.time_is_up, member)
        self.set_state(member, "joining")
        member.has_taken_part = False
        self.heard(member)
        if not member.is_behind:
            self.catch_up(member)

    def catch_up(self, member: Member) -> None:
        """Of a cluster that joins: apply the averages it has missed, then compute."""
        if member.delivered >= self.hub.next:
            self._apply_some(member)
        elif member.delivered < self.hub.kept_since:
            self._pull(member)
        elif self.is_reached(member):  # else it goes on once it is heard again
            self.fetch(member)
            if member.fetching is None and "fetched" not in member.pending:
                self._apply_some(member)  # so many lie here that some must be applied first

    def _apply_some(self, member: Member) -> None:
        cost_s = 4 * member.group.config.latency + self._apply_all(member)
        self.later(member, self.now + cost_s, "caught up", self._caught_up)

    def _caught_up(self, member: Member) -> None:
        if member.delivered < self.hub.next or member.delivered > member.version:
            self.catch_up(member)
        else:
            self.go_on(member)

    # The state of another cluster.

    def _pull(self, member: Member) -> None:
        # Too many averages are missed: outer parameters and momentum of another come.
        member.is_behind = True
        self._pulling.append(member)
        self._serve_state()

    def _serve_state(self) -> None:
        hub = self.hub
        size = state_bytes(self.setting.parameters, has_momentum=self.setting.has_momentum)
        if hub.state_version < hub.kept_since and not hub.is_state_coming:
            able = [m for m in hub.living if not m.is_behind and self.is_reached(m)]
            if not able:
                self.push(self.now + _ASK_S, self._serve_state)
                return
            hub.is_state_coming = True
            source = max(able, key=lambda each: each.version)
            source.group.sent_bytes += size
            version = source.version
            self.flow(self.line_in, size, source.group.up, 1, lambda: self._state_is_here(version))
        if hub.is_state_coming or hub.state_version < 0:
            return
        waiting, self._pulling = self._pulling, []
        for member in waiting:
            self._fetch_state(member, size)

    def _fetch_state(self, member: Member, size: float) -> None:
        version = self.hub.state_version
        member.group.received_bytes += size

        def done() -> None:
            member.fetching = None
            wait_s = size / member.group.costs.hash + 5 * member.group.config.latency
            self.later(member, self.now + wait_s, "adopt", self._adopt, version)

        member.fetching = self.flow(self.line_out, size, member.group.down, 1, done)

    def _state_is_here(self, version: int) -> None:
        self.hub.state_version, self.hub.is_state_coming = version, False
        self._serve_state()

    def _adopt(self, member: Member, version: int) -> None:
        # What was learnt since its last average is kept, and is in its next contribution.
        self.settle(member)
        for outer_step, sent in member.sent.items():
            if not sent.is_counted:
                member.base[outer_step % len(member.base)] -= sent.inner
        member.sent.clear()
        member.to_send.clear()
        member.encoded_at.clear()
        member.own_past.clear()
        member.is_behind = False
        member.version = member.delivered = max(member.version, version)
        step = self.setting.step_of(member.version - 1) if member.version else 0
        if self.setting.max_steps is not None:
            step = min(step, self.setting.max_steps)
        member.skip = max(member.skip, step - member.steps)
        member.from_round = self.hub.first_round()
        if member.state == "joining":
            self.catch_up(member)
        elif member.state == "compute":
            self.fetch(member)
            self.wake(member)
        else:
            self.fetch(member)
