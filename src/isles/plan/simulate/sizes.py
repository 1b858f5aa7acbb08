"""Bytes of an outer step: fragments of a model, and their sizes under each codec.

The formulas are the formulas of `isles.outer.layout` and `isles.outer.codec`, without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from isles.config.sections.outer import CodecConfig

PIECE_NUMBERS = 2**20
"""Most numbers in a piece; see `isles.outer.layout`."""
_BLOCK = re.compile(r"^(.*?\.\d+)\.")
_TOPK_CHUNK, _PLACE_BITS = 4096, 12


def piece_bytes(codec: CodecConfig, n: int) -> int:
    """Bytes of a contribution's piece of n numbers, as `isles.outer.codec.Codec.size` has it."""
    match codec.kind:
        case "none":
            return 4 * n
        case "bf16":
            return _filled(2 * n)
        case "int8":
            return _filled(2 * -(-n // 128)) + _filled(n)
        case "int4":
            return _filled(2 * -(-n // 32)) + _filled((n + 1) // 2)
        case "topk":
            whole, rest = divmod(n, _TOPK_CHUNK)
            last = _chunk_bytes(rest, codec.density) if rest else 0
            return whole * _chunk_bytes(_TOPK_CHUNK, codec.density) + last
        case _:
            assert_never(codec.kind)


def contribution_bytes(codec: CodecConfig, numbers: int) -> int:
    """Bytes of a contribution with this many numbers, split into whole pieces and a rest.

    Parameters end pieces too, so a real contribution is some bytes larger for each of them.
    """
    whole, rest = divmod(numbers, PIECE_NUMBERS)
    return whole * piece_bytes(codec, PIECE_NUMBERS) + (piece_bytes(codec, rest) if rest else 0)


def average_bytes(codec: CodecConfig, numbers: int, num_parts: int) -> int:
    """Bytes of an average over `num_parts` contributions, as `isles.outer.average.average_size`.

    The average of int4 is sent as int8. For topk, the contributions themselves are sent.
    """
    match codec.kind:
        case "topk":
            pieces = -(-numbers // PIECE_NUMBERS)
            return num_parts * (4 * pieces + contribution_bytes(codec, numbers))
        case "int4":
            return contribution_bytes(CodecConfig(kind="int8"), numbers)
        case "none" | "bf16" | "int8":
            return contribution_bytes(codec, numbers)
        case _:
            assert_never(codec.kind)


def state_bytes(numbers: int, *, has_momentum: bool) -> int:
    """Bytes of the outer state that one cluster fetches from another, in fp32."""
    return (8 if has_momentum else 4) * numbers


def fragment_numbers(sizes: Mapping[str, int], num_fragments: int) -> list[int]:
    """Numbers in each fragment, by parameter names and sizes, as `isles.outer.layout` splits them.

    Blocks are assigned to the fragments in rotation. Every parameter outside the blocks, the
    largest first, is assigned to the smallest fragment.
    """
    load = [0] * num_fragments
    blocks: dict[str, int] = {}
    ends = []
    for name, size in sizes.items():
        if found := _BLOCK.match(name):
            blocks[found[1]] = blocks.get(found[1], 0) + size
        else:
            ends.append(name)
    for index, size in enumerate(blocks.values()):
        load[index % num_fragments] += size
    for name in sorted(ends, key=lambda name: (-sizes[name], name)):
        load[load.index(min(load))] += sizes[name]
    return load


def equal_fragments(numbers: int, num_fragments: int) -> list[int]:
    """Fragments of a model with a known number of parameters and an unknown structure."""
    base, more = divmod(numbers, num_fragments)
    return [base + (index < more) for index in range(num_fragments)]


def llama_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Parameters of a Llama by name, from its config.json, in the model's order."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    sizes = {"model.embed_tokens.weight": config["vocab_size"] * hidden}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        sizes |= {
            f"{at}.self_attn.q_proj.weight": hidden * query,
            f"{at}.self_attn.k_proj.weight": hidden * kv,
            f"{at}.self_attn.v_proj.weight": hidden * kv,
            f"{at}.self_attn.o_proj.weight": query * hidden,
            f"{at}.mlp.gate_proj.weight": hidden * wide,
            f"{at}.mlp.up_proj.weight": hidden * wide,
            f"{at}.mlp.down_proj.weight": wide * hidden,
            f"{at}.input_layernorm.weight": hidden,
            f"{at}.post_attention_layernorm.weight": hidden,
        }
    sizes["model.norm.weight"] = hidden
    if not config.get("tie_word_embeddings", False):
        sizes["lm_head.weight"] = config["vocab_size"] * hidden
    return sizes


def total(sizes: Mapping[str, int] | Sequence[int]) -> int:
    return sum(sizes.values() if isinstance(sizes, Mapping) else sizes)


def _filled(num_bytes: int) -> int:
    return 4 * -(-num_bytes // 4)


def _chunk_bytes(count: int, density: float) -> int:
    kept = min(count, max(1, math.ceil(round(count * density, 6))))
    marks = -(-min(count, _PLACE_BITS * kept) // 8)
    return _filled(4 + marks + -(-2 * kept // 8))
