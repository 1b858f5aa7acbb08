"""The copy of a run in object storage, `checkpoint.remote`: its content and its owner.

`URL/NAME-N` has the files of the run directory that a fresh machine needs, under the same names.
isles writes a checkpoint's manifest after its files and deletes it before them. So a checkpoint
in the bucket is either complete or absent.

`owner/K` names the machine that writes. A new owner creates the object K + 1, which only one
machine can do. The previous owner finds this object and stops writing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from isles.config.foreign import folder_below, open_regular
from isles.errors import TrainingError, UserError
from isles.facts.secrets import without_secrets
from isles.facts.units import format_bytes, format_duration
from isles.run.checkpoints import (
    PARTIAL_PREFIX,
    checkpoint_name,
    sync_folder,
    verify_checkpoint,
)
from isles.run.find import NUMBERED
from isles.run.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestError,
    number_of,
    step_of,
)
from isles.run.objects import StoreError, call_with_timeout, open_store
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors, parse_record, read_record, write_bytes_atomic

log = logging.getLogger(__name__)

KEY = "checkpoint.remote"
BEAT_S, LOST_AFTER_S = 15.0, 60.0
"""Interval between two records of the owner, and silence after which an owner counts as lost."""

ANSWER_S = 40.0
AT_ONCE = 4
"""Number of files to transfer at the same time."""

_LONGEST_RECORD_BYTES, _MOST_OWNERS = 1 << 30, 10**9

_RECORDS = (
    "run.yaml",
    "metrics.jsonl",
    "balance.json",
    "reference-*.npz",
    "track/*.json",
    "tokenizer/*",
    "resolved.yaml",
)
"""Files for resuming a run, in addition to a checkpoint, without logs and secrets. The last one
marks a run that a fresh machine may resume."""


class RunStore:
    """The copy of one run.

    Args:
        url: URL of `checkpoint.remote`.
        name: name of the run directory.

    Raises:
        MissingDependencyError: the package for this bucket is not installed.
        UserError: isles does not support this kind of bucket.
    """

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name = f"{url.rstrip('/')}/{name}", name
        with explain_bucket_errors(self.url):
            self.store = open_store(url, f"{KEY} {url}", name)

    def record(self, name: str) -> dict[str, Any] | None:
        """A JSON record, or None if it does not exist."""
        with suppress(ValueError, RecursionError):
            data = self.store.read(name, MAX_MANIFEST_BYTES)
            found = parse_record(data or b"null", MAX_MANIFEST_BYTES)
            return found if isinstance(found, dict) else None
        return None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first. isles does not check their files."""
        found = (name.partition("/") for name in self.store.sizes("checkpoints"))
        steps = []
        for folder, _, name in found:
            if name == MANIFEST:
                step = step_of(folder)
                if step is not None and folder == checkpoint_name(step):
                    steps.append(step)
                else:
                    log.warning("%s has a folder %r that isles did not make", self.url, folder)
        return sorted(steps)

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of a checkpoint, or None if it is missing or invalid."""
        with suppress(ManifestError):
            return self._sound_manifest(step)
        return None

    def newest_manifest(self, steps: Sequence[int]) -> Manifest | None:
        """The newest valid manifest of these steps. A warning lists broken newer steps.

        Args:
            steps: oldest first.
        """
        for step in reversed(steps):
            try:
                return self._sound_manifest(step)
            except ManifestError as error:
                log.warning("isles skips step %d at %s, which is broken: %s", step, self.url, error)
        return None

    def _sound_manifest(self, step: int) -> Manifest:
        manifest = Manifest.from_record(self.record(_place(step, MANIFEST)))
        if manifest.step != step:
            raise ManifestError(f"its manifest is of step {manifest.step}")
        return manifest

    def delete_checkpoint(self, step: int) -> None:
        """Delete the manifest first, so that no partial checkpoint looks complete."""
        folder = f"checkpoints/{checkpoint_name(step)}"
        names = sorted(self.store.sizes(folder), key=lambda name: name != MANIFEST)
        self.store.delete(f"{folder}/{name}" for name in names)

    def delete_parts(self, keep: str) -> None:
        """Delete incomplete checkpoints of a machine that vanished.

        Args:
            keep: name of a checkpoint that isles continues to send.
        """
        names = [name for name in self.store.sizes("checkpoints") if "/" in name]
        whole = {name.partition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
        parts = (n for n in names if n.partition("/")[0] not in {*whole, keep})
        self.store.delete(f"checkpoints/{name}" for name in parts)

    def send_records(self, run_dir: RunDir) -> None:
        for pattern in _RECORDS:
            for path in sorted(run_dir.path.glob(pattern)):
                data = _read_below(run_dir.path, path)
                if data is None:
                    continue
                if path.suffix == ".yaml":
                    # An older isles, which did not refuse secrets, may have started the run.
                    data = without_secrets(data.decode("utf-8", "replace")).encode()
                self.store.write(str(path.relative_to(run_dir.path)), data)

    def bring(self, step: int, run_dir: RunDir, report: Callable[[str], object]) -> list[str]:
        """Fetch a checkpoint to this disk. Returns its faults, one line each, or an empty list.

        Raises:
            StoreError: the bucket does not provide it.
            OSError: isles cannot write it to this disk.
        """
        try:
            manifest = self._sound_manifest(step)
        except ManifestError as error:
            return [str(error)]
        final = run_dir.checkpoints / checkpoint_name(step)
        # A file longer than in the manifest could fill this disk, so isles does not fetch it.
        there = self.store.sizes(_place(step, ""))
        faults = [
            f"{name}: {there[name]} bytes instead of {facts.size} in the manifest"
            for name, facts in manifest.files.items()
            if there.get(name, facts.size) != facts.size
        ]
        if faults:
            return faults
        partial = final.with_name(f"{PARTIAL_PREFIX}{final.name}")
        rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        total, done = manifest.size_bytes, 0

        def moved(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            report(f"step {step} from {self.url}: {format_bytes(done)} of {format_bytes(total)}")

        def fetch(name: str) -> None:
            with suppress(FileNotFoundError):  # `verify_checkpoint` reports it
                self.store.fetch(_place(step, name), partial / name, moved)

        moved(0)
        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(fetch, manifest.files))
            write_bytes_atomic(partial / MANIFEST, json.dumps(manifest.record, indent=1).encode())
            if faults := verify_checkpoint(partial):
                return faults
            rmtree(final, ignore_errors=True)  # a broken checkpoint
            partial.replace(final)
            sync_folder(final.parent)
        finally:
            rmtree(partial, ignore_errors=True)
        return []


def _place(step: int, name: str) -> str:
    return f"checkpoints/{checkpoint_name(step)}/{name}".rstrip("/")


def _read_below(folder: Path, path: Path) -> bytes | None:
    # None if it is missing, or not a file: another user with write access to the run directory may
    # have put a link in its place, which could lead to any file of this machine.
    try:
        parts = path.relative_to(folder).parts[:-1]
        with (
            folder_below(folder, parts) as below,
            open_regular(path.name, os.O_NOFOLLOW, below) as stream,
        ):
            data = stream.read(_LONGEST_RECORD_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:  # or UnsupportedOperation, a subclass
        log.warning("isles does not send %s to the bucket: %s", path, error.strerror or error)
        return None
    if len(data) > _LONGEST_RECORD_BYTES:
        most = format_bytes(_LONGEST_RECORD_BYTES)
        log.warning("isles does not send %s to the bucket: it has more than %s", path, most)
        return None
    return data


@contextmanager
def explain_bucket_errors(url: str) -> Iterator[None]:
    """Raise a UserError with a fix instead of an error of a bucket."""
    try:
        yield
    except (StoreError, TimeoutError) as error:
        raise UserError(
            f"{url} {trouble_text(error)}", where=KEY, fix=_fix(error), id="checkpoint.bucket"
        ) from error


def trouble_text(error: BaseException) -> str:
    """The failure of a bucket, as the end of a sentence that begins with its URL."""
    match error:
        case StoreError(kind="forbidden"):
            return f"refuses this machine: {error.what}"
        case StoreError(kind="full"):
            return f"has no space left: {error.what}"
        case StoreError(kind="missing"):
            return f"does not exist: {error.what}"
        case StoreError(kind="odd"):
            return f"has an object that isles does not accept: {error.what}"
        case StoreError():
            return f"gives an unexpected answer: {error.what}"
        case _:
            return f"does not respond: {error}"


def _fix(error: BaseException) -> str:
    kind = error.kind if isinstance(error, StoreError) else "away"
    if kind == "forbidden":
        return (
            "set credentials as for the bucket's own tools (for s3: AWS_PROFILE, "
            "~/.aws/credentials, AWS_ACCESS_KEY_ID, the machine's role), on the machine of rank "
            "0, with the rights to list, read, write and delete in the bucket"
        )
    if kind == "missing":
        return f"create the bucket, or set {KEY} to another bucket"
    if kind == "full":
        return "free some space in the bucket, or raise its quota"
    if kind == "odd":
        return f"find its writer and delete it, or set {KEY} to another bucket"
    return f"try again when it responds, or set {KEY}: null to train without it"


class Owner:
    """The right of this machine to write to the copy of a run, until `release`."""

    def __init__(self, copy: RunStore, number: int) -> None:
        self.number = number
        self._copy = copy
        self._record = {**ProcessId.of(os.getpid()).record(), "boot": _boot(), "number": number}

    def beat(self) -> None:
        """Write a heartbeat of this machine.

        Raises:
            TakenOver: another machine is the owner now.
        """
        number, record = _newest(self._copy)
        if number > self.number:
            raise TakenOver(str(record.get("host")))
        self._write()

    def release(self) -> None:
        """Let the next owner begin immediately."""
        self._write(released=True)

    def _write(self, **more: bool) -> None:
        record = {**self._record, "at": time.time(), **more}
        self._copy.store.write(f"owner/{self.number:08d}", json.dumps(record).encode())


class TakenOver(Exception):
    """Another machine writes to the copy of the run. The text is its host."""


def take(
    copy: RunStore,
    before: int | None,
    report: Callable[[str], object],
    pause: Callable[[float], object] = time.sleep,
) -> Owner:
    """Become the owner of the copy of a run.

    Args:
        before: the last owner number of this run directory, or None.
        report: takes lines about a wait.

    Raises:
        UserError: another live machine writes to it.
        StoreError: the bucket does not respond.
    """
    while True:
        number, record = _newest(copy)
        is_gone = not number or number == before or bool(record.get("released"))
        process = ProcessId.from_record(record)
        if not is_gone and process is not None and process.is_here():
            # The boot id, as machines with the same name may share a bucket.
            is_gone = record.get("boot") == _boot() and not process.is_alive()
            if record.get("boot") == _boot() and not is_gone:
                raise _owned(copy, record)
        if not is_gone:
            report(
                f"{record.get('host')} has written to {copy.url}. Waiting "
                f"{format_duration(LOST_AFTER_S)} for its next heartbeat"
            )
            waited_s = 0.0
            while waited_s < LOST_AFTER_S:
                pause(5.0)
                waited_s += 5.0
                if (now := _newest(copy)) != (number, record):
                    if now[1].get("released"):
                        break
                    raise _owned(copy, now[1])
            number = _newest(copy)[0]
        owner = Owner(copy, number + 1)
        first = {**owner._record, "at": time.time()}
        if copy.store.create(f"owner/{owner.number:08d}", json.dumps(first).encode()):
            copy.store.delete(f"owner/{old:08d}" for old in range(max(1, number - 1), number + 1))
            return owner


def _owned(copy: RunStore, record: dict[str, Any]) -> UserError:
    return UserError(
        f"{record.get('host')} trains {copy.name} now (pid {record.get('pid')}), and writes to "
        f"{copy.url}",
        where=f"{KEY}, host {socket.gethostname()}",
        fix="run `isles stop` on that machine, or train under another `name`. If that machine "
        f"has vanished, wait: another machine can resume the run {format_duration(LOST_AFTER_S)} "
        "after its last heartbeat",
        id="run.running",
    )


def _newest(copy: RunStore) -> tuple[int, dict[str, Any]]:
    found = ((name, number_of(name)) for name in copy.store.sizes("owner"))
    newest = max((n for name, n in found if n is not None and name == f"{n:08d}"), default=0)
    if newest >= _MOST_OWNERS:
        raise StoreError("odd", f"owner/{newest} has an invalid number")
    return (newest, copy.record(f"owner/{newest:08d}") or {}) if newest else (0, {})


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


class BucketRun:
    """A run in a bucket, with the values that decide whether a start resumes it.

    Args:
        steps: steps of all its checkpoints.
        manifest: newest valid manifest of its checkpoints, or None.
    """

    def __init__(self, copy: RunStore, number: int) -> None:
        self.copy, self.number, self.name = copy, number, copy.name
        self.steps = copy.steps()
        self.is_finished = copy.record("summary.json") is not None
        self.manifest = copy.newest_manifest(self.steps)
        self.step = self.manifest.step if self.manifest is not None else None
        self.resolved = (copy.store.read("resolved.yaml") or b"").decode(errors="replace")


def find_newest(url: str, name: str) -> BucketRun | None:
    """The newest run of a name with a valid checkpoint in the bucket, or None.

    Raises:
        UserError: the bucket does not respond, or gives an unexpected answer.
    """

    def look() -> BucketRun | None:
        names = [NUMBERED.fullmatch(entry) for entry in open_store(url, f"{KEY} {url}").folders()]
        numbers = sorted(int(m["number"]) for m in names if m is not None and m["name"] == name)
        for number in reversed(numbers):
            found = BucketRun(RunStore(url, f"{name}-{number}"), number)
            if found.step is not None and found.resolved:
                return found
        return None

    with explain_bucket_errors(url):
        return call_with_timeout(ANSWER_S, look, "its answer")


def find_named(url: str, name: str) -> BucketRun | None:
    """The run NAME-N in a bucket, or None if it does not exist.

    Raises:
        UserError: the bucket does not respond, or gives an unexpected answer.
    """
    if (match := NUMBERED.fullmatch(name)) is None:
        return None
    with explain_bucket_errors(url):
        return call_with_timeout(
            ANSWER_S, lambda: BucketRun(RunStore(url, name), int(match["number"])), "its answer"
        )


def bring_newer(
    copy: RunStore,
    run_dir: RunDir,
    report: Callable[[str], object],
    note: Callable[[str], object],
    *,
    than: int,
) -> None:
    """Fetch the newest complete checkpoint after step `than`. A note lists skipped broken
    checkpoints.

    Raises:
        UserError: the bucket does not provide it, or isles cannot write it to this disk.
    """
    limit = (read_record(run_dir.remote) or {}).get("forget_after")
    with explain_bucket_errors(copy.url), explain_write_errors(run_dir.checkpoints):
        steps = [s for s in copy.steps() if s > than and (limit is None or s <= limit)]
        for step in reversed(steps):
            faults = copy.bring(step, run_dir, report)
            if not faults:
                return
            note(f"isles skips step {step} at {copy.url}, which is broken: {'; '.join(faults)}")


def bring_asked(
    copy: RunStore, run_dir: RunDir, folder: Path, report: Callable[[str], object]
) -> None:
    """Fetch a checkpoint that the user gave, if it is not on this disk.

    Raises:
        UserError: see `bring_newer`.
        TrainingError: it is broken in the bucket.
    """
    step = step_of(folder.name)
    if folder.is_dir() or step is None:
        return
    with explain_bucket_errors(copy.url), explain_write_errors(run_dir.checkpoints):
        if faults := copy.bring(step, run_dir, report):
            raise TrainingError(
                f"the checkpoint of step {step} is broken: {'; '.join(faults)}",
                where=f"{copy.url}/checkpoints/{folder.name}",
                fix="use another checkpoint from `isles checkpoint list`",
                id="checkpoint.broken",
            )
