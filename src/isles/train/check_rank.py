"""One rank of a check: `python -m isles.train.check_rank`.

It imports torch, launches a kernel, and writes the result as one JSON line to stdout. Each line of
stdin is an order to join an all-reduce, which it answers with another line. The process exits when
stdin ends, even in the middle of an order.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import threading
import time
from datetime import timedelta
from typing import Any

_SPEND_S = 0.3
"""Seconds for which one size is repeated."""

_TOO_LONG_S = 4.0
"""A size that is expected to take more seconds is skipped."""


def main() -> None:
    """Answer until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--index", type=int, default=0)
    options = parser.parse_args()
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    answers.write(json.dumps(look(options.device, options.index)) + "\n")
    while True:
        answers.write(json.dumps(reduce(json.loads(questions.get()))) + "\n")


def _read(questions: queue.Queue[str]) -> None:
    for line in sys.stdin:
        questions.put(line)
    os._exit(0)  # the caller has gone; the main thread may hang in a driver


def look(device: str, index: int) -> dict[str, Any]:
    """Versions and features of torch, and the result of a first computation on the device.

    Returns:
        torch, cuda, nccl, has_gloo, seconds (of the import). After a failure also failure, and
        stage: import, visible or kernel. On a GPU also gpu, capability, archs, free_bytes, and
        no_peer: other GPUs whose memory it cannot address.
    """
    begin = time.monotonic()
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation can raise anything
        return {"stage": "import", "failure": _line(error)}
    facts: dict[str, Any] = {
        "seconds": time.monotonic() - begin,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "archs": torch.cuda.get_arch_list(),
        "has_gloo": dist.is_available() and dist.is_gloo_available(),
        "has_nccl": dist.is_available() and dist.is_nccl_available(),
        "nccl": None,
    }
    if device == "cpu":
        return {**facts, **_compute(torch.device("cpu"))}
    if not torch.cuda.is_available():
        return {**facts, "stage": "visible", "failure": _why_invisible()}
    if facts["has_nccl"]:
        nccl: Any = torch.cuda.nccl
        facts["nccl"] = ".".join(map(str, nccl.version()))
    try:
        where = torch.device("cuda", index)
        torch.cuda.set_device(where)
        free_bytes, _ = torch.cuda.mem_get_info(where)
        facts |= {
            "gpu": torch.cuda.get_device_name(where),
            "capability": list(torch.cuda.get_device_capability(where)),
            "is_nvidia": torch.version.hip is None,
            "free_bytes": free_bytes,
            "no_peer": [
                other
                for other in range(torch.cuda.device_count())
                if other != index and not torch.cuda.can_device_access_peer(index, other)
            ],
        }
    except Exception as error:  # driver errors have several types
        return {**facts, "stage": "visible", "failure": _line(error)}
    return {**facts, **_compute(where)}


def _compute(device: Any) -> dict[str, Any]:
    # The product of two matrices of small integers, which is exact in every format.
    import torch

    try:
        numbers = (torch.arange(256 * 256, dtype=torch.float64) % 7).reshape(256, 256)
        right = numbers @ numbers
        product = numbers.to(device, torch.float32) @ numbers.to(device, torch.float32)
        half = numbers.to(device, torch.bfloat16) * 2
        is_right = torch.equal(product.cpu().double(), right)
        is_right = is_right and torch.equal(half.cpu().double(), numbers * 2)
    except Exception as error:  # a launch can raise several types
        return {"stage": "kernel", "failure": _line(error)}
    return (
        {} if is_right else {"stage": "kernel", "failure": "the product of two matrices is wrong"}
    )


def _why_invisible() -> str:
    # The message of torch when it looks for a GPU.
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA"
    try:
        cuda: Any = torch.cuda
        cuda.init()
    except Exception as error:  # RuntimeError, AssertionError, the driver's
        return _line(error)
    return "torch does not find a GPU"


def reduce(order: dict[str, Any]) -> dict[str, Any]:
    """Join the other ranks and add up tensors of several sizes.

    Args:
        order: rank, world_size, address and port of rank 0, backend, variables (of the
            environment), index (of the GPU), sizes (bytes), timeout_s.

    Returns:
        rows: for each size its bytes, seconds, and algorithm and bus bandwidth in bytes per second,
        as nccl-tests define them. After a failure: failure, stage (store, group, sum), and on
        rank 0 missing: the ranks that did not connect.
    """
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    rank, world_size, stage = order["rank"], order["world_size"], "store"
    timeout = timedelta(seconds=order["timeout_s"])
    os.environ.update(order["variables"])
    try:
        store = TCPStore(
            order["address"],
            order["port"],
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
        )
        store.set(f"here/{rank}", "1")
        missing = _missing(store, world_size, order["timeout_s"])
        if missing:
            return {"stage": stage, "failure": "not all ranks connected", "missing": missing}
        stage = "group"
        device = torch.device("cpu")
        if order["backend"] == "nccl":
            device = torch.device("cuda", order["index"])
        dist.init_process_group(
            order["backend"], store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        dist.all_reduce(torch.ones(1, device=device))
        stage = "sum"
        return {"rows": _measure(order["sizes"], rank, world_size, device)}
    except Exception as error:  # the libraries' errors have no common type
        return {"stage": stage, "failure": _line(error)}


def _missing(store: Any, world_size: int, timeout_s: float) -> list[int]:
    # Ranks that did not connect in time.
    end = time.monotonic() + timeout_s
    missing = list(range(world_size))
    while missing and time.monotonic() < end:
        missing = [rank for rank in missing if not store.check([f"here/{rank}"])]
        if missing:
            time.sleep(0.02)
    return missing


def _measure(sizes: list[int], rank: int, world_size: int, device: Any) -> list[dict[str, float]]:
    import torch

    rows: list[dict[str, float]] = []
    for size in sizes:
        if rows and rows[-1]["seconds"] * size / rows[-1]["bytes"] > _TOO_LONG_S:
            break
        tensor = torch.full((size // 4,), float(rank + 1), device=device)
        first = _time(tensor, 1)
        expected = world_size * (world_size + 1) / 2
        if not bool((tensor == expected).all()):
            raise RuntimeError(f"the sum of {size} bytes over {world_size} ranks is wrong")
        times = max(1, min(50, int(_SPEND_S / max(first, 1e-6))))
        tensor.zero_()
        seconds = _time(tensor, times) / times
        bus = size / seconds * 2 * (world_size - 1) / world_size
        rows.append({"bytes": size, "seconds": seconds, "algorithm": size / seconds, "bus": bus})
    return rows


def _time(tensor: Any, times: int) -> float:
    # Seconds that `count` all-reduces take on the slowest rank.
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=tensor.device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds.item())


def _line(error: Exception) -> str:
    # The first line that is not empty.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:400]


if __name__ == "__main__":
    main()
