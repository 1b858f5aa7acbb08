"""The training data of a run that streams: endless, prepared in use and forgotten after it."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.config.sections.data import DataConfig, isolates
from isles.data.cut import cut_samples
from isles.data.dataset import Dataset
from isles.data.stream import segment as stream_segment
from isles.data.stream.feed import Feed
from isles.data.stream.ledger import Ledger, difference
from isles.data.stream.open import open_stream
from isles.data.stream.order import StreamOrder
from isles.data.stream.samples import StreamSamples
from isles.data.stream.segment import SegmentRecord
from isles.data.tokens.folders import remove_stale, temporary_beside
from isles.data.tokens.writer import disk_faults
from isles.dist.place import Place, place_of
from isles.dist.world import World
from isles.errors import DataError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a start of a run that streams begins.

    Args:
        ledger_dir: where the run keeps what it needs to begin in the middle, readable on rank 0;
            None: nothing is kept.
        sample: global index of the first sample that will be read.
    """

    ledger_dir: Path | None = None
    sample: int = 0


def open_streams(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    cache_dir: Path,
    start: StreamStart,
    *,
    seed: int,
    vocab_size: int,
    world: World | None,
    fixed_length: bool,
    progress: Callable[[str], None],
    no_progress_s: float,
) -> Dataset:
    """The endless training set of a run that streams. All ranks must call this.

    On each node one process prepares the segments, for all its ranks; it starts when the first of
    them is asked for.

    Args:
        data: the run file's section.
        tokenizer: of the run.
        cache_dir: where the segments are, while they are needed.
        start: where to begin.
        seed: of the order, and of what is held out.
        vocab_size: of the model.
        world: the ranks; None: this process is the only one.
        fixed_length: whether every batch must have rows of data.seq_length.
        progress: called with a line for people until training begins.
        no_progress_s: how long to wait for a sign of life of the process that prepares.

    Raises:
        DataError: a source is missing on a node, differs between nodes, or has changed since
            samples of it were used.
    """
    me = place_of(world) if world is not None else Place(0, 0, "this machine")
    order = StreamOrder([source.weight or 1.0 for source in data.sources], seed)
    identities = _agree(world, me, lambda: _identities(data, tokenizer, seed))
    before = _begin(world, start.ledger_dir, identities, order.before(start.sample))
    first = [segment.number + 1 if segment else 0 for segment in before]
    if me.rank == 0:
        log.info("streams=%d sample=%d segments=%s", len(first), start.sample, first)
    folder = _shared_folder(world, me, cache_dir)
    orders = _orders(data, seed, identities, before) | {
        "trust_remote_code": "auto_map" in tokenizer.init_kwargs,
        "tokenizer": _kept(tokenizer, folder) if me.is_leader else "",
        "ledger": None if start.ledger_dir is None or me.rank else str(start.ledger_dir.absolute()),
        "num_ranks": 1 if world is None else world.local_world_size,
    }
    local_rank = 0 if world is None else world.local_rank
    feed = Feed(folder, local_rank, orders, first, progress=progress, no_progress_s=no_progress_s)
    make = partial(StreamSamples, feed=feed, seed=seed, vocab_size=vocab_size)
    parts = [
        make(k, first[k], identity, partial(cut_samples, data, s), isolates=isolates(data, s))
        for k, (s, identity) in enumerate(zip(data.sources, map(_digest, identities), strict=True))
    ]
    return Dataset(parts, order, data.seq_length, trims=not fixed_length)


def _orders(
    data: DataConfig,
    seed: int,
    identities: list[dict[str, Any]],
    before: list[SegmentRecord | None],
) -> dict[str, Any]:
    """What the processes of all nodes are told alike; plain JSON."""
    return {
        "data": data.model_dump(mode="json"),
        "seed": seed,
        "segment_tokens": stream_segment.SEGMENT_TOKENS,
        "identities": identities,
        "before": [segment and segment.record() for segment in before],
    }


