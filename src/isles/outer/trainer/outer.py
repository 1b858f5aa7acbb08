"""Hook of the training loop after each inner step; here the ranks wait for other clusters.

Rank 0 decides (`sync.py`). Its commands come with the agreement that each inner step already has;
while the ranks wait, rank 0 broadcasts them. All ranks execute them with `step.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol, assert_never

from isles.dist.world import World
from isles.facts.units import format_duration
from isles.outer.messages import (
    Adopt,
    Apply,
    Command,
    Contribute,
    Delay,
    End,
    Lease,
    Reset,
    Revoke,
    SendState,
    UseReserve,
)
from isles.outer.trainer.step import OuterStep, Recorder
from isles.outer.trainer.sync import OuterScheduler, next_outer_step

_LOOK_S = 1.0
_STOPPED_S = 10.0
"""Seconds of a look after which it does not count: this process was stopped in the meantime."""
_AWAY_S = 2.0
_LAST_WAIT_S = 600.0
_STATE_S = 3600.0
_STATUS_EVERY_S = 2.0


class Meter(Protocol):
    """Times of the inner steps; see `isles.train.metrics`."""

    def pause(self, phase: str) -> float: ...

    def resume(self, paused_at: float) -> None: ...


class Outer:
    """The outer steps of this cluster.

    All ranks must call every method except `plan`, after the same step.

    Args:
        scheduler: on rank 0; None on other ranks.
        batch: samples per inner step.
        forget_ahead: drops samples that were read in advance.
        requested: what this rank wants at the end of the step: an exit code, or 0.
    """

    def __init__(
        self,
        exchange: OuterStep,
        scheduler: OuterScheduler | None,
        *,
        world: World,
        batch: int,
        forget_ahead: Callable[[], None],
        meter: Meter,
        recorder: Recorder,
        total_steps: int | None,
        requested: Callable[[], int],
    ) -> None:
        self.exchange, self._scheduler = exchange, scheduler
        self._config, self._progress, self._world = exchange.config, exchange.progress, world
        self._batch, self._forget_ahead = batch, forget_ahead
        self._meter, self._recorder = meter, recorder
        self._total_steps, self._requested = total_steps, requested
        self._waited: set[int] = set()
        self._paused_s = 0.0
        self._recorded_at = -math.inf
        self._is_finishing = False
        self._stop = 0
        self._last: int | None = None

    def begin(self, *, is_new: bool) -> None:
        """Join the other clusters; contributions sent before a restart are sent again.

        Raises:
            UserError: this cluster is refused, or a new cluster cannot reach the hub.
        """
        exchange, scheduler = self.exchange, self._scheduler
        self._recorder.phase("joining", "the other clusters")
        exchange.send_again()
        began, version = time.monotonic(), exchange.version
        is_done = False
        while not is_done:
            commands, failure = list[Command](), None
            if scheduler is not None:
                scheduler.poll(_LOOK_S)
                if exchange.version > version:  # outer steps since a checkpoint come one by one
                    began, version = time.monotonic(), exchange.version
                hub = scheduler.hub.state
                late_s = _STATE_S if hub.is_behind else self._config.deadline
                is_late = time.monotonic() - began > late_s
                scheduler.restock(is_late=is_late and not is_new)
                commands = scheduler.take_commands()
                failure = scheduler.failure(is_new=is_new)
                is_in = hub.is_joined and not hub.is_behind and not self._lacks(hub.decided)
                is_done = not commands and self._has_samples and (is_in or is_late)
            commands, is_done, failure = self._world.broadcast((commands, is_done, failure))
            if failure is not None:
                raise failure
            for command in commands:
                self._do(command)

    def plan(self) -> bool:
        """True if there is work after the step that begins now; rank 0 decides."""
        if self._scheduler is None:
            return False
        self.exchange.hand_in()
        self._scheduler.speed.step_done(self._paused_s)
        self._paused_s = 0.0
        return self._scheduler.plan()

    def after_inner_step(self, *, has_commands: bool) -> None:
        """Execute the decisions, and wait for an average that is due."""
        began, exchange = time.perf_counter(), self.exchange
        exchange.clock.pause()
        if has_commands:
            paused = self._meter.pause("outer step")
            self._do_commands()
            self._meter.resume(paused)
        exchange.finish_move(only_overdue=True)
        for outer_step in sorted(exchange.sent):
            if outer_step not in exchange.sent:
                continue  # another average may be applied during the wait
            # Outer steps are decided in order, so waiting for a later one would be pointless too.
            if outer_step in self._waited or not exchange.is_overdue(outer_step):
                break
            if not self._await(outer_step, self._config.deadline, "inner steps continue"):
                break
        if not self._has_samples:
            self._restock()
        exchange.clock.resume()
        self._record_status()
        self._paused_s += time.perf_counter() - began

    def finish(self) -> int:
        """Let all clusters end with the same weights, after the last inner step.

        Returns:
            0: the cluster has ended. Otherwise a request of a rank during the wait, an exit code or
                NOW:
            the cluster has not ended, and must resume from a checkpoint.
        """
        self._is_finishing, self._stop = True, 0
        self.exchange.clock.pause()
        if self._end_together():
            self._stop = 0
        self.exchange.clock.resume()
        self._is_finishing = not self._stop
        if self._is_finishing:
            self._recorded_at = -math.inf
        self._record_status()
        return self._stop

    def close(self, *, leaves: bool) -> None:
        """End or pause the cluster.

        Args:
            leaves: tell the others, so that no cluster waits for it.
        """
        self.exchange.close()
        if self._scheduler is not None:
            # A cluster that has joined after the last outer step makes no inner steps.
            is_over = self._is_finishing or self._progress.step == self._total_steps
            self._scheduler.hub.close(leaves=leaves, has_finished=is_over and not self._stop)

    # The end.

    def _end_together(self) -> bool:
        # Average until the others have everything; False: an outer step was not decided.
        exchange, scheduler = self.exchange, self._scheduler
        decided = self._world.broadcast(0 if scheduler is None else scheduler.hub.state.decided)
        if self._lacks(decided):
            self._wait(lambda: not self._lacks(decided), _LAST_WAIT_S, f"outer step {decided - 1}")
            if self._lacks(decided):
                return False
        # Some contributions are refused, or late.
        for _ in range(4 * exchange.num_fragments + len(exchange.sent)):
            if scheduler is not None:
                scheduler.poll()
            self._do_commands()
            exchange.finish_move()
            otherwise = "this cluster ends with its own weights"
            for outer_step in sorted(exchange.sent):
                if not self._await(outer_step, _LAST_WAIT_S, otherwise):
                    return False
            if not exchange.has_learned:
                return self._end_with_all()
            if self._world.broadcast(scheduler is not None and scheduler.hub.state.is_behind):
                break
            exchange.contribute(exchange.version)
        return True

    def _end_with_all(self) -> bool:
        # Apply the others' last averages; False: a stop came first. A cluster that joined late, or
        # whose contribution was late, has no part in the last outer steps, but must not end before
        # they are decided. If no cluster is reachable, it waits at most twice the usual time.
        scheduler, began = self._scheduler, time.monotonic()
        if scheduler is not None:
            scheduler.report(ends=True)
        paused = self._meter.pause("waiting for other clusters")
        limit_s = min(self._config.deadline, _LAST_WAIT_S)
        for _ in range(math.ceil(_LAST_WAIT_S / limit_s)):
            is_late = self._wait(self._is_last, limit_s, "to end together")
            is_away = scheduler is None or scheduler.hub.state.is_away_for(limit_s)
            is_late, is_away = self._world.broadcast((is_late, is_away))
            if is_away or not is_late:
                break
        self._meter.resume(paused)
        if is_late:
            self._recorder.note(
                "the other clusters have not ended after "
                f"{format_duration(time.monotonic() - began)} ({self._others()}), so this cluster "
                f"ends with the weights after {self.exchange.version} outer steps; the others may "
                "end with more"
            )
        return is_late or self._is_last()

    def _is_last(self) -> bool:
        return self._last is not None and self.exchange.version >= self._last

    def _lacks(self, decided: int) -> bool:
        # Whether averages from before this cluster joined must still be applied.
        return next_outer_step(self.exchange.version, self.exchange.sent) < decided

    # Commands.

    def _do_commands(self) -> None:
        taken = [] if self._scheduler is None else self._scheduler.take_commands()
        for command in self._world.broadcast(taken):
            self._do(command)

    def _do(self, command: Command) -> None:
        exchange = self.exchange
        match command:
            case Contribute():
                exchange.contribute(command.outer_step)
            case Apply():
                exchange.apply(command)
                if self._is_finishing:
                    exchange.finish_move()
                self._waited.discard(command.outer_step)
                self._recorded_at = -math.inf
            case Adopt():
                exchange.adopt(command)
                self._waited.clear()
            case Lease():
                exchange.samples.add(command.samples)
            case Revoke():
                exchange.samples.lose(command.samples, self._progress.samples)
                self._forget_ahead()
            case UseReserve():
                exchange.samples.add_reserve(command.count)
            case SendState():
                exchange.send_state()
            case Reset():
                exchange.go_back()
                self._waited.clear()
            case End():
                self._last = command.version
            case Delay():
                exchange.delay = command.steps
            case _:
                assert_never(command)

    # Waiting.

    def _await(self, outer_step: int, limit_s: float, otherwise: str) -> bool:
        # Wait until an average has been applied; False: not within the limit, or a stop came.
        exchange = self.exchange
        paused = self._meter.pause("waiting for other clusters")
        self._waited.add(outer_step)
        exchange.encoded(outer_step)
        if self._wait(lambda: exchange.is_done(outer_step), limit_s, f"outer step {outer_step}"):
            self._recorder.note(
                f"outer step {outer_step} was not decided within {format_duration(limit_s)} "
                f"({self._others()}); {otherwise}"
            )
        self._meter.resume(paused)
        return exchange.is_done(outer_step)

    def _restock(self) -> None:
        # Wait for samples; if the hub is unreachable, use reserved samples.
        scheduler = self._scheduler
        paused = self._meter.pause("waiting for samples")
        limit_s = self._config.deadline
        if scheduler is not None and not scheduler.hub.state.is_connected:
            limit_s = 0.0 if scheduler.uses_reserve else _AWAY_S
        self._wait(lambda: self._has_samples, limit_s, "samples")
        while not self._has_samples:
            if scheduler is not None:
                scheduler.restock(is_late=True)
            self._do_commands()
        self._meter.resume(paused)

    def _wait(self, is_done: Callable[[], bool], limit_s: float, what: str) -> bool:
        # Execute commands until a condition holds; True: rank 0 has waited for the limit without
        # success. After SIGSTOP or a suspend of the machine, the process gets some seconds to reach
        # the hub, and to fetch the others' data.
        scheduler, left_s = self._scheduler, limit_s
        looks, is_over = 0, False
        while not is_done():
            if looks == 1:
                self._recorder.phase("waiting for clusters", what)
                if scheduler is not None:
                    scheduler.report()
            looks += 1
            self._record_status(progresses=False)
            commands, is_late = list[Command](), False
            if scheduler is not None:
                began = time.monotonic()
                scheduler.poll(max(0.01, min(_LOOK_S, left_s)))
                took_s = time.monotonic() - began
                left_s = left_s - took_s if took_s < _STOPPED_S else max(left_s, _STOPPED_S)
                scheduler.restock(is_late=False)
                commands = scheduler.take_commands()
                is_vain = scheduler.hub.state.refusal is not None  # no average will come
                is_late = not commands and (is_vain or left_s <= 0)
            found = self._world.gather((commands, is_late, self._requested()))
            commands, is_over, _ = found[0]
            for command in commands:
                self._do(command)
            self._stop = max(requested for _, _, requested in found)
            if is_over or self._stop:
                break
        if looks > 1:
            self._recorder.phase("training")
        return is_over and not is_done()

    def _others(self) -> str:
        if self._scheduler is None or not self._scheduler.hub.state.is_connected:
            return "the others are not reachable"
        return f"taking part: {', '.join(self._scheduler.hub.state.members) or 'no cluster'}"

    @property
    def _has_samples(self) -> bool:
        # For the next step, if there is one.
        if self._total_steps is not None and self._progress.step >= self._total_steps:
            return True
        return self.exchange.samples_left >= self._batch

    # Records.

    def _record_status(self, *, progresses: bool = True) -> None:
        # The section of status.json; rarely, except after an average and at the end.
        now, scheduler = time.monotonic(), self._scheduler
        if scheduler is None or now - self._recorded_at < _STATUS_EVERY_S:
            return
        self._recorded_at = now
        exchange, hub = self.exchange, scheduler.hub.state
        clock, row = exchange.clock, exchange.last_row
        total_s = clock.exposed_s + clock.hidden_s
        kept = ("outer_step", "step", "mode", "weights", "refused", "norm", "digest", "at")
        self._recorder.update(
            progresses=progresses,
            outer={
                "outer_step": exchange.version,
                "round": exchange.version // exchange.num_fragments,
                "fragments": exchange.num_fragments,
                "sync_every": scheduler.sync_every_at(exchange.version),
                "is_averaged": not exchange.sent and not exchange.has_learned,
                "clusters": list(hub.members),
                **({"meeting": hub.shown} if hub.shown else {}),
                "is_connected": hub.is_connected,
                "is_behind": hub.is_behind,
                "sent_bytes": hub.sent_bytes,
                "received_bytes": hub.received_bytes,
                "bytes_per_s": scheduler.speed.bytes_per_s,
                "exposed_s": clock.exposed_s,
                "hidden_s": clock.hidden_s,
                "hidden_share": clock.hidden_s / total_s if total_s else None,
                "last_outer_step": None if row is None else {name: row[name] for name in kept},
            },
        )
