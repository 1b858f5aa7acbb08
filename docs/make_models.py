"""Writes docs/models.md: the models that fit on a GPU, and the models that train.

    python docs/make_models.py

The tables come from `isles plan`'s own functions and from `src/isles/facts/`; change those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config.load import load_run_file
from isles.config.memory import architecture
from isles.facts.memory.architecture import KINDS
from isles.facts.models import (
    CONTEXT_PARALLEL,
    ISOLATED,
    PIPELINE,
    REASONS,
    TENSOR_PARALLEL,
    load_shape,
)
from isles.plan.find import find_machines
from isles.plan.step import Job, Outcome, outcome

TARGET = Path(__file__).with_name("models.md")

GPUS = {8: "4060", 12: "3060", 16: "4060ti-16", 24: "4090", 48: "l40s", 80: "h100"}
"""A GPU of each memory in GiB, by its name for `--gpus`."""

RUN_FILE = """\
model: {name_or_path: someone/a-model}
data: {sources: [{path: data/*.jsonl, type: chat}], seq_length: 2048}
training:
  max_steps: 1000
  global_batch_size: 8
  micro_batch_size: 1
  gradient_checkpointing: full
"""

METHODS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full in bf16": (
        "training.precision=bf16-true",
        "training.optimizer=adamw_8bit",
        "training.stochastic_rounding=true",
    ),
    "LoRA": ("adapter.type=lora", "adapter.r=16"),
    "QLoRA": ("adapter.type=qlora", "adapter.r=16"),
}
"""Methods, with the values that differ from the run file."""


def _shape(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    width: int,
    vocab: int,
    *,
    is_tied: bool = False,
) -> dict[str, Any]:
    """The sizes of a published config.json."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "head_dim": 64 if hidden < 1024 else 128,
        "tie_word_embeddings": is_tied,
        "max_position_embeddings": 32768,
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.5B": ("Qwen2.5-0.5B", _shape("qwen2", 896, 24, 14, 2, 4864, 151936, is_tied=True)),
    "1B": ("Llama-3.2-1B", load_shape("llama-1b")),
    "3B": ("Llama-3.2-3B", _shape("llama", 3072, 28, 24, 8, 8192, 128256, is_tied=True)),
    "8B": ("Llama-3.1-8B", load_shape("llama-8b")),
    "14B": ("Qwen3-14B", _shape("qwen3", 5120, 40, 40, 8, 17408, 151936)),
    "32B": ("Qwen3-32B", _shape("qwen3", 5120, 64, 64, 8, 25600, 151936)),
    "70B": ("Llama-3.3-70B", _shape("llama", 8192, 80, 64, 8, 28672, 128256)),
}
"""Sizes, smallest first, with a published model of each."""

HEAD = """\
# Models and GPUs

<!-- Written by docs/make_models.py from the functions of `isles plan` and from src/isles/facts/.
     Run it again after a change there; tests/unit/test_docs.py compares. -->

Find the largest model that fits on your GPU, and the model types that train.

## What fits

This table shows the largest of seven models that fits on one GPU, with `data.seq_length: 2048`,
`training.micro_batch_size: 1` and `training.gradient_checkpointing: full`. "Full" trains all
weights. "Full in bf16" trains them with `precision: bf16-true`, `optimizer: adamw_8bit` and
`stochastic_rounding: true`. The other columns use the default precision and optimizer, and adapters
with `r: 16`.
"""

NEEDED = """\
The next table shows the memory, in GiB, that a step needs on a GPU of 8 GB. On larger GPUs, isles
computes the loss in larger chunks, which need up to 1.5 GiB more. A step may use 85 % of a GPU's
memory, because CUDA and fragmentation need the rest:
"""

BEYOND = """\
These numbers are estimates, not measurements ([accuracy](benchmarks.md#memory-estimates)). For
your own run file, type `isles plan run.yaml --gpus 4090`.

With [FSDP or ZeRO](strategies.md), several GPUs share one model. QLoRA works with FSDP but not with
ZeRO. With DDP every GPU holds the whole model, so the smallest GPU limits the size of the model.
[Large models on small GPUs](large-models.md) shows runs on several GPUs or with main memory.

## Models that train

Every causal text model of transformers with safetensors weights trains with `ddp`, `deepspeed` and
`fsdp`. If isles does not find a model's blocks for `fsdp`, list their classes in
`strategy.transformer_layer_cls_to_wrap`. For tensor, context and pipeline parallel, and for
separate documents in a packed sample (`data.isolate_documents`, the default for conversations),
isles accepts only types with a "yes". `config.json` has the `model_type` of a model. Each
"yes" has a test with a small model.
"""

LIMITS = """\
`cp_size` does not support sliding windows. The model limits the
sizes ([Rules between keys](run-file.md#rules-between-keys)). For a type without a "yes"
for separate documents, set `data.packing: false` or `data.isolate_documents: false`.

## Mixtures of experts

A mixture of experts trains with a loss that balances its experts, if the model's config in
transformers has a `router_aux_loss_coef`. dbrx, doge, jetmoe and llama4 are exceptions. The types
mixtral, olmoe, qwen2_moe, qwen3_moe, gpt_oss, granitemoe, flex_olmo and ernie4_5_moe have a test.

- **The loss** of a layer is the number of experts times the sum of `f * P` over the experts. `f`
  is the number of tokens that chose an expert, and `P` is the sum of its probabilities, both
  divided by the number of tokens. The run adds the mean over the layers, times
  `model.router_aux_loss_coef`. The default is the coefficient of the model's config. 0 turns the
  loss off. If an adapter freezes the routers, the default is 0.
- **All tokens of a step count**, of all ranks and micro-batches, but not padding. The result is
  equal for any number of ranks and any strategy. The gradient uses the `f` of the previous step,
  because the `f` of a step is known only after its last micro-batch. The first step of a run has
  no balancing. Checkpoints contain `f`.
- **transformers** computes this loss for each micro-batch, and only with `output_router_logits`.
  It averages `f` and `P` over the layers before it multiplies them. Then an idle expert of one
  layer can hide behind a busy expert of another layer.
- **Metrics** of a step: `router_loss` is the balancing loss with its coefficient, which `loss`
  does not include. `router_entropy` is the entropy of the load as a share of the largest entropy:
  1 if all experts get equally many tokens. `router_busiest_share` is the share of the busiest
  expert of all layers, as a multiple of an even share.
- **deepseek_v3, glm4_moe and similar types** balance their experts by a bias. transformers has no
  loss for them. isles records the metrics and does not change the bias. A model from scratch
  starts with a bias of 0, so nothing balances its experts.
- **Recomputation.** `gradient_checkpointing` computes the choice of experts again. The same
  kernels give the same choice, unless a kernel is not deterministic.
"""


def write() -> str:
    """The whole page."""
    peaks = {method: _outcomes(method) for method in METHODS}
    parts = [HEAD, *_fitting(peaks), "", NEEDED, *_memory(peaks), "", BEYOND, *_kinds(), "", LIMITS]
    return "\n".join(parts)


Outcomes = dict[str, list[Outcome]]
"""The plan of each model, by its size, on each GPU."""


def _outcomes(method: str) -> Outcomes:
    loaded = load_run_file(Path("run.yaml"), METHODS[method], text=RUN_FILE)
    machines = [find_machines(loaded, gpu, None, "")[0] for gpu in GPUS.values()]
    config = loaded.config.of_cluster(0)
    return {
        size: [outcome(Job(config, architecture(config, shape), shape, m)) for m in machines]
        for size, (_, shape) in MODELS.items()
    }


def _fitting(plans: dict[str, Outcomes]) -> Iterator[str]:
    yield _row("GPU memory", *plans)
    yield _rule(1 + len(plans))
    for index, memory in enumerate(GPUS):
        cells = [
            next((size for size in reversed(MODELS) if outcomes[size][index].fits), "–")
            for outcomes in plans.values()
        ]
        yield _row(f"{memory} GB", *cells)


def _memory(plans: dict[str, Outcomes]) -> Iterator[str]:
    yield _row("model", *plans)
    yield _rule(1 + len(plans))
    for size, (name, _) in MODELS.items():
        peaks = [outcomes[size][0].tightest.least.peak.total for outcomes in plans.values()]
        yield _row(f"{size} ({name})", *(f"{peak / 2**30:.1f}" for peak in peaks))


def _kinds() -> Iterator[str]:
    supported = (TENSOR_PARALLEL, CONTEXT_PARALLEL, PIPELINE, ISOLATED)
    others = (kind for reasons in REASONS.values() for kind in reasons)
    groups: dict[tuple[bool, ...], list[str]] = {}
    for kind in sorted({*others, *KINDS}.union(*supported)):
        groups.setdefault(tuple(kind in kinds for kinds in supported), []).append(kind)
    yield _row("`model_type`", "`tp_size`", "`cp_size`", "`pp_size`", "separate documents")
    yield _rule(5)
    for marks, names in sorted(groups.items(), reverse=True):
        yield _row(", ".join(names), *("yes" if mark else "–" for mark in marks))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text(encoding="utf-8") != write())
    TARGET.write_text(write(), encoding="utf-8")