def _identities(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[dict[str, Any]]:
    """What the segments of each source depend on, alike on every machine that has the same."""
    found = []
    for k, source in enumerate(data.sources):
        stream = open_stream(data, k, tokenizer, seed)
        found.append(
            {
                "rows": stream.rows.identity(),
                "encoder": stream.encoder.identity(),
                "seq_length": data.seq_length,
                "packing": [data.packing, isolates(data, source), data.too_long],
                "held_out": stream.hold_out.identity,
                "segment_tokens": stream.segment_tokens,
            }
        )
    # As it will be read again: tuples as lists.
    plain: list[dict[str, Any]] = json.loads(json.dumps(found))
    return plain


def _agree(
    world: World | None, me: Place, identify: Callable[[], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What every node finds its sources to be. All ranks must call this.

    Raises:
        DataError: a node cannot read them, or finds others than the rest.
    """
    if world is None:
        return identify()
    mine: tuple[list[dict[str, Any]] | None, UserError | None] = (None, None)
    if me.is_leader:
        try:
            mine = (identify(), None)
        except UserError as error:
            mine = (None, error)
    found = [
        (place, *each)
        for place, each in world.gather((me, mine), group=world.work)
        if place.is_leader
    ]
    faulty = [(place, error) for place, _, error in found if error is not None]
    if faulty:
        place, fault = faulty[0]
        if len(faulty) < len(found):
            raise DataError(
                f"{fault.what}; other machines have it, and data.streaming reads it on every one",
                where=f"{fault.where} on {place}",
                fix="copy it there or put it on a disk that all share; or use data.streaming: "
                "false, which sends the prepared tokens",
            )
        raise fault
    _, first, _ = found[0]
    assert first is not None
    for place, other, _ in found[1:]:
        if other != first:
            raise DataError(
                f"{found[0][0]} and {place} hold different data: {difference(first, other)}",
                where="data.sources",
                fix="copy it from one to the other",
                id="data.changed",
            )
    return first


def _begin(
    world: World | None,
    ledger_dir: Path | None,
    identities: list[dict[str, Any]],
    samples: list[int],
) -> list[SegmentRecord | None]:
    """Of each stream, the segment after which this start begins. All ranks must call this.

    Raises:
        DataError: the data has changed since samples of it were used.
    """

    def look() -> list[SegmentRecord | None]:
        found: list[SegmentRecord | None] = []
        for k, (identity, sample) in enumerate(zip(identities, samples, strict=True)):
            ledger = None if ledger_dir is None else Ledger(ledger_dir, k, identity)
            if ledger is not None:
                ledger.check(started=sample > 0)
            found.append(ledger.before(sample) if ledger is not None else None)
            if sample and ledger is not None and not ledger.reaches(sample):
                log.warning(
                    "source=%d no record of where sample=%d begins in %s: reading on from "
                    "segment=%d, which takes as long as preparing what lies between",
                    k,
                    sample,
                    ledger.path,
                    found[-1].number + 1 if found[-1] else 0,
                )
        return found

    return look() if world is None else world.main_first(look, group=world.work)


def _shared_folder(world: World | None, me: Place, cache_dir: Path) -> Path:
    """A new folder of this node, named after its first rank. All ranks must call this."""
    name = ""
    if me.is_leader:
        with disk_faults(cache_dir):
            cache_dir.mkdir(parents=True, exist_ok=True)
            folder = cache_dir / f"stream-{uuid.uuid4().hex[:8]}"
            remove_stale(folder, locked=False)
            temporary = temporary_beside(folder, "stream")
            if world is not None:  # alone, it is made when it is needed
                temporary.mkdir()
            name = temporary.name
    if world is not None:
        name = world.gather(name, group=world.work)[me.leader]
    return cache_dir.absolute() / name


def _kept(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """Where the process that prepares finds the tokenizer: the run's, or one that was only made."""
    path = Path(tokenizer.name_or_path)
    if not path.is_dir():
        path = folder / "tokenizer"
        tokenizer.save_pretrained(path)
    return str(path.absolute())


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
