"""`strategy: {kind: auto}`: what is chosen from size, memory and links, and the reason."""

from __future__ import annotations

import pytest

from isles.config.auto import Machine, choose_strategy, ddp_bytes, describe
from isles.config.sections.training import TrainingConfig
from isles.facts.cost import ModelSize, activation_bytes
from tests.each import each

LLAMA_1B = ModelSize(1_235_814_400, 16, 2048, 128_256)
LLAMA_8B = ModelSize(8_030_261_248, 32, 4096, 128_256)
LLAMA_70B = ModelSize(70_553_706_496, 80, 8192, 128_256)
FULL = TrainingConfig(max_steps=1, gradient_checkpointing="full")
GIB = 2**30


@each(
    ("size", "ranks", "per_node", "memory_gib", "link", "chosen", "why"),
    [
        (LLAMA_1B, 8, 8, 80, None, "ddp", "the whole model fits"),
        (LLAMA_8B, 1, 1, 80, None, "ddp", "one rank"),
        (LLAMA_8B, 8, 8, 80, 200e9, "FULL_SHARD", "cut over 8 ranks it needs"),
        (LLAMA_8B, 8, 8, 80, 1e9, "SHARD_GRAD_OP", "links carry"),
        (LLAMA_8B, 16, 8, 80, 1e9, "HYBRID_SHARD", "8 ranks of a node"),
        (LLAMA_8B, 16, 8, 24, 1e9, "FULL_SHARD", "cut over 16 ranks it needs"),
        (LLAMA_70B, 8, 8, 80, 200e9, "FULL_SHARD", "even that may not fit"),
        (LLAMA_70B, 64, 8, 80, 100e9, "FULL_SHARD", "cut over 64 ranks it needs"),
    ],
)
def test_the_choice_and_its_reason(
    size: ModelSize,
    ranks: int,
    per_node: int,
    memory_gib: int,
    link: float | None,
    chosen: str,
    why: str,
) -> None:
    machine = Machine(ranks, per_node, memory_gib * GIB, link)
    strategy, reason = choose_strategy(size, FULL, 2048, machine)
    assert describe(strategy).split()[-1] == chosen
    assert why in reason
    assert "\n" not in reason


def test_memory_grows_as_it_should() -> None:
    """16 bytes a parameter for AdamW in fp32, and 2 for the 16-bit copy of mixed precision."""
    plain = TrainingConfig(max_steps=1, precision="32-true")
    mixed = TrainingConfig(max_steps=1, precision="bf16-mixed")
    pure = TrainingConfig(max_steps=1, precision="bf16-true")
    for training, per_param in ((plain, 16), (mixed, 18), (pure, 8)):
        small = ddp_bytes(LLAMA_8B, training, 1)
        assert small == pytest.approx(per_param * LLAMA_8B.num_params, rel=0.01)
    options = {"precision": "bf16-mixed"}
    none, selective, full = (
        activation_bytes(LLAMA_8B, 1, 4096, checkpointing=kind, **options)
        for kind in ("none", "selective", "full")
    )
    assert none > selective > full
    assert activation_bytes(LLAMA_8B, 4, 4096, checkpointing="none", **options) == 4 * none
