"""Layers of the stages of a pipeline, by the operations that they cost.

It is the only count, for the engine and for the memory of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from isles.facts.memory.architecture import Architecture
from isles.facts.memory.forward import FP32, Forward, Value
from isles.facts.memory.setting import Holding


def work(model: Architecture, length: int) -> tuple[int, int]:
    """Multiplications of one block for one token, and of the head.

    Args:
        length: tokens of a sequence. Half of them are before a token, and attention multiplies
            each twice.
    """
    walk = Forward(weight=FP32)
    model.block(walk, Value(1, model.hidden, FP32), 1)
    return walk.active_params + length * model.heads * model.head_dim, model.head_params


def stages_of(model: Architecture, length: int, num_stages: int, cut: Sequence[int]) -> list[range]:
    """The layers of each stage of a pipeline.

    Args:
        length: tokens of a sequence.
        cut: numbers of layers, if the ranks are unequal; see `assign_layers`.
    """
    if not cut:
        each, head = work(model, length)
        return assign_layers([each] * model.layers, num_stages, head=head)
    assert len(cut) == num_stages and sum(cut) == model.layers, (cut, num_stages, model.layers)
    ends = list(accumulate(cut))
    return [range(end - count, end) for end, count in zip(ends, cut, strict=True)]


def rank_of_stage(stage: int, ranks: int, *, returns: bool) -> int:
    """The rank of a pipeline that holds a stage.

    Args:
        returns: whether the second half of the stages goes back from the last rank to the first.
    """
    return 2 * ranks - 1 - stage if returns and stage >= ranks else stage % ranks


def layers_of_ranks(model: Architecture, length: int, holding: Holding) -> list[int]:
    """Number of layers of each rank of a pipeline.

    Args:
        length: tokens of a sequence.
    """
    ranks, counts = holding.pipeline, [0] * holding.pipeline
    if ranks == 1:
        return [model.layers]
    stages = stages_of(model, length, ranks * holding.stages, holding.cut)
    for index, layers in enumerate(stages):
        counts[rank_of_stage(index, ranks, returns=holding.returns)] += len(layers)
    return counts


def rank_seconds(
    model: Architecture, length: int, cut: Sequence[int], speeds: Sequence[float], *, returns: bool
) -> list[float]:
    """Time of a micro-batch on each rank of a pipeline, in any unit.

    Args:
        length: tokens of a sequence.
        cut: layers of each stage.
        speeds: work per second of each rank.
        returns: see `rank_of_stage`.
    """
    each, head = work(model, length)
    found = [0.0] * len(speeds)
    for stage, layers in enumerate(cut):
        own = each * layers + (head if stage == len(cut) - 1 else 0)
        rank = rank_of_stage(stage, len(speeds), returns=returns)
        found[rank] += own / speeds[rank]
    return found


def assign_layers(
    costs: Sequence[int],
    num_stages: int,
    *,
    head: int = 0,
    speeds: Sequence[float] = (),
    most: Sequence[int] = (),
) -> list[range]:
    """The layers of each stage, such that the slowest stage takes as little time as possible.

    The slowest stage sets the time of a step. If divisions are equally fast, the most even division
    is taken, and then the division with the fewest layers on the first stages, which keep the most
    activations.

    Args:
        costs: work of each layer, in any unit. At least one per stage.
        num_stages: stages in a row.
        head: work of the head, which the last stage has in addition.
        speeds: work per second of each stage's rank, in any unit. Empty: all are equal.
        most: layers that fit on each stage. Empty: any number.

    Returns:
        An empty list if the layers do not fit.
    """
    layers = len(costs)
    assert layers >= num_stages
    before = [sum(costs[:index]) for index in range(layers + 1)]
    speeds, most = speeds or [1] * num_stages, most or [layers] * num_stages

    def cost(start: int, end: int, stage: int) -> float:
        own = before[end] - before[start] + (head if stage == num_stages - 1 else 0)
        return own / speeds[stage]

    # From the last stage back: the least maximum of the stages from `stage` on, by first layer.
    least: dict[int, float] = {layers: 0}
    for stage in reversed(range(num_stages)):
        found_least: dict[int, float] = {}
        for start in range(stage, layers):
            after = [end for end in least if start < end <= start + most[stage]]
            if after:
                found_least[start] = min(max(cost(start, end, stage), least[end]) for end in after)
        least = found_least
    if 0 not in least:
        return []
    bound = least[0]
    # Within this bound, the smallest sum of squares, and then the fewest layers first.
    best: dict[int, tuple[float, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(num_stages)):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in range(stage, layers):
            options = [
                (cost(start, end, stage) ** 2 + squares, (end - start, *counts))
                for end, (squares, counts) in best.items()
                if start < end <= start + most[stage] and cost(start, end, stage) <= bound
            ]
            if options:
                found[start] = min(options)
        best = found
    counts = best[0][1]
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
