"""topk: of each chunk of 4096 numbers the largest, two bits each: a sign, and one of two levels.

Bytes of a piece: those of its whole chunks as rows, then those of the last one, which is shorter.
A chunk: two levels in bf16, the places in 12 bits each, the codes in 2 bits each, filled up to a
multiple of 4 bytes. The idea is SparseLoCo's, Sarfi et al. 2025 (arXiv:2508.15706).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isles.outer.unsound import UnsoundUpdateError, check_magnitude

_CHUNK = 4096
_SMALLEST = 2.0**-100


def size(n: int, density: float) -> int:
    """Bytes of a piece of so many numbers."""
    whole, rest = divmod(n, _CHUNK)
    return whole * _row_size(_kept(_CHUNK, density)) + (
        _row_size(_kept(rest, density)) if rest else 0
    )


def encode(x: Tensor, out: Tensor, density: float) -> None:
    """See Codec.encode."""
    check_magnitude(x)
    for rows, data in _chunks(x, out, density):
        _encode(rows, data, _kept(rows.shape[1], density))


def add(data: Tensor, out: Tensor, density: float, *, weight: float) -> None:
    """Add a piece, times a weight, to numbers in fp32; in the same order everywhere."""
    for rows, part in _chunks(out, data, density):
        places, values = _decode(part, _kept(rows.shape[1], density))
        if weight != 1.0:
            values.mul_(weight)
        rows.scatter_add_(1, places, values)  # each place occurs once in a chunk


def check(data: Tensor, n: int, density: float) -> None:
    """Look whether bytes are such as `encode` writes.

    Raises:
        UnsoundUpdateError: a place lies outside of its chunk, or occurs twice.
    """
    for rows, part in _chunks(data.new_empty(n, dtype=torch.int8), data, density):
        places, _ = _decode(part, _kept(rows.shape[1], density))
        ordered = places.sort(dim=1).values
        if bool((ordered[:, -1] >= rows.shape[1]).any()):
            raise UnsoundUpdateError("a place lies outside of its chunk")
        if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise UnsoundUpdateError("a place occurs twice in a chunk")


def _encode(rows: Tensor, data: Tensor, kept: int) -> None:
    """Each row of numbers into its row of bytes."""
    places = rows.abs().topk(kept, dim=1, sorted=False).indices
    values = rows.gather(1, places)
    sizes = values.abs()
    is_high = sizes > sizes.mean(1, keepdim=True)
    highs = is_high.sum(1)
    high = (sizes * is_high).sum(1) / highs.clamp(min=1)
    low = (sizes * ~is_high).sum(1) / (kept - highs).clamp(min=1)
    levels = torch.stack([low, high], 1).to(torch.bfloat16)
    levels.masked_fill_(levels < _SMALLEST, 0.0)
    codes = is_high.to(torch.uint8) | (values < 0).to(torch.uint8) << 1
    data[:, :4].copy_(levels.view(torch.uint8))
    end = 4 + _places_size(kept)
    data[:, 4:end].copy_(_pack_places(places.to(torch.int32)))
    data[:, end : end + _codes_size(kept)].copy_(_pack_codes(codes))
    data[:, end + _codes_size(kept) :].zero_()


def _decode(data: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Places and values of each row."""
    end = 4 + _places_size(kept)
    levels = data[:, :4].contiguous().view(torch.bfloat16).float()
    places = _unpack_places(data[:, 4:end])[:, :kept]
    packed = data[:, end : end + _codes_size(kept)]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)
    codes = (packed.unsqueeze(2) >> shifts & 3).flatten(1)[:, :kept]
    values = levels.gather(1, (codes & 1).long())
    return places, torch.where(codes >= 2, -values, values)


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
    row = _row_size(_kept(_CHUNK, density))
    parts = []
    if whole:
        numbers = x[: whole * _CHUNK].view(whole, _CHUNK)
        parts.append((numbers, data[: whole * row].view(whole, row)))
    if rest:
        parts.append((x[whole * _CHUNK :].view(1, rest), data[whole * row :].view(1, -1)))
    return parts


def _kept(n: int, density: float) -> int:
    return min(n, max(1, math.ceil(round(n * density, 6))))


def _places_size(kept: int) -> int:
    return 3 * ((kept + 1) // 2)


def _codes_size(kept: int) -> int:
    return (kept + 3) // 4


def _row_size(kept: int) -> int:
    return 4 * -(-(4 + _places_size(kept) + _codes_size(kept)) // 4)
