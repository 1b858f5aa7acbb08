"""int8 and int4: whole numbers and one scale for each block.

Bytes of a piece of N numbers: the blocks' scales in bf16, then the whole numbers; each of the two
filled up with zeros to a multiple of 4. int8: one byte each. int4: the first half in the low four
bits, the second half in the high ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isles.outer.base import check_largest

_BLOCK = {8: 128, 4: 32}
_LEVELS = {8: 127, 4: 7}

_SMALLEST = 2.0**-100
"""A smaller scale is 0: so no product is denormal, which some processes flush to zero."""


def size(n: int, bits: int) -> int:
    """Bytes of a piece of so many numbers."""
    return _scales_size(n, bits) + 4 * -(-_codes_size(n, bits) // 4)


def encode(x: Tensor, out: Tensor, bits: int, slab: int) -> None:
    """See Codec.encode. A block's largest number is met to 1/254 (int8) or 1/14 of it (int4).

    Args:
        x: [N] in fp32.
        out: the bytes.
        bits: 8 or 4.
        slab: numbers that are worked on together: a multiple of all blocks.
    """
    n, block = x.numel(), _BLOCK[bits]
    count = _codes_size(n, bits)
    scales, codes = _parts(out, n, bits)
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


def decode(data: Tensor, out: Tensor, bits: int, slab: int) -> None:
    """See Codec.decode; the arguments as for `encode`."""
    n, block = out.numel(), _BLOCK[bits]
    scales, codes = _parts(data, n, bits)
    wide = scales.float()
    if bits == 4:
        count = _codes_size(n, bits)
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
    """One slab: `whole` gets the numbers, `largest` its blocks' largest from the first on."""
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
    """What a block's whole numbers are multiplied with: as bf16 holds it, and rounded up, so that
    the largest stays within the levels."""
    scale = largest * (1.0 / _LEVELS[bits])
    scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return torch.threshold_(scale, _SMALLEST, 0.0)


def _blocks(x: Tensor, scales: Tensor, block: int) -> list[tuple[Tensor, Tensor]]:
    """The whole blocks of x as rows beside their scales, and the last one, which is shorter."""
    count, rest = divmod(x.numel(), block)
    parts = []
    if count:
        parts.append((x[: count * block].view(count, block), scales[:count].view(count, 1)))
    if rest:
        parts.append((x[count * block :].view(1, rest), scales[count : count + 1].view(1, 1)))
    return parts


def _parts(data: Tensor, n: int, bits: int) -> tuple[Tensor, Tensor]:
    """Scales and whole numbers, each with what fills it up."""
    middle = _scales_size(n, bits)
    return data[:middle].view(torch.bfloat16), data[middle:].view(torch.int8)


def _scales_size(n: int, bits: int) -> int:
    return 4 * -(-n // (2 * _BLOCK[bits]))


def _codes_size(n: int, bits: int) -> int:
    return n if bits == 8 else (n + 1) // 2
