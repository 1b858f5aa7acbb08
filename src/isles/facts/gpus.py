"""The GPU table: speed, memory and power of GPUs, with a source for each row."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal

Products = Literal["16-bit", "tf32", "fp32"]
"""The type that matrices are multiplied in."""

TF32_CAPABILITY = (8, 0)
"""The oldest NVIDIA compute capability whose tensor cores multiply fp32 matrices in TF32."""

BF16_CAPABILITY = (8, 0)
"""The oldest NVIDIA compute capability whose tensor cores compute in bf16. torch emulates bf16 on
older GPUs, 5 to 20 times slower."""

FP8_CAPABILITY = (8, 9)
"""The oldest NVIDIA compute capability whose tensor cores compute in fp8."""

_WITH_FP8 = ("B200", "H200", "H100", "L4", "RTX PRO", "RTX 4", "RTX 5")
"""How names of Ada, Hopper and Blackwell GPUs begin. `Ada` is in the names of other Ada GPUs."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a device does not suit a `training.precision`.

    Args:
        what: the sentence after the name of the precision. `{}` is the device, or several.
        limit: the oldest compute capability that suits, such as `sm_80`.
        fix: for the user.
    """

    what: str
    limit: str
    fix: str


def lacking(
    precision: str, capability: tuple[int, ...] | None, *, is_nvidia: bool = True
) -> Lack | None:
    """Why a device does not suit a precision, or None if it does.

    Args:
        capability: compute capability of the GPU. None: a CPU.
    """
    is_old = is_nvidia and capability is not None and tuple(capability) < BF16_CAPABILITY
    fix = f"use training.precision: {'fp16-mixed' if is_old else 'bf16-mixed'}"
    if precision.startswith("bf16") and is_old:
        what = "needs bf16, which is missing on {}. torch emulates it, 5 to 20 times slower"
        return Lack(what, "sm_80", fix)
    if not precision.startswith("fp8"):
        return None
    if not is_nvidia:
        return Lack("was never tried on AMD GPUs, such as {}", "sm_89", fix)
    if capability is None or tuple(capability) < FP8_CAPABILITY:
        what = "needs fp8, which is missing on {}. NVIDIA GPUs have it from compute capability 8.9 "
        return Lack(what + "on, such as L4, RTX 4090 and H100", "sm_89", fix)
    return None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    Args:
        name: name by the vendor, matched inside the name that the driver reports.
        bf16_flops: dense bf16 (fp16 if bf16 is missing) tensor FLOP/s with fp32 accumulation.
        memory_bytes: memory of the GPU.
        bandwidth_bytes_per_s: memory bandwidth.
        source: document with the figures.
        watts: default power limit (TDP, TGP or TBP).
        fp32_flops: FLOP/s in fp32 without tensor cores. 0: unknown.
        has_bf16: the tensor cores compute in bf16; without it, bf16 is emulated and slow.
        nvlink_bytes_per_s: to the other GPUs of the machine, in one direction. 0: over PCIe.
    """

    name: str
    bf16_flops: float
    memory_bytes: int
    bandwidth_bytes_per_s: float
    source: str
    watts: float
    fp32_flops: float = 0.0
    nvlink_bytes_per_s: float = 0.0
    has_bf16: bool = True

    def flops(self, products: Products) -> float:
        """FLOP/s of matrix products, or 0 if unknown."""
        match products:
            case "16-bit":
                return self.bf16_flops
            case "tf32" if self.has_bf16 and not self.source.startswith(_AMD):
                # Half of bf16 in every data sheet. torch uses no TF32 on AMD GPUs.
                return max(self.fp32_flops, self.bf16_flops / 2)
            case _:
                return self.fp32_flops

    @property
    def has_fp8(self) -> bool:
        """True if its tensor cores compute in fp8, at twice the speed of bf16."""
        return self.name.startswith(_WITH_FP8) or " Ada" in self.name

    @property
    def is_nvidia(self) -> bool:
        return not self.name.startswith("MI")

    @property
    def capability(self) -> tuple[int, int]:
        """The oldest compute capability that has the number formats of this GPU."""
        if self.has_fp8:
            return FP8_CAPABILITY
        return BF16_CAPABILITY if self.has_bf16 else (0, 0)


