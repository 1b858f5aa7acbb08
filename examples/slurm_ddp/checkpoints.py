"""Checkpoints of the example: whole or absent, the same file from DDP and from FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def weights(model: nn.Module) -> dict[str, Any]:
    """The whole model, by the names that it has on one process. All ranks must call this."""
    if isinstance(model, DistributedDataParallel):
        return dict(model.module.state_dict())
    return dict(get_model_state_dict(model, options=WHOLE))


def save_checkpoint(
    folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write checkpoint_epoch_EPOCH.pt on rank 0. All ranks must call this.

    The order of the data and the random numbers follow from the epoch, so nothing else is needed.
    """
    is_ddp = isinstance(model, DistributedDataParallel)
    state = {
        "epoch": epoch,
        "model_state_dict": weights(model),
        "optimizer_state_dict": optimizer.state_dict()
        if is_ddp
        else get_optimizer_state_dict(model, optimizer, options=WHOLE),
        "parallel": "ddp" if is_ddp else "fsdp",
    }
    if dist.get_rank() == 0:
        save(state, folder / f"checkpoint_epoch_{epoch}.pt")


def save(state: object, path: Path) -> None:
    """A process that is killed meanwhile leaves the file of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.new")
    torch.save(state, part)
    part.replace(path)


def newest(folder: Path) -> Path | None:
    """The checkpoint of the last epoch; None: there is none."""
    paths = folder.glob("checkpoint_epoch_*.pt")
    return max(paths, key=lambda path: int(path.stem.rpartition("_")[2]), default=None)


def read_checkpoint(path: Path | None, device: torch.device) -> dict[str, Any] | None:
    """What rank 0 reads, on all ranks: other nodes need not see its folder.

    All ranks must call this.

    Raises:
        ValueError: the file is not there, or is no checkpoint.
    """
    answer: list[Any] = [None, ""]
    if dist.get_rank() == 0 and path is not None:
        try:
            answer[0] = torch.load(path, map_location="cpu", weights_only=True)
            answer[0]["epoch"], answer[0]["model_state_dict"], answer[0]["optimizer_state_dict"]
        except Exception as error:  # whatever a broken file makes torch.load raise
            answer = [None, f"{path} is no checkpoint of this example: {error}"]
    dist.broadcast_object_list(answer, device=device)
    if answer[1]:
        raise ValueError(answer[1])
    found: dict[str, Any] | None = answer[0]
    return found


def restore(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Go on from a checkpoint; the number of epochs that are done. All ranks must call this.

    Raises:
        ValueError: it comes from the other kind, whose optimizer is kept otherwise.
    """
    is_ddp = isinstance(model, DistributedDataParallel)
    if (state["parallel"] == "ddp") != is_ddp:
        raise ValueError(
            f"the checkpoint is one of {state['parallel']}: "
            f"{'add' if is_ddp else 'leave out'} --fsdp, as when it was written"
        )
    if isinstance(model, DistributedDataParallel):
        model.module.load_state_dict(state["model_state_dict"])
        optimizer.load_state_dict(state["optimizer_state_dict"])
    else:
        set_model_state_dict(model, state["model_state_dict"], options=WHOLE)
        set_optimizer_state_dict(model, optimizer, state["optimizer_state_dict"], options=WHOLE)
    return int(state["epoch"])
