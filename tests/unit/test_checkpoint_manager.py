"""Waiting for a save that is under way: its own error, and how long it may take."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from isles.checkpoint.manager import CheckpointManager
from isles.checkpoint.travel import Travel
from isles.config.checkpoint import CheckpointConfig
from isles.dist.disks import Disks
from isles.dist.place import Place
from isles.dist.world import World
from isles.errors import TrainingError
from isles.rundir.paths import RunDir


def manager(tmp_path: Path, timeout_s: float) -> CheckpointManager:
    group: Any = None  # nothing is sent
    device: Any = None
    world = World(0, 0, 1, 1, device, group, group, group, 1.0)
    run_dir = RunDir(tmp_path)
    travel = Travel(run_dir, world, Disks((Place(0, 0, "here"),), (False,)))
    return CheckpointManager(run_dir, world, CheckpointConfig(timeout=timeout_s), travel)


def wait_for(checkpoints: CheckpointManager, pending: Future[None]) -> None:
    checkpoints._pending, checkpoints._pending_step = pending, 4
    checkpoints.wait()


def test_a_disk_that_times_out_is_not_a_save_that_takes_too_long(tmp_path: Path) -> None:
    """An error of a disk of the network is a TimeoutError, as is one of waiting."""
    pending: Future[None] = Future()
    pending.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TrainingError, match="Connection timed out") as error:
        wait_for(manager(tmp_path, 1800.0), pending)
    assert "is not over" not in str(error.value)


def test_a_save_may_take_as_long_as_its_parts_move(tmp_path: Path) -> None:
    checkpoints, pending = manager(tmp_path, 1.0), Future[None]()
    checkpoints.moved_at = time.monotonic() + 1.0  # a second from now it moves
    timer = threading.Timer(1.5, pending.set_result, (None,))
    timer.start()
    wait_for(checkpoints, pending)
    timer.join()
    assert checkpoints.last_step == 4
    with pytest.raises(TrainingError, match="step 4 is not over after 1s"):
        wait_for(checkpoints, Future())
