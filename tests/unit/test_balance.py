"""Shares by name, sizes, the solver, revising the rows, calibrating on a real small model."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isles.balance import gpus as of_gpus
from isles.balance.balancer import Balancer
from isles.balance.curve import Curve, rank_seconds, step_seconds
from isles.balance.gpus import GpuMeter, GpuSpeed
from isles.balance.measure import ComputeMeter, Probe, calibrate, rows_that_fit
from isles.balance.revise import (
    Allocation,
    RankDevice,
    SplitHistory,
    choose,
    next_allocation,
    revise,
)
from isles.balance.solve import fastest_split
from isles.config.load import load_run_file
from isles.config.sections.run import RunConfig
from isles.dist.split import RowSplit, even_split, shared_split
from isles.errors import ConfigError
from isles.models.attention import use_maskless_attention
from isles.models.build import build_probe
from isles.train.balance import rank_shares, rank_sizes
from isles.train.probe import Training, even_micro_batch
from tests.each import each

CPU = torch.device("cpu")
HOSTS = ["big", "big", "small", "old"]


def even_curves(*per_row: float) -> list[Curve]:
    return [Curve((1, 2), (seconds, 2 * seconds), 8) for seconds in per_row]


def test_shares_are_of_hosts_and_ranks_and_unknown_ones_are_refused_unless_hosts_come_and_go():
    for shares, expected in (
        ({"2": 3.0}, [1.0, 1.0, 3.0, 1.0]),
        ({"big": 3.0, "1": 0.5}, [3.0, 0.5, 1.0, 1.0]),
        ({"big": 4.0, "old": 0.0}, [2.0, 2.0, 1.0, 0.0]),
    ):
        assert rank_shares(shares, HOSTS, may_miss=False) == expected
    with pytest.raises(ConfigError, match="bgi: not a host or rank") as caught:
        rank_shares({"bgi": 1.0}, HOSTS, may_miss=False)
    assert caught.value.where == "balance.bgi"
    assert "big, small, old; ranks: 0 to 3" in caught.value.fix
    assert rank_shares({"bgi": 2.0}, HOSTS, may_miss=True) == [1.0] * 4
    with pytest.raises(ConfigError, match="every rank has a share of 0"):
        rank_shares({str(rank): 0.0 for rank in range(4)}, HOSTS, may_miss=False)
    with pytest.raises(ConfigError, match="1: not a host of this run") as caught:
        rank_sizes({"1": 4}, HOSTS, may_miss=False)
    assert caught.value.where == "training.micro_batch_size.1"
    assert rank_sizes({"big": 4}, HOSTS, may_miss=False) == [4, 4, None, None]


def test_equal_micro_batches_divide_the_rows():
    """The largest that fits, or that of before over a resume; and what fits is found by memory."""
    for rows, before, size in ((12, None, 6), (8, None, 8), (11, None, 1), (12, 2, 2), (12, 8, 6)):
        assert even_micro_batch(rows, 8, before) == size
    used = {1: 20.0, 2: 30.0, 4: 50.0}
    for free_bytes, most, rows in ((95.0, 100, 8), (95.0, 6, 6), (5.0, 100, 0)):
        assert rows_that_fit(used, free_bytes, most) == rows
    assert rows_that_fit({1: 20.0}, 10.0, 100) == 0


def seconds_of(now: Allocation, *slower: float) -> list[list[float]]:
    """What a meter shows in five windows; in two of them other work keeps the machine busy."""
    found = []
    for rank, (curve, factor) in enumerate(zip(now.curves, slower, strict=True)):
        one = rank_seconds(now.split, rank, curve) * factor / 3
        found.append([one, 3 * one, one, 2 * one, one])
    return found


def allocated(curves: Sequence[Curve], split: RowSplit, hosts: str) -> Allocation:
    """Of ranks on hosts of these letters, each of one kind of device."""
    devices = tuple(RankDevice(host, "gpu", rank) for rank, host in enumerate(hosts))
    return Allocation(0, split, 4, "ddp", devices, tuple(curves), is_timed=True)


def test_a_split_that_does_not_bring_what_it_promised_is_taken_back():
    first = allocated(even_curves(1.0, 1.0), even_split(24, 2, 4, in_step=False), "aa")
    history = SplitHistory().add(first)
    slow, _ = next_allocation(history, 10, seconds_of(first, 1, 2))
    assert slow.split.rows == (16, 8)
    history = history.add(slow)
    assert next_allocation(history, 20, seconds_of(slow, 1, 1)) is None
    no_faster = seconds_of(slow, 2, 2)
    back, reason = next_allocation(history, 20, no_faster)
    assert back.split.rows == (12, 12)
    assert back.rests, "it would come again at once"
    assert "going back, as steps are 0.75 times as fast, not 1.50" in reason
    assert next_allocation(history.decided(20), 50, no_faster) is None, "slower for another reason"


def revised(now: Allocation, *slower: float) -> Any:
    """What replaces the rows in use, and why, where ranks are so many times slower."""
    return revise(now, seconds_of(now, *slower))


def test_rows_are_split_anew_only_where_it_pays_and_come_back_to_a_rank_that_recovers():
    now = allocated(even_curves(1.0, 1.0, 1.0), even_split(66, 3, 8, in_step=False), "abc")
    assert revised(now, 1, 1, 1) is None
    assert revised(now, 1, 1.08, 1) is None
    slow, reason = revised(now, 1, 1, 3)
    assert slow.split.rows == (29, 28, 9)
    assert "data-parallel rank 2 is 3.00 times slower" in reason
    assert revised(slow, 1, 1, 1) is None, "it does not flap"
    curves = even_curves(1.0, 3.0)
    now = allocated(curves, choose(curves, 48, 8, in_step=True), "ab")
    assert now.split.rows == (36, 12)
    quick, reason = revised(now, 1, 1 / 3)
    assert quick.split.rows == (24, 24)
    assert "its rows give 0.67 times an even split, not 2.00" in reason


def test_a_driver_that_fails_gives_no_evidence(monkeypatch):
    """It may show fewer GPUs than torch, or fail after a while."""

    class Cards:
        calls = 0

        def speed(self, position: int) -> tuple[float, str]:
            self.calls += 1
            return [(1500.0, "")][self.calls - 1 + position]

    cards, clock = Cards(), iter(range(100))
    monkeypatch.setattr(of_gpus, "find_cards", lambda _: cards)
    meter = GpuMeter(0, lambda: float(next(clock)))
    for _ in range(4):
        meter.step_done()
    assert meter.readings() == [GpuSpeed(1500.0, 0.0)]
    assert cards.calls == 2, "asked no more"


SLOW_CLOCK, FULL_CLOCK = GpuSpeed(1200.0, 0.0), GpuSpeed(1500.0, 0.0)
HOT = GpuSpeed(1470.0, 1.0)


@each(
    # times slower, the GPUs by their drivers, rows; without a list the driver reports nothing
    ([1, 1.2], None, None),
    ([1, 1.2], [FULL_CLOCK, FULL_CLOCK], None),
    ([1, 1.1], [FULL_CLOCK, SLOW_CLOCK], None),
    ([1, 1.2], [SLOW_CLOCK, FULL_CLOCK], None),
    ([1, 1.3], [FULL_CLOCK, SLOW_CLOCK], (27, 21)),
    ([1, 1.3], [FULL_CLOCK, HOT], (27, 21)),
    ([1, 1.3], [HOT, HOT], None),
    ([1.4, 1, 1.4, 1.4], [SLOW_CLOCK, FULL_CLOCK, SLOW_CLOCK, SLOW_CLOCK], (11, 15, 11, 11)),
)
def test_a_small_difference_between_equal_gpus_counts_if_their_drivers_report_it(
    slower, gpus, rows
):
    even = even_split(48, len(slower), 8, in_step=False)
    now = allocated(even_curves(*[1.0] * len(slower)), even, "a" * len(slower))
    measured = seconds_of(now, *slower)
    seen = gpus and [[gpu] * 5 for gpu in gpus]
    found = revise(now, measured, seen)
    assert (found and found[0].split.rows) == rows
    if found is None:
        return
    assert "MHz, equal GPUs at" in found[1]
    once = [[*own[:4], FULL_CLOCK] for own in seen]
    assert revise(now, measured, once) is None, "in four of five windows"
    after = found[0]
    assert revise(after, seconds_of(after, *[1] * len(slower)), seen) is None, "the rows stay"
    assert revise(after, seconds_of(after, *[1] * len(slower)), None) is None, "also without a word"
    cooled = revise(after, seconds_of(after, *[1 / factor for factor in slower]), None)
    assert cooled is not None and cooled[0].split.rows == even.rows


def test_steps_that_are_done_again_have_the_rows_that_they_had(tmp_path):
    first = allocated(even_curves(1.0, 1.0), even_split(24, 2, 4, in_step=False), "aa")
    slow = replace(first, split=RowSplit((16, 8), (4, 4), in_step=False), after_step=10)
    history = SplitHistory().add(first).add(slow).decided(50)
    file = tmp_path / "balance.json"
    history.write(file)
    assert SplitHistory.load(file, None) == history
    assert SplitHistory.load(tmp_path / "none", json.loads(json.dumps(history.record()))) == history
    assert SplitHistory.load(tmp_path / "none", {"devices": []}) == SplitHistory(), (
        "of another version"
    )
    # A start after step 4 knows what an earlier one has decided up to step 50.
    begins = SplitHistory.load(file, None).going_on_after(4, lambda known: True)
    assert begins == history
    current = begins.at(4)
    # Of no world: nothing is asked of other ranks while nothing is to be decided.
    balancer = Balancer(None, current, begins, file, 4)
    assert balancer.split.rows == (12, 12)
    changes = {step: split.rows for step in range(5, 50) if (split := balancer.after_step(step))}
    assert changes == {10: (16, 8)}
    # On other devices it is decided anew, from there on.
    other = replace(current, after_step=30, devices=current.devices[:1] * 2)
    assert history.add(other).decided_to == 30
    assert history.going_on_after(4, lambda known: known.after_step > 0) is None
    until = history.add(other).going_on_after(4, lambda known: known.after_step < 30)
    assert until == SplitHistory(history.allocations, 29)


def probe_of(config: RunConfig, num_layers: int) -> Any:
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "vocab_size": 300}
    return build_probe(config.model, num_layers=num_layers, **options)


def test_a_model_is_measured_and_nothing_else_changes(run_file):
    config = load_run_file(run_file).config
    made = []

    def make(layers: int) -> nn.Module:
        made.append(layers)
        return Training(probe_of(config, layers), config, CPU)

    probe = Probe(make, 24, 300, 32, CPU, 1.0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    curve, _ = calibrate(probe, [1, 2, 4], free_bytes=None)
    assert torch.equal(torch.rand(3), expected), "the random state is as it was"
    assert made == [1, 2]
    assert curve.sizes == (1, 2, 4)
    assert curve.limit == 4


@each("false", "true")
def test_what_is_measured_keeps_documents_apart_where_the_run_will(isolates, *, run_file):
    """A mask over all rows is memory that a micro-batch must have room for."""
    options = ["data.packing=true", f"data.isolate_documents={isolates}"]
    config = load_run_file(run_file, options).config
    model = probe_of(config, 1)
    assert use_maskless_attention(model)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    Training(model, config, CPU)(torch.zeros((2, 8), dtype=torch.int64))
    mask = seen[-1].get("attention_mask")
    assert (mask is not None) == (isolates == "true")
    if mask is not None:
        assert mask.shape == (2, 1, 8, 8)
        assert not mask[0, 0, 7, 0], "two documents"


def test_the_meter_counts_training_and_not_evaluation():
    blocks = [nn.Linear(64, 64) for _ in range(3)]
    meter = ComputeMeter(list(blocks), CPU)
    for _ in range(4):
        for block in blocks:
            block(torch.ones(64, 64))
        meter.step_done()
    assert len(meter.steps()) == 2, "the first two warm up"
    assert min(meter.steps()) > 0
    meter.reset()
    assert meter.steps() == []
    for block in blocks:
        block.eval()(torch.ones(64, 64))
    meter.step_done()
    assert meter.steps() == [0.0]


@st.composite
def curves(draw: st.DrawFn, most: int = 3) -> list[Curve]:
    """Of some ranks; times never fall with the rows, and rows together never cost more than apart.

    Drawn as whole numbers, so that equal times are equal.
    """
    ranks = []
    for _ in range(draw(st.integers(1, most))):
        limit = draw(st.integers(1, 4))
        seconds = [draw(st.integers(1, 9))]
        for size in range(2, limit + 1):
            together = min(seconds[i] + seconds[size - 2 - i] for i in range(size - 1))
            seconds.append(draw(st.integers(seconds[-1], together)))
        ranks.append(Curve(tuple(range(1, limit + 1)), tuple(map(float, seconds)), limit))
    return ranks


def every_split(ranks: list[Curve], rows: int, *, in_step: bool) -> Iterator[RowSplit]:
    for dealt in itertools.product(range(rows + 1), repeat=len(ranks)):
        if sum(dealt) == rows:
            for sizes in itertools.product(*(range(1, curve.limit + 1) for curve in ranks)):
                yield RowSplit(dealt, sizes, in_step)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), curves(), st.integers(1, 9))
def test_nothing_is_faster(in_step, ranks, rows):
    best = min(step_seconds(split, ranks) for split in every_split(ranks, rows, in_step=in_step))
    found = fastest_split(ranks, rows, in_step=in_step)
    assert sum(found.rows) == rows
    for rank, curve in enumerate(ranks):
        steps = found.micro_steps(rank)
        assert sum(steps) == found.rows[rank]
        assert max(steps) <= curve.limit
    assert step_seconds(found, ranks) == pytest.approx(best, rel=1e-9)


def test_thousands_of_rows_on_dozens_of_ranks_take_seconds():
    # Of each rank: seconds of any micro-batch, and of each of its rows.
    costs = [(0.01 + i % 7 / 50, 0.05 + i % 11 / 30) for i in range(64)]
    ranks = [Curve((1, 2), (a + b, a + 2 * b), 8 + i % 3 * 8) for i, (a, b) in enumerate(costs)]
    for in_step in (False, True):
        began = time.process_time()
        split = fastest_split(ranks, 4096, in_step=in_step)
        assert time.process_time() - began < 20
        ideal = 4096 / sum(curve.rows_per_second for curve in ranks)
        assert sum(split.rows) == 4096
        assert step_seconds(split, ranks) < (1.5 if in_step else 1.05) * ideal


some_shares = st.lists(st.floats(0, 100), min_size=1, max_size=6).filter(lambda s: sum(s) > 1e-3)


@settings(deadline=None)
@given(some_shares, st.integers(1, 500), st.integers(1, 9))
def test_shares_are_met_to_the_row(shares, rows, limit):
    split = shared_split(rows, shares, [limit] * len(shares), in_step=False)
    assert sum(split.rows) == rows
    for own, share in zip(split.rows, shares, strict=True):
        assert abs(own - rows * share / sum(shares)) < 1 + 1e-9
    assert max(split.micro_batch_sizes) <= limit


def test_a_curve_comes_back_from_its_record():
    curve = Curve.of({1: 1.0, 4: 0.9, 8: 3.0}, 6)
    assert curve.seconds == (0.9, 0.9, 1.8), "what noise has added is taken out"
    assert Curve.read(curve.record()) == curve
    assert [curve.time(n) for n in (0, 6, 12)] == pytest.approx([0.9, 1.35, 2.7])
