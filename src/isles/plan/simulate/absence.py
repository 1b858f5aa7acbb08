"""Clusters that are absent, disconnected or new: how the hub notices, and how they return.

The protocol is the protocol of `isles.outer.trainer.outer.Outer.begin`: load the checkpoint, then
apply the averages since then one by one. If the hub has deleted them, use the state of another
cluster.
"""

from __future__ import annotations

from functools import partial

from isles.plan.simulate.core import Core
from isles.plan.simulate.exchange import Exchange
from isles.plan.simulate.member import Member, State
from isles.plan.simulate.setting import RECONNECT_S
from isles.plan.simulate.sizes import state_bytes

_ASK_S = 10.0
"""Seconds until the hub looks again for a cluster that can give its state."""


class Absence:
    """Events of failures, absences and joins."""

    def __init__(self, core: Core, exchange: Exchange) -> None:
        self._core, self._exchange = core, exchange
        self._hub, self._setting = core.hub, core.setting
        self._pulling: list[Member] = []

    def stop_transfers(self, member: Member) -> None:
        """Interrupt a member's transfers. The receiver keeps the bytes it has."""
        core = self._core
        if member.sending is not None:
            left = core.cut_flow(core.line_in, member.sending)
            member.left_bytes[f"send {member.to_send[0]}"] = left
            member.group.sent_bytes -= left * member.count
        if member.fetching is not None:
            left = core.cut_flow(core.line_out, member.fetching)
            member.left_bytes[f"fetch {member.delivered}"] = left
            member.group.received_bytes -= left * member.count
        member.sending = member.fetching = None
        member.is_sending = False
        for key in ("complete", "counted", "fetched"):
            member.pending.pop(key, None)

    def silence(self, member: Member) -> None:
        """Disconnect a member from the hub, in both directions."""
        self.stop_transfers(member)
        member.is_connected = False
        if member.is_living:
            self._core.later(member, self._core.now + self._setting.dead_after_s, "drop")

    def drop(self, member: Member) -> None:
        """A member has left or is silent for too long: rounds stop waiting for it."""
        self._hub.drop(member)
        self._exchange.look()

    def heard(self, member: Member) -> None:
        """A member is connected to the hub again."""
        member.pending.pop("drop", None)
        member.is_connected = True
        self._hub.admit(member)
        if member.delivered < self._hub.kept_since:
            if not member.is_behind:
                self._pull(member)
        else:
            self._exchange.fetch(member)
        self._exchange.send(member)

    def kill(self, member: Member, lasts_s: float) -> None:
        """Kill the ranks of a member. They start again from the last checkpoint."""
        core = self._core
        core.set_state(member, "down")
        member.group.num_failures += 1
        saved = member.checkpoint(self._setting, core.now)
        self.silence(member)
        drop = member.pending.get("drop")
        lost = member.go_back(saved)
        member.group.steps_lost += lost
        member.pending.clear()
        member.encoded_at.clear()
        member.finishing = False
        if drop is not None:
            core.later(member, drop[0], "drop")
        core.later(member, core.now + lasts_s, "back")

    def leave(self, member: Member, state: State, away_s: float) -> None:
        """A member saves a checkpoint and leaves with a message to the hub."""
        self.stop_transfers(member)
        self._core.set_state(member, state)
        member.pos = float(member.steps)
        member.is_connected = False
        member.pending.clear()
        member.to_send = [t for t in sorted(member.sent) if not member.sent[t].is_counted]
        member.encoded_at.clear()
        member.waited.clear()
        self.drop(member)
        self._core.later(member, self._core.now + away_s, "back")
        self._core.has_somebody_left = True

    def back(self, member: Member) -> None:
        """A member starts, or starts again, and joins."""
        core = self._core
        if self._hub.is_away:
            core.later(member, core.now + RECONNECT_S, "back")
            return
        limit = member.group.config.time_limit
        if member.state == "queue" and limit is not None:
            core.push(core.now + limit, "time is up", member)
        core.set_state(member, "joining")
        member.has_taken_part = False
        self.heard(member)
        if not member.is_behind:
            self._catch_up(member)

    def fetched(self, member: Member, outer_step: int) -> None:
        """A member has downloaded an average."""
        if member.state != "joining":
            self._exchange.fetched(member, outer_step)
            return
        member.delivered = outer_step + 1
        self._catch_up(member)
        self._exchange.fetch(member)

    def _catch_up(self, member: Member) -> None:
        # A joining cluster applies the averages it has missed, then computes.
        exchange, hub = self._exchange, self._hub
        if member.delivered >= hub.next:
            self._apply_some(member)
        elif member.delivered < hub.kept_since:
            self._pull(member)
        elif exchange.is_reached(member):  # otherwise it continues after it is connected again
            exchange.fetch(member)
            if member.fetching is None and "fetched" not in member.pending:
                self._apply_some(member)  # too many averages wait: apply some first

    def _apply_some(self, member: Member) -> None:
        cost_s = 4 * member.group.config.latency + self._exchange.apply_all(member)
        self._core.later(member, self._core.now + cost_s, "caught up")

    def caught_up(self, member: Member) -> None:
        """A joining member has applied the averages that were available."""
        if member.delivered < self._hub.next or member.delivered > member.version:
            self._catch_up(member)
        else:
            self._exchange.go_on(member)

    # The state of another cluster.

    def _pull(self, member: Member) -> None:
        # Too many averages are missed: fetch outer parameters and momentum of another cluster.
        member.is_behind = True
        self._pulling.append(member)
        self.serve_state()

    def serve_state(self) -> None:
        """Send the state of a member that is far enough to members that need it."""
        hub, core, exchange = self._hub, self._core, self._exchange
        size = state_bytes(self._setting.parameters, has_momentum=self._setting.has_momentum)
        if hub.state_version < hub.kept_since and not hub.is_state_coming:
            able = [m for m in hub.living if not m.is_behind and exchange.is_reached(m)]
            if not able:
                core.push(core.now + _ASK_S, "serve state")
                return
            hub.is_state_coming = True
            source = max(able, key=lambda each: each.version)
            source.group.sent_bytes += size
            done = partial(self._state_is_here, source.version)
            core.flow(core.line_in, size, source.group.up, 1, done)
        if hub.is_state_coming or hub.state_version < 0:
            return
        waiting, self._pulling = self._pulling, []
        for member in waiting:
            member.group.received_bytes += size
            done = partial(self._state_is_there, member, hub.state_version, size)
            member.fetching = core.flow(core.line_out, size, member.group.down, 1, done)

    def _state_is_here(self, version: int) -> None:
        self._hub.state_version, self._hub.is_state_coming = version, False
        self.serve_state()

    def _state_is_there(self, member: Member, version: int, size: float) -> None:
        member.fetching = None
        wait_s = size / member.group.costs.hash + 5 * member.group.config.latency
        self._core.later(member, self._core.now + wait_s, "adopt", version)

    def adopt(self, member: Member, version: int) -> None:
        """Continue with the state of another cluster.

        Training since its last average is kept, and is part of its next contribution.
        """
        self._core.settle(member)
        for outer_step, sent in member.sent.items():
            if not sent.is_counted:
                member.base[outer_step % len(member.base)] -= sent.inner
        member.sent.clear()
        member.to_send.clear()
        member.encoded_at.clear()
        member.own_past.clear()
        member.is_behind = False
        member.version = member.delivered = max(member.version, version)
        setting = self._setting
        step = setting.step_of(member.version - 1) if member.version else 0
        if setting.max_steps is not None:
            step = min(step, setting.max_steps)
        member.skip = max(member.skip, step - member.steps)
        member.from_round = self._hub.first_round()
        if member.state == "joining":
            self._catch_up(member)
            return
        self._exchange.fetch(member)
        if member.state == "compute":
            self._exchange.wake(member)
