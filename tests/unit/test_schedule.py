"""The learning rate of each step."""

from __future__ import annotations

import math
from itertools import pairwise

from isles.config.sections.training import TrainingConfig, learning_rate
from tests.each import each


def rates(total: int, **fields: object) -> list[float]:
    config = TrainingConfig.model_validate({"max_steps": total, "learning_rate": 1.0, **fields})
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


@each("shape", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_rises_and_the_peak_is_reached(shape: str) -> None:
    found = rates(100, lr_scheduler_type=shape, warmup_steps=10)
    assert all(low < high for low, high in pairwise(found[:11]))
    assert found[0] > 0, "no step is wasted on a rate of zero"
    assert max(found) == found[10] == 1.0


@each("shape", ["linear", "cosine", "wsd"])
def test_falls_towards_the_minimum_and_wastes_no_step(shape: str) -> None:
    found = rates(100, lr_scheduler_type=shape, min_lr_ratio=0.1)
    assert all(high >= low for high, low in pairwise(found))
    assert 0.1 < found[-1] < 0.2


def test_cosine_is_half_way_down_half_way_through() -> None:
    assert math.isclose(rates(100, lr_scheduler_type="cosine")[50], 0.5)


def test_wsd_is_stable_until_its_decay() -> None:
    found = rates(100, lr_scheduler_type="wsd", decay_steps=20)
    assert found[:81] == [1.0] * 81
    assert found[81] < 1.0


def test_constant_needs_no_end() -> None:
    config = TrainingConfig(max_time=60.0, learning_rate=0.5, lr_scheduler_type="constant")
    assert learning_rate(config, 10**6, None) == 0.5
