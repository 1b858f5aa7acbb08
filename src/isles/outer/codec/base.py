"""What a pseudo-gradient looks like on its way: one piece to bytes and back, in five kinds.

A piece is encoded by itself and has a size that is known beforehand. All who decode the same bytes
get the same bits, on any machine: decoding only converts, and multiplies once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

import torch
from torch import Tensor

from isles.errors import UserError
from isles.outer.base import LARGEST, UnsoundUpdateError, check_magnitude
from isles.outer.codec import blocks, topk

__all__ = ["LARGEST", "Codec", "CodecKind", "UnsoundUpdateError", "parse_codec"]

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
                return blocks.size(n, _bits(self.kind))
            case "topk":
                return topk.size(n, self.density)
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
                blocks.encode(x, out, _bits(self.kind), _slab(x))
            case "topk":
                topk.encode(x, out, self.density)
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
                blocks.decode(data, out, _bits(self.kind), _slab(out))
            case "topk":
                out.zero_()
                topk.add(data, out, self.density, weight=1.0)
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
    """Numbers that are worked on together: on a CPU what its cache holds."""
    return _SLAB if x.device.type == "cpu" else max(1, x.numel())
