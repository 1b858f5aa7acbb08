"""Plain DistributedDataParallel, with nothing of isles in it but one optional line.

Started by `isles train examples/own_script/run.yaml`, or by torchrun itself:
`torchrun --nproc_per_node=2 examples/own_script/ddp.py --epochs 3`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    """Train a small regression on all ranks, and save the model on the first."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data_size", type=int, default=2000)
    parser.add_argument("--save", type=Path, default=Path("model_distributed.pt"))
    options = parser.parse_args()

    # isles stop, a time limit and a preemption send SIGTERM: end in good order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    print(f"World size: {world_size}, Rank: {rank}, Device: {device}")

    torch.manual_seed(0)
    inputs = torch.randn(options.data_size, 10)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)

    for epoch in range(1, options.epochs + 1):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for batch, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if rank == 0 and batch % 10 == 0:
                print(f"Batch {batch}, Loss: {loss.item():.4f}")
        dist.all_reduce(total)
        average = total.item() / len(loader) / world_size
        if rank == 0:
            print(f"Epoch {epoch}/{options.epochs}, Average Loss: {average:.4f}")
            report(epoch, options.epochs, average)

    if rank == 0:
        torch.save(model.module.state_dict(), options.save)
        print("Training completed successfully!")
    dist.destroy_process_group()


def setup() -> torch.device:
    """Join the others, as torchrun's variables say; the device of this rank."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")


def report(step: int, total_steps: int, loss: float) -> None:
    """Let `isles status` know how far it is; without isles, nothing happens."""
    try:
        import isles
    except ImportError:
        return
    isles.report(step, total_steps=total_steps, loss=loss)


if __name__ == "__main__":
    main()
