"""What clusters send: codecs and averages of pseudo-gradients, and how weights are cut for them."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isles.errors import UserError
from isles.outer.average import average_size, combine, decode_average, inspect, size
from isles.outer.codec import LARGEST, Codec, UnsoundUpdateError, parse_codec
from isles.outer.layout import PIECE_NUMBERS, Fragment, ParamSlice, make_layout
from tests.each import each

CODECS = ("none", "bf16", "int8", "int4", "topk:0.02", "topk:0.3", "topk:0.5", "topk:1.0")
SLABS = 2**19 + 77
"""More than is worked on at once; the last block is not full."""


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def encoded(codec: str, x: Tensor) -> bytes:
    data = torch.full((size(codec, x.numel()),), 0xA5, dtype=torch.uint8)
    parse_codec(codec).encode(x, data)
    return bytes(data.numpy().tobytes())


def decoded(codec: str, data: bytes, n: int) -> Tensor:
    out = torch.full((n,), torch.nan)
    parse_codec(codec).decode(tensor(data), out)
    return out


def there_and_back(codec: str, x: Tensor) -> Tensor:
    return decoded(codec, encoded(codec, x), x.numel())


def averaged(codec: str, parts: list[tuple[bytes, float]], n: int) -> Tensor:
    data = combine(codec, n, parts)
    assert len(data) == average_size(codec, n, len(parts))
    out = torch.full((n,), torch.nan)
    decode_average(parse_codec(codec), tensor(data), out)
    return out


def normal(n: int, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


def assert_within_half_a_step(x: Tensor) -> None:
    """Half a step of the block's scale, rounded up to bf16; a scale below 2**-100 is 0."""
    assert torch.equal(there_and_back("none", x), x)
    for codec, block, levels in (("int8", 128, 127), ("int4", 32, 7)):
        both = torch.stack([x, there_and_back(codec, x)]).double()
        rows, others = torch.nn.functional.pad(both, (0, -x.numel() % block)).view(2, -1, block)
        step = rows.abs().amax(1, keepdim=True) / levels * (1 + 2**-7)
        most = (step * 0.5001).clamp(min=levels * 2.0**-100)
        assert bool(((rows - others).abs() <= most).all())


@each(*(1, 2, 31, 32, 33, 129, 4096, 4097, SLABS))
def test_every_size_comes_back_and_every_byte_is_written(n):
    x = normal(n) * torch.linspace(0.001, 1.0, n)
    for codec in CODECS:
        data = encoded(codec, x)
        assert len(data) % 4 == 0
        assert data == encoded(codec, x), "the filling is not the same"
        back = decoded(codec, data, n)
        assert bool(torch.isfinite(back).all())
        assert float((x - back).norm()) <= float(x.norm())
        assert torch.equal(there_and_back(codec, torch.zeros(n)), torch.zeros(n))
    assert_within_half_a_step(x)
    assert torch.equal(there_and_back("bf16", x), x.bfloat16().float())


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    st.integers(0, 5000),
)
@settings(max_examples=60, deadline=None)
def test_errors_stay_within_half_a_step(values: list[float], zeros: int) -> None:
    assert_within_half_a_step(torch.tensor(values + [0.0] * zeros))


def test_tiny_numbers_become_zero_and_never_denormal() -> None:
    for exponent in range(-149, -90):
        x = torch.tensor([2.0**exponent, -(2.0**exponent), 0.0])
        for codec in ("int8", "int4", "topk:1.0"):
            back = there_and_back(codec, x).abs()
            assert float(back.max()) == 0.0 or float(back[back > 0].min()) >= 2.0**-126
    large = torch.tensor([LARGEST / 2, -LARGEST / 2, 1.0])
    for codec in CODECS:
        back = averaged(codec, [(encoded(codec, large), 1.0), (encoded(codec, large), 1.0)], 3)
        assert bool(torch.isfinite(back).all()), codec


@each(*itertools.product(CODECS, [torch.nan, torch.inf, -torch.inf, 3.0e38]))
def test_what_is_not_finite_is_refused_by_its_place(codec, value):
    for place in (0, 4999):
        x = normal(5000)
        x[place] = value
        with pytest.raises(UnsoundUpdateError, match=f"number {place} of 5000"):
            encoded(codec, x)


