"""The GPU table: dense tensor-core speed and memory, each row with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    Args:
        name: as the vendor writes it; matched inside the name that the driver reports.
        bf16_flops: dense bf16 (fp16 where there is no bf16) tensor FLOP/s with fp32 accumulation.
        memory_bytes: memory on the card.
        bandwidth_bytes_per_s: memory bandwidth.
        source: the document that the figures stand in.
    """

    name: str
    bf16_flops: float
    memory_bytes: int
    bandwidth_bytes_per_s: float
    source: str


def _gpu(name: str, tflops: float, memory_gb: int, bandwidth_gb_s: float, source: str) -> Gpu:
    return Gpu(name, tflops * 1e12, memory_gb * 2**30, bandwidth_gb_s * 1e9, source)


_HOPPER = "NVIDIA H100/H200 datasheets"
_ADA = "NVIDIA Ada GPU architecture whitepaper v2, appendix A (FP16 tensor, FP32 accumulate)"
_AMPERE = "NVIDIA Ampere GA102 whitepaper v2, table 2/appendix A (BF16 tensor, FP32 accumulate)"

# The longer name first: `H100 PCIe` is tried before `H100`.
GPUS: tuple[Gpu, ...] = (
    _gpu("H200", 989.4, 141, 4800, _HOPPER),
    _gpu("H100 PCIe", 756, 80, 2000, _HOPPER),
    _gpu("H100 NVL", 835, 94, 3900, _HOPPER),
    _gpu("H100", 989.4, 80, 3350, _HOPPER),
    _gpu("A100-SXM4-80GB", 312, 80, 2039, "NVIDIA A100 datasheet"),
    _gpu("A100 80GB PCIe", 312, 80, 1935, "NVIDIA A100 datasheet"),
    _gpu("A100", 312, 40, 1555, "NVIDIA A100 datasheet"),
    _gpu("L40S", 362, 48, 864, "NVIDIA L40S datasheet"),
    _gpu("L40", 181, 48, 864, "NVIDIA L40 datasheet"),
    _gpu("L4", 121, 24, 300, "NVIDIA L4 datasheet (half of the sparse figure)"),
    _gpu("A10G", 70, 24, 600, "AWS G5 instance page"),
    _gpu("A10", 125, 24, 600, "NVIDIA A10 datasheet"),
    _gpu("A40", 149.7, 48, 696, "NVIDIA A40 datasheet"),
    _gpu("V100", 125, 32, 900, "NVIDIA V100 datasheet (fp16)"),
    _gpu("T4", 65, 16, 320, "NVIDIA T4 datasheet (fp16)"),
    _gpu("RTX 4090", 165.2, 24, 1008, _ADA),
    _gpu("RTX 4080", 97.5, 16, 717, _ADA),
    _gpu("RTX 3090 Ti", 80, 24, 1008, _AMPERE),
    _gpu("RTX 3090", 71, 24, 936, _AMPERE),
    _gpu("RTX 3080", 59.5, 10, 760, _AMPERE),
    _gpu("RTX 3070", 40.6, 8, 448, _AMPERE),
)


def find_gpu(reported_name: str) -> Gpu | None:
    """The row for a name as the driver reports it, or None: never a guess.

    A row matches only where its name stands as whole words, so that an `RTX 4080 SUPER` or a
    `Laptop GPU` is not taken for the plain card.
    """
    reported = reported_name.replace("NVIDIA", "").replace("GeForce", "").replace("Tesla", "")
    words = reported.replace("-", " ").split()
    for gpu in GPUS:
        wanted = gpu.name.replace("-", " ").split()
        for start in range(len(words) - len(wanted) + 1):
            if words[start : start + len(wanted)] == wanted and not (
                {"SUPER", "Ti", "Laptop", "Max", "Mobile"} & set(words[start + len(wanted) :])
            ):
                return gpu
    return None
