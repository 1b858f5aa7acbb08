"""Tokens prepared once, into a folder named by all that they depend on: whole or absent.

Where a source lies on some nodes only, one of them sends the prepared folder to the others.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.sources.rows import Source, Tally, judge_bad_rows
from isles.data.tokens.encode import Encoder, encode_rows
from isles.data.tokens.store import FORMAT, MANIFEST, TokenStore, find_fault
from isles.data.tokens.writer import (
    TokenWriter,
    disk_faults,
    publish,
    remove_stale,
    temporary_beside,
)
from isles.dist.files import broadcast_folder
from isles.dist.world import Place, World, place_of, work_together
from isles.errors import CommunicationError, DataError
from isles.run.manifest import hash_file
from isles.run.records import read_record

log = logging.getLogger(__name__)

NO_PROGRESS_S = 120.0
"""Whoever prepares writes something every few seconds; this long without it is dead."""

REPORT_EVERY_S = 2.0
_LOOK_EVERY_S = 0.1

Report = Callable[[str], None]
"""Called with a line for people."""


def prepare(
    source: Source,
    encoder: Encoder,
    cache_dir: Path,
    *,
    progress: Report,
    max_bad_fraction: float = 0.0,
    no_progress_s: float = NO_PROGRESS_S,
) -> Path:
    """The folder with the tokens of a source; written unless it stands there whole.

    Several processes may call it at once: one writes, the others wait for it.

    Args:
        source: the rows.
        encoder: makes documents of them.
        cache_dir: made where it is missing.
        progress: called with a line for people, at most every two seconds.
        max_bad_fraction: share of the rows that may be left out because they are bad.
        no_progress_s: how long to wait while another process that prepares the same writes nothing.

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
            locked = _lock(lock, folder, source.describe(), progress, no_progress_s)
            remove_stale(folder, locked=locked)
            fault = find_fault(folder)
            if fault is not None:
                if folder.exists():
                    log.warning("prepared tokens=%s damaged: %s; preparing anew", folder, fault)
                tally = Tally(source.describe(), max_bad_fraction)
                _prepare_anew(source, identity, encoder, folder, progress, tally)
                return folder
    # It may have been made when more rows were allowed to be bad.
    facts = read_record(folder / MANIFEST) or {}
    judge_bad_rows(
        source.describe(),
        facts.get("bad", 0),
        facts.get("rows", 0),
        facts.get("first_bad", []),
        max_bad_fraction,
    )
    documents, tokens = facts.get("num_documents", 0), facts.get("num_tokens", 0)
    progress(f"{count_message(source.describe(), documents, tokens)} (prepared before)")
    return folder


def _key(identity: dict[str, Any], encoder: Encoder) -> str:
    depends = {"source": identity, "encoder": encoder.identity(), "format": FORMAT}
    digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return f"tokens-{digest[:32]}"


def _lock(stream: IO[str], folder: Path, name: str, progress: Report, no_progress_s: float) -> bool:
    """Wait until no other process that shares the cache prepares this folder.

    Returns:
        False where the file system has no locks: both prepare, and the first rename counts.
    """
    size, since = -1, time.monotonic()
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError as error:
            log.warning("no file locks at %s: %s", stream.name, error)
            return False
        now = size_of_folders(folder.parent.glob(f".tmp-*-{folder.name}@*"))
        if now != size:
            size, since = now, time.monotonic()
            progress(f"{name}: another process prepares it, {size / 1e6:.1f} MB so far")
        elif time.monotonic() - since > no_progress_s:
            raise CommunicationError(
                f"another process prepares {name} and has written nothing for {no_progress_s:.0f} "
                "s",
                where=str(folder.parent),
                fix=f"look for it: fuser {stream.name} names it on its own machine",
                id="data.waiting",
            )
        time.sleep(_LOOK_EVERY_S)


