"""Ending a run whose loss or gradient is not finite, with the ranks and samples at fault."""

from __future__ import annotations

import logging
import math

from isles.errors import TrainingError
from isles.outer.samples import joined
from isles.train.parts import Parts

log = logging.getLogger(__name__)


def check_finite(parts: Parts) -> None:
    """Stop if some step since the last check was not finite. All ranks must call this.

    The engine has kept the weights of the last good step; they are saved before the error.

    Raises:
        TrainingError: naming the step, the ranks and the sample indices.
    """
    good = parts.engine.good_steps()
    if good is None:
        parts.progress.forget_history()
        return
    parts.progress.rewind_to(good)
    bad_step = parts.progress.step + 1
    if parts.world.is_main:
        parts.checkpoints.forget_after(parts.progress.step)
    bad_ranks = _find_bad_ranks(parts)
    parts.save(wait=True)
    if bad_ranks:
        what = f"the loss of step {bad_step} is not finite; " + "; ".join(bad_ranks)
    else:
        numbers = parts.loader.sample_ids(parts.progress.samples).tolist()
        spans = joined([(number, number + 1) for number in numbers])
        samples = ", ".join(f"{start} to {stop - 1}" for start, stop in spans)
        what = (
            f"the gradient of step {bad_step} is not finite, while every loss of it is "
            f"(samples {samples})"
        )
    raise TrainingError(
        what,
        where=f"step {bad_step}",
        fix="lower training.learning_rate or lengthen training.warmup_steps, look at those samples "
        "of the data, or use a wider precision (bf16-mixed, 32-true). The weights of step "
        f"{parts.progress.step}, the last good one, are saved",
        id="loss.finite",
    )


def _find_bad_ranks(parts: Parts) -> list[str]:
    # One line for each rank with a loss that is not finite, from the last good weights.
    data = parts.loader.step(parts.progress.samples)
    rows = [
        (sample, batch.sample(row))
        for batch in data.micro_batches
        for row, sample in enumerate(batch.sample_ids)
    ]
    filler = data.micro_batches[0].sample(0)
    bad = []
    # Where the model is sharded, all ranks must ask it equally often.
    for index in range(max(parts.world.gather(len(rows)))):
        sample, row = rows[index] if index < len(rows) else (None, filler)
        is_good = math.isfinite(float(parts.engine.evaluate(row)))
        if not is_good and sample is not None:
            bad.append(sample)
    every = parts.world.gather((parts.world.rank, parts.world.host, bad))
    return [
        f"rank {rank} on {host}: samples {', '.join(map(str, samples))}"
        for rank, host, samples in every
        if samples
    ]
