"""Plain PyTorch on all ranks of a job: DDP or FSDP, with validation, checkpoints and tracking.

Started by train_distributed_example.sh, by any srun or torchrun, by isles (run.yaml), or alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoints import newest, read_checkpoint, restore, save, save_checkpoint, weights
from setup_distributed import setup_distributed
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from track import TRACKERS, Tracker, report, require_tracker

FEATURES = 10


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; numbers that mean nothing are refused."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--epochs", type=positive, default=10, help="times that all data is seen")
    add("--batch_size", type=positive, default=32, help="samples of each rank in one pass")
    add("--lr", type=float, default=0.001, help="learning rate")
    add("--data_size", type=positive, default=1000, help="samples, over all ranks")
    add("--grad_accum", type=positive, default=1, help="passes for each step of the optimizer")
    add("--amp", action="store_true", help="compute in bf16 where that is enough")
    add("--fsdp", action="store_true", help="shard the model over the ranks instead of DDP")
    add("--track", choices=TRACKERS, default="none", help="where rank 0 records the figures")
    add("--checkpoint_every", type=positive, default=5, help="epochs between two checkpoints")
    add("--resume", default="no", help="auto: from the newest checkpoint here; no; or a file")
    add("--output_dir", type=Path, default=Path(), help="folder of what is saved")
    return parser.parse_args(words)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number


def make_data(size: int, seed: int) -> TensorDataset:
    """Points and their sums, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def make_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    """The model, on all ranks the same, wrapped for training. All ranks must call this."""
    torch.manual_seed(0)
    layers = (nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    model = nn.Sequential(*layers).to(device)
    if not options.fsdp:
        return DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


class Training:
    """What an epoch needs. Every method must be called on all ranks."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Join the others, and make model and data."""
        self.options = options
        self.rank, self.world_size, self.local_rank, self.device = setup_distributed()
        dataset = make_data(options.data_size, seed=0)
        if options.data_size < self.world_size:
            raise ValueError(
                f"--data_size is {options.data_size}, and there are {self.world_size} ranks\n"
                "  fix: at least a sample for each"
            )
        # What does not divide by the ranks is left out, another part in each epoch: the sampler
        # would fill up with samples that another rank has as well.
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.rank, drop_last=True
        )
        self.loader = DataLoader(dataset, batch_size=options.batch_size, sampler=self.sampler)
        self.model = make_model(options, self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.lr)

    def log(self, line: str) -> None:
        """A line of rank 0."""
        if self.rank == 0:
            print(line, flush=True)

    def train_epoch(self, epoch: int) -> float:
        """One pass over the data; the mean loss over all ranks."""
        self.sampler.set_epoch(epoch)
        # What is random follows from epoch and rank: nothing of it need be kept in a checkpoint.
        torch.manual_seed(epoch * self.world_size + self.rank)
        self.model.train()
        kept, batches, mine = self.options.grad_accum, len(self.loader), len(self.sampler)
        step_rows = kept * self.options.batch_size
        total = torch.zeros((), device=self.device)
        for batch, (inputs, targets) in enumerate(self.loader):
            is_last = (batch + 1) % kept == 0 or batch + 1 == batches
            # The mean over the samples of the step, not of means: the last batch may be smaller.
            rows = min(step_rows, mine - batch // kept * step_rows)
            with self.exchange(is_last):
                loss = self.loss(inputs, targets)
                (loss / rows).backward()
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += loss.detach()
            if batch % 10 == 0:
                self.log(f"Batch {batch}, Loss: {loss.item() / len(inputs):.4f}")
        dist.all_reduce(total)
        return total.item() / mine / self.world_size

    def exchange(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients travel once a step, not once a pass."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
            return nullcontext()
        assert isinstance(self.model, DDP)
        waits: AbstractContextManager[None] = self.model.no_sync()
        return nullcontext() if is_last else waits

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum over one batch; bf16 has the range of fp32, so gradients need no scaling."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.amp):
            outputs = self.model(inputs.to(self.device))
        return mse_loss(outputs.float(), targets.to(self.device), reduction="sum")

    @torch.no_grad()
    def validate(self) -> tuple[float, float]:
        """Mean squared error, and the share within 0.1, over all samples of all ranks.

        Sums and counts are added up, not means: ranks may have unequal numbers of samples.
        """
        self.model.eval()
        inputs, targets = make_data(max(1, self.options.data_size // 5), seed=1).tensors
        # Unlike a DistributedSampler, which repeats samples, every one is there once.
        mine = slice(self.rank, None, self.world_size)
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        # A sharded model is gathered by all ranks, also by one that has no sample.
        outputs = self.model(inputs[mine].to(self.device)).float()
        error = (outputs - targets[mine].to(self.device)).double()
        sums += torch.stack(
            [error.square().sum(), (error.abs() < 0.1).double().sum(), error.new_tensor(len(error))]
        )
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def run(training: Training, tracker: Tracker) -> None:
    """All epochs, from where a checkpoint ends. All ranks must call this."""
    options, log = training.options, training.log
    folder, model, optimizer = options.output_dir, training.model, training.optimizer
    path = newest(folder) if options.resume == "auto" else Path(options.resume)
    state = read_checkpoint(None if options.resume == "no" else path, training.device)
    done = restore(state, model, optimizer) if state else 0
    if done:
        log(f"Going on after epoch {done}")
    for epoch in range(done + 1, options.epochs + 1):
        average = training.train_epoch(epoch)
        log(f"Epoch {epoch}/{options.epochs}, Average Loss: {average:.4f}")
        loss, share = training.validate()
        log(f"Epoch {epoch}/{options.epochs}, Validation Loss: {loss:.4f}, within 0.1: {share:.1%}")
        tracker.log({"loss": average, "val_loss": loss, "val_within_0.1": share}, epoch)
        if training.rank == 0:
            report(epoch, options.epochs, average)
        if epoch % options.checkpoint_every == 0:
            save_checkpoint(folder, epoch, model, optimizer)
        dist.barrier()  # rank 0 has saved before anybody goes on
    whole = weights(model)
    if training.rank == 0:
        save(whole, folder / "model_distributed.pt")
    dist.barrier()
    log("Training completed successfully!")


def main() -> int:
    """Train; returns the exit code."""
    options = parse()
    # scancel, a time limit and isles stop send SIGTERM: end in good order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        require_tracker(options.track)
        training = Training(options)
        settings = {key: str(value) for key, value in vars(options).items()}
        tracker = Tracker(options.track if training.rank == 0 else "none", settings)
        training.log("Starting distributed training")
        place = f"Rank: {training.rank}, Local rank: {training.local_rank}"
        training.log(f"World size: {training.world_size}, {place}")
        training.log(f"Device: {training.device}")
        sizes = f"Epochs: {options.epochs}, Batch size: {options.batch_size}, LR: {options.lr}"
        training.log(sizes)
        run(training, tracker)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    tracker.end("FINISHED")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is saved and told: a thread of a backend that is still there must not abort Python's end.
    os._exit(exit_code)
