"""Settings that the memory of a step depends on, and the sharding of a rank's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isles.facts.memory.forward import FP32

Checkpointing = Literal["none", "selective", "full", "offload"]

BUCKET_NUMBERS = 2**23
"""Numbers that the ranks of a pipeline send together after the backward pass: 32 MiB in fp32."""

_USABLE = 0.85
"""Share of a rank's memory that a plan may use. The rest is for libraries and fragmentation."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Sharding of weights, gradients and optimizer state on a rank.

    Args:
        weights, gradients, state: number of ranks that each is sharded over.
        gathers: sharded weights that a step gathers: `nothing`, `modules` (one at a time), `blocks`
            (two at a time), `all` (from the forward to the backward pass), or `backward` (from the
            first backward pass on); `copies`: no weights are sharded, but 16-bit copies of all
            fp32 weights exist in both passes.
        casts_whole: 16-bit weights are a whole copy of the fp32 weights, not made by autocast.
        keeps_gradients: gradients have memory before the first backward pass (DDP's buckets).
        second_copy: fp32 weights in addition to 16-bit weights (DeepSpeed), sharded as the state.
        gradient_width: bytes per number of a gradient. 0 means the width of trained weights.
        bucket: numbers of gradients that are sent together and have their own memory.
        bucket_widths: bytes per number of a bucket, over all its copies: in the forward pass, in
            the backward pass, and at its end.
        offloaded_weights, offloaded_state: share of the blocks whose weights (and gradients), and
            optimizer state, are in main memory. 1: the whole model.
        savers: ranks that divide their equal tensors among each other for a checkpoint.
        tensor, pipeline: number of ranks that share matrices, and blocks.
        stages: stages per rank of a pipeline. With two, each has half of the rank's blocks.
        returns: the first rank of a pipeline also has its last stage.
        cut: layers of each stage of a pipeline. Empty: for ranks of equal speed.
        in_flight: for each rank of a pipeline, the most forward passes through one of its stages
            without a backward pass yet.
        micro_batches: number of micro-batches. A pipeline has buffers for each of them.
        cuts_ends: whether tensor parallel also shards embedding and head.
    """

    weights: int = 1
    gradients: int = 1
    state: int = 1
    gathers: Literal["nothing", "copies", "modules", "blocks", "backward", "all"] = "nothing"
    casts_whole: bool = False
    keeps_gradients: bool = False
    second_copy: bool = False
    gradient_width: int = 0
    bucket: int = 0
    bucket_widths: tuple[int, int, int] = (0, 0, 0)
    offloaded_weights: float = 0.0
    offloaded_state: float = 0.0
    savers: int = 1
    tensor: int = 1
    pipeline: int = 1
    stages: int = 1
    returns: bool = False
    cut: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = (1,)
    micro_batches: int = 0
    cuts_ends: bool = True


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """Settings that a step's memory depends on, except the model and its sharding.

    Args:
        precision, optimizer: as in the run file.
        rows: sequences of a micro-batch (for preferences, two for each pair).
        length: tokens of a row on this rank.
        seen: tokens of a row over all ranks that share it.
        gathers_keys: ranks that share a row gather its keys and values.
        swaps_heads: these ranks exchange heads for tokens around attention.
        accumulates: whether a step has several micro-batches, so that gradients exist from the
            second on.
        is_chunked: whether the loss is computed in chunks, if the model supports it. Otherwise it
            needs the whole logits.
        adapter_rank: rank of the adapter. 0: all weights are trained.
        adapter_targets: matrices with an adapter, by the ends of their names. None: all.
        adapter_experts: stacked matrices of experts with an adapter, by the ends of their names.
        adapter_width: bytes per number of an adapter. 0 means the width of trained weights.
        block_bits: bits per number of the blocks' frozen matrices. 0: same as other frozen weights.
        has_dropout: whether the adapter has dropout.
        is_packed: documents that share a row are isolated.
        trains_ends: embedding and head are fully trained in addition to an adapter.
        is_cuda: autocast's rules for a GPU.
        gpu_bytes: memory of the GPU, which decides how many tokens the loss computes at the same
            time; 0 on a CPU, or if unknown.
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
    adapter_experts: frozenset[str] = frozenset()
    adapter_width: int = 0
    block_bits: float = 0.0
    has_dropout: bool = False
    is_packed: bool = False
    trains_ends: bool = False
    is_cuda: bool = True
    gpu_bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """True if all weights are trained."""
        return self.adapter_rank == 0

    @property
    def computes_again(self) -> bool:
        """True if the backward pass computes whole blocks again."""
        return self.checkpointing in ("full", "offload")

    @property
    def is_mixed(self) -> bool:
        return self.precision.endswith("mixed")

    @property
    def trained_width(self) -> int:
        """Bytes per number of a trained weight."""
        if self.adapter_width:
            return self.adapter_width
        return 2 if self.precision == "bf16-true" else FP32

    @property
    def compute_width(self) -> int:
        """Bytes per number in matrix products, and of a frozen weight."""
        return FP32 if self.precision == "32-true" else 2


def usable_bytes(memory_bytes: float) -> int:
    """Bytes of a device's memory that a step may use."""
    return int(memory_bytes * _USABLE)


def state_bytes(
    blocks: float, ends: float, width: float, optimizer: str, *, short: float = 0.0
) -> float:
    """Bytes of the optimizer state of trained weights.

    Args:
        blocks, ends: trained numbers in blocks, and in embedding and head.
        width: bytes per number of these weights.
        short: numbers of these weights in rows that are too short for 8-bit codes.
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
