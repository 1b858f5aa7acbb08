"""Which kinds of models can be cut how, without changing what they compute.

By `model_type` of transformers 5. Each was tried: losses and gradients of two ranks against one.
"""

from __future__ import annotations

_ANY_WAY = """
cohere ernie4_5 gemma helium llama ministral3 mistral nemotron olmo2 phi3 qwen2 qwen3
seed_oss smollm3 starcoder2
"""

_TENSOR = """
arcee cohere2 exaone4 gemma3_text glm glm4 gpt_neox granite hyperclovax internlm3 jais2
nanochat olmo olmo3 phi
"""

_CONTEXT = """
arcee bitnet glm glm4 gpt2 gpt_bigcode gpt_neox granite hunyuan_v1_dense hyperclovax
internlm3 jais2 mixtral nanochat olmo persimmon phi qwen3_moe stablelm
"""

_PIPELINE = """
exaone4 glm4 hunyuan_v1_dense mixtral qwen3_moe stablelm
"""

TENSOR_PARALLEL = frozenset((_ANY_WAY + _TENSOR).split())
"""The matrices of their blocks can be cut: they have a plan for it that isles can follow."""

CONTEXT_PARALLEL = frozenset((_ANY_WAY + _CONTEXT).split())
"""Their attention is the plain causal one, so that it can be done over several ranks."""

PIPELINE = frozenset((_ANY_WAY + _PIPELINE).split())
"""Their blocks, one group after the other, are the whole model."""

REASONS: dict[str, dict[str, str]] = {
    "tp_size": {
        "apertus": "its activations have parameters that would lie on every rank",
    },
    "cp_size": {
        "bloom": "its attention has position biases (ALiBi)",
        "biogpt": "it counts positions from the start of what it is given",
        "gemma2": "its attention caps its scores",
        "gpt_oss": "its attention has sinks",
        "opt": "it counts positions from the start of what it is given",
    },
    "pp_size": {
        "granite": "it scales its embeddings outside of them, and would do so in every stage",
        "hyperclovax": "it scales its embeddings outside of them, and would do so in every stage",
        "nanochat": "it normalises its embeddings outside of them, and would do so in every stage",
    },
}
"""Why some are missing above, by the key of the run file. What is not named was not tried."""
