"""Stages of a pipeline, split from a causal language model, and the micro-batches sent through
them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import _PipelineSchedule

from isles.config.sections.strategy import PipelineSchedule
from isles.dist.batch import IGNORE_INDEX, Batch, isolation_inputs
from isles.errors import UserError
from isles.facts.memory.layers import rank_of_stage
from isles.strategies.head import LossHead
from isles.strategies.pipeline.tied import is_tied
from isles.strategies.pipeline.waiting import TimedStage, Waiting
from isles.strategies.sequence import MicroBatchPart

log = logging.getLogger(__name__)

ScaleLoss = Callable[[Tensor, Tensor], Tensor]
"""Function from the summed loss of a micro-batch, and its targets, to the loss that is
differentiated."""

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


def holder_of(schedule: PipelineSchedule, stage: int, pp_size: int) -> int:
    """The rank of the pipeline that holds a stage."""
    return rank_of_stage(stage, pp_size, returns=schedule == "zbv")


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
    model: Any,
    layers: range,
    *,
    is_first: bool,
    is_last: bool,
    dtype: torch.dtype,
) -> Any:
    """A copy of the model with one stage's layers, under their names in the whole model.

    Called with token ids (first stage) or hidden states, it returns hidden states. The last stage
    returns the summed loss of the targets, the loss of each token, or logits if it gets no targets.

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
    # A last stage with a tied head keeps the embedding's name for it: a model's own initialization
    # and its files may know the weight only by this name.
    if not (is_first or (is_last and is_tied(stage))):
        base.embed_tokens = _Elsewhere()
    if not is_last:
        base.norm = _Elsewhere()
        stage.lm_head = _Elsewhere()
    # The whole model's own forward, because some models scale their logits there.
    whole_forward = stage.forward
    head = LossHead(stage, whole_forward) if is_last else None

    def forward(
        x: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        of_tokens: bool = False,
        read: Tensor | None = None,
    ) -> Any:
        if read is not None:
            stage.routers.begin(read, stage.router_scale)
        options: dict[str, Any] = {"input_ids" if is_first else "inputs_embeds": x}
        if position_ids is not None:
            starts = None if cu_seqlens is None else cu_seqlens.flatten()
            options |= isolation_inputs(stage, position_ids, starts, stage.longest_document)
        if head is not None and targets is None:
            return whole_forward(**options, use_cache=False).logits
        if head is not None and targets is not None:
            # Within the stage: its weights are gathered only here.
            if of_tokens:
                return head.token_losses(whole_forward, options, targets)
            if stage.holds_losses and torch.is_grad_enabled():
                return head.token_losses(whole_forward, options, targets).sum()
            return head.loss_sum(whole_forward, options, targets)
        hidden = base(**options, use_cache=False).last_hidden_state
        assert hidden.dtype == dtype, (hidden.dtype, dtype)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Nothing is trained up to here (an adapter of later layers). torch's schedules send a
            # gradient to every stage: here it ends.
            hidden = hidden.detach().requires_grad_()
        return hidden

    stage.forward = forward
    stage.longest_document = None
    stage.routers = None
    stage.router_scale = 1.0
    stage.holds_losses = False
    """Whether several losses wait for their backward passes. A loss sum would keep a gradient of
    the whole head for each; the loss of each token keeps only hidden states."""
    return stage


