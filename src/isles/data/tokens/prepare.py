"""Tokens prepared once, into a folder named by all that they depend on: whole or absent."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from isles.data.sources.find import Source
from isles.data.sources.rows import Tally, judge_bad_rows
from isles.data.tokens.encode import Encoder, encode_rows
from isles.data.tokens.folders import publish, remove_stale, temporary_beside
from isles.data.tokens.progress import Reporter, Watch, count_message, progress_path, wait_until
from isles.data.tokens.store import FORMAT, MANIFEST, find_fault
from isles.data.tokens.writer import TokenWriter, disk_faults
from isles.errors import DataError
from isles.run.records import read_record

log = logging.getLogger(__name__)

NO_PROGRESS_S = 120.0
"""A process that prepares gives a sign of life every few seconds; this long without one is dead."""


def prepare(
    source: Source,
    encoder: Encoder,
    cache_dir: Path,
    *,
    progress: Callable[[str], None],
    max_bad_fraction: float = 0.0,
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder with the tokens of a source; written unless it stands there whole.

    One process does this and the others call `wait_for_prepared`. Several may call it at once:
    one writes, the others wait for it.

    Args:
        source: the rows.
        encoder: makes documents of them.
        cache_dir: made where it is missing.
        progress: called with a line for people, at most every two seconds.
        max_bad_fraction: share of the rows that may be left out because they are bad.
        no_progress_s: how long to wait for a sign of life of another process that prepares the
            same.

    Raises:
        DataError: the source cannot be read, too many rows are bad, or the disk is full; nothing
            is left behind.
        CommunicationError: another process prepares the same and gives no sign of life.
    """
    identity = source.identity()
    folder = cache_dir / _key(identity, encoder)
    with disk_faults(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        lock = (cache_dir / f".{folder.name}.lock").open("a")
    with lock:
        if find_fault(folder) is not None:
            locked = _lock(lock, Watch(progress_path(cache_dir, folder.name), no_progress_s))
            remove_stale(folder, locked=locked)
            fault = find_fault(folder)
            if fault is not None:
                if folder.exists():
                    log.warning("prepared tokens=%s damaged: %s; preparing anew", folder, fault)
                tally = Tally(source.describe(), max_bad_fraction)
                _prepare_anew(source, identity, encoder, folder, progress, tally)
                return folder
    manifest = _judge(folder, source, max_bad_fraction)
    documents, tokens = manifest.get("num_documents", 0), manifest.get("num_tokens", 0)
    progress(f"{count_message(source.describe(), documents, tokens)} (prepared before)")
    return folder


def wait_for_prepared(
    source: Source,
    encoder: Encoder,
    cache_dir: Path,
    *,
    max_bad_fraction: float = 0.0,
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder that another process' `prepare` makes of the same source.

    Raises:
        DataError: what the other process failed of.
        CommunicationError: it died, or has given no sign of life for `no_progress_s`.
    """
    folder = cache_dir / _key(source.identity(), encoder)
    watch = Watch(progress_path(cache_dir, folder.name), no_progress_s)
    wait_until(lambda: find_fault(folder) is None, watch, failure_counts=True)
    _judge(folder, source, max_bad_fraction)
    return folder


def _judge(folder: Path, source: Source, max_bad_fraction: float) -> dict[str, Any]:
    """The manifest of a folder; it may have been made when more rows were allowed to be bad."""
    facts = read_record(folder / MANIFEST) or {}
    judge_bad_rows(
        source.describe(),
        facts.get("bad", 0),
        facts.get("rows", 0),
        facts.get("first_bad", []),
        max_bad_fraction,
    )
    return facts


def _key(identity: dict[str, Any], encoder: Encoder) -> str:
    depends = {"source": identity, "encoder": encoder.identity(), "format": FORMAT}
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


def _prepare_anew(
    source: Source,
    identity: dict[str, Any],
    encoder: Encoder,
    folder: Path,
    progress: Callable[[str], None],
    tally: Tally,
) -> None:
    name = source.describe()
    reporter = Reporter(progress_path(folder.parent, folder.name), name, progress)
    temporary = temporary_beside(folder)
    try:
        writer = TokenWriter(temporary, encoder)
        with writer:
            for documents in encode_rows(source.rows(encoder.columns), encoder, tally):
                writer.append(documents)
                reporter.tick(writer.num_documents, writer.num_tokens)
            if source.identity() != identity:
                raise DataError(
                    "changed while it was read",
                    where=name,
                    fix="start again when nothing writes to it any more",
                    id="data.changed",
                )
            tally.judge()
            if not writer.num_documents:
                raise no_documents(name, encoder.kind)
            writer.finish(name, identity, tally.record())
        with disk_faults(folder.parent):
            publish(temporary, folder)
    except BaseException as error:  # of any kind: nothing stays, and those who wait learn why
        shutil.rmtree(temporary, ignore_errors=True)
        reporter.failed(error)
        raise
    reporter.done(writer.num_documents, writer.num_tokens)


def no_documents(name: str, kind: str) -> DataError:
    """The error for a source that holds nothing."""
    what = "document that holds more than white space" if kind == "text" else "row"
    return DataError(
        f"the source is empty: no {what}",
        where=name,
        fix="give it some, or take it out of data.sources",
        id="data.short",
    )
