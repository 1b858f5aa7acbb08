"""Saves: what is on the disk before its name (law 3), and how long one may take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from isles.checkpoint.save import CheckpointManager, seal
from isles.config.sections.output import CheckpointConfig
from isles.dist.files import Disks
from isles.dist.world import Place, World
from isles.errors import TrainingError
from isles.run.checkpoints import MANIFEST, MANIFEST_VERSION, checkpoint_name
from isles.run.paths import RunDir
from isles.run.records import write_record
from isles.run.restarts import checkpoint_to_load


def saving(
    tmp_path: Path, pending: Future[None], now: Callable[[], float] = time.monotonic
) -> CheckpointManager:
    """One whose save of step 4 is under way, and may take half an hour."""
    group: Any = None  # nothing is sent
    device: Any = None
    world = World(0, 0, 1, 1, device, group, group, group, 1.0)
    disks = Disks((Place(0, 0, "here"),), (False,))
    config = CheckpointConfig(timeout=1_800.0)
    checkpoints = CheckpointManager(RunDir(tmp_path), world, config, disks, 1, now)
    checkpoints._pending, checkpoints._pending_step = pending, 4
    return checkpoints


def test_a_disk_that_times_out_is_not_a_save_that_takes_too_long(tmp_path: Path) -> None:
    """An error of a disk of the network is a TimeoutError, as is one of waiting."""
    pending: Future[None] = Future()
    pending.set_exception(TimeoutError(110, "Connection timed out"))
    with pytest.raises(TrainingError, match="Connection timed out") as error:
        saving(tmp_path, pending).wait()
    assert "is not over" not in str(error.value)


def test_a_save_may_take_as_long_as_its_parts_move(tmp_path: Path) -> None:
    pending, looks = Future[None](), iter([0.0, 0.0, 1_900.0])

    def now() -> float:
        """More than half an hour passes between the first look and the last, when it is done."""
        if (seconds := next(looks)) > 0.0:
            pending.set_result(None)
        return seconds

    checkpoints = saving(tmp_path, pending, now)
    checkpoints.moved_at = 1_700.0
    checkpoints.wait()
    assert checkpoints.last_step == 4
    with pytest.raises(TrainingError, match="step 4 is not over after 1800s"):
        saving(tmp_path, Future(), iter([0.0, 0.0, 1_900.0]).__next__).wait()


def test_what_was_asked_for_is_loaded_until_this_start_has_saved(tmp_path: Path) -> None:
    """Whatever the clocks of the hosts say that began the run and wrote the checkpoints."""
    run_dir = RunDir(tmp_path)
    asked = run_dir.checkpoints / checkpoint_name(4)
    second = run_dir.attempt(2)

    def save(step: int, attempt: int, created_at: float) -> None:
        folder = run_dir.checkpoints / checkpoint_name(step)
        folder.mkdir(parents=True)
        manifest = {"version": MANIFEST_VERSION, "step": step, "files": {}, "attempt": attempt}
        write_record(folder / MANIFEST, manifest | {"created_at": created_at})

    second.path.mkdir(parents=True)
    write_record(second.launch, {"begun_at": 10_000.0})
    save(4, 1, 13_600.0)
    assert checkpoint_to_load(run_dir, second, asked, 0) == asked
    assert checkpoint_to_load(run_dir, second, asked, 1) == asked, "an hour ahead"
    save(6, 2, 6_400.0)
    assert checkpoint_to_load(run_dir, second, asked, 1) is None, "an hour behind"
    assert checkpoint_to_load(run_dir, second, None, 1) is None


_fsync, _replace = os.fsync, Path.replace


class Disk:
    """Remembers which files were forced to the disk, and what was when a file got its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.safe: set[int] = set()
        self.unsafe: list[str] = []
        monkeypatch.setattr(os, "fsync", self._fsync)

        def replace(path: Path, target: Path) -> Path:
            files = [path, *path.rglob("*")]
            self.unsafe += [file.name for file in files if file.stat().st_ino not in self.safe]
            return _replace(path, target)

        monkeypatch.setattr(Path, "replace", replace)

    def _fsync(self, handle: int) -> None:
        self.safe.add(os.fstat(handle).st_ino)
        _fsync(handle)


def test_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    write_record(tmp_path / "a.json", {"step": 1})
    assert disk.unsafe == []
    write_record(tmp_path / "b.json", {"step": 1}, durable=False)
    assert len(disk.unsafe) == 1


def test_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial, final = tmp_path / ".partial-step-00000001", tmp_path / "step-00000001"
    partial.mkdir()
    for name in ("__0_0.distcp", ".metadata"):
        (partial / name).write_bytes(b"weights")
    disk = Disk(monkeypatch)
    seal(partial, final, {"version": 1, "step": 1})
    assert disk.unsafe == []
    assert tmp_path.stat().st_ino in disk.safe  # the entry of the name itself
    assert (final / "manifest.json").exists()
