"""Two GPUs without a GPU, for the ranks of `isles check`: torch computes on the CPU, and NCCL is
gloo, which fails as on machines whose GPUs cannot read each other's memory.

FAKE_P2P says how: `wrong` sums, or sums that `hang`; NCCL_P2P_DISABLE=1 cures both.
"""

import os
import sys
import threading

if "isles.train.check_rank" in sys.orig_argv and "FAKE_P2P" in os.environ:
    import torch
    import torch.distributed as dist

    CPU, join, add = torch.device("cpu"), dist.init_process_group, dist.all_reduce

    def _all_reduce(tensor, **options):
        if not os.environ.get("NCCL_P2P_DISABLE"):
            if os.environ["FAKE_P2P"] == "hang":
                threading.Event().wait()
            if tensor.numel() > 1:
                tensor += 1
        return add(tensor, **options)

    torch.device = lambda *_: CPU
    dist.init_process_group = lambda _, **options: join("gloo", **options)
    dist.is_nccl_available = lambda: True
    dist.all_reduce = _all_reduce
    for name, value in {
        "is_available": True,
        "device_count": 2,
        "set_device": None,
        "mem_get_info": (1, 1),
        "get_device_name": "NVIDIA GeForce RTX 4090",
        "get_device_capability": (8, 9),
        "get_arch_list": ["sm_89"],
        "can_device_access_peer": False,
    }.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.nccl.version = lambda: (2, 27, 3)
