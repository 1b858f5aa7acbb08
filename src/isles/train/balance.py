"""The split of a step's rows over the ranks, and each rank's micro-batches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from isles.balance.balancer import Balancer
from isles.balance.curve import Curve, slowest
from isles.balance.gpus import GpuMeter
from isles.balance.revise import Allocation, RankDevice, SplitHistory, choose, equal_devices, pooled
from isles.checkpoint.tensors import disk_failure
from isles.config.balance import shares_of_ranks
from isles.config.fit import memory_advice
from isles.config.layout import Strategy
from isles.config.sections.run import RunConfig
from isles.dist.mesh import Mesh
from isles.dist.split import RowSplit, even_split, shared_split
from isles.dist.world import World
from isles.errors import ConfigError, OutOfMemoryError, UserError
from isles.run.checkpoints import CheckpointInfo
from isles.run.paths import RunDir
from isles.run.process import processor_name
from isles.strategies.fsdp import find_blocks
from isles.train.probe import cpu_micro_batch, even_micro_batch, measure_curve
from isles.train.record import Recorder
from isles.train.strategy import runs_in_step

log = logging.getLogger(__name__)

_PER_MICRO_BATCH = 0.1
"""Rows whose computing time equals the fixed cost of one micro-batch, if nothing was measured. It
makes isles prefer few large micro-batches when nothing else decides."""

Number = TypeVar("Number", int, float)


def make_balancer(
    model: nn.Module,
    config: RunConfig,
    strategy: Strategy,
    mesh: Mesh,
    world: World,
    run_dir: RunDir,
    recorder: Recorder,
    resume_from: CheckpointInfo | None,
    *,
    is_cut_kept: bool = True,
) -> Balancer:
    """The split that an attempt starts with. All ranks must call this.

    A run that resumes with the same ranks on the same devices keeps the split of each step, so that
    it adds the same numbers in the same order. Equal devices start with equal rows, even if other
    work slows one of them at that moment: only real steps can measure their speed.

    Args:
        is_cut_kept: whether each rank of a pipeline has the layers that it had before the
            checkpoint. If not, its largest micro-batch and its speed have changed.

    Raises:
        ConfigError: shares or sizes name hosts or ranks that are not in the run.
        OutOfMemoryError: not even one row fits on some rank.
    """
    chooser = _Chooser(model, config, strategy, mesh, world, resume_from, is_cut_kept)
    step = resume_from.step if resume_from else 0
    history = None
    if chooser.is_auto:
        history, first = chooser.history(run_dir, step, recorder)
    else:
        first = chooser.allocate(step)
    balancer = Balancer(world, first, history, run_dir.balance, step)
    with contextlib.suppress(UserError):  # a model without blocks is not measured in training
        # By their types: a pipeline takes the model apart.
        balancer.block_types = tuple({type(block) for block in find_blocks(model)})
    if mesh.dp_size > 1 and config.balance != "even":
        kind = config.balance if isinstance(config.balance, str) else "shares"
        log.info("rows of each rank (balance: %s)\n%s", kind, balancer.table())
        recorder.phase("building model", balancer.summary())
    return balancer


def watch_speed(
    balancer: Balancer,
    model: nn.Module,
    config: RunConfig,
    world: World,
    *,
    is_pipeline: bool = False,
) -> None:
    """Have the balancer measure the blocks of an engine's model. All ranks must call this.

    Args:
        is_pipeline: whether the speeds of the ranks also decide the layers of their stages.
    """
    if not (balancer.is_auto or is_pipeline):
        return
    blocks = [module for module in model.modules() if isinstance(module, balancer.block_types)]
    device = world.host, device_name(world)
    every = world.gather((bool(blocks), device))
    without = [rank for rank, (has_blocks, _) in enumerate(every) if not has_blocks]
    if without:
        log.info("balance stays fixed during training: rank %d has no blocks", without[0])
        return
    if config.strategy.kind == "deepspeed":
        # ZeRO-3 gathers inside a block, before each matrix, so only the matrices are pure
        # computation.
        blocks = [
            part for block in blocks for part in block.modules() if isinstance(part, nn.Linear)
        ]
    has_equals = world.device.type == "cuda" and [other for _, other in every].count(device) > 1
    balancer.watch(blocks, GpuMeter(world.local_rank) if has_equals else None)


class _Chooser:
    # The search of one attempt for its split. Every method is collective.

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        strategy: Strategy,
        mesh: Mesh,
        world: World,
        resume_from: CheckpointInfo | None,
        is_cut_kept: bool,
    ) -> None:
        self._is_cut_kept = is_cut_kept
        self._model, self._config, self._strategy = model, config, strategy
        self._mesh, self._world = mesh, world
        self._from = resume_from
        self._manifest: Mapping[str, Any] = resume_from.manifest if resume_from else {}
        self._rows = config.training.global_batch_size
        self._in_step = runs_in_step(strategy)
        self._devices = world.gather(RankDevice(world.host, device_name(world), mesh.dp_rank))
        self._hosts = [device.host for device in self._devices]
        cluster = config.clusters[0]
        self._may_miss = cluster.min_nodes < cluster.max_nodes
        self._caps = self._given_sizes()
        self._is_cuda = world.device.type == "cuda"
        self._cpu_size = 0
        self._equals = equal_devices(self._devices)
        self.is_auto = config.balance == "auto" and mesh.dp_size > 1
        self._is_measured = self.is_auto and len(set(self._equals)) > 1

    def history(
        self, run_dir: RunDir, step: int, recorder: Recorder
    ) -> tuple[SplitHistory, Allocation]:
        # The split decided earlier, if it still holds; else an empty one.
        def load() -> SplitHistory:
            with contextlib.nullcontext() if self._from is None else self._from.reading("balance"):
                return SplitHistory.load(run_dir.balance, self._manifest.get("balance"))

        before = self._world.main_first(load)
        history = before.going_on_after(step, self._fits)
        if history is None:
            if before.at(step) is not None:
                log.info("balance: ranks, devices or sizes have changed since step %d", step)
            if self._is_measured:
                recorder.phase("balancing", "measuring the ranks")
            history = before.add(self.allocate(step))
        current = history.at(step)
        assert current is not None
        if history != before:
            # Before any step: an attempt killed before its first save is repeated with the same
            # split.
            self._world.main_first(lambda: _write(history, run_dir.balance))
        return history, current

    def allocate(self, step: int) -> Allocation:
        balance, dp_size = self._config.balance, self._mesh.dp_size
        rows = -(-self._rows // dp_size)
        size_before = self._manifest.get("micro_batch_size")
        is_kept = size_before is not None and rows % size_before == 0 and self._is_cut_kept
        if not self._is_cuda:
            parts = self._model, self._config, self._strategy, self._mesh, self._world
            self._cpu_size = cpu_micro_batch(*parts)
        # A GPU's memory is a limit. Without a given size, the limit is measured.
        is_limited = self._is_cuda and None in self._caps
        is_limited = is_limited and (isinstance(balance, dict) or not is_kept)
        curves, is_settled = self._curves() if self._is_measured or is_limited else (None, True)
        caps = [cap for cap in self._caps if cap is not None]
        even_size = min(caps, default=0)
        if None in self._caps:
            largest = min(curve.limit for curve in curves) if curves else self._cpu_size
            stays = self._is_cut_kept or (size_before or 0) <= largest
            found = even_micro_batch(rows, largest, size_before if stays else None)
            even_size = min([found, *caps])
        if is_limited:
            log.info("micro_batch_size=%d fits", even_size)
        default = even_size if self._is_cuda else self._cpu_size
        limits = [cap or default for cap in self._caps]  # if nothing was measured
        split = even_split(self._rows, dp_size, even_size, in_step=self._in_step)
        if isinstance(balance, dict):
            shares = [0.0] * dp_size
            by_rank = rank_shares(balance, self._hosts, may_miss=self._may_miss)
            for device, share in zip(self._devices, by_rank, strict=True):
                shares[device.dp_rank] += share
            limits = [curve.limit for curve in curves] if curves else limits
            split = shared_split(self._rows, shares, limits, in_step=self._in_step)
        elif not self.is_auto:
            sizes = tuple(cap or even_size for cap in self._caps)
            split = RowSplit(split.rows, sizes, self._in_step)
        elif curves is not None:
            curves = pooled(curves, self._equals)
            if is_settled:
                split = choose(curves, self._rows, even_size, in_step=self._in_step)
            else:
                log.info(
                    "balance: the measured speeds did not settle because other work disturbs them; "
                    "ranks get even rows until real steps have shown each rank's speed"
                )
        is_timed = self.is_auto and curves is not None
        if curves is None:
            curves = tuple(map(_proportional, limits))
        kind = self._strategy.kind
        return Allocation(
            step, split, even_size, kind, tuple(self._devices), tuple(curves), is_timed
        )

    def _fits(self, known: Allocation) -> bool:
        # Whether the ranks, devices, layers and sizes that the split depends on are unchanged.
        return (
            self._is_cut_kept
            and known.devices == tuple(self._devices)
            and known.strategy == self._strategy.kind
            and known.split.in_step == self._in_step
            and known.split.global_batch_size == self._rows
            and all(
                size <= (cap or size)
                for size, cap in zip(known.split.micro_batch_sizes, self._caps, strict=True)
            )
        )

    def _curves(self) -> tuple[Sequence[Curve], bool]:
        # Measured on all ranks at the same time, one curve per data-parallel rank; whether all
        # settled.
        cap = self._caps[self._mesh.dp_rank]
        if cap is None and not self._is_cuda:
            cap = self._cpu_size
        found, is_settled = measure_curve(
            self._model, self._config, self._strategy, self._mesh, self._world, cap
        )
        every, all_settled = zip(*self._world.gather((found, is_settled)), strict=True)
        together: list[list[Curve]] = [[] for _ in self._caps]
        for rank, (curve, device) in enumerate(zip(every, self._devices, strict=True)):
            if curve is None:
                raise OutOfMemoryError(
                    f"one sequence of {self._config.data.seq_length} tokens does not fit on the "
                    "GPU",
                    where=f"rank {rank} on {device.host}",
                    fix=memory_advice(),
                    id="memory.gpu",
                )
            together[device.dp_rank].append(curve)
        curves = []
        for of_rank, cap in zip(together, self._caps, strict=True):
            curve = slowest(of_rank)
            curves.append(curve if cap is None else curve.capped(cap))
        return curves, all(all_settled)

    def _given_sizes(self) -> list[int | None]:
        # The run file's micro-batch size for each data-parallel rank; None: isles finds it.
        given = self._config.training.micro_batch_size
        if isinstance(given, int):
            return [given] * self._mesh.dp_size
        sizes: list[int | None] = [None] * self._mesh.dp_size
        if given == "auto":
            return sizes
        by_rank = rank_sizes(given, self._hosts, may_miss=self._may_miss)
        for device, size in zip(self._devices, by_rank, strict=True):
            known = [s for s in (sizes[device.dp_rank], size) if s is not None]
            sizes[device.dp_rank] = min(known, default=None)
        return sizes


def _write(history: SplitHistory, file: Path) -> None:
    try:
        history.write(file)
    except OSError as error:
        raise disk_failure(error, file.parent, rank=0) from error


def _proportional(limit: int) -> Curve:
    # A rank of unknown speed: time is proportional to rows. Only ratios matter.
    rows = sorted({1, limit})
    return Curve(tuple(rows), tuple(size + _PER_MICRO_BATCH for size in rows), limit)


def device_name(world: World) -> str:
    """The model of this rank's GPU, or of the processor with its number of threads."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return f"{processor_name()}, {torch.get_num_threads()} threads"


