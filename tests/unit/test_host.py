"""The host's part in a step: its clock, its garbage, its heap, its cores."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

from isles.train.clock import Laps
from isles.train.host import collect_garbage, collecting_at_steps, near_cores
from tests.each import each


def test_a_part_of_a_step_is_read_when_the_step_is_recorded():
    """On a GPU reading waits; a mark does not."""
    marks, reads = itertools.count(), []

    def between(begin: int, end: int) -> float:
        reads.append((begin, end))
        return float(end - begin)

    laps = Laps(lambda: next(marks), between)
    for _ in range(2):
        laps.begin()
        laps.end("data")
        laps.end("optimizer")
    assert reads == [], "nothing waits"
    assert laps.take() == [("data", 1.0), ("optimizer", 1.0)] * 2
    assert reads == [(0, 1), (1, 2), (3, 4), (4, 5)], "and no part reaches into another step"
    assert laps.take() == []


class Ring:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.self = self


def test_garbage_is_collected_at_the_same_steps_on_every_rank():
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    with collecting_at_steps():
        assert not gc.isenabled() and gc.get_freeze_count() > frozen
        ring, kept = weakref.ref(Ring()), Ring()
        old = weakref.ref(kept)
        freed = []
        for step in range(1, 101):
            collect_garbage(step)
            if step == 50:
                del kept  # which has outlived a collection, so it is old
            if ring() is None:
                freed.append(step)
                ring = weakref.ref(Ring())
        assert freed == [50, 100]
        assert old() is None
    gc.collect()
    assert gc.isenabled() == was_enabled


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two sockets with a GPU each, and a GPU of unknown place."""
    for number, cores in enumerate(("0-3,8-11", "4-7,12-15")):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    for address, node in (("0000:17:00.0", 0), ("0000:65:00.0", 1), ("0000:99:00.0", -1)):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path


ALL = set(range(16))


@each(
    ("0000:17:00.0", ALL, {0, 1, 2, 3, 8, 9, 10, 11}),
    ("0000:65:00.0", ALL, {4, 5, 6, 7, 12, 13, 14, 15}),
    ("0000:65:00.0", {2, 3, 4, 5}, {4, 5}),  # bound by a queue
    ("0000:65:00.0", {4, 5}, set()),  # the queue has bound it to this socket
    ("0000:65:00.0", {0, 1}, set()),  # only far cores are allowed
    ("0000:99:00.0", ALL, set()),
    ("0000:aa:00.0", ALL, set()),  # not in sysfs, as in some containers
)
def test_a_rank_keeps_to_the_allowed_cores_of_its_gpus_socket(address, allowed, cores, *, sysfs):
    assert near_cores(address, allowed, sysfs) == cores


@each(
    (8, {7}),  # one rank of eight has one core of eight
    (2, set()),  # one of two has four, and would lose three
)
def test_a_rank_is_bound_to_no_fewer_cores_than_its_share(ranks, cores, *, sysfs):
    allowed = {0, 1, 2, 3, 8, 9, 10, 7}
    found = near_cores("0000:65:00.0", allowed, sysfs, least=len(allowed) // ranks)
    assert found == cores


HELD = """
import psutil
from isles.train.host import map_large_blocks, trim_heap

def held():
    info = psutil.Process().memory_info()
    return info.rss - info.shared

def free(size):
    freed, kept = [], []
    for _ in range(64 * 2**20 // size):
        freed.append(b"x" * size)
        kept.append(b"x" * (100 << 10))
    return kept  # blocks between those that are freed

first = b"x" * (30 << 20)
del first  # now glibc's own threshold is 30 MiB
before = held()
map_large_blocks()
kept = free(8 << 20)
print(held() - before)
kept += free(1000 << 10)
trim_heap()
print(held() - before)
"""


def test_the_memory_of_freed_tensors_goes_back_to_the_kernel() -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    words = [sys.executable, "-c", HELD]
    done = subprocess.run(words, env=environ, check=True, capture_output=True, text=True)
    large, small = map(int, done.stdout.split())
    assert large < 10 << 20
    assert small < 20 << 20, "7 MiB are kept"