def padded_count(schedule: PipelineSchedule, count: int, pp_size: int) -> int:
    """The smallest number of micro-batches, `count` or more, that a schedule supports."""
    if schedule != "interleaved-1f1b":
        return count
    # Micro-batches go through in rounds of equal length, with about one per rank.
    while count % max(1, count // pp_size):
        count += 1
    return count


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the stages of a pipeline get of one micro-batch, or of all micro-batches of a step.

    N: micro-batches. R: rows of each. T: this rank's tokens per sample.
    """

    input_ids: Tensor
    """(N * R, T)."""

    targets: Tensor
    """(N * R, T)."""

    position_ids: Tensor | None = None
    """(N * R, T), if documents are kept apart or sequences are sharded."""

    cu_seqlens: Tensor | None = None
    """(N, documents + 1), if known: see `Batch`. A micro-batch with fewer documents has empty ones
    at its end."""

    longest_document: int | None = None
    """See `Batch`."""

    read: Tensor | None = None
    """(N * R, T), see `places_read`; only for the routers of a mixture of experts."""

    @classmethod
    def of(cls, batch: Batch, part: MicroBatchPart) -> Inputs:
        """One micro-batch.

        Args:
            part: this rank's part of it.
        """
        is_whole = part.inputs["input_ids"].shape == batch.input_ids_BT.shape
        starts = batch.cu_seqlens_N if is_whole else None
        return cls(
            part.inputs["input_ids"],
            part.targets_BT,
            part.inputs.get("position_ids"),
            None if starts is None else starts[None],
            batch.longest_document,
        )

    def for_stages(self, stages: Sequence[Any]) -> dict[str, Tensor]:
        """Keyword arguments of the stages of a rank, except the targets."""
        for stage in stages:
            stage.longest_document = self.longest_document  # torch passes on only tensors
        given = {"position_ids": self.position_ids, "cu_seqlens": self.cu_seqlens}
        given |= {"read": self.read}
        return {name: value for name, value in given.items() if value is not None}


class MicroBatches:
    """The micro-batches of a step, held until the last, then padded to one shape.

    R: rows of the largest micro-batch. T: this rank's tokens per sample. N: micro-batches.
    """

    def __init__(self) -> None:
        self._held: list[Inputs] = []

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, inputs: Inputs) -> None:
        """Hold one micro-batch."""
        self._held.append(inputs)

    def take(self, count: int) -> Inputs:
        """All held micro-batches as `count` micro-batches of one shape, (N * R, T); clears the
        buffer.

        Rows and micro-batches added as padding have no targets, and each row is one document.
        """
        held, self._held = self._held, []
        return replace(self._take(held, count), read=self._read(held, count))

    def _read(self, held: list[Inputs], count: int) -> Tensor | None:
        reads = [x.read for x in held if x.read is not None]
        if not reads:
            return None
        rows = max(len(x) for x in reads)
        nothing = reads[0].new_zeros((rows * (count - len(reads)), reads[0].shape[1]))
        return torch.cat([*(_fill(x, rows, 0) for x in reads), nothing])

    def _take(self, held: list[Inputs], count: int) -> Inputs:
        rows = max(each.input_ids.shape[0] for each in held)
        inputs, targets = [x.input_ids for x in held], [x.targets for x in held]
        positions = [x.position_ids for x in held if x.position_ids is not None]
        filler = inputs[0].new_zeros((rows, inputs[0].shape[1]))
        empty = [filler] * (count - len(held))
        input_ids_NRT = torch.cat([*(_fill(x, rows, 0) for x in inputs), *empty])
        nothing = [torch.full_like(filler, IGNORE_INDEX)] * (count - len(held))
        targets_NRT = torch.cat([*(_fill(x, rows, IGNORE_INDEX) for x in targets), *nothing])
        if not positions:
            return Inputs(input_ids_NRT, targets_NRT)
        row = positions[0][:1]  # any positions will do for rows without targets
        more = [row.expand(rows - x.shape[0], -1) for x in positions]
        filled = [x for pair in zip(positions, more, strict=True) for x in pair]
        unused = row.expand(rows * (count - len(held)), -1)
        positions_NRT = torch.cat([*filled, unused])
        starts = [x.cu_seqlens[0] for x in held if x.cu_seqlens is not None]
        if not starts:
            return Inputs(input_ids_NRT, targets_NRT, positions_NRT)
        own_rows = [len(x) for x in inputs] + [0] * (count - len(held))
        starts += [starts[0][:1]] * (count - len(held))  # each starts at 0
        # An added row is one document, longer than the others.
        is_filled = min(own_rows) < rows
        longest = None if is_filled else max(x.longest_document or 0 for x in held) or None
        cu_seqlens = _add_rows(starts, own_rows, rows, filler.shape[1])
        return Inputs(input_ids_NRT, targets_NRT, positions_NRT, cu_seqlens, longest)


def _add_rows(starts: list[Tensor], own_rows: list[int], rows: int, length: int) -> Tensor:
    # Boundaries of micro-batches with added rows, as a matrix, with empty documents at the ends.
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=starts[0].device) * length
    whole = [torch.cat([x, ends[own:]]) for x, own in zip(starts, own_rows, strict=True)]
    most = max(map(len, whole))
    return torch.stack([torch.cat([x, x[-1:].expand(most - len(x))]) for x in whole])


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
        loss: called with the summed loss of each micro-batch.
    """

    def __init__(
        self,
        modules: dict[int, nn.Module],
        schedule: PipelineSchedule,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        hidden: tuple[int, torch.dtype],
        loss: ScaleLoss,
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
        self.waiting = Waiting(device)

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

    def train(self, batch: Inputs, count: int) -> None:
        """Forward and backward passes of all micro-batches of a step. All ranks must call this.

        Args:
            batch: as `MicroBatches.take` returns it.
            count: the number of micro-batches.
        """
        rows, tokens = batch.input_ids.shape
        shape = (count, rows // count, tokens)
        schedule = self._schedules.get(shape)
        if schedule is None:
            if len(self._schedules) == _KEPT:
                self._schedules.pop(next(iter(self._schedules)))
            schedule = self._schedules[shape] = self._make_schedule(*shape)
        inputs = (batch.input_ids,) if 0 in self._modules else ()
        stages: list[Any] = [*self._modules.values()]
        options: dict[str, Any] = {**batch.for_stages(stages)}
        target = None
        for stage in stages:
            stage.holds_losses = isinstance(schedule, ScheduleGPipe) and count > 1
        if self.has_last:
            target = options["targets"] = batch.targets
        with self.waiting.step():
            schedule.step(*inputs, target=target, return_outputs=False, **options)

    def forward(self, batch: Inputs, *, of_tokens: bool = False) -> Tensor | None:
        """Forward pass of one micro-batch of any shape. All ranks must call this.

        Returns:
            The summed loss (or the loss of each token, as the targets) on the rank of the last
            stage; None on other ranks.
        """
        x: Any = batch.input_ids
        options = batch.for_stages([*self._modules.values()])
        for index, module in self._modules.items():
            before = holder_of(self._name, index - 1, self._pp_size)
            if index > 0 and before != self._pp_rank:
                x = torch.empty(
                    (*batch.input_ids.shape, self._hidden_size),
                    dtype=self._dtype,
                    device=self._device,
                )
                dist.recv(x, group=self._group, group_src=before)
            if index == self.num_stages - 1:
                loss: Tensor = module(x, targets=batch.targets, of_tokens=of_tokens, **options)
                return loss
            x = module(x, **options)
            after = holder_of(self._name, index + 1, self._pp_size)
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
            TimedStage(
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
        for stage in stages:
            stage.waiting = self.waiting
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
