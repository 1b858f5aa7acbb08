"""Unequal rows: chosen, measured, revised while training; and the same weights as ever."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch

from isles.balance.balancer import Balancer
from isles.balance.curve import Curve
from isles.balance.gpus import GpuMeter
from isles.balance.measure import ComputeMeter, compute_until_all_are_here
from isles.balance.revise import Allocation, RankDevice, SplitHistory
from isles.dist.split import even_split
from isles.dist.world import join_world, leave_world
from isles.run.checkpoints import list_checkpoints
from isles.run.env import RankEnv
from isles.run.paths import RunDir
from tests.deadline import DEADLINE_S, until
from tests.dist.test_resume import same_bits, until_recorded
from tests.dist.test_same_mathematics import TOLERANCE, largest_difference
from tests.ranks import one_rank, run_ranks, start_training, train
from tests.slowdown import slowed

LARGE = ("training.logging_steps=1", "training.global_batch_size=32", "data.seq_length=128")
"""Steps that take long enough to be measured."""


def _on_unequal_devices(env: RankEnv, *arguments: Any) -> int:
    """A rank of training whose processor has as many threads as none of the others'."""
    torch.set_num_threads(env.rank + 1)
    return one_rank(env, *arguments)


def last_rows(run_dir: RunDir) -> list[int]:
    """The rows of each rank that the newest checkpoint goes on with."""
    return list_checkpoints(run_dir)[-1].manifest["rows"]


@pytest.mark.brief('{"0": 5}-auto-rows0-ddp', '{"1": 0}-4-rows2-fsdp')
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("shares", "micro", "rows"),
    [('{"0": 5}', "auto", [10, 2]), ('{"0": 1, "1": 3}', "2", [3, 9]), ('{"1": 0}', "4", [12, 0])],
)
def test_shares_change_nothing(run_file, strategy, shares, micro, rows):
    """20 steps of one process with the whole batch, against two with unequal rows."""
    alone = train(run_file, 1, "training.micro_batch_size=12")
    options = (f"balance={shares}", f"training.micro_batch_size={micro}")
    run_dir = train(run_file, 2, *options, f"strategy={{kind: {strategy}}}", resume="no")
    assert last_rows(run_dir) == rows
    assert largest_difference(alone, run_dir) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_measured_rows_are_all_rows_and_change_nothing(run_file, strategy):
    constant = "training.lr_scheduler_type=constant"
    alone = train(run_file, 1, "training.micro_batch_size=12", constant)
    options = ("balance=auto", f"strategy={{kind: {strategy}}}", constant)
    run_dir, _, gang = start_training(run_file, 2, *options, resume="no", rank=_on_unequal_devices)
    assert gang.wait() == [0, 0]
    assert sum(last_rows(run_dir)) == 12
    assert largest_difference(alone, run_dir) < TOLERANCE
    log = gang.log.read_text()
    head = re.findall(r"^rank +host +device +rows +micro-batch +rows/s +step s$", log, re.M)
    assert len(head) == 1
    assert re.search(r"expected: [\d.]+ s per step, [\d.]+ times an even split", log)
    again = train(run_file, 3, *options, "training.max_steps=25", resume=str(run_dir.path))
    assert len(last_rows(again)) == 3, "other ranks are measured anew"
    assert sum(last_rows(again)) == 12


def _measure(env: RankEnv, folder: Path) -> tuple[int, list[int]]:
    """How often a rank computes until another is done with measuring; and steps after which a look
    has judged, for steps of several lengths."""
    world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
    world.gather(None)
    passes, mark = itertools.count(1), folder / "three-passes"

    def work() -> None:
        if next(passes) == 3:
            mark.touch()

    if env.rank == 1:
        until(mark.exists, "rank 0 computes while rank 1 is not done")
    compute_until_all_are_here(work, world)
    devices = tuple(RankDevice("box", "cpu", rank) for rank in range(2))
    curves = (Curve((1, 4), (1.0, 4.0), 4),) * 2
    split = even_split(8, 2, 4, in_step=False)
    even = Allocation(0, split, 4, "ddp", devices, curves, is_timed=False)
    judged = []
    for step_s, pause_s in ((1.2, 0.0), (0.3, 60.0), (0.06, 0.0)):
        now = [0.0]
        record, history = folder / "record", SplitHistory().add(even)
        balancer = Balancer(world, even, history, record, 0, lambda now=now: now[0])
        block = torch.nn.Linear(2, 2)
        balancer.watch([block])
        step = 0
        while balancer.decided_to == 0:
            step += 1
            block(torch.ones(1, 2))
            now[0] += step_s + (pause_s if step == 5 else 0.0)
            balancer.after_step(step)
        judged.append(step)
    leave_world()
    return next(passes) - 1, judged


def test_how_long_is_measured(tmp_path):
    """Who has measured computes until all have, else a rank that shares processors seems the
    faster, the later it comes. A look has ten seconds of steps to judge by: it comes after ten
    slow steps, or more quick ones; a long pause is no evidence."""
    (passes, judged), (_, others) = run_ranks(_measure, 2, tmp_path)
    assert passes >= 3
    assert judged == others == [10, 50, 200]