def _gpu(
    name: str,
    tflops: float,
    memory_gb: int,
    bandwidth_gb_s: float,
    watts: float,
    source: str,
    *,
    fp32: float = 0.0,
    nvlink: float = 0.0,
    has_bf16: bool = True,
) -> Gpu:
    return Gpu(
        name,
        tflops * 1e12,
        memory_gb * 2**30,
        bandwidth_gb_s * 1e9,
        source,
        watts,
        fp32_flops=fp32 * 1e12,
        nvlink_bytes_per_s=nvlink * 1e9,
        has_bf16=has_bf16,
    )


def _geforce(
    name: str, sms: int, boost_ghz: float, memory_gb: int, bandwidth: float, watts: float
) -> Gpu:
    # An SM of these makes 512 FLOPs per clock in tensor cores with fp32 accumulation, and half of
    # that in fp32. With these figures, the rows of the whitepapers (3070 to 3090 Ti, 4080, 4090,
    # 5070 to 5090) match to the last digit.
    generation = {"3": _AMPERE, "4": _ADA, "5": _BLACKWELL}[name[4]]
    tflops = sms * boost_ghz * 0.512
    source = f"NVIDIA's product page (SMs, boost clock); FLOPs per clock: {generation}"
    return _gpu(name, tflops, memory_gb, bandwidth, watts, source, fp32=tflops / 2)


def _turing(
    name: str, sms: int, boost_ghz: float, memory_gb: int, bandwidth: float, watts: float
) -> Gpu:
    # As newer GeForce cards, but in fp32 a quarter of the rate in fp16.
    tflops = sms * boost_ghz * 0.512
    source = f"NVIDIA's product page (SMs, boost clock); {_TURING} (fp16 FLOPs per clock)"
    fp32 = tflops / 4
    return _gpu(name, tflops, memory_gb, bandwidth, watts, source, fp32=fp32, has_bf16=False)


def _laptop(
    name: str, sms: int, boost_ghz: float, memory_gb: int, bandwidth: float, watts: float
) -> Gpu:
    # The name that nvidia-smi prints. Boost clock and watts are the highest for laptops: with a
    # lower power limit, which each laptop sets itself, the card is slower.
    return _geforce(f"RTX {name} Laptop GPU", sms, boost_ghz, memory_gb, bandwidth, watts)


def _workstation_laptop(
    name: str, fp32: float, memory_gb: int, bandwidth: float, watts: float
) -> Gpu:
    # Their tensor cores make four FLOPs in bf16 for one in fp32. Figures are for the most watts.
    source = "NVIDIA's list of RTX GPUs for mobile workstations (fp32 at the highest power)"
    return _gpu(f"RTX {name} Laptop GPU", 4 * fp32, memory_gb, bandwidth, watts, source, fp32=fp32)


_BLACKWELL_HGX = "NVIDIA HGX B200 datasheet (half of the sparse figure)"
_BLACKWELL = "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, appendices A to C"
_HOPPER = "NVIDIA H100/H200 datasheets"
_ADA = "NVIDIA Ada GPU architecture whitepaper v2, appendix A (FP16 tensor, FP32 accumulate)"
_AMPERE = "NVIDIA Ampere GA102 whitepaper v2, table 2/appendix A (BF16 tensor, FP32 accumulate)"
_TURING = "NVIDIA Turing GPU architecture whitepaper, appendix A (FP16 tensor, FP32 accumulate)"
_A100 = "NVIDIA A100 datasheet"
_V100 = "NVIDIA V100 datasheet (fp16)"
_AMD = "AMD Instinct data sheets (dense)"

