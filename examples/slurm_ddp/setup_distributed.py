"""Where a process stands among the ranks, by Slurm or torchrun, and how it joins them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, MutableMapping
from datetime import timedelta

import torch
import torch.distributed as dist

JOIN_S = 300
SCONTROL_S = 30


def setup_distributed() -> tuple[int, int, int, torch.device]:
    """Join the others: NCCL where there are GPUs, else gloo. All ranks must call this.

    Returns:
        Rank, world size, local rank, and the device of this rank.
    """
    rank, world_size, local_rank = place(os.environ)
    set_meeting_point(os.environ)
    # What others read, such as a library that is added to this example.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    timeout = timedelta(seconds=JOIN_S)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return rank, world_size, local_rank, torch.device("cpu")
    # A task sees all GPUs of its node, or, where Slurm binds them, its own alone.
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return rank, world_size, local_rank, device


def place(environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, world size and local rank of this process.

    A torchrun inside a Slurm step wins over the step, whose task is torchrun itself. In a step a
    RANK that the job script has exported is the same in all tasks, and is not looked at. In the job
    script itself, outside of srun, there is one process, whatever SLURM_NTASKS says.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_STEP_NUM_TASKS" in environ:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return 0, 1, 0
    rank, world_size, local_rank = (int(environ[name]) for name in names)
    return rank, world_size, local_rank


def set_meeting_point(environ: MutableMapping[str, str]) -> None:
    """MASTER_ADDR and MASTER_PORT, where nobody has set them: the step's first node, or this."""
    if "MASTER_ADDR" not in environ:
        nodes = environ.get("SLURM_STEP_NODELIST")
        environ["MASTER_ADDR"] = first_host(nodes) if nodes else "127.0.0.1"
    environ.setdefault("MASTER_PORT", str(29500 + int(environ.get("SLURM_JOB_ID", "0")) % 100))


def first_host(nodes: str) -> str:
    """The first name of a list such as node[6-7]."""
    command = ["scontrol", "show", "hostnames", nodes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S, check=True)
    return done.stdout.split()[0]
