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
    engine: Engine, batches: Iterable[Batch], world: World, *, counts: bool
) -> dict[str, float]:
    """Mean loss over all ranks' batches. All ranks must call this.

    Args:
        engine: whose model is asked.
        batches: this rank's part; all ranks have equally many.
        world: the ranks of the cluster.
        counts: whether this rank is the one of those with the same rows that counts them.

    Returns:
        `loss` and `tokens`; where the loss is that of tokens (in nats), also `perplexity`, its
        exponential; where it is that of pairs, `pairs` and what the method tells besides.
    """
    total = torch.zeros(3, dtype=torch.float64, device=world.device)
    of_pairs = False
    engine.take_figures(of_training=False)  # of nothing that counts
    engine.model.eval()
    try:
        for batch in batches:
            total[0] += engine.evaluate(batch)
            of_pairs = batch.reference_B is not None
            if counts:
                known_BT = batch.targets_BT != IGNORE_INDEX
                total[1] += known_BT.sum()
                total[2] += known_BT.any(1)[0::2].sum()
    finally:
        engine.model.train()
    figures = engine.take_figures(of_training=False)
    sums = torch.cat([total.cpu(), *(value.double().cpu().view(1) for value in figures.values())])
    if world.world_size > 1:
        dist.all_reduce(sums, group=world.control)
    tokens, pairs = float(sums[1]), float(sums[2])
    if of_pairs:
        more = zip(figures, (sums[3:] / pairs).tolist(), strict=True)
        return {"loss": float(sums[0]) / pairs, "tokens": tokens, "pairs": pairs, **dict(more)}
    loss = float(sums[0]) / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"loss": loss, "perplexity": perplexity, "tokens": tokens}
