"""Limits of an adapter: weights that it does not train, and tokens without a meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.models.adapter import base_name, stacked
from isles.models.fill import weights_folder
from isles.models.four_bit import num_numbers

_LEAST_SHARE = 0.1
"""Smallest share of untrained weights that is reported."""

_TINY = 0.2
"""A row is untrained if it is shorter than this share of the median row."""

_COMPARED = 1024
"""Number of evenly spread vocabulary rows for the median length."""


def beyond_adapter(model: nn.Module) -> tuple[int, int, list[str]]:
    """The experts' weights with an adapter and all experts' weights, in numbers; and the names of
    the stacked matrices without an adapter.

    A mixture holds all experts of a layer in one tensor, which is not a linear layer.
    """
    weights = ((name, p) for name, p in model.named_parameters() if base_name(name) is not None)
    sizes = {name: num_numbers(weight) for name, weight in weights}
    adapted = {
        f"{name.removesuffix('.base_layer')}.{module.parameter_name}".replace(".base_layer.", ".")
        for name, module in model.named_modules()
        if hasattr(module, "parameter_name")
    }
    stacks = {base_name(name) or "": sizes[name] for name in stacked(model) if name in sizes}
    without = [name for name in stacks if name not in adapted]
    names = dict.fromkeys(".".join(name.split(".")[-2:]) for name in without)
    total = sum(stacks.values())
    if total <= _LEAST_SHARE * sum(sizes.values()):
        return 0, 0, []
    return total - sum(stacks[name] for name in without), total, list(names)


def never_trained(
    model: Any,
    config: ModelConfig,
    adapter: AdapterConfig,
    ids: Iterable[int],
    added: Iterable[int],
) -> dict[str, list[int]]:
    """Tokens whose row of the embedding or the head looks as if it was never trained.

    Such a row is zero, far shorter than others, or equal to another row.

    Args:
        model: with its adapter.
        ids: tokens to check.
        added: other tokens whose rows may be equal to a row of `ids`.

    Returns:
        The tokens for each of the modules `embed_tokens` and `lm_head`, as the model names them. A
        trained module, or a module with another name in the files, is not in the result.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {id(module): name for name, module in model.named_modules() if name}
    folder, where = weights_folder(config.name_or_path)
    found: dict[str, list[int]] = {}
    for module in ends:
        name = base_name(f"{names.get(id(module), '')}.weight") or ""
        short = name.removesuffix(".weight").rpartition(".")[2]
        prefix = f"{model.base_model_prefix}."
        known = next((n for n in (name, name.removeprefix(prefix)) if n in where), None)
        is_trained = short in adapter.modules_to_save or short in adapter.target_modules
        if known is None or is_trained:
            continue
        with safe_open(folder / where[known], "pt") as reader:
            saved = reader.get_slice(known)
            size = saved.get_shape()[0]
            asked = sorted({i for i in ids if 0 <= i < size})
            spread = np.linspace(0, size - 1, min(size, _COMPARED)).astype(int).tolist()
            others = sorted({i for i in (*added, *spread) if 0 <= i < size})
            rows = {i: saved[i : i + 1][0].float() for i in {*asked, *others}}
        if bad := _untrained(rows, asked, spread):
            found[short] = bad
    return found


def _untrained(rows: dict[int, Tensor], asked: list[int], spread: list[int]) -> list[int]:
    least = _TINY * float(torch.stack([rows[i].norm() for i in spread]).median())
    seen: dict[bytes, int] = {}
    for row in rows.values():
        key = row.numpy().tobytes()
        seen[key] = seen.get(key, 0) + 1
    return [
        i for i in asked if float(rows[i].norm()) <= least or seen[rows[i].numpy().tobytes()] > 1
    ]
