"""Speeds that the drivers of GPUs report: evidence that a GPU is slower than equal GPUs."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isles.run.cards import POWER_LIMIT, find_cards

log = logging.getLogger(__name__)

_EVERY_S = 1.0
"""Time between two readings. A driver may need a millisecond for one."""

_CLOCK = 1.05
"""Ratio between two clocks that differ. Equal GPUs at one power limit differ by 2 to 4 %."""

_OFTEN = 0.5
"""A GPU counts as throttled if it was throttled in this share of the readings."""


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """State of a GPU in some time.

    Args:
        clock_mhz: mean clock.
        throttled: share of readings with throttling by heat, the power supply or the hardware.
    """

    clock_mhz: float
    throttled: float


class GpuMeter:
    """Readings of this rank's GPU between two reviews of the split.

    Args:
        position: number of the GPU among the visible GPUs.
    """

    def __init__(self, position: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._driver, self._position, self._clock = find_cards(position + 1), position, clock
        self._last_s = -_EVERY_S
        self._found: list[GpuSpeed] = []

    def step_done(self) -> None:
        """Read the GPU, at most once a second."""
        now = self._clock()
        if self._driver is None or now < self._last_s + _EVERY_S:
            return
        self._last_s = now
        try:
            clock_mhz, why = self._driver.speed(self._position)
        except Exception as error:  # evidence only: a driver that fails must not end the run
            log.info("the GPU's driver reports no clock: %s", error)
            self._driver = None
            return
        if clock_mhz:
            self._found.append(GpuSpeed(clock_mhz, float(why not in ("", POWER_LIMIT))))

    def readings(self) -> list[GpuSpeed]:
        """The readings since the last `reset`; none if no driver reports clocks."""
        return list(self._found)

    def reset(self) -> None:
        """Delete all readings."""
        self._found.clear()


def slowest_gpu(gpus: Sequence[GpuSpeed]) -> GpuSpeed:
    """One state for GPUs that wait for each other."""
    return GpuSpeed(min(c.clock_mhz for c in gpus), max(c.throttled for c in gpus))


def mean_gpu(gpus: Sequence[GpuSpeed]) -> GpuSpeed:
    """The state over the time of several states."""
    return GpuSpeed(
        statistics.fmean(c.clock_mhz for c in gpus), statistics.fmean(c.throttled for c in gpus)
    )


def is_held_back(gpu: GpuSpeed, equals: Sequence[GpuSpeed]) -> bool:
    """True if a GPU is slower than most of its equals (and itself), by its driver."""
    usual_mhz = statistics.median_high(other.clock_mhz for other in equals)
    usual = statistics.median_low(other.throttled for other in equals)
    is_throttled = usual < _OFTEN <= gpu.throttled and gpu.clock_mhz < usual_mhz
    return is_throttled or gpu.clock_mhz * _CLOCK <= usual_mhz


def is_ahead(gpu: GpuSpeed, equals: Sequence[GpuSpeed]) -> bool:
    """True if a GPU is faster than most of its equals (and itself), by its driver."""
    usual_mhz = statistics.median_high(other.clock_mhz for other in equals)
    usual = statistics.median_low(other.throttled for other in equals)
    is_free = gpu.throttled < _OFTEN <= usual and gpu.clock_mhz > usual_mhz
    return is_free or gpu.clock_mhz >= _CLOCK * usual_mhz
