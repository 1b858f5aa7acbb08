"""Saving: a checkpoint is written under a temporary name, hashed, read back, and renamed.

Training continues while a thread writes. Each rank hashes its own files from memory and reads them
back. A node with a separate disk writes its parts into its own run directory and sends them to rank
0, which reads them back. Only rank 0 has the complete checkpoint then.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from isles.checkpoint.load import rng_file, save_readable
from isles.checkpoint.staging import Buffers, assigned
from isles.checkpoint.tensors import TensorWriter, disk_failure, first_failure
from isles.config.sections.output import CheckpointConfig
from isles.dist.files import Disks, gather_folder
from isles.dist.world import World, on_every_rank, raise_first
from isles.errors import TrainingError, UserError
from isles.run.checkpoints import (
    PARTIAL_PREFIX,
    checkpoint_name,
    describe_file,
    list_checkpoints,
    sync_folder,
    verify_checkpoint,
)
from isles.run.manifest import MANIFEST, step_of
from isles.run.paths import RunDir
from isles.run.records import MAX_LIST_BYTES, read_record, write_record
from isles.run.upload import Uploader

log = logging.getLogger(__name__)

_PIECE_BYTES = 8 * 2**20


class CheckpointManager:
    """Saves a run's state in the background, one save at a time.

    Args:
        disks: the nodes with a separate run directory.
        attempt: the attempt of the run, recorded in its checkpoints.
        uploader: on rank 0, sends saved checkpoints to `checkpoint.remote`, if it is set.
        now: monotonic clock, seconds.
    """

    def __init__(
        self,
        run_dir: RunDir,
        world: World,
        config: CheckpointConfig,
        disks: Disks,
        attempt: int,
        now: Callable[[], float] = time.monotonic,
        uploader: Uploader | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._world = world
        self._config = config
        self._disks = disks
        self._sends = world.rank in disks.apart_leaders
        self._attempt = attempt
        self._now = now
        self._uploader = uploader
        self.moved_at = now()
        """When a part of a save last progressed, by `now`."""
        self._buffers = Buffers(world.device, world.local_world_size)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = -1
        self.last_step: int | None = None
        self.last_at: float | None = None

    def begin(self, step: int) -> None:
        """Remove the remains of killed saves, and checkpoints of steps that will be repeated.

        All ranks must call this before the first save.
        """
        if self._world.is_main:
            self._run_dir.checkpoints.mkdir(exist_ok=True)
        if self._world.is_main or self._sends:
            for folder in self._run_dir.checkpoints.glob(f"{PARTIAL_PREFIX}*"):
                shutil.rmtree(folder, ignore_errors=True)
        if self._world.is_main:
            self.forget_after(step)

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints after `step`, from an abandoned branch of this run. Rank 0 only.

        The steps after `step` are repeated. Their old checkpoints must not pass for new ones, and
        no run may resume from them.
        """
        self.wait()
        for folder in sorted(self._run_dir.checkpoints.glob("step-*")):
            if (number := step_of(folder.name)) is not None and number > step:
                log.warning("removing %s, because its steps are repeated", folder.name)
                _discard(folder)
        if self._uploader is not None:
            self._uploader.forget_after(step)

    def save(
        self,
        state: dict[str, Any],
        manifest: dict[str, Any],
        *,
        replicas: tuple[int, int],
        wait: bool,
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Save a step. Training may continue once this returns. All ranks must call this.

        It waits for the save before. The training loop calls it only when no rank `is_saving`, or
        at its end.

        Args:
            manifest: contents of the manifest other than the files; `step` is required.
            replicas: from the engine; see `strategies.base.Engine.replicas`.
            wait: return only when the complete checkpoint is on the disk.
            own: tensors by name that only this rank has.

        Raises:
            TrainingError: this save, or the save before it, failed.
        """
        self.wait()
        step = int(manifest["step"])
        final = self._run_dir.checkpoints / checkpoint_name(step)
        partial = final.with_name(f"{PARTIAL_PREFIX}{final.name}")
        # Reading back a checkpoint of an earlier attempt may take long.
        prepare = functools.partial(self._prepare, partial, final, manifest)
        if self._world.main_first(prepare, group=self._world.work):
            self._make_staging(partial)
            try:
                random = {"cpu": torch.get_rng_state()}
                if torch.cuda.is_available():  # memory of this rank's GPU
                    random["cuda"] = torch.cuda.get_rng_state()
                file = rng_file(self._staging(partial), self._world.rank)
                save_readable(random, file)
                files = {file.name: describe_file(file)}
            except (OSError, SafetensorError) as error:
                raise self._cannot_save(step, error) from error
            staged = self._buffers.copy({**assigned(state, replicas), **own})
            self._pending_step, self.moved_at = step, self._now()
            manifest = {**manifest, "attempt": self._attempt}
            self._pending = self._writer.submit(
                self._write, staged, files, partial, final, manifest
            )
            if wait or not self._config.async_save:
                self.wait()

    @property
    def is_saving(self) -> bool:
        """True while this rank writes a checkpoint in the background."""
        return self._pending is not None and not self._pending.done()

    def poll(self) -> None:
        """Check whether the current save has ended. Never waits.

        Raises:
            TrainingError: the save failed, or takes longer than checkpoint.timeout.
        """
        if self._pending is None:
            return
        if self._pending.done():
            self.wait()
        elif self.moved_at + self._config.timeout <= self._now():
            raise self._too_slow()

    def wait(self) -> None:
        """Wait for the current save.

        Raises:
            TrainingError: the save failed, or took longer than checkpoint.timeout.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        began = self._now()
        while not pending.done():
            # The limit restarts whenever a part has progressed.
            left_s = max(began, self.moved_at) + self._config.timeout - self._now()
            if left_s <= 0:
                raise self._too_slow()
            wait_for([pending], timeout=left_s)
        try:
            # Not `result(left_s)`: a network disk may itself raise a TimeoutError.
            pending.result()
        except (OSError, CheckpointException) as error:
            raise self._cannot_save(self._pending_step, error) from error
        self.last_step, self.last_at = self._pending_step, time.time()

    def close(self) -> None:
        """Wait for the last save, and stop the writer."""
        try:
            self.wait()
        finally:
            self._writer.shutdown(wait=False, cancel_futures=True)
            self._buffers.close()

    def _prepare(self, partial: Path, final: Path, manifest: dict[str, Any]) -> bool:
        # Create the folder on rank 0's disk; False if the step is already saved.
        if final.exists():
            before = (read_record(final / MANIFEST, MAX_LIST_BYTES) or {}).get("outer")
            # This process has already read back its own saves.
            if self.last_step != int(manifest["step"]) and verify_checkpoint(final):
                _discard(final)
            # Unless other clusters' weights arrived at this step after the save.
            elif before == json.loads(json.dumps(manifest.get("outer"))):
                self.last_step, self.last_at = int(manifest["step"]), time.time()
                return False
        if partial.exists():
            shutil.rmtree(partial)
        if not self._run_dir.resolved.is_file():
            raise TrainingError(
                "the run directory is gone",
                where=str(self._run_dir.path),
                fix="restore it, or start a new run with `isles train`",
                id="checkpoint.unsaved",
            )
        partial.mkdir()
        return True

    def _staging(self, partial: Path) -> Path:
        # The folder for this rank's part of the checkpoint that rank 0 writes at `partial`.
        if not self._disks.is_apart[self._world.rank]:
            return partial
        return partial.with_name(f"{partial.name}-{self._disks.keeper(self._world.rank)}")

    def _make_staging(self, partial: Path) -> None:
        # On disks other than rank 0's. All ranks must call this.
        if not self._disks.apart_leaders:
            return
        failure = None
        if self._sends:
            staging = self._staging(partial)
            try:
                shutil.rmtree(staging, ignore_errors=True)
                staging.parent.mkdir(exist_ok=True)
                staging.mkdir()
            except OSError as error:
                failure = disk_failure(error, self._run_dir.path, self._world.rank)
        raise_first(self._world.gather(failure))

    def _write(
        self,
        staged: dict[str, Tensor],
        files: dict[str, dict[str, Any]],
        partial: Path,
        final: Path,
        manifest: dict[str, Any],
    ) -> None:
        # In the writer's thread, on all ranks. `files` are already written.
        group, staging = self._world.saving, self._staging(partial)
        step = int(manifest["step"])

        def guarded(work: Callable[..., None], *arguments: Any) -> None:
            try:
                work(*arguments)
            except OSError as error:
                raise self._cannot_save(step, error) from error

        try:
            files |= write_shards(staged, staging, group, self._moved)
            if self._disks.apart_leaders:
                gather_folder(
                    staging, self._world, sends=self._sends, group=group, progress=self._moved
                )
            by_rank = self._world.gather(files, group=group)
            files = {name: facts for each in by_rank for name, facts in sorted(each.items())}
            # Rank 0 reads the files of ranks that do not see its disk.
            mine: dict[str, dict[str, Any]] = {}
            for rank, written in enumerate(by_rank):
                if self._world.rank == (0 if self._disks.is_apart[rank] else rank):
                    mine |= written
            check = functools.partial(guarded, read_back, partial, mine, self._moved)
            on_every_rank(self._world, check, group=group)
            finish = functools.partial(guarded, seal, partial, final, manifest, files)
            self._world.main_first(finish, group=group)
        except BaseException:  # including torch's CheckpointException; `wait` raises it
            if self._world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:
            if self._sends:  # rank 0 has the parts, or the save has failed
                shutil.rmtree(staging, ignore_errors=True)
        if not self._world.is_main:
            return
        older = [info for info in list_checkpoints(self._run_dir) if info.step < step]
        for info in older[: max(0, len(older) + 1 - self._config.keep)]:
            # A checkpoint that is being read is removed after the next save.
            if self._uploader is None or self._uploader.sending != info.step:
                try:
                    _discard(info.path)
                except OSError as error:  # the new checkpoint is complete
                    log.warning("cannot remove the old checkpoint=%s: %s", info.path, error)
        if self._uploader is not None:
            self._uploader.look()

    def _moved(self, *_: int) -> None:
        self.moved_at = self._now()

    def _too_slow(self) -> TrainingError:
        return TrainingError(
            f"saving step {self._pending_step} took more than {self._config.timeout:.0f}s",
            where=f"{self._run_dir.checkpoints}, rank {self._world.rank} on {self._world.host}",
            fix="check the disk, raise checkpoint.timeout, or save to another disk",
            id="checkpoint.slow",
        )

    def _cannot_save(self, step: int, error: BaseException) -> TrainingError:
        rank = self._world.rank
        if isinstance(error, CheckpointException):
            rank, error = first_failure(error)
        if not isinstance(error, UserError):
            error = disk_failure(error, self._run_dir.checkpoints, rank)
        return TrainingError(
            f"cannot save step {step}: {error.what}",
            where=error.where,
            fix=error.fix,
            id="checkpoint.unsaved",
        )


def write_shards(
    staged: dict[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup,
    moved: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Any]]:
    """Write this rank's part into an existing folder. All ranks must call this.

    Args:
        moved: called after each tensor.

    Returns:
        Size and SHA-256 of each file that this rank has written, by name.
    """
    writer = TensorWriter(folder, moved)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(staged, storage_writer=writer, process_group=group)
    return writer.files


def read_back(
    folder: Path, files: Mapping[str, Mapping[str, Any]], moved: Callable[[], None] = lambda: None
) -> None:
    """Force files to the disk, read them back past the page cache, and compare them.

    Args:
        files: the written data, as in a manifest.
        moved: called after each piece.

    Raises:
        TrainingError: the files read back differ from the written data.
    """
    changed = [
        f"{name}: its bytes have changed since the save (the SHA-256 differs)"
        for name, facts in files.items()
        if _hash_on_disk(folder / name, moved) != facts["sha256"]
    ]
    if changed:
        raise _damaged(folder, changed)


def seal(
    partial: Path,
    final: Path,
    manifest: dict[str, Any],
    files: Mapping[str, Mapping[str, Any]],
) -> None:
    """Write the manifest of a folder whose files were read back, and rename it. Rank 0 only.

    Raises:
        TrainingError: a file is missing or has another size.
    """
    write_record(partial / MANIFEST, {**manifest, "files": files})
    sync_folder(partial)
    if issues := verify_checkpoint(partial, hashes=False):
        raise _damaged(partial, issues)
    removed = _removed(final)
    if final.exists():  # the same step, with an average that arrived later
        final.replace(removed)
    partial.replace(final)
    sync_folder(final.parent)
    shutil.rmtree(removed, ignore_errors=True)


def _damaged(partial: Path, issues: list[str]) -> TrainingError:
    return TrainingError(
        f"the checkpoint on the disk differs from the written data: {'; '.join(issues)}",
        where=str(partial),
        fix="check the disk (dmesg, smartctl); the previous checkpoint is unchanged",
        id="checkpoint.unsaved",
    )


def _discard(folder: Path) -> None:
    # A kill during the removal must not leave a folder that looks complete.
    removed = _removed(folder)
    shutil.rmtree(removed, ignore_errors=True)  # from an earlier kill
    folder.replace(removed)
    try:
        shutil.rmtree(removed)
    except OSError as error:  # on NFS while another process reads one of its files
        log.warning("cannot remove %s, the next attempt will: %s", removed, error)


def _removed(folder: Path) -> Path:
    return folder.with_name(f"{PARTIAL_PREFIX}removed-{folder.name.lstrip('.')}")


def _hash_on_disk(file: Path, moved: Callable[[], None]) -> str:
    # The page cache is dropped before the read, so that it reads the disk, and after each piece, so
    # that a checkpoint does not push the training data out of the page cache.
    digest, piece, start = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES)), 0
    with file.open("rb", buffering=0) as stream:
        handle = stream.fileno()
        os.fsync(handle)
        _drop_cache(handle, 0, 0)
        while size := stream.readinto(piece):
            digest.update(piece[:size])
            _drop_cache(handle, start, size)
            start += size
            moved()
    return digest.hexdigest()


def _drop_cache(handle: int, start: int, size: int) -> None:
    # A size of 0 stands for the whole file.
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, start, size, os.POSIX_FADV_DONTNEED)
