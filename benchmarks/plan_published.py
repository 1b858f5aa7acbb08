"""Memory and speed of a step on paper beside peaks and speeds that were measured and published.

    python benchmarks/plan_published.py [--smoke]       # the same, as it takes a second

All peaks are torch's max_memory_allocated (or its active bytes), of trainers that differ from
isles: whole logits in most, an AdamW whose step makes a temporary of a weight's size, other code of
models. Each is described to the formula by its own settings; nothing is fitted.

Speeds are tokens per second and GPU. `isles plan` plans the same model, batch and strategy on the
same GPUs. Its few constants (shares of a table speed, in src/isles/config/roofline.py) were chosen
so that all speeds are within 25 %. No constant of fp8 was. Speeds with expert parallelism or
unpublished settings cannot be planned, and are not in the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common import make_parser, print_figures

from isles.config.load import load_run_file
from isles.facts.gpus import named_gpu
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.count import Count
from isles.facts.memory.setting import Holding, MemorySettings
from isles.facts.memory.step import memory_of
from isles.facts.models import load_shape
from isles.plan.find import parse_gpus
from isles.plan.machines import GUESSED_FABRIC, GUESSED_LINE, Device, Host, Machines
from isles.plan.outcome import Outcome
from isles.plan.step import Job, outcome

BAR = 0.10
SPEED_BAR = 0.25
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


QWEN_7B = _llama(3584, 28, 28, 4, 18944, 152064) | {"model_type": "qwen2"}
QWEN_32B = _llama(5120, 64, 40, 8, 27648, 152064) | {"model_type": "qwen2"}
GPT_2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50304,
    "n_positions": 1024,
}

TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
ASYNC_TP = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
NEMO = "NVIDIA-NeMo/Automodel, docs/performance-summary.mdx"
NANOCHAT = "karpathy/nanochat, dev/LOG.md"
LLM_C = "KellerJordan/modded-nanogpt, README.md: llm.c, 45 minutes"
OWN = "isles 2026-11-22, benchmarks/HISTORY.md"


def _nanochat(layers: int) -> dict[str, Any]:
    # A Llama with matrices of the same size; nanochat's MLP has two matrices instead of three.
    hidden = 64 * layers
    return _llama(hidden, layers, layers // 2, layers // 2, hidden * 8 // 3, 32768)


@dataclass(frozen=True)
class PublishedSpeed:
    """A measured speed.

    Args:
        gpus: as `isles plan --gpus` takes them, and the number of such machines.
        rows: sequences of a micro-batch on a data-parallel rank.
        settings: values that differ from `RUN_FILE`.
        measured: tokens per second and GPU.
        has_low_power: torchtitan's H100 have 500 W, HBM2e with 2.4 TB/s, and by its page a speed
            between the SXM and the NVL card. The NVL card's is used.
    """

    source: str
    name: str
    model: dict[str, Any]
    gpus: str
    rows: int
    length: int
    measured: float
    settings: tuple[str, ...]
    nodes: int = 1
    micro_steps: int = 1
    has_low_power: bool = False


RUN_FILE = """\
name: published
model: {name_or_path: someone/a-model}
data: {sources: [{type: fake}], validation_fraction: 0}
training: {max_steps: 1000, precision: bf16-mixed, gradient_checkpointing: none}
strategy: {kind: ddp}
balance: even
"""

EAGER, COMPILED = "training.torch_compile=false", "training.torch_compile=true"
SELECTIVE = "training.gradient_checkpointing=selective"
FULL = "training.gradient_checkpointing=full"
FSDP = "strategy={kind: fsdp}"
FP8 = "training.precision=fp8-mixed"
LORA_16 = "adapter={type: lora, r: 16}"


def _titan(name: str, tokens: float, *settings: str, **more: Any) -> PublishedSpeed:
    base = PublishedSpeed(TITAN, name, LLAMA_8B, "8xh100@8xndr", 2, 8192, tokens, settings)
    return replace(base, has_low_power=True, **more)


SPEEDS = (
    _titan("Llama-3-8B, 8 GPUs", 5762, EAGER, SELECTIVE, FSDP),
    _titan("Llama-3-8B, 8 GPUs, compiled", 6667, COMPILED, SELECTIVE, FSDP),
    _titan("Llama-3-8B, 8 GPUs, compiled, fp8", 8532, SELECTIVE, FSDP, FP8),
    _titan("Llama-3-8B, 128 GPUs", 5605, EAGER, SELECTIVE, FSDP, nodes=16),
    _titan("Llama-3-8B, 128 GPUs, compiled", 6514, COMPILED, SELECTIVE, FSDP, nodes=16),
    _titan("Llama-3-8B, 128 GPUs, compiled, fp8", 8380, SELECTIVE, FSDP, FP8, nodes=16),
    _titan(
        "Llama-3-8B, 64 GPUs, TP 8, compiled",
        4378,
        *(COMPILED, SELECTIVE, "strategy={kind: fsdp, tp_size: 8}"),
        source=ASYNC_TP,
        rows=12,
        nodes=8,
    ),
    _titan(
        "Llama-3-70B, 256 GPUs, TP 8, compiled",
        597.3,
        *(COMPILED, FULL, "strategy={kind: fsdp, tp_size: 8}"),
        source=ASYNC_TP,
        model=LLAMA_70B | {"vocab_size": 128256},
        rows=16,
        nodes=32,
    ),
    PublishedSpeed(
        NEMO,
        "Llama-3-70B, 64 GPUs, CP 2, compiled",
        LLAMA_70B | {"vocab_size": 128256},
        "8xh100@8xndr",
        1,
        8192,
        866.77,
        (COMPILED, FULL, "strategy={kind: fsdp, cp_size: 2}"),
        nodes=8,
        micro_steps=4,
    ),
    PublishedSpeed(
        NEMO,
        "Llama-3-8B LoRA",
        LLAMA_8B,
        "h100",
        2,
        4096,
        12472.87,
        (COMPILED, "adapter={type: lora, r: 16, dropout: 0.1}"),
        micro_steps=16,
    ),
    PublishedSpeed(
        NEMO,
        "Qwen2.5-7B LoRA",
        QWEN_7B,
        "h100",
        2,
        4096,
        14110.05,
        (COMPILED, LORA_16),
        micro_steps=16,
    ),
    PublishedSpeed(
        NEMO,
        "Llama-3-70B LoRA, 8 GPUs, TP 2, compiled",
        LLAMA_70B | {"vocab_size": 128256},
        "8xh100",
        2,
        4096,
        1091.85,
        (COMPILED, FULL, LORA_16, "strategy={kind: fsdp, tp_size: 2}"),
        micro_steps=4,
    ),
    PublishedSpeed(
        NEMO,
        "Qwen2.5-32B LoRA, 8 GPUs, TP 2, compiled",
        QWEN_32B,
        "8xh100",
        2,
        4096,
        2250.31,
        (COMPILED, FULL, LORA_16, "strategy={kind: fsdp, tp_size: 2}"),
        micro_steps=4,
    ),
    # MFU of 41 % and 46 % by nanochat's FLOPs per token: 0.802 and 2.272 G.
    PublishedSpeed(NANOCHAT, "d12", _nanochat(12), "8xh100", 32, 2048, 505e3, (COMPILED,)),
    PublishedSpeed(NANOCHAT, "d18", _nanochat(18), "8xh100", 32, 2048, 200e3, (COMPILED,)),
    PublishedSpeed(NANOCHAT, "d26", _nanochat(26), "8xh100", 16, 2048, 630e3 / 8, (COMPILED,)),
    PublishedSpeed(NANOCHAT, "d26, fp8", _nanochat(26), "8xh100", 16, 2048, 740e3 / 8, (FP8,)),
    PublishedSpeed(LLM_C, "GPT-2 124M", GPT_2, "8xh100", 64, 1024, 463e3, (COMPILED,)),
    # fp16-mixed has the fp32 stream under autocast that bf16-mixed had in that measurement.
    PublishedSpeed(
        OWN,
        "llama-150m, eager autocast",
        load_shape("llama-150m"),
        "h100",
        16,
        1024,
        140128,
        (EAGER, "training.precision=fp16-mixed"),
    ),
)


def planned(speed: PublishedSpeed) -> Outcome:
    """The plan of the same setting."""
    ((hosts, network),) = parse_gpus(speed.gpus, nodes=speed.nodes)
    if speed.has_low_power:
        slow = replace(named_gpu("h100nvl"), name="H100", bandwidth_bytes_per_s=2.4e12)
        device = replace(Device.of(slow), memory_bytes=96 * GIB)
        hosts = tuple(Host(host.name, (device,) * len(host.devices)) for host in hosts)
    machines = Machines("published", hosts, network or GUESSED_FABRIC, GUESSED_LINE)
    world = len(machines.devices)
    cut = 1
    for setting in speed.settings:
        for size in ("tp_size: ", "cp_size: "):
            _, _, found = setting.partition(size)
            cut *= int(found.rstrip("}") or 1)
    values = (
        *speed.settings,
        f"data.seq_length={speed.length}",
        f"training.micro_batch_size={speed.rows}",
        f"training.global_batch_size={speed.rows * speed.micro_steps * world // cut}",
    )
    config = load_run_file(Path("published.yaml"), values, text=RUN_FILE).config
    job = Job(config.of_cluster(0), Architecture.of(speed.model), speed.model, machines)
    return outcome(job)


def speed_on_paper(speed: PublishedSpeed) -> float:
    """Tokens per second and GPU by `isles plan`."""
    found = planned(speed)
    assert found.time is not None, found.refused
    training = found.config.training
    tokens = training.global_batch_size * found.config.data.seq_length
    return tokens / found.time.total_s / len(found.ranks)


def main() -> None:
    """Print two tables, and as the last line the figures as JSON."""
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
    ratios = []
    print("\nsetting | measured, tokens/s per GPU | on paper | ratio | source")
    for speed in SPEEDS:
        tokens = speed_on_paper(speed)
        ratios.append(tokens / speed.measured)
        texts = [f"{each:,.0f}" for each in (speed.measured, tokens)]
        print(speed.name, *texts, f"{ratios[-1]:.2f}", speed.source, sep=" | ")
    print_figures(
        {
            "peaks": len(errors),
            "within_10_percent": within,
            "worst": worst,
            "speeds": len(ratios),
            "speeds_within_25_percent": sum(abs(each - 1) <= SPEED_BAR for each in ratios),
            "worst_speed": max(abs(each - 1) for each in ratios),
        }
    )


if __name__ == "__main__":
    main()
