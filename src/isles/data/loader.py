"""From global sample indices to the micro-batches of one rank, one step ahead."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isles.data.dataset import Dataset
from isles.dist.batch import Batch


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


class Loader:
    """The micro-batches of one rank, step by step; the next step is read in the background.

    The global batch at cursor s holds the samples s to s+G-1, whatever the number of ranks; rank r
    of W has the rows r*G//W to (r+1)*G//W-1. Each rank makes its own, and none communicates.

    Args:
        dataset: the samples.
        global_batch_size: G, samples of a step over all ranks; at least one for each rank.
        micro_batch_size: rows of a micro-batch; the last one may be smaller.
        rank, world_size: this rank, and how many there are.
        device: where the micro-batches go. Pages are pinned and copies run along on CUDA.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        assert 0 <= rank < world_size <= global_batch_size and micro_batch_size > 0
        self._dataset = dataset
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
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

    def close(self) -> None:
        """End the background thread; waits for the step that it reads."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _read(self, first: int) -> StepData:
        size = self._global_batch_size
        rows = _rows_of_rank(first, size, self._rank, self._world_size)
        return StepData(
            micro_batches=tuple(_cut(self._dataset, rows, self._micro_batch_size, self._device)),
            global_tokens=self._dataset.num_targets(np.arange(first, first + size)),
            first_sample=first,
            next_sample=first + size,
        )


def evaluation_batches(
    dataset: Dataset,
    num_samples: int,
    *,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> Iterator[Batch]:
    """This rank's part of the samples 0 to num_samples-1, each of which one rank has.

    Ranks may get different numbers of batches, and none where there are fewer samples than ranks.

    Args:
        dataset: the samples.
        num_samples: how many over all ranks; more than there are means all.
        micro_batch_size: rows of a batch; the last one may be smaller.
        rank, world_size: this rank, and how many there are.
        device: where the batches go.
    """
    rows = _rows_of_rank(0, min(num_samples, dataset.samples_per_epoch), rank, world_size)
    for batch in _cut(dataset, rows, micro_batch_size, device):
        yield _to_device(batch, device)


def _rows_of_rank(first: int, size: int, rank: int, world_size: int) -> range:
    return range(first + rank * size // world_size, first + (rank + 1) * size // world_size)


def _cut(dataset: Dataset, rows: range, size: int, device: torch.device) -> Iterator[Batch]:
    """Micro-batches in this machine's memory, pinned where they go to a GPU."""
    for start in range(rows.start, rows.stop, size):
        ids = range(start, min(start + size, rows.stop))
        input_ids_BT, targets_BT = dataset.batch(np.arange(ids.start, ids.stop))
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
