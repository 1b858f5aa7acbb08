"""Average of one piece over the contributions, as bytes that every cluster decodes identically.

Codecs are named as in `Codec.text`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from isles.outer.codec import (
    Codec,
    UnsoundUpdateError,
    add_topk,
    check_magnitude,
    check_topk,
    parse_codec,
)

Buffer = bytes | bytearray | memoryview

Part = tuple[Buffer, float]
"""One contribution's bytes of a piece, and its weight: the number of tokens it was trained on."""


def size(codec: str, n: int) -> int:
    """Bytes of one contribution's piece of n numbers."""
    return parse_codec(codec).size(n)


def average_size(codec: str, n: int, num_parts: int) -> int:
    """Bytes of the average of a piece of n numbers over `num_parts` contributions."""
    own = parse_codec(codec)
    coded = _average_codec(own)
    return num_parts * (4 + own.size(n)) if coded is None else coded.size(n)


def combine(codec: str, n: int, parts: Sequence[Part]) -> bytes:
    """Compute the weighted average of one piece.

    Args:
        parts: the contributions, in the order of the members' names.

    Returns:
        `average_size` bytes for `decode_average`. Under topk these are the parts themselves and
        their
        weights.

    Raises:
        UnsoundUpdateError: a part has the wrong size, the average is not finite, or the weights are
            invalid.
    """
    return combine_each(codec, n, [weight for _, weight in parts], (data for data, _ in parts))


def combine_each(codec: str, n: int, weights: Sequence[float], datas: Iterable[Buffer]) -> bytes:
    """As `combine`, but takes one contribution's bytes after the other, to save memory."""
    own = parse_codec(codec)
    total_weight = sum(weights)
    if not (weights and min(weights) >= 0 and 0 < total_weight < math.inf):
        raise UnsoundUpdateError(f"cannot average with the weights {[*weights]}")
    shares = torch.tensor([weight / total_weight for weight in weights], dtype=torch.float32)
    tensors = (_tensor(own, n, data) for data in datas)
    coded = _average_codec(own)
    if coded is None:
        return struct.pack(f"<{len(weights)}f", *shares.tolist()) + b"".join(
            tensor.numpy().tobytes() for tensor in tensors
        )
    total = torch.zeros(n)
    one = torch.empty(n)
    if len(weights) == 1 and coded == own:  # unchanged, instead of encoded a second time
        (tensor,) = tensors
        own.decode(tensor, one)
        check_magnitude(one)
        return tensor.numpy().tobytes()
    for weight, tensor in zip(shares.tolist(), tensors, strict=True):
        own.decode(tensor, one)
        total.add_(one.mul_(weight))  # two roundings: no processor may fuse the operations
    encoded = torch.empty(coded.size(n), dtype=torch.uint8)
    coded.encode(total, encoded)
    return encoded.numpy().tobytes()


def decode_average(codec: Codec, data: Tensor, out: Tensor) -> None:
    """Read an average written by `combine`; arguments as in `Codec.decode`."""
    coded = _average_codec(codec)
    if coded is not None:
        coded.decode(data, out)
        return
    if out.dim() > 1:
        for part, own in zip(data, out, strict=True):
            decode_average(codec, part, own)
        return
    each = codec.size(out.numel())
    num_parts = data.numel() // (4 + each)
    assert data.numel() == num_parts * (4 + each), (data.numel(), num_parts, each)
    weights = data[: 4 * num_parts].view(torch.float32).tolist()
    out.zero_()
    for weight, part in zip(weights, data[4 * num_parts :].view(num_parts, each), strict=True):
        add_topk(part, out, codec.density, weight=weight)


def inspect(codec: str, n: int, data: Buffer) -> float:
    """Sum of squares of one contribution's piece, which is checked before averaging.

    Raises:
        UnsoundUpdateError: it has the wrong size, contains bytes that no encoder writes, or a
            number
            that is not finite or too large.
    """
    own = parse_codec(codec)
    tensor = _tensor(own, n, data)
    if own.kind == "topk":
        check_topk(tensor, n, own.density)
    values = torch.empty(n)
    own.decode(tensor, values)
    check_magnitude(values)
    return float(values.double().square().sum())


def inspect_average(codec: str, n: int, data: Buffer) -> float:
    """Sum of squares of one piece of an average made by another process.

    Args:
        data: of the size from `average_size`.

    Raises:
        UnsoundUpdateError: as in `inspect`.
    """
    own, values = parse_codec(codec), torch.empty(n)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if _average_codec(own) is None:
        each = own.size(n)
        for start in range(4 * (len(data) // (4 + each)), len(data), each):
            check_topk(tensor[start : start + each], n, own.density)
    decode_average(own, tensor, values)
    check_magnitude(values)
    return float(values.double().square().sum())


def _average_codec(codec: Codec) -> Codec | None:
    # The average's own error is not fed back, so the average is finer than int4. None: the parts
    # unchanged.
    match codec.kind:
        case "topk":
            return None
        case "int4":
            return Codec("int8")
        case "none" | "bf16" | "int8":
            return codec


def _tensor(codec: Codec, n: int, data: Buffer) -> Tensor:
    if len(data) != codec.size(n):
        raise UnsoundUpdateError(
            f"a piece of {n} numbers has {len(data)} bytes instead of {codec.size(n)} "
            f"({codec.text})"
        )
    # A copy: torch warns about memory that is read-only, such as bytes.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
