"""Ranks that keep parts of the model in main memory, each as its own GPU requires.

GPUs cannot be had here: ranks take a CPU for a GPU with so much memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from isles.config.layout import make_layout
from isles.config.load import load_run_file
from isles.config.memory import architecture_of, offloaded_blocks
from isles.errors import ConfigErrors, ExitCode
from isles.facts.memory.setting import usable_bytes
from isles.run.env import RankEnv
from isles.run.limits import MainMemory
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.strategies.stepper import Stepper
from isles.train import offload
from tests.dist.test_four_bit import QLORA, give_base
from tests.dist.test_same_mathematics import TOLERANCE, largest_difference, model_with
from tests.each import each
from tests.ranks import one_rank, start_training, train
from tests.unit.test_counts import fake_ranks

AUTO = "strategy={kind: fsdp, cpu_offload: auto}"
ROWS = "training.micro_batch_size=2"


def _rank(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank of training whose GPU has the memory of the file `gpus` beside the run folder."""
    sizes = [int(size) for size in (run.parent.parent / "gpus").read_text().split()]
    offload.gpu_bytes = lambda device: sizes[env.rank]
    return one_rank(env, run, attempt, resume_from)


def _rank_without_memory(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    offload.memory = lambda: MainMemory(2**11, 2**11)
    return _rank(env, run, attempt, resume_from)


def _train(
    run_file: Path, sizes: Sequence[int], *overrides: str, resume: str
) -> tuple[RunDir, str]:
    """Train on ranks with GPUs of these sizes; the run, and what the ranks have logged."""
    (run_file.parent / "gpus").write_text(" ".join(map(str, sizes)))
    options = (AUTO, ROWS, *overrides)
    run_dir, _, gang = start_training(run_file, len(sizes), *options, resume=resume, rank=_rank)
    assert not any(gang.wait()), gang.said()
    return run_dir, gang.log.read_text()


def _blocks(run_file: Path, gpu: int, ranks: int, *overrides: str) -> int:
    """Blocks that a GPU of this size gives away."""
    config = load_run_file(run_file, [AUTO, ROWS, *overrides]).config
    model = architecture_of(config, run_file.parent)
    assert model is not None
    layout = make_layout(config.strategy, ranks, local_world_size=ranks)
    options = {"limit": usable_bytes(gpu), "rows": 2, "gpu_bytes": gpu}
    return offloaded_blocks(model, config, config.strategy, layout, **options)


def _gpu(run_file: Path, blocks: int, ranks: int, *overrides: str) -> int:
    """Memory of the smallest GPU that gives away no more than these blocks."""

    def fits(gpu: int) -> bool:
        return _blocks(run_file, gpu, ranks, *overrides) <= blocks

    return bisect_left(range(2**30), True, key=fits)


def test_each_gpu_keeps_what_fits_and_the_weights_are_those_of_one_process(run_file: Path):
    """And a resumed run may keep other blocks, on other ranks."""
    model_with(run_file, num_hidden_layers=5)
    constant = "training.lr_scheduler_type=constant"
    whole = train(run_file, 1, "training.micro_batch_size=12", constant)
    large = 2**40
    small, smaller = (_gpu(run_file, blocks, 2) for blocks in (2, 4))
    assert smaller < small < large
    half = (constant, "training.max_steps=10")
    run_dir, said = _train(run_file, (large, small), *half, resume="no")
    assert "rank 1 on" in said and "2 of 5 blocks in main memory" in said
    assert "rank 0 on" not in said, "the large GPU keeps everything"
    run_dir, said = _train(run_file, (smaller, large), constant, resume=str(run_dir.path))
    assert "rank 0 on" in said and "4 of 5 blocks in main memory" in said
    assert largest_difference(whole, run_dir) < TOLERANCE


def test_one_rank_with_a_small_gpu_trains_what_it_cannot_hold(run_file: Path):
    """QLoRA's 4 bits too: a GPU that holds one block of two."""
    give_base(run_file)
    whole = train(run_file, 1, ROWS, *QLORA)
    gpu = _gpu(run_file, 1, 1, *QLORA)
    run_dir, said = _train(run_file, (gpu,), *QLORA, resume="no")
    assert "1 of 2 blocks in main memory" in said
    assert largest_difference(whole, run_dir) < TOLERANCE


def test_ranks_on_a_cpu_are_told_that_it_has_no_effect(run_file: Path):
    started = start_training(run_file, 2, AUTO, ROWS, "training.max_steps=4", resume="no")
    _, _, gang = started
    assert not any(gang.wait()), gang.said()
    assert "cpu_offload auto: it has no effect on CPU ranks" in gang.log.read_text()


def test_a_host_without_enough_main_memory_is_refused_by_name(run_file: Path):
    (run_file.parent / "gpus").write_text(f"{2**40} {_gpu(run_file, 1, 2)}")
    started = start_training(run_file, 2, AUTO, ROWS, resume="no", rank=_rank_without_memory)
    _, attempt, gang = started
    assert set(gang.wait()) == {ExitCode.USER}
    error = read_record(attempt.rank_error(0)) or {}
    assert "rank 1 on" in error["what"] and "1.0 KiB" in error["what"]
    assert error["id"] == "memory.offload"


class Sent(TorchDispatchMode):
    """Devices of the tensors that are added up over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "all_reduce" in str(func) or "allreduce" in str(func):
            self.devices.append(args[0].device.type)
        return func(*args, **(kwargs or {}))


def test_all_ranks_send_norms_from_their_device_wherever_their_gradients_are():
    """Were a norm sent from main memory by one rank and from a GPU by another, both would wait."""
    with fake_ranks(2), Sent() as sent:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)]))
        weight.grad = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
        device = torch.device("meta")  # stands for a GPU
        stepper = Stepper(
            [nn.ParameterList([weight])], lambda _: [], device=device, precision="32-true"
        )
        stepper.step(lr=0.1, max_norm=None)
    assert sent.devices == ["meta"]


@each(
    ("strategy={kind: fsdp, cpu_offload: auto, pp_size: 2}", "pp_size 2"),
    ("training.optimizer=adamw_8bit", "optimizer adamw_8bit"),
    ("training.optimizer=muon", "optimizer muon"),
)
def test_what_does_not_go_with_it_is_refused(override: str, words: str, *, run_file: Path):
    with pytest.raises(ConfigErrors, match=f"cpu_offload auto does not work with {words}"):
        load_run_file(run_file, [AUTO, override])
