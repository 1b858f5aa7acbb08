"""The outer steps, between clusters: what all ranks of this one do after an inner step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import assert_never

from isles.dist.world import World
from isles.facts.units import format_duration
from isles.outer.client.events import Claimed, Donate, Ended, Reset, SamplesLost
from isles.outer.trainer.step import Turns
from isles.outer.trainer.sync import (
    Adopt,
    Contribute,
    Meter,
    Order,
    OuterCoordinator,
    Recorder,
    Take,
    UseReserve,
)

_LOOK_S = 1.0
_AWAY_S = 2.0
_LAST_WAIT_S = 600.0
_STATE_S = 3600.0


class Outer:
    """Does what rank 0 decides; the decision comes with the agreement that each step has already.

    All ranks must call every method but `plan`, after the same step.

    Args:
        turns: of this cluster.
        coordinator: on rank 0; None elsewhere.
        world: the ranks.
        batch: samples in an inner step.
        forget_ahead: drops samples that were read in advance.
        meter, recorder: of the run.
        total_steps: of the run, if it is known.
        requested: what this rank wants at the end of the step: an exit code, or 0.
    """

    def __init__(
        self,
        turns: Turns,
        coordinator: OuterCoordinator | None,
        *,
        world: World,
        batch: int,
        forget_ahead: Callable[[], None],
        meter: Meter,
        recorder: Recorder,
        total_steps: int | None,
        requested: Callable[[], int],
    ) -> None:
        self.turns, self._coordinator = turns, coordinator
        self._config, self._world = turns.config, world
        self._batch, self._forget_ahead, self._progress = batch, forget_ahead, turns.progress
        self._meter, self._recorder = meter, recorder
        self._total_steps, self._requested = total_steps, requested
        self._waited: set[int] = set()
        self._paused_s = 0.0
        self._is_ending = False
        self._stop = 0
        self._last: int | None = None

    def begin(self, *, is_new: bool) -> None:
        """Join the other clusters; what was sent before a restart is sent once more.

        Raises:
            UserError: this cluster is not let in, or a new one does not reach the rendezvous.
        """
        self._recorder.phase("joining", "the other clusters")
        self.turns.send_again()
        began, version = time.monotonic(), self.turns.version
        while True:
            orders: list[Order] = []
            is_done, fault = False, None
            if self._coordinator is not None:
                self._coordinator.listen(_LOOK_S)
                if self.turns.version > version:  # the turns since a checkpoint come one by one
                    began, version = time.monotonic(), self.turns.version
                late_s = _STATE_S if self._coordinator.is_behind else self._config.deadline
                is_late = time.monotonic() - began > late_s
                self._coordinator.restock(self.turns.sync_state(), is_late=is_late and not is_new)
                orders = self._coordinator.take_orders()
                fault = self._coordinator.fault(is_new=is_new)
                is_in = self._coordinator.is_joined and not self._coordinator.is_behind
                is_in = is_in and not self._lacks(self._coordinator.decided)
                is_done = not orders and self._is_stocked and (is_in or is_late)
            orders, is_done, fault = self._world.broadcast((orders, is_done, fault))
            if fault is not None:
                raise fault
            for order in orders:
                self._obey(order)
            if is_done:
                return

    def plan(self) -> bool:
        """Whether anything is to be done after the step that begins; rank 0 decides."""
        if self._coordinator is None:
            return False
        self.turns.hand_in()
        self._coordinator.pace.step_done(self._paused_s)
        self._paused_s = 0.0
        return self._coordinator.plan(self.turns.sync_state())

    def after_inner_step(self, *, has_orders: bool) -> None:
        """Do what was decided, and wait for a turn whose time it is."""
        began = time.perf_counter()
        turns = self.turns
        turns.steps += 1
        if has_orders:
            paused = self._meter.pause("outer step")
            self._exchange()
            self._meter.resume(paused)
        turns.finish_move(only_overdue=True)
        for turn in sorted(turns.sent):
            if turn not in turns.sent:
                continue  # while one is waited for, another may be taken in
            # No turn is decided before those before it: it would be waited for in vain as well.
            if turn in self._waited or not turns.is_overdue(turn):
                break
            if not self._await(turn, self._config.deadline, "inner steps go on"):
                break
        if not self._is_stocked:
            self._restock()
        turns.record.state(turns.sync_state(), self._coordinator)
        self._paused_s += time.perf_counter() - began

    def finish(self) -> int:
        """After the last inner step: let all clusters end with the same weights.

        Returns:
            What a rank wanted while the others were waited for, an exit code or NOW: this cluster
            has not ended, and is to go on from a checkpoint; 0: it has ended.
        """
        self._is_ending, self._stop = True, 0
        if self._end_together():
            self._stop = 0
        self._is_ending = not self._stop
        self.turns.record.state(self.turns.sync_state(), self._coordinator, is_last=self._is_ending)
        return self._stop

    def _end_together(self) -> bool:
        turns = self.turns
        decided = self._world.broadcast(
            0 if self._coordinator is None else self._coordinator.decided
        )
        if self._lacks(decided):
            self._wait(lambda: not self._lacks(decided), _LAST_WAIT_S, f"turn {decided - 1}")
            if self._lacks(decided):
                return False
        for _ in range(4 * turns.num_fragments + len(turns.sent)):  # some may be refused, or late
            self._exchange(listens=True)
            turns.finish_move()
            for turn in sorted(turns.sent):
                if not self._await(turn, _LAST_WAIT_S, "this cluster ends with its own weights"):
                    return False
            if not turns.has_learnt:
                return self._end_with_all()
            if self._is_behind():
                break
            turns.contribute(turns.version)
        return True

    def _end_with_all(self) -> bool:
        # A cluster that came late, or whose contribution did, has no part in the last outer steps: it
        # must not end before they are decided. Where the others are not reached it waits no longer than
        # for an average.
        coordinator, began = self._coordinator, time.monotonic()
        if coordinator is not None:
            coordinator.report(self.turns.sync_state(), ends=True)
        paused = self._meter.pause("waiting for other clusters")
        limit_s = min(self._config.deadline, _LAST_WAIT_S)
        is_late = goes_on = True
        while is_late and goes_on:
            is_late = self._wait(self._is_last, limit_s, "to end together")
            waited_s = time.monotonic() - began
            goes_on = (
                coordinator is not None
                and coordinator.line.is_connected
                and waited_s < _LAST_WAIT_S
            )
            is_late, goes_on = self._world.broadcast((is_late, goes_on))
        self._meter.resume(paused)
        if is_late:
            self._recorder.note(
                f"the other clusters have not ended after {format_duration(waited_s)} "
                f"({self._others()}): this one ends with the weights after {self.turns.version} "
                "turns, and they may end with more"
            )
        return is_late or self._is_last()

    def _is_last(self) -> bool:
        return self._last is not None and self.turns.version >= self._last

    def close(self, *, leaves: bool) -> None:
        """The cluster ends, or pauses.

        Args:
            leaves: tell the others, so that nobody waits for it.
        """
        self.turns.close()
        if self._coordinator is not None:
            # One that has come after the last turn makes no step of its own.
            is_over = self._is_ending or self._progress.step == self._total_steps
            is_over = is_over and not self._stop
            self._coordinator.line.close(leaves=leaves, has_finished=is_over)

    # What is decided.

    def _exchange(self, *, listens: bool = False) -> None:
        orders: list[Order] = []
        if self._coordinator is not None:
            if listens:
                self._coordinator.listen()
            orders = self._coordinator.take_orders()
        for order in self._world.broadcast(orders):
            self._obey(order)

    def _lacks(self, decided: int) -> bool:
        return max(self.turns.version, max(self.turns.sent, default=-1) + 1) < decided

    def _is_behind(self) -> bool:
        return self._world.broadcast(self._coordinator is not None and self._coordinator.is_behind)

    def _obey(self, order: Order) -> None:
        turns = self.turns
        match order:
            case Contribute():
                turns.contribute(order.turn)
            case Take():
                turns.take(order)
                if self._is_ending:
                    turns.finish_move()
                self._waited.discard(order.event.turn)
            case Adopt():
                turns.adopt(order)
                self._waited.clear()
            case Claimed():
                turns.samples.deal(order.samples)
            case SamplesLost():
                turns.samples.lose(order.samples, self._progress.samples)
                self._forget_ahead()
            case UseReserve():
                turns.samples.deal_reserve(order.count)
            case Donate():
                turns.donate()
            case Reset():
                turns.go_back()
                self._waited.clear()
            case Ended():
                self._last = order.turns
            case _:
                assert_never(order)

    # Waiting.

    def _await(self, turn: int, limit_s: float, otherwise: str) -> bool:
        turns = self.turns
        paused = self._meter.pause("waiting for other clusters")
        self._waited.add(turn)
        turns.record.waits(turn)
        turns.encoded(turn)
        if self._wait(lambda: turns.is_done(turn), limit_s, f"turn {turn}"):
            self._recorder.note(
                f"turn {turn} is not decided after {format_duration(limit_s)} "
                f"({self._others()}); {otherwise}"
            )
        turns.record.waits_no_more(turn)
        self._meter.resume(paused)
        return turns.is_done(turn)

    def _restock(self) -> None:
        paused = self._meter.pause("waiting for samples")
        limit_s = self._config.deadline
        if self._coordinator is not None and not self._coordinator.line.is_connected:
            limit_s = 0.0 if self._coordinator.uses_reserve else _AWAY_S
        self._wait(lambda: self._is_stocked, limit_s, "samples")
        while not self._is_stocked:
            if self._coordinator is not None:
                self._coordinator.restock(self.turns.sync_state(), is_late=True)
            self._exchange()
        self._meter.resume(paused)

    def _wait(self, is_done: Callable[[], bool], limit_s: float, what: str) -> bool:
        end = time.monotonic() + limit_s
        rounds, is_over = 0, False
        while not is_done():
            if rounds == 1:
                self._recorder.phase("waiting for clusters", what)
                if self._coordinator is not None:
                    self._coordinator.report(self.turns.sync_state())
            rounds += 1
            orders: list[Order] = []
            if self._coordinator is not None:
                left_s = end - time.monotonic()
                self._coordinator.listen(max(0.01, min(_LOOK_S, left_s)))
                self._coordinator.restock(self.turns.sync_state(), is_late=False)
                orders = self._coordinator.take_orders()
            is_vain = self._coordinator is not None and self._coordinator.is_refused
            is_late = not orders and (is_vain or time.monotonic() >= end)
            told = self._world.gather((orders, is_late, self._requested()))
            is_over = told[0][1]
            for order in told[0][0]:
                self._obey(order)
            self._stop = max(requested for _, _, requested in told)
            if is_over or self._stop:
                break
        if rounds > 1:
            self._recorder.phase("training")
        return is_over and not is_done()

    def _others(self) -> str:
        if self._coordinator is None or not self._coordinator.line.is_connected:
            return "the others are not reached"
        return f"taking part: {', '.join(self._coordinator.line.members) or 'nobody'}"

    @property
    def _is_stocked(self) -> bool:
        if self._total_steps is not None and self._progress.step >= self._total_steps:
            return True
        left = self.turns.samples.left(self._progress.samples)
        return left >= self._batch
