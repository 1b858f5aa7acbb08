"""The model of a run file: empty, or whole on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from isles.config.sections.run import RunConfig
from isles.config.sections.training import Precision
from isles.facts.flops import train_flops_per_token
from isles.models.adapter import frozen_dtype
from isles.models.build import build_empty_model, build_model


def weights_dtype(precision: Precision) -> torch.dtype:
    """What trained weights are held in."""
    return torch.bfloat16 if precision == "bf16-true" else torch.float32


def empty_model(config: RunConfig, tokenizer: Any) -> nn.Module:
    """The run's model on the meta device, with its adapter.

    Args:
        config: the run file.
        tokenizer: of the run; None where it has none.

    Raises:
        UserError, MissingDependencyError: see `build_empty_model`.
    """
    precision = config.training.precision
    return build_empty_model(
        config.model,
        dtype=weights_dtype(precision),
        vocab_size=_vocab_size(config, tokenizer),
        adapter=config.adapter,
        frozen_dtype=frozen_dtype(precision, config.adapter),
    )


def whole_model(
    config: RunConfig,
    tokenizer: Any,
    device: torch.device,
    *,
    frozen: torch.dtype | None = None,
) -> nn.Module:
    """The run's model as it is before the first step, with its adapter.

    Args:
        config: the run file.
        tokenizer: of the run; None where it has none.
        device: where it lies.
        frozen: what the weights beside an adapter are held in; None: as in training.

    Raises:
        UserError, MissingDependencyError: see `build_model`.
    """
    precision = config.training.precision
    return build_model(
        config.model,
        device=device,
        dtype=weights_dtype(precision),
        seed=config.seed,
        vocab_size=_vocab_size(config, tokenizer),
        adapter=config.adapter,
        frozen_dtype=frozen or frozen_dtype(precision, config.adapter),
    )


def count_parameters(model: nn.Module, *, trained: bool = False) -> int:
    """Numbers in a model, or those that are trained; a weight in 4 bits counts by its numbers."""
    return sum(_numel(p) for p in model.parameters() if p.requires_grad or not trained)


def flops_per_token(model: Any, seq_length: int) -> float:
    """Training FLOPs for one token of a model that was not cut yet; see `train_flops_per_token`."""
    shape = model.config
    # What is trained whole beside a frozen model has a copy there that computes nothing.
    at_work = {n: p for n, p in model.named_parameters() if ".original_module." not in n}
    if not getattr(shape, "tie_word_embeddings", False):
        looked_up = {id(p) for p in model.get_input_embeddings().parameters()}
        at_work = {n: p for n, p in at_work.items() if id(p) not in looked_up}
    return train_flops_per_token(
        matmul_params=sum(_numel(p) for p in at_work.values()),
        frozen_params=sum(_numel(p) for p in at_work.values() if not p.requires_grad),
        num_layers=int(getattr(shape, "num_hidden_layers", 0)),
        hidden_size=int(getattr(shape, "hidden_size", 0)),
        seq_length=seq_length,
    )


def _numel(parameter: nn.Parameter) -> int:
    quantized: Any = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantized is None else int(quantized.shape.numel())


def _vocab_size(config: RunConfig, tokenizer: Any) -> int | None:
    """A tokenizer that was trained for the run decides how many tokens the model knows."""
    trained = tokenizer is not None and config.tokenizer.train_vocab_size is not None
    return len(tokenizer) if trained else None
