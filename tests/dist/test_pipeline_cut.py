"""Pipelines of unequal ranks: stages get layers by the speed and the memory of their ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isles.config.balance import cut_layers, deal_layers
from isles.config.layout import Layout, make_layout
from isles.config.memory import step_memory
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.mesh import Mesh, make_mesh
from isles.dist.world import World
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.layers import assign_layers, rank_seconds
from isles.facts.models import load_shape
from isles.plan.machines import GUESSED_LINE, GUESSED_NETWORK, Device, Host, Machines
from isles.plan.step import Job, outcome
from isles.run.checkpoints import find_checkpoint
from isles.run.limits import memory
from isles.train.balance import device_name
from isles.train.cut import PipelineCut, cut_pipeline
from isles.train.model import architecture_of
from tests.dist.test_same_mathematics import (
    TOLERANCE,
    check_that_it_has_learned,
    largest_difference,
    model_with,
)
from tests.dist.test_strategy_resume import CONSTANT
from tests.each import each
from tests.ranks import train
from tests.small_models import small_model
from tests.unit.test_counts import fake_ranks

LLAMA_8B = Architecture.of(load_shape("llama-8b"))
SLOW_FIRST, SLOW_LAST = 'balance={"0": 1, "1": 3}', 'balance={"0": 3, "1": 1}'


@each(
    ([10] * 8, 0, (1, 3), (), [2, 6]),
    ([10] * 8, 0, (3, 1), (), [6, 2]),
    ([10] * 8, 20, (1, 1), (), [5, 3]),
    ([10] * 8, 20, (1, 3), (), [2, 6]),
    ([10] * 9, 0, (1, 3, 2), (), [1, 5, 3]),
    ([10] * 8, 0, (1, 100), (), [1, 7]),  # each stage has a layer
    ([10] * 8, 0, (1, 3), (8, 5), [3, 5]),  # the fast rank has no room for a sixth
    ([10] * 8, 0, (1, 1, 1), (1, 4, 8), [1, 3, 4]),
    ([10] * 8, 0, (1, 3), (2, 5), []),
)
def test_stages_get_layers_by_speed_and_memory(costs, head, speeds, most, counts):
    dealt = assign_layers(costs, len(speeds), head=head, speeds=speeds, most=most)
    assert [len(part) for part in dealt] == counts
    assert [index for part in dealt for index in part] == (
        list(range(len(costs))) if counts else []
    )


def run_of_8b(**training: object) -> RunConfig:
    data = {"sources": ({"type": "fake"},), "seq_length": 2048}
    settings = {"max_steps": 1, "precision": "bf16-true", "micro_batch_size": 1, **training}
    return RunConfig(model={"name_or_path": "llama-8b"}, data=data, training=settings)


@each("1f1b", "gpipe", "interleaved-1f1b", "zbv")
def test_a_cut_leaves_each_rank_within_its_memory(schedule):
    """Of 8B on 32 and 140 GiB: by speed alone, the small GPU would get as much as the large one."""
    config, limits = run_of_8b(), [32 * 2.0**30, 140 * 2.0**30]
    strategy = DDPStrategyConfig(pp_size=2, pp_schedule=schedule)
    layout = make_layout(strategy, 2, local_world_size=2)
    options = {"rows": 1, "micro_batches": 8}

    def cut(limits: list[float]) -> Layout:
        found = cut_layers(
            LLAMA_8B, config, strategy, layout, speeds=[1, 1], limits=limits, **options
        )
        assert sum(found) == 32
        return Layout(2, 1, 1, 1, 1, cut=found)

    def peaks(layout: Layout) -> list[float]:
        ranks = (0, 1)
        return [
            step_memory(LLAMA_8B, config, strategy, layout, pp_rank=rank, **options).peak.total
            for rank in ranks
        ]

    by_speed = cut([math.inf, math.inf])
    assert peaks(by_speed)[0] > limits[0]
    fitting = cut(limits)
    assert all(peak <= limit for peak, limit in zip(peaks(fitting), limits, strict=True))
    assert peaks(fitting)[0] > 0.8 * limits[0], "the small card is used"
    fullest = step_memory(LLAMA_8B, config, strategy, fitting, **options)
    assert fullest.peak.total == max(peaks(fitting))


def test_a_recorded_cut_stays_only_if_it_fits_with_the_size_that_the_run_keeps():
    """Of 8B on 32 and 128 GiB. A GPU's first cut is for one row, before a size is measured."""
    config = run_of_8b(micro_batch_size="auto", global_batch_size=16)
    limits = [32 * 2.0**30, 128 * 2.0**30]
    strategy = DDPStrategyConfig(pp_size=2)
    layout = make_layout(strategy, 2, local_world_size=2)

    def dealt(**before: Any) -> tuple[int, ...]:
        options = {"speeds": [1, 1], "limits": limits, "gpu_bytes": 32 << 30, **before}
        return deal_layers(LLAMA_8B, config, strategy, layout, **options)

    def fits(cut: tuple[int, ...], rows: int) -> bool:
        own = Layout(2, 1, 1, 1, 1, cut=cut)
        options = {"rows": rows, "micro_batches": 16 // rows, "gpu_bytes": 32 << 30}
        return all(
            step_memory(LLAMA_8B, config, strategy, own, pp_rank=rank, **options).peak.total <= most
            for rank, most in enumerate(limits)
        )

    first = dealt()
    assert fits(first, 1) and not fits(first, 2)
    assert dealt(before=first, size_before=1) == first
    other = dealt(before=first, size_before=2)
    assert other[0] < first[0] and fits(other, 2)
    assert dealt(before=other, size_before=2) == other
    assert dealt(before=first, size_before=5) == first, "5 does not divide 16: measured anew"


def test_a_rank_in_the_middle_holds_neither_embedding_nor_head():
    strategy = FSDPStrategyConfig(pp_size=3)
    layout = Layout(3, 1, 1, 1, 1, cut=(10, 12, 10))
    first, middle, last = (
        step_memory(LLAMA_8B, run_of_8b(), strategy, layout, rows=1, pp_rank=rank)
        for rank in range(3)
    )
    block = (LLAMA_8B.params - 2 * LLAMA_8B.head_params) / 32
    assert middle.peak.weights == pytest.approx(2 * 12 * block, rel=1e-3)
    for end in (first, last):
        ends = 2 * (10 * block + LLAMA_8B.head_params)
        assert end.peak.weights == pytest.approx(ends, rel=1e-3)


def test_the_time_of_a_rank_counts_its_stages_and_the_head():
    even = rank_seconds(LLAMA_8B, 2048, (16, 16), [1, 1], returns=False)
    assert even[1] > even[0]
    slow = rank_seconds(LLAMA_8B, 2048, (16, 16), [1, 2], returns=False)
    assert slow == [even[0], even[1] / 2]
    first, last = rank_seconds(LLAMA_8B, 2048, (8, 8, 8, 8), [1, 1], returns=True)
    assert first > last, "the first rank also has the last stage"


UNEQUAL = (
    (2, "kind: ddp, pp_size: 2", SLOW_FIRST, [1, 4]),
    (2, "kind: fsdp, pp_size: 2", SLOW_LAST, [4, 1]),
    (3, "kind: fsdp, pp_size: 3", 'balance={"0": 1, "1": 3, "2": 1}', [1, 3, 1]),
    (2, "kind: ddp, pp_size: 2, pp_schedule: zbv", SLOW_FIRST, [1, 1, 2, 1]),
)


@pytest.mark.brief("short")
@pytest.mark.parametrize("cases", [UNEQUAL[:2], UNEQUAL[2:]], ids=["short", "others"])
def test_any_cut_learns_what_one_process_learns(run_file: Path, cases):
    model_with(run_file, num_hidden_layers=5)
    reference = train(run_file, 1, "training.micro_batch_size=12")
    check_that_it_has_learned(run_file, reference)
    for ranks, strategy, balance, layers in cases:
        options = (f"strategy={{{strategy}}}", "training.micro_batch_size=2", balance)
        run_dir = train(run_file, ranks, *options, resume="no")
        assert find_checkpoint(run_dir, None).manifest["pipeline"]["layers"] == layers
        assert largest_difference(reference, run_dir) < TOLERANCE, (ranks, strategy, balance)


def test_a_resumed_run_may_cut_its_pipeline_elsewhere(run_file: Path):
    model_with(run_file, num_hidden_layers=5)
    options = ("training.micro_batch_size=2", "training.lr_scheduler_type=constant")
    options += ("training.warmup_steps=1",)
    reference = train(run_file, 1, *options, "training.max_steps=6")
    options += ("strategy={kind: ddp, pp_size: 2}", f"output_dir={run_file.parent / 'cut'}")
    found, resume = [], "no"
    for step, balance in ((2, SLOW_FIRST), (4, SLOW_LAST), (6, "balance=auto")):
        run_dir = train(run_file, 2, *options, balance, f"training.max_steps={step}", resume=resume)
        found.append(find_checkpoint(run_dir, None).manifest["pipeline"]["layers"])
        resume = str(run_dir.path)
    assert found == [[1, 4], [4, 1], [4, 1]], "auto keeps the recorded cut"
    assert largest_difference(reference, run_dir) < TOLERANCE


def test_a_micro_batch_that_was_found_with_other_layers_is_found_again(run_file: Path):
    model_with(run_file, num_hidden_layers=5)
    options = ("strategy={kind: ddp, pp_size: 2}", *CONSTANT)
    found, resume = [], "no"
    steps = (("12", SLOW_FIRST), ("auto", SLOW_FIRST), ("auto", SLOW_LAST), ("auto", SLOW_LAST))
    for step, (size, balance) in enumerate(steps, 2):
        own = (f"training.micro_batch_size={size}", balance, f"training.max_steps={step}")
        run_dir = train(run_file, 2, *options, *own, resume=resume)
        manifest = find_checkpoint(run_dir, None).manifest
        found.append((manifest["pipeline"]["layers"], manifest["micro_batch_size"]))
        resume = str(run_dir.path)
    assert found == [([1, 4], 12), ([1, 4], 12), ([4, 1], 6), ([4, 1], 6)]


def test_steps_show_the_speeds_of_ranks():
    """Of two equal devices: the second computes its four layers in the time of two of the first."""
    devices = (("here", "CPU"), ("here", "CPU"))
    cut = PipelineCut(devices, "1f1b", (1.0, 1.0), (4, 4))
    layout = Layout(2, 1, 1, 1, 1, cut=(4, 4))
    assert PipelineCut.read(cut.record([None, 0.5], layout)) == cut, "one rank says nothing"
    measured = PipelineCut.read(cut.record([0.2, 0.1], layout))
    assert measured is not None and measured.speeds == (20.0, 40.0)
    back = PipelineCut(devices, "zbv", (1.0, 1.0), (1, 2, 3, 2))
    measured = PipelineCut.read(back.record([0.3, 0.5], layout))
    assert measured is not None and measured.speeds == (10.0, 10.0)
    for record in (None, {}, {"devices": []}, {**cut.record([], layout), "layers": [0, 8]}):
        assert PipelineCut.read(record) is None


class EqualRanks(World):
    """Ranks that all say what the first says."""

    def gather(self, value: Any, **_: Any) -> Any:
        return [value] * self.world_size

    def main_first(self, work: Any, **_: Any) -> Any:
        return work()


@contextlib.contextmanager
def equal_ranks(strategy: DDPStrategyConfig | FSDPStrategyConfig) -> Iterator[tuple[World, Mesh]]:
    """Four ranks of one process, and their grid."""
    with fake_ranks(4) as real:
        world = EqualRanks(*(getattr(real, field.name) for field in dataclasses.fields(World)))
        layout = make_layout(strategy, 4, local_world_size=4)
        yield world, make_mesh(layout, world, is_sharded=strategy.kind == "fsdp")


def resumed_cut(pp_size: int, layers: tuple[int, ...]) -> tuple[int, ...]:
    """The cut of eight layers over four ranks, of which the last two are three times as fast.

    Args:
        layers: the recorded cut.
    """
    data = {"sources": ({"type": "fake"},), "seq_length": 16}
    strategy = DDPStrategyConfig(pp_size=pp_size)
    settings = {"max_steps": 1, "global_batch_size": 16}
    config = RunConfig(
        model={"name_or_path": "tiny"}, data=data, training=settings, strategy=strategy
    )
    with equal_ranks(strategy) as (world, mesh):
        layout = mesh.layout
        fast = [3.0 if layout.place(rank).pp >= pp_size // 2 else 1.0 for rank in range(4)]
        devices = ((world.host, device_name(world)),) * 4
        record = PipelineCut(devices, "1f1b", tuple(fast), layers).record([], layout)
        model = small_model("llama", num_hidden_layers=8)
        _, cut = cut_pipeline(model, config, strategy, mesh, world, {"pipeline": record})
    assert cut is not None and cut.speeds == tuple(fast)
    return cut.layers


@each(
    (2, (2, 6), (2, 6)),
    (2, (1, 3, 1, 3), (2, 6)),  # of a pipeline of four stages
    (4, (2, 6), (1, 1, 3, 3)),
)
def test_a_recorded_cut_stays_if_it_has_as_many_stages(pp_size, recorded, expected):
    assert resumed_cut(pp_size, recorded) == expected


LARGE = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 32}
LARGE["max_position_embeddings"] = 4096


@each(
    (DDPStrategyConfig(pp_size=4), "auto", {}),
    (DDPStrategyConfig(pp_size=4), "auto", {"0": 1, "1": 2, "2": 3, "3": 0}),
    (DDPStrategyConfig(pp_size=2), "auto", {"0": 1, "1": 5, "2": 2, "3": 2}),
    (DDPStrategyConfig(pp_size=2, pp_schedule="gpipe"), 1, {"0": 1, "3": 3}),
    (FSDPStrategyConfig(pp_size=2, pp_schedule="interleaved-1f1b"), "auto", {"here": 4, "1": 3}),
    (DDPStrategyConfig(pp_size=4), {"here": 2}, {"here": 1}),
)
def test_a_plan_deals_layers_as_the_run_does(strategy, size, balance):
    """Of 19 rows, which two ranks do not share evenly; a model that no stage has room for, so that
    memory decides the cut too."""
    data = {"sources": ({"type": "fake"},), "seq_length": 4096}
    settings = {"max_steps": 1, "global_batch_size": 19, "micro_batch_size": size}
    with equal_ranks(strategy) as (world, mesh), torch.device("meta"):
        if isinstance(size, dict):
            settings["micro_batch_size"] = {world.host: size["here"]}
        balance = {name.replace("here", world.host): own for name, own in balance.items()}
        config = RunConfig(
            model={"name_or_path": "large"},
            data=data,
            training=settings,
            strategy=strategy,
            balance=balance or "even",
        )
        model = small_model("llama", **LARGE)
        _, cut = cut_pipeline(model, config, strategy, mesh, world, {})
        host = world.host
    own = Device("a CPU", None, memory().total / 4, None, "measured", is_cuda=False)
    machines = Machines("a", (Host(host, (own,) * 4),), GUESSED_NETWORK, GUESSED_LINE)
    job = Job(config, architecture_of(model), model.config.to_dict(), machines)
    planned = outcome(job)
    assert planned.layout is not None, planned.issue
    assert cut is not None and planned.layout.cut == cut.layers
