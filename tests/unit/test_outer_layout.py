"""How weights are cut for averaging: the same on every cluster, whatever its ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isles.errors import UserError
from isles.outer.codec import Codec, parse_codec
from isles.outer.layout import PIECE_NUMBERS, Fragment, Piece, make_layout
from tests.each import each

INT8 = Codec("int8")
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 32)}
for block in range(6):
    SHAPES[f"model.layers.{block}.mlp.experts.3.weight"] = (64, 32)
    SHAPES[f"model.layers.{block}.norm.weight"] = (32,)
SHAPES |= {"model.norm.weight": (32,), "lm_head.weight": (512, 32)}


@each("fragments", [1, 2, 3, 6, 7])
def test_every_number_lies_in_one_piece_of_one_fragment(fragments: int) -> None:
    layout = make_layout(SHAPES, INT8, num_fragments=fragments, piece_numbers=1000)
    covered: dict[str, list[int]] = {name: [] for name in SHAPES}
    for fragment in layout.fragments:
        names = [piece.name for piece in fragment.pieces]
        assert names == sorted(names, key=list(SHAPES).index)
        for name, places in fragment.by_name():
            for piece in (fragment.pieces[place] for place in places):
                assert piece.name == name and piece.count <= 1000
                covered[name] += range(piece.start, piece.stop)
    for name, shape in SHAPES.items():
        assert covered[name] == list(range(math.prod(shape)))


def test_blocks_are_dealt_in_strides_and_ends_to_the_smallest() -> None:
    layout = make_layout(SHAPES, INT8, num_fragments=3)
    blocks = [{n.split(".")[2] for n in f.names if ".layers." in n} for f in layout.fragments]
    assert blocks == [{"0", "3"}, {"1", "4"}, {"2", "5"}]
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    homes = [next(i for i, f in enumerate(layout.fragments) if end in f.names) for end in ends]
    assert homes[0] != homes[1]


@given(st.lists(st.integers(1, 2**21), min_size=1, max_size=60), st.integers(1, 9))
def test_shares_are_runs_that_cover_all_and_are_balanced(counts: list[int], size: int) -> None:
    fragment = Fragment(("x",), tuple(Piece("x", 0, count) for count in counts))
    owners = fragment.owners(size)
    assert len(owners) == len(counts) and owners == sorted(owners)
    fair = sum(counts) / size
    for rank in range(size):
        own = [count for count, owner in zip(counts, owners, strict=True) if owner == rank]
        assert sum(own) <= fair + max(counts)


def test_what_differs_shows_in_the_digest() -> None:
    other_name = {name.replace("norm", "ln"): shape for name, shape in SHAPES.items()}
    layouts = [
        make_layout(SHAPES, INT8),
        make_layout(other_name, INT8),
        make_layout(SHAPES | {"lm_head.weight": (32, 512)}, INT8),
        make_layout(SHAPES, INT8, num_fragments=2),
        make_layout(SHAPES, Codec("int4")),
        make_layout(SHAPES, parse_codec("topk:0.02")),
        make_layout(SHAPES, parse_codec("topk:0.03")),
        make_layout(SHAPES, INT8, piece_numbers=4096),
        make_layout(dict(reversed(SHAPES.items())), INT8),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert make_layout(SHAPES, INT8).digest == layouts[0].digest


def test_too_many_fragments_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="only 9 would have anything"):
        make_layout(SHAPES, INT8, num_fragments=12)
    with pytest.raises(UserError):
        make_layout({}, INT8)


def test_large_parameters_are_cut_at_the_codecs_blocks() -> None:
    layout = make_layout({"w": (3, 2**20)}, INT8)
    assert layout.piece_counts(0) == [PIECE_NUMBERS] * 3
