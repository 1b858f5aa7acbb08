"""Muon: each rank orthogonalizes its part of the matrices, and all get the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
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
from tests.each import each
from tests.ranks import run_ranks

UPS, ROWS = 3, 5
"""Matrices of one shape; rows of a matrix that no number of ranks divides."""


class Model(nn.Module):
    """Three pairs of tall and wide matrices, and a pair that is not cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ModuleList(nn.Linear(8, 12, bias=False) for _ in range(UPS))
        self.down = nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(UPS))
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
    """Weights and momentum after three steps, calls of collectives in the last step, and the number
    of matrices that this rank has orthogonalized in it."""
    world = join_world(env, device="cpu", timeout_s=60)
    torch.set_num_threads(1)
    muon._LARGEST_STACK = stack
    model = Model()
    if replicas * shards * tp > 1:
        mesh = init_device_mesh("cpu", (replicas, shards, tp), mesh_dim_names=("r", "s", "tp"))
        if tp > 1:
            ups = {f"up.{index}": ColwiseParallel() for index in range(UPS)}
            downs = {f"down.{index}": RowwiseParallel() for index in range(UPS)}
            parallelize_module(model, mesh["tp"], {**ups, **downs})
        fully_shard(model, mesh=mesh["r", "s"] if replicas > 1 else mesh["s"])
    config = TrainingConfig(max_steps=1, optimizer="muon", weight_decay=0.1)
    optimizers = make_optimizers(config, model)
    stepper = Stepper([model], lambda _: optimizers, device=world.device, precision="32-true")
    solved = []
    orthogonalized = muon._orthogonalized

    def counted(x: Tensor) -> Tensor:
        solved.append(len(x))
        return orthogonalized(x)

    muon._orthogonalized = counted
    comm = CommDebugMode()
    for step in range(3):
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=dice)
        (model(x) - x.flip(1)).square().mean().backward()
        solved.clear()
        comm = CommDebugMode()
        with comm:
            stepper.step(lr=0.02, max_norm=None)
    (optimizer,) = optimizers
    weights = {name: whole(p) for name, p in model.named_parameters()}
    momentum = [whole(state["momentum_buffer"]) for state in optimizer.state.values()]
    counts = {str(name).rpartition(".")[2]: n for name, n in comm.get_comm_counts().items()}
    leave_world()
    return weights, momentum, counts, sum(solved)


LARGE = 2**26
ONE = (1, 1, 1)
LAYOUTS = [
    (2, ONE, LARGE),
    (4, ONE, LARGE),
    (2, (1, 2, 1), LARGE),
    (3, (1, 3, 1), LARGE),
    (2, (1, 2, 1), 1),
    (4, (2, 2, 1), LARGE),
    (2, (2, 1, 1), LARGE),
    (2, (1, 1, 2), LARGE),
    (4, (1, 2, 2), LARGE),
]


@each(*LAYOUTS)
def test_every_layout_gives_the_weights_of_one_process(ranks, layout, stack):
    (reference,) = run_ranks(trained, 1, *ONE, LARGE)
    for rank, (weights, momentum, counts, solved) in enumerate(
        run_ranks(trained, ranks, *layout, stack)
    ):
        print(ranks, layout, rank, counts, solved)
        for name, wanted in reference[0].items():
            np.testing.assert_allclose(weights[name], wanted, rtol=1e-4, atol=1e-5)
        for found, wanted in zip(momentum, reference[1], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
