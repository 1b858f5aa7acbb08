"""Loss and perplexity on held-out text, exact over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist

from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.world import World
from isles.strategies.base import Engine


def evaluate(
    engine: Engine, batches: Iterable[Batch], world: World, *, counts_tokens: bool
) -> dict[str, float]:
    """Mean loss over the target tokens of all ranks' batches. All ranks must call this.

    Args:
        engine: whose model is asked.
        batches: this rank's part; all ranks have equally many.
        world: the ranks of the cluster.
        counts_tokens: whether this rank is the one of those with the same rows that counts them.

    Returns:
        `loss` (nats per token), `perplexity` (its exponential), `tokens`.
    """
    total = torch.zeros(2, dtype=torch.float64, device=world.device)
    engine.model.eval()
    try:
        for batch in batches:
            total[0] += engine.evaluate(batch)
            if counts_tokens:
                total[1] += (batch.targets_BT != IGNORE_INDEX).sum()
    finally:
        engine.model.train()
    sums = total.cpu()
    if world.world_size > 1:
        dist.all_reduce(sums, group=world.control)
    loss = float(sums[0] / sums[1])
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": float(sums[1])}