def size_of_folders(folders: Iterable[Path]) -> int:
    """Bytes in some folders that others write to or remove meanwhile."""
    size = 0
    for folder in folders:
        with suppress(OSError):
            size += sum(file.stat().st_size for file in folder.iterdir())
    return size


def _prepare_anew(
    source: Source,
    identity: dict[str, Any],
    encoder: Encoder,
    folder: Path,
    progress: Report,
    tally: Tally,
) -> None:
    name, reported_at = source.describe(), time.monotonic()
    temporary = temporary_beside(folder)
    try:
        writer = TokenWriter(temporary, encoder)
        with writer:
            for documents in encode_rows(source.rows(encoder.columns), encoder, tally):
                writer.append(documents)
                if time.monotonic() - reported_at >= REPORT_EVERY_S:
                    progress(count_message(name, writer.num_documents, writer.num_tokens))
                    reported_at = time.monotonic()  # after it: a slow disk is not asked more often
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
    except BaseException:  # of any kind: nothing stays
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    progress(count_message(name, writer.num_documents, writer.num_tokens))


def count_message(name: str, num_documents: int, num_tokens: int) -> str:
    """Such as `python-stdlib: 312 documents, 4.1M tokens`."""
    tokens = f"{num_tokens / 1e6:.1f}M" if num_tokens >= 100_000 else str(num_tokens)
    return f"{name}: {num_documents} documents, {tokens} tokens"


def no_documents(name: str, kind: str) -> DataError:
    """The error for a source that holds nothing."""
    what = "document that holds more than white space" if kind == "text" else "row"
    return DataError(
        f"the source is empty: no {what}",
        where=name,
        fix="give it some, or take it out of data.sources",
        id="data.short",
    )


@dataclass(frozen=True, slots=True)
class _Has:
    """What one node has of a source; `files` are names and sizes in bytes."""

    place: Place
    files: tuple[tuple[str, int], ...]


