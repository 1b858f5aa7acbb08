"""A step of a run under one way to hold the model: the memory of each rank, and the seconds.

`outcome` plans the run as written, every other strategy and every memory-saving option. Only
`isles.config.memory` counts memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from isles.config.auto import (
    Resources,
    choose_strategy,
    fitting_pipeline,
    fitting_strategies,
)
from isles.config.balance import deal_layers, pipeline_speeds, shares_of_ranks
from isles.config.compilation import COMPILES_FROM, compiles
from isles.config.issues import Issue
from isles.config.layout import Layout, Strategy, make_layout
from isles.config.memory import (
    CPU_MICRO_BATCH_SIZE,
    holding_of,
    offloaded_blocks,
    step_memory,
)
from isles.config.roofline import (
    Work,
    communication,
    count_of,
    offloaded_bytes,
    optimizer_seconds,
    slowest,
    work_of,
)
from isles.config.rules import check_rules
from isles.config.rules.shape import check_shape
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import AutoStrategy, DDPStrategyConfig, FSDPStrategyConfig
from isles.errors import ConfigError
from isles.facts.gpus import lacking
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.count import Count
from isles.facts.memory.layers import layers_of_ranks, rank_seconds
from isles.facts.memory.result import StepMemory
from isles.facts.memory.setting import usable_bytes
from isles.plan.machines import Device, Machines
from isles.plan.outcome import Outcome, RankPlan, StepTime

CONTEXT_BYTES = 0.6 * 2**30
"""Memory of CUDA, cuBLAS and torch's kernels on a GPU: a guess."""

NCCL_BYTES = 0.3 * 2**30
"""Memory of NCCL's channels on a GPU, if there are several GPUs: a guess."""

_MOST_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Job:
    """Input of the plan of one cluster.

    Args:
        config: run file of this cluster alone.
        shape: the model's config.json, for rules about the model.
    """

    config: RunConfig
    model: Architecture
    shape: dict[str, object]
    machines: Machines

    @property
    def is_dpo(self) -> bool:
        return self.config.training.method == "dpo"


def limit_of(device: Device) -> float | None:
    """Bytes of a device's memory that a step may use. None: unknown."""
    if device.memory_bytes is None:
        return None
    usable = float(usable_bytes(device.memory_bytes))
    if device.free_bytes is None:
        return usable
    context = CONTEXT_BYTES if device.is_cuda else 0.0
    return max(0.0, min(usable, device.free_bytes - context))


def outcome(job: Job, config: RunConfig | None = None) -> Outcome:
    """Plan of one way to hold the model: memory and seconds on a cluster's machines."""
    config = config or job.config
    strategy = config.strategy
    if isinstance(strategy, AutoStrategy):
        strategy, _ = chosen(job, config)
        config = config.model_copy(update={"strategy": strategy})
    world, local = len(job.machines.devices), job.machines.local_world_size
    issues = [*check_rules(config), *check_shape(config, job.shape)]
    issues += _check_precision(job, config)
    if issues:
        return Outcome(config, strategy, None, issue=issues[0])
    try:
        layout = make_layout(strategy, world, local_world_size=local)
    except ConfigError as error:
        return Outcome(config, strategy, None, issue=Issue((error.where,), error.what, error.fix))
    if config.training.global_batch_size < layout.dp_size:
        rows = config.training.global_batch_size
        text = f"global_batch_size {rows} gives less than one row to each of {layout.dp_size} ranks"
        issue = Issue(("training.global_batch_size",), text, f"use {layout.dp_size} or more")
        return Outcome(config, strategy, layout, issue=issue)
    found = _Step(job, config, strategy, layout).outcome()
    if config.balance != "auto" or len({rank.rows for rank in found.ranks}) == 1:
        return found
    # Keep even rows if an uneven split saves nothing, as a run does.
    even = _Step(job, config.model_copy(update={"balance": "even"}), strategy, layout).outcome()
    if found.time and even.time and even.time.total_s < found.time.total_s:
        return replace(even, config=config)
    return found


def is_compiled(job: Job, config: RunConfig) -> bool:
    """True if the run's blocks are compiled."""
    gpus = [device.gpu for device in job.machines.devices]
    can = all(gpu is not None and gpu.has_bf16 and gpu.is_nvidia for gpu in gpus)
    return compiles(config, COMPILES_FROM if can else None, config.training.max_steps)


