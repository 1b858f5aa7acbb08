"""Check 5 of 5, in every rank: all meet and add up a tensor; then the training takes over.

Started by torchrun as `rank_check.py WORDS…`; the words are those of the training behind `python`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from health import NCCL_FIXES, bullets
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

SIZE = 1 << 18  # numbers in fp32: 1 MiB


def main() -> None:
    """Check, then become the training."""
    if (issue := check()) is not None:
        sys.stderr.write(f"error: {issue}\n")
        sys.stderr.flush()
        os._exit(1)  # a backend that has failed may not let Python end
    # The same process, so torchrun goes on following it, and a new Python: nothing is left of this.
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


def check() -> str | None:
    """What is wrong; None: nothing. All ranks must call this."""
    backend = os.environ["BACKEND"]
    timeout = timedelta(seconds=float(os.environ["CHECK_TIMEOUT"]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # A name space of its own: the training meets in the same store.
    store = PrefixStore("cluster_train", store)
    store.set_timeout(timeout)
    if (issue := compare(store, rank, world_size)) is not None:
        return issue
    began = time.monotonic()
    try:
        device = device_of_rank(backend)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        numbers = torch.full((SIZE,), rank + 1.0, device=device)
        dist.all_reduce(numbers)
        expected = world_size * (world_size + 1) / 2
        if not bool((numbers == expected).all()):
            raise RuntimeError(f"the sum of all ranks is {numbers[0].item()}, not {expected}")
    except Exception as error:  # whatever a backend raises
        place = f"rank {rank} of {world_size} on {socket.gethostname()}"
        text = str(error).strip().splitlines() or [type(error).__name__]
        if backend == "nccl":
            return f"NCCL initialization failed: {place}: {text[0]}{bullets(NCCL_FIXES)}"
        return f"{backend} failed on {place}: {text[0]}\n  fix: LOG_LEVEL=DEBUG says more"
    seconds = time.monotonic() - began
    # Who closes first would cut off one that still reads.
    meet(store, "done", rank, world_size)
    dist.destroy_process_group()
    if int(os.environ["LOCAL_RANK"]) == 0:
        line = f"ranks: {world_size}, an all-reduce over {backend} is right, {seconds:.2f} s"
        print(f"check 5/5 PyTorch distributed: {line}", flush=True)
    return None


def device_of_rank(backend: str) -> torch.device:
    """The GPU of this rank; over gloo the CPU."""
    if backend != "nccl":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def compare(store: Store, rank: int, world_size: int) -> str | None:
    """Whether all nodes have the same torch, Python and configuration."""
    config = hashlib.sha256(Path(os.environ["CHECK_CONFIG"]).read_bytes()).hexdigest()[:12]
    python = ".".join(platform.python_version_tuple()[:2])
    mine = {"torch": torch.__version__, "python": python, "configuration": config}
    store.set(f"facts/{rank}", json.dumps({**mine, "host": socket.gethostname()}))
    first = json.loads(store.get("facts/0"))
    differ = [f"{key} is {mine[key]}, and {first[key]} on {first['host']}" for key in mine]
    differ = [text for text, key in zip(differ, mine, strict=True) if mine[key] != first[key]]
    store.set(f"differs/{rank}", f"{socket.gethostname()}: {'; '.join(differ)}" if differ else "")
    found = sorted({store.get(f"differs/{r}").decode() for r in range(world_size)} - {""})
    if not found:
        return None
    return f"the nodes differ: {' / '.join(found)}\n  fix: make them the same on all nodes"


def meet(store: Store, name: str, rank: int, world_size: int) -> None:
    """Wait until all ranks have come here."""
    store.set(f"{name}/{rank}", "1")
    store.wait([f"{name}/{r}" for r in range(world_size)])


if __name__ == "__main__":
    main()
