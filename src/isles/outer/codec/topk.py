"""topk: of each chunk of 4096 numbers the largest, two bits each: a sign, and one of two levels.

Bytes of a piece: those of its whole chunks as rows, then those of the last one, which is shorter.
A chunk: two levels in bf16, the places, the codes in 2 bits each, filled up to a multiple of 4
bytes. Places are 12 bits each or, where that is shorter (density above 1/12), one bit for every
number of the chunk; the codes are in the order of the places.
The idea is SparseLoCo's, Sarfi et al. 2025 (arXiv:2508.15706).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isles.outer.base import UnsoundUpdateError, check_magnitude

_CHUNK = 4096
_SMALLEST = 2.0**-100


def size(n: int, density: float) -> int:
    """Bytes of a piece of so many numbers."""
    whole, rest = divmod(n, _CHUNK)
    return whole * _row_size(_CHUNK, density) + (_row_size(rest, density) if rest else 0)


def encode(x: Tensor, out: Tensor, density: float) -> None:
    """See Codec.encode."""
    check_magnitude(x)
    for rows, data in _chunks(x, out, density):
        _encode(rows, data, _kept(rows.shape[1], density))


def add(data: Tensor, out: Tensor, density: float, *, weight: float) -> None:
    """Add a piece, times a weight, to numbers in fp32; in the same order everywhere."""
    for rows, part in _chunks(out, data, density):
        kept = _kept(rows.shape[1], density)
        marks, values = _decode(part, rows.shape[1], kept)
        if weight != 1.0:
            values.mul_(weight)
        if _has_bits(rows.shape[1], kept):
            rows.add_(torch.zeros_like(rows).masked_scatter_(marks, values))
        else:
            rows.scatter_add_(1, marks, values)  # each place occurs once in a chunk


def check(data: Tensor, n: int, density: float) -> None:
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


def _encode(rows: Tensor, data: Tensor, kept: int) -> None:
    """Each row of numbers into its row of bytes."""
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
    data[:, end : end + _codes_size(kept)].copy_(_pack_codes(codes))
    data[:, end + _codes_size(kept) :].zero_()


def _decode(data: Tensor, chunk: int, kept: int) -> tuple[Tensor, Tensor]:
    """Of each row the places, or whether a number is at a place, and the values in that order."""
    end = 4 + _places_size(chunk, kept)
    levels = data[:, :4].contiguous().view(torch.bfloat16).float()
    if _has_bits(chunk, kept):
        marks = _unpack_bits(data[:, 4:end])[:, :chunk].bool()
    else:
        marks = _unpack_places(data[:, 4:end])[:, :kept]
    packed = data[:, end : end + _codes_size(kept)]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)
    codes = (packed.unsqueeze(2) >> shifts & 3).flatten(1)[:, :kept]
    values = torch.where((codes & 1).bool(), levels[:, 1:], levels[:, :1])
    return marks, torch.where(codes >= 2, -values, values)


def _pack_bits(mask: Tensor) -> Tensor:
    """Eight places in a byte."""
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
    """Whether bits are set behind the last place of the chunk."""
    return bool(chunk % 8) and bool((marks[:, -1] >> chunk % 8).any())


def _pack_places(places: Tensor) -> Tensor:
    """Two numbers of 12 bits in three bytes."""
    if places.shape[1] % 2:
        places = torch.cat([places, places.new_zeros(len(places), 1)], 1)
    first, second = places[:, 0::2], places[:, 1::2]
    three = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 2)
    return three.to(torch.uint8).flatten(1)


def _unpack_places(data: Tensor) -> Tensor:
    one, two, three = data.reshape(len(data), -1, 3).long().unbind(2)
    return torch.stack([one | (two & 15) << 8, two >> 4 | three << 4], 2).flatten(1)


def _pack_codes(codes: Tensor) -> Tensor:
    """Four numbers of 2 bits in a byte."""
    if missing := -codes.shape[1] % 4:
        codes = torch.cat([codes, codes.new_zeros(len(codes), missing)], 1)
    one, two, three, four = codes.view(len(codes), -1, 4).unbind(2)
    return one | two << 2 | three << 4 | four << 6


def _chunks(x: Tensor, data: Tensor, density: float) -> list[tuple[Tensor, Tensor]]:
    """Numbers beside their bytes: the whole chunks as rows, and the last one, which is shorter."""
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
    """Whether a bit for every number of a chunk is shorter than the places of those kept."""
    return (chunk + 7) // 8 < 3 * ((kept + 1) // 2)


def _places_size(chunk: int, kept: int) -> int:
    return min((chunk + 7) // 8, 3 * ((kept + 1) // 2))


def _codes_size(kept: int) -> int:
    return (kept + 3) // 4


def _row_size(chunk: int, density: float) -> int:
    kept = _kept(chunk, density)
    return 4 * -(-(4 + _places_size(chunk, kept) + _codes_size(kept)) // 4)
