"""When a save is written, which checkpoint is the latest good one, which are kept."""

from __future__ import annotations

import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from isles.checkpoint.rng import save_rng
from isles.checkpoint.store import discard, seal, stage, write_shards
from isles.config.checkpoint import CheckpointConfig
from isles.dist.world import World
from isles.errors import TrainingError
from isles.facts.units import format_bytes
from isles.rundir.manifest import (
    PARTIAL_PREFIX,
    CheckpointInfo,
    checkpoint_name,
    list_checkpoints,
    verify_checkpoint,
)
from isles.rundir.paths import RunDir

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a run's state in the background, one save at a time.

    Args:
        run_dir: whose checkpoints.
        world: the ranks of the cluster.
        config: the run file's section.
    """

    def __init__(self, run_dir: RunDir, world: World, config: CheckpointConfig) -> None:
        self._run_dir = run_dir
        self._world = world
        self._config = config
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = -1
        self.last_step: int | None = None
        self.last_at: float | None = None

    def clean(self) -> None:
        """Remove what killed saves left behind. Rank 0 only, before the first save."""
        self._run_dir.checkpoints.mkdir(exist_ok=True)
        for folder in self._run_dir.checkpoints.iterdir():
            if folder.name.startswith(PARTIAL_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)

    def save(self, state: dict[str, Any], manifest: dict[str, Any], *, wait: bool) -> None:
        """Save a step. Training may go on as soon as this returns. All ranks must call this.

        Args:
            state: tensors by name, from the engine.
            manifest: what the manifest says beside the files; `step` is required.
            wait: return only when the checkpoint is whole on the disk.

        Raises:
            TrainingError: this save, or the one before it, could not be written.
        """
        self.wait()
        step = int(manifest["step"])
        final = self._run_dir.checkpoints / checkpoint_name(step)
        partial = final.with_name(f"{PARTIAL_PREFIX}{final.name}")
        if self._world.main_first(lambda: self._prepare(partial, final)):
            save_rng(partial, self._world.rank)
            staged = stage(state, rank=self._world.rank, world_size=self._world.world_size)
            self._pending_step = step
            self._pending = self._writer.submit(self._write, staged, partial, final, manifest)
            if wait or not self._config.async_save:
                self.wait()

    def poll(self) -> None:
        """Notice whether the save under way has ended. Never waits.

        Raises:
            TrainingError: it failed.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            TrainingError: it failed, or was not over in checkpoint.timeout.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        where = f"{self._run_dir.checkpoints}, rank {self._world.rank} on {self._world.host}"
        try:
            pending.result(self._config.timeout)
        except FutureTimeout as error:
            raise TrainingError(
                f"saving step {self._pending_step} is not over after {self._config.timeout:.0f}s",
                where=where,
                fix="a slow or hanging disk? Raise checkpoint.timeout, or save to another disk",
            ) from error
        except (OSError, CheckpointException) as error:
            free = format_bytes(shutil.disk_usage(self._run_dir.checkpoints).free)
            raise TrainingError(
                f"step {self._pending_step} could not be saved, {free} are free on this disk: "
                f"{_root(error)}",
                where=where,
                fix="free some space, lower checkpoint.keep or set another output_dir; "
                "`isles train` again goes on from the last whole checkpoint, which is untouched",
            ) from error
        self.last_step, self.last_at = self._pending_step, time.time()

    def close(self) -> None:
        """Wait for the last save, and end the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, partial: Path, final: Path) -> bool:
        if final.exists():
            if not verify_checkpoint(final):
                self.last_step, self.last_at = int(final.name.removeprefix("step-")), time.time()
                return False  # saved already, by an earlier attempt or a moment ago
            discard(final)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        return True

    def _write(
        self, staged: dict[str, Any], partial: Path, final: Path, manifest: dict[str, Any]
    ) -> None:
        try:
            write_shards(staged, partial, self._world.saving)
            if not self._world.is_main:
                return
            seal(partial, final, manifest)
        except BaseException:  # torch's CheckpointException is one; it goes on to `wait`
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for info in list_checkpoints(self._run_dir)[: -self._config.keep]:
            discard(info.path)


def latest_good(run_dir: RunDir) -> CheckpointInfo | None:
    """The newest checkpoint whose every hash is right; None where there is none at all.

    A broken one is named in the log before an older one is taken.

    Raises:
        TrainingError: there are checkpoints, and every one of them is broken.
    """
    checkpoints = list_checkpoints(run_dir)
    for info in reversed(checkpoints):
        faults = verify_checkpoint(info.path)
        if not faults:
            return info
        log.warning("checkpoint step=%d is broken and left out: %s", info.step, "; ".join(faults))
    if checkpoints:
        raise TrainingError(
            f"all {len(checkpoints)} checkpoints of this run are broken",
            where=str(run_dir.checkpoints),
            fix="see `isles checkpoint verify`; `--resume no` starts a new run",
        )
    return None


def _root(error: OSError | CheckpointException) -> str:
    """The cause in one line: torch reports the failures of all ranks in one exception."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {str(cause).strip().splitlines()[-1]}"
    return str(error.strerror or error)
