"""The average of a turn among the members of an epoch: each makes a share of it for all."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isles.errors import CommunicationError
from isles.outer.average import Part, average_size, combine, inspect, size
from isles.outer.gloo.group import Group
from isles.outer.unsound import UnsoundUpdateError

_SLICE_BYTES = 8 * 2**20
_HASH_BYTES = hashlib.sha256().digest_size


class DamagedError(CommunicationError):
    """What has come from a cluster is not what it has sent."""


class UnsoundPartError(UnsoundUpdateError):
    """What a cluster has sent cannot be averaged.

    Args:
        rank: of the cluster.
        why: in words.
    """

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


Run = range
"""Pieces of a fragment, by their number."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank averages which pieces, and where their bytes lie.

    Args:
        codec: of contributions.
        counts: numbers in each piece.
        starts: where each piece begins in a contribution; the last is its size.
        average_starts: where it begins in the average.
        slices: what each rank averages, slice by slice; some may be empty.
    """

    codec: str
    counts: Sequence[int]
    starts: Sequence[int]
    average_starts: Sequence[int]
    slices: Sequence[Sequence[Run]]

    def bytes_of(self, run: Run) -> tuple[int, int]:
        """Where pieces lie in a contribution, and how many bytes they are."""
        return _place(self.starts, run)

    def average_bytes_of(self, run: Run) -> tuple[int, int]:
        """Where pieces lie in the average, and how many bytes they are."""
        return _place(self.average_starts, run)


def make_plan(codec: str, counts: Sequence[int], ranks: int) -> Plan:
    """Deal the pieces of a fragment; the same on all ranks.

    Args:
        codec: of contributions.
        counts: numbers in each piece.
        ranks: how many clusters average.
    """
    starts = [0, *itertools.accumulate(size(codec, count) for count in counts)]
    averages = [0, *itertools.accumulate(average_size(codec, count, ranks) for count in counts)]
    middles = [(start + stop) / 2 for start, stop in itertools.pairwise(starts)]
    owners = [min(ranks - 1, int(middle * ranks / starts[-1])) for middle in middles]
    slices: list[list[Run]] = [[] for _ in range(ranks)]
    for piece, owner in enumerate(owners):
        own = slices[owner]
        fits = bool(own) and starts[piece + 1] - starts[own[-1].start] <= _SLICE_BYTES
        if fits:
            own[-1] = range(own[-1].start, piece + 1)
        else:
            own.append(range(piece, piece + 1))
    longest = max(map(len, slices))
    padded = [[*own, *[range(0)] * (longest - len(own))] for own in slices]
    return Plan(codec, counts, starts, averages, padded)


def average_among(
    group: Group, plan: Plan, tokens: Sequence[int], contribution: Path, average: Path
) -> None:
    """Average contributions piece by piece: every rank gets the same bytes.

    A slice is averaged while the next one is on its way. All ranks must call this.

    Args:
        group: the ranks.
        plan: made for as many.
        tokens: the weight of each rank's contribution.
        contribution: this rank's.
        average: the file to be written.
    """
    into = os.open(average, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    out = os.open(contribution, os.O_RDONLY)
    try:
        os.ftruncate(into, plan.average_starts[-1])
        with ThreadPoolExecutor(1, "combine") as pool:
            before = None
            num_slices = len(plan.slices[0])
            for number in range(num_slices + 1):
                runs = [own[number] if number < num_slices else range(0) for own in plan.slices]
                came = _scatter(group, plan, runs, out)
                if before is not None:
                    former, combined = before
                    _gather(group, plan, former, combined.result(), into)
                mine = runs[group.rank]
                before = runs, pool.submit(_combine, plan, mine, came, tokens)
        os.fsync(into)
    finally:
        os.close(into)
        os.close(out)


def _scatter(group: Group, plan: Plan, runs: Sequence[Run], contribution: int) -> list[Tensor]:
    """Send each rank what it averages; what came from each for this one.

    Each row ends with its hash: what is averaged of damaged bytes would be the same for all, and
    nobody would notice. What is gathered thereafter all members compare before the turn counts.
    """
    rows = [_hashed(_read(contribution, *plan.bytes_of(run))) for run in runs]
    sizes = [len(rows[group.rank])] * group.size
    found = group.exchange(rows, sizes, max(map(len, rows)))
    return [_checked(row, name, group) for row, name in zip(found, group.names, strict=True)]


def _hashed(row: Tensor) -> Tensor:
    if not len(row):
        return row
    digest = hashlib.sha256(row.numpy().data).digest()
    return torch.cat([row, torch.frombuffer(bytearray(digest), dtype=torch.uint8)])


def _checked(row: Tensor, name: str, group: Group) -> Tensor:
    if not len(row):
        return row
    data, digest = row[:-_HASH_BYTES], row[-_HASH_BYTES:]
    if hashlib.sha256(data.numpy().data).digest() != digest.numpy().tobytes():
        raise DamagedError(
            f"{len(data)} bytes from cluster {name} have come damaged",
            where=f"cluster {group.names[group.rank]}",
            fix="look for a broken network card, cable or memory on the way between the two",
        )
    return data


def _combine(plan: Plan, run: Run, rows: Sequence[Tensor], tokens: Sequence[int]) -> Tensor:
    first, _ = plan.bytes_of(run)
    averaged = bytearray()
    for piece in run:
        start, stop = (plan.starts[edge] - first for edge in (piece, piece + 1))
        parts = [
            (row[start:stop].numpy().data, float(weight))
            for row, weight in zip(rows, tokens, strict=True)
        ]
        try:
            averaged += combine(plan.codec, plan.counts[piece], parts)
        except UnsoundUpdateError as error:
            raise _blame(plan, piece, parts) or error from error
    return _tensor(averaged)


def _blame(plan: Plan, piece: int, parts: Sequence[Part]) -> UnsoundPartError | None:
    """Whose part of a piece cannot be averaged."""
    for rank, (data, _) in enumerate(parts):
        try:
            inspect(plan.codec, plan.counts[piece], data)
        except UnsoundUpdateError as error:
            return UnsoundPartError(rank, f"piece {piece}: {error}")
    return None


def _gather(group: Group, plan: Plan, runs: Sequence[Run], mine: Tensor, average: int) -> None:
    """Send all ranks what this one has averaged; write what all have."""
    places = [plan.average_bytes_of(run) for run in runs]
    sizes = [num_bytes for _, num_bytes in places]
    found = group.exchange([mine] * group.size, sizes, max(sizes))
    for row, (start, _) in zip(found, places, strict=True):
        _write(average, row, start)


def _place(starts: Sequence[int], run: Run) -> tuple[int, int]:
    if not run:
        return 0, 0
    return starts[run.start], starts[run.stop] - starts[run.start]


def _read(file: int, start: int, num_bytes: int) -> Tensor:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        count = os.preadv(file, [view], start)
        if count == 0:
            raise OSError("the contribution is shorter than its pieces")
        view, start = view[count:], start + count
    return _tensor(data)


def _write(file: int, row: Tensor, start: int) -> None:
    view = row.numpy().data
    while view:
        written = os.pwrite(file, view, start)
        view, start = view[written:], start + written


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
