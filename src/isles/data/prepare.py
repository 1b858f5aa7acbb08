"""Tokens prepared once, into a folder named by all that they depend on: whole or absent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from isles.data.progress import Reporter, Watch, count_message, progress_path, wait_until
from isles.data.sources import Source, read_source
from isles.data.store import FORMAT, MANIFEST, find_fault
from isles.data.tokenizer import encode, end_of_text_id, tokenizer_digest, vocabulary_size
from isles.data.writer import TokenWriter, disk_faults, sync_folder
from isles.errors import DataError
from isles.rundir.process import ProcessId
from isles.rundir.records import read_record

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

NO_PROGRESS_S = 120.0
"""A process that prepares gives a sign of life every few seconds; this long without one is dead."""

_BATCH_CHARS = 2**20
_BATCH_DOCUMENTS = 1024


def prepare(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    progress: Callable[[str], None],
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder with the tokens of a source; written unless it stands there whole.

    One process does this and the others call `wait_for_prepared`. Several may call it at once:
    one writes, the others wait for it.

    Args:
        source: the documents.
        tokenizer: must have an end-of-text token.
        cache_dir: made where it is missing.
        progress: called with a line for people, at most every two seconds.
        no_progress_s: how long to wait for a sign of life of another process that prepares the
            same.

    Raises:
        DataError: a document cannot be read, or the disk is full; nothing is left behind.
        CommunicationError: another process prepares the same and gives no sign of life.
    """
    identity = source.identity()
    folder = cache_dir / _key(identity, tokenizer)
    with disk_faults(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / f".{folder.name}.lock").open("a")
    with lock:
        if find_fault(folder) is not None:
            locked = _lock(lock, Watch(progress_path(cache_dir, folder.name), no_progress_s))
            _remove_stale(folder, locked=locked)
            fault = find_fault(folder)
            if fault is not None:
                if folder.exists():
                    log.warning("prepared tokens=%s damaged: %s; preparing anew", folder, fault)
                _prepare_anew(source, identity, tokenizer, folder, progress)
                return folder
    manifest = read_record(folder / MANIFEST) or {}
    documents, tokens = manifest.get("num_documents", 0), manifest.get("num_tokens", 0)
    progress(f"{count_message(source.describe(), documents, tokens)} (prepared before)")
    return folder


def wait_for_prepared(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    *,
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder that another process' `prepare` makes of the same source.

    Raises:
        DataError: what the other process failed of.
        CommunicationError: it died, or has given no sign of life for `no_progress_s`.
    """
    folder = cache_dir / _key(source.identity(), tokenizer)
    watch = Watch(progress_path(cache_dir, folder.name), no_progress_s)
    wait_until(lambda: find_fault(folder) is None, watch, failure_counts=True)
    return folder


def _key(identity: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    depends = {"source": identity, "tokenizer": tokenizer_digest(tokenizer), "format": FORMAT}
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return f"tokens-{digest[:32]}"


def _lock(stream: IO[str], watch: Watch) -> bool:
    """Wait until no other process that shares the cache prepares this key.

    Returns:
        False where the file system has no locks: both prepare, and the first rename counts.
    """

    def is_taken() -> bool:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        wait_until(is_taken, watch, failure_counts=False)
    except OSError as error:
        log.warning("no file locks at %s: %s", stream.name, error)
        return False
    return True


def _temporary(folder: Path, kind: str = "new") -> Path:
    """A name that says whose it is, so that a dead process' leftovers can be told."""
    process = ProcessId.of(os.getpid())
    owner = f"{process.host}@{process.pid}@{process.started}"
    return folder.with_name(f".tmp-{kind}-{folder.name}@{owner}")


def _remove_stale(folder: Path, *, locked: bool) -> None:
    """Remove what dead processes of this machine left, and what anyone left of this key."""
    for entry in folder.parent.glob(".tmp-*"):
        parts = re.fullmatch(r"\.tmp-[a-z]+-(.+?)@(.+)@(\d+)@([\d.]+)", entry.name)
        if parts is None:
            continue
        owner = ProcessId(parts[2], int(parts[3]), float(parts[4]))
        stale = not owner.is_alive() if owner.is_here() else locked and parts[1] == folder.name
        if stale:
            log.info("removing leftovers=%s", entry)
            shutil.rmtree(entry, ignore_errors=True)


def _prepare_anew(
    source: Source,
    identity: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    progress: Callable[[str], None],
) -> None:
    name = source.describe()
    reporter = Reporter(progress_path(folder.parent, folder.name), name, progress)
    temporary = _temporary(folder)
    try:
        writer = TokenWriter(temporary, end_of_text_id(tokenizer), vocabulary_size(tokenizer))
        with writer:
            for batch in _batches(read_source(source)):
                writer.append(encode(tokenizer, batch))
                reporter.tick(writer.num_documents, writer.num_tokens)
            if source.identity() != identity:
                raise DataError(
                    "changed while it was read",
                    where=name,
                    fix="start again when nothing writes to it any more",
                )
            writer.finish(name, identity)
        with disk_faults(folder.parent):
            _publish(temporary, folder)
    except BaseException as error:  # of any kind: nothing stays, and those who wait learn why
        shutil.rmtree(temporary, ignore_errors=True)
        reporter.failed(error)
        raise
    reporter.done(writer.num_documents, writer.num_tokens)


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _publish(temporary: Path, folder: Path) -> None:
    """Give the whole folder its name, in the place of a damaged one."""
    if folder.exists():
        if find_fault(folder) is None:  # only without file locks: another one was first
            shutil.rmtree(temporary)
            return
        old = _temporary(folder, "old")
        folder.rename(old)
        shutil.rmtree(old)
    temporary.rename(folder)
    sync_folder(folder.parent)
