"""Codecs and averages of pseudo-gradients: sizes, bits, errors, and what must be refused."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isles.errors import UserError
from isles.outer.average import average_size, combine, decode_average, inspect, size
from isles.outer.codec import LARGEST, Codec, UnsoundUpdateError, parse_codec
from tests.each import each

CODECS = ("none", "bf16", "int8", "int4", "topk:0.02", "topk:0.3", "topk:0.5", "topk:1.0")
EDGES = (1, 2, 31, 32, 33, 129, 4096, 4097)


def encoded(codec: str, x: Tensor) -> bytes:
    data = torch.full((size(codec, x.numel()),), 0xA5, dtype=torch.uint8)
    parse_codec(codec).encode(x, data)
    return bytes(data.numpy().tobytes())


def decoded(codec: str, data: bytes, n: int) -> Tensor:
    out = torch.full((n,), torch.nan)
    parse_codec(codec).decode(torch.frombuffer(bytearray(data), dtype=torch.uint8), out)
    return out


def averaged(codec: str, parts: list[tuple[bytes, float]], n: int) -> Tensor:
    data = combine(codec, n, parts)
    assert len(data) == average_size(codec, n, len(parts))
    out = torch.full((n,), torch.nan)
    decode_average(parse_codec(codec), torch.frombuffer(bytearray(data), dtype=torch.uint8), out)
    return out


def normal(n: int, seed: int = 0, scale: float = 1e-3) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale


@each("n", EDGES)
@each("codec", CODECS)
def test_every_size_comes_back_and_every_byte_is_written(codec: str, n: int) -> None:
    x = normal(n)
    data = encoded(codec, x)
    assert len(data) % 4 == 0
    assert data == encoded(codec, x), "the filling is not the same"
    back = decoded(codec, data, n)
    assert bool(torch.isfinite(back).all())
    assert float((x - back).norm()) <= float(x.norm())
    assert torch.equal(decoded(codec, encoded(codec, torch.zeros(n)), n), torch.zeros(n))


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=300),
    st.integers(0, 5000),
)
@settings(max_examples=60, deadline=None)
def test_errors_stay_within_half_a_step(values: list[float], zeros: int) -> None:
    """Numbers of any size side by side; half a step of the block's scale, rounded up to bf16."""
    x = torch.tensor(values + [0.0] * zeros)
    assert torch.equal(decoded("none", encoded("none", x), x.numel()), x)
    for codec, block, levels in (("int8", 128, 127), ("int4", 32, 7)):
        back = decoded(codec, encoded(codec, x), x.numel())
        for start in range(0, x.numel(), block):
            part, other = x[start : start + block].double(), back[start : start + block].double()
            step = float(part.abs().max()) / levels * (1 + 2**-7)
            # A block whose scale would be less than 2**-100 is 0.
            most = max(step * 0.5001, levels * 2.0**-100)
            assert float((part - other).abs().max()) <= most


def test_tiny_numbers_become_zero_and_never_denormal() -> None:
    for exponent in range(-149, -90):
        x = torch.tensor([2.0**exponent, -(2.0**exponent), 0.0])
        for codec in ("int8", "int4", "topk:1.0"):
            back = decoded(codec, encoded(codec, x), 3).abs()
            assert float(back.max()) == 0.0 or float(back[back > 0].min()) >= 2.0**-126
    large = torch.tensor([LARGEST / 2, -LARGEST / 2, 1.0])
    for codec in CODECS:
        back = averaged(codec, [(encoded(codec, large), 1.0), (encoded(codec, large), 1.0)], 3)
        assert bool(torch.isfinite(back).all()), codec


@each("value", [torch.nan, torch.inf, -torch.inf, 3.0e38])
@each("codec", CODECS)
@each("place", [0, 4999])
def test_what_is_not_finite_is_refused_by_its_place(codec: str, value: float, place: int) -> None:
    x = normal(5000)
    x[place] = value
    with pytest.raises(UnsoundUpdateError, match=f"number {place} of 5000"):
        encoded(codec, x)