def _check_precision(job: Job, config: RunConfig) -> Iterator[Issue]:
    # Devices that do not have the precision of the run. A GPU without a row may have it.
    precision = config.training.precision
    devices = [device for device in job.machines.devices if device.gpu or not device.is_cuda]
    for gpu in sorted({x.gpu for x in devices}, key=lambda gpu: gpu.capability if gpu else (99, 0)):
        capability = gpu.capability if gpu else None
        lack = lacking(precision, capability, is_nvidia=gpu is None or gpu.is_nvidia)
        if lack is not None:
            what = f"{precision} {lack.what.format(gpu.name if gpu else 'the CPU')}"
            yield Issue(("training.precision",), what, lack.fix)
            return


def chosen(job: Job, config: RunConfig) -> tuple[Strategy, str]:
    """Choice of `strategy: auto`: the fastest strategy that fits, and why."""
    machines = job.machines
    world, local = len(machines.devices), machines.local_world_size
    memory = [device.memory_bytes for device in machines.devices]
    if None in memory:
        return DDPStrategyConfig(), "a guess, as the memory of some ranks is unknown"
    least = int(min(own for own in memory if own is not None))
    chip = slowest([device.chip(config.training.products) for device in machines.devices])
    resources = Resources(world, local, least, machines.links, chip)
    if isinstance(config.strategy, AutoStrategy) and config.strategy.pp_size != 1:
        every = [int(own or 0) for own in memory]
        nothing_fits = not fitting_strategies(job.model, config, resources)
        pipeline = fitting_pipeline(job.model, config, job.shape, every, is_cuda=chip.is_cuda)
        if nothing_fits and pipeline is not None:
            return pipeline, f"a pipeline over {world} ranks, as neither ddp nor fsdp fits"
    return choose_strategy(job.model, config, resources)


