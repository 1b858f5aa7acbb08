"""Models: shapes shipped with isles, and kinds of models with their supported parallelism.

A kind is a `model_type` of transformers 5. Each kind was tested: losses and gradients of two ranks
against one; for documents that share a row, logits of each against the logits of it alone.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

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

_ISOLATED = """
afmoe apertus arcee biogpt bitnet codegen cohere2 cwm deepseek_v2 deepseek_v3 diffllama
ernie4_5_moe exaone4 flex_olmo gemma2 gemma3 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode
gpt_neox gpt_oss gptj granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe
hyperclovax internlm3 jais2 jetmoe ministral mixtral mpt nanochat olmo olmo3 olmoe opt persimmon
phi phimoe qwen2_moe qwen3_moe solar_open stablelm vaultgemma xglm
"""

_WINDOWED = """
cohere2 cwm exaone4 gemma3_text ministral ministral3 mistral mixtral olmo3 phi3 qwen2 qwen3
qwen3_moe smollm3 starcoder2
"""

_EAGER = """
big_bird bigbird_pegasus bloom cpmant deepseek_v4 flint gemma2 git got_ocr2 gpt_neo
gpt_neox_japanese gpt_oss granite_swa granitemoe_swa hy_v4 inkling2_loop_text inkling2_text
megatron-bert mimo_v2_flash mpt mvp openai-gpt prophetnet reformer rembert roformer rwkv trocr
vaultgemma xglm xlm xlnet xlstm
"""

TENSOR_PARALLEL = frozenset((_ANY_WAY + _TENSOR).split())
"""Kinds that support tensor parallel: their plan of sharded matrices works with isles."""

CONTEXT_PARALLEL = frozenset((_ANY_WAY + _CONTEXT).split())
"""Kinds that support context parallel: their attention is plain and causal."""

PIPELINE = frozenset((_ANY_WAY + _PIPELINE).split())
"""Kinds that support pipelines: their blocks, in sequence, are the whole model."""

ISOLATED = frozenset((_ANY_WAY + _ISOLATED).split())
"""Kinds that can isolate documents in a row: they use position ids and the masks of these."""

BLIND = frozenset(["afmoe", "biogpt", "gpt_oss", "mpt", "opt", "xglm"])
"""Isolated kinds that ignore positions when they make masks, so isles passes masks to them."""

DEAF = frozenset(["gptj", "nemotron", "stablelm"])
"""Isolated kinds that do not pass the borders of documents to their attention, so isles passes
masks to them."""

WINDOWED = frozenset(_WINDOWED.split())
"""Isolated kinds whose layers pass their sliding windows to their attention, and change nothing
else: no caps of scores, no sinks."""

EAGER = frozenset(_EAGER.split())
"""Kinds that transformers 5.24 does not build with attn_implementation sdpa."""

_KEEPS_STATE = "its layers carry a state from token to token, over every border"

REASONS: dict[str, dict[str, str]] = {
    "tp_size": {
        "apertus": "its activations have parameters that every rank would need",
    },
    "cp_size": {
        "bloom": "its attention has position biases (ALiBi)",
        "biogpt": "it counts positions from the start of its input",
        "gemma2": "its attention caps its scores",
        "gpt_oss": "its attention has sinks",
        "opt": "it counts positions from the start of its input",
    },
    "isolate_documents": {
        "bloom": "it does not accept positions, and accepts only padding masks",
        "falcon": "it ignores positions when it makes its masks",
        **dict.fromkeys(
            (
                *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear"),
                *("lfm2", "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"),
                *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv"),
                *("xlstm", "zamba", "zamba2"),
            ),
            _KEEPS_STATE,
        ),
    },
    "pp_size": {
        "granite": "it scales its embeddings outside the blocks, so every stage would do it",
        "hyperclovax": "it scales its embeddings outside the blocks, so every stage would do it",
        "nanochat": "it normalizes its embeddings outside the blocks, so every stage would do it",
    },
}
"""Reasons why some kinds are missing above, by the key of the run file. Others were not tested."""


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of a config with ids of tokens."""


def known_ids(ids: Any, vocab_size: int) -> Any:
    """The id, or the list of ids, without ids outside the vocabulary.

    None: no id is left. -1 is kept, because some published models use it for no token.
    """
    if isinstance(ids, list):
        return [i for i in ids if not (isinstance(i, int) and i >= vocab_size)] or None
    return None if isinstance(ids, int) and ids >= vocab_size else ids


def shape_names() -> tuple[str, ...]:
    """Names of the shapes, smallest model first."""

    def size(name: str) -> int:
        shape = load_shape(name)
        return int(shape["num_hidden_layers"] * shape["hidden_size"] ** 2)

    names = [
        entry.name.removesuffix(".json")
        for entry in (resources.files("isles.facts") / "shapes").iterdir()
        if entry.name.endswith(".json")
    ]
    return tuple(sorted(names, key=size))


def load_shape(name: str) -> dict[str, Any]:
    """The Hugging Face config of a shipped shape. KeyError: unknown name."""
    if not name.replace("-", "").isalnum():
        raise KeyError(name)
    entry = resources.files("isles.facts") / "shapes" / f"{name}.json"
    if not entry.is_file():
        raise KeyError(name)
    loaded: dict[str, Any] = json.loads(entry.read_text(encoding="utf-8"))
    return loaded
