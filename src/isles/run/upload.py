"""Upload of complete checkpoints to object storage, in threads next to the training.

The newest checkpoint goes first, so that a slow bucket stays as up to date as possible. Older
checkpoints on the disk follow if there is time. `RUN/remote.json` lists the uploaded files of a
checkpoint, so that a restart does not send them again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from isles.errors import UserError
from isles.facts.units import format_bytes, format_duration
from isles.run.bucket import (
    ANSWER_S,
    AT_ONCE,
    BEAT_S,
    Owner,
    RunStore,
    TakenOver,
    take,
    trouble_text,
)
from isles.run.checkpoints import (
    CheckpointInfo,
    checkpoint_name,
    list_checkpoints,
    read_checkpoint,
)
from isles.run.manifest import MANIFEST, FileFacts
from isles.run.objects import StoreError, call_with_timeout
from isles.run.paths import RunDir
from isles.run.records import MAX_LIST_BYTES, read_record, write_record

log = logging.getLogger(__name__)

_QUIET_S = 30.0
"""Time without a response of the bucket before isles logs a line."""

_GIVE_UP_S, _REFUSED_S = 60.0, 5.0
"""At the end of a run, longest wait without progress. The second is for a refused upload."""

_FIRST_RETRY_S, _LAST_RETRY_S, _CLOSING_RETRY_S = 1.0, 60.0, 5.0

Note = Callable[[str], object]


class Uploader:
    """Sends the checkpoints of a run, on rank 0 or in `isles checkpoint push`.

    Args:
        keep: number of newest checkpoints to keep in the bucket.
        note: takes lines for the user, from any thread.
        typed: the name of the run for a command.
    """

    def __init__(
        self, copy: RunStore, run_dir: RunDir, *, keep: int, note: Note, typed: str = ""
    ) -> None:
        self.copy, self._run_dir, self._keep = copy, run_dir, keep
        self._note, self._typed = note, typed or run_dir.name
        self.sending: int | None = None
        """The step of the checkpoint that is being read."""
        self.newest: int | None = None
        """The newest step in the bucket."""
        self.moved_at = time.monotonic()
        self._detail = ""
        self._owner: Owner | None = None
        self._record: dict[str, Any] = {}
        self._there: dict[int, dict[str, FileFacts]] | None = None
        self._broken: set[int] = set()
        self._failing_since: float | None = None
        self._trouble, self._is_noted = "", False
        self._is_lost = self._is_refused = self._has_begun = False
        self._final: tuple[str, ...] | None = None
        self._wake, self._over = threading.Event(), threading.Event()
        self._changing = threading.Lock()

    def take(self, report: Note, pause: Callable[[float], object] = time.sleep) -> None:
        """Become the owner of the copy.

        Raises:
            UserError: another live machine writes to it.
            StoreError, TimeoutError: the bucket does not respond. `start` tries again.
        """
        known = read_record(self._run_dir.remote) or {}
        if known.get("url") != self.copy.url:
            known = {"url": self.copy.url}
        before = known.get("owner")
        self._owner = take(self.copy, before, report, pause)
        if before != self._owner.number - 1:
            known.pop("sent", None)  # another machine may have replaced them
        self._record = {**known, "owner": self._owner.number}
        self._keep_record()

    def start(self) -> None:
        """Start to send, in threads that end with the process."""
        if self._has_begun:
            return
        self._has_begun = True
        for name, work in (("upload", self._send_all), ("upload-owner", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def look(self) -> None:
        """Announce a new checkpoint. Any thread may call this."""
        self._wake.set()

    def forget_after(self, step: int) -> None:
        """Delete checkpoints in the bucket after this step, which the run repeats."""
        with self._changing:
            self._record["forget_after"] = step
            self._keep_record()
        self._wake.set()

    def waiting(self) -> list[int]:
        """Steps of complete checkpoints on the disk that are not in the bucket, oldest first."""
        return [info.step for info in self._missing()]

    def finish(self, report: Note, *, extra: tuple[str, ...] = ()) -> list[str]:
        """Send the rest, and end. Returns a text about missing files.

        Waits while bytes move, or while the bucket may recover.

        Args:
            report: takes lines about the progress.
            extra: files and folders of the run directory to send last.
        """
        self._final = extra
        self.moved_at = time.monotonic()
        self._wake.set()
        self.start()
        began_at = time.time()
        while not self._over.wait(2.0):
            report(f"{self.copy.url}: {self._detail or self._trouble or 'the last checkpoint'}")
            limit_s = _REFUSED_S if self._is_refused else _GIVE_UP_S
            failing_since = self._failing_since  # each try also moves bytes
            fails = failing_since and time.time() - max(failing_since, began_at) > limit_s
            if fails or time.monotonic() - self.moved_at > _GIVE_UP_S:
                self._trouble = self._trouble or "it accepts no more data"
                break
        left = [f"step {step}" for step in self.waiting()]
        left += [name for name in self._final if (self._run_dir.path / name).exists()]
        if not left:
            return []
        return [
            f"not at {self.copy.url}: {', '.join(left)} ({self._trouble or 'taken over'}). Send "
            f"the rest with `isles checkpoint push {self._typed}`"
        ]

    def close(self) -> None:
        """End, and leave the rest to the next attempt of this run directory."""
        self._is_lost = True
        self._wake.set()

    # Methods of the threads.

    def _send_all(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._is_lost:
            try:
                has_more = self._send_next()
                self._worked()
                retry_s = _FIRST_RETRY_S
                if not has_more:
                    if self._final is not None:
                        self._end()
                        break
                    self._wake.wait()
                    self._wake.clear()
            except (TakenOver, UserError) as error:
                self._lose(error)
            except Exception as error:  # any driver error: training must continue
                self._failed(error)
                # A new checkpoint does not wake it, as a run may save every second.
                began = time.monotonic()
                while not self._is_lost:
                    limit_s = retry_s if self._final is None else min(retry_s, _CLOSING_RETRY_S)
                    if time.monotonic() - began >= limit_s:
                        break
                    time.sleep(0.2)
                retry_s = min(2 * retry_s, _LAST_RETRY_S)
        self.sending = None
        self._over.set()

    def _beat(self) -> None:
        # Also detects an upload that hangs.
        while not self._over.wait(BEAT_S) and not self._is_lost:
            try:
                if self._owner is not None:
                    call_with_timeout(
                        ANSWER_S, self._owner.beat, f"{self.copy.url} to accept a few bytes"
                    )
            except TakenOver as error:
                self._lose(error)
            except Exception as error:
                self._failed(error)
            if self.sending is not None and time.monotonic() - self.moved_at > _GIVE_UP_S:
                self._failed(TimeoutError("no progress for a minute"))

    def _send_next(self) -> bool:
        # Send one checkpoint, or delete old ones. Returns False if nothing is left to do.
        if self._owner is None:
            self.take(log.info)
        if self._there is None:
            found = {step: self.copy.manifest(step) for step in self.copy.steps()}
            self._there = {s: manifest.files for s, manifest in found.items() if manifest}
            self.copy.store.delete(["summary.json"])  # it marks the run as finished
            self.copy.delete_parts(str(self._record.get("sent", {}).get("name", "")))
        self._forget()
        missing = self._missing()
        self.newest = max(self._there, default=None)
        if not missing:
            self._prune()
            return False
        self._send(missing[-1])
        return True

    def _missing(self) -> list[CheckpointInfo]:
        there = self._there or {}
        return [
            info
            for info in list_checkpoints(self._run_dir)[-self._keep :]
            if info.step not in self._broken and there.get(info.step) != info.manifest.files
        ]

    def _forget(self) -> None:
        assert self._there is not None
        with self._changing:
            step = self._record.get("forget_after")
        if step is None:
            return
        for later in [s for s in self._there if s > step]:
            here = self._run_dir.checkpoints / checkpoint_name(later)
            with suppress(Exception):
                if read_checkpoint(here).manifest.files == self._there[later]:
                    continue  # repeated since, with the same result
            self.copy.delete_checkpoint(later)
            del self._there[later]
        with self._changing:
            if self._record.get("forget_after") == step:
                del self._record["forget_after"]
                self._keep_record()

    def _prune(self) -> None:
        assert self._there is not None
        for step in sorted(self._there)[: -self._keep]:
            self.copy.delete_checkpoint(step)
            del self._there[step]

    def _send(self, info: CheckpointInfo) -> None:
        # Send the files, then the other records for resuming, and the manifest after all of them.
        assert self._there is not None and self._owner is not None
        name, files = info.path.name, info.manifest.files
        if self._there.pop(info.step, None) is not None:
            self.copy.delete_checkpoint(info.step)  # of the same step, before its repetition
        self.sending, self.moved_at = info.step, time.monotonic()
        began = self.moved_at
        try:
            self._send_files(info)
            self.copy.send_records(self._run_dir)
            text = (info.path / MANIFEST).read_bytes()
            if read_record(info.path / MANIFEST, MAX_LIST_BYTES) != info.manifest.record:
                return  # saved again in the meantime
            self._owner.beat()
            self.copy.store.write(f"checkpoints/{name}/{MANIFEST}", text)
        except FileNotFoundError:
            log.info("remote step=%d is no longer on this disk", info.step)
            self.copy.delete_checkpoint(info.step)
            return
        except _Changed as error:
            if read_record(info.path / MANIFEST, MAX_LIST_BYTES) == info.manifest.record:
                self._broken.add(info.step)
                self._note(f"{error}. isles does not send it to {self.copy.url}")
            return
        finally:
            self.sending, self._detail = None, ""
        self._there[info.step] = files
        self.newest = max(self._there)
        with self._changing:
            self._record.pop("sent", None)
            self._keep_record()
        log.info("remote step=%d seconds=%.1f", info.step, time.monotonic() - began)
        self._prune()

    def _send_files(self, info: CheckpointInfo) -> None:
        folder, name = f"checkpoints/{info.path.name}", info.path.name
        files, there = info.manifest.files, self.copy.store.sizes(folder)
        sent = self._record.get("sent", {})
        if sent.get("name") != name:
            sent = {"name": name, "files": {}}
        total, done = info.size_bytes, 0

        def moved(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self.moved_at = time.monotonic()
            self._detail = f"step {info.step}, {format_bytes(done)} of {format_bytes(total)}"

        def send(file: str) -> None:
            expected = files[file]
            if (sent["files"].get(file), there.get(file)) == (expected.sha256, expected.size):
                log.info("remote file=%s/%s is already in the bucket", name, file)
                moved(expected.size)
                return
            if self._is_lost:
                raise TakenOver(self._trouble)
            if self.copy.store.send(info.path / file, f"{folder}/{file}", moved) != expected.sha256:
                raise _Changed(f"{name}: {file} has changed since the save")
            with self._changing:
                sent["files"][file] = expected.sha256
                self._record["sent"] = sent
                self._keep_record()

        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="upload") as threads:
            list(threads.map(send, files))

    def _end(self) -> None:
        # The rest of a finished run: the export, its summary, the ownership.
        assert self._final is not None and self._owner is not None
        for name in self._final:
            self._send_tree(name)
        self._final = ()
        self.copy.send_records(self._run_dir)
        self._owner.release()

    def _send_tree(self, name: str) -> None:
        path = self._run_dir.path / name
        found = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        names = {str(file.relative_to(self._run_dir.path)): file for file in found}

        def moved(num_bytes: int) -> None:
            self.moved_at, self._detail = time.monotonic(), name

        for place, file in names.items():
            self.copy.store.send(file, place, moved)
        stale = (f"{name}/{other}" for other in self.copy.store.sizes(name) if path.is_dir())
        self.copy.store.delete(place for place in stale if place not in names)

    def _keep_record(self) -> None:
        with suppress(OSError):  # on a full disk, isles sends files twice
            write_record(self._run_dir.remote, self._record, durable=False)

    # Errors.

    def _lose(self, error: TakenOver | UserError) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._trouble = error.what if isinstance(error, UserError) else f"{error} writes to it"
            self._note(
                f"another machine has taken over {self.copy.url} ({self._trouble}) while this "
                "machine did not reach it. isles sends nothing more from this machine, and "
                "training continues with checkpoints on the disk"
            )

    def _failed(self, error: Exception) -> None:
        now = time.time()
        self._failing_since = self._failing_since or now
        self._trouble = trouble_text(error)
        self._is_refused = isinstance(error, StoreError) and error.kind != "away"
        log.info("remote failed: %s", error, exc_info=not isinstance(error, StoreError))
        if self._is_noted or not (self._is_refused or now - self._failing_since > _QUIET_S):
            return
        self._is_noted = True
        since = time.strftime("%H:%M:%S", time.localtime(self._failing_since))
        waiting = self.waiting()
        steps = f" ({', '.join(map(str, waiting))})" if waiting else ""
        self._note(
            f"since {since} {self.copy.url} {self._trouble}. Training continues, with "
            f"{len(waiting)} checkpoint{'s' * (len(waiting) != 1)} on the disk to upload{steps}"
        )

    def _worked(self) -> None:
        if self._is_noted and self._failing_since is not None:
            passed = format_duration(time.time() - self._failing_since)
            self._note(f"{self.copy.url} accepts checkpoints again, after {passed}")
        self._failing_since, self._is_noted, self._trouble = None, False, ""
        self._is_refused = False


class _Changed(Exception):
    """A file differs from the manifest."""
