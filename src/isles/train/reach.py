"""Warnings about weights that a run does not train, and data that it cannot learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from isles.config.sections.model import ModelConfig
from isles.config.sections.run import RunConfig
from isles.data.mix import Dataset
from isles.dist.batch import IGNORE_INDEX
from isles.facts.units import format_count
from isles.models.untrained import beyond_adapter, never_trained

_SAMPLES = 256
"""Number of samples that are searched for tokens."""

_SHOWN = 8


def adapter_notes(
    config: RunConfig, model: Any, tokenizer: Any, training: Dataset
) -> Iterator[str]:
    """Warnings for the user about weights that the adapter does not train. One rank calls this."""
    adapted, total, names = beyond_adapter(model)
    if names:
        given = config.adapter.target_modules
        targets = [given] if isinstance(given, str) else [*given]
        fix = f"adapter.target_modules: [{', '.join([*targets, *names])}]"
        if config.adapter.dropout or config.adapter.use_dora:
            fix += " without adapter.dropout and adapter.use_dora"
        yield (
            f"{format_count(adapted)} of {format_count(total)} expert weights have an adapter. "
            f"{', '.join(names)} are stacked matrices instead of linear layers, so all-linear "
            f"does not include them. {fix} adapts them, and adapter.type: none trains them whole"
        )
    if tokenizer is None:
        return
    ids = _tokens(training)
    untrained = never_trained(
        model, config.model, config.adapter, ids, tokenizer.added_tokens_decoder
    )
    if not untrained:
        return
    every = sorted({i for found in untrained.values() for i in found})
    shown = ", ".join(tokenizer.convert_ids_to_tokens(every[:_SHOWN]))
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    if getattr(model.config.get_text_config(), "tie_word_embeddings", False):
        fix = (
            "use a base model that knows them (its -Instruct version), another "
            "tokenizer.chat_template, or adapter.type: none"
        )
    else:
        fix = f"add adapter.modules_to_save: [{', '.join(untrained)}]"
    yield (
        f"the data uses {shown}{more}, which the base model has not learned. The row in "
        f"{' and '.join(untrained)} is zero, tiny or equal to another token's, and the adapter "
        f"does not change it, so the model may never write the token; {fix}"
    )


def balance_notes(config: ModelConfig, model: Any, coefficient: float) -> Iterator[str]:
    """Warnings for the user about a mixture from scratch whose experts nothing balances."""
    if coefficient == 0 and config.router_aux_loss_coef is None:
        yield (
            f"nothing balances the experts of model_type {model.config.model_type}: transformers "
            "has no balancing loss for it, and isles does not change the bias of its routers. Most "
            "tokens may go to a few experts. mixtral, olmoe and qwen3_moe have a balancing loss"
        )


def _tokens(training: Dataset) -> list[int]:
    # The tokens that the first samples read or train on, without padding.
    count = min(_SAMPLES, training.num_samples)
    # Read lengths first, so that a stream keeps the segments of all these samples. Reading the
    # samples one at a time would drop the segments.
    lengths = training.lengths(np.arange(count)).reshape(-1)
    rows = training.rows(np.arange(count))
    is_read = np.arange(rows.input_ids_BT.shape[1]) < lengths[:, None]
    targets = rows.targets_BT[rows.targets_BT != IGNORE_INDEX]
    found: list[int] = np.unique(np.concatenate([rows.input_ids_BT[is_read], targets])).tolist()
    return found
