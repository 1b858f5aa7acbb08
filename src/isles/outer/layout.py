"""How the trained weights are cut for averaging: fragments of parameters, pieces of parameters.

It follows from names and whole shapes alone, so it is the same on all clusters, whatever strategy
and number of ranks each has.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isles.errors import UserError
from isles.outer.codec import Codec

PIECE_NUMBERS = 2**20
"""Numbers in a piece at most: a multiple of the blocks of all codecs."""

_FORMAT = 2
"""Raised when the same names and shapes are cut or encoded in another way."""

_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Piece:
    """Numbers `start` to `start + count - 1` of one parameter, as one row."""

    name: str
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Fragment:
    """What is averaged in one outer step: parameters, and the pieces of them in the same order."""

    names: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def by_name(self) -> list[tuple[str, range]]:
        """Its parameters, and the places of their pieces in `pieces`."""
        counts = Counter(piece.name for piece in self.pieces)
        ends = [0, *itertools.accumulate(counts[name] for name in self.names)]
        runs = itertools.starmap(range, itertools.pairwise(ends))
        return list(zip(self.names, runs, strict=True))

    def owners(self, size: int) -> list[int]:
        """The rank of so many that keeps each piece: runs of pieces, about as many numbers each."""
        ends = [0, *itertools.accumulate(piece.count for piece in self.pieces)]
        middles = [(start + stop) / 2 for start, stop in itertools.pairwise(ends)]
        return [min(size - 1, int(middle * size / ends[-1])) for middle in middles]


@dataclass(frozen=True, slots=True)
class Layout:
    """All fragments, and how they are encoded.

    Args:
        shapes: whole shapes of the trained parameters, in the model's order.
        fragments: what is averaged in rotation: outer step T is of fragment T mod their number.
        piece_numbers: in a piece at most.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fragments: tuple[Fragment, ...]
    codec: Codec
    piece_numbers: int

    @property
    def digest(self) -> str:
        """SHA-256 of what must be equal on all clusters."""
        description = {
            "format": _FORMAT,
            "shapes": [[name, *shape] for name, shape in self.shapes.items()],
            "fragments": len(self.fragments),
            "codec": self.codec.text,
            "piece_numbers": self.piece_numbers,
        }
        text = json.dumps(description, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def piece_counts(self, fragment: int) -> list[int]:
        """How many numbers each piece of a fragment has, in the order of its bytes."""
        return [piece.count for piece in self.fragments[fragment].pieces]


def make_layout(
    shapes: Mapping[str, Sequence[int]],
    codec: Codec,
    *,
    num_fragments: int = 1,
    piece_numbers: int = PIECE_NUMBERS,
) -> Layout:
    """Cut the trained parameters.

    The blocks of the model go to the fragments in rotation, as strides of Streaming DiLoCo; what
    lies in no block goes, the largest first, to the fragment that has least.

    Raises:
        UserError: there is nothing to average, or less than one parameter for each fragment.

    Source: Douillard et al. 2025 (arXiv:2501.18512), section 2.2.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    allocated = _allocate({name: size for name, size in sizes.items() if size}, num_fragments)
    if not all(allocated):
        raise UserError(
            f"{num_fragments} fragments are more than the blocks and ends of what is trained: "
            f"only {sum(map(bool, allocated))} would have anything in them",
            where="outer.fragments",
            fix="use fewer fragments than the model has blocks",
        )
    fragments = []
    for names in allocated:
        ordered = tuple(name for name in shapes if name in names)
        pieces = tuple(
            Piece(name, start, min(piece_numbers, sizes[name] - start))
            for name in ordered
            for start in range(0, sizes[name], piece_numbers)
        )
        fragments.append(Fragment(ordered, pieces))
    own = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    return Layout(own, tuple(fragments), codec, piece_numbers)


def _allocate(sizes: Mapping[str, int], num_fragments: int) -> list[set[str]]:
    allocated: list[set[str]] = [set() for _ in range(num_fragments)]
    load = [0] * num_fragments
    blocks: dict[str, list[str]] = {}
    ends = []
    for name in sizes:
        if found := _BLOCK.match(name):
            blocks.setdefault(found[1], []).append(name)
        else:
            ends.append(name)
    for index, names in enumerate(blocks.values()):
        allocated[index % num_fragments] |= set(names)
        load[index % num_fragments] += sum(sizes[name] for name in names)
    for name in sorted(ends, key=lambda name: (-sizes[name], name)):
        least = load.index(min(load))
        allocated[least].add(name)
        load[least] += sizes[name]
    return allocated