# The longer name first: `H100 PCIe` is tried before `H100`.
GPUS: tuple[Gpu, ...] = (
    _gpu("B200", 2250, 180, 8000, 1000, _BLACKWELL_HGX, fp32=75, nvlink=900),
    _gpu("H200", 989.4, 141, 4800, 700, _HOPPER, fp32=67, nvlink=450),
    _gpu("H100 PCIe", 756, 80, 2000, 350, _HOPPER, fp32=51),
    _gpu("H100 NVL", 835, 94, 3900, 400, _HOPPER, fp32=60, nvlink=300),
    _gpu("H100", 989.4, 80, 3350, 700, _HOPPER, fp32=67, nvlink=450),
    _gpu("A100-SXM4-80GB", 312, 80, 2039, 400, _A100, fp32=19.5, nvlink=300),
    _gpu("A100 80GB PCIe", 312, 80, 1935, 300, _A100, fp32=19.5),
    _gpu("A100-PCIE-40GB", 312, 40, 1555, 250, _A100, fp32=19.5),
    _gpu("A100", 312, 40, 1555, 400, _A100, fp32=19.5, nvlink=300),
    _gpu("L40S", 362, 48, 864, 350, "NVIDIA L40S datasheet", fp32=91.6),
    _gpu("L40", 181, 48, 864, 300, "NVIDIA L40 datasheet", fp32=90.5),
    _gpu("L4", 121, 24, 300, 72, "NVIDIA L4 datasheet (half of the sparse figure)", fp32=30.3),
    _gpu("A10G", 70, 24, 600, 300, "AWS G5 instance page"),
    _gpu("A10", 125, 24, 600, 150, "NVIDIA A10 datasheet", fp32=31.2),
    _gpu("A40", 149.7, 48, 696, 300, "NVIDIA A40 datasheet", fp32=37.4),
    _gpu("V100-SXM2-16GB", 125, 16, 900, 300, _V100, fp32=15.7, nvlink=150, has_bf16=False),
    _gpu("V100-PCIE-16GB", 112, 16, 900, 250, _V100, fp32=14, has_bf16=False),
    _gpu("V100-PCIE-32GB", 112, 32, 900, 250, _V100, fp32=14, has_bf16=False),
    _gpu("V100", 125, 32, 900, 300, _V100, fp32=15.7, nvlink=150, has_bf16=False),
    _gpu("T4", 65, 16, 320, 70, "NVIDIA T4 datasheet (fp16)", fp32=8.1, has_bf16=False),
    _gpu("RTX PRO 6000", 503.8, 96, 1792, 600, "NVIDIA RTX Blackwell PRO whitepaper", fp32=126),
    _gpu("RTX 6000 Ada", 364.2, 48, 960, 300, "NVIDIA RTX 6000 Ada datasheet", fp32=91.1),
    _gpu("RTX A6000", 154.8, 48, 768, 300, f"{_AMPERE}, appendix C", fp32=38.7),
    _gpu(
        "RTX A5000", 111.1, 24, 768, 230, "NVIDIA RTX A5000 datasheet (half of sparse)", fp32=27.8
    ),
    _gpu("RTX A4000", 76.7, 16, 448, 140, "NVIDIA RTX A4000 datasheet (half of sparse)", fp32=19.2),
    _geforce("RTX 5090", 170, 2.407, 32, 1792, 575),
    _geforce("RTX 5080", 84, 2.617, 16, 960, 360),
    _geforce("RTX 5070 Ti", 70, 2.452, 16, 896, 300),
    _geforce("RTX 5070", 48, 2.512, 12, 672, 250),
    _geforce("RTX 5060 Ti 16GB", 36, 2.572, 16, 448, 180),
    _geforce("RTX 5060 Ti", 36, 2.572, 8, 448, 180),
    _geforce("RTX 5060", 30, 2.497, 8, 448, 145),
    _gpu("RTX 4090", 165.2, 24, 1008, 450, _ADA, fp32=82.6),
    _geforce("RTX 4080 SUPER", 80, 2.55, 16, 736, 320),
    _gpu("RTX 4080", 97.5, 16, 717, 320, _ADA, fp32=48.7),
    _geforce("RTX 4070 Ti SUPER", 66, 2.61, 16, 672, 285),
    _geforce("RTX 4070 Ti", 60, 2.61, 12, 504, 285),
    _geforce("RTX 4070 SUPER", 56, 2.475, 12, 504, 220),
    _geforce("RTX 4070", 46, 2.475, 12, 504, 200),
    _geforce("RTX 4060 Ti 16GB", 34, 2.535, 16, 288, 165),
    _geforce("RTX 4060 Ti", 34, 2.535, 8, 288, 160),
    _geforce("RTX 4060", 24, 2.46, 8, 272, 115),
    _gpu("RTX 3090 Ti", 80, 24, 1008, 450, _AMPERE, fp32=40),
    _gpu("RTX 3090", 71, 24, 936, 350, _AMPERE, fp32=35.6),
    _geforce("RTX 3080 Ti", 80, 1.665, 12, 912, 350),
    _gpu("RTX 3080", 59.5, 10, 760, 320, _AMPERE, fp32=29.8),
    _geforce("RTX 3070 Ti", 48, 1.77, 8, 608, 290),
    _gpu("RTX 3070", 40.6, 8, 448, 220, _AMPERE, fp32=20.3),
    _geforce("RTX 3060 Ti", 38, 1.665, 8, 448, 200),
    _geforce("RTX 3060", 28, 1.777, 12, 360, 170),
    _geforce("RTX 3050", 20, 1.777, 8, 224, 130),
    _gpu("TITAN RTX", 130.5, 24, 672, 280, f"{_TURING} (fp16)", fp32=16.3, has_bf16=False),
    _turing("RTX 2080 Ti", 68, 1.545, 11, 616, 250),
    _turing("RTX 2080 SUPER", 48, 1.815, 8, 496, 250),
    _turing("RTX 2080", 46, 1.71, 8, 448, 215),
    _turing("RTX 2070 SUPER", 40, 1.77, 8, 448, 215),
    _turing("RTX 2070", 36, 1.62, 8, 448, 175),
    _turing("RTX 2060 SUPER", 34, 1.65, 8, 448, 175),
    _turing("RTX 2060", 30, 1.68, 6, 336, 160),
    # Laptop cards of this series without Max-Q have the names of the desktop cards.
    _turing("RTX 2080 Super with Max-Q Design", 48, 1.23, 8, 352, 90),
    _turing("RTX 2080 with Max-Q Design", 46, 1.23, 8, 384, 90),
    _turing("RTX 2070 Super with Max-Q Design", 40, 1.155, 8, 352, 80),
    _turing("RTX 2070 with Max-Q Design", 36, 1.305, 8, 384, 90),
    _turing("RTX 2060 with Max-Q Design", 30, 1.185, 6, 264, 65),
    _laptop("5090", 82, 2.16, 24, 896, 150),
    _laptop("5080", 60, 2.287, 16, 896, 150),
    _laptop("5070 Ti", 46, 2.22, 12, 672, 115),
    _laptop("5070", 36, 2.347, 8, 384, 100),
    _laptop("5060", 26, 2.497, 8, 384, 100),
    _laptop("5050", 20, 2.662, 8, 384, 100),
    _laptop("4090", 76, 2.04, 16, 576, 150),
    _laptop("4080", 58, 2.28, 12, 432, 150),
    _laptop("4070", 36, 2.175, 8, 256, 115),
    _laptop("4060", 24, 2.37, 8, 256, 115),
    _laptop("4050", 20, 2.37, 6, 192, 115),
    _laptop("3080 Ti", 58, 1.59, 16, 512, 150),
    _laptop("3080", 48, 1.71, 8, 448, 150),
    _laptop("3070 Ti", 46, 1.485, 8, 448, 125),
    _laptop("3070", 40, 1.62, 8, 448, 125),
    _laptop("3060", 30, 1.703, 6, 336, 115),
    _laptop("3050 Ti", 20, 1.695, 4, 192, 80),
    _laptop("3050 6GB", 20, 1.492, 6, 168, 80),
    _laptop("3050", 16, 1.74, 4, 192, 80),
    _workstation_laptop("5000 Ada Generation", 42.6, 16, 576, 175),
    _workstation_laptop("4000 Ada Generation", 33.6, 12, 432, 175),
    _workstation_laptop("3500 Ada Generation", 23.0, 12, 432, 140),
    _workstation_laptop("3000 Ada Generation", 19.9, 8, 256, 140),
    _workstation_laptop("2000 Ada Generation", 14.5, 8, 256, 140),
    _workstation_laptop("1000 Ada Generation", 12.1, 6, 192, 140),
    _workstation_laptop("500 Ada Generation", 9.2, 4, 128, 60),
    _workstation_laptop("A5500", 24.7, 16, 512, 165),
    _workstation_laptop("A5000", 21.7, 16, 448, 165),
    _workstation_laptop("A4500", 18.5, 16, 512, 140),
    _workstation_laptop("A4000", 17.8, 8, 384, 140),
    _workstation_laptop("A3000", 12.8, 6, 264, 130),
    _workstation_laptop("A2000", 9.3, 4, 192, 95),
    _gpu("MI300X", 1307.4, 192, 5300, 750, _AMD, fp32=163.4),
    # The driver shows one of its two dies.
    _gpu("MI250X", 191.5, 64, 1638, 280, f"{_AMD}, one of two dies", fp32=23.9),
)

