"""The section `strategy`: how a cluster holds the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section, Text

Size = Annotated[int, Field(ge=1, le=65_536)]
Bytes = Annotated[int, Field(ge=1, le=10**12)]

PipelineSchedule = Literal["1f1b", "gpipe", "interleaved-1f1b", "zbv"]


class AutoStrategy(Section):
    """isles chooses from the model's size, the memory and the links, and says why in the log."""

    kind: Literal["auto"] = "auto"
    """ddp where the model and its optimizer fit on every GPU, else fsdp."""


class MeshSection(Section):
    """Ranks that share one copy of the model in other ways than by data."""

    tp_size: Size = 1
    """Tensor parallel: ranks over which the matrices of each block are cut."""

    cp_size: Size = 1
    """Context parallel: ranks over which each sequence is cut."""

    cp_method: Literal["allgather", "ulysses"] = "allgather"
    """How ranks that share a sequence exchange it: all keys and values to all, or (ulysses) heads
    for tokens; ulysses needs key-value heads that divide by cp_size."""

    pp_size: Size = 1
    """Pipeline parallel: groups of ranks that hold successive blocks of the model."""

    pp_schedule: PipelineSchedule = "1f1b"
    """Order of the micro-batches in a pipeline. interleaved-1f1b and zbv put two stages on a
    rank: smaller bubbles, more messages."""


class DDPStrategyConfig(MeshSection):
    """Every rank holds the whole model; gradients are averaged (DistributedDataParallel)."""

    kind: Literal["ddp"] = "ddp"
    """The whole model on every rank."""

    bucket_cap_mb: Annotated[float, Field(gt=0, le=100_000)] = 25.0
    """MiB of gradients that travel together. Larger: fewer messages, less overlap."""

    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Gradients travel in this type: half the bytes, rounded."""

    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order: a little faster."""


class FSDPStrategyConfig(MeshSection):
    """Parameters, gradients and optimizer state are cut over the ranks (FSDP2, fully_shard)."""

    kind: Literal["fsdp"] = "fsdp"
    """Sharded, block by block."""

    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"
    ] = "FULL_SHARD"
    """FULL_SHARD: parameters are gathered for each use. SHARD_GRAD_OP: they stay gathered from
    forward to backward. HYBRID_SHARD, HYBRID_SHARD_ZERO2: the same inside groups of shard_size
    ranks, copies between groups. NO_SHARD: copies only."""

    shard_size: Size | None = None
    """HYBRID_SHARD only: ranks that share one copy. null: the ranks of one node."""

    transformer_layer_cls_to_wrap: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Class names of the blocks that are sharded one by one. Default: found in the model."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in the CPU's memory; slow, fits more."""

    forward_prefetch: Annotated[int, Field(ge=0, le=16)] = 0
    """Blocks that are gathered ahead in the forward pass, beyond the one FSDP2 always does."""

    backward_prefetch: Annotated[int, Field(ge=0, le=16)] = 0
    """The same in the backward pass."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients travel; bf16 halves the bytes, and rounds."""


class DeepSpeedStrategyConfig(Section):
    """DeepSpeed ZeRO; needs `pip install 'isles[deepspeed]'`."""

    kind: Literal["deepspeed"] = "deepspeed"
    """Sharded by DeepSpeed."""

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 2
    """1: optimizer state is cut over the ranks; 2: gradients too; 3: parameters too."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer state lies. nvme: ZeRO-3 only."""

    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters lie while unused. ZeRO-3 only."""

    nvme_path: Text | None = None
    """Folder on a fast disk for offloading to nvme."""

    reduce_bucket_size: Bytes = 500_000_000
    """Gradient elements that are reduced together."""

    allgather_bucket_size: Bytes = 500_000_000
    """Parameter elements that are gathered together (stages 1 and 2)."""

    overlap_comm: bool = True
    """Reduce gradients while the backward pass goes on."""

    config_file: Text | None = None
    """A DeepSpeed JSON file that is used as it is; its `"auto"` values come from the run file, and
    what contradicts the run file is refused."""


StrategyConfig = Annotated[
    AutoStrategy | DDPStrategyConfig | FSDPStrategyConfig | DeepSpeedStrategyConfig,
    Field(discriminator="kind"),
]