def test_int4_is_finer_than_a_tenth_and_int8_than_a_hundredth() -> None:
    x = normal(1 << 16)
    errors = {c: float((decoded(c, encoded(c, x), len(x)) - x).norm() / x.norm()) for c in CODECS}
    assert errors["none"] == 0 and errors["bf16"] < 2e-3
    assert errors["int8"] < 1e-2 and errors["int4"] < 0.105
    assert errors["topk:1.0"] < 0.37  # one bit beside the sign: 0.343 at best for normal numbers
    ratio = {c: size(c, 1 << 20) / (4 << 20) for c in CODECS}
    assert ratio["int8"] < 0.255 and ratio["int4"] < 0.142 and ratio["topk:0.02"] < 0.0095
    assert ratio["topk:0.3"] < 0.0504 and ratio["topk:0.5"] < 0.0629


@each("n", [2**20, 2**19 + 77])
def test_pieces_of_several_slabs_are_one_piece(n: int) -> None:
    """A piece is worked on slab by slab; that shows nowhere, and not in the last block."""
    x = normal(n, scale=1.0) * torch.linspace(0.001, 1.0, n)
    for codec, block, levels in (("int8", 128, 127), ("int4", 32, 7)):
        back = decoded(codec, encoded(codec, x), n)
        padded = torch.nn.functional.pad(torch.stack([x, back]), (0, -n % block))
        rows, others = padded.view(2, -1, block)
        step = rows.abs().amax(1, keepdim=True) / levels * (1 + 2**-7)
        assert bool(((rows - others).abs() <= step * 0.5001).all())
    for codec in ("none", "bf16"):
        back = decoded(codec, encoded(codec, x), n)
        assert torch.equal(back, x if codec == "none" else x.bfloat16().float())
    x[n - 1] = torch.nan
    for codec in CODECS:
        with pytest.raises(UnsoundUpdateError, match=f"number {n - 1} of {n}"):
            encoded(codec, x)


@each("density", [0.02, 0.083, 0.084, 0.3])  # places, and bits from 0.084 on
def test_topk_keeps_the_largest(density: float) -> None:
    x = normal(2 * 4096 + 100)
    back = decoded(f"topk:{density}", encoded(f"topk:{density}", x), len(x))
    for chunk, other in zip(x.split(4096), back.split(4096), strict=True):
        kept = other != 0
        assert float(chunk[kept].abs().min()) >= float(chunk[~kept].abs().max())
        assert torch.equal(torch.sign(chunk[kept]), torch.sign(other[kept]))
        assert abs(int(kept.sum()) - density * len(chunk)) < 1


@each("codec", ["int8", "int4", "topk:0.1"])
def test_error_feedback_sends_everything_in_the_end(codec: str) -> None:
    """The sum of what was sent differs from what was meant by what is still owed, and no more."""
    n, own = 5000, parse_codec(codec)
    error, meant, sent = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for turn in range(40):
        gradient = normal(n, turn) + normal(n, 99) * 0.3
        update = gradient + error
        meant += gradient
        arrived = decoded(codec, encoded(codec, update), n)
        sent += arrived
        error = update - arrived
    assert torch.allclose(meant - sent, error, atol=1e-6)
    assert float((meant - sent).norm() / meant.norm()) < {"int8": 2e-3, "int4": 2e-2}.get(
        codec, 0.4
    )
    assert own.feeds_back


@each("codec", CODECS)
def test_an_average_is_weighted_by_tokens(codec: str) -> None:
    n = 6000
    left, right = encoded(codec, normal(n, 1)), encoded(codec, normal(n, 2))
    wanted = decoded(codec, left, n) * 0.25 + decoded(codec, right, n) * 0.75
    found = averaged(codec, [(left, 1000.0), (right, 3000.0)], n)
    tolerance = {"none": 1e-7, "bf16": 4e-3, "int8": 1e-2, "int4": 1e-2}.get(codec, 1e-7)
    assert float((found - wanted).norm() / wanted.norm()) < tolerance
    alone = averaged(codec, [(left, 7.0)], n)
    if codec != "int4":  # its average is in int8
        assert torch.equal(alone, decoded(codec, left, n))


