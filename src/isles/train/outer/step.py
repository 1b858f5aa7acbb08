"""The place of the outer step in the training loop."""

from __future__ import annotations

from isles.errors import ExitCode
from isles.train.finite import check_finite
from isles.train.parts import Parts
from isles.train.stop import NOW, TIME_IS_UP, Decision, StopBeforeTraining


def outer_step(parts: Parts, decision: Decision) -> int:
    """Average with other clusters where it is time; nothing in a run of one. All must call this.

    Only weights that are finite travel. After the last inner step all clusters end with the same.

    Returns:
        An exit code to stop with, as in `end_together`; 0: nothing but what was decided.
    """
    if parts.outer is None:
        return 0
    is_last = parts.progress.step == parts.total_steps or decision.stop == TIME_IS_UP
    if decision.outer or is_last:
        check_finite(parts)
    parts.outer.after_inner_step(has_orders=decision.outer)
    if is_last or parts.progress.step == parts.total_steps:  # a later number may be taken
        return end_together(parts)
    return 0


def end_together(parts: Parts) -> int:
    """After the last inner step: let all clusters end with the same weights. All must call this.

    Returns:
        An exit code to stop with: a stop was asked for while other clusters were waited for, and
        whoever goes on from the checkpoint calls this again; 0: it is done.

    Raises:
        StopBeforeTraining: the run is to end at once, without saving.
    """
    stop = 0 if parts.outer is None else parts.outer.finish()
    if stop >= NOW:
        raise StopBeforeTraining(ExitCode.INTERRUPTED, "stopped at once, without saving")
    return stop


def go_on_ending(parts: Parts) -> int:
    """Of a run that was stopped after its last step: what was left to do. All must call this.

    Returns:
        As `end_together`; where it is a stop, everything is saved.
    """
    stop = end_together(parts) if parts.progress.step == parts.total_steps else 0
    if stop:
        parts.save(wait=True)
    return stop
