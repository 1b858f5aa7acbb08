"""Stages of a pipeline, split from a causal language model, and the micro-batches sent through
them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from isles.config.sections.strategy import PipelineSchedule
from isles.dist.batch import IGNORE_INDEX, isolation_inputs
from isles.errors import UserError

log = logging.getLogger(__name__)

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Function from logits and targets of a micro-batch to its loss."""

_KEPT = 2
"""Number of cached schedules; each holds buffers for all its micro-batches. A run alternates
between at most two, unless its rows are redistributed."""


class _Elsewhere(nn.Module):
    """Placeholder for a layer of another stage, so that all other names stay the same."""

    weight = None
    """None, like a layer without weights: there is nothing to shard."""

    def forward(self, hidden: Any, *_args: Any, **_kwargs: Any) -> Any:
        return hidden


def stages_per_rank(schedule: PipelineSchedule) -> int:
    """Number of stages per rank."""
    return 2 if schedule in ("interleaved-1f1b", "zbv") else 1


def stage_indices(schedule: PipelineSchedule, pp_rank: int, pp_size: int) -> tuple[int, ...]:
    """The stages of a rank: one per round, or (zbv) one on the way down and one on the way back."""
    match schedule:
        case "1f1b" | "gpipe":
            return (pp_rank,)
        case "interleaved-1f1b":
            return (pp_rank, pp_rank + pp_size)
        case "zbv":
            return (pp_rank, 2 * pp_size - 1 - pp_rank)


def rank_of_stage(schedule: PipelineSchedule, stage: int, pp_size: int) -> int:
    """The rank of the pipeline that holds a stage."""
    way_back = schedule == "zbv" and stage >= pp_size
    return 2 * pp_size - 1 - stage if way_back else stage % pp_size


def assign_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, divided evenly.

    Remaining layers go to the middle stages first, then to the first stage, and never to the last:
    the last stage has the head, which costs as much as several layers, the first only the
    embedding.
    """
    assert num_layers >= num_stages
    least, over = divmod(num_layers, num_stages)
    order = [*range(1, num_stages - 1), 0]
    counts = [least + (stage in order[:over]) for stage in range(num_stages)]
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def check_model(model: Any) -> None:
    """Refuse a model with custom code, whose stages are not known to be exact.

    `config/rules/shape.py` has already checked the model's config.

    Raises:
        UserError: the model's code is not from transformers.
    """
    base = getattr(model, "base_model", None)
    is_known = all(hasattr(base, name) for name in ("layers", "embed_tokens", "norm"))
    if not is_known or not type(model).__module__.startswith("transformers."):
        raise UserError(
            f"{type(model).__name__} cannot be split into stages because it has custom code; only "
            "models of transformers are known to split exactly",
            where="strategy.pp_size",
            fix="set strategy.pp_size: 1; strategy: {kind: fsdp} shards any model over the ranks",
            id="strategy.model",
        )


def cut_stage(
    model: Any, layers: range, *, is_first: bool, is_last: bool, dtype: torch.dtype
) -> Any:
    """A copy of the model with one stage's layers, under their names in the whole model.

    Called with token ids (first stage) or hidden states, it returns hidden states, or logits (last
    stage).

    Args:
        model: the whole model, on the meta device, so that the copy costs nothing.
        layers: indices of the stage's layers.
        is_first, is_last: whether the stage has the embedding, and whether it has the norm and
        head.
        dtype: dtype of the hidden states, for the receive buffers of the next stage.
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
            # The whole model's own forward, because some models scale their logits there.
            return whole_forward(**options, use_cache=False).logits
        hidden = base(**options, use_cache=False).last_hidden_state
        assert hidden.dtype == dtype, (hidden.dtype, dtype)
        return hidden

    stage.forward = forward
    return stage


