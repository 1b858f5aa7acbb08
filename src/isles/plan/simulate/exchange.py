"""Outer steps on the virtual clock: contribute, upload, average, download, apply, wait.

Inner steps of a cluster are not events. `wake` finds the next inner step that has work after it,
and `boundary` does the work, in the order of `isles.outer.trainer.outer.Outer.after_inner_step`.
`send` and `fetch` follow `isles.outer.client.session`; `look` and `average` follow
`isles.outer.hub.work`.
"""

from __future__ import annotations

import math
from functools import partial

from isles.plan.simulate.core import Core
from isles.plan.simulate.member import Member, PastContribution, Sent
from isles.plan.simulate.setting import AHEAD, HEARTBEAT_S, LAST_WAIT_S, OPEN_STEPS


class Exchange:
    """Events of outer steps without failures."""

    def __init__(self, core: Core) -> None:
        self._core, self._setting, self._hub = core, core.setting, core.hub

    # Inner steps.

    def compute(self, member: Member) -> None:
        """Continue a member's inner steps."""
        self._core.set_state(member, "compute")
        self.wake(member)

    def wake(self, member: Member) -> None:
        """Wake a member after the next inner step that has work after it."""
        goal = self._next_goal(member)
        if goal is None:
            member.pending.pop("wake", None)
        else:
            self._core.wake_at(member, goal)

    def _next_goal(self, member: Member) -> int | None:
        # The inner step with work after it.
        steps, setting = member.steps, self._setting
        goals = [mark for mark in self._core.marks if mark > steps][:1]
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
        fragments = self._setting.num_fragments
        if member.is_behind or outer_step >= member.version + OPEN_STEPS:
            return False
        fragment = outer_step % fragments
        return not any(other % fragments == fragment for other in member.sent)

    def _is_due(self, member: Member, outer_step: int) -> bool:
        setting, steps = self._setting, member.steps
        if not self._may_contribute(member, outer_step):
            return False
        closing = member.closing_at
        if closing is not None and closing[0] == outer_step and steps >= closing[1]:
            return member.has_learned()
        is_time = steps + member.skip >= setting.step_of(outer_step)
        return is_time and steps - member.contributed_at >= setting.interval(outer_step)

    def boundary(self, member: Member, goal: int) -> None:
        """Do a member's work between two inner steps."""
        self._core.settle(member)
        member.pos = float(goal)
        self._mark(member, goal)
        cost_s, has_changes = self._apply_due(member)
        outer_step = member.next_outer_step
        if not has_changes and self._is_due(member, outer_step):
            cost_s += self._contribute(member, outer_step)
        self._spend(member, cost_s)

    def _mark(self, member: Member, steps: int) -> None:
        core, group = self._core, member.group
        if steps in core.marks:
            computed_s = group.seconds.get("compute", 0.0)
            if member.state == "compute":
                computed_s += (core.now - member.since) * member.count
            core.marked.setdefault((group.config.name, steps), (core.now, computed_s))

    def _spend(self, member: Member, cost_s: float) -> None:
        # Work of the outer step that inner steps wait for. Inner steps continue after it.
        if cost_s > 0:
            self._core.set_state(member, "outer")
            self._core.later(member, self._core.now + cost_s, "outer")
        else:
            self.go_on(member)

    def go_on(self, member: Member) -> None:
        """After the work of a boundary: wait for a due average, or compute."""
        setting, steps = self._setting, member.steps
        if setting.max_steps is not None and steps + member.skip >= setting.max_steps:
            member.finishing = True
        for outer_step in sorted(member.sent):
            sent = member.sent[outer_step]
            is_overdue = member.finishing or steps >= sent.pos + setting.delay
            if not is_overdue or (outer_step in member.waited and not member.finishing):
                break
            if member.delivered > member.version:
                self._spend(member, self.apply_all(member))
                return
            self._wait(member, outer_step)
            return
        if member.finishing:
            self._finish(member)
        else:
            self.compute(member)

    # Contributing.

    def _contribute(self, member: Member, outer_step: int) -> float:
        # Returns the seconds for which inner steps wait.
        now, setting = self._core.now, self._setting
        fragment = outer_step % setting.num_fragments
        steps, delay = member.steps, 0 if member.finishing else setting.delay
        member.sent[outer_step] = Sent(steps, steps - member.base[fragment], now)
        member.made.append(PastContribution(outer_step, steps))
        member.base[fragment] = float(steps)
        member.contributed_at = steps
        member.closing_at = None
        cost_s = self._core.copy_s(member, outer_step)
        encode_s = setting.fragments[fragment] / member.group.costs.encode
        if delay == 0:
            cost_s += encode_s
            encoded_at = handed_at = now + cost_s
        else:  # in a thread; the client gets it before the next inner step
            encoded_at = now + cost_s + encode_s
            step_s = 1.0 / member.rate
            handed_at = now + cost_s + math.ceil(encode_s / step_s) * step_s
        member.encoded_at[outer_step] = encoded_at
        self._core.later(member, handed_at, f"hand:{outer_step}", outer_step)
        return cost_s

    def hand_in(self, member: Member, outer_step: int) -> None:
        """Event: a contribution is encoded."""
        if member.encoded_at.pop(outer_step, None) is not None:
            member.to_send.append(outer_step)
            self.send(member)

    def send(self, member: Member) -> None:
        """Upload a member's contributions one by one."""
        while member.to_send and member.to_send[0] not in member.sent:
            member.to_send.pop(0)
        if member.is_sending or not member.to_send or not self.is_reached(member):
            return
        member.is_sending = True
        outer_step = member.to_send[0]
        size = self._setting.contribution_bytes(outer_step % self._setting.num_fragments)
        left = member.left_bytes.pop(f"send {outer_step}", size)
        group, core = member.group, self._core
        group.sent_bytes += left * member.count
        done = partial(self.sent, member, outer_step, left)
        member.sending = core.flow(core.line_in, left, group.up, member.count, done)

    def sent(self, member: Member, outer_step: int, size: float) -> None:
        """Event: an upload is over, after its hashes, a request for known chunks and the last."""
        member.sending = None
        wait_s = size / member.group.costs.hash + 6 * member.group.config.latency
        self._core.later(member, self._core.now + wait_s, "complete", outer_step)

    def is_reached(self, member: Member) -> bool:
        """True if a member and the hub are connected."""
        return member.is_connected and not self._hub.is_away

    def complete(self, member: Member, outer_step: int) -> None:
        """Event: the hub has all bytes of a contribution, and measures them."""
        costs, numbers = self._core.hub_costs, self._setting.fragments
        measure_s = numbers[outer_step % len(numbers)] / costs.measure
        begin = self._core.now + costs.fsync_s
        end = self._hub.threads.take(begin, measure_s, member.count)
        self._core.later(member, end, "counted", outer_step)

    def counted(self, member: Member, outer_step: int) -> None:
        """Event: the hub has measured a contribution, which counts or is late."""
        member.is_sending = False
        if outer_step in member.to_send:
            member.to_send.remove(outer_step)
        sent = member.sent.get(outer_step)
        if sent is not None:
            if self._hub.take(member, outer_step, sent.inner, sent.at, self._core.now):
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
        if self._hub.is_time(self._core.now):
            self._hub.round(self._hub.next).is_closed = True
            self._core.push(self._core.now, "average")

    def _notice(self) -> None:
        # After the closing time of a round is set, missing members learn it by a heartbeat.
        hub, setting, core = self._hub, self._setting, self._core
        due = hub.due_at()
        if due is None or setting.wait == "all":
            return
        core.push(due, "look")
        heartbeat_s = min(HEARTBEAT_S, setting.dead_after_s / 4)
        parts = hub.round(hub.next).parts
        for member in hub.living:
            if member not in parts and hub.is_expected(member):
                when = core.now + heartbeat_s / 2 + member.group.config.latency
                core.later(member, when, "closing", hub.next)

    def closing(self, member: Member, outer_step: int) -> None:
        """Event: a member learns that a round is about to close without it."""
        if member.state == "compute" and member.next_outer_step == outer_step:
            self._core.settle(member)
            member.closing_at = outer_step, member.steps + 2
            self.wake(member)

    def average(self) -> None:
        """Event: a round is closed."""
        outer_step, hub, core = self._hub.next, self._hub, self._core
        seconds = core.average_s(outer_step, hub.round(outer_step).num_parts)
        core.push(hub.threads.take(core.now, seconds), "commit")

    def commit(self) -> None:
        """Event: an average is on the hub's disk."""
        hub, core, fragments = self._hub, self._core, self._setting.num_fragments
        if hub.is_away:  # it is averaged again when the hub is back
            hub.round(hub.next).is_closed = False
            return
        for member, part in hub.commit(core.now).parts.items():
            member.group.steps_averaged += part.inner * part.count / fragments
        for member in list(hub.living):
            self.fetch(member)
        for incident in list(core.incidents):
            if incident.round is not None and hub.next > incident.round * fragments:
                core.incidents.remove(incident)
                core.push(core.now + incident.after, "befall", incident)
        self._notice()
        core.push(core.now, "look")

    # Fetching and applying.

    def fetch(self, member: Member) -> None:
        """Download the next average, as far as the cluster keeps up."""
        outer_step = member.delivered
        core, hub, setting = self._core, self._hub, self._setting
        is_there = hub.kept_since <= outer_step < hub.next
        if member.fetching is not None or "fetched" in member.pending or member.is_behind:
            return
        if not is_there or not self.is_reached(member) or outer_step >= member.version + AHEAD:
            return
        fragment = outer_step % setting.num_fragments
        size = float(setting.average_bytes(fragment, hub.kept[outer_step]))
        size = member.left_bytes.pop(f"fetch {outer_step}", size)
        member.group.received_bytes += size * member.count
        done = partial(self.got, member, outer_step, size)
        member.fetching = core.flow(core.line_out, size, member.group.down, member.count, done)

    def got(self, member: Member, outer_step: int, size: float) -> None:
        """Event: a download is over, after the long poll's reply, hashes and first request."""
        member.fetching = None
        hash_s = size / member.group.costs.hash / 4 + member.group.costs.fsync_s
        wait_s = hash_s + 5 * member.group.config.latency
        self._core.later(member, self._core.now + wait_s, "fetched", outer_step)

    def fetched(self, member: Member, outer_step: int) -> None:
        """Event: a participating member has downloaded an average."""
        core = self._core
        member.delivered = outer_step + 1
        match member.state:
            case "wait":
                self.end_wait(member)
            case "compute":
                core.settle(member)
                # Its command is seen before the next step, and run after that step.
                begin = core.now + (member.steps + 2 - member.pos) / member.rate
                member.ready[outer_step] = begin + core.apply_s(member, outer_step)
                member.apply_from = member.steps + 2
                self.wake(member)
            case _:
                member.ready[outer_step] = core.now + core.apply_s(member, outer_step)
                member.apply_from = member.steps + 2
        self.fetch(member)

    def end_wait(self, member: Member) -> None:
        """Apply averages for a waiting member, which continues if its average is among them."""
        cost_s = self.apply_all(member)
        is_done = member.wait_for is None or member.version > member.wait_for
        if is_done:
            member.pending.pop("deadline", None)
            self._core.set_state(member, "outer")
            member.wait_for = None
            self._spend(member, cost_s)

    def apply_all(self, member: Member) -> float:
        """Apply all delivered averages. Returns the waiting time of inner steps in seconds."""
        cost_s = 0.0
        while member.delivered > member.version:
            outer_step = member.version
            core = self._core
            cost_s += core.apply_s(member, outer_step) + core.copy_s(member, outer_step)
            self._applied(member, outer_step)
        return cost_s

    def _apply_due(self, member: Member) -> tuple[float, bool]:
        # Apply the averages that are due after this step. Returns the seconds, and whether any
        # was late.
        cost_s, has_late, steps, core = 0.0, False, member.steps, self._core
        while member.delivered > member.version:
            outer_step = member.version
            sent = member.sent.get(outer_step)
            if sent is not None and outer_step not in member.waited:
                if steps < sent.pos + self._setting.delay:
                    break
                apply_s = core.apply_s(member, outer_step)
                ready_at = member.ready.get(outer_step, core.now + apply_s)
                cost_s += min(max(0.0, ready_at - core.now), apply_s)
            elif steps < member.apply_from:
                break
            else:
                cost_s += core.apply_s(member, outer_step)
                has_late = True
            cost_s += core.copy_s(member, outer_step)
            self._applied(member, outer_step)
        return cost_s, has_late

    def _applied(self, member: Member, outer_step: int) -> None:
        # Count an average as applied to the weights.
        setting, group, steps = self._setting, member.group, member.steps
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
            member.pending.pop(f"hand:{outer_step}", None)
        if member.to_send[:1] == [outer_step] and member.is_sending:
            self._stop_sending(member)
        self.fetch(member)
        if self._core.is_batched and member.count == 1 and member.has_taken_part:
            self._core.push(self._core.now, "merge", member)

    def _stop_sending(self, member: Member) -> None:
        # Cancel an upload that is no longer needed.
        if member.sending is not None:
            left = self._core.cut_flow(self._core.line_in, member.sending)
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
        core = self._core
        limit_s = LAST_WAIT_S if member.finishing else self._setting.deadline_s
        core.set_state(member, "wait")
        member.wait_for, member.wait_since = outer_step, member.sent[outer_step].at
        member.waited.add(outer_step)
        encoded_at = member.encoded_at.get(outer_step)
        if encoded_at is not None:  # it is sent after it is encoded
            core.later(member, encoded_at, f"hand:{outer_step}", outer_step)
        core.later(member, core.now + limit_s, "deadline")

    def give_up(self, member: Member) -> None:
        """Event: an average is late, and inner steps continue."""
        if member.finishing:
            self._end(member)
            return
        self.compute(member)
        member.wait_for = None

    def _finish(self, member: Member) -> None:
        # After the last inner step: average until all contributions are in an average.
        core = self._core
        if member.version < self._hub.next:
            core.set_state(member, "wait")
            member.wait_for, member.wait_since = self._hub.next - 1, core.now
            core.later(member, core.now + LAST_WAIT_S, "deadline")
            self.fetch(member)
            return
        if not member.has_learned():
            self._end(member)
            return
        self._spend(member, self._contribute(member, member.next_outer_step))

    def _end(self, member: Member) -> None:
        member.is_finished = True
        self._core.set_state(member, "done")
        self._core.has_somebody_left = True
        self.look()
