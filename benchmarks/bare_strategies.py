"""The training loop of bare_loop.py under each strategy, as one writes it by hand for one model.

`benchmarks/strategies.py` compares isles with it; it knows nothing of isles. The strategies are
ddp, fsdp, zero1, zero2 and zero3. The loss of a step is the sum over its target tokens, divided by
their number over all ranks. fp32, on the CPU. B: rows, T: tokens in a row, V: vocabulary.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bare_loop import Rows, Settings, learning_rate, make_optimizer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


class Stepper(Protocol):
    """A model that is held in some way, and its optimizer."""

    model: Any

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose learning rate the loop sets."""
        ...

    def step(self, loss: Tensor) -> Any:
        """Backward, clip, step, clear the gradients; returns the gradient norm."""
        ...


class TorchStepper:
    """DistributedDataParallel, or fully_shard for each layer and the rest."""

    def __init__(self, strategy: str, model: Any, settings: Settings) -> None:
        self.max_norm = settings.max_norm
        if strategy == "fsdp":
            for layer in model.model.layers:
                fully_shard(layer)
            self.model: nn.Module = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make_optimizer(model, settings)
        self.set_to_none = strategy == "fsdp"  # the others are views of DDP's buckets

    def step(self, loss: Tensor) -> Any:
        """See Stepper."""
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        return norm


class DeepSpeedStepper:
    """DeepSpeed's engine over torch's AdamW, which it makes work on parts."""

    def __init__(self, stage: int, model: Any, settings: Settings) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.ops

        # A shared-memory all-reduce for CPUs that would be compiled at the start; gloo is there.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": settings.micro_batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": settings.max_norm,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": stage,
                # It is allocated at once: no larger than the model.
                "reduce_bucket_size": sum(p.numel() for p in model.parameters()),
                "allgather_bucket_size": 500_000_000,
                "overlap_comm": True,
            },
        }
        with contextlib.redirect_stdout(io.StringIO()):
            self.model, *_ = deepspeed.initialize(
                model=model,
                optimizer=make_optimizer(model, settings),
                config=config,
                dist_init_required=False,
            )
        self.optimizer = self.model.optimizer

    def step(self, loss: Tensor) -> Any:
        """See Stepper."""
        self.model.backward(loss)
        self.model.step()
        return self.model.get_global_grad_norm()


class StrategyLoop:
    """Model, data and optimizer, and the loop over them. Every rank makes one.

    Args:
        strategy: ddp, fsdp, or one of ZERO_STAGES.
        model: the same weights on every rank.
        tokens: a flat file of uint16 token ids.
        settings: see there.
        rank, world_size: this rank, and how many there are; the default process group is there.
        first: inputs and targets of the first steps, in place of random rows.
    """

    def __init__(
        self,
        strategy: str,
        model: nn.Module,
        tokens: Path,
        settings: Settings,
        rank: int,
        world_size: int,
        first: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self.settings = settings
        self.stepper: Stepper
        if strategy in ZERO_STAGES:
            self.stepper = DeepSpeedStepper(ZERO_STAGES[strategy], model, settings)
        else:
            self.stepper = TorchStepper(strategy, model, settings)
        self.rows = Rows(tokens, settings, rank)
        self.first = first
        self.rank_tokens = settings.micro_batch * settings.seq_length
        self.world_size = world_size
        self.step, self.logged_step = 0, 0
        self.loss_sum = torch.zeros(())
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, steps: int) -> None:
        """Train for so many steps. All ranks must call this."""
        for _ in range(steps):
            lr = learning_rate(self.settings, self.step)
            for group in self.stepper.optimizer.param_groups:
                group["lr"] = lr
            is_first = self.step < len(self.first)
            input_ids_BT, targets_BT = self.first[self.step] if is_first else self.rows.get_batch()
            logits_BTV = self.stepper.model(input_ids=input_ids_BT).logits
            loss_sum = F.cross_entropy(
                logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum"
            )
            # Each strategy averages gradients over ranks: that makes it the mean over all tokens.
            norm = self.stepper.step(loss_sum / self.rank_tokens)
            self.loss_sum += loss_sum.detach()
            self.step += 1
            if self.step % self.settings.log_every == 0 or self.step == 1:
                self._log(norm)

    def _log(self, norm: Any) -> None:
        dist.all_reduce(self.loss_sum)
        tokens = (self.step - self.logged_step) * self.rank_tokens * self.world_size
        self.losses.append(self.loss_sum.item() / tokens)
        self.norms.append(float(norm))
        self.loss_sum.zero_()
        self.logged_step = self.step
