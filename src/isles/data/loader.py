"""The micro-batches of one rank, from global sample indices, one step ahead."""

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
from isles.dist.batch import IGNORE_INDEX, Batch, cu_seqlens, longest_document
from isles.dist.split import RowSplit, even_split


@dataclass(frozen=True, slots=True)
class StepData:
    """The data of one rank for one inner step."""

    micro_batches: tuple[Batch, ...]
    """Micro-batches on the rank's device, in order."""

    loss_divisor: int
    """Divisor of the summed loss of the global batch: its target tokens over all ranks, or for
    preferences its pairs."""

    global_tokens: int
    """Target tokens of the whole global batch, over all ranks."""

    input_tokens: int
    """Tokens that the model reads in the whole global batch, over all ranks, without padding."""

    padding_share: float
    """Share of padding in what the model computes in the whole global batch, over all ranks."""

    first_sample: int
    """Global index of the first sample of the global batch."""

    next_sample: int
    """Start of the next global batch: the cursor after this step."""


class Numbering(Protocol):
    """The samples of a cluster that shares them with other clusters. Any thread may call it."""

    def covers(self, first: int, count: int) -> bool:
        """True if these indices are known."""
        ...

    def numbers(self, first: int, count: int) -> Int64Array:
        """Global indices of the cluster's own samples from `first` on."""
        ...


class Loader:
    """The micro-batches of one rank, step by step; the next step is read in the background.

    The global batch at cursor s has the samples s to s+G-1, or up to the end of the epoch, for any
    number of ranks. A split assigns them in order. Each rank reads its own samples without
    communication.

    Args:
        split: the rows of each data-parallel rank, G in all.
        device: of the micro-batches. On CUDA, pages are pinned and copies run in the background.
        numbering: of a cluster that shares the samples with other clusters, whose cursors count its
            own samples. None: cursors are global indices.
        epochs: of a run whose length is in epochs, for the smaller last batch of an epoch. None:
            all batches are equally large.
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
        # One thread keeps the order of steps, because a stream is read only forward.
        self._executor = ThreadPoolExecutor(1, "data", _use_device, (device,))
        self._ahead: tuple[int, Future[StepData]] | None = None
        self._asked = -1
        # The positions of streams since the last save, by the first cursor at that position.
        self._stream_states: list[tuple[int, Any]] = []

    def step(self, samples_seen: int) -> StepData:
        """The step whose global batch starts at this sample, or the error of reading it."""
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
        """Change the split of all later steps. All ranks must do so after the same step."""
        assert split.global_batch_size == self.split.global_batch_size, (split, self.split)
        if split == self.split:
            return
        self.split = split
        self.forget()

    def forget(self) -> None:
        """Discard the step that was read ahead, because the next step needs other samples."""
        if self._ahead is not None:
            self._ahead[1].cancel()  # a read that has started ends by itself
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
        """The positions of streams, for a checkpoint at this cursor; see `Dataset.state`.

        The cursor may be earlier than the current one, but not earlier than at the last call.
        """
        if samples_seen <= self._asked:
            # Steps were undone, so reads since then may be in later segments.
            return [state for first, state in self._stream_states if first <= samples_seen][-1]
        self._stream_states.clear()
        return self._dataset.state()

    def close(self) -> None:
        """Stop the background threads, after the current read."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._dataset.close()  # ends the wait for a segment
        self._executor.shutdown(wait=True)

    def _read(self, first: int) -> StepData:
        size = self.batch_at(first)
        split = self.split.shortened(size)
        start = split.first_row(self._dp_rank)
        sizes = split.micro_steps(self._dp_rank)
        sample_ids = self.sample_ids(first)
        lengths = self._dataset.lengths(sample_ids)
        input_tokens = int(lengths.sum())
        # Places that all ranks compute. The rows of a micro-batch are as long as its longest row.
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

    All ranks get the same number of batches. If a rank has fewer samples, some of its rows train
    on no token.
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
    # Micro-batches in this machine's memory, pinned if they go to a GPU.
    for size in sizes:
        # A rank without samples in this step reads one, and trains on none of its tokens.
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
    # If no row or every row is trained, no choice is needed.
    # Computed on the CPU: on a GPU, `nonzero` makes the host wait.
    places_N = (targets_BT.flatten() != IGNORE_INDEX).nonzero().flatten()
    chooses = 0 < len(places_N) < targets_BT.numel()
    seqlens_N = None if positions_BT is None else cu_seqlens(positions_BT)
    longest = None
    if seqlens_N is not None:
        longest = longest_document(seqlens_N, input_ids_BT.shape[1])
    tensors = {
        "input_ids_BT": input_ids_BT,
        "targets_BT": targets_BT,
        "places_N": places_N if chooses else None,
        "reference_B": None if reference_B is None else torch.from_numpy(reference_B),
        "position_ids_BT": positions_BT,
        "cu_seqlens_N": seqlens_N,
    }
    pinned: dict[str, Any] = {
        name: x.pin_memory() if x is not None and device.type == "cuda" else x
        for name, x in tensors.items()
    }
    return Batch(sample_ids=sample_ids, longest_document=longest, **pinned)


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
        # From pinned memory, so the host does not wait for the copy.
        field.name: value.to(device, non_blocking=True)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    return replace(batch, **moved)


# All steps with one split have the same sizes.
@functools.lru_cache(maxsize=4)
def _micro_batch_sizes(split: RowSplit) -> Int64Array:
    # The sums of all ranks, in the order of the samples, without ranks that have no samples.
    steps = (split.micro_steps(rank) for rank in range(len(split.rows)))
    return np.array([size for sizes in steps for size in sizes if size], dtype=np.int64)


def _use_device(device: torch.device) -> None:
    # Otherwise pinning from this thread opens a context on GPU 0 for every rank.
    if device.type == "cuda":
        torch.cuda.set_device(device)