def _throttle(env: RankEnv, folder: Path, is_seen: bool) -> list[tuple[int, ...]]:
    """Rows after each review, where the GPU of rank 1 takes 1.3 times as long for a block."""
    world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
    clocks = (1800, 1200) if is_seen else (1800, 1800)
    for call, value in {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetName": str,
        "nvmlDeviceGetClockInfo": lambda gpu, _: clocks[gpu],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x4,
    }.items():
        setattr(pynvml, call, value)
    now = [0.0]
    time.perf_counter = lambda: now[0]

    class Block(torch.nn.Module):
        def forward(self, rows: int) -> int:
            now[0] += 0.1 * rows * (1.3 if env.rank == 1 else 1.0)
            return rows

    devices = tuple(RankDevice("box", "gpu", rank) for rank in range(2))
    even = even_split(24, 2, 4, in_step=False)
    first = Allocation(0, even, 4, "ddp", devices, (Curve((1, 4), (0.1, 0.4), 4),) * 2, True)
    record, history = folder / f"record-{is_seen}", SplitHistory().add(first)
    balancer = Balancer(world, first, history, record, 0, lambda: now[0])
    block = Block()
    balancer.watch([block], GpuMeter(world.local_rank, lambda: now[0]))
    rows = [even.rows]
    for step in range(1, 101):
        block(rows[-1][env.rank])
        rows += [split.rows] if (split := balancer.after_step(step)) else []
    leave_world()
    return rows


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_throttled_gpu_gives_rows_to_its_equal_and_noise_does_not(tmp_path, is_seen):
    """Rank 0 decides for both by the clocks of both."""
    own, other = run_ranks(_throttle, 2, tmp_path, is_seen)
    assert own == other == ([(12, 12), (14, 10)] if is_seen else [(12, 12)])


def test_a_processor_that_is_shared_is_no_slow_device() -> None:
    """Equal ranks beside other work differ twofold by the wall's clock."""
    block = torch.nn.Linear(512, 512)
    meter = ComputeMeter([block], torch.device("cpu"))
    meter.reset()
    inputs = torch.ones(256, 512)
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with busy(2):  # which inherit the core
            began = time.perf_counter()
            while time.perf_counter() < began + 2:
                block(inputs)
            wall_s = time.perf_counter() - began
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
    meter.step_done()
    assert meter.steps()[0] < 0.75 * wall_s


@pytest.mark.long
def test_a_rank_that_becomes_slow_gets_fewer_rows(run_file: Path) -> None:
    """Slowed from outside in the middle of the run; the weights are those of one process."""
    options = (*LARGE, "training.max_steps=160", "training.learning_rate=1e-4")
    alone = train(run_file, 1, *options, "training.micro_batch_size=32")
    run_dir, _, gang = start_training(run_file, 2, *options, "balance=auto", resume="no")
    until_recorded(run_dir, gang, 2)
    with slowed({gang.processes[1].pid or 0: 6.0}):
        assert gang.wait() == [0, 0]
    log = gang.log.read_text()
    assert "balance revised: data-parallel rank" in log
    rows = last_rows(run_dir)
    assert sum(rows) == 32
    assert rows[1] < rows[0] / 1.5, log
    assert largest_difference(alone, run_dir) < TOLERANCE


@contextlib.contextmanager
def busy(processes: int, core: int | None = None) -> Iterator[None]:
    """Other work on the machine, on any core or on one, inside a `with`."""
    only = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    command = [sys.executable, "-c", f"{only}while True: pass"]
    others = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.long
def test_equal_devices_give_the_same_bits_whatever_else_the_machine_does(run_file: Path) -> None:
    """One run alone, and one with other work on all cores, and on one of them again and again, from
    before its first step on."""
    options = (*LARGE, "balance=auto", "training.max_steps=60")
    alone = train(run_file, 2, *options)
    disturbed, _, gang = start_training(run_file, 2, *options, resume="no")
    with busy(2):
        while not gang.wait_or_timeout(3.0):
            with busy(3, core=min(os.sched_getaffinity(0))):
                if gang.wait_or_timeout(3.0):
                    break
    assert gang.wait() == [0, 0]
    assert last_rows(disturbed) == last_rows(alone) == [16, 16], gang.said()
    assert same_bits(alone, disturbed)


def splits(run_dir: RunDir) -> tuple[Allocation, ...]:
    """All that a run has used so far."""
    return SplitHistory.load(run_dir.balance, None).allocations


@pytest.mark.long
def test_killed_and_resumed_deals_the_rows_of_before(run_file: Path) -> None:
    """Killed before its first save, and between a revision and the next save, on unequal devices;
    what came out is what a start from an early checkpoint gives, which is not killed."""
    options = (*LARGE, "balance=auto", "training.max_steps=200", "checkpoint.keep=9")
    options += ("checkpoint.every_steps=40", "training.lr_scheduler_type=constant")

    start = functools.partial(start_training, run_file, 2, *options, rank=_on_unequal_devices)

    run_dir, _, gang = start()
    until_recorded(run_dir, gang, 2)
    gang.kill()
    begun = splits(run_dir)
    assert len(begun) == 1
    run_dir, _, gang = start()
    until_recorded(run_dir, gang, 2)
    with slowed({gang.processes[1].pid or 0: 6.0}):
        gang.until(lambda: len(splits(run_dir)) > 1)
        gang.kill()
    revised = splits(run_dir)
    assert revised[0] == begun[0], "not measured again"
    assert revised[1].split != begun[0].split
    assert all(info.step < revised[1].after_step for info in list_checkpoints(run_dir))
    run_dir, _, gang = start()
    assert gang.wait() == [0, 0]
    assert splits(run_dir)[:2] == revised
    finished = run_dir.path.with_name("finished")
    shutil.copytree(run_dir.path, finished)
    first = list_checkpoints(run_dir)[0]
    again, _, gang = start(resume=str(first.path))
    assert gang.wait() == [0, 0]
    assert again.path == run_dir.path
    assert splits(again) == splits(RunDir(finished))
    assert same_bits(RunDir(finished), again)
