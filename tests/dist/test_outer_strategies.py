"""Clusters of unlike strategies in one run: real trainers, from the first step to a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.dist.test_outer_train import (
    DEADLINE_S,
    hub,
    made_up,
    model_of,
    start_cluster,
    turns_of,
)

__all__ = ["made_up"]

STRATEGIES = {
    "a": "strategy={kind: deepspeed, zero_stage: 3}",
    "b": "strategy={kind: fsdp, sharding_strategy: HYBRID_SHARD, shard_size: 2}",
}


@pytest.mark.long
def test_zero3_and_hsdp_keep_the_same_weights_through_a_resume(
    made_up: Path, tmp_path: Path
) -> None:
    """Two fragments, a step late; then the run is made longer, on other numbers of ranks."""
    outer = "sync_every: 4, fragments: 2, delay: 1, codec: int4, deadline: 200s"
    resume = {"a": "auto", "b": "auto"}
    with hub(tmp_path, min_clusters=2):
        for max_steps, ranks in ((6, {"a": 2, "b": 2}), (10, {"a": 1, "b": 4})):
            more = f"training.max_steps={max_steps}"
            started = {
                name: start_cluster(
                    made_up, name, ranks[name], outer, strategy, more, resume=resume[name]
                )
                for name, strategy in STRATEGIES.items()
            }
            for name, (run_dir, _, gang) in started.items():
                assert gang.wait(DEADLINE_S) == [0] * ranks[name]
                resume[name] = str(run_dir.path)
    a, b = (run_dir for run_dir, _, _ in started.values())
    digests = [
        {outer_step: row["digest"] for outer_step, row in turns_of(run).items()} for run in (a, b)
    ]
    assert digests[0] == digests[1] and len(digests[0]) >= 5
    assert len(set(digests[0].values())) == len(digests[0]), "nothing was learnt"
    one, other = model_of(a), model_of(b)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
