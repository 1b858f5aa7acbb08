"""The options that save memory, the cheapest first: the order in `isles plan` and in errors."""

from __future__ import annotations

MEMORY_OPTIONS = {
    "micro_batch_size: auto": "training.micro_batch_size: auto",
    "precision: bf16-mixed": "training.precision: bf16-mixed",
    "optimizer: adamw_8bit": "training.optimizer: adamw_8bit",
    "gradient_checkpointing": "training.gradient_checkpointing: selective, then full, then offload",
    "strategy: {kind: fsdp}": "strategy: {kind: fsdp} over more GPUs",
    "strategy: {kind: ddp, pp_size": "strategy: {kind: ddp, pp_size: N} over N GPUs",
    "adapter: {type: lora}": "adapter: {type: lora}",
    "adapter: {type: qlora}": "adapter: {type: qlora}",
    "precision: bf16-true": "training.precision: bf16-true",
    "strategy: {kind: fsdp, cpu_offload": "strategy: {kind: fsdp, cpu_offload: auto}, then true",
    "seq_length": "a shorter data.seq_length",
}
"""The options in order: the beginning of the name in `isles plan`, and the words of an error."""


def memory_advice() -> str:
    """The fix of an out-of-memory error: all options in order, then a smaller model."""
    options = ", ".join(MEMORY_OPTIONS.values())
    return f"try these in order (`isles plan` computes each): {options}, or a smaller model"
