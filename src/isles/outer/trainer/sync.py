"""Rank 0's part of the outer steps: it decides when the ranks contribute.

`OuterScheduler` takes the hub's commands and adds its own; `outer.py` broadcasts them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from isles.config.sections.outer import DiLoCoConfig
from isles.errors import CommunicationError, ConfigError, UserError
from isles.facts.units import format_duration
from isles.outer.client.client import OuterLink
from isles.outer.messages import (
    Adopt,
    Apply,
    Command,
    Contribute,
    Delay,
    Lease,
    Reset,
    UseReserve,
)
from isles.outer.trainer.step import OuterStep, Recorder

log = logging.getLogger(__name__)

LEAST, MOST = 10, 1000
"""Bounds for `sync_every: auto`. With fewer inner steps the outer optimizer is hardly worth its
cost; with more, the clusters diverge too far."""

_OPEN_STEPS = 8
"""Maximum number of outer steps, from the next decided one, with contributions in transfer."""
_LEAST_STEPS_AHEAD, _MOST_STEPS_AHEAD = 8, 1000
_MOST = 1e15
_HIDDEN_FROM, _SPARE, _MEASURED_ROUNDS = 0.01, 1.25, 2
"""With `delay: auto`: the share of the inner steps that averaging may take without a delay, the
factor of the measured time to hide, and the number of rounds to measure."""
_USUAL, _LONG = 0.9, 3.0
"""Smoothing of the measured seconds of an inner step."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Inner step after which each outer step is due; fields as in the run file."""

    sync_every: int
    fragments: int
    warmup_rounds: int = 0
    warmup_sync_every: int = 0

    def sync_every_at(self, outer_step: int) -> int:
        is_warmup = outer_step // self.fragments < self.warmup_rounds
        return self.warmup_sync_every if is_warmup else self.sync_every

    def step_of(self, outer_step: int) -> int:
        rounds = outer_step // self.fragments
        short = min(rounds, self.warmup_rounds)
        before = short * self.warmup_sync_every + (rounds - short) * self.sync_every
        place = outer_step % self.fragments + 1
        return before + place * self.sync_every_at(outer_step) // self.fragments


def schedule_of(config: DiLoCoConfig, num_fragments: int) -> Schedule | None:
    """Schedule of the outer steps; None with `sync_every: auto`."""
    every = config.sync_every
    if every == "auto":
        return None
    return Schedule(every, num_fragments, config.warmup_rounds, config.warmup_sync_every or every)


def auto_sync_every(
    *, size_bytes: int, link_bytes_per_s: float, step_s: float, max_overhead: float
) -> int:
    """Inner steps, LEAST to MOST, such that the link takes at most a fraction of their time.

    Args:
        size_bytes: bytes that a cluster sends and fetches to average every weight once.
        link_bytes_per_s: measured speed of the link.
        step_s: seconds per inner step.
        max_overhead: the fraction.
    """
    wait_s = size_bytes / link_bytes_per_s
    return max(LEAST, min(MOST, math.ceil(wait_s / (max_overhead * step_s))))


