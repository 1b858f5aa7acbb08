"""From global sample indices to the micro-batches of one rank, one step ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isles.config.split import RowSplit, even_split
from isles.data.dataset import Dataset
from isles.dist.batch import IGNORE_INDEX, Batch


@dataclass(frozen=True, slots=True)
class StepData:
    """All that one rank reads in one inner step."""

    micro_batches: tuple[Batch, ...]
    """On the rank's device, in order."""

    global_tokens: int
    """Target tokens of the whole global batch, over all ranks: what the loss is divided by."""

    first_sample: int
    """Global index of the first sample of the global batch."""

    next_sample: int
    """Where the next global batch begins: the cursor after this step."""

    @property
    def loss_divisor(self) -> int:
        """What the summed loss of the step is divided by."""
        return self.global_tokens


class Loader:
    """The micro-batches of one rank, step by step; the next step is read in the background.

    The global batch at cursor s holds the samples s to s+G-1, whatever the number of ranks; a split
    deals them out in order. Each rank reads its own, and none communicates.

    Args:
        dataset: the samples.
        split: the rows of each data-parallel rank, G in all.
        dp_rank: which of them this rank is.
        device: where the micro-batches go. Pages are pinned and copies run along on CUDA.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        split: RowSplit,
        dp_rank: int,
        device: torch.device,
    ) -> None:
        assert 0 <= dp_rank < len(split.rows)
        self._dataset = dataset
        self.split = split
        self._dp_rank = dp_rank
        self._device = device
        self._executor = ThreadPoolExecutor(1, "data", _use_device, (device,))
        self._ahead: tuple[int, Future[StepData]] | None = None

    def step(self, samples_seen: int) -> StepData:
        """The step whose global batch begins at this sample.

        Raises:
            Exception: whatever reading the samples raised, in the background or now.
        """
        if self._ahead is not None and self._ahead[0] == samples_seen:
            future = self._ahead[1]
        else:
            future = self._executor.submit(self._read, samples_seen)
        self._ahead = None
        on_host = future.result()
        self._ahead = (on_host.next_sample, self._executor.submit(self._read, on_host.next_sample))
        return StepData(
            micro_batches=tuple(_to_device(batch, self._device) for batch in on_host.micro_batches),
            global_tokens=on_host.global_tokens,
            first_sample=on_host.first_sample,
            next_sample=on_host.next_sample,
        )

    def use(self, split: RowSplit) -> None:
        """Deal the rows of every later step in another way. All ranks must do so after one step."""
        assert split.global_batch_size == self.split.global_batch_size, (split, self.split)
        if split == self.split:
            return
        self.split = split
        if self._ahead is not None:
            self._ahead[1].cancel()  # read for the old split; what has begun ends by itself
            self._ahead = None

    def close(self) -> None:
        """End the background thread; waits for the step that it reads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _read(self, first: int) -> StepData:
        split = self.split
        size = split.global_batch_size
        start = first + split.first_row(self._dp_rank)
        sizes = split.micro_steps(self._dp_rank)
        return StepData(
            micro_batches=tuple(_cut(self._dataset, start, sizes, self._device)),
            global_tokens=self._dataset.num_targets(np.arange(first, first + size)),
            first_sample=first,
            next_sample=first + size,
        )


def evaluation_batches(
    dataset: Dataset,
    num_samples: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    device: torch.device,
) -> Iterator[Batch]:
    """This rank's part of the samples 0 to num_samples-1, each of which one rank has.

    All ranks get equally many batches; where one has fewer samples, some of its rows train on
    nothing.

    Args:
        dataset: the samples.
        num_samples: how many over all ranks; more than there are means all.
        micro_batch_size: rows of a batch; the last one may be smaller.
        dp_rank, dp_size: which part, and how many there are.
        device: where the batches go.
    """
    total = min(num_samples, dataset.samples_per_epoch)
    split = even_split(total, dp_size, micro_batch_size, in_step=True)
    sizes = split.micro_steps(dp_rank)
    for batch in _cut(dataset, split.first_row(dp_rank), sizes, device):
        yield _to_device(batch, device)


def _cut(
    dataset: Dataset, start: int, sizes: Sequence[int], device: torch.device
) -> Iterator[Batch]:
    """Micro-batches in this machine's memory, pinned where they go to a GPU."""
    for size in sizes:
        # A step without rows of its own reads one and trains on nothing of it.
        ids = range(start, start + size)
        input_ids_BT, targets_BT = dataset.batch(np.arange(start, start + max(1, size)))
        if size == 0:
            targets_BT[:] = IGNORE_INDEX
        start += size
        yield Batch(
            _pinned(torch.from_numpy(input_ids_BT), device),
            _pinned(torch.from_numpy(targets_BT), device),
            tuple(ids),
        )


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return Batch(
        batch.input_ids_BT.to(device, non_blocking=True),
        batch.targets_BT.to(device, non_blocking=True),
        batch.sample_ids,
    )


def _use_device(device: torch.device) -> None:
    # Otherwise pinning from this thread opens a context on GPU 0 for every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
