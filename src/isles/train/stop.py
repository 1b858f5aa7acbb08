"""Requests to stop or save, from signals and clocks, agreed on by all ranks at a step's end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist

from isles.config.sections.run import RunConfig
from isles.dist.world import World
from isles.errors import ExitCode
from isles.run.paths import Attempt
from isles.run.records import error_if_deleted
from isles.run.stop import StopKind, read_stop_request

log = logging.getLogger(__name__)

_STUCK_S = 3.0
_LOOK_S = 0.5
_NOW_S = 10.0
"""Seconds that a step may take after a request to end without saving."""

MAX_SAVING_SHARE = 0.02
"""Largest share of the time that checkpoints of `every_minutes: auto` may stop training."""

NOW = 1000
"""Not an exit code: end at this step, without saving."""

TIME_IS_UP = 1
"""Not an exit code: the run's length is a time that has passed."""

_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.REQUEUE,
    signal.SIGUSR1: ExitCode.REQUEUE,
    # Sent by the agent only, with the lowest priority: a user's request to stop comes first.
    signal.SIGUSR2: ExitCode.HANDOVER,
}

_KIND_SIGNALS: dict[StopKind, signal.Signals] = {
    "save": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "now": signal.SIGINT,
}


class StopBeforeTraining(BaseException):
    """A requested stop without a save: before the first step, or immediately."""

    def __init__(
        self, code: ExitCode, reason: str = "stopped before the first step; nothing was lost"
    ) -> None:
        super().__init__(code)
        self.code = code
        self.reason = reason


class StopSignals:
    """SIGINT asks to save and stop with 130, SIGTERM and SIGUSR1 with 85, SIGUSR2 with 84.

    A request file of `isles stop` in the attempt's folder does the same. Main thread only.

    Args:
        attempt: its folder is checked for requests; None: no folder.
    """

    def __init__(self, attempt: Attempt | None = None) -> None:
        self.requested = 0
        self.was_requested = False
        """True if a request in the attempt's folder caused the stop."""
        self._is_now = False
        self._training = False
        self._before = {number: signal.signal(number, self._handle) for number in _CODES}
        # A rank that waits inside torch does not run handlers, so a thread acts for it.
        reader, writer = os.pipe()
        # set_wakeup_fd refuses a descriptor that can block.
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True).start()
        self._is_over = threading.Event()
        if attempt is not None:
            threading.Thread(target=self._look, args=(attempt,), daemon=True).start()

    @property
    def stop_code(self) -> int:
        """This rank's request for the end of the step: an exit code, NOW, or 0."""
        return NOW if self._is_now else self.requested

    def training_begins(self) -> None:
        """Delay signals until the end of a step from now on."""
        self._training = True

    def restore(self) -> None:
        """Restore the signal handlers."""
        self._is_over.set()
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _watch(self, reader: int) -> None:
        # End a rank that must stop but is stuck before the first step. Nothing is lost.
        number = os.read(reader, 1)[0]
        is_over = self._is_over.wait(_STUCK_S)
        if not is_over and not self._training and not self.requested:
            os._exit(_CODES[signal.Signals(number)])

    def _look(self, attempt: Attempt) -> None:
        # Turn a request in the attempt's folder into the equivalent signal. If that folder is gone,
        # end the rank, because no agent may be left to end it.
        last: StopKind | None = None
        while not self._is_over.wait(_LOOK_S):
            if (gone := error_if_deleted(attempt)) is not None:
                log.error("%s", gone)
                os._exit(gone.exit_code)
            try:
                request = read_stop_request(attempt) if attempt.stop_request.exists() else None
            except OSError:  # a network disk, while the file is replaced: retried
                continue
            if request is None or request.kind == last:
                continue
            last = request.kind
            self.was_requested = True
            self._is_now = last == "now"
            os.kill(os.getpid(), _KIND_SIGNALS[last])
            if self._is_now and not self._is_over.wait(_NOW_S):
                os._exit(ExitCode.INTERRUPTED)  # the step does not end by itself

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        code = _CODES[signal.Signals(number)]
        self.requested = max(self.requested, int(code))
        if not self._training:
            raise StopBeforeTraining(code)


@dataclass(frozen=True, slots=True)
class Decision:
    """The action of all ranks at the end of this step.

    Args:
        stop: exit code to stop with, TIME_IS_UP to finish, 0 to continue.
        save: save now because of the clock.
        outer: whether rank 0 has work for all ranks; see `Outer`.
        is_saving: whether some rank was still writing a checkpoint when this step began.
    """

    stop: int
    save: bool
    outer: bool
    is_saving: bool


