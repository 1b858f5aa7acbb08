"""Cutting a Hugging Face causal language model into the stages of a pipeline."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from isles.config.sections.strategy import PipelineSchedule
from isles.dist.batch import isolation_inputs
from isles.errors import UserError
from isles.facts.architectures import PIPELINE

VERIFIED = tuple(sorted(PIPELINE))
"""Kinds of models (`model_type`) whose stages, one after the other, give the same bits as the whole
model; tests/dist/test_pipeline.py holds each of them to it. A kind that scales its embeddings in
the base model's own forward, as granite does, would scale every stage's input."""


class _Elsewhere(nn.Module):
    """Stands where another stage has a layer, so that the names of all others stay."""

    weight = None
    """As a layer without one: there is nothing to cut here."""

    def forward(self, hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
        """Hand on what came."""
        return hidden


def stages_per_rank(schedule: PipelineSchedule) -> int:
    """How many stages a rank holds."""
    return 2 if schedule in ("interleaved-1f1b", "zbv") else 1


def stage_indices(schedule: PipelineSchedule, pp_rank: int, pp_size: int) -> tuple[int, ...]:
    """The stages of a rank: its turn in each round, or (zbv) one on the way down and one back."""
    match schedule:
        case "1f1b" | "gpipe":
            return (pp_rank,)
        case "interleaved-1f1b":
            return (pp_rank, pp_rank + pp_size)
        case "zbv":
            return (pp_rank, 2 * pp_size - 1 - pp_rank)


def rank_of_stage(schedule: PipelineSchedule, stage: int, pp_size: int) -> int:
    """Which of the pipeline's ranks holds a stage."""
    way_back = schedule == "zbv" and stage >= pp_size
    return 2 * pp_size - 1 - stage if way_back else stage % pp_size


def deal_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as even as they go.

    Those left over go to the stages in the middle first, then to the first, and to the last never:
    the last has the head, which weighs as much as some layers, the first only the embedding.
    """
    assert num_layers >= num_stages
    least, over = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0]
    counts = [least + (stage in order[:over]) for stage in range(num_stages)]
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_model(model: Any, num_stages: int) -> None:
    """Refuse a model whose stages would not be the same function as the whole.

    Args:
        model: the whole model.
        num_stages: of the pipeline.

    Raises:
        UserError: saying why, and what to do.
    """
    reason = _why_not(model)
    if reason is not None:
        raise UserError(
            f"{type(model).__name__} cannot be cut into stages: {reason}",
            where="strategy.pp_size",
            fix="set strategy.pp_size: 1; strategy: {kind: fsdp} cuts any model over the ranks",
            id="strategy.model",
        )
    num_layers = len(model.base_model.layers)
    if num_layers < num_stages:
        raise UserError(
            f"{num_layers} layers do not fill the {num_stages} stages of the pipeline",
            where="strategy.pp_size",
            fix="use a smaller strategy.pp_size, or pp_schedule: 1f1b, which has one stage a rank",
            id="strategy.model",
        )


def _why_not(model: Any) -> str | None:
    config = model.config
    base: Any = getattr(model, "base_model", None)
    parts = ("layers", "embed_tokens", "norm")
    missing = [f"base_model.{name}" for name in parts if not hasattr(base, name)]
    if not hasattr(model, "lm_head"):
        missing.append("lm_head")
    if missing:
        return f"it has no {', no '.join(missing)}"
    if config.model_type not in VERIFIED or not type(model).__module__.startswith("transformers."):
        return (
            f"model_type {config.model_type} is not among those that are known to split exactly: "
            f"{', '.join(VERIFIED)}"
        )
    # Before the weights exist nothing is tied yet, so the config is asked too.
    tied = model.lm_head.weight is base.embed_tokens.weight
    if tied or getattr(config, "tie_word_embeddings", False):
        return "its head shares the embedding's weights (tie_word_embeddings), two stages apart"
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    if kinds != ["full_attention"]:
        return f"its layers are of several kinds ({', '.join(kinds)})"
    if window := getattr(config, "sliding_window", None):
        return f"its attention has a sliding window ({window} tokens)"
    return None


def cut_stage(
    model: Any, layers: range, *, is_first: bool, is_last: bool, dtype: torch.dtype
) -> Any:
    """A copy of the model with one stage's layers, under their names in the whole model.

    Called with token ids (first stage) or hidden states it returns hidden states, or (last stage)
    logits.

    Args:
        model: the whole model, on the meta device, so that the copy costs nothing.
        layers: indices of the stage's layers.
        is_first, is_last: whether the embedding, and the norm and the head, are part of it.
        dtype: of the hidden states, for which the next stage has made room.
    """
    stage = copy.deepcopy(model)
    base = stage.base_model
    for index in range(len(base.layers)):
        if index not in layers:
            base.layers[index] = _Elsewhere()
    if not is_first:
        base.embed_tokens = _Elsewhere()
    if not is_last:
        base.norm = _Elsewhere()
        stage.lm_head = _Elsewhere()
    whole_forward = stage.forward

    def forward(x: Tensor, position_ids: Tensor | None = None) -> Any:
        options: dict[str, Any] = {"input_ids" if is_first else "inputs_embeds": x}
        if position_ids is not None:
            options |= isolation_inputs(stage, position_ids)
        if is_last:
            # The whole model's own forward: some kinds scale their logits there.
            return whole_forward(**options, use_cache=False).logits
        hidden = base(**options, use_cache=False).last_hidden_state
        assert hidden.dtype == dtype, (hidden.dtype, dtype)
        return hidden

    stage.forward = forward
    return stage