def rank_shares(
    shares: Mapping[str, float], hosts: Sequence[str], *, may_miss: bool
) -> list[float]:
    """The share of each rank; see `shares_of_ranks`.

    Args:
        shares: by host or rank number.
        may_miss: whether hosts may join and leave this run, so that a named host may be absent.

    Raises:
        ConfigError: an unknown host or rank, or all shares are 0.
    """
    _check_names(shares, hosts, "balance", may_miss=may_miss)
    found = shares_of_ranks(shares, hosts)
    if not any(found):
        raise ConfigError(
            "every rank has a share of 0",
            where="balance",
            fix="give at least one rank a share above 0",
            id="config.batch",
        )
    return found


def rank_sizes(
    sizes: Mapping[str, int], hosts: Sequence[str], *, may_miss: bool
) -> list[int | None]:
    """The micro-batch size of each rank by its host's name; None for hosts that are not named.

    Raises:
        ConfigError: an unknown host.
    """
    _check_names(sizes, hosts, "training.micro_batch_size", may_miss=may_miss, ranks=False)
    return [sizes.get(host) for host in hosts]


def _check_names(
    named: Mapping[str, Number],
    hosts: Sequence[str],
    key: str,
    *,
    may_miss: bool,
    ranks: bool = True,
) -> None:
    known = set(hosts) | ({str(rank) for rank in range(len(hosts))} if ranks else set())
    unknown = [name for name in named if name not in known]
    if not unknown:
        return
    what = f"{', '.join(unknown)}: not a host{' or rank' if ranks else ''} of this run"
    if may_miss:
        log.info("%s for now: %s", key, what)
        return
    there = f"hosts: {', '.join(dict.fromkeys(hosts))}"
    if ranks:
        there += f"; ranks: 0 to {len(hosts) - 1}"
    raise ConfigError(what, where=f"{key}.{unknown[0]}", fix=f"use one of these: {there}")
