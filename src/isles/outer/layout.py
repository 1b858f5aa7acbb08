"""Division of the trained weights for averaging: fragments of parameters, pieces of parameters.

It depends only on names and full shapes, so it is the same on all clusters, for any strategy and
number of ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isles.errors import UserError
from isles.outer.codec import Codec

PIECE_NUMBERS = 2**20
"""Maximum number of elements in a piece: a multiple of the block sizes of all codecs."""

_FORMAT = 2
"""Version of the division and encoding; raise it when they change."""

_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """Numbers `start` to `start + count - 1` of one parameter, as one row."""

    name: str
    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Fragment:
    """Parameters that are averaged in one outer step, and their pieces in the same order."""

    names: tuple[str, ...]
    pieces: tuple[ParamSlice, ...]

    def by_name(self) -> list[tuple[str, int, int]]:
        """Its parameters, each with its first number in the fragment, and its end."""
        counts = dict.fromkeys(self.names, 0)
        for piece in self.pieces:
            counts[piece.name] += piece.count
        ends = itertools.pairwise(itertools.accumulate(counts.values(), initial=0))
        return [(name, start, stop) for name, (start, stop) in zip(self.names, ends, strict=True)]

    def owners(self, size: int) -> list[int]:
        """The rank, out of `size`, that keeps each piece: contiguous pieces, about equal numbers
        per rank."""
        ends = [0, *itertools.accumulate(piece.count for piece in self.pieces)]
        middles = [(start + stop) / 2 for start, stop in itertools.pairwise(ends)]
        return [min(size - 1, int(middle * size / ends[-1])) for middle in middles]


@dataclass(frozen=True, slots=True)
class FragmentLayout:
    """All fragments, and their encoding.

    Args:
        shapes: full shapes of the trained parameters, in the model's order.
        fragments: averaged in rotation: outer step T is for fragment T mod their number.
        piece_numbers: maximum number of elements in a piece.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fragments: tuple[Fragment, ...]
    codec: Codec
    piece_numbers: int

    @property
    def digest(self) -> str:
        """SHA-256 of everything that must be equal on all clusters."""
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
        """Number of elements of each piece of a fragment, in the order of its bytes."""
        return [piece.count for piece in self.fragments[fragment].pieces]


def make_layout(
    shapes: Mapping[str, Sequence[int]],
    codec: Codec,
    *,
    num_fragments: int = 1,
    piece_numbers: int = PIECE_NUMBERS,
) -> FragmentLayout:
    """Divide the trained parameters.

    The blocks of the model go to the fragments in rotation, like the strides of Streaming DiLoCo.
    Other parameters go, the largest first, to the smallest fragment.

    Raises:
        UserError: nothing is trained, or there is less than one parameter per fragment.

    Source: Douillard et al. 2025 (arXiv:2501.18512), section 2.2.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    allocated = _allocate({name: size for name, size in sizes.items() if size}, num_fragments)
    if not all(allocated):
        raise UserError(
            f"{num_fragments} fragments are too many for the trained blocks and ends: only "
            f"{sum(map(bool, allocated))} fragments would contain parameters",
            where="outer.fragments",
            fix="use fewer fragments than the model has blocks",
        )
    fragments = []
    for names in allocated:
        ordered = tuple(name for name in shapes if name in names)
        pieces = tuple(
            ParamSlice(name, start, min(piece_numbers, sizes[name] - start))
            for name in ordered
            for start in range(0, sizes[name], piece_numbers)
        )
        fragments.append(Fragment(ordered, pieces))
    own = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    return FragmentLayout(own, tuple(fragments), codec, piece_numbers)


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
    # The name decides between equal sizes, so that all clusters divide alike.
    for name in sorted(ends, key=lambda name: (-sizes[name], name)):
        least = load.index(min(load))
        allocated[least].add(name)
        load[least] += sizes[name]
    return allocated
