"""From global sample indices to the micro-batches of one rank, one step ahead."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from isles.config.sections.training import Epochs
from isles.data.mix import Dataset, Rows
from isles.data.order import Float32Array, Int64Array
from isles.dist.batch import IGNORE_INDEX, Batch, cu_seqlens
from isles.dist.split import RowSplit, even_split


@dataclass(frozen=True, slots=True)
class StepData:
    """All that one rank reads in one inner step."""

    micro_batches: tuple[Batch, ...]
    """On the rank's device, in order."""

    loss_divisor: int
    """What the summed loss of the whole global batch is divided by: its target tokens, over all
    ranks; of preferences, its pairs."""

    global_tokens: int
    """Target tokens of the whole global batch, over all ranks."""

    input_tokens: int
    """Tokens that the model reads in the whole global batch, over all ranks, without padding."""

    padding_share: float
    """Share of padding in what the model computes in the whole global batch, over all ranks."""

    first_sample: int
    """Global index of the first sample of the global batch."""

    next_sample: int
    """Where the next global batch begins: the cursor after this step."""


class Numbering(Protocol):
    """Which samples a cluster reads that shares them with others. Any thread may ask."""

    def covers(self, first: int, count: int) -> bool:
        """Whether it is known yet."""
        ...

    def numbers(self, first: int, count: int) -> Int64Array:
        """Global indices of the cluster's own samples from `first` on."""
        ...


