"""Work of unequal ranks: their shares by the run file, and the layers of their pipeline stages.

A run (`train/cut.py`), its plan (`plan/step.py`) and `strategy: auto` take the layers from here.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from isles.config.layout import Layout
from isles.config.memory import CPU_MICRO_BATCH_SIZE, holding_of, setting_of, step_memory
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.layers import assign_layers, rank_of_stage, rank_seconds, work
from isles.facts.memory.step import most_layers

_LEAST_SPEED = 1e-6
"""Speed of a rank with a share of 0 in a pipeline: each stage has at least one layer."""

_ALIKE = 1.10
"""Ranks whose speeds differ by less than this factor count as equally fast. A recorded cut is
replaced if another cut makes the slowest stage faster by this factor."""

_MORE_ROOM = 1.05
"""Factor of all memory limits between two attempts to cut a model that does not fit."""


def shares_of_ranks(shares: Mapping[str, float], hosts: Sequence[str]) -> list[float]:
    """The share of each rank.

    A named rank gets its own share. The share of a host is divided over its other ranks. A host
    without a name in `shares` has share 1. If no host is named, each unnamed rank has share 1.

    Args:
        shares: by host or rank number.
        hosts: of each rank.
    """
    has_hosts = any(name in hosts for name in shares)
    found = []
    for rank, host in enumerate(hosts):
        if str(rank) in shares and str(rank) not in hosts:
            found.append(shares[str(rank)])
        elif has_hosts:
            others = [r for r, other in enumerate(hosts) if other == host and str(r) not in shares]
            found.append(shares.get(host, 1.0) / len(others))
        else:
            found.append(1.0)
    return found


def pipeline_speeds(
    config: RunConfig, hosts: Sequence[str], measured: Sequence[float | None]
) -> list[float]:
    """The speed of each rank of a pipeline, in any unit.

    Args:
        hosts: of each rank.
        measured: work per second of each rank. None: unknown, and then all ranks count as equally
            fast. Not used unless `balance` is auto.
    """
    if isinstance(config.balance, dict):
        return [max(share, _LEAST_SPEED) for share in shares_of_ranks(config.balance, hosts)]
    known = [speed for speed in measured if speed is not None]
    is_known = config.balance == "auto" and len(known) == len(hosts)
    if not is_known or max(known) < _ALIKE * min(known):
        return [1.0] * len(hosts)
    return known


def deal_layers(
    model: Architecture,
    config: RunConfig,
    strategy: DDPStrategyConfig | FSDPStrategyConfig,
    layout: Layout,
    *,
    speeds: Sequence[float],
    limits: Sequence[float],
    gpu_bytes: int,
    before: tuple[int, ...] = (),
    size_before: int | None = None,
) -> tuple[int, ...]:
    """The layers of each stage of a pipeline, for `Layout.cut`.

    The slowest stage takes as little time as possible, and each stage fits. If no cut fits, the cut
    that exceeds the memory of a rank by the smallest share is used.

    Args:
        speeds: work per second of each rank of the run, in any unit.
        limits: bytes that a step may use on each of them. Infinite: unknown.
        gpu_bytes: memory of the smallest GPU; 0 on CPUs.
        before: the layers of each stage in the checkpoint that the run resumes from, which stay
            unless other layers are faster by 10 %, or fit and these do not.
        size_before: the micro-batch size of this checkpoint, which the run keeps if it divides a
            rank's rows.
    """
    of_rank = -(-config.training.global_batch_size // layout.dp_size)
    rows = min(of_rank, _micro_batch(config, of_rank, gpu_bytes, size_before))
    micro_batches = -(-of_rank // rows)
    of_stages, least = stage_speeds(layout, speeds), _stage_limits(layout, limits)
    layers = cut_layers(
        model,
        config,
        strategy,
        layout,
        rows=rows,
        micro_batches=micro_batches,
        speeds=speeds,
        limits=limits,
        gpu_bytes=gpu_bytes,
    )
    # On as many ranks, `pp_size` may have changed.
    if (len(before), sum(before)) != (len(layers), sum(layers)):
        return layers

    def fits(cut: tuple[int, ...]) -> bool:
        own = replace(layout, cut=cut)
        options = {"rows": rows, "micro_batches": micro_batches, "gpu_bytes": gpu_bytes}
        return all(
            step_memory(model, config, strategy, own, pp_rank=rank, **options).peak.total <= limit
            for rank, limit in enumerate(least)
        )

    if not fits(before) and fits(layers):
        return layers
    length, returns = config.data.seq_length, strategy.pp_schedule == "zbv"
    now_s, new_s = (
        max(rank_seconds(model, length, cut, of_stages, returns=returns))
        for cut in (before, layers)
    )
    return before if now_s < _ALIKE * new_s else layers


def _micro_batch(config: RunConfig, of_rank: int, gpu_bytes: int, before: int | None) -> int:
    # The size for which stages must have room. A GPU's size is measured after the cut.
    given = config.training.micro_batch_size
    if isinstance(given, int):
        return given
    if isinstance(given, dict):
        return max(given.values())
    if before is not None and of_rank % before == 0:
        return before
    return 1 if gpu_bytes else CPU_MICRO_BATCH_SIZE


def cut_layers(
    model: Architecture,
    config: RunConfig,
    strategy: DDPStrategyConfig | FSDPStrategyConfig,
    layout: Layout,
    *,
    rows: int,
    micro_batches: int,
    speeds: Sequence[float],
    limits: Sequence[float],
    gpu_bytes: int = 0,
) -> tuple[int, ...]:
    """The layers of each stage for micro-batches of a known size; see `deal_layers`.

    Args:
        rows: samples of a micro-batch.
        micro_batches: of a rank in a step.
    """
    of_stages, least = stage_speeds(layout, speeds), _stage_limits(layout, limits)
    setting = setting_of(
        config, layout, rows=rows, micro_batches=micro_batches, gpu_bytes=gpu_bytes
    )
    holding = holding_of(config, strategy, replace(layout, cut=()), model, micro_batches)
    each, head = work(model, config.data.seq_length)
    ranks = [
        rank_of_stage(stage, layout.pp, returns=holding.returns)
        for stage in range(layout.pp * holding.stages)
    ]
    for attempt in itertools.count():
        room = [limit * _MORE_ROOM**attempt for limit in least]
        fitting = most_layers(model, setting, holding, room)
        cut = assign_layers(
            [each] * model.layers,
            len(ranks),
            head=head,
            speeds=[of_stages[rank] for rank in ranks],
            # A rank's memory is divided evenly over its stages.
            most=[fitting[rank] // holding.stages for rank in ranks],
        )
        if cut:
            return tuple(map(len, cut))
    raise AssertionError("more room always comes to an end")


def stage_speeds(layout: Layout, speeds: Sequence[float]) -> list[float]:
    """Speed of the ranks that hold one stage together.

    Ranks that share a matrix or a sequence wait for the slowest of them. Pipelines next to each
    other get rows by their speed.

    Args:
        speeds: of each rank of the run.
    """
    found = []
    for pp_rank in range(layout.pp):
        slowest: dict[int, float] = {}
        for rank, speed in enumerate(speeds):
            if layout.place(rank).pp == pp_rank:
                dp_rank = layout.dp_rank(rank)
                slowest[dp_rank] = min(speed, slowest.get(dp_rank, speed))
        found.append(sum(slowest.values()))
    return found


def _stage_limits(layout: Layout, limits: Sequence[float]) -> list[float]:
    # The least memory among the ranks of each stage.
    return [
        min(limit for rank, limit in enumerate(limits) if layout.place(rank).pp == pp_rank)
        for pp_rank in range(layout.pp)
    ]
