"""Codecs of a pseudo-gradient: one piece to bytes and back, in five kinds.

A piece is encoded independently, and its size is known in advance. All decoders of the same bytes
get the same bits, on any machine: decoding only converts, and multiplies once. Pieces of equal size
may be the rows of one tensor. topk needs the CPU, and other codecs run on any device.

Letters of shapes: P pieces, N numbers in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from isles.config.sections.outer import CodecName
from isles.errors import UserError

LARGEST = 2.0**126
"""Largest magnitude that a codec accepts, so that no sum or scale overflows in fp32."""

_DENSITY, _DECAY = 0.4, 0.95
_SLAB = 1 << 19
"""Numbers processed at a time: fits a processor's cache; a multiple of all block sizes."""


class UnsoundUpdateError(ValueError):
    """An update that must not be averaged; the text has the reason."""


def is_sound(x: Tensor) -> bool:
    """True if all numbers are finite and not too large."""
    least, largest = torch.aminmax(x)
    return bool((least >= -LARGEST) & (largest <= LARGEST))  # both false for NaN


def check_magnitude(x: Tensor) -> None:
    """Raise UnsoundUpdateError if a number is not finite or too large; the text has the first such
    number."""
    if is_sound(x):
        return
    index = int((~(x.abs() <= LARGEST)).nonzero()[0])
    raise UnsoundUpdateError(
        f"number {index} of {x.numel()} is {float(x[index])}; it must be finite, up to "
        f"{LARGEST:.0e}"
    )