def auto_delay(cost_s: float, *, step_s: float, interval: int) -> int:
    """Inner steps that hide an outer step, up to half of the steps between two outer steps; 0 if it
    takes at most 1 % of these.

    Args:
        cost_s: seconds of the outer step: encoding, transfer and the new weights.
        step_s: seconds per inner step.
        interval: inner steps between two outer steps.
    """
    if cost_s <= _HIDDEN_FROM * interval * step_s:
        return 0
    return min(math.ceil(_SPARE * cost_s / step_s), interval // 2)


@dataclass(slots=True)
class OuterSpeed:
    """Measured seconds of an inner step, and bytes per second of the link."""

    step_s: float = 0.0
    bytes_per_s: float = 0.0
    moved_bytes: int = 0
    _at: float | None = None
    _by_fragment: dict[int, tuple[int, float]] = field(default_factory=dict)

    def step_done(self, paused_s: float) -> None:
        """Record a finished inner step; `paused_s` of the time since the last one does
        not count."""
        now = time.perf_counter()
        took = 0.0 if self._at is None else now - self._at - paused_s
        self._at = now
        if self.step_s:  # a step that saves or evaluates is not typical
            took = _USUAL * self.step_s + (1 - _USUAL) * min(took, _LONG * self.step_s)
        self.step_s = took

    def outer_step_done(self, apply: Apply, num_fragments: int) -> None:
        """Record an outer step. Fragments differ in size, so the last outer step of each counts."""
        moved, took = apply.sent_bytes + apply.received_bytes, apply.send_s + apply.receive_s
        if moved and took > 0:
            self._by_fragment[apply.outer_step % num_fragments] = moved, took
            all_moved = sum(moved for moved, _ in self._by_fragment.values())
            self.bytes_per_s = all_moved / sum(took for _, took in self._by_fragment.values())
            self.moved_bytes = all_moved * num_fragments // len(self._by_fragment)


class OuterScheduler:
    """Rank 0's half of the outer steps; batch: samples per inner step."""

    def __init__(
        self,
        exchange: OuterStep,
        hub: OuterLink,
        *,
        batch: int,
        total_steps: int | None,
        recorder: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.exchange, self.hub = exchange, hub
        self.speed = OuterSpeed()
        self.uses_reserve = False
        """True if the current samples are reserved ones, not leased."""
        self._config, self._num_fragments = exchange.config, exchange.num_fragments
        self._schedule = schedule_of(exchange.config, exchange.num_fragments)
        self._batch, self._total_steps = batch, total_steps
        self._recorder, self._clock = recorder, clock
        self._began = clock()
        self._commands: list[Command] = []
        self._asked = self._wanted_sync_every = 0
        self._ends = False

    # When outer steps are due.

    def sync_every_at(self, outer_step: int) -> int:
        """Inner steps for one average of all fragments, around an outer step."""
        if self._schedule is not None:
            return self._schedule.sync_every_at(outer_step)
        return max(self.hub.state.sync_every, self._wanted_sync_every, LEAST)

    def interval(self, outer_step: int) -> int:
        """Inner steps between the previous outer step and this one."""
        return max(1, self.sync_every_at(outer_step) // self._num_fragments)

    def step_of(self, outer_step: int) -> int:
        """The inner step after which an outer step is due at the latest; 0 with `auto`."""
        return 0 if self._schedule is None else self._schedule.step_of(outer_step)

    def _is_due(self) -> bool:
        # Whether this cluster contributes after the step that begins now.
        exchange, state, outer_step = self.exchange, self.hub.state, self._next_outer_step
        fragment = outer_step % self._num_fragments
        if state.is_behind or not state.decided <= outer_step < exchange.version + _OPEN_STEPS:
            return False
        if any(other % self._num_fragments == fragment for other in exchange.sent):
            return False
        closing = state.closing
        if closing is not None and closing[0] == outer_step and exchange.has_learned:
            log.info(
                "outer step=%d closes in seconds=%.1f, so contributing the steps up to now",
                *closing,
            )
            return True
        since = exchange.steps + 1 - exchange.contributed_at
        is_time = exchange.progress.step + 1 >= self.step_of(outer_step)
        return is_time and since >= self.interval(outer_step)

    @property
    def _next_outer_step(self) -> int:
        return next_outer_step(self.exchange.version, self.exchange.sent)

    # Commands.

    def plan(self) -> bool:
        """Decide on the work after the step that begins now; returns whether there is any."""
        self.poll()
        self._lease()
        changes = any(isinstance(command, Apply | Adopt | Reset) for command in self._commands)
        self._decide_delay()
        if not changes and self._is_due():
            self._commands.append(Contribute(self._next_outer_step))
        self.report()
        return bool(self._commands)

    def _decide_delay(self) -> None:
        # Once, after the first rounds, and after the warm-up, whose rounds are shorter.
        exchange, step_s = self.exchange, self.speed.step_s
        if self._config.delay != "auto" or exchange.delay is not None or not step_s:
            return
        needed = _MEASURED_ROUNDS * self._num_fragments
        costs = exchange.costs[-needed:]
        is_warmup = self._config.is_warmup(exchange.version, self._num_fragments)
        if is_warmup or len(costs) < needed:
            return
        # The dearest fragment, in its faster round.
        rounds = costs[: self._num_fragments], costs[self._num_fragments :]
        cost_s = max(map(min, *rounds))
        interval = self.interval(exchange.version)
        steps = auto_delay(cost_s, step_s=step_s, interval=interval)
        self._recorder.note(
            f"outer.delay auto: averaging takes {cost_s:.3g} s, and the {interval} steps between "
            f"two averages take {interval * step_s:.3g} s, so delay is {steps}"
        )
        self._commands.append(Delay(steps))

    def take_commands(self) -> list[Command]:
        """The decisions, for all ranks."""
        found, self._commands = self._commands, []
        leases = [command for command in found if isinstance(command, Lease)]
        self._asked -= sum(stop - start for lease in leases for start, stop in lease.samples)
        return found

    def poll(self, timeout_s: float = 0.0) -> None:
        """Take the hub's commands, or wait for some."""
        if timeout_s:
            self.hub.wait(timeout_s)
        for command in self.hub.poll():
            match command:
                case Apply():
                    self._note_average(command)
                    step = self._capped(self.step_of(command.outer_step))
                    self._commands.append(replace(command, step=step))
                case Adopt():
                    self._commands = [c for c in self._commands if not isinstance(c, Apply)]
                    step = self._capped(self.step_of(command.version - 1))
                    self._commands.append(replace(command, step=step))
                case _:
                    self.uses_reserve = self.uses_reserve and not isinstance(command, Lease)
                    self._commands.append(command)

    def _note_average(self, apply: Apply) -> None:
        speed = self.speed
        speed.outer_step_done(apply, self._num_fragments)
        if self._config.sync_every == "auto" and speed.bytes_per_s and speed.step_s:
            self._wanted_sync_every = auto_sync_every(
                size_bytes=speed.moved_bytes,
                link_bytes_per_s=speed.bytes_per_s,
                step_s=speed.step_s,
                max_overhead=self._config.max_sync_overhead,
            )
        for name, why in apply.refused.items():
            self._recorder.note(f"outer step {apply.outer_step}: {name} was refused ({why})")

    def _capped(self, step: int) -> int:
        return step if self._total_steps is None else min(step, self._total_steps)

    # Samples.

    def restock(self, *, is_late: bool) -> None:
        """Request more samples; with `is_late` continue without leased samples."""
        self._lease()
        has_news = any(isinstance(command, Lease) for command in self._commands)
        if is_late and not has_news and self.exchange.samples_left < self._batch:
            self._commands.append(UseReserve(self._samples_ahead()))
            if not self.uses_reserve:
                they_are = {
                    "hub": "the hub is",
                    "hivemind": "the other clusters are",
                    "bucket": "the bucket is",
                }[self._config.engine]
                self._recorder.note(
                    f"{they_are} not leasing samples; until this changes, this cluster reads "
                    "samples that others may have too"
                )
            self.uses_reserve = True

    def _lease(self) -> None:
        # Ahead, at least for the time of all fragments, so that requests overlap with steps.
        wanted = self._samples_ahead()
        if self.exchange.samples_left + self._asked < wanted:
            self._asked += wanted
            self.hub.lease(wanted)

    def _samples_ahead(self) -> int:
        steps = self.sync_every_at(self._next_outer_step)
        steps = min(max(steps, _LEAST_STEPS_AHEAD), _MOST_STEPS_AHEAD)
        if self._total_steps is not None:
            steps = min(steps, self._total_steps - self.exchange.progress.step)
        return steps * self._batch

    # The hub.

    def report(self, *, ends: bool = False) -> None:
        """Set the next heartbeat; ends: whether all work of this cluster is in averages."""
        self._ends = self._ends or ends
        status = self._recorder.status
        outer = status.get("outer") or {}
        self.hub.report(
            step=self.exchange.progress.step,
            since=self.exchange.steps - self.exchange.contributed_at,
            tokens_per_s=_finite(status.get("tokens_per_second")) or 0.0,
            phase=str(status["phase"]),
            sync_every=self._wanted_sync_every,
            loss=_finite(status.get("loss")),
            exposed_s=outer.get("exposed_s", 0.0),
            hidden_s=outer.get("hidden_s", 0.0),
            ends=self._ends,
        )

    def failure(self, *, is_new: bool) -> UserError | None:
        """Why this cluster cannot take part; a new cluster must not start without the others."""
        state = self.hub.state
        if (given := state.refusal) is not None:
            has_hub = self._config.engine != "bucket"
            id = "hub.refused" if has_hub else "bucket.refused"
            return ConfigError(given.what, where=given.where, fix=given.fix, id=id)
        since = state.lost_at or self._began
        if not is_new or state.is_joined or self._clock() - since < self._config.deadline:
            return None
        limit, why = format_duration(self._config.deadline), state.why or "unknown reason"
        if self._config.engine == "hivemind":
            return CommunicationError(
                f"not enough other clusters within {limit}: {why}",
                where="outer.hivemind.initial_peers",
                fix="check that the other clusters are running and that this machine can reach the "
                "address. To start with fewer clusters, lower outer.min_clusters; to wait longer, "
                "raise outer.deadline",
                id="hivemind.peers",
            )
        if self._config.engine == "bucket":
            return CommunicationError(
                f"this cluster could not join through the bucket within {limit}: {why}",
                where=f"outer.url {self._config.url}",
                fix="check that this machine can reach the bucket; to wait longer, raise "
                "outer.deadline",
                id="bucket.away",
            )
        return CommunicationError(
            f"the hub did not answer within {limit}: {why}",
            where=self._config.hub or "the join line in the run directory",
            fix="check that the hub is running (`isles hub`) and that this machine can reach its "
            "port; to wait longer, raise outer.deadline",
            id="hub.silent",
        )


def next_outer_step(version: int, sent: Iterable[int]) -> int:
    """The outer step of a cluster's next contribution, after the contributions it has sent."""
    return max(version, max(sent, default=-1) + 1)


def _finite(value: object) -> float | None:
    # Clamped to the bounds of a `Heartbeat`.
    if not isinstance(value, float) or not math.isfinite(value):
        return None
    return max(-_MOST, min(value, _MOST))