class Loader:
    """The micro-batches of one rank, step by step; the next step is read in the background.

    The global batch at cursor s holds the samples s to s+G-1, or to the end of the epoch, whatever
    the number of ranks; a split assigns them in order. Each rank reads its own, and none
    communicates.

    Args:
        split: the rows of each data-parallel rank, G in all.
        device: where the micro-batches go. Pages are pinned and copies run along on CUDA.
        numbering: of a cluster that shares the samples with others; cursors then count its own.
            None: they are global indices.
        epochs: of a run whose length is in epochs, which says where batches are smaller. None: all
            are equally large.
    """

    def __init__(
        self,
        dataset: Dataset,
        split: RowSplit,
        dp_rank: int,
        device: torch.device,
        *,
        numbering: Numbering | None = None,
        epochs: Epochs | None = None,
    ) -> None:
        self._numbering = numbering
        self._epochs = epochs
        assert 0 <= dp_rank < len(split.rows)
        self._dataset = dataset
        self.split = split
        self._dp_rank = dp_rank
        self._device = device
        self._executor = ThreadPoolExecutor(1, "data", _use_device, (device,))
        self._ahead: tuple[int, Future[StepData]] | None = None
        self._asked = -1
        # Where streams were, by the first cursor at which they were there; since the last save.
        self._stream_states: list[tuple[int, Any]] = []

    def step(self, samples_seen: int) -> StepData:
        """The step whose global batch begins at this sample; or the error of reading it."""
        self._asked, state = samples_seen, self._dataset.state()
        if not self._stream_states or self._stream_states[-1][1] != state:
            self._stream_states.append((samples_seen, state))
        if self._ahead is not None and self._ahead[0] == samples_seen:
            future = self._ahead[1]
        else:
            future = self._executor.submit(self._read, samples_seen)
        self._ahead = None
        on_host = future.result()
        following = on_host.next_sample
        size = self.batch_at(following)
        if size and (self._numbering is None or self._numbering.covers(following, size)):
            self._ahead = (following, self._executor.submit(self._read, following))
        batches = tuple(_to_device(batch, self._device) for batch in on_host.micro_batches)
        return replace(on_host, micro_batches=batches)

    def use(self, split: RowSplit) -> None:
        """Split the rows of every later step otherwise. All ranks must do so after one step."""
        assert split.global_batch_size == self.split.global_batch_size, (split, self.split)
        if split == self.split:
            return
        self.split = split
        self.forget()

    def forget(self) -> None:
        """Read the next step anew: what is read ahead of it is not what it will need."""
        if self._ahead is not None:
            self._ahead[1].cancel()  # what has begun ends by itself
            self._ahead = None

    def batch_at(self, samples_seen: int) -> int:
        """Number of samples of the global batch at this cursor, or 0 at the end of the run."""
        size = self.split.global_batch_size
        return size if self._epochs is None else min(size, self._epochs.batch_at(samples_seen))

    def sample_ids(self, samples_seen: int) -> Int64Array:
        """Global indices of the samples of the global batch at this cursor."""
        size = self.batch_at(samples_seen)
        if self._numbering is not None:
            return self._numbering.numbers(samples_seen, size)
        return np.arange(samples_seen, samples_seen + size)

    def stream_state(self, samples_seen: int) -> Any:
        """Where streams are, for a checkpoint at this cursor; see `Dataset.state`.

        The cursor may be one of before, but not of before the last call.
        """
        if samples_seen <= self._asked:
            # Steps were taken back: what has been read since may lie in later segments.
            return [state for first, state in self._stream_states if first <= samples_seen][-1]
        self._stream_states.clear()
        return self._dataset.state()

    def close(self) -> None:
        """End the background threads; waits for the step that is read."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._dataset.close()  # who waits for a segment waits no longer
        self._executor.shutdown(wait=True)

    def _read(self, first: int) -> StepData:
        size = self.batch_at(first)
        split = self.split.shortened(size)
        start = split.first_row(self._dp_rank)
        sizes = split.micro_steps(self._dp_rank)
        sample_ids = self.sample_ids(first)
        lengths = self._dataset.lengths(sample_ids)
        input_tokens = int(lengths.sum())
        # Places that all ranks compute: the rows of a micro-batch are as long as its longest.
        all_sizes = _micro_batch_sizes(split)
        longest = np.maximum.reduceat(lengths.max(1), np.cumsum(all_sizes) - all_sizes)
        num_rows = all_sizes * self._dataset.rows_per_sample
        num_places = int((self._dataset.width(longest) * num_rows).sum())
        return StepData(
            micro_batches=tuple(_cut(self._dataset, sample_ids, start, sizes, self._device)),
            loss_divisor=self._dataset.loss_divisor(sample_ids),
            global_tokens=self._dataset.num_targets(sample_ids),
            input_tokens=input_tokens,
            padding_share=1 - input_tokens / num_places,
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
    """This rank's part of the samples 0 to num_samples-1 (or of all there are).

    All ranks get equally many batches; where one has fewer samples, some of its rows train on
    nothing.
    """
    total = min(num_samples, dataset.samples_per_epoch)
    split = even_split(total, dp_size, micro_batch_size, in_step=True)
    sizes = split.micro_steps(dp_rank)
    for batch in _cut(dataset, np.arange(max(1, total)), split.first_row(dp_rank), sizes, device):
        yield _to_device(batch, device)


def _cut(
    dataset: Dataset,
    sample_ids: Int64Array,
    start: int,
    sizes: Sequence[int],
    device: torch.device,
) -> Iterator[Batch]:
    # Micro-batches in this machine's memory, pinned where they go to a GPU.
    for size in sizes:
        # A step without samples of its own reads one and trains on nothing of it.
        first = min(start, len(sample_ids) - 1)
        wanted = sample_ids[first : first + max(1, size)]
        rows = dataset.rows(wanted)
        if size == 0:
            rows.targets_BT[:] = IGNORE_INDEX
        reference_B = None
        if dataset.reference is not None:
            reference_B = dataset.reference[dataset.numbers(wanted)].reshape(-1)
        yield _on_host(rows, tuple(wanted[:size].tolist()), reference_B, device)
        start += size


def _on_host(
    rows: Rows, sample_ids: tuple[int, ...], reference_B: Float32Array | None, device: torch.device
) -> Batch:
    input_ids_BT, targets_BT, positions_BT = (
        None if x is None else torch.from_numpy(x) for x in rows
    )
    assert input_ids_BT is not None and targets_BT is not None
    # Where nothing is trained, or everything, there is nothing to choose.
    places_N = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    chooses = 0 < len(places_N) < targets_BT.numel()
    tensors = {
        "input_ids_BT": input_ids_BT,
        "targets_BT": targets_BT,
        "places_N": places_N if chooses else None,
        "reference_B": None if reference_B is None else torch.from_numpy(reference_B),
        "position_ids_BT": positions_BT,
        "cu_seqlens_N": None if positions_BT is None else cu_seqlens(positions_BT),
    }
    pinned: dict[str, Any] = {
        name: x.pin_memory() if x is not None and device.type == "cuda" else x
        for name, x in tensors.items()
    }
    return Batch(sample_ids=sample_ids, **pinned)


def numbered_batches(
    dataset: Dataset, numbers: Int64Array, micro_batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Batches of the samples of these numbers, in order, whatever their place in an epoch."""
    for start in range(0, len(numbers), micro_batch_size):
        chosen = numbers[start : start + micro_batch_size]
        batch = _on_host(dataset.numbered(chosen), tuple(chosen.tolist()), None, device)
        yield _to_device(batch, device)


def _to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    moved: dict[str, Any] = {
        field.name: value.to(device, non_blocking=True)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return replace(batch, **moved)


@functools.lru_cache(maxsize=4)
def _micro_batch_sizes(split: RowSplit) -> Int64Array:
    # Of all ranks, in the order of the samples; those without any are not counted.
    steps = (split.micro_steps(rank) for rank in range(len(split.rows)))
    return np.array([size for sizes in steps for size in sizes if size], dtype=np.int64)


def _use_device(device: torch.device) -> None:
    # Otherwise pinning from this thread opens a context on GPU 0 for every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
