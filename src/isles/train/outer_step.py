"""The place of the outer step in the training loop."""

from __future__ import annotations

from isles.train.finite import check_finite
from isles.train.parts import Parts
from isles.train.stop import TIME_IS_UP, Decision


def outer_step(parts: Parts, decision: Decision) -> None:
    """Average with other clusters where it is time; nothing in a run of one. All must call this.

    Only weights that are finite travel. After the last inner step all clusters end with the same.
    """
    if parts.outer is None:
        return
    is_last = parts.progress.step == parts.total_steps or decision.stop == TIME_IS_UP
    if decision.outer or is_last:
        check_finite(parts)
    parts.outer.after_inner_step(has_orders=decision.outer)
    if is_last or parts.progress.step == parts.total_steps:  # a later number may be taken
        parts.outer.finish()
