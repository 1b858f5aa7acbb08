"""Adapters: a frozen Hugging Face model with small trained matrices added to it, through peft.

Adapters are added in place, so the model keeps its class and only some names change. `base_name`
converts a name to its form in the model's own files.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isles.config.sections.model import AdapterConfig, missing_package
from isles.config.sections.training import Precision
from isles.dist.batch import MIXED_DTYPE
from isles.errors import UserError
from isles.models.four_bit import CONSTANTS, PACKED, is_four_bit
from isles.models.routers import find_routers

_ALL = "all-linear"

_NAME = "default"
"""Name of isles' adapter; peft allows several adapters per model."""

_FRESH = (".lora_A.", ".lora_B.", ".lora_embedding_A.", ".lora_embedding_B.")
_MAGNITUDE = ".lora_magnitude_vector."


def frozen_dtype(precision: Precision, adapter: AdapterConfig) -> torch.dtype | None:
    """The type of the weights that an adapter leaves frozen; None: as the trained weights.

    A forward pass under mixed precision computes with a 16-bit copy. Frozen weights have no
    gradients, so that copy is enough.
    """
    return None if adapter.type == "none" else MIXED_DTYPE.get(precision)


def import_peft(adapter: AdapterConfig) -> Any:  # an untyped library
    """Import the package peft.

    Raises:
        MissingDependencyError: peft, or bitsandbytes for qlora, is not installed.
    """
    if missing := missing_package(adapter):
        raise missing
    with quiet_imports():  # peft imports torchao
        import peft
    return peft


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Within this context, torchao does not warn of each CUDA library that it cannot load."""
    noisy = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree", "DeepSpeed")]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)


def add_adapter(model: Any, adapter: AdapterConfig, *, dtype: torch.dtype, name: str) -> None:
    """Freeze a model and add an adapter to it, with uninitialized weights.

    Args:
        model: a Hugging Face model, with weights or on the meta device.
        adapter: the run file's section, of type lora or qlora.

    Raises:
        MissingDependencyError: peft is not installed.
        UserError: modules in the run file do not exist or cannot have an adapter.
    """
    peft = import_peft(adapter)
    stacks = _find_stacks(model, adapter)
    targets = _find_targets(model, adapter)
    for whole in _named(model, adapter.modules_to_save, "adapter.modules_to_save"):
        inner = [name for name in targets if name == whole or name.startswith(f"{whole}.")]
        if inner:
            raise UserError(
                f"{whole} cannot be trained whole while {inner[0]} inside it gets an adapter",
                where="adapter.modules_to_save",
                fix="remove one of the two from its list",
                id="adapter.modules",
            )
        if any(is_four_bit(module) for module in model.get_submodule(whole).modules()):
            raise UserError(
                f"{whole} is held in 4 bits and cannot be trained whole",
                where="adapter.modules_to_save",
                fix="move it to adapter.target_modules, or set adapter.type: lora",
                id="adapter.modules",
            )
    _check_tied(model, [*targets, *_named(model, adapter.modules_to_save)])
    # For adapter_config.json: the short names, if they match the same modules.
    short = [name for name in adapter.target_modules if name not in stacks]
    if _ALL in (adapter.target_modules, *short):
        short = sorted({name.rpartition(".")[2] for name in targets})
        short = short if set(_named(model, short)) == set(targets) else targets
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=short,
        target_parameters=stacks or None,
        modules_to_save=list(adapter.modules_to_save) or None,
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        base_model_name_or_path=name,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about things checked above, or corrected by peft
            peft.inject_adapter_in_model(config, model, _NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(
            f"{type(model).__name__} cannot have this adapter: {str(error).splitlines()[0]}",
            where="adapter.target_modules",
            fix=f"use all-linear, or names among {', '.join(_known_names(model))}",
            id="adapter.modules",
        ) from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        # peft would cast every input to fp32, and autocast or FSDP2's policy casts it back: two
        # more passes over each layer's input, for the same gradients, bit for bit without dropout.
        # DoRA computes with the input's own type.
        if hasattr(module, "cast_input_dtype_enabled") and not adapter.use_dora:
            module.cast_input_dtype_enabled = False


def base_name(name: str) -> str | None:
    """A parameter's name in the files of the base model; None for parameters that are not there:
    an adapter's, and the constants of weights in 4 bits."""
    if is_fresh(name) or _MAGNITUDE in name or name.endswith(CONSTANTS):
        return None
    while ".base_layer." in name:  # each adapted stack of experts adds one
        name = name.replace(".base_layer.", ".", 1)
    for inserted in (".original_module.", f".modules_to_save.{_NAME}."):
        name = name.replace(inserted, ".")
    return name.removesuffix(PACKED)


def is_fresh(name: str) -> bool:
    """True if a parameter is a low-rank matrix, which starts with random numbers or zeros."""
    return any(part in name for part in _FRESH)