def test_int4_is_finer_than_a_tenth_and_int8_than_a_hundredth():
    x = normal(1 << 16)
    # Of topk one bit beside the sign: 0.343 at best.
    most = {"none": 0.0, "bf16": 2e-3, "int8": 1e-2, "int4": 0.105, "topk:1.0": 0.37}
    for codec, error in most.items():
        assert float((there_and_back(codec, x) - x).norm() / x.norm()) <= error, codec
    most = {"int8": 0.255, "int4": 0.142, "topk:0.02": 0.0095, "topk:0.3": 0.0504}
    for codec, ratio in {**most, "topk:0.5": 0.0629}.items():
        assert size(codec, 1 << 20) / (4 << 20) < ratio, codec


@each(0.02, 0.083, 0.084, 0.3)  # places, and bits from 0.084 on
def test_topk_keeps_the_largest(density: float):
    x = normal(2 * 4096 + 100)
    back = there_and_back(f"topk:{density}", x)
    for chunk, other in zip(x.split(4096), back.split(4096), strict=True):
        kept = other != 0
        assert float(chunk[kept].abs().min()) >= float(chunk[~kept].abs().max())
        assert torch.equal(torch.sign(chunk[kept]), torch.sign(other[kept]))
        assert abs(int(kept.sum()) - density * len(chunk)) < 1


@each(*CODECS)
def test_an_average_is_weighted_by_tokens(codec: str):
    n = 6000
    left, right = encoded(codec, normal(n, 1)), encoded(codec, normal(n, 2))
    wanted = decoded(codec, left, n) * 0.25 + decoded(codec, right, n) * 0.75
    found = averaged(codec, [(left, 1000.0), (right, 3000.0)], n)
    tolerance = {"bf16": 4e-3, "int8": 1e-2, "int4": 1e-2}.get(codec, 1e-7)
    assert float((found - wanted).norm() / wanted.norm()) < tolerance
    if codec != "int4":  # its average is in int8
        assert torch.equal(averaged(codec, [(left, 7.0)], n), decoded(codec, left, n))


def test_nothing_is_averaged_without_weights():
    part = encoded("int8", normal(10))
    for weights in ([], [0.0], [-1.0], [torch.inf], [torch.nan]):
        with pytest.raises(UnsoundUpdateError, match="weights"):
            combine("int8", 10, [(part, weight) for weight in weights])


def test_bytes_that_no_encoder_writes_are_refused():
    n = 4096
    good = {codec: encoded(codec, normal(n)) for codec in CODECS}
    for codec, data in good.items():
        wanted = float(decoded(codec, data, n).double().square().sum())
        assert inspect(codec, n, data) == pytest.approx(wanted)
        with pytest.raises(UnsoundUpdateError, match="bytes"):
            inspect(codec, n, data[:-4])
        longer = [(data + b"0000", 1.0)]
        with pytest.raises(UnsoundUpdateError, match="bytes"):
            combine(codec, n, longer)
    whole, bits = good["topk:0.02"], good["topk:0.3"]
    short = encoded("topk:0.02", normal(100))
    # Places 50 to 99: 13 bytes of marks, with 4 bits to spare.
    ends = encoded("topk:0.5", torch.arange(1.0, 101.0))
    assert ends[4:17] == bytes([0] * 6 + [0xFC] + [0xFF] * 5 + [0x0F])
    beyond = ends[:10] + b"\xf8" + ends[11:16] + b"\x1f" + ends[17:]
    for codec, count, data, says in (
        ("none", n, struct.pack("<f", float("nan")) + good["none"][4:], "finite"),
        ("int8", n, b"\x80\x7f" + good["int8"][2:], "finite"),  # an infinite scale
        ("topk:0.02", n, whole[:4] + whole[4:7] * 2 + whole[10:], "twice"),
        ("topk:0.02", 100, short[:4] + b"\xff\xff\xff" + short[7:], "outside"),
        ("topk:0.3", n, bits[:4] + bytes([bits[4] ^ 1]) + bits[5:], "mark 1229 positions of 4096"),
        ("topk:0.5", 100, beyond, "mark 50 positions of 100"),
    ):
        with pytest.raises(UnsoundUpdateError, match=says):
            inspect(codec, count, data)


