"""Tokens prepared once, into a folder named by a hash of their inputs: see `run/prepared.py`.

If only some nodes have a source, one of them sends the prepared folder to the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from isles.config.files import BUILT_IN, named_files
from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.sources.names import log_unread
from isles.data.sources.rows import Rows, Source, Tally, judge_bad_rows
from isles.data.tokens.encode import Encoder, encode_rows
from isles.data.tokens.store import (
    FORMAT,
    TokenStore,
    TokenWriter,
    disk_errors,
    find_damage,
    publish,
)
from isles.dist.files import broadcast_folder
from isles.dist.world import RankLocation, World, place_of, work_together
from isles.errors import CommunicationError, DataError
from isles.run.checkpoints import hash_file
from isles.run.entry import open_own_file
from isles.run.prepared import (
    MANIFEST,
    known_content,
    note_use,
    remove_stale,
    temporary_beside,
)
from isles.run.records import MAX_LIST_BYTES, read_record

log = logging.getLogger(__name__)

NO_PROGRESS_S = 120.0
"""Seconds without a heartbeat after which a preparing process counts as dead."""

REPORT_EVERY_S = 2.0
_LOOK_EVERY_S = 0.1

Report = Callable[[str], None]
"""Called with a line for the user."""


def prepare(
    source: Source,
    encoder: Encoder,
    cache_dir: Path,
    *,
    progress: Report,
    max_bad_fraction: float = 0.0,
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder with the tokens of a source; written unless it is complete.

    It is found by the content of the source. If files have other times or paths, they are read for
    that, but only if files of the same sizes were prepared before.

    Several processes may call it simultaneously: one writes, and the others wait. `progress` is
    called with a line for the user, at most every two seconds.

    Raises:
        DataError: the source cannot be read, too many rows are bad, or the disk is full. No partial
            folder stays.
        CommunicationError: the writing process has not written for `no_progress_s`.
    """
    order = _Order(source, encoder, cache_dir)
    # Nothing is written if the tokens are there: another user, or a mount, may have closed the
    # cache.
    if (folder := order.find(progress)) is None:
        # Each user has a lock of its own, as nobody can lock another user's file everywhere. Two
        # users may both prepare, and the first rename counts.
        stem = order.stem
        path = cache_dir / f".{stem.name}.{os.geteuid()}.lock"
        with disk_errors(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            lock = open_own_file(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with lock:
            is_locked = _lock(lock, path, stem, source.name, progress, no_progress_s)
            remove_stale(stem, locked=is_locked)
            if (folder := order.find(progress)) is None:
                tally = Tally(source.name, max_bad_fraction)
                folder = _prepare_anew(order, progress, tally)
                note_use(folder, order.key)
                log_unread(source.name, tally.record())
                return folder
    note_use(folder, order.key)
    # It may come from other paths, and from a run with a higher limit for bad rows.
    facts = read_record(folder / MANIFEST, MAX_LIST_BYTES) or {}
    judge_bad_rows(source.name, _of_here(facts, order.identity), max_bad_fraction)
    log_unread(source.name, facts)
    documents, tokens = facts.get("num_documents", 0), facts.get("num_tokens", 0)
    progress(f"{count_message(source.name, documents, tokens)} (prepared before)")
    return folder


class _Order:
    """A source to prepare, and the names of its prepared tokens.

    Args:
        stem: the beginning of the folder's name, up to the hash of the content.
        key: names the files of this user, so that they need not be read again.
    """

    def __init__(self, source: Source, encoder: Encoder, cache_dir: Path) -> None:
        self.source, self.encoder = source, encoder
        self.identity = source.identity()
        made_by = {"encoder": encoder.identity(), "format": FORMAT}
        self.stem = cache_dir / f"tokens-{_hash({'source': source.near(self.identity), **made_by})}"
        self.key = _hash({"source": self.identity, "stamp": source.stamp(), **made_by})
        self._content: Future[str] | None = None

    def folder(self, content: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}-{content[:32]}")

    def find(self, progress: Report) -> Path | None:
        """The folder with these tokens; None if it does not exist or is damaged."""
        if content := known_content(self.stem.parent, self.key):
            folder = self.folder(content)
            if (damage := find_damage(folder, self.encoder)) is None:
                return folder
            if folder.exists():
                log.warning(
                    "prepared tokens=%s are damaged (%s), so isles prepares them again",
                    folder,
                    damage,
                )
        # Only files of the same sizes as those of a prepared folder are read for a comparison.
        folders = self.stem.parent.glob(f"{self.stem.name}-*")
        whole = [folder for folder in folders if find_damage(folder, self.encoder) is None]
        if not whole:
            return None
        with self.hashing():
            folder = self.folder(self.content(progress))
        return folder if folder in whole else None

    @contextmanager
    def hashing(self) -> Iterator[None]:
        """Hash the source's content in a thread during the block, unless it is hashed."""
        if self._content is not None:
            yield
            return
        is_over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            self._content = pool.submit(self.source.digest, is_over)
            try:
                yield
            finally:
                is_over.set()

    def content(self, progress: Report) -> str:
        """The hash of the source's content, once it is known; within `hashing`."""
        assert self._content is not None
        with reporting(progress, f"hashing {self.source.name}"):
            return self._content.result()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def _of_here(facts: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    # The facts of a folder with bad rows named by this source's files: it may be made of copies.
    try:
        names = [each[0] for each in facts["source"]["files"]]
        here = dict(zip(names, (each[0] for each in identity["files"]), strict=True))
        bad = [tuple(each) for each in facts["first_bad"]]
    except (KeyError, TypeError, ValueError, IndexError):
        return facts  # not of files, or another user's
    moved = []
    for where, what, fix in bad:
        name = re.split(r":\d+$| row \d+$", where)[0]
        moved.append([f"{here.get(name, name)}{where[len(name) :]}", what, fix])
    return {**facts, "first_bad": moved}


def _lock(
    stream: BinaryIO,
    path: Path,
    folder: Path,
    name: str,
    progress: Report,
    no_progress_s: float,
) -> bool:
    # Wait until no other process of this user that shares the cache prepares this folder; a process
    # that dies lets it go. False if the file system has no locks: both prepare, the first rename
    # counts.
    began = since = time.monotonic()
    shown = (-1, 0)
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            folders = list(folder.parent.glob(f".tmp-*-{folder.name}@*"))
            size = size_of_folders(folders)
            if (size, _touched_ns(folders)) != shown:
                shown, since = (size, _touched_ns(folders)), time.monotonic()
                after = f"{size / 1e6:.1f} MB after {since - began:.0f} s"
                progress(f"{name}: another process prepares it, {after}")
            elif time.monotonic() - since > no_progress_s:
                raise CommunicationError(
                    f"another process prepares {name} but has not written for {no_progress_s:.0f} "
                    f"s",
                    where=str(folder.parent),
                    fix=f"find the process with `fuser {shlex.quote(str(path))}` on its machine",
                    id="data.waiting",
                ) from None
            time.sleep(_LOOK_EVERY_S)
        except OSError as error:
            log.warning("no file locks at %s: %s", path, error)
            return False


def size_of_folders(folders: Iterable[Path]) -> int:
    """Bytes in folders that other processes may write or remove during the call."""
    size = 0
    for folder in folders:
        with suppress(OSError):
            size += sum(file.stat().st_size for file in folder.iterdir())
    return size


def _touched_ns(folders: Iterable[Path]) -> int:
    # When the preparing process last touched one of these.
    times = [0]
    for folder in folders:
        with suppress(OSError):
            times.append(folder.stat().st_mtime_ns)
    return max(times)


@contextmanager
def reporting(progress: Report, doing: str, every_s: float = REPORT_EVERY_S) -> Iterator[None]:
    """Report regularly that an action continues, if it does not report its own progress.

    Use it only for actions that end by themselves, such as downloads, which have timeouts.
    """
    is_over, began = threading.Event(), time.monotonic()

    def report() -> None:
        while not is_over.wait(every_s):
            progress(f"{doing} for {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _prepare_anew(order: _Order, progress: Report, tally: Tally) -> Path:
    source, encoder = order.source, order.encoder
    name, reported_at, num_chunks = source.name, time.monotonic(), 0
    temporary = temporary_beside(order.stem)

    def tell() -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at >= REPORT_EVERY_S:
            count = count_message(name, writer.num_documents, writer.num_tokens)
            progress(f"{count}, {num_chunks} pieces read")
            with suppress(OSError):
                os.utime(temporary)  # for who waits for it on the same disk
            reported_at = time.monotonic()

    def rows() -> Rows:
        # A stream holds out few rows, so report rows that were read before a batch is written.
        nonlocal num_chunks
        for chunk in source.chunks(encoder.parser):
            num_chunks += 1
            tell()
            yield from chunk.rows

    try:
        # A thread hashes the source while its rows are encoded.
        with order.hashing(), TokenWriter(temporary, encoder) as writer:
            for documents in encode_rows(rows(), encoder, tally):
                writer.append(documents)
                tell()
            folder = order.folder(order.content(progress))
            if source.identity() != order.identity:
                raise DataError(
                    "changed while it was read",
                    where=name,
                    fix="start again after all writes to it have ended",
                    id="data.changed",
                )
            tally.judge()
            if not writer.num_documents:
                raise no_documents(name, encoder.kind)
            writer.finish(name, order.identity, tally.record())
        with disk_errors(folder.parent):
            publish(temporary, folder, encoder)
    except BaseException:  # of any kind: nothing stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    progress(count_message(name, writer.num_documents, writer.num_tokens))
    return folder


def count_message(name: str, num_documents: int, num_tokens: int) -> str:
    """Such as `python-stdlib: 312 documents, 4.1M tokens`."""
    tokens = f"{num_tokens / 1e6:.1f}M" if num_tokens >= 100_000 else str(num_tokens)
    return f"{name}: {num_documents} documents, {tokens} tokens"


def no_documents(name: str, kind: str) -> DataError:
    """The error for a source that holds nothing."""
    what = "document with text" if kind == "text" else "row"
    return DataError(
        f"the source is empty: it has no {what}",
        where=name,
        fix="add some, or remove it from data.sources",
        id="data.short",
    )


@dataclass(frozen=True, slots=True)
class _NodeFiles:
    place: RankLocation
    sizes: Mapping[str, int]  # bytes of each file of the source that lies here


def prepare_everywhere(
    source: SourceConfig,
    make: Callable[[Report], Path],
    world: World,
    cache_dir: Path,
    progress: Report,
) -> Path:
    """The prepared tokens of one source, on every node. All ranks must call this.

    If every node has the source, or it is not made of files, each node prepares it. Otherwise the
    nodes that have it prepare it, and one of them sends the result. Nodes with the result in their
    cache do not receive it.

    Args:
        make: prepares it into `cache_dir` and returns the folder; called in a thread on one rank of
            each node that has it.

    Raises:
        DataError: no node has it, or nodes have different data under its name.
        TrainingError: the disk is full, or the received data differs from the sent data.
        CommunicationError: a preparing node gives no heartbeat.
    """
    with disk_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    me = place_of(world)
    here = _NodeFiles(me, _sizes(source) if me.is_leader else {})
    # A folder of many files on a slow disk takes long.
    leaders = [node for node in world.gather(here, group=world.work) if node.place.is_leader]
    holders = [node for node in leaders if node.sizes] or leaders
    if len(holders) < len(leaders):
        names = ", ".join(str(node.place) for node in holders)
        progress(f"{source.path} is only on {names}")

    def work(report: Report) -> tuple[str, str]:
        folder = make(report)
        return folder.name, TokenStore.open(folder).digest

    works = me.rank in {node.place.rank for node in holders}
    try:
        made = work_together(
            work if works else None, world, progress=progress, no_progress_s=NO_PROGRESS_S
        )
    except DataError as error:
        if len(leaders) > 1 and not any(node.sizes for node in leaders):
            error.where += f" on any of {', '.join(str(node.place) for node in leaders)}"
        raise
    first = made[holders[0].place.rank]
    assert first is not None
    for other in holders[1:]:
        if (made[other.place.rank] or ("", ""))[1] != first[1]:
            one, fix = holders[0], f"{source.path}; or leave it on one of them alone: its tokens "
            sizes = dict(one.sizes), dict(other.sizes)
            raise different_data(one.place, other.place, *sizes, f"{fix}are sent to the others")
    if lacking := [node.place for node in leaders if node not in holders]:
        src = holders[0].place
        _send(cache_dir / first[0], str(source.path), src, lacking, world, progress)
    return cache_dir / (made[me.leader] or first)[0]


def _send(
    folder: Path,
    name: str,
    src: RankLocation,
    lacking: Sequence[RankLocation],
    world: World,
    progress: Report,
) -> None:
    # Send a folder from one node to the nodes that lack it. All ranks must call this.
    me = place_of(world)
    needs = me in lacking and find_damage(folder) is not None
    files = None
    if me == src:
        facts = (read_record(folder / MANIFEST, MAX_LIST_BYTES) or {})["files"]
        files = {file: str(fact["sha256"]) for file, fact in facts.items()}
        files[MANIFEST] = hash_file(folder / MANIFEST)
    began = time.monotonic()

    def report(done: int, total: int) -> None:
        progress(f"sending {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    with disk_errors(folder.parent):
        takers = broadcast_folder(
            folder, world, src=src.rank, needs=needs, files=files, progress=report
        )
    if me in lacking:  # it has no files whose key `note_use` could note
        with suppress(OSError):  # another user's
            os.utime(folder)
    if world.is_main and takers:
        hosts = ", ".join(str(place) for place in lacking if place.rank in takers)
        log.info("data=%s from=%s to=%s seconds=%.1f", name, src, hosts, time.monotonic() - began)


def rank_with_data(data: DataConfig, world: World) -> int:
    """The first rank whose node has all sources that any node has; 0 with a single node.

    All ranks must call this. DataError: no node has them all.
    """
    me = place_of(world)
    mine = {str(source.path) for source in data.sources if me.is_leader and _sizes(source)}
    asked = world.gather((me, mine), group=world.work)
    somewhere = set[str]().union(*(has for _, has in asked))
    leaders = [(place, has) for place, has in asked if place.is_leader]
    for place, has in leaders:
        if has == somewhere:
            return place.rank
    lists = (f"{place} has {', '.join(sorted(has)) or 'none'}" for place, has in leaders)
    raise DataError(
        f"no machine has all sources that the tokenizer is trained on: {'; '.join(lists)}",
        where="tokenizer.train_vocab_size",
        fix="copy them to one machine, or train the tokenizer first and set "
        "tokenizer.name_or_path to it",
    )


def _sizes(source: SourceConfig) -> dict[str, int]:
    # Sizes of a source's files on this machine; empty for a built-in name or Hugging Face id.
    if source.path is None or source.path in BUILT_IN:
        return {}
    root = Path(source.path).expanduser()
    try:
        files = named_files(source.path)
        inside = root if root.is_dir() else root.parent
        return {os.path.relpath(file, inside): file.stat().st_size for file in files}
    except (OSError, DataError):
        return {"": 0}  # it exists, and reading it reports the error


def different_data(
    one: RankLocation, other: RankLocation, here: Any, there: Any, fix: str
) -> DataError:
    """The error for two nodes with different data under one name, from their descriptions."""
    return DataError(
        f"{one} and {other} hold different data: {_difference(here, there)}",
        where="data.sources",
        fix=f"copy {fix}",
        id="data.changed",
    )


def _difference(one: Any, other: Any) -> str:
    # The first thing in which two values of plain JSON differ.
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                return f"{name}: {_difference(one.get(name), other.get(name))}"
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for left, right in zip(one, other, strict=True):
            if left != right:
                return _difference(left, right)
    return f"{str(one)[:60]} and {str(other)[:60]}" if one != other else "files of equal sizes"
