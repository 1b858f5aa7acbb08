"""The rows of each rank, one step ahead."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.data.loader import Loader, evaluation_batches
from isles.data.mix import Dataset
from isles.data.order import SampleOrder
from isles.data.samples import FakeSamples
from isles.dist.batch import IGNORE_INDEX
from isles.dist.split import even_split
from tests.deadline import DEADLINE_S

CPU = torch.device("cpu")


class Padded(FakeSamples):
    """Fake samples of different lengths."""

    def num_targets(self, samples):
        return 1 + samples % 6

    def lengths(self, samples):
        return 1 + samples[:, None] % 6

    def read(self, sample, input_ids_RT, targets_RT, position_ids_RT=None):
        whole = np.empty((2, 1, 6), dtype=np.int64)
        super().read(sample, *whole)
        input_ids_RT[:], targets_RT[:] = whole[:, :, : input_ids_RT.shape[1]]
        targets_RT[:, 1 + sample % 6 :] = IGNORE_INDEX


def dataset_of(num_samples: int = 100) -> Dataset:
    return Dataset([Padded(50, 6, 0, num_samples)], SampleOrder([num_samples], None, 3), 6)


def loader_of(dataset: Dataset, size: int, micro: int, *, rank: int = 0, ranks=1, device=CPU):
    return Loader(
        dataset,
        split=even_split(size, ranks, micro, in_step=False),
        dp_rank=rank,
        device=device,
    )


@given(st.integers(1, 4), st.integers(0, 9), st.integers(1, 5), st.integers(0, 300))
@settings(max_examples=40, deadline=None)
def test_ranks_share_the_same_global_batch(ranks: int, extra: int, micro: int, seen: int):
    dataset, size = dataset_of(), ranks + extra
    ids: list[int] = []
    rows: list[torch.Tensor] = []
    num_targets = 0
    for rank in range(ranks):
        with closing(loader_of(dataset, size, micro, rank=rank, ranks=ranks)) as loader:
            step = loader.step(seen)
        assert (step.first_sample, step.next_sample) == (seen, seen + size)
        for batch in step.micro_batches:
            assert len(batch.sample_ids) == len(batch.input_ids_BT) <= micro
            ids += batch.sample_ids
            rows.append(batch.input_ids_BT)
            num_targets += int((batch.targets_BT != IGNORE_INDEX).sum())
        tokens = step.global_tokens
    expected = np.arange(seen, seen + size)
    assert ids == expected.tolist() and num_targets == tokens
    assert np.array_equal(torch.cat(rows).numpy(), dataset.rows(expected)[0])


def test_resume_on_other_ranks_sees_each_sample_once():
    dataset = dataset_of()
    seen: list[int] = []
    cursor = 0
    for ranks, steps in ((2, 3), (1, 2), (3, 4)):
        loaders = [loader_of(dataset, 12, 2, rank=rank, ranks=ranks) for rank in range(ranks)]
        for _ in range(steps):
            data = [loader.step(cursor) for loader in loaders]
            seen += [i for step in data for batch in step.micro_batches for i in batch.sample_ids]
            cursor = data[0].next_sample
        for loader in loaders:
            loader.close()
    assert seen == list(range(9 * 12))


def test_any_step_can_be_asked_for():
    dataset = dataset_of()
    with closing(loader_of(dataset, 4, 4)) as loader:
        for seen in (0, 4, 40, 8, 8, 12):
            (batch,) = loader.step(seen).micro_batches
            assert batch.sample_ids == tuple(range(seen, seen + 4))
            assert batch.input_ids_BT.dtype == batch.targets_BT.dtype == torch.int64


def test_the_next_step_is_read_in_the_background():
    asked = threading.Event()

    class Told(Dataset):
        def rows(self, sample_ids):
            if sample_ids[0] == 4:
                assert threading.current_thread() is not threading.main_thread()
                asked.set()
            return super().rows(sample_ids)

    dataset = Told([FakeSamples(9, 6, 0, 100)], SampleOrder([100], None, 0), 6)
    with closing(loader_of(dataset, 4, 4)) as loader:
        loader.step(0)
        assert asked.wait(DEADLINE_S)


def test_an_error_in_the_background_comes_out_of_step():
    class Broken(Dataset):
        def rows(self, sample_ids):
            if 6 in sample_ids:
                raise OSError("the disk is gone")
            return super().rows(sample_ids)

    dataset = Broken([FakeSamples(9, 6, 0, 100)], SampleOrder([100], None, 0), 6)
    with closing(loader_of(dataset, 4, 2)) as loader:
        loader.step(0)
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                loader.step(4)
        assert loader.step(8).next_sample == 12


@given(st.integers(1, 5), st.integers(0, 30), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_evaluation_reads_each_sample_once(ranks: int, num_samples: int, micro: int):
    dataset = dataset_of(20)
    ids = [
        i
        for rank in range(ranks)
        for batch in evaluation_batches(
            dataset,
            num_samples,
            micro_batch_size=micro,
            dp_rank=rank,
            dp_size=ranks,
            device=CPU,
        )
        for i in batch.sample_ids
    ]
    assert ids == list(range(min(num_samples, 20)))


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_on_the_cpu():
    dataset = dataset_of()
    device = torch.device("cuda", 0)
    with (
        closing(loader_of(dataset, 8, 3, device=device)) as there,
        closing(loader_of(dataset, 8, 3)) as here,
    ):
        for seen in range(0, 80, 8):
            for gpu, cpu in zip(
                there.step(seen).micro_batches, here.step(seen).micro_batches, strict=True
            ):
                assert gpu.input_ids_BT.device == device and gpu.sample_ids == cpu.sample_ids
                assert torch.equal(gpu.input_ids_BT.cpu(), cpu.input_ids_BT)
                assert torch.equal(gpu.targets_BT.cpu(), cpu.targets_BT)
