"""Layers of the stages of a pipeline, by the operations that they cost.

It is the only count, for the engine and for the memory of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

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


def layers_of_rank(model: Architecture, length: int, holding: Holding, *, is_last: bool) -> int:
    """Layers of the last rank of a pipeline, or the most layers of any rank before it.

    Args:
        length: tokens of a sequence.
    """
    ranks = holding.pipeline
    if ranks == 1:
        return model.layers
    each, head = work(model, length)
    stages = assign_layers([each] * model.layers, ranks * holding.stages, head=head)
    counts = [len(stage) for stage in stages]
    second = counts[ranks:] or [0] * ranks
    counts = list(map(sum, zip(counts, second[::-1] if holding.returns else second, strict=False)))
    # Of a schedule that returns, the first rank is the last stage's.
    return counts[-1] if is_last else max(counts if holding.returns else counts[:-1])


def assign_layers(costs: Sequence[int], num_stages: int, *, head: int = 0) -> list[range]:
    """The layers of each stage, such that the slowest stage has as little work as possible.

    The slowest stage sets the time of a step. If divisions are equally fast, the most even division
    is taken, and then the division with the fewest layers on the first stages, which keep the most
    activations.

    Args:
        costs: work of each layer, in any unit. At least one per stage.
        num_stages: stages in a row.
        head: work of the head, which the last stage has in addition.
    """
    layers = len(costs)
    assert layers >= num_stages
    before = [sum(costs[:index]) for index in range(layers + 1)]

    def cost(start: int, end: int, stage: int) -> int:
        return before[end] - before[start] + (head if stage == num_stages - 1 else 0)

    # From the last stage back: the least maximum of the stages from `stage` on, by first layer.
    least = {layers: 0}
    for stage in reversed(range(num_stages)):
        ends, later = least, range(stage, layers)
        least = {
            start: min(
                max(cost(start, end, stage), most) for end, most in ends.items() if end > start
            )
            for start in later
            if any(end > start for end in ends)
        }
    bound = least[0]
    # Within this bound, the smallest sum of squares, and then the fewest layers first.
    best: dict[int, tuple[int, tuple[int, ...]]] = {layers: (0, ())}
    for stage in reversed(range(num_stages)):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start in range(stage, layers):
            options = [
                (cost(start, end, stage) ** 2 + squares, (end - start, *counts))
                for end, (squares, counts) in best.items()
                if end > start and cost(start, end, stage) <= bound
            ]
            if options:
                found[start] = min(options)
        best = found
    counts = best[0][1]
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
