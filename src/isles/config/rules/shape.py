"""The rules between a run file and the model's shape: its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from isles.config.issues import Issue
from isles.config.sections.data import isolates_any
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import MeshSection
from isles.facts.memory.architecture import KINDS
from isles.facts.models import (
    BLIND,
    CONTEXT_PARALLEL,
    DEAF,
    EAGER,
    ISOLATED,
    PIPELINE,
    REASONS,
    TENSOR_PARALLEL,
)

# A Hugging Face config: JSON, with values of every kind.
Shape = Mapping[str, Any]

# Names of these keys in older architectures.
_ALIASES = {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
_DROPOUTS = (
    "dropout",
    "embd_pdrop",
    "embedding_dropout",
    "hidden_dropout",
    "resid_pdrop",
    "residual_dropout",
)
_UNTOLD = frozenset(
    [("flex_attention", kind) for kind in BLIND] + [("flash_attention_2", kind) for kind in DEAF]
)
"""Attention that gets no document boundaries from these types of models."""

_TWO_STAGES = ("interleaved-1f1b", "zbv")
_INSTEAD = "strategy: {kind: fsdp} alone shards any model"


def check_shape(config: RunConfig, shape: Shape) -> list[Issue]:
    """Every broken rule between the run file and the model's shape.

    Args:
        config: the run.
        shape: a config.json, or `to_dict()` of a config of transformers. isles skips the rule of an
            absent key, whose default only transformers knows.
    """
    issues = [*_length(config, shape), *_isolation(config, shape), *_long_rope(config, shape)]
    issues += _attention(config, shape)
    issues += _experts(config, shape)
    strategy = config.strategy
    if isinstance(strategy, MeshSection):
        issues += _tensor_parallel(strategy, shape)
        issues += _context_parallel(strategy, shape, config.data.seq_length)
        issues += _pipeline(strategy, shape)
    return issues


def _length(config: RunConfig, shape: Shape) -> Iterator[Issue]:
    # Beyond its positions a model fails, or trains on nonsense.
    wanted, positions = config.data.seq_length, _number(shape, "max_position_embeddings")
    if positions is not None and 0 < positions < wanted:
        yield Issue(
            ("data.seq_length", "model.name_or_path"),
            f"seq_length {wanted} is longer than the model's max_position_embeddings, {positions}",
            f"use {positions} or less, or another model",
        )


def _attention(config: RunConfig, shape: Shape) -> Iterator[Issue]:
    # transformers refuses it too, but only when the ranks build the model.
    kind, keys = shape.get("model_type"), ("model.attn_implementation", "model.name_or_path")
    if config.model.attn_implementation == "sdpa" and kind in EAGER:
        what = f"model_type {kind} does not support attn_implementation sdpa"
        yield Issue(keys, what, "set model.attn_implementation: eager")


def unbalanced(model_type: str) -> Issue:
    """The refusal of `model.router_aux_loss_coef` for a model that transformers cannot balance."""
    return Issue(
        ("model.router_aux_loss_coef", "model.name_or_path"),
        f"model_type {model_type} has no loss that balances experts: its config in transformers "
        "has no router_aux_loss_coef, or it has no routers",
        "delete the key",
    )


def _experts(config: RunConfig, shape: Shape) -> Iterator[Issue]:
    # A file without these keys may be of a mixture, whose defaults only transformers knows.
    kind = KINDS.get(str(shape.get("model_type")))
    if config.model.router_aux_loss_coef and kind is not None and not kind.has_experts:
        yield unbalanced(str(shape["model_type"]))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = [number for name in names if (number := _number(shape, name)) is not None]
    if config.training.precision == "fp8-mixed" and max(counts, default=0) > 1:
        yield Issue(
            ("training.precision", "model.name_or_path"),
            f"fp8-mixed was never tried with mixtures of experts, and the model has {max(counts)} "
            "experts per layer",
            "use precision: bf16-mixed",
        )


def _isolation(config: RunConfig, shape: Shape) -> Iterator[Issue]:
    # A model that ignores the start of documents would train on all documents before.
    kind = shape.get("model_type")
    if kind is None or not isolates_any(config.data):
        return
    if kind not in ISOLATED:
        reason = REASONS["isolate_documents"].get(kind)
        yield Issue(
            ("data.isolate_documents", "data.packing", "model.name_or_path"),
            f"isles cannot isolate the documents of a sample for model_type {kind}"
            + (f": {reason}" if reason else ""),
            "set data.packing: false, with one document per row, or data.isolate_documents: "
            "false, so that each document sees the documents before it",
        )
    elif (config.model.attn_implementation, kind) in _UNTOLD:
        yield Issue(
            ("model.attn_implementation", "data.isolate_documents", "model.name_or_path"),
            f"{config.model.attn_implementation} does not isolate the documents of a sample for "
            f"model_type {kind}",
            "use model.attn_implementation: sdpa or eager, or data.packing: false",
        )


def _tensor_parallel(strategy: MeshSection, shape: Shape) -> Iterator[Issue]:
    size, key = strategy.tp_size, "strategy.tp_size"
    if size == 1:
        return
    yield from _kind(shape, key, "tensor parallel", TENSOR_PARALLEL)
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    numbers = {name: number for name in names if (number := _number(shape, name))}
    undivided = [f"{name} {number}" for name, number in numbers.items() if number % size]
    if undivided:
        common = math.gcd(*numbers.values())
        sizes = [str(n) for n in range(2, min(common, 64) + 1) if common % n == 0]
        yield Issue(
            (key,),
            f"tp_size {size} does not divide the model's {', '.join(undivided)}",
            f"use {' or '.join(sizes)}" if sizes else f"set tp_size: 1; {_INSTEAD}",
        )
    dropouts = [name for name in _DROPOUTS if (shape.get(name) or 0) > 0]
    if dropouts:
        yield Issue(
            (key,),
            f"the model's {dropouts[0]} is {shape[dropouts[0]]:g}, and tensor-parallel ranks "
            "would drop different values of one matrix",
            f"set it to 0 in the model's config.json, or set tp_size: 1; {_INSTEAD}",
        )


def _context_parallel(strategy: MeshSection, shape: Shape, seq_length: int) -> Iterator[Issue]:
    size, key = strategy.cp_size, "strategy.cp_size"
    if size == 1:
        return
    yield from _kind(shape, key, "context parallel", CONTEXT_PARALLEL)
    yield from _windows(shape)
    if (original := _changes_beyond(shape)) is not None and seq_length > original:
        yield Issue(
            (key, "data.seq_length"),
            f"the model's position embeddings (longrope) change beyond {original} tokens, and "
            f"only some shards of seq_length {seq_length} reach them",
            f"use data.seq_length: {original} or less, or set cp_size: 1; {_INSTEAD}",
        )
    heads, tp_size = _number(shape, "num_key_value_heads"), strategy.tp_size
    if strategy.cp_method == "ulysses" and heads and heads % (size * tp_size):
        over = f" over tp_size {tp_size}" if tp_size > 1 else ""
        yield Issue(
            ("strategy.cp_method", key),
            f"the model's num_key_value_heads {heads}{over} do not divide by cp_size {size}",
            "use cp_method: allgather, or another cp_size",
        )


def _pipeline(strategy: MeshSection, shape: Shape) -> Iterator[Issue]:
    size, key = strategy.pp_size, "strategy.pp_size"
    if size == 1:
        return
    yield from _kind(shape, key, "pipeline parallel", PIPELINE)
    # A stage has the numbers of its layers in the whole model, and so their sliding windows.
    kinds = {*(shape.get("layer_types") or ())} - {"full_attention", "sliding_attention"}
    if kinds:
        yield Issue(
            (key, "model.name_or_path"),
            f"the model has layers of {', '.join(sorted(kinds))}, which pipeline stages do not "
            "support",
            f"set pp_size: 1; {_INSTEAD}",
        )
    if shape.get("tie_word_embeddings") and strategy.tp_size > 1:
        yield Issue(
            (key, "strategy.tp_size"),
            "the model's head shares the weights of its embedding (tie_word_embeddings). With "
            f"tp_size {strategy.tp_size} the first and the last stage shard this weight "
            "differently",
            "use a model without tied weights, or set tp_size: 1",
        )
    each = 2 if strategy.pp_schedule in _TWO_STAGES else 1
    layers, stages = _number(shape, "num_hidden_layers"), size * each
    if layers is not None and layers < stages:
        twice = (
            f" x {each} stages on each, by pp_schedule {strategy.pp_schedule}," if each > 1 else ""
        )
        yield Issue(
            (key, "strategy.pp_schedule"),
            f"pp_size {size}{twice} needs {stages} layers, and the model has {layers}",
            f"use pp_size: {layers // each} or less"
            + (", or pp_schedule: 1f1b" if twice and layers >= size else ""),
        )


def _kind(shape: Shape, key: str, what: str, known: frozenset[str]) -> Iterator[Issue]:
    kind = shape.get("model_type")
    if kind is None or kind in known:
        return
    name = key.rpartition(".")[2]
    reason = f": {REASONS[name][kind]}" if kind in REASONS[name] else ""
    yield Issue(
        (key, "model.name_or_path"),
        f"{what} is not supported for model_type {kind}{reason}",
        f"set {name}: 1; {_INSTEAD}. Supported types: {', '.join(sorted(known))}",
    )


def _windows(shape: Shape) -> Iterator[Issue]:
    key = "strategy.cp_size"
    kinds = sorted(set(shape.get("layer_types") or ["full_attention"]))
    window = shape.get("sliding_window") if shape.get("use_sliding_window", True) else None
    if kinds == ["full_attention"] and not window:
        return
    how = f"in a sliding window of {window} tokens" if window else f"by {', '.join(kinds)}"
    yield Issue(
        (key, "model.name_or_path"),
        f"the model has layers that attend {how}, and cp_size needs layers that attend to all "
        "tokens",
        f"set cp_size: 1; {_INSTEAD}",
    )


def _long_rope(config: RunConfig, shape: Shape) -> Iterator[Issue]:
    # All rows of a micro-batch get the frequencies of its longest document, so that the loss of a
    # document would depend on its neighbors. Only rows that are all full get the same ones.
    original, data = _changes_beyond(shape), config.data
    if original is None or data.seq_length <= original:
        return
    kinds = {source.type for source in data.sources}
    if kinds <= {"fake"} or (data.packing and kinds <= {"fake", "text"} and not isolates_any(data)):
        return
    yield Issue(
        ("data.seq_length", "model.name_or_path"),
        f"the model (longrope) uses other position embeddings beyond {original} tokens, and data."
        f"seq_length is {data.seq_length}. One long document would change the embeddings of its "
        "whole micro-batch, so that the loss would depend on the micro-batch",
        f"set data.seq_length to {original} or less, or use a model with other rotary scaling. "
        "Packed text may be longer, because all of its samples are full",
    )


def _changes_beyond(shape: Shape) -> int | None:
    # The length beyond which rotary embeddings change their frequencies, or None.
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    name = "original_max_position_embeddings"
    # Some models have parameters for each type of layer.
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        if (part.get("rope_type") or part.get("type")) in ("longrope", "su"):
            return _number(part, name) or _number(shape, name)
    return None


def _number(shape: Shape, name: str) -> int | None:
    value = shape.get(name)
    value = shape.get(_ALIASES.get(name, name)) if value is None else value
    return value if isinstance(value, int) and not isinstance(value, bool) else None