def test_nothing_is_averaged_without_weights() -> None:
    part = encoded("int8", normal(10))
    for weights in ([], [0.0], [-1.0], [torch.inf], [torch.nan]):
        with pytest.raises(UnsoundUpdateError, match="weights"):
            combine("int8", 10, [(part, weight) for weight in weights])


def test_bytes_that_no_encoder_writes_are_refused() -> None:
    n = 4096
    for codec in CODECS:
        good = encoded(codec, normal(n))
        wanted = float(decoded(codec, good, n).double().square().sum())
        assert inspect(codec, n, good) == pytest.approx(wanted)
        with pytest.raises(UnsoundUpdateError, match="bytes"):
            inspect(codec, n, good[:-4])
        with pytest.raises(UnsoundUpdateError, match="bytes"):
            combine(codec, n, [(good + b"0000", 1.0)])
    nan = struct.pack("<f", float("nan"))
    with pytest.raises(UnsoundUpdateError, match="finite"):
        inspect("none", n, nan + encoded("none", normal(n))[4:])
    with pytest.raises(UnsoundUpdateError, match="finite"):
        inspect("int8", n, b"\x80\x7f" + encoded("int8", normal(n))[2:])  # an infinite scale
    whole = encoded("topk:0.02", normal(n))
    with pytest.raises(UnsoundUpdateError, match="twice"):
        inspect("topk:0.02", n, whole[:4] + whole[4:7] * 2 + whole[10:])
    short = encoded("topk:0.02", normal(100))
    with pytest.raises(UnsoundUpdateError, match="outside"):
        inspect("topk:0.02", 100, short[:4] + b"\xff\xff\xff" + short[7:])
    bits = bytearray(encoded("topk:0.3", normal(n)))
    for byte in (bits[4] & bits[4] - 1 if bits[4] else 1, 0xFF if bits[4] != 0xFF else 0):
        with pytest.raises(UnsoundUpdateError, match="does not mark 1229 places of 4096"):
            inspect("topk:0.3", n, bytes([*bits[:4], byte, *bits[5:]]))
    ends = encoded(
        "topk:0.5", torch.arange(1.0, 101.0)
    )  # places 50 to 99: 13 bytes, 4 bits to spare
    assert ends[4:17] == bytes([0] * 6 + [0xFC] + [0xFF] * 5 + [0x0F])
    with pytest.raises(UnsoundUpdateError, match="does not mark 50 places of 100"):
        inspect("topk:0.5", 100, ends[:10] + b"\xf8" + ends[11:16] + b"\x1f" + ends[17:])


@given(
    st.binary(min_size=604, max_size=604),
    st.sampled_from(["none", "bf16", "int8", "topk:0.08", "topk:0.7"]),
)
@settings(max_examples=60, deadline=None)
def test_a_strangers_bytes_are_refused_or_harmless(noise: bytes, codec: str) -> None:
    n = {"none": 151, "bf16": 302, "int8": 592, "topk:0.08": 12, "topk:0.7": 343}[codec]
    data = noise[: size(codec, n)]
    assert len(data) == size(codec, n), size(codec, n)
    try:
        norm = inspect(codec, n, data)
    except UnsoundUpdateError:
        return
    assert 0 <= norm < float("inf")
    assert bool(torch.isfinite(averaged(codec, [(data, 1.0), (data, 2.0)], n)).all())


def test_names_of_codecs() -> None:
    for text in CODECS:
        assert parse_codec(parse_codec(text).text) == parse_codec(text)
    assert parse_codec("topk") == Codec("topk", 0.4)
    for wrong in ("int7", "topk:0", "topk:1.5", "topk:x", "topk:nan", "int8:2", ""):
        with pytest.raises(UserError, match="there is no codec"):
            parse_codec(wrong)