_OTHER_CARDS = {"SUPER", "Ti", "Laptop", "Max", "Mobile", "D"}
"""Words after a name that make it a different GPU."""


def find_gpu(reported_name: str) -> Gpu | None:
    """The row for a name reported by the driver, or None. Never a guess.

    A row matches only if its name appears as whole words. So an `RTX 4080 SUPER` or a `Laptop GPU`
    does not match the plain GPU.
    """
    reported = reported_name.replace("NVIDIA", "").replace("GeForce", "").replace("Tesla", "")
    words = reported.replace("-", " ").split()
    for gpu in GPUS:
        wanted = gpu.name.replace("-", " ").split()
        for start in range(len(words) - len(wanted) + 1):
            if words[start : start + len(wanted)] == wanted and not (
                _OTHER_CARDS & set(words[start + len(wanted) :])
            ):
                return gpu
    return None


def named_gpu(text: str) -> Gpu:
    """The row for a short name: `4090`, `3070ti`, `a100-80`, `4060ti-16` or `rtx a6000`.

    KeyError: none, or more than one. Its arguments are the nearest short names.
    """
    wanted = _plain(text)
    named = {_plain(name): gpu for gpu in GPUS for name in (gpu.name, *_SHORT.get(gpu.name, ()))}
    if wanted in named:
        return named[wanted]
    names = list(dict.fromkeys(map(short_name, GPUS)))
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    inside = [name for name in names if wanted and wanted in name]
    raise KeyError(*dict.fromkeys([*inside[:3], *near]))


