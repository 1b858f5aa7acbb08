"""The memory of a step on paper beside peaks that other projects measured and published.

    python benchmarks/plan_published.py [--smoke]       # the same, as it takes a second

All of these are torch's max_memory_allocated (or its active bytes), of trainers that differ from
isles: whole logits in most, an AdamW whose step makes a temporary of a weight's size, other code of
models. Each is described to the formula by its own settings; nothing is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from common import make_parser, print_figures

from isles.facts.memory.architecture import Architecture
from isles.facts.memory.setting import Holding, MemorySettings
from isles.facts.memory.step import Count, memory_of

BAR = 0.10
GIB, GB = 2**30, 1e9


def _llama(hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


LLAMA_7B = _llama(4096, 32, 32, 32, 11008, 32000)
LLAMA_13B = _llama(5120, 40, 40, 40, 13824, 32000)
LLAMA_70B = _llama(8192, 80, 64, 8, 28672, 32000)
LLAMA_8B = _llama(4096, 32, 32, 8, 14336, 128256)
LLAMA_3B = _llama(3072, 28, 24, 8, 8192, 128256) | {"tie_word_embeddings": True}
MISTRAL = _llama(4096, 32, 32, 8, 14336, 32000) | {"model_type": "mistral"}
POWERLM = _llama(2304, 40, 36, 36, 9216, 49152) | {
    "model_type": "granite",
    "tie_word_embeddings": True,
}

FMS = "foundation-model-stack/fms-acceleration, scripts/benchmarks/refs/a100_80gb"
LITGPT = "Lightning-AI/litgpt at 8641822, tutorials/resource-tables.md"
FSDP_QLORA = "AnswerDotAI/fsdp_qlora at 50efa1e, benchmarks_03_2024.md"
COOKBOOK = "meta-llama/llama-cookbook, pull request 41"
TORCHTUNE = "pytorch/torchtune, README.md"

PURE = MemorySettings("bf16-true", "adamw", 4, 4096, checkpointing="full", accumulates=False)
WHOLE = replace(PURE, is_chunked=False)
QKVO = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
LORA = replace(WHOLE, adapter_rank=16, adapter_targets=QKVO, adapter_width=4, has_dropout=True)
QLORA = replace(LORA, precision="bf16-mixed", block_bits=4.127)
LITGPT_LORA = replace(
    PURE,
    rows=1,
    length=1304,
    checkpointing="none",
    adapter_rank=8,
    adapter_targets=frozenset({"q_proj", "v_proj"}),
    has_dropout=True,
)
QLORA_LORA = replace(
    WHOLE,
    rows=1,
    adapter_rank=64,
    adapter_targets=frozenset({"k_proj", "q_proj", "v_proj", "up_proj", "down_proj", "gate_proj"}),
    has_dropout=True,
)
TUNE = replace(PURE, rows=2, is_chunked=False)


def _fsdp(ranks: int) -> Holding:
    return Holding(ranks, ranks, ranks, gathers="blocks", casts_whole=True)


@dataclass(frozen=True)
class Published:
    """A measured peak.

    Args:
        steps_by_copy: the optimizer makes one number for each weight in its step.
    """

    source: str
    name: str
    model: dict[str, Any]
    setting: MemorySettings
    measured: float
    holding: Holding = field(default_factory=Holding)
    steps_by_copy: bool = True


PEAKS = (
    Published(FMS, "Mistral-7B, 4x4096", MISTRAL, WHOLE, 67.460 * GIB),
    Published(FMS, "Mistral-7B, 4x4096, FSDP 2", MISTRAL, WHOLE, 33.738 * GIB, _fsdp(2)),
    Published(FMS, "PowerLM-3b, 4x4096", POWERLM, WHOLE, 32.722 * GIB),
    Published(FMS, "PowerLM-3b, 8x4096", POWERLM, replace(WHOLE, rows=8), 43.827 * GIB),
    Published(FMS, "PowerLM-3b, 4x4096, FSDP 2", POWERLM, WHOLE, 22.148 * GIB, _fsdp(2)),
    Published(FMS, "Mistral-7B LoRA, 4x4096", MISTRAL, LORA, 24.871 * GIB),
    Published(FMS, "Mistral-7B LoRA, 8x4096", MISTRAL, replace(LORA, rows=8), 36.082 * GIB),
    Published(FMS, "Mistral-7B LoRA, 4x4096, FSDP 2", MISTRAL, LORA, 20.452 * GIB, _fsdp(2)),
    Published(FMS, "PowerLM-3b LoRA, 8x4096", POWERLM, replace(LORA, rows=8), 30.876 * GIB),
    Published(FMS, "Mistral-7B QLoRA, 4x4096", MISTRAL, QLORA, 15.249 * GIB),
    Published(FMS, "Mistral-7B QLoRA, 8x4096", MISTRAL, replace(QLORA, rows=8), 26.461 * GIB),
    Published(FMS, "Llama-2-70B QLoRA, 4x4096", LLAMA_70B, QLORA, 63.448 * GIB),
    Published(LITGPT, "Llama-2-7B LoRA, 1x1304", LLAMA_7B, LITGPT_LORA, 21.30 * GB),
    Published(
        LITGPT, "Llama-2-7B LoRA, 2x1304", LLAMA_7B, replace(LITGPT_LORA, rows=2), 29.07 * GB
    ),
    Published(LITGPT, "Llama-2-13B LoRA, 1x1304", LLAMA_13B, LITGPT_LORA, 38.12 * GB),
    Published(
        FSDP_QLORA,
        "Llama-2-7B LoRA, 1x512, FSDP 2",
        LLAMA_7B,
        replace(QLORA_LORA, length=512),
        8.28 * GIB,
        _fsdp(2),
    ),
    Published(
        FSDP_QLORA,
        "Llama-2-7B LoRA, 1x2048, FSDP 2",
        LLAMA_7B,
        replace(QLORA_LORA, length=2048),
        9.16 * GIB,
        _fsdp(2),
    ),
    Published(
        TORCHTUNE,
        "Llama-3.2-3B, 2x4096, nothing recomputed",
        LLAMA_3B,
        replace(TUNE, checkpointing="none"),
        60.0 * GIB,
        steps_by_copy=False,
    ),
    Published(
        TORCHTUNE,
        "Llama-3.2-3B, 2x4096, loss in chunks",
        LLAMA_3B,
        replace(TUNE, is_chunked=True),
        24.9 * GIB,
        steps_by_copy=False,
    ),
)


def on_paper(peak: Published) -> tuple[float, str]:
    """Bytes and moment of the peak by the formula."""
    model = Architecture.of(peak.model)
    memory = memory_of(model, peak.setting, peak.holding)
    if not peak.steps_by_copy:
        return memory.peak.total, memory.peak.name
    count = Count(model, peak.setting, peak.holding)
    copy = count.trained * peak.setting.trained_width / peak.holding.state
    moments = {moment.name: moment.total for moment in memory.moments}
    moments["the optimizer's step"] += copy
    name = max(moments, key=lambda each: moments[each])
    return moments[name], name


def main() -> None:
    """Print a table, and as the last line the figures as JSON."""
    make_parser(__doc__).parse_args()
    errors = []
    print("setting | measured, GiB | on paper, GiB | off | peak on paper | source")
    for peak in PEAKS:
        paper, moment = on_paper(peak)
        errors.append(paper / peak.measured - 1)
        sizes = [f"{each / GIB:.2f}" for each in (peak.measured, paper)]
        print(peak.name, *sizes, f"{errors[-1]:+.1%}", moment, peak.source, sep=" | ")
    within = sum(abs(error) <= BAR for error in errors)
    worst = max(abs(error) for error in errors)
    print_figures({"peaks": len(errors), "within_10_percent": within, "worst": worst})


if __name__ == "__main__":
    main()
