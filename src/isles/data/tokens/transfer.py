"""Prepared tokens of a source that lies on some nodes only: sent once to the others, verified."""

from __future__ import annotations

import glob
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from isles.config.sections.data import DataConfig, SourceConfig
from isles.data.tokens.nodes import work_together
from isles.data.tokens.store import TokenStore, find_fault
from isles.data.tokens.transfer_copy import FolderCopy
from isles.data.tokens.writer import disk_faults
from isles.dist.place import Place, place_of
from isles.dist.world import World
from isles.errors import DataError

log = logging.getLogger(__name__)

PIECE_BYTES = 4 * 2**20
"""Sent at once: even a link of 1 Mbit/s takes half a minute, far below every time-out."""

_TOGETHER_EVERY = 4  # pieces after which the ranks that only wait hear that it goes on


@dataclass(frozen=True, slots=True)
class _Has:
    """What one node has of a source; `files` are names and sizes in bytes."""

    place: Place
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a node has made: the folder's name, the hash of the tokens, sizes of the files."""

    key: str
    digest: str
    sizes: tuple[tuple[str, int], ...]


def prepare_everywhere(
    source: SourceConfig,
    make: Callable[[Callable[[str], None]], Path],
    world: World,
    cache_dir: Path,
    *,
    progress: Callable[[str], None],
    no_progress_s: float,
) -> Path:
    """The prepared tokens of one source, on every node. All ranks must call this.

    Where every node has the source, or it is none of files, each node prepares it. Where some lack
    it, the others prepare it, and one of them sends the result; a node that has it in its cache
    already is sent nothing.

    Args:
        source: in the run file.
        make: prepares it into `cache_dir` and gives the folder; called on one rank of each node
            that has it, in a thread, with a function that takes a line for people.
        world: the ranks.
        cache_dir: this node's.
        progress: called with a line for people.
        no_progress_s: how long to wait for a sign of life of a node that prepares.

    Raises:
        DataError: no node has it, nodes have different data under its name, the disk is full, or
            what has arrived is not what was sent.
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
    works = me.rank in {has.place.rank for has in holders}
    work = partial(_make, make) if works else None
    try:
        made = work_together(work, world, progress=progress, no_progress_s=no_progress_s)
    except DataError as error:
        if not any(has.files for has in leaders) and len(leaders) > 1:
            raise _nowhere(error, [has.place for has in leaders]) from error
        raise
    _check_equal(source, holders, made)
    mine = made[me.leader]
    if len(holders) < len(leaders):
        sent = made[holders[0].place.rank]
        assert sent is not None
        lacking = [has.place for has in leaders if has not in holders]
        way = _Way(str(source.path), world, cache_dir, progress, no_progress_s)
        _send(sent, holders[0].place, lacking, way)
        mine = mine or sent
    assert mine is not None
    return cache_dir / mine.key


def _make(make: Callable[[Callable[[str], None]], Path], say: Callable[[str], None]) -> _Prepared:
    folder = make(say)
    sizes = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())]
    return _Prepared(folder.name, TokenStore.open(folder).digest, tuple(sizes))


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


def _nowhere(error: DataError, places: Sequence[Place]) -> DataError:
    hosts = ", ".join(map(str, places))
    return DataError(
        f"{error.what} on any of the machines {hosts}",
        where=error.where,
        fix=error.fix,
        id=error.id,
    )


def _check_equal(
    source: SourceConfig, holders: Sequence[_Has], made: Sequence[_Prepared | None]
) -> None:
    """Every node that has the source must have made the same tokens of it."""
    first = made[holders[0].place.rank]
    assert first is not None
    for has in holders[1:]:
        other = made[has.place.rank]
        assert other is not None
        if other.digest != first.digest:
            raise DataError(
                f"{holders[0].place} and {has.place} hold different data: "
                f"{_difference(holders[0], has)}",
                where=f"data.sources: {source.path}",
                fix="copy it from one to the other, or leave it on one of them alone: its tokens "
                "are sent to the others",
                id="data.changed",
            )


def _difference(one: _Has, other: _Has) -> str:
    left, right = dict(one.files), dict(other.files)
    for name in sorted(left.keys() | right.keys()):
        if name not in left or name not in right:
            lacks = one.place if name not in left else other.place
            return f"{name} is missing on {lacks}"
        if left[name] != right[name]:
            return f"{name} has {left[name]} bytes on one and {right[name]} on the other"
    return f"files of equal names and sizes ({', '.join(sorted(left)[:3])}) make other tokens"


@dataclass(frozen=True, slots=True)
class _Way:
    """What a transfer needs besides its ends; `name` is the source."""

    name: str
    world: World
    cache_dir: Path
    progress: Callable[[str], None]
    no_progress_s: float


def _send(sent: _Prepared, sender: Place, lacking: Sequence[Place], way: _Way) -> None:
    """Bring a folder from one node to those that lack it. All ranks must call this."""
    world, folder = way.world, way.cache_dir / sent.key
    mine = world.rank in {place.rank for place in lacking} and find_fault(folder) is not None
    needs = [rank for rank, wanted in enumerate(world.gather(mine)) if wanted]
    if not needs:
        return
    hosts = ", ".join(str(place) for place in lacking if place.rank in needs)
    began = time.monotonic()
    group = dist.new_group(
        [sender.rank, *needs], backend="gloo", timeout=timedelta(seconds=world.timeout_s)
    )
    sends = world.rank == sender.rank
    copy = FolderCopy(sent.sizes, folder, place_of(world), sends=sends, takes=mine)
    try:
        what = f"{way.name} to {hosts}"
        _exchange(sent, copy, sender, needs, group, world, what, way.progress)
        # What the sender could not read spoils what is received: its fault comes first.
        _finish(copy if sends else None, sender, way)
        _finish(copy if mine else None, sender, way)
    finally:
        copy.close()
        if sends or mine:
            dist.destroy_process_group(group)
    if world.is_main:
        log.info(
            "data=%s from=%s to=%s bytes=%d seconds=%.1f",
            way.name,
            sender,
            hosts,
            sum(size for _, size in sent.sizes),
            time.monotonic() - began,
        )


def _finish(copy: FolderCopy | None, sender: Place, way: _Way) -> None:
    """Check what has come; the others wait, and hear how far it is. All ranks must call this."""
    place = place_of(way.world)

    def work(say: Callable[[str], None]) -> None:
        assert copy is not None
        copy.finish(str(sender), lambda far: say(f"{place} checks {way.name}: {far}"))

    work_together(
        work if copy is not None else None,
        way.world,
        progress=way.progress,
        no_progress_s=way.no_progress_s,
    )


def _exchange(
    sent: _Prepared,
    copy: FolderCopy,
    sender: Place,
    needs: Sequence[int],
    group: dist.ProcessGroup,
    world: World,
    what: str,
    progress: Callable[[str], None],
) -> None:
    """Piece after piece, each an operation of its own. All ranks must call this."""
    buffer = np.empty(PIECE_BYTES, dtype=np.uint8)
    total, done, pieces = sum(size for _, size in sent.sizes), 0, 0
    takes_part = world.rank == sender.rank or world.rank in needs
    for file, size in sent.sizes:
        for start in range(0, size, PIECE_BYTES):
            piece = buffer[: min(PIECE_BYTES, size - start)]
            if takes_part:
                copy.read(file, piece)
                dist.broadcast(torch.from_numpy(piece), src=sender.rank, group=group)
                copy.write(file, piece)
            done, pieces = done + len(piece), pieces + 1
            if pieces % _TOGETHER_EVERY == 0:
                dist.barrier(group=world.work)
                progress(f"sending {what}: {done / 1e6:.0f} of {total / 1e6:.0f} MB")