def magnitudes(model: nn.Module) -> Iterator[tuple[nn.Parameter, str, Any, int]]:
    """The vectors that DoRA computes from the base weights before the first step.

    Yields:
        The vector, the name of its matrix in the base model's files, the module that has the
        matrix, and the axis of the lengths.
    """
    for name, module in model.named_modules():
        vectors: Any = getattr(module, "lora_magnitude_vector", None)
        if vectors is not None and _NAME in vectors:
            base: Any = module.base_layer
            own = base_name(f"{name}.base_layer.weight")
            assert own is not None
            axis = 0 if vectors[_NAME].fan_in_fan_out else 1
            yield vectors[_NAME].weight, own, base, axis


def lengths(weight: Tensor, axis: int) -> Tensor:
    """The lengths of a matrix's rows (axis 1) or columns (0), in fp32.

    Source: Liu et al. 2024 (arXiv:2402.09353), section 4.1.
    """
    found: Tensor = torch.linalg.vector_norm(weight.float(), dim=axis)
    return found


def stacked(model: nn.Module) -> list[str]:
    """The names of the matrices of all experts of a layer, which are one tensor and no module."""
    return [name for name, p in model.named_parameters() if p.ndim > 2 and "expert" in name]


def _find_stacks(model: nn.Module, adapter: AdapterConfig) -> list[str]:
    # The names in the run file that match stacked matrices of experts, and no module.
    wanted = () if isinstance(adapter.target_modules, str) else adapter.target_modules
    modules, known = [name for name, _ in model.named_modules()], stacked(model)
    found = [one for one in wanted if _matches(known, one) and not _matches(modules, one)]
    for key, value in (("dropout", adapter.dropout), ("use_dora", adapter.use_dora)):
        if found and value:
            raise UserError(
                f"adapter.{key} does not work for the stacked matrices {', '.join(found)}: peft "
                "adds their adapter to the weights, not to the outputs",
                where=f"adapter.{key}",
                fix=f"delete adapter.{key}, or remove these names from adapter.target_modules",
                id="adapter.modules",
            )
    return found


def _find_targets(model: Any, adapter: AdapterConfig) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    stacks = _find_stacks(model, adapter)
    given = adapter.target_modules
    names = [given] if isinstance(given, str) else [n for n in given if n not in stacks]
    found: list[str] = []
    if _ALL in names:
        lm_head, routers = model.get_output_embeddings(), find_routers(model)
        # Linear layers; some models have their own class (GPT-2's Conv1D).
        found = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
            and module is not lm_head
            and name not in routers  # a router returns more than a product
        ]
        if not found:
            raise UserError(
                f"{type(model).__name__} has no linear layers except its head",
                where="adapter.target_modules: all-linear",
                fix=f"list the modules: {', '.join(_known_names(model))}",
                id="adapter.modules",
            )
    # Two parts of a name, because `down_proj` alone is often also a linear layer.
    known = dict.fromkeys(".".join(name.split(".")[-2:]) for name in stacked(model))
    others = [name for name in names if name != _ALL]
    named = _named(model, others, "adapter.target_modules", known)
    return list(dict.fromkeys([*found, *named]))


def _named(
    model: nn.Module, wanted: Iterable[str], key: str = "", stacks: Iterable[str] = ()
) -> list[str]:
    # The modules that match the run file's names by their ends, as in peft. The error also lists
    # the stacks of experts that the key accepts.
    every = [name for name, _ in model.named_modules() if name]
    found: list[str] = []
    for one in wanted:
        matches = _matches(every, one)
        if not matches:
            ends = {name.rpartition(".")[2] for name in every}
            near = difflib.get_close_matches(one, {*ends, *stacks}, n=3)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            experts = ", ".join(stacks)
            experts = f", and the stacks of experts {experts}" if experts else ""
            raise UserError(
                f"{type(model).__name__} has no module {one!r}",
                where=key,
                fix=f"{meant}it has {', '.join(_known_names(model))}{experts}",
                id="adapter.modules",
            )
        found += matches
    return list(dict.fromkeys(found))


def _matches(names: Iterable[str], end: str) -> list[str]:
    return [name for name in names if name == end or name.endswith(f".{end}")]


def _check_tied(model: Any, chosen: list[str]) -> None:
    # Training one of two modules that share a weight would make the two differ.
    if not getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        return
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    tied = [name for name in chosen if id(model.get_submodule(name)) in ends]
    if tied:
        raise UserError(
            f"{tied[0]} cannot be trained separately in {type(model).__name__}: its head and its "
            "embedding share their weights (tie_word_embeddings)",
            where="adapter.modules_to_save and adapter.target_modules",
            fix=f"remove {tied[0]}, or train every weight: adapter.type: none",
            id="adapter.modules",
        )


def _known_names(model: nn.Module) -> list[str]:
    # The short names of modules that can get an adapter, without duplicates.
    from transformers.pytorch_utils import Conv1D

    kinds = nn.Linear | Conv1D | nn.Embedding
    named = (name for name, module in model.named_modules() if isinstance(module, kinds))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in named))
