"""`strategy: {kind: auto}`: what is chosen from size, memory and links, and the reason."""

from __future__ import annotations

from isles.config.auto import Machine, choose_strategy, describe
from isles.config.sections.run import RunConfig
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape
from tests.each import each

LLAMA_8B = load_shape("llama-8b")
SHAPES = {
    "1b": load_shape("llama-1b"),
    "8b": LLAMA_8B,
    "70b": LLAMA_8B
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
}
GIB = 2**30


def run_of(**training: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "llama-8b"},
            "data": {"sources": [{"type": "fake"}], "seq_length": 2048},
            "training": {"max_steps": 1, "gradient_checkpointing": "full", **training},
        }
    )


@each(
    ("size", "ranks", "per_node", "memory_gib", "link", "chosen", "why"),
    [
        ("1b", 8, 8, 80, None, "ddp", "the whole model fits"),
        ("8b", 1, 1, 80, None, "ddp", "one rank"),
        ("8b", 8, 8, 80, 200e9, "FULL_SHARD", "cut over 8 ranks it needs"),
        ("8b", 8, 8, 80, 1e9, "SHARD_GRAD_OP", "links carry"),
        ("8b", 16, 8, 80, 1e9, "HYBRID_SHARD", "8 ranks of a node"),
        ("8b", 16, 8, 24, 1e9, "FULL_SHARD", "cut over 16 ranks it needs"),
        ("70b", 8, 8, 80, 200e9, "FULL_SHARD", "even that may not fit"),
        ("70b", 64, 8, 80, 100e9, "FULL_SHARD", "cut over 64 ranks it needs"),
    ],
)
def test_the_choice_and_its_reason(
    size: str,
    ranks: int,
    per_node: int,
    memory_gib: int,
    link: float | None,
    chosen: str,
    why: str,
) -> None:
    machine = Machine(ranks, per_node, memory_gib * GIB, link)
    strategy, reason = choose_strategy(Architecture.of(SHAPES[size]), run_of(), machine)
    assert describe(strategy).split()[-1] == chosen
    assert why in reason
    assert "\n" not in reason
