"""Muon: each rank orthogonalizes its part of the matrices, and all get the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from isles.config.sections.training import TrainingConfig
from isles.dist.world import join_world, leave_world
from isles.run.env import RankEnv
from isles.strategies.stepper import Stepper
from isles.train.optimizer import muon
from isles.train.optimizer.make import make_optimizers
from tests.ranks import run_ranks

PAIRS, ROWS = 3, 2
"""Pairs of matrices of one shape; rows of a matrix that has fewer rows than there are ranks."""


class Model(nn.Module):
    """Pairs of tall and wide matrices, and a pair that is not cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(PAIRS))
        self.down = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(PAIRS))
        self.odd = nn.ModuleList([nn.Linear(8, ROWS, bias=False), nn.Linear(ROWS, 8, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return x + self.odd[1](self.odd[0](x))

    def get_output_embeddings(self) -> None:
        return None


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def trained(env: RankEnv, replicas: int, shards: int, tp: int, stack: int) -> Any:
    """Weights and momentum after three steps with the same gradients on all ranks."""
    world = join_world(env, device="cpu", timeout_s=60)
    muon._LARGEST_STACK = stack
    model = Model()
    if replicas * shards * tp > 1:
        mesh = init_device_mesh("cpu", (replicas, shards, tp), mesh_dim_names=("r", "s", "tp"))
        if tp > 1:
            ups = {f"up.{index}": ColwiseParallel() for index in range(PAIRS)}
            downs = {f"down.{index}": RowwiseParallel() for index in range(PAIRS)}
            parallelize_module(model, mesh["tp"], {**ups, **downs})
        fully_shard(model, mesh=mesh["r", "s"] if replicas > 1 else mesh["s"])
    config = TrainingConfig(max_steps=1, optimizer="muon", weight_decay=0.1)
    optimizers = make_optimizers(config, model)
    stepper = Stepper([model], lambda _: optimizers, device=world.device, precision="32-true")
    for step in range(3):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        (model(x) - x.flip(1)).square().mean().backward()
        stepper.step(lr=0.02, max_norm=1.0)
    weights = [whole(p) for p in model.parameters()]
    momentum = [whole(state["momentum_buffer"]) for state in optimizers[0].state.values()]
    leave_world()
    return weights + momentum


LARGE, SMALL = 2**26, 1
ONE = (1, 1, 1)
LAYOUTS = {
    "ddp": (4, ONE, LARGE),
    "ddp, stacks of a matrix for each rank": (2, ONE, SMALL),
    "fsdp": (2, (1, 2, 1), LARGE),
    "fsdp, more ranks than rows": (3, (1, 3, 1), LARGE),
    "fsdp, stacks of a matrix for each rank": (2, (1, 2, 1), SMALL),
    "hybrid": (4, (2, 2, 1), LARGE),
    "no shard": (2, (2, 1, 1), LARGE),
    "tensor parallel": (2, (1, 1, 2), LARGE),
    "fsdp and tensor parallel": (4, (1, 2, 2), LARGE),
}


def test_every_layout_gives_the_weights_of_one_process():
    (reference,) = run_ranks(trained, 1, *ONE, LARGE)
    for name, (ranks, layout, stack) in LAYOUTS.items():
        for found in run_ranks(trained, ranks, *layout, stack):
            for one, wanted in zip(found, reference, strict=True):
                np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5, err_msg=name)
