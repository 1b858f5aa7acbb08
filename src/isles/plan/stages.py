"""Stages of a pipeline in a plan, dealt as a run deals them (`train/cut.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from isles.config.layout import Layout
from isles.config.memory import LEAST_SPEED, cut_layers, holding_of
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.layers import layers_of_ranks, rank_seconds


def deal_layers(
    model: Architecture,
    config: RunConfig,
    strategy: DDPStrategyConfig | FSDPStrategyConfig,
    layout: Layout,
    speeds: Sequence[float],
    limits: Sequence[float],
    *,
    gpu_bytes: int,
) -> tuple[Layout, list[float], list[int]]:
    """The stages of a pipeline.

    Args:
        speeds, limits: speed and memory of each rank of the run; see `cut_layers`.
        gpu_bytes: memory of the smallest GPU; 0 on CPUs.

    Returns:
        The layout with its cut, and for each rank of a pipeline its work over an even share, and
        its layers.
    """
    given, length = config.training.micro_batch_size, config.data.seq_length
    rows = max(1, config.training.global_batch_size // layout.dp_size)
    micro = min(rows, given if isinstance(given, int) else 1)
    steps = -(-rows // micro)
    cut = cut_layers(
        model,
        config,
        strategy,
        layout,
        rows=micro,
        micro_batches=steps,
        speeds=[max(speed, LEAST_SPEED) for speed in speeds],
        limits=limits,
        gpu_bytes=gpu_bytes,
    )
    layout = replace(layout, cut=cut)
    holding = holding_of(config, strategy, layout, model, steps)
    work = rank_seconds(model, length, cut, [1.0] * layout.pp, returns=holding.returns)
    shares = [own * layout.pp / sum(work) for own in work]
    return layout, shares, layers_of_ranks(model, length, holding)
