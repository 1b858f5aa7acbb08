"""Outer steps on the virtual clock: contribute, upload, average, download, apply, wait.

A cluster's inner steps are no events. It is asked again after the step at which there is something
to do (`wake`, `_boundary`); what it does there, and in which order, is that of
`isles.outer.trainer.outer.Outer.after_inner_step`. `isles.outer.client.session` is `_send` and
`fetch`, `isles.outer.hub.work` is `_close` and what follows it.
"""

from __future__ import annotations

import math

from isles.plan.simulate.core import Core
from isles.plan.simulate.member import Made, Member, Sent
from isles.plan.simulate.setting import AHEAD, HEARTBEAT_S, LAST_WAIT_S, OPEN_STEPS, TICK_S


class Exchange(Core):
    """What goes on where nothing fails."""

    # Inner steps.

    def compute(self, member: Member) -> None:
        """Inner steps go on."""
        self.set_state(member, "compute")
        self.wake(member)

    def wake(self, member: Member) -> None:
        """Ask a member again after the next step at which it has something to do."""
        goal = self._next_goal(member)
        if goal is None:
            member.pending.pop("wake", None)
            return
        self.settle(member)
        left = max(0.0, goal - member.pos)
        self.later(member, self.now + left / member.rate, "wake", self._boundary, goal)

    def _next_goal(self, member: Member) -> int | None:
        # The inner step after which there is something to do.
        steps, setting = member.steps, self.setting
        goals = [mark for mark in self.marks if mark > steps][:1]
        outer_step = member.next_outer_step
        if self._may_contribute(member, outer_step):
            due = max(
                member.contributed_at + setting.interval(outer_step),
                setting.step_of(outer_step) - member.skip,
            )
            closing = member.closing_at
            if closing is not None and closing[0] == outer_step:
                due = min(due, closing[1])
            goals.append(max(due, steps + 1))
        for other in sorted(member.sent):
            if other not in member.waited:
                goals.append(max(member.sent[other].pos + setting.delay, steps + 1))
                break
        is_late = member.version not in member.sent or member.version in member.waited
        if member.delivered > member.version and is_late:
            goals.append(max(member.apply_from, steps + 1))
        if setting.max_steps is not None:
            goals.append(max(setting.max_steps - member.skip, steps + 1))
        return min(goals, default=None)

    def _may_contribute(self, member: Member, outer_step: int) -> bool:
        fragments = self.setting.num_fragments
        if member.is_behind or outer_step >= member.version + OPEN_STEPS:
            return False
        fragment = outer_step % fragments
        return not any(other % fragments == fragment for other in member.sent)

    def _is_due(self, member: Member, outer_step: int) -> bool:
        setting, steps = self.setting, member.steps
        if not self._may_contribute(member, outer_step):
            return False
        closing = member.closing_at
        if closing is not None and closing[0] == outer_step and steps >= closing[1]:
            return member.has_learnt()
        is_time = steps + member.skip >= setting.step_of(outer_step)
        return is_time and steps - member.contributed_at >= setting.interval(outer_step)

    def _boundary(self, member: Member, goal: int) -> None:
        # Between two inner steps.
        self.settle(member)
        member.pos = float(goal)
        self._mark(member, goal)
        cost_s, has_changes = self._apply_due(member)
        outer_step = member.next_outer_step
        if not has_changes and self._is_due(member, outer_step):
            cost_s += self._contribute(member, outer_step)
        self._spend(member, cost_s)

    def _mark(self, member: Member, steps: int) -> None:
        if steps in self.marks:
            group = member.group
            computed_s = group.seconds.get("compute", 0.0)
            if member.state == "compute":
                computed_s += (self.now - member.since) * member.count
            self.marked.setdefault((group.config.name, steps), (self.now, computed_s))

    def _spend(self, member: Member, cost_s: float) -> None:
        # Work of the outer step that inner steps wait for; then on.
        if cost_s > 0:
            self.set_state(member, "outer")
            self.later(member, self.now + cost_s, "outer", self.go_on)
        else:
            self.go_on(member)

    def go_on(self, member: Member) -> None:
        """After the work of a boundary: wait for an average whose time it is, or compute."""
        setting, steps = self.setting, member.steps
        if setting.max_steps is not None and steps + member.skip >= setting.max_steps:
            member.finishing = True
        for outer_step in sorted(member.sent):
            sent = member.sent[outer_step]
            is_overdue = member.finishing or steps >= sent.pos + setting.delay
            if not is_overdue or (outer_step in member.waited and not member.finishing):
                break
            if member.delivered > member.version:
                self._spend(member, self._apply_all(member))
                return
            self._wait(member, outer_step)
            return
        if member.finishing:
            self._finish(member)
        else:
            self.compute(member)

    # Contributing.

    def _contribute(self, member: Member, outer_step: int) -> float:
        # Returns the seconds that inner steps wait for it.
        fragment = outer_step % self.setting.num_fragments
        steps, delay = member.steps, 0 if member.finishing else self.setting.delay
        member.sent[outer_step] = Sent(steps, steps - member.base[fragment], self.now)
        member.made.append(Made(outer_step, steps))
        member.base[fragment] = float(steps)
        member.contributed_at = steps
        member.closing_at = None
        cost_s = self.copy_s(member, outer_step)
        encode_s = self.setting.fragments[fragment] / member.group.costs.encode
        if delay == 0:
            cost_s += encode_s
            encoded_at = handed_at = self.now + cost_s
        else:  # in a thread; the client is given it before the next inner step
            encoded_at = self.now + cost_s + encode_s
            step_s = 1.0 / member.rate
            handed_at = self.now + cost_s + math.ceil(encode_s / step_s) * step_s
        member.encoded_at[outer_step] = encoded_at
        self.later(member, handed_at, f"hand {outer_step}", self._hand_in, outer_step)
        return cost_s

    def _hand_in(self, member: Member, outer_step: int) -> None:
        if member.encoded_at.pop(outer_step, None) is not None:
            member.to_send.append(outer_step)
            self.send(member)

    def send(self, member: Member) -> None:
        """Upload contributions, one after the other."""
        while member.to_send and member.to_send[0] not in member.sent:
            member.to_send.pop(0)
        if member.is_sending or not member.to_send or not self.is_reached(member):
            return
        member.is_sending = True
        outer_step = member.to_send[0]
        size = self.setting.contribution_bytes(outer_step % self.setting.num_fragments)
        left = member.left_bytes.pop(f"send {outer_step}", size)
        member.group.sent_bytes += left * member.count
        self.begin_sending(member, outer_step, left)

    def begin_sending(self, member: Member, outer_step: int, size: float) -> None:
        """The flow of an upload."""

        def done() -> None:
            # Hashes before it; then the requests: what is there, the last chunk, complete.
            member.sending = None
            hash_s = size / member.group.costs.hash
            wait_s = hash_s + 6 * member.group.config.latency
            self.later(member, self.now + wait_s, "complete", self._complete, outer_step)

        limit = member.group.up
        member.sending = self.flow(self.line_in, size, limit, member.count, done)

    def is_reached(self, member: Member) -> bool:
        """Whether a member and the hub reach one another."""
        return member.is_connected and not self.hub.is_away

    def _complete(self, member: Member, outer_step: int) -> None:
        # The hub has all bytes, and measures them.
        numbers = self.setting.fragments[outer_step % self.setting.num_fragments]
        measure_s = numbers / self.hub_costs.measure
        end = self.hub.threads.take(self.now + self.hub_costs.fsync_s, measure_s, member.count)
        self.later(member, end, "counted", self.counted, outer_step)

    def counted(self, member: Member, outer_step: int) -> None:
        """The hub has measured a contribution: it counts, or comes too late."""
        member.is_sending = False
        if outer_step in member.to_send:
            member.to_send.remove(outer_step)
        sent = member.sent.get(outer_step)
        if sent is not None:
            if self.hub.take(member, outer_step, sent.inner, sent.at, self.now):
                sent.is_counted = True
                for made in member.made:
                    made.is_counted = made.is_counted or made.outer_step == outer_step
                self._notice()
                self.look()
            else:
                member.group.late += member.count
        self.send(member)

    # The hub.

    def look(self) -> None:
        """Close the next round, if it is time."""
        if self.hub.is_time(self.now):
            self.hub.round(self.hub.next).is_closed = True
            self.push(self.now + TICK_S / 2, self._average)

    def _notice(self) -> None:
        # Once it is known when a round closes, whoever is missing hears it by a heartbeat.
        hub, setting = self.hub, self.setting
        due = hub.due_at()
        if due is None or setting.wait == "all":
            return
        self.push(due, self.look)
        heartbeat_s = min(HEARTBEAT_S, setting.dead_after_s / 4)
        parts = hub.round(hub.next).parts
        for member in hub.living:
            if member not in parts and hub.is_expected(member):
                when = self.now + heartbeat_s / 2 + member.group.config.latency
                self.later(member, when, "closing", self._closing, hub.next)

    def _closing(self, member: Member, outer_step: int) -> None:
        if member.state == "compute" and member.next_outer_step == outer_step:
            self.settle(member)
            member.closing_at = outer_step, member.steps + 2
            self.wake(member)

    def _average(self) -> None:
        outer_step = self.hub.next
        current = self.hub.round(outer_step)
        seconds = self.average_s(outer_step, current.num_parts)
        self.push(self.hub.threads.take(self.now, seconds), self._commit)

    def _commit(self) -> None:
        if self.hub.is_away:  # it is averaged once more when the hub is back
            self.hub.round(self.hub.next).is_closed = False
            return
        done = self.hub.commit(self.now)
        for member, part in done.parts.items():
            averaged = part.inner * part.count / self.setting.num_fragments
            member.group.steps_averaged += averaged
        for member in list(self.hub.living):
            self.fetch(member)
        self.committed()
        self._notice()
        self.push(self.now + TICK_S, self.look)

    def committed(self) -> None:
        """Called after each outer step that is committed."""

    # Fetching and applying.

    def fetch(self, member: Member) -> None:
        """Download the next average, as far as the cluster keeps up."""
        outer_step = member.delivered
        is_there = self.hub.kept_since <= outer_step < self.hub.next
        if member.fetching is not None or "fetched" in member.pending or member.is_behind:
            return
        if not is_there or not self.is_reached(member) or outer_step >= member.version + AHEAD:
            return
        fragment = outer_step % self.setting.num_fragments
        size = float(self.setting.average_bytes(fragment, self.hub.kept[outer_step]))
        size = member.left_bytes.pop(f"fetch {outer_step}", size)
        member.group.received_bytes += size * member.count
        self.begin_fetching(member, outer_step, size)

    def begin_fetching(self, member: Member, outer_step: int, size: float) -> None:
        """The flow of a download."""

        def done() -> None:
            # The answer to the long poll, the hashes of the chunks, the first request.
            member.fetching = None
            hash_s = size / member.group.costs.hash / 4 + member.group.costs.fsync_s
            wait_s = hash_s + 5 * member.group.config.latency
            self.later(member, self.now + wait_s, "fetched", self._fetched, outer_step)

        limit = member.group.down
        member.fetching = self.flow(self.line_out, size, limit, member.count, done)

    def _fetched(self, member: Member, outer_step: int) -> None:
        member.delivered = outer_step + 1
        match member.state:
            case "wait":
                self._spend_waiting(member)
            case "compute":
                self.settle(member)
                # Its command is found before the next step, and done after that.
                begin = self.now + (member.steps + 2 - member.pos) / member.rate
                member.ready[outer_step] = begin + self.apply_s(member, outer_step)
                member.apply_from = member.steps + 2
                self.wake(member)
            case "joining":
                self.catch_up(member)
            case _:
                member.ready[outer_step] = self.now + self.apply_s(member, outer_step)
                member.apply_from = member.steps + 2
        self.fetch(member)

    def _spend_waiting(self, member: Member) -> None:
        cost_s = self._apply_all(member)
        is_done = member.wait_for is None or member.version > member.wait_for
        if is_done:
            member.pending.pop("deadline", None)
            self.set_state(member, "outer")
            member.wait_for = None
            self._spend(member, cost_s)

    def _apply_all(self, member: Member) -> float:
        # Apply what is there, while inner steps wait.
        cost_s = 0.0
        while member.delivered > member.version:
            outer_step = member.version
            cost_s += self.apply_s(member, outer_step) + self.copy_s(member, outer_step)
            self.applied(member, outer_step)
        return cost_s

    def _apply_due(self, member: Member) -> tuple[float, bool]:
        # Apply what is there and due after this step; what that costs, and whether any was late.
        cost_s, has_late, steps = 0.0, False, member.steps
        while member.delivered > member.version:
            outer_step = member.version
            sent = member.sent.get(outer_step)
            if sent is not None and outer_step not in member.waited:
                if steps < sent.pos + self.setting.delay:
                    break
                ready_at = member.ready.get(outer_step, self.now + self.apply_s(member, outer_step))
                cost_s += min(max(0.0, ready_at - self.now), self.apply_s(member, outer_step))
            elif steps < member.apply_from:
                break
            else:
                cost_s += self.apply_s(member, outer_step)
                has_late = True
            cost_s += self.copy_s(member, outer_step)
            self.applied(member, outer_step)
        return cost_s, has_late

    def catch_up(self, member: Member) -> None:
        """A member that joins has fetched an average."""
        raise NotImplementedError

    def applied(self, member: Member, outer_step: int) -> None:
        """An average is in the weights."""
        setting, group, steps = self.setting, member.group, member.steps
        fragment = outer_step % setting.num_fragments
        sent = member.sent.pop(outer_step, None)
        if sent is not None and sent.is_counted:
            member.has_taken_part = True
            stale = steps - sent.pos
            group.stale_steps += stale * member.count
            group.most_stale = max(group.most_stale, stale)
            group.num_applied += member.count
        elif sent is not None:
            member.base[fragment] -= sent.inner  # its steps are in the next contribution
        elif outer_step in member.own_past:
            group.steps_lost += (steps - member.base[fragment]) * member.count / len(member.base)
            member.base[fragment] = float(steps)
        member.own_past.discard(outer_step)
        member.version = outer_step + 1
        step = setting.step_of(outer_step)
        if setting.max_steps is not None:
            step = min(step, setting.max_steps)
        member.skip = max(member.skip, step - steps)
        member.applied_at.append((outer_step, steps))
        member.waited.discard(outer_step)
        member.ready.pop(outer_step, None)
        if member.encoded_at.pop(outer_step, None) is not None:
            member.pending.pop(f"hand {outer_step}", None)
        if member.to_send[:1] == [outer_step] and member.is_sending:
            self.stop_sending(member)
        self.fetch(member)

    def stop_sending(self, member: Member) -> None:
        """An upload is not wanted any more."""
        if member.sending is not None:
            left = self.cut_flow(self.line_in, member.sending)
            member.group.sent_bytes -= left * member.count
            member.sending = None
            member.group.late += member.count
        member.is_sending = False
        member.to_send.pop(0)
        member.pending.pop("complete", None)
        member.pending.pop("counted", None)
        self.send(member)

    # Waiting.

    def _wait(self, member: Member, outer_step: int) -> None:
        limit_s = LAST_WAIT_S if member.finishing else self.setting.deadline_s
        self.set_state(member, "wait")
        member.wait_for, member.wait_since = outer_step, member.sent[outer_step].at
        member.waited.add(outer_step)
        encoded_at = member.encoded_at.get(outer_step)
        if encoded_at is not None:  # it is handed in as soon as it is encoded
            self.later(member, encoded_at, f"hand {outer_step}", self._hand_in, outer_step)
        self.later(member, self.now + limit_s, "deadline", self._give_up, outer_step)

    def _give_up(self, member: Member, outer_step: int) -> None:
        # An average has not come in time: inner steps go on.
        if member.finishing:
            self._end(member)
            return
        self.compute(member)
        member.wait_for = None

    def _finish(self, member: Member) -> None:
        # After the last inner step: average until nothing is left that others lack.
        if member.version < self.hub.next:
            self.set_state(member, "wait")
            member.wait_for, member.wait_since = self.hub.next - 1, self.now
            self.later(member, self.now + LAST_WAIT_S, "deadline", self._give_up, 0)
            self.fetch(member)
            return
        if not member.has_learnt():
            self._end(member)
            return
        self._spend(member, self._contribute(member, member.next_outer_step))

    def _end(self, member: Member) -> None:
        member.is_finished = True
        self.set_state(member, "done")
        self.look()