LARGE = {"none": 151, "bf16": 302, "int8": 592, "int4": 1072, "topk:0.08": 12, "topk:0.7": 343}
"""So many numbers take about 600 bytes."""


@given(st.binary(min_size=604, max_size=604), st.sampled_from(sorted(LARGE)))
@settings(max_examples=60, deadline=None)
def test_a_strangers_bytes_are_refused_or_harmless(noise: bytes, codec: str) -> None:
    n = LARGE[codec]
    data = noise[: size(codec, n)]
    assert len(data) == size(codec, n), size(codec, n)
    try:
        norm = inspect(codec, n, data)
    except UnsoundUpdateError:
        return
    assert 0 <= norm < float("inf")
    assert bool(torch.isfinite(averaged(codec, [(data, 1.0), (data, 2.0)], n)).all())


def test_names_of_codecs():
    for text in CODECS:
        assert parse_codec(parse_codec(text).text) == parse_codec(text)
    assert parse_codec("topk") == Codec("topk", 0.4)
    for wrong in ("int7", "topk:0", "topk:1.5", "topk:x", "topk:nan", "int8:2", ""):
        with pytest.raises(UserError, match="unknown codec"):
            parse_codec(wrong)


# How weights are cut: the same on every cluster, whatever its ranks.

INT8 = Codec("int8")
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 32)}
for block in range(6):
    SHAPES[f"model.layers.{block}.mlp.experts.3.weight"] = (64, 32)
    SHAPES[f"model.layers.{block}.norm.weight"] = (32,)
SHAPES |= {"model.norm.weight": (32,), "lm_head.weight": (512, 32)}


@each(1, 2, 3, 6, 7)
def test_every_number_lies_in_one_piece_of_one_fragment(fragments: int):
    layout = make_layout(SHAPES, INT8, num_fragments=fragments, piece_numbers=1000)
    covered: dict[str, list[int]] = {name: [] for name in SHAPES}
    for fragment in layout.fragments:
        names = [piece.name for piece in fragment.pieces]
        assert names == sorted(names, key=list(SHAPES).index)
        for piece in fragment.pieces:
            assert piece.count <= 1000
            covered[piece.name] += range(piece.start, piece.stop)
        assert {name: stop - start for name, start, stop in fragment.by_name()} == {
            name: math.prod(SHAPES[name]) for name in fragment.names
        }
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
def test_shares_are_runs_that_cover_all_and_are_balanced(counts: list[int], ranks: int) -> None:
    fragment = Fragment(("x",), tuple(ParamSlice("x", 0, count) for count in counts))
    owners = fragment.owners(ranks)
    assert len(owners) == len(counts) and owners == sorted(owners)
    fair = sum(counts) / ranks
    for rank in range(ranks):
        own = [count for count, owner in zip(counts, owners, strict=True) if owner == rank]
        assert sum(own) <= fair + max(counts)


def test_what_differs_shows_in_the_digest() -> None:
    other_name = {name.replace("norm", "ln"): shape for name, shape in SHAPES.items()}
    other_shape, other_order = SHAPES | {"lm_head.weight": (32, 512)}, reversed(SHAPES.items())
    layouts = [
        *(make_layout(SHAPES, parse_codec(c)) for c in ("int8", "int4", "topk:0.02", "topk:0.03")),
        *(make_layout(dict(other), INT8) for other in (other_name, other_shape, other_order)),
        make_layout(SHAPES, INT8, num_fragments=2),
        make_layout(SHAPES, INT8, piece_numbers=4096),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
    assert make_layout(SHAPES, INT8).digest == layouts[0].digest


def test_too_many_fragments_are_refused_and_large_parameters_are_cut_at_the_codecs_blocks():
    with pytest.raises(UserError, match="only 9 fragments would contain"):
        make_layout(SHAPES, INT8, num_fragments=12)
    with pytest.raises(UserError):
        make_layout({}, INT8)
    assert make_layout({"w": (3, 2**20)}, INT8).piece_counts(0) == [PIECE_NUMBERS] * 3