def padded_count(schedule: PipelineSchedule, count: int, pp_size: int) -> int:
    """The smallest number of micro-batches, `count` or more, that a schedule supports."""
    if schedule != "interleaved-1f1b":
        return count
    # Micro-batches go through in rounds of equal length, with about one per rank.
    while count % max(1, count // pp_size):
        count += 1
    return count


class MicroBatches:
    """The micro-batches of a step, held until the last, then padded to one shape.

    R: rows of the largest micro-batch. T: this rank's tokens per sample. N: micro-batches.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, input_ids: Tensor, targets: Tensor, position_ids: Tensor | None) -> None:
        """Hold one micro-batch."""
        self._held.append((input_ids, targets, position_ids))

    def take(self, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """All held micro-batches as `count` micro-batches of one shape, (N * R, T); clears the
        buffer.

        Rows and micro-batches added as padding have no targets.
        """
        held, self._held = self._held, []
        rows = max(input_ids.shape[0] for input_ids, _, _ in held)
        inputs, targets, positions = zip(*held, strict=True)
        filler = inputs[0].new_zeros((rows, inputs[0].shape[1]))
        empty = [filler] * (count - len(held))
        input_ids_NRT = torch.cat([*(_fill(x, rows, 0) for x in inputs), *empty])
        nothing = [torch.full_like(filler, IGNORE_INDEX)] * (count - len(held))
        targets_NRT = torch.cat([*(_fill(x, rows, IGNORE_INDEX) for x in targets), *nothing])
        if positions[0] is None:
            return input_ids_NRT, targets_NRT, None
        row = positions[0][:1]  # any positions will do for rows without targets
        more = [row.expand(rows - x.shape[0], -1) for x in positions]
        filled = [x for pair in zip(positions, more, strict=True) for x in pair]
        unused = row.expand(rows * (count - len(held)), -1)
        return input_ids_NRT, targets_NRT, torch.cat([*filled, unused])


def _fill(x_BT: Tensor, rows: int, value: int) -> Tensor:
    missing = rows - x_BT.shape[0]
    return torch.cat([x_BT, x_BT.new_full((missing, x_BT.shape[1]), value)]) if missing else x_BT


class Pipeline:
    """This rank's stages, and its communication with the neighboring stages.

    Args:
        modules: the stages of this rank by their number in the pipeline, in order.
        schedule: order of the micro-batches.
        group: the ranks that hold the stages of one copy of the model.
        hidden: size and dtype of the hidden states that travel between stages.
        loss: loss of the last stage.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        schedule: PipelineSchedule,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hidden: tuple[int, torch.dtype],
        loss: LossSum,
    ) -> None:
        self._modules = modules
        self._name = schedule
        self._group = group
        self._device = device
        self._hidden_size, self._dtype = hidden
        self._loss = loss
        self._pp_size = dist.get_world_size(group)
        self._pp_rank = dist.get_rank(group)
        self.num_stages = self._pp_size * len(modules)
        self.stages = tuple(modules)
        self.ranks = dist.get_process_group_ranks(group)
        self._schedules: dict[tuple[int, int, int], _PipelineSchedule] = {}
        self._warned = False

    @property
    def has_last(self) -> bool:
        """True if this rank holds the last stage, which computes the loss."""
        return self.num_stages - 1 in self._modules

    def count(self, given: int) -> int:
        """Number of micro-batches to which the step's micro-batches must be padded."""
        count = padded_count(self._name, given, self._pp_size)
        if not self._warned and (count != given or given < self._pp_size):
            self._warned = True
            if dist.get_rank() != 0:
                return count  # other ranks would print the same
            idle = (self._pp_size - 1) / (given + self._pp_size - 1)
            added = f", padded with {count - given} empty ones" if count != given else ""
            log.warning(
                "pipeline: a step has %d micro-batches for %d ranks in a row%s, so each rank waits "
                "about %.0f%% of the time. To shorten the wait, use a smaller "
                "training.micro_batch_size or a larger training.global_batch_size",
                *(given, self._pp_size, added, 100 * idle),
            )
        return count

    def train(self, batch: tuple[Tensor, Tensor, Tensor | None], count: int) -> None:
        """Forward and backward passes of all micro-batches of a step. All ranks must call this.

        Args:
            batch: input ids, targets and position ids, as `MicroBatches.take` returns them.
            count: the number of micro-batches.
        """
        input_ids, targets, positions = batch
        shape = (count, input_ids.shape[0] // count, input_ids.shape[1])
        schedule = self._schedules.get(shape)
        if schedule is None:
            if len(self._schedules) == _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            schedule = self._schedules[shape] = self._make_schedule(*shape)
        inputs = (input_ids,) if 0 in self._modules else ()
        options: dict[str, Any] = {} if positions is None else {"position_ids": positions}
        target = targets if self.has_last else None
        # Returned outputs would keep the logits of all micro-batches in memory.
        schedule.step(*inputs, target=target, return_outputs=False, **options)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor | None:
        """Forward pass of one micro-batch of any shape. All ranks must call this.

        Returns:
            The logits on the rank of the last stage; None on other ranks.
        """
        x: Any = input_ids
        for index, module in self._modules.items():
            before = rank_of_stage(self._name, index - 1, self._pp_size)
            if index > 0 and before != self._pp_rank:
                x = torch.empty(
                    (*input_ids.shape, self._hidden_size), dtype=self._dtype, device=self._device
                )
                dist.recv(x, group=self._group, group_src=before)
            x = module(x, position_ids)
            if index == self.num_stages - 1:
                logits: Tensor = x
                return logits
            after = rank_of_stage(self._name, index + 1, self._pp_size)
            if after != self._pp_rank:
                dist.send(x.contiguous(), group=self._group, group_dst=after)
        return None

    def _make_schedule(self, count: int, rows: int, tokens: int) -> _PipelineSchedule:
        # With shapes given, torch need not run the stages to find them. Hidden states require
        # gradients: otherwise no buffers are made for their gradients.
        hidden = torch.empty(
            (rows, tokens, self._hidden_size), dtype=self._dtype, device="meta", requires_grad=True
        )
        ids = torch.empty((rows, tokens), dtype=torch.int64, device="meta")
        stages = [
            PipelineStage(
                module,
                index,
                self.num_stages,
                self._device,
                input_args=ids if index == 0 else hidden,
                output_args=hidden,
                group=self._group,
            )
            for index, module in self._modules.items()
        ]
        return self._order(stages, count)

    def _order(self, stages: Sequence[Any], count: int) -> _PipelineSchedule:
        # The loss is already divided by the tokens of the step, not by micro-batches.
        options: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
        match self._name:
            case "1f1b" if count >= self._pp_size:
                return Schedule1F1B(stages[0], count, **options)
            case "1f1b" | "gpipe":
                # With fewer micro-batches than ranks 1F1B has no steady state: it is GPipe.
                return ScheduleGPipe(stages[0], count, **options)
            case "interleaved-1f1b":
                return ScheduleInterleaved1F1B(list(stages), count, **options)
            case "zbv":
                return ScheduleZBVZeroBubble(list(stages), count, **options)
