"""The section `strategy`: how the ranks of a cluster share the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.sections.base import Section, Text

Size = Annotated[int, Field(ge=1, le=65_536)]
Bytes = Annotated[int, Field(ge=1, le=10**12)]

PipelineSchedule = Literal["1f1b", "gpipe", "interleaved-1f1b", "zbv"]


class AutoStrategy(Section):
    """The fastest of ddp and fsdp that fits on every GPU, by estimate. The log shows the reason."""

    kind: Literal["auto"] = "auto"
    """isles chooses the kind."""

    pp_size: Size | Literal["auto"] = 1
    """auto: if neither ddp nor fsdp fits, a pipeline over all ranks of the cluster, which may be
    unequal."""


class MeshSection(Section):
    """Tensor, context and pipeline parallelism: ranks that share one copy of the model."""

    tp_size: Size = 1
    """Tensor parallel: ranks that shard the matrices of each block."""

    cp_size: Size = 1
    """Context parallel: ranks that shard each sequence."""

    cp_method: Literal["allgather", "ulysses"] = "allgather"
    """allgather: every context-parallel rank gets all keys and values. ulysses: ranks exchange
    heads for tokens, so cp_size must divide the key-value heads."""

    pp_size: Size = 1
    """Pipeline parallel: groups of ranks, each with successive blocks of the model."""

    pp_schedule: PipelineSchedule = "1f1b"
    """Order of the micro-batches in a pipeline. interleaved-1f1b and zbv put two stages on each
    rank, with smaller bubbles and more messages."""


class DDPStrategyConfig(MeshSection):
    """Every rank holds the whole model, and the ranks average their gradients."""

    kind: Literal["ddp"] = "ddp"
    """The whole model on every rank."""

    bucket_cap_mb: Annotated[float, Field(gt=0, le=100_000)] = 25.0
    """MiB of gradients in one message. Fewer, larger messages overlap less with the backward
    pass."""

    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Send gradients in this type: half the bytes, with rounding."""

    static_graph: bool = False
    """Assume that every step uses the same parameters in the same order, which is a little
    faster."""


class FSDPStrategyConfig(MeshSection):
    """The ranks shard parameters, gradients and optimizer state (FSDP2, fully_shard)."""

    kind: Literal["fsdp"] = "fsdp"
    """Sharded, block by block."""

    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD"
    ] = "FULL_SHARD"
    """FULL_SHARD gathers parameters for each use. SHARD_GRAD_OP keeps them gathered from forward to
    backward. HYBRID_SHARD is FULL_SHARD within groups of shard_size ranks, and HYBRID_SHARD_ZERO2
    is SHARD_GRAD_OP within them. NO_SHARD keeps a full copy on each rank."""

    shard_size: Size | None = None
    """With HYBRID_SHARD: ranks that share one copy. Default: the ranks of one node."""

    transformer_layer_cls_to_wrap: Annotated[tuple[Text, ...], Field(strict=False)] = ()
    """Class names of the blocks to shard one by one. Default: isles finds them."""

    cpu_offload: bool | Literal["auto"] = False
    """Keep parameters, gradients and optimizer state in CPU memory, for a larger model. Slower.
    auto does so on each GPU only for the blocks that do not fit on it, so that the smallest GPU
    does not decide."""

    forward_prefetch: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of blocks to gather early in the forward pass. 0 leaves this to FSDP2."""

    backward_prefetch: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of blocks to gather early in the backward pass. 0 leaves this to FSDP2."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of gradients in messages. bf16 halves the bytes, with rounding."""


class DeepSpeedStrategyConfig(Section):
    """DeepSpeed ZeRO; needs `pip install 'isles[deepspeed]'`."""

    kind: Literal["deepspeed"] = "deepspeed"
    """DeepSpeed shards the model."""

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 2
    """1 shards the optimizer state, 2 also gradients, 3 also parameters."""

    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where to keep the optimizer state. nvme needs ZeRO-3."""

    offload_param: Literal["none", "cpu", "nvme"] = "none"
    """Where to keep unused parameters. Needs ZeRO-3."""

    nvme_path: Text | None = None
    """Folder on a fast disk for offload to nvme."""

    reduce_bucket_size: Bytes = 500_000_000
    """Gradient elements in one reduction."""

    allgather_bucket_size: Bytes = 500_000_000
    """Parameter elements in one all-gather (stages 1 and 2)."""

    overlap_comm: bool = True
    """Reduce gradients during the backward pass."""

    config_file: Text | None = None
    """A DeepSpeed JSON file. Its `"auto"` values come from the run file, and no value may
    contradict the run file."""


StrategyConfig = Annotated[
    AutoStrategy | DDPStrategyConfig | FSDPStrategyConfig | DeepSpeedStrategyConfig,
    Field(discriminator="kind"),
]