class Agreement:
    """Makes every rank stop, or save, at the same step.

    The ranks exchange their requests during the step's computation, so no step waits. Only the
    clock of rank 0 decides about time.

    Args:
        elapsed_s: of training in earlier attempts.
        now: monotonic clock, seconds.
    """

    def __init__(
        self,
        world: World,
        signals: StopSignals,
        config: RunConfig,
        elapsed_s: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._signals, self._now = world, signals, now
        limits, saves = config.training, config.checkpoint
        # max_time limits the run if it is the only length; otherwise it limits this attempt.
        ends_run = limits.max_steps is None and limits.num_train_epochs is None
        self._time_code = TIME_IS_UP if ends_run else int(ExitCode.REQUEUE)
        self._stop_at: float | None = None
        if limits.max_time is not None:
            self._stop_at = now() + limits.max_time - (elapsed_s if ends_run else 0.0)
        self._save_every_s = self._said_s = saves.save_every_s
        self._is_limited = saves.every_minutes == "auto"
        self._saved_at = now()
        self._blocked_ms = self._blocked_before_ms = 0
        self._is_owed = False
        self._requests = torch.zeros(5, dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self, *, outer: bool = False, is_saving: bool = False) -> None:
        """Send this rank's requests at the start of a step. All ranks must call this.

        Args:
            outer, is_saving: of this rank; see `Decision`.
        """
        stop, save = self._signals.stop_code, False
        if self._world.is_main:
            now = self._now()
            if self._stop_at is not None and now >= self._stop_at:
                stop = max(stop, self._time_code)
            every_s = self._save_interval_s()
            save = every_s is not None and now - self._saved_at >= every_s
        requests = (stop, int(save), int(outer), int(is_saving), self._blocked_ms)
        self._requests.copy_(torch.tensor(requests, dtype=torch.int32))
        if self._world.world_size > 1:
            # The largest number is the strongest request: NOW, then 130, 85, 84, then TIME_IS_UP.
            self._work = dist.all_reduce(
                self._requests, op=dist.ReduceOp.MAX, group=self._world.control, async_op=True
            )

    def decide(self) -> Decision:
        """The agreed decision, at the end of the same step. All ranks must call this.

        Raises:
            StopBeforeTraining: the run must end immediately, without saving.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        stop, save, outer, is_saving, self._blocked_ms = self._requests.tolist()
        if stop >= NOW:
            raise StopBeforeTraining(ExitCode.INTERRUPTED, "stopped immediately, without saving")
        return Decision(stop=stop, save=bool(save), outer=bool(outer), is_saving=bool(is_saving))

    def may_save(self, decision: Decision, *, is_due: bool) -> bool:
        """True if the ranks save at the end of this step. All ranks get the same answer.

        A checkpoint that is due waits, without stopping a step, until every rank has written the
        checkpoint before.

        Args:
            is_due: whether this step's number asks for a checkpoint.
        """
        was_owed, self._is_owed = self._is_owed, self._is_owed or is_due or decision.save
        if self._is_owed and not was_owed and decision.is_saving:
            log.info("the next checkpoint waits until the one before is written")
        return self._is_owed and not decision.is_saving

    def saved(self, blocked_s: float) -> None:
        """Restart the save clock after a save that stopped training for some seconds."""
        self._saved_at, self._is_owed = self._now(), False
        self._blocked_before_ms = self._blocked_ms
        self._blocked_ms = min(int(1000 * blocked_s), 2**31 - 1)

    def _save_interval_s(self) -> float | None:
        # On rank 0. It is longer if the last two saves stopped the slowest rank for a large share
        # of it. A single save may take minutes: the first allocates memory, and a disk may stall.
        every_s = self._save_every_s
        blocked_s = min(self._blocked_before_ms, self._blocked_ms) / 1000
        if every_s is None or self._said_s is None or not self._is_limited:
            return every_s
        least_s = blocked_s / MAX_SAVING_SHARE
        if least_s > self._said_s:
            self._said_s = least_s
            log.info(
                "a checkpoint stops training for %.1f s, so the next one comes after %.0f min "
                "instead of %.0f min; this keeps saving at %.0f %% of the time",
                *(blocked_s, least_s / 60, every_s / 60, 100 * MAX_SAVING_SHARE),
            )
        return max(every_s, least_s)
