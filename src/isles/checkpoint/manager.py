"""When a save is written, which checkpoint is the latest good one, which are kept."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from isles.checkpoint.rng import save_rng
from isles.checkpoint.store import (
    discard,
    disk_fault,
    first_failure,
    seal,
    stage,
    write_shards,
)
from isles.checkpoint.travel import Travel
from isles.config.sections.output import CheckpointConfig
from isles.dist.world import World
from isles.errors import TrainingError, UserError
from isles.run.checkpoints import (
    MANIFEST,
    MANIFEST_VERSION,
    PARTIAL_PREFIX,
    CheckpointInfo,
    checkpoint_name,
    list_checkpoints,
    read_checkpoint,
    verify_checkpoint,
)
from isles.run.paths import RunDir
from isles.run.records import read_record

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves a run's state in the background, one save at a time.

    Args:
        run_dir: whose checkpoints.
        world: the ranks of the cluster.
        config: the run file's section.
        travel: the way of the parts to rank 0, where nodes have disks of their own.
        attempt: which start of the run this is; its checkpoints say so.
        now: seconds that only ever grow.
    """

    def __init__(
        self,
        run_dir: RunDir,
        world: World,
        config: CheckpointConfig,
        travel: Travel,
        attempt: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._world = world
        self._config = config
        self._travel = travel
        self._attempt = attempt
        self._now = now
        self.moved_at = now()
        """When parts of a save have last come further on their way, by `now`."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = -1
        self.last_step: int | None = None
        self.last_at: float | None = None

    def begin(self, step: int) -> None:
        """Remove what killed saves left behind, and what is of steps that are done again.

        All ranks call this, before the first save.

        Args:
            step: after which training goes on.
        """
        self._travel.clean()
        if not self._world.is_main:
            return
        self._run_dir.checkpoints.mkdir(exist_ok=True)
        for folder in self._run_dir.checkpoints.iterdir():
            if folder.name.startswith(PARTIAL_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)
        self.forget_after(step)

    def forget_after(self, step: int) -> None:
        """Remove what an abandoned branch of this run has saved after `step`. Rank 0 only.

        Steps are done again from `step` on, and a checkpoint of the old ones must neither be taken
        for one of the new nor be gone on with.
        """
        self.wait()
        for folder in sorted(self._run_dir.checkpoints.glob("step-*")):
            number = folder.name.removeprefix("step-")
            if number.isdigit() and int(number) > step:
                log.warning("%s is of steps that are done again, and is removed", folder.name)
                discard(folder)

    def save(
        self,
        state: dict[str, Any],
        manifest: dict[str, Any],
        *,
        replicas: tuple[int, int],
        wait: bool,
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Save a step. Training may go on as soon as this returns. All ranks must call this.

        Args:
            state: tensors by name, from the engine.
            manifest: what the manifest says beside the files; `step` is required.
            replicas: from the engine; see `strategies.base.Engine.replicas`.
            wait: return only when the checkpoint is whole on the disk.
            own: tensors by name that this rank alone has.

        Raises:
            TrainingError: this save, or the one before it, could not be written.
        """
        self.wait()
        step = int(manifest["step"])
        final = self._run_dir.checkpoints / checkpoint_name(step)
        partial = final.with_name(f"{PARTIAL_PREFIX}{final.name}")
        if self._world.main_first(lambda: self._prepare(partial, final, manifest)):
            self._travel.prepare(partial)
            try:
                save_rng(self._travel.staging(partial), self._world.rank)
            except (OSError, SafetensorError) as error:
                raise self._cannot_save(step, error) from error
            staged = stage(state, replicas) | stage(dict(own), (0, 1))
            self._pending_step = step
            manifest = {**manifest, "attempt": self._attempt}
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
        try:
            self._await(pending)
        except (OSError, CheckpointException) as error:
            raise self._cannot_save(self._pending_step, error) from error
        self.last_step, self.last_at = self._pending_step, time.time()

    def _await(self, pending: Future[None]) -> None:
        # Wait as long as checkpoint.timeout, which begins anew whenever parts have moved on.
        began = self._now()
        while not pending.done():
            left_s = max(began, self.moved_at) + self._config.timeout - self._now()
            if left_s <= 0:
                raise TrainingError(
                    f"saving step {self._pending_step} is not over after "
                    f"{self._config.timeout:.0f}s",
                    where=f"{self._run_dir.checkpoints}, rank {self._world.rank} on "
                    f"{self._world.host}",
                    fix="a slow or hanging disk? Raise checkpoint.timeout, or save to another disk",
                    id="checkpoint.slow",
                )
            wait_for([pending], timeout=left_s)
        # Not `result(left_s)`: a disk of the network fails with a TimeoutError of its own.
        pending.result()

    def close(self) -> None:
        """Wait for the last save, and end the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown(wait=False, cancel_futures=True)

    def _seal(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        try:
            seal(partial, final, manifest)
        except OSError as error:
            raise self._cannot_save(int(manifest["step"]), error) from error

    def _cannot_save(self, step: int, error: BaseException) -> TrainingError:
        rank = self._world.rank
        if isinstance(error, CheckpointException):
            rank, error = first_failure(error)
        if not isinstance(error, UserError):
            error = disk_fault(error, self._run_dir.checkpoints, rank)
        return TrainingError(
            f"step {step} could not be saved: {error.what}",
            where=error.where,
            fix=error.fix,
            id="checkpoint.unsaved",
        )

    def _prepare(self, partial: Path, final: Path, manifest: dict[str, Any]) -> bool:
        if final.exists():
            if verify_checkpoint(final):
                discard(final)
            elif _is_same_state(final, manifest):
                self.last_step, self.last_at = int(final.name.removeprefix("step-")), time.time()
                return False  # saved already, by an earlier attempt or a moment ago
        if partial.exists():
            shutil.rmtree(partial)
        if not self._run_dir.resolved.is_file():
            raise TrainingError(
                "the run directory is gone",
                where=str(self._run_dir.path),
                fix="put it back, or start a new run with `isles train`",
                id="checkpoint.unsaved",
            )
        partial.mkdir()
        return True

    def _write(
        self, staged: dict[str, Any], partial: Path, final: Path, manifest: dict[str, Any]
    ) -> None:
        try:
            write_shards(staged, self._travel.staging(partial), self._world.saving)
            self._travel.gather(partial, self._moved)
            self._world.main_first(
                lambda: self._seal(partial, final, manifest), group=self._world.saving
            )
        except BaseException:  # torch's CheckpointException is one; it goes on to `wait`
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            self._travel.discard(partial)
        if not self._world.is_main:
            return
        step = int(manifest["step"])
        older = [info for info in list_checkpoints(self._run_dir) if info.step < step]
        for info in older[: max(0, len(older) + 1 - self._config.keep)]:
            discard(info.path)

    def _moved(self, done: int, total: int) -> None:
        self.moved_at = self._now()
        log.debug("parts done=%d of=%d", done, total)


def _is_same_state(folder: Path, manifest: dict[str, Any]) -> bool:
    # Whether no other cluster's weights have come in at this step since it was saved.
    before = (read_record(folder / MANIFEST) or {}).get("outer")
    return bool(before == json.loads(json.dumps(manifest.get("outer"))))


def latest_good(run_dir: RunDir) -> CheckpointInfo | None:
    """The newest checkpoint whose every hash is right; None where there is none at all.

    A broken one is named in the log before an older one is taken.

    Raises:
        TrainingError: there are checkpoints, and none can be gone on with; or the newest is of a
            format that this isles does not read.
    """
    folders = sorted(run_dir.checkpoints.glob("step-*"), reverse=True)
    for folder in folders:
        record = read_record(folder / MANIFEST) or {}
        if record.get("version", MANIFEST_VERSION) != MANIFEST_VERSION:
            read_checkpoint(folder)  # raises, naming the version that wrote it
        faults = verify_checkpoint(folder)
        if not faults:
            return read_checkpoint(folder)
        log.warning("checkpoint %s is broken and left out: %s", folder.name, "; ".join(faults))
    if folders:
        raise TrainingError(
            f"all {len(folders)} checkpoints of this run are broken",
            where=str(run_dir.checkpoints),
            fix="see `isles checkpoint verify`; `--resume no` starts a new run",
            id="checkpoint.broken",
        )
    return None
