"""What the memory of a step depends on beside the model: the setting, and who holds what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.facts.memory.forward import FP32

Checkpointing = Literal["none", "selective", "full"]

_USABLE = 0.85
"""Of a rank's memory that a plan may fill; the rest is for the libraries, and for fragmentation."""


@dataclass(frozen=True, slots=True)
class Holding:
    """How a rank holds weights, gradients and optimizer state.

    Args:
        weights, gradients, state: over how many ranks each is cut.
        gathers: what a step gathers of cut weights: `nothing`, `modules` (one at a time), `blocks`
            (two at a time), or `all`, from the forward to the backward pass, or (`backward`) from
            the first backward pass on.
        casts_whole: 16-bit weights are made of fp32 ones as a whole, not by autocast.
        keeps_gradients: gradients have memory before the first backward pass (DDP's buckets).
        second_copy: fp32 weights beside 16-bit ones (DeepSpeed), cut as the state is.
        gradient_width: bytes of a number of a gradient; 0: as of trained weights.
        bucket: numbers of gradients that travel together and have memory of their own.
        bucket_widths: bytes of a number of a bucket, of all its copies: in the forward pass, in the
            backward pass, and at its end.
        offloads_weights, offloads_state: they lie in main memory.
        savers: ranks that divide what each of them holds alike when it is saved.
        tensor, pipeline: over how many ranks matrices, and blocks, are cut.
        stages: of a pipeline's rank; with two, each has half of its blocks.
        returns: the first rank of a pipeline has its last stage too.
        in_flight: how often the first and the last rank of a pipeline have gone forwards through
            one of their stages, and not back yet, at most.
        micro_batches: for each of which a pipeline has a buffer for what travels.
        cuts_ends: whether tensor parallel cuts embedding and head too.
    """

    weights: int = 1
    gradients: int = 1
    state: int = 1
    gathers: Literal["nothing", "modules", "blocks", "backward", "all"] = "nothing"
    casts_whole: bool = False
    keeps_gradients: bool = False
    second_copy: bool = False
    gradient_width: int = 0
    bucket: int = 0
    bucket_widths: tuple[int, int, int] = (0, 0, 0)
    offloads_weights: bool = False
    offloads_state: bool = False
    savers: int = 1
    tensor: int = 1
    pipeline: int = 1
    stages: int = 1
    returns: bool = False
    in_flight: tuple[int, int] = (1, 1)
    micro_batches: int = 0
    cuts_ends: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """What a step's memory depends on, beside the model and how it is held.

    Args:
        precision, optimizer: as in the run file.
        rows: sequences of a micro-batch (of preferences, two for each pair).
        length: tokens of a row on this rank.
        seen: tokens of a row over all ranks that share it.
        gathers_keys: ranks that share a row gather the keys and values of all of it, and mask them.
        swaps_heads: they exchange heads for tokens around attention.
        accumulates: whether a step has several micro-batches: gradients are there from the second.
        is_chunked: whether the loss is computed in chunks, where the model lets it; else from
            whole logits.
        adapter_rank: 0: all weights are trained.
        adapter_targets: matrices that get an adapter, by the ends of their names; None: all.
        adapter_width: bytes of a number of an adapter; 0: as trained weights have.
        block_bits: bits of a number of the frozen matrices of blocks; 0: as other frozen weights.
        has_dropout: of the adapter.
        is_packed: documents that share a row are kept apart.
        trains_ends: embedding and head are trained whole beside an adapter.
        is_cuda: autocast's rules of a GPU.
    """

    precision: str
    optimizer: str
    rows: int
    length: int
    seen: int = 0
    gathers_keys: bool = False
    swaps_heads: bool = False
    checkpointing: Checkpointing = "none"
    accumulates: bool = True
    is_chunked: bool = True
    adapter_rank: int = 0
    adapter_targets: frozenset[str] | None = None
    adapter_width: int = 0
    block_bits: float = 0.0
    has_dropout: bool = False
    is_packed: bool = False
    trains_ends: bool = False
    is_cuda: bool = True

    @property
    def is_whole(self) -> bool:
        """Whether all weights are trained."""
        return self.adapter_rank == 0

    @property
    def is_mixed(self) -> bool:
        return self.precision.endswith("mixed")

    @property
    def trained_width(self) -> int:
        """Bytes of a number of a trained weight."""
        if self.adapter_width:
            return self.adapter_width
        return 2 if self.precision == "bf16-true" else FP32

    @property
    def compute_width(self) -> int:
        """Bytes of a number in matrix products, and of a frozen weight."""
        return FP32 if self.precision == "32-true" else 2


def usable_bytes(memory_bytes: float) -> int:
    """Of a device's memory, what a step may fill."""
    return int(memory_bytes * _USABLE)


def state_bytes(
    blocks: float, ends: float, width: float, optimizer: str, *, short: float = 0.0
) -> float:
    """Optimizer state of trained weights.

    Args:
        blocks, ends: their numbers, in blocks and in embedding and head.
        width: bytes of a number of them.
        short: numbers of them in rows that are too short for codes in 8 bits.
    """
    match optimizer:
        case "adamw_8bit":
            # Two codes, and two fp32 scales for every 256 numbers of a row.
            return (blocks + ends - short) * (2 + 1 / 32) + short * 2 * FP32
        case "sgd":
            return (blocks + ends) * width
        case "muon":
            return (blocks + 2 * ends) * width
        case _:
            return (blocks + ends) * 2 * width
