"""Codecs of a pseudo-gradient: one piece to bytes and back, in five kinds.

A piece is encoded by itself and has a size that is known beforehand. All who decode the same bytes
get the same bits, on any machine: decoding only converts, and multiplies once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

from isles.errors import UserError

LARGEST = 2.0**126
"""What a codec takes at most, so that no sum or scale of it overflows in fp32."""

_CHECK_SLAB = 1 << 16


class UnsoundUpdateError(ValueError):
    """An update that must not be averaged; the text says why."""


def check_magnitude(x: Tensor) -> None:
    """Look at all numbers of a piece.

    Raises:
        UnsoundUpdateError: one is not finite, or too large.
    """
    slab = _CHECK_SLAB if x.device.type == "cpu" else max(1, x.numel())
    largest = torch.stack([torch.amax(part.abs()) for part in torch.split(x, slab)])
    check_largest(largest, x)


def check_largest(largest: Tensor, x: Tensor) -> None:
    """Look at the largest magnitudes of parts of `x`.

    Raises:
        UnsoundUpdateError: one is not finite, or too large; it names the first such number of x.
    """
    if bool((largest <= LARGEST).all()):  # false for NaN
        return
    index = int((~(x.abs() <= LARGEST)).nonzero()[0])
    raise UnsoundUpdateError(
        f"number {index} of {x.numel()} is {float(x[index])}, not a finite one up to {LARGEST:.0e}"
    )


CodecKind = Literal["none", "bf16", "int8", "int4", "topk"]

_DENSITY, _DECAY = 0.4, 0.95
_SLAB = 1 << 19


@dataclass(frozen=True, slots=True)
class Codec:
    """How numbers become bytes.

    none: fp32 as it is. bf16: rounded. int8: a scale for each 128 numbers. int4: one for each 32.
    topk: of each 4096 the largest, two bits each, and where they are.

    Args:
        kind: see above.
        density: topk: which part of the numbers travels, 0 to 1.
    """

    kind: CodecKind
    density: float = _DENSITY

    @property
    def text(self) -> str:
        """The codec in a word that `parse_codec` understands; the same for equal codecs only."""
        return f"topk:{self.density!r}" if self.kind == "topk" else self.kind

    @property
    def feeds_back(self) -> bool:
        """Whether what an encoding leaves out is added to the next one."""
        return self.kind in ("int8", "int4", "topk")

    @property
    def decay(self) -> float:
        """Which part of what was left out is added to the next one.

        Source: for topk, SparseLoCo, Sarfi et al. 2025 (arXiv:2508.15706).
        """
        return _DECAY if self.kind == "topk" else 1.0

    def size(self, n: int) -> int:
        """Bytes of a piece of so many numbers: a multiple of 4."""
        match self.kind:
            case "none":
                return 4 * n
            case "bf16":
                return 4 * ((n + 1) // 2)
            case "int8" | "int4":
                return _blocks_size(n, _bits(self.kind))
            case "topk":
                return _topk_size(n, self.density)
            case _:
                assert_never(self.kind)

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write a piece as bytes.

        Args:
            x: [N] in fp32, contiguous.
            out: [size(N)] in uint8, contiguous, on the same device, at a multiple of 4 bytes.

        Raises:
            UnsoundUpdateError: a number is not finite, or larger than `LARGEST`.
        """
        n = x.numel()
        assert x.dtype == torch.float32 and out.numel() == self.size(n), (x.dtype, out.shape, n)
        match self.kind:
            case "none":
                check_magnitude(x)
                out.view(torch.float32).copy_(x)
            case "bf16":
                check_magnitude(x)
                narrow = out.view(torch.bfloat16)
                narrow[:n].copy_(x)
                narrow[n:].zero_()
            case "int8" | "int4":
                _encode_blocks(x, out, _bits(self.kind), _slab(x))
            case "topk":
                _encode_topk(x, out, self.density)
            case _:
                assert_never(self.kind)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Read a piece from bytes that `encode` wrote.

        Args:
            data: [size(N)] in uint8, contiguous, at a multiple of 4 bytes.
            out: [N] in fp32, contiguous, on the same device.
        """
        n = out.numel()
        assert out.dtype == torch.float32 and data.numel() == self.size(n), (data.shape, n)
        match self.kind:
            case "none":
                out.copy_(data.view(torch.float32))
            case "bf16":
                out.copy_(data.view(torch.bfloat16)[:n])
            case "int8" | "int4":
                _decode_blocks(data, out, _bits(self.kind), _slab(out))
            case "topk":
                out.zero_()
                add_topk(data, out, self.density, weight=1.0)
            case _:
                assert_never(self.kind)


def parse_codec(text: str) -> Codec:
    """The codec that a word names: none, bf16, int8, int4, topk or topk:DENSITY.

    Raises:
        UserError: it names none.
    """
    kind, _, density = text.partition(":")
    try:
        if kind == "topk":
            codec = Codec("topk", float(density or _DENSITY))
            if 0.0 < codec.density <= 1.0:
                return codec
        elif not density and kind in get_args(CodecKind):
            return Codec(kind)  # type: ignore[arg-type]  # it is one of the kinds
    except ValueError:
        pass
    raise UserError(
        f"there is no codec {text!r}",
        where="outer.codec",
        fix=f"use one of {', '.join(get_args(CodecKind))}; topk:0.1 sends 10 % of the numbers",
    )


def _bits(kind: Literal["int8", "int4"]) -> int:
    return 8 if kind == "int8" else 4


def _slab(x: Tensor) -> int:
    # Numbers that are worked on together: on a CPU what its cache holds.
    return _SLAB if x.device.type == "cpu" else max(1, x.numel())


# int8 and int4: whole numbers and one scale for each block.
#
# Bytes of a piece of N numbers: the blocks' scales in bf16, then the whole numbers; each of the two
# filled up with zeros to a multiple of 4. int8: one byte each. int4: the first half in the low four
# bits, the second half in the high ones.


_BLOCK = {8: 128, 4: 32}
_LEVELS = {8: 127, 4: 7}

_SMALLEST = 2.0**-100
"""A smaller scale is 0: so no product is denormal, which some processes flush to zero."""


def _blocks_size(n: int, bits: int) -> int:
    return _scales_size(n, bits) + 4 * -(-_block_codes_size(n, bits) // 4)


def _encode_blocks(x: Tensor, out: Tensor, bits: int, slab: int) -> None:
    # A block's largest number is met to 1/254 (int8) or 1/14 of it (int4). `slab`: numbers that
    # are worked on together, a multiple of all blocks.
    n, block = x.numel(), _BLOCK[bits]
    count = _block_codes_size(n, bits)
    scales, codes = _block_parts(out, n, bits)
    codes[count:].zero_()
    scales[-(-n // block) :].zero_()
    whole = codes[:n] if bits == 8 else x.new_empty(n, dtype=torch.int8)
    work = x.new_empty(min(slab, n))
    largest = x.new_empty(-(-n // block))
    for start in range(0, n, slab):
        part = x[start : start + slab]
        _quantize(part, whole[start : start + slab], largest[start // block :], bits, work)
    check_largest(largest, x)
    scales[: largest.numel()].copy_(_scale(largest, bits))
    if bits == 4:
        whole.add_(8)
        codes[:count].copy_(whole[:count])
        high = codes[: n - count]
        high.bitwise_or_(whole[count:].bitwise_left_shift_(4))


def _decode_blocks(data: Tensor, out: Tensor, bits: int, slab: int) -> None:
    n, block = out.numel(), _BLOCK[bits]
    scales, codes = _block_parts(data, n, bits)
    wide = scales.float()
    if bits == 4:
        count = _block_codes_size(n, bits)
        packed = codes.view(torch.uint8)[:count]
        whole = out.new_empty(2 * count, dtype=torch.uint8)
        torch.bitwise_and(packed, 15, out=whole[:count])
        torch.bitwise_right_shift(packed, 4, out=whole[count:])
        codes = whole.view(torch.int8).sub_(8)
    for start in range(0, n, slab):
        part = out[start : start + slab]
        part.copy_(codes[start : start + part.numel()])
        for rows, scale in _blocks(part, wide[start // block :], block):
            rows.mul_(scale)


def _quantize(x: Tensor, whole: Tensor, largest: Tensor, bits: int, work: Tensor) -> None:
    work = work[: x.numel()]
    torch.abs(x, out=work)
    for rows, top in _blocks(work, largest, _BLOCK[bits]):
        torch.amax(rows, 1, keepdim=True, out=top)
    scale = _scale(largest[: -(-x.numel() // _BLOCK[bits])], bits)
    inverse = scale.reciprocal_().masked_fill_(scale == torch.inf, 0.0)
    for (rows, factor), (goal, _) in zip(
        _blocks(x, inverse, _BLOCK[bits]), _blocks(work, inverse, _BLOCK[bits]), strict=True
    ):
        torch.mul(rows, factor, out=goal)
    whole.copy_(work.round_())


def _scale(largest: Tensor, bits: int) -> Tensor:
    # As bf16 holds it, and rounded up, so that the largest number stays within the levels.
    scale = largest * (1.0 / _LEVELS[bits])
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return torch.threshold_(scale, _SMALLEST, 0.0)


def _blocks(x: Tensor, scales: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
    count, rest = divmod(x.numel(), block)
    parts = []
    if count:
        parts.append((x[: count * block].view(count, block), scales[:count].view(count, 1)))
    if rest:
        parts.append((x[count * block :].view(1, rest), scales[count : count + 1].view(1, 1)))
    return parts


def _block_parts(data: Tensor, n: int, bits: int) -> tuple[Tensor, Tensor]:
    middle = _scales_size(n, bits)
    return data[:middle].view(torch.bfloat16), data[middle:].view(torch.int8)


def _scales_size(n: int, bits: int) -> int:
    return 4 * -(-n // (2 * _BLOCK[bits]))


def _block_codes_size(n: int, bits: int) -> int:
    return n if bits == 8 else (n + 1) // 2


# topk: of each chunk of 4096 numbers the largest, two bits each: a sign, and one of two levels.
#
# Bytes of a piece: those of its whole chunks as rows, then those of the last one, which is shorter.
# A chunk: two levels in bf16, the places, the codes in 2 bits each, filled up to a multiple of 4
# bytes. Places are 12 bits each or, where that is shorter (density above 1/12), one bit for every
# number of the chunk; the codes are in the order of the places.
# The idea is SparseLoCo's, Sarfi et al. 2025 (arXiv:2508.15706).


_CHUNK = 4096


def _topk_size(n: int, density: float) -> int:
    whole, rest = divmod(n, _CHUNK)
    return whole * _row_size(_CHUNK, density) + (_row_size(rest, density) if rest else 0)


def _encode_topk(x: Tensor, out: Tensor, density: float) -> None:
    check_magnitude(x)
    for rows, data in _chunks(x, out, density):
        _encode_rows(rows, data, _kept(rows.shape[1], density))


def add_topk(data: Tensor, out: Tensor, density: float, *, weight: float) -> None:
    """Add a piece, times a weight, to numbers in fp32; in the same order everywhere."""
    for rows, part in _chunks(out, data, density):
        kept = _kept(rows.shape[1], density)
        marks, values = _decode_rows(part, rows.shape[1], kept)
        if weight != 1.0:
            values.mul_(weight)
        if _has_bits(rows.shape[1], kept):
            rows.add_(torch.zeros_like(rows).masked_scatter_(marks, values))
        else:
            rows.scatter_add_(1, marks, values)  # each place occurs once in a chunk


def check_topk(data: Tensor, n: int, density: float) -> None:
    """Look whether bytes are such as `encode` writes.

    Raises:
        UnsoundUpdateError: a place lies outside of its chunk, or occurs twice, or the places are
            too many or too few.
    """
    for rows, part in _chunks(data.new_empty(n, dtype=torch.int8), data, density):
        chunk, kept = rows.shape[1], _kept(rows.shape[1], density)
        marks = part[:, 4 : 4 + _places_size(chunk, kept)]
        if _has_bits(chunk, kept):
            if bool((_unpack_bits(marks).sum(1) != kept).any()) or _has_more(marks, chunk):
                raise UnsoundUpdateError(f"a chunk does not mark {kept} places of {chunk}")
            continue
        places = _unpack_places(marks)[:, :kept]
        ordered = places.sort(dim=1).values
        if bool((ordered[:, -1] >= rows.shape[1]).any()):
            raise UnsoundUpdateError("a place lies outside of its chunk")
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise UnsoundUpdateError("a place occurs twice in a chunk")


def _encode_rows(rows: Tensor, data: Tensor, kept: int) -> None:
    chunk = rows.shape[1]
    places = rows.abs().topk(kept, dim=1, sorted=False).indices
    if _has_bits(chunk, kept):
        mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, places, value=True)
        values, marks = rows.masked_select(mask).view(len(rows), kept), _pack_bits(mask)
    else:
        values, marks = rows.gather(1, places), _pack_places(places.to(torch.int32))
    sizes = values.abs()
    is_high = sizes > sizes.mean(1, keepdim=True)
    highs = is_high.sum(1)
    high = (sizes * is_high).sum(1) / highs.clamp(min=1)
    low = (sizes * ~is_high).sum(1) / (kept - highs).clamp(min=1)
    levels = torch.stack([low, high], 1).to(torch.bfloat16)
    levels.masked_fill_(levels < _SMALLEST, 0.0)
    codes = is_high.to(torch.uint8) | (values < 0).to(torch.uint8) << 1
    data[:, :4].copy_(levels.view(torch.uint8))
    end = 4 + _places_size(chunk, kept)
    data[:, 4:end].copy_(marks)
    data[:, end : end + _topk_codes_size(kept)].copy_(_pack_codes(codes))
    data[:, end + _topk_codes_size(kept) :].zero_()


def _decode_rows(data: Tensor, chunk: int, kept: int) -> tuple[Tensor, Tensor]:
    end = 4 + _places_size(chunk, kept)
    levels = data[:, :4].contiguous().view(torch.bfloat16).float()
    if _has_bits(chunk, kept):
        marks = _unpack_bits(data[:, 4:end])[:, :chunk].bool()
    else:
        marks = _unpack_places(data[:, 4:end])[:, :kept]
    packed = data[:, end : end + _topk_codes_size(kept)]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)
    codes = (packed.unsqueeze(2) >> shifts & 3).flatten(1)[:, :kept]
    values = torch.where((codes & 1).bool(), levels[:, 1:], levels[:, :1])
    return marks, torch.where(codes >= 2, -values, values)


def _pack_bits(mask: Tensor) -> Tensor:
    if missing := -mask.shape[1] % 8:
        mask = torch.cat([mask, mask.new_zeros(len(mask), missing)], 1)
    eight = mask.view(torch.uint8).view(len(mask), -1, 8)
    packed = torch.zeros_like(eight[:, :, 0])
    for bit in range(8):
        packed |= eight[:, :, bit] << bit
    return packed


def _unpack_bits(data: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return (data.unsqueeze(2) >> shifts & 1).flatten(1)


def _has_more(marks: Tensor, chunk: int) -> bool:
    return bool(chunk % 8) and bool((marks[:, -1] >> chunk % 8).any())


def _pack_places(places: Tensor) -> Tensor:
    # Two numbers of 12 bits in three bytes.
    if places.shape[1] % 2:
        places = torch.cat([places, places.new_zeros(len(places), 1)], 1)
    first, second = places[:, 0::2], places[:, 1::2]
    three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2)
    return three.to(torch.uint8).flatten(1)


def _unpack_places(data: Tensor) -> Tensor:
    one, two, three = data.reshape(len(data), -1, 3).long().unbind(2)
    return torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], 2).flatten(1)


def _pack_codes(codes: Tensor) -> Tensor:
    if missing := -codes.shape[1] % 4:
        codes = torch.cat([codes, codes.new_zeros(len(codes), missing)], 1)
    one, two, three, four = codes.view(len(codes), -1, 4).unbind(2)
    return one | two << 2 | three << 4 | four << 6


def _chunks(x: Tensor, data: Tensor, density: float) -> list[tuple[Tensor, Tensor]]:
    whole, rest = divmod(x.numel(), _CHUNK)
    row = _row_size(_CHUNK, density)
    parts = []
    if whole:
        numbers = x[: whole * _CHUNK].view(whole, _CHUNK)
        parts.append((numbers, data[: whole * row].view(whole, row)))
    if rest:
        parts.append((x[whole * _CHUNK :].view(1, rest), data[whole * row :].view(1, -1)))
    return parts


def _kept(n: int, density: float) -> int:
    return min(n, max(1, math.ceil(round(n * density, 6))))


def _has_bits(chunk: int, kept: int) -> bool:
    # Whether a bit for every number of a chunk is shorter than the places of those kept.
    return (chunk + 7) // 8 < 3 * ((kept + 1) // 2)


def _places_size(chunk: int, kept: int) -> int:
    return min((chunk + 7) // 8, 3 * ((kept + 1) // 2))


def _topk_codes_size(kept: int) -> int:
    return (kept + 3) // 4


def _row_size(chunk: int, density: float) -> int:
    kept = _kept(chunk, density)
    return 4 * -(-(4 + _places_size(chunk, kept) + _topk_codes_size(kept)) // 4)
