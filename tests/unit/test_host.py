"""The host's part in a step: its clock."""

from __future__ import annotations

import itertools

from isles.train.clock import Laps


def test_a_part_of_a_step_is_read_when_the_step_is_recorded():
    """On a GPU reading waits; a mark does not."""
    marks, reads = itertools.count(), []

    def between(begin: int, end: int) -> float:
        reads.append((begin, end))
        return float(end - begin)

    laps = Laps(lambda: next(marks), between)
    for _ in range(2):
        laps.begin()
        laps.end("data")
        laps.end("optimizer")
    assert reads == [], "nothing waits"
    assert laps.take() == [("data", 1.0), ("optimizer", 1.0)] * 2
    assert reads == [(0, 1), (1, 2), (3, 4), (4, 5)], "and no part reaches into another step"
    assert laps.take() == []
