"""The section `watchdog`: what happens when a step takes far longer than usual."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import DurationS, Section


class WatchdogConfig(Section):
    """Notices a step that takes far longer than usual, says which rank is behind and where it
    stands, and keeps the stacks of all ranks under the run directory."""

    slow_factor: Annotated[float, Field(ge=2, le=10_000)] = 10.0
    """A step is taken for stuck when it lasts so many times as long as the usual one."""

    min_time: Annotated[DurationS, Field(ge=1)] = 60.0
    """And no sooner than this."""

    max_silence: DurationS | None = 1800.0
    """A script of your own that has reported no step and printed nothing on any rank for so long is
    taken for stuck; null: never. Only with training.script."""

    action: Literal["report", "stop"] = "report"
    """report: say so and go on waiting, until clusters.comm_timeout. stop: end the run, or start
    its ranks again while clusters.max_restarts allows."""