class _Step:
    # One strategy on the ranks of a cluster.

    def __init__(self, job: Job, config: RunConfig, strategy: Strategy, layout: Layout) -> None:
        self._job, self._config, self._strategy, self._layout = job, config, strategy, layout
        self._devices = job.machines.devices
        self._hosts = [host.name for host in job.machines.hosts for _ in host.devices]
        self._memories: dict[tuple[int, int, int, int, int], StepMemory] = {}
        self._works: dict[tuple[float | None, int], Work] = {}
        self._products = config.training.products
        self._is_compiled = is_compiled(job, config)
        self._in_step = not (isinstance(strategy, DDPStrategyConfig) and layout.pp == 1)
        self._stages = [layout.place(rank).pp for rank in range(layout.world_size)]
        self._shares, self._layers = [1.0], [0]
        self._offloaded = [self._offload(rank) for rank in range(layout.world_size)]
        if layout.pp > 1:
            self._cut()

    def _offload(self, rank: int) -> int:
        # Blocks in main memory, as `offload_blocks` chooses them in a run.
        device, rows = self._devices[rank], self._given_rows(rank)
        if not device.is_cuda:
            return 0
        return offloaded_blocks(
            self._job.model,
            self._config,
            self._strategy,
            self._layout,
            limit=limit_of(device) or math.inf,
            rows=rows if isinstance(rows, int) else None,
            gpu_bytes=self._gpu_bytes(device),
        )

    def _cut(self) -> None:
        # The layers of each stage, and each rank's share of the work over an even share.
        config, strategy, layout, model = (
            self._config,
            self._strategy,
            self._layout,
            self._job.model,
        )
        assert isinstance(strategy, DDPStrategyConfig | FSDPStrategyConfig)
        row_s = [self._seconds(device, 1) for device in self._devices]
        measured = [1.0 / seconds if seconds else None for seconds in row_s]
        memory = [device.memory_bytes for device in self._devices]
        cut = deal_layers(
            model,
            config,
            strategy,
            layout,
            speeds=pipeline_speeds(config, self._hosts, measured),
            limits=[math.inf if own is None else usable_bytes(own) for own in memory],
            gpu_bytes=min(int(d.memory_bytes or 0) if d.is_cuda else 0 for d in self._devices),
        )
        length, returns = config.data.seq_length, strategy.pp_schedule == "zbv"
        work = rank_seconds(model, length, cut, [1.0] * layout.pp, returns=returns)
        self._layout = replace(layout, cut=cut)
        self._shares = [own * layout.pp / sum(work) for own in work]
        holding = holding_of(config, strategy, self._layout, model, 1)
        self._layers = layers_of_ranks(model, length, holding)

    def outcome(self) -> Outcome:
        layout = self._layout
        row_s = [self._own_s(rank, 1) for rank in range(len(self._devices))]
        rows = self._rows(row_s)
        micro = [self._micro_batch(rank, own) for rank, own in enumerate(rows)]
        steps = [max(1, -(-own // size)) for own, size in zip(rows, micro, strict=True)]
        if self._in_step:
            steps = [max(steps)] * len(steps)
            micro = [max(1, -(-own // most)) for own, most in zip(rows, steps, strict=True)]
        busy = [self._busy_s(rank, rows[rank], micro[rank]) for rank in range(len(rows))]
        ranks = tuple(
            RankPlan(
                host=self._hosts[rank],
                device=device,
                rows=rows[rank],
                micro_batch=micro[rank],
                memory=self._memory(rank, micro[rank], steps[rank]),
                least=self._least(rank, micro[rank], rows[rank]),
                limit_bytes=limit_of(device),
                context_bytes=self._context(device),
                busy_s=busy[rank],
                layers=self._layers[self._stages[rank]],
                offloaded=self._offloaded[rank],
                copied_bytes=offloaded_bytes(self._count(micro[rank], steps[rank], rank), layout),
            )
            for rank, device in enumerate(self._devices)
        )
        known = [seconds for seconds in busy if seconds is not None]
        time = self._time(known, micro, max(steps)) if len(known) == len(busy) else None
        return Outcome(self._config, self._strategy, layout, ranks, time)

    def _context(self, device: Device) -> float:
        if not device.is_cuda:
            return 0.0
        return CONTEXT_BYTES + (NCCL_BYTES if len(self._devices) > 1 else 0.0)

    def _count(self, rows: int, steps: int, rank: int) -> Count:
        model, config, layout = self._job.model, self._config, self._layout
        gpu_bytes = self._gpu_bytes(self._devices[rank])
        offloaded = self._offloaded[rank]
        return count_of(model, config, self._strategy, layout, rows, steps, gpu_bytes, offloaded)

    def _gpu_bytes(self, device: Device) -> int:
        return int(device.memory_bytes or 0) if device.is_cuda else 0

    def _work(self, device: Device, rows: int) -> Work:
        model, config, layout = self._job.model, self._config, self._layout
        key = (device.memory_bytes if device.is_cuda else 0, rows)
        if key not in self._works:
            gpu_bytes = self._gpu_bytes(device)
            count = count_of(model, config, self._strategy, layout, rows, 2, gpu_bytes)
            self._works[key] = work_of(count, self._layout, is_compiled=self._is_compiled)
        return self._works[key]

    def _seconds(self, device: Device, rows: int) -> float | None:
        # Seconds of a micro-batch.
        return self._work(device, rows).seconds(device.chip(self._products))

    def _own_s(self, rank: int, rows: int) -> float | None:
        # Seconds of a micro-batch in the stages of a rank.
        seconds = self._seconds(self._devices[rank], rows)
        return None if seconds is None else seconds * self._shares[self._stages[rank]]

    def _memory(self, rank: int, rows: int, steps: int) -> StepMemory:
        # Without a pipeline, memory depends only on whether there are several micro-batches.
        device, stage = self._devices[rank], self._stages[rank]
        steps = steps if self._layout.pp > 1 else min(steps, 2)
        gpu_bytes, offloaded = self._gpu_bytes(device), self._offloaded[rank]
        key = (gpu_bytes, rows, steps, stage, offloaded)
        if key not in self._memories:
            self._memories[key] = step_memory(
                self._job.model,
                self._config,
                self._strategy,
                self._layout,
                rows=rows,
                micro_batches=steps,
                gpu_bytes=gpu_bytes,
                pp_rank=stage,
                offloaded=offloaded,
            )
        return self._memories[key]

    def _rows(self, row_s: Sequence[float | None]) -> list[int]:
        # Rows of each rank. The ranks of one data-parallel group read the same rows.
        layout, total = self._layout, self._config.training.global_batch_size
        members: dict[int, list[int]] = {}
        for rank in range(layout.world_size):
            members.setdefault(layout.dp_rank(rank), []).append(rank)
        shares = []
        balance = self._config.balance
        given = shares_of_ranks(balance, self._hosts) if isinstance(balance, dict) else []
        for group in members.values():
            seconds = [row_s[rank] for rank in group]
            if given:
                shares.append(sum(given[rank] for rank in group))
            elif balance == "even" or None in row_s:
                shares.append(1.0)
            else:
                shares.append(1.0 / max(s for s in seconds if s is not None))
        split = split_rows(total, shares)
        return [split[layout.dp_rank(rank)] for rank in range(layout.world_size)]

    def _given_rows(self, rank: int) -> int | str:
        # Of a micro-batch, as the run file says.
        wanted = self._config.training.micro_batch_size
        return wanted.get(self._hosts[rank], "auto") if isinstance(wanted, dict) else wanted

    def _micro_batch(self, rank: int, rows: int) -> int:
        wanted, rows = self._given_rows(rank), max(1, rows)
        if isinstance(wanted, int):
            return min(wanted, rows)
        if not self._devices[rank].is_cuda:
            most = min(CPU_MICRO_BATCH_SIZE, rows)
        else:
            most = self._largest(rank, min(rows, _MOST_ROWS))
        # Make the micro-batches equally large.
        return -(-rows // -(-rows // most))

    def _least(self, rank: int, micro: int, rows: int) -> StepMemory:
        if self._config.training.micro_batch_size == "auto":
            micro = 1
        return self._memory(rank, micro, max(1, -(-rows // micro)))

    def _largest(self, rank: int, rows: int) -> int:
        # Most rows that fit on a rank. 1 if none fit, or if its memory is unknown.
        limit = limit_of(self._devices[rank])
        if limit is None:
            return 1
        if self._memory(rank, rows, 1).peak.total <= limit:
            return rows
        low, high = 1, rows
        while high - low > 1:
            middle = (low + high) // 2
            if self._memory(rank, middle, max(2, -(-rows // middle))).peak.total <= limit:
                low = middle
            else:
                high = middle
        return low

    def _busy_s(self, rank: int, rows: int, micro: int) -> float | None:
        whole, rest = divmod(rows, micro)
        total = 0.0
        for size, times in ((micro, whole), (rest, 1)):
            if size and times:
                seconds = self._own_s(rank, size)
                if seconds is None:
                    return None
                total += times * seconds
        return total

    def _time(self, busy: Sequence[float], micro: Sequence[int], steps: int) -> StepTime:
        layout = self._layout
        slowest = max(busy)
        mean = sum(busy) / len(busy)
        links = self._job.machines.links
        # All ranks wait for the rank that copies most.
        fullest = max(range(len(self._offloaded)), key=self._offloaded.__getitem__)
        count = self._count(max(micro), steps, fullest)
        sent = communication(self._config, self._strategy, layout, links, count, steps)
        backward = 1.0 - self._work(self._devices[0], max(micro)).forward_share
        chips = {device.chip(self._products) for device in self._devices}
        optimizer = max(optimizer_seconds(count, chip, layout) for chip in chips)
        bubble = slowest / steps * (layout.pp - 1)
        return StepTime(
            compute_s=mean,
            optimizer_s=optimizer,
            exposed_s=sent.exposed_s(steps, slowest / steps, backward),
            idle_s=max(0.0, slowest - mean) if slowest > mean * 1.0001 else 0.0,
            bubble_s=bubble,
            sent_bytes=sent.sent_bytes,
            line_bytes=sent.line_bytes,
            line_s=sent.line_bytes / self._job.machines.network.bytes_per_s,
            micro_steps=steps,
        )


def split_rows(total: int, shares: Sequence[float]) -> list[int]:
    """Whole rows in proportion to shares. The largest remainders get the rest of the rows."""
    whole = sum(shares)
    wanted = [total * share / whole for share in shares]
    rows = [int(number + 1e-9) for number in wanted]
    order = sorted(range(len(rows)), key=lambda i: (rows[i] - wanted[i], i))
    for index in order[: total - sum(rows)]:
        rows[index] += 1
    return rows


def with_values(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    """A copy of a run file with other values for dotted keys. Sections are replaced as a whole."""
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if name:
            own = getattr(config, section).model_copy(update={name: value})
            config = config.model_copy(update={section: own})
        else:
            config = config.model_copy(update={section: value})
    return config


def alone(job: Job, rank: int) -> Job:
    """The same run on one of its devices."""
    host = job.machines.host_of(rank)
    only = replace(host, devices=(job.machines.devices[rank],))
    machines = replace(job.machines, hosts=(only,))
    config = job.config.model_copy(update={"strategy": DDPStrategyConfig(), "balance": "even"})
    return replace(job, config=config, machines=machines)