def short_name(gpu: Gpu) -> str:
    """Short name of a GPU for the command line: `4090`, `3070ti`, `h100`."""
    return _SHORT.get(gpu.name, (_plain(gpu.name),))[0]


_SHORT = {
    "A100-SXM4-80GB": ("a100-80", "a100 80gb", "a100-sxm-80"),
    "A100": ("a100-40", "a100", "a100 40gb"),
    "A100 80GB PCIe": ("a100-80-pcie",),
    "A100-PCIE-40GB": ("a100-40-pcie",),
    "H100": ("h100", "h100-80", "h100 sxm", "h100-sxm5"),
    "V100-SXM2-16GB": ("v100-16", "v100 16gb"),
    "V100": ("v100-32", "v100", "v100 32gb"),
    "RTX 6000 Ada": ("6000ada", "rtx6000ada"),
    "RTX A6000": ("a6000",),
    "RTX A5000": ("a5000",),
    "RTX A4000": ("a4000",),
    "RTX PRO 6000": ("pro6000", "rtxpro6000"),
    "RTX 4060 Ti 16GB": ("4060ti-16",),
    "RTX 5060 Ti 16GB": ("5060ti-16",),
    "RTX 4060 Ti": ("4060ti", "4060ti-8"),
    "RTX 5060 Ti": ("5060ti", "5060ti-8"),
}


def _laptop_words(gpu: Gpu) -> tuple[str, ...]:
    # 4070-laptop, a5000m, 2000ada-mobile, 2080-maxq; spaces are ignored.
    name = gpu.name.removeprefix("RTX ").lower().replace(" ", "").replace("generation", "")
    if gpu.name.endswith(" Laptop GPU"):
        word = name.removesuffix("laptopgpu")
        ends = ("-laptop", "m", "-mobile", "-laptop-gpu")
        return tuple(f"{start}{word}{end}" for start in ("", "rtx") for end in ends)
    word = name.removesuffix("withmax-qdesign")
    return (f"{word}-maxq",) if word != name else ()


_SHORT |= {gpu.name: words for gpu in GPUS if (words := _laptop_words(gpu))}


def _plain(name: str) -> str:
    # GeForce GPUs by their number alone.
    plain = re.sub(r"nvidia|geforce|tesla|amd|instinct|[\s_-]", "", name.lower())
    return re.sub(r"^rtx(?=\d{4}(?!ada))", "", plain)


_LEAST_DRIVERS = {11: 450, 12: 525, 13: 580}


def least_driver(cuda: str) -> int | None:
    """The oldest branch of NVIDIA's driver for programs of a CUDA version. None: unknown.

    Source: CUDA Toolkit Release Notes, minimum driver versions for minor version compatibility.
    """
    major = cuda.partition(".")[0]
    return _LEAST_DRIVERS.get(int(major)) if major.isdecimal() else None