def prepare_everywhere(
    source: SourceConfig,
    make: Callable[[Report], Path],
    world: World,
    cache_dir: Path,
    progress: Report,
) -> Path:
    """The prepared tokens of one source, on every node. All ranks must call this.

    Where every node has the source, or it is none of files, each node prepares it. Where some lack
    it, the others prepare it, and one of them sends the result; a node that has it in its cache
    already is sent nothing.

    Args:
        source: in the run file.
        make: prepares it into `cache_dir` and gives the folder; called on one rank of each node
            that has it, in a thread.
        world: the ranks.
        cache_dir: this node's.
        progress: called with a line for people.

    Raises:
        DataError: no node has it, or nodes have different data under its name.
        TrainingError: the disk is full, or what has arrived is not what was sent.
        CommunicationError: a node that prepares gives no sign of life.
    """
    with disk_faults(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
    me = place_of(world)
    here = _Has(me, _files(source) if me.is_leader else ())
    # A folder of many files on a slow disk takes its time.
    leaders = [has for has in world.gather(here, group=world.work) if has.place.is_leader]
    holders = [has for has in leaders if has.files] or leaders
    if len(holders) < len(leaders):
        names = ", ".join(str(has.place) for has in holders)
        progress(f"{source.path}: lies on {names} alone")

    def work(report: Report) -> tuple[str, str]:
        folder = make(report)
        return folder.name, TokenStore.open(folder).digest

    works = me.rank in {has.place.rank for has in holders}
    try:
        made = work_together(
            work if works else None, world, progress=progress, no_progress_s=NO_PROGRESS_S
        )
    except DataError as error:
        if not any(has.files for has in leaders) and len(leaders) > 1:
            hosts = ", ".join(str(has.place) for has in leaders)
            what = f"{error.what} on any of the machines {hosts}"
            raise DataError(what, where=error.where, fix=error.fix, id=error.id) from error
        raise
    digests = [(has, (made[has.place.rank] or ("", ""))[1]) for has in holders]
    for other, digest in digests[1:]:
        if digest != digests[0][1]:
            raise DataError(
                f"{holders[0].place} and {other.place} hold different data: "
                f"{_difference(holders[0], other)}",
                where=f"data.sources: {source.path}",
                fix="copy it from one to the other, or leave it on one of them alone: its tokens "
                "are sent to the others",
                id="data.changed",
            )
    src = holders[0].place
    first = made[src.rank]
    assert first is not None
    if lacking := [has.place for has in leaders if has not in holders]:
        _send(cache_dir / first[0], str(source.path), src, lacking, world, progress)
    return cache_dir / (made[me.leader] or first)[0]


def _send(
    folder: Path,
    name: str,
    src: Place,
    lacking: Sequence[Place],
    world: World,
    progress: Report,
) -> None:
    """Bring a folder from one node to those that lack it. All ranks must call this."""
    me = place_of(world)
    needs = me in lacking and find_fault(folder) is not None
    files = None
    if me == src:
        facts = (read_record(folder / MANIFEST) or {})["files"]
        files = {file: str(fact["sha256"]) for file, fact in facts.items()}
        files[MANIFEST] = hash_file(folder / MANIFEST)
    began = time.monotonic()

    def report(done: int, total: int) -> None:
        progress(f"sending {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")

    takers = broadcast_folder(
        folder, world, src=src.rank, needs=needs, files=files, progress=report
    )
    if world.is_main and takers:
        hosts = ", ".join(str(place) for place in lacking if place.rank in takers)
        log.info("data=%s from=%s to=%s seconds=%.1f", name, src, hosts, time.monotonic() - began)


def rank_with_data(data: DataConfig, world: World) -> int:
    """The first rank whose node has every source that some node has; 0 where there is no other.

    All ranks must call this.

    Raises:
        DataError: no node has them all.
    """
    me = place_of(world)
    mine = tuple(me.is_leader and bool(_files(source)) for source in data.sources)
    asked = world.gather((me, mine), group=world.work)
    somewhere = [any(has[index] for _, has in asked) for index in range(len(mine))]
    for place, has in asked:
        if place.is_leader and all(h or not s for h, s in zip(has, somewhere, strict=True)):
            return place.rank
    lists = [
        f"{place} has {', '.join(_named(data, has)) or 'none'}"
        for place, has in asked
        if place.is_leader
    ]
    raise DataError(
        f"no machine has all of the sources that the tokenizer is to be trained on: "
        f"{'; '.join(lists)}",
        where="tokenizer.train_vocab_size",
        fix="copy them to one machine, or train the tokenizer before and name it in "
        "tokenizer.name_or_path",
    )


def _named(data: DataConfig, has: Sequence[bool]) -> list[str]:
    return [str(s.path) for s, here in zip(data.sources, has, strict=True) if here]


def _files(source: SourceConfig) -> tuple[tuple[str, int], ...]:
    """The files that a source names on this machine; none for a built-in name or a hub id."""
    if source.path is None:
        return ()
    path = Path(source.path).expanduser()
    try:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.is_file())
            # An empty folder is there all the same: reading it says what is wrong with it.
            return tuple((str(f.relative_to(path)), f.stat().st_size) for f in found) or (("", 0),)
        if path.exists():
            return ((path.name, path.stat().st_size),)
        if glob.has_magic(source.path):
            # Path.glob takes no absolute patterns.
            names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
            return tuple((n, Path(n).stat().st_size) for n in names if Path(n).is_file())
    except OSError:
        return (("", 0),)  # it is there, and reading it says what is wrong
    return ()


def _difference(one: _Has, other: _Has) -> str:
    left, right = dict(one.files), dict(other.files)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            lacks = one.place if name not in left else other.place
            return f"{name} is missing on {lacks}"
        if left[name] != right[name]:
            return f"{name} has {left[name]} bytes on one and {right[name]} on the other"
    return f"files of equal names and sizes ({', '.join(sorted(left)[:3])}) make other tokens"
