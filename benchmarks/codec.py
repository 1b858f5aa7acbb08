"""Speed of the codecs between clusters on one core, against a plain copy loop in torch.

    python benchmarks/codec.py [--quick|--smoke]

A model's worth of numbers is encoded and decoded piece by piece, as a cluster does it, and averaged
over three contributions, as the hub does it. In the same rounds the same numbers are copied
in a loop, piece by piece. One thread; seconds are those of its own CPU time, so that whatever else
the machine does counts less, and the median over the rounds is told. GB/s are of fp32: 4 bytes for
each number, whatever the codec makes of it; for an average, of all contributions together. The
relative error is that of one contribution, of numbers with a normal distribution: the norm of what
is lost over the norm of what was meant, before anything is fed back.

The last line is JSON:
    copy_gb_per_s: of the copy loop.
    int8_encode_gb_per_s, int8_decode_gb_per_s.
    int8_over_copy: seconds of encoding over those of copying, the median of the rounds' ratios.
    sizes, errors: of each codec, bytes over those of fp32, and relative errors.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import common
import torch
from torch import Tensor

from isles.outer.average import combine, decode_average
from isles.outer.codec import Codec, parse_codec
from isles.outer.layout import PIECE_NUMBERS

KINDS = ("none", "bf16", "int8", "int4", "topk", "topk:0.02")
CLUSTERS = 3


class Bench:
    """One codec over all pieces.

    Args:
        codec: which one.
        numbers: what is encoded.
    """

    def __init__(self, codec: Codec, numbers: Tensor) -> None:
        self.codec = codec
        self.pieces = torch.split(numbers, PIECE_NUMBERS)
        self.out = torch.split(torch.empty_like(numbers), PIECE_NUMBERS)
        size = codec.size(PIECE_NUMBERS)
        self.encoded = [torch.zeros(size, dtype=torch.uint8) for _ in self.pieces]
        self.averages: list[Tensor] = []

    def encode(self) -> None:
        """All pieces, into bytes."""
        for piece, data in zip(self.pieces, self.encoded, strict=True):
            self.codec.encode(piece, data)

    def decode(self) -> None:
        """And back."""
        for data, out in zip(self.encoded, self.out, strict=True):
            self.codec.decode(data, out)

    def average(self) -> None:
        """A quarter of the pieces, over three contributions that are alike."""
        parts = [data.numpy().tobytes() for data in self.encoded[: len(self.encoded) // 4]]
        self.averages = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for data in (
                combine(self.codec.text, PIECE_NUMBERS, [(part, 1.0)] * CLUSTERS) for part in parts
            )
        ]

    def decode_average(self) -> None:
        """What every cluster does with it."""
        for data, out in zip(self.averages, self.out, strict=False):
            decode_average(self.codec, data, out)

    def error(self) -> float:
        """Relative, of what one encoding loses."""
        self.decode()
        lost = sum(
            float((piece - out).double().square().sum())
            for piece, out in zip(self.pieces, self.out, strict=True)
        )
        meant = sum(float(piece.double().square().sum()) for piece in self.pieces)
        return float((lost / meant) ** 0.5)


def seconds(work: Callable[[], None]) -> float:
    """CPU time of this thread."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def main() -> None:
    """Measure, and print the table."""
    options = common.make_parser(__doc__, quick="fewer numbers and rounds").parse_args()
    torch.set_num_threads(1)
    num_pieces, rounds = common.pick(options, full=(16, 9), quick=(4, 5), smoke=(4, 1))
    numbers = torch.randn(num_pieces * PIECE_NUMBERS, generator=torch.Generator().manual_seed(0))
    gigabytes = 4e-9 * numbers.numel()
    target = torch.split(torch.empty_like(numbers), PIECE_NUMBERS)

    def copy() -> None:
        for piece, out in zip(torch.split(numbers, PIECE_NUMBERS), target, strict=True):
            out.copy_(piece)

    benches = {kind: Bench(parse_codec(kind), numbers) for kind in KINDS}
    works: dict[str, tuple[Callable[[], None], float]] = {"copy": (copy, gigabytes)}
    for kind, bench in benches.items():
        works[f"{kind} encode"] = bench.encode, gigabytes
        works[f"{kind} decode"] = bench.decode, gigabytes
        works[f"{kind} average"] = bench.average, gigabytes / 4 * CLUSTERS
        works[f"{kind} apply"] = bench.decode_average, gigabytes / 4
    taken: dict[str, list[float]] = {name: [] for name in works}
    for index in range(rounds + 1):
        for name, (work, _) in works.items():
            if name.startswith("topk") and index > 3:
                continue  # slow, and not what is compared
            spent = seconds(work)
            if index:  # the first round touches the memory
                taken[name].append(spent)
    speed = {name: works[name][1] / statistics.median(taken[name]) for name in works}

    print(f"{num_pieces} pieces of {PIECE_NUMBERS} numbers, {rounds} rounds, one thread, GB/s fp32")
    print(f"copy loop {speed['copy']:.2f}\n")
    print("codec        size    error    encode  decode  average   apply")
    for kind, bench in benches.items():
        size = bench.codec.size(PIECE_NUMBERS) / (4 * PIECE_NUMBERS)
        parts = [speed[f"{kind} {what}"] for what in ("encode", "decode", "average", "apply")]
        columns = "".join(f"{part:8.2f}" for part in parts)
        print(f"{kind:11} {size:6.2%} {bench.error():8.1e} {columns}")
    pairs = zip(taken["int8 encode"], taken["copy"], strict=True)
    sizes = {kind: b.codec.size(PIECE_NUMBERS) / (4 * PIECE_NUMBERS) for kind, b in benches.items()}
    common.print_figures(
        {
            "copy_gb_per_s": round(speed["copy"], 2),
            "int8_encode_gb_per_s": round(speed["int8 encode"], 2),
            "int8_decode_gb_per_s": round(speed["int8 decode"], 2),
            "int8_over_copy": round(statistics.median(own / copy for own, copy in pairs), 2),
            "sizes": sizes,
            "errors": {kind: bench.error() for kind, bench in benches.items()},
        },
        digits=5,
    )


if __name__ == "__main__":
    main()