@dataclass(frozen=True, slots=True)
class Codec:
    """Conversion of numbers to bytes.

    none: fp32 unchanged. bf16: rounded. int8: one scale per 128 numbers. int4: one scale per 32.
    topk: the largest numbers of each 4096, with two bits each, and their positions.
    """

    kind: CodecName
    density: float = _DENSITY
    """topk: fraction of the numbers that is sent, 0 to 1."""

    @property
    def text(self) -> str:
        """The codec as a word for `parse_codec`; equal only for equal codecs."""
        return f"topk:{self.density!r}" if self.kind == "topk" else self.kind

    @property
    def feeds_back(self) -> bool:
        """True if an encoding's error is added to the next encoding."""
        match self.kind:
            case "none" | "bf16":
                return False
            case "int8" | "int4" | "topk":
                return True

    @property
    def decay(self) -> float:
        """Factor of the error that is added to the next encoding; for topk as in SparseLoCo."""
        return _DECAY if self.kind == "topk" else 1.0

    @property
    def needs_cpu(self) -> bool:
        """True if a GPU cannot encode: numpy packs the positions, and a GPU adds in other order."""
        return self.kind == "topk"

    def size(self, n: int) -> int:
        """Bytes of a piece of n numbers: a multiple of 4."""
        match self.kind:
            case "none":
                return 4 * n
            case "bf16":
                return _filled(2 * n)
            case "int8":
                return _scales_size(n, 8) + _filled(n)
            case "int4":
                return _scales_size(n, 4) + _filled((n + 1) // 2)
            case "topk":
                whole, rest = divmod(n, _CHUNK)
                last = _Chunk(rest, self.density).size if rest else 0
                return whole * _Chunk(_CHUNK, self.density).size + last
            case _:
                assert_never(self.kind)

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write a piece as bytes.

        Args:
            x: [N] in fp32, contiguous.
            out: [size(N)] in uint8, contiguous, at a multiple of 4 bytes.

        Raises:
            UnsoundUpdateError: a number is not finite, or larger than `LARGEST`.
        """
        check_magnitude(x)
        self.write(x, out)

    def write(self, x: Tensor, out: Tensor) -> None:
        """Encode without a check: [N] as [size(N)], or [P, N] as [P, size(N)]."""
        n = x.shape[-1]
        assert x.dtype == torch.float32 and out.shape[-1] == self.size(n), (x.dtype, out.shape, n)
        match self.kind:
            case "none":
                out.view(torch.float32).copy_(x)
            case "bf16":
                narrow = out.view(torch.bfloat16)
                narrow[..., :n].copy_(x)
                narrow[..., n:].zero_()
            case "int8":
                _encode_blocks(x, out, 8)
            case "int4":
                _encode_blocks(x, out, 4)
            case "topk":
                for piece, own in zip(x.view(-1, n), out.view(-1, out.shape[-1]), strict=True):
                    for chunk, rows, data in _chunks(piece, own, self.density):
                        chunk.encode(rows, data)
            case _:
                assert_never(self.kind)

    def decode(self, data: Tensor, out: Tensor) -> None:
        """Decode a piece that `encode` wrote; same arguments, opposite direction."""
        n = out.shape[-1]
        assert out.dtype == torch.float32 and data.shape[-1] == self.size(n), (data.shape, n)
        match self.kind:
            case "none":
                out.copy_(data.view(torch.float32))
            case "bf16":
                out.copy_(data.view(torch.bfloat16)[..., :n])
            case "int8":
                _decode_blocks(data, out, 8)
            case "int4":
                _decode_blocks(data, out, 4)
            case "topk":
                out.zero_()
                for part, own in zip(data.view(-1, data.shape[-1]), out.view(-1, n), strict=True):
                    add_topk(part, own, self.density, weight=1.0)
            case _:
                assert_never(self.kind)


def parse_codec(text: str) -> Codec:
    """The codec for a word: none, bf16, int8, int4, topk or topk:DENSITY."""
    kind, _, density = text.partition(":")
    try:
        if kind == "topk":
            codec = Codec("topk", float(density or _DENSITY))
            if 0.0 < codec.density <= 1.0:
                return codec
        elif not density and kind in get_args(CodecName):
            return Codec(kind)  # type: ignore[arg-type]  # it is one of the kinds
    except ValueError:
        pass
    raise UserError(
        f"unknown codec {text!r}",
        where="outer.codec",
        fix=f"use one of {', '.join(get_args(CodecName))}; topk:0.1 sends 10 % of the numbers",
    )


def _filled(num_bytes: int) -> int:
    return 4 * -(-num_bytes // 4)


# int8 and int4: whole numbers and one scale for each block.
#
# Bytes of a piece of N numbers: the blocks' scales in bf16, then the integers; each part is padded
# with zeros to a multiple of 4. int8: one byte each. int4: the first half in the low four bits, the
# second half in the high four bits. The error is at most 1/254 (int8) or 1/14 (int4) of a block's
# largest number.

_BLOCK = {8: 128, 4: 32}
_LEVELS = {8: 127, 4: 7}

_SMALLEST = 2.0**-100
"""Smaller scales become 0, so that no product is denormal: some processors flush those to zero."""


def _scales_size(n: int, bits: int) -> int:
    return _filled(2 * -(-n // _BLOCK[bits]))


def _encode_blocks(x: Tensor, out: Tensor, bits: int) -> None:
    n, block = x.shape[-1], _BLOCK[bits]
    out.zero_()
    middle = _scales_size(n, bits)
    scales, codes = out[..., :middle].view(torch.bfloat16), out[..., middle:].view(torch.int8)
    whole = codes[..., :n] if bits == 8 else codes.new_zeros(*codes.shape[:-1], n + n % 2)
    for start, stop in _slabs(x):
        part = x[..., start:stop]
        missing = (start - stop) % block
        rows = torch.unflatten(pad(part, (0, missing)) if missing else part, -1, (-1, block))
        scale = rows.abs().amax(-1).mul_(1.0 / _LEVELS[bits])
        # In bf16, and rounded up, so that the largest number stays within the levels.
        scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
        torch.threshold_(scale, _SMALLEST, 0.0)
        scales[..., start // block :][..., : scale.shape[-1]].copy_(scale)
        inverse = scale.reciprocal_().masked_fill_(scale == torch.inf, 0.0)
        levels = torch.mul(rows, inverse.unsqueeze(-1)).round_().flatten(-2)
        whole[..., start:stop].copy_(levels[..., : stop - start])
    if bits == 4:
        low, high = whole.add_(8)[..., : (n + 1) // 2], whole[..., (n + 1) // 2 :]
        codes[..., : low.shape[-1]].copy_(low | high << 4)


def _decode_blocks(data: Tensor, out: Tensor, bits: int) -> None:
    n, block = out.shape[-1], _BLOCK[bits]
    middle = _scales_size(n, bits)
    scales, codes = data[..., :middle].view(torch.bfloat16).float(), data[..., middle:]
    if bits == 4:
        packed = codes[..., : (n + 1) // 2]
        codes = torch.cat([packed & 15, packed >> 4], -1).view(torch.int8).sub_(8)
    codes = codes.view(torch.int8)
    for start, stop in _slabs(out):
        part = out[..., start:stop]
        part.copy_(codes[..., start:stop])
        factors = scales[..., start // block : -(-stop // block)].unsqueeze(-1)
        blocks = (stop - start) // block
        rows = torch.unflatten(part[..., : blocks * block], -1, (blocks, block))
        rows.mul_(factors[..., :blocks, :])
        part[..., blocks * block :].mul_(factors[..., -1, :])


def _slabs(x: Tensor) -> Iterator[tuple[int, int]]:
    # Positions in the last dimension.
    n = x.shape[-1]
    size = _SLAB if x.is_cpu else n
    return ((start, min(start + size, n)) for start in range(0, n, size))


# topk: the largest of each chunk of 4096 numbers, two bits each: a sign, and one of two levels.
#
# Bytes of a piece: its whole chunks as rows, then the last chunk, which is shorter. A chunk: two
# levels in bf16, the positions, the codes with 2 bits each, padded to a multiple of 4 bytes.
# Positions have 12 bits each or, if that is shorter (density above 1/12), one bit for every number
# of the chunk; they ascend, and the codes are in their order.
# The idea is SparseLoCo's, Sarfi et al. 2025 (arXiv:2508.15706).

_CHUNK = 4096
_PLACE_BITS = 12


class _Chunk:
    """Format of chunks of `count` numbers with `kept` numbers sent.

    Letters: R chunks, C numbers in each, K kept ones.
    """

    def __init__(self, count: int, density: float) -> None:
        self.count = count
        self.kept = min(count, max(1, math.ceil(round(count * density, 6))))
        self.is_mask = count < _PLACE_BITS * self.kept
        marks = -(-min(count, _PLACE_BITS * self.kept) // 8)
        self.codes_at = 4 + marks
        self.codes_end = self.codes_at + -(-2 * self.kept // 8)
        self.size = _filled(self.codes_end)

    def encode(self, rows_RC: Tensor, data: Tensor) -> None:
        # Unsorted is enough: the mask brings the positions into ascending order.
        largest_RK = rows_RC.abs().topk(self.kept, dim=1, sorted=False).indices
        mask_RC = torch.zeros_like(rows_RC, dtype=torch.bool).scatter_(1, largest_RK, value=True)
        places_RK = mask_RC.nonzero()[:, 1].view(-1, self.kept)
        values_RK = rows_RC.gather(1, places_RK)
        sizes_RK = values_RK.abs()
        is_high_RK = sizes_RK > sizes_RK.mean(1, keepdim=True)
        highs = is_high_RK.sum(1)
        high = (sizes_RK * is_high_RK).sum(1) / highs.clamp(min=1)
        low = (sizes_RK * ~is_high_RK).sum(1) / (self.kept - highs).clamp(min=1)
        levels = torch.stack([low, high], 1).to(torch.bfloat16)
        levels.masked_fill_(levels < _SMALLEST, 0.0)
        data.zero_()
        data[:, :4].copy_(levels.view(torch.uint8))
        marks = _pack(mask_RC, 1) if self.is_mask else _pack(places_RK, _PLACE_BITS)
        data[:, 4 : self.codes_at].copy_(marks)
        codes_RK = is_high_RK.to(torch.uint8) | (values_RK < 0).to(torch.uint8) << 1
        data[:, self.codes_at : self.codes_end].copy_(_pack(codes_RK, 2))

    def places(self, data: Tensor) -> Tensor:
        """[R, K]; see `check`."""
        if self.is_mask:
            mask_RC = _unpack(data[:, 4 : self.codes_at], 1, self.count)
            return mask_RC.nonzero()[:, 1].view(-1, self.kept)
        return _unpack(data[:, 4 : self.codes_at], _PLACE_BITS, self.kept).long()

    def values(self, data: Tensor) -> Tensor:
        """[R, K], in fp32."""
        levels = data[:, :4].contiguous().view(torch.bfloat16).float()
        codes_RK = _unpack(data[:, self.codes_at : self.codes_end], 2, self.kept)
        values_RK = torch.where((codes_RK & 1).bool(), levels[:, 1:], levels[:, :1])
        return torch.where(codes_RK >= 2, -values_RK, values_RK)

    def check(self, data: Tensor) -> None:
        """Raise an error for positions that no encoder writes."""
        if self.is_mask:
            marks = data[:, 4 : self.codes_at]
            mask = _unpack(marks, 1, 8 * marks.shape[1])
            if bool((mask.sum(1) != self.kept).any()) or bool(mask[:, self.count :].any()):
                raise UnsoundUpdateError(
                    f"a chunk does not mark {self.kept} positions of {self.count}"
                )
            return
        ordered_RK = self.places(data).sort(dim=1).values
        if bool((ordered_RK[:, -1] >= self.count).any()):
            raise UnsoundUpdateError("a position is outside of its chunk")
        if bool((ordered_RK[:, 1:] == ordered_RK[:, :-1]).any()):
            raise UnsoundUpdateError("a position occurs twice in a chunk")


def add_topk(data: Tensor, out: Tensor, density: float, *, weight: float) -> None:
    """Add a piece, times a weight, to numbers in fp32; in the same order everywhere."""
    for chunk, rows, part in _chunks(out, data, density):
        values = chunk.values(part)
        if weight != 1.0:
            values.mul_(weight)
        rows.scatter_add_(1, chunk.places(part), values)  # each position occurs once in a chunk


def check_topk(data: Tensor, n: int, density: float) -> None:
    """Check that bytes have the form of `encode`'s output; raises UnsoundUpdateError otherwise."""
    for chunk, _, part in _chunks(torch.empty(n, dtype=torch.int8), data, density):
        chunk.check(part)


def _chunks(x: Tensor, data: Tensor, density: float) -> Iterator[tuple[_Chunk, Tensor, Tensor]]:
    # The whole chunks of numbers and bytes as rows, then the last one, which is shorter.
    whole, rest = divmod(x.numel(), _CHUNK)
    chunk = _Chunk(_CHUNK, density)
    end, data_end = whole * _CHUNK, whole * chunk.size
    if whole:
        yield chunk, x[:end].view(whole, -1), data[:data_end].view(whole, -1)
    if rest:
        yield _Chunk(rest, density), x[end:].view(1, -1), data[data_end:].view(1, -1)


def _pack(numbers: Tensor, bits: int) -> Tensor:
    # Rows of integers as rows of bytes, with `bits` bits of each, the lowest first.
    ones = numbers.to(torch.int16).numpy()[:, :, np.newaxis] >> np.arange(bits, dtype=np.int16) & 1
    packed = np.packbits(ones.reshape(len(ones), -1).astype(bool), axis=1, bitorder="little")
    return torch.from_numpy(packed)


def _unpack(data: Tensor, bits: int, count: int) -> Tensor:
    # The first `count` numbers of each row that `_pack` wrote, in int16.
    ones = np.unpackbits(data.numpy(), axis=1, count=count * bits, bitorder="little")
    powers = np.left_shift(1, np.arange(bits), dtype=np.int16)
    return torch.from_numpy(ones.reshape(len(ones), count, bits) @ powers)
